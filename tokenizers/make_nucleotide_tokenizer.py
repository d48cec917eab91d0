"""Writes ``tokenizers/nucleotide_fast_tokenizer``: the id of every token is the value of its UTF-8 byte.

Run ``python tokenizers/make_nucleotide_tokenizer.py`` to write the folder again; its files are part of the project.

The 256 ids are the 256 byte values, so ``A`` is 65 and ``a`` is 97. Four ASCII control characters double as the special
tokens, each in the part that ASCII gave it:

    0   NUL  padding               2   STX  start of text, beginning of a record (BOS)
    26  SUB  substitute (UNK)      3   ETX  end of text, end of a record (EOS)

Since a special token is its own byte, ``encode`` equals ``text.encode()`` for every text without exception, and the
loader may take that path. A record with one of these four characters has the special token there: sequence files have
none.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


PAD, BOS, EOS, UNK = "\x00", "\x02", "\x03", "\x1a"


def byte_characters() -> dict[int, str]:
    """The printable character by which ``tokenizers``' ByteLevel step writes each byte (the rule of GPT-2).

    Printable Latin-1 characters stand for themselves, the other bytes, in order, for U+0100, U+0101, ....
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def build() -> PreTrainedTokenizerFast:
    """The tokenizer. BOS before a text, nothing after it: windows.py closes records (``closes_documents``)."""
    special = {ord(token): token for token in (PAD, BOS, EOS, UNK)}
    vocabulary = {character: byte for byte, character in (byte_characters() | special).items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special.values()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[BOS, "$A"],
        pair=[BOS, "$A", EOS, BOS, "$B"],
        special_tokens=[(BOS, ord(BOS)), (EOS, ord(EOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        closes_documents=True,
    )


if __name__ == "__main__":
    build().save_pretrained(str(Path(__file__).resolve().parent / "nucleotide_fast_tokenizer"))
