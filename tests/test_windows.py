"""Windows against their definition. Pitfall 9: records longer than a window."""

from types import SimpleNamespace

import numpy as np
import pytest

from dataset import load_tokenizer
from windows import ShardState, WindowCutter, WindowStream, is_byte_identity


BOS, EOS = 2, 3


@pytest.fixture(scope="module")
def nucleotides():
    return load_tokenizer("./tokenizers/nucleotide_fast_tokenizer")


class FramingTokenizer:
    """Characters as bytes, with any number of special tokens around them."""

    name_or_path = "framing"

    def __init__(self, prefix: list[int], suffix: list[int], between: list[int] | None = None, **init_kwargs):
        self.prefix, self.suffix, self.between = prefix, suffix, between or []
        self.init_kwargs, self.eos_token_id = init_kwargs, init_kwargs.get("eos_token_id")

    def __len__(self):
        return 300

    def __call__(self, text, add_special_tokens=True, **_):
        ids = list(text.encode())
        if add_special_tokens:
            ids = self.prefix + ids[:2] + self.between + ids[2:] + self.suffix
        return {"input_ids": ids}


def windows_of(cutter: WindowCutter, tokens: np.ndarray) -> list[list[int]]:
    return [window.tolist() for window in cutter.windows(tokens)]


@pytest.mark.parametrize("prefix, suffix", [([BOS], [EOS]), ([BOS], []), ([], [EOS]), ([], []), ([BOS, 1], [EOS, 1])])
@pytest.mark.parametrize("max_seq_length, stride", [(6, 0), (6, 1), (7, 2), (9, 4)])
def test_windows_of_every_length(prefix, suffix, max_seq_length, stride):
    cutter = WindowCutter(FramingTokenizer(prefix, suffix), max_seq_length, stride)
    for length in range(1, 40):
        tokens = np.arange(100, 100 + length)
        windows = windows_of(cutter, tokens)
        assert all(window[: len(prefix)] == prefix and len(window) <= max_seq_length for window in windows)
        assert windows[-1][len(windows[-1]) - len(suffix) :] == suffix
        contents = [window[len(prefix) :] for window in windows]
        contents[-1] = contents[-1][: len(contents[-1]) - len(suffix)]
        assert not any(set(content) & {BOS, EOS} for content in contents), "the suffix ends the record only"
        seen = contents[0]
        for content in contents[1:]:
            assert content[:stride] == seen[len(seen) - stride :]
            assert len(content) > stride, "every window brings a new token"
            seen = seen + content[stride:]
        assert seen == tokens.tolist()
        # Full windows, save the last and, where only a suffix would be left over, the one before it.
        assert all(len(window) == max_seq_length for window in windows[:-2])
        assert len(windows) == 1 or len(windows[-2]) >= max_seq_length - len(suffix)


def test_record_at_the_limit(nucleotides):
    cutter = WindowCutter(nucleotides, max_seq_length=6, stride=0)
    assert windows_of(cutter, np.frombuffer(b"ACGT", np.uint8)) == [[BOS, *b"ACGT", EOS]]
    assert windows_of(cutter, np.frombuffer(b"ACGTA", np.uint8)) == [[BOS, *b"ACGT"], [BOS, *b"A", EOS]]
    assert windows_of(cutter, np.frombuffer(b"ACGTAC", np.uint8)) == [[BOS, *b"ACGTA"], [BOS, *b"C", EOS]]


def test_windows_that_would_not_advance(nucleotides):
    with pytest.raises(ValueError, match=r"max_seq_length=6 must exceed dataset.stride=4 plus the 2 special tokens"):
        WindowCutter(nucleotides, max_seq_length=6, stride=4)


def test_special_tokens_inside_a_text_are_refused():
    with pytest.raises(ValueError, match="inside a text"):
        WindowCutter(FramingTokenizer([BOS], [EOS], between=[5]), 6, 0)


@pytest.mark.parametrize(
    "suffix, init_kwargs, expected",
    [
        ([], {"closes_documents": True, "eos_token_id": EOS}, [EOS]),
        ([], {"closes_documents": False, "eos_token_id": EOS}, []),
        ([], {"eos_token_id": EOS}, []),  # Llama-3's
        ([7, EOS], {"closes_documents": True, "eos_token_id": EOS}, [7, EOS]),  # not twice
    ],
)
def test_what_closes_a_document(suffix, init_kwargs, expected):
    assert WindowCutter(FramingTokenizer([BOS], suffix, **init_kwargs), 6, 0).suffix.tolist() == expected


def test_no_eos_to_close_documents_with():
    with pytest.raises(ValueError, match="closes_documents, but no eos_token"):
        WindowCutter(FramingTokenizer([BOS], [], closes_documents=True), 6, 0)


def test_byte_path_equals_the_tokenizer(nucleotides):
    assert is_byte_identity(nucleotides)
    cutter = WindowCutter(nucleotides, 16, 0)
    rng = np.random.default_rng(0)
    alphabet = [*map(chr, range(128)), *"é€𝄞ÿ\u2028"]
    for text in ["ACGTacgtN", "  a\r\n b\t ", "<s></s><unk>", "".join(rng.choice(alphabet, size=2000))]:
        assert cutter.encode(text).tolist() == nucleotides(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "change", [str.lower, str.strip, lambda text: text.replace("AC", "X"), lambda text: " " + text]
)
def test_byte_path_is_not_taken_for_other_tokenizers(change):
    class Changing(SimpleNamespace):
        def __len__(self):
            return 256

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": list(change(text).encode())}

    assert not is_byte_identity(Changing())


def test_stream_takes_windows_in_parts_and_counts_skipped_records(nucleotides):
    cutter = WindowCutter(nucleotides, max_seq_length=6, stride=1)
    records = iter([(0, 0, ""), (0, 4, "ACGTTGCA"), (0, 8, None), (1, 3, "GG")])
    stream = WindowStream(lambda: next(records, None), cutter, ShardState(0, 0), step=4)
    assert stream.peek().tolist() == [BOS, *b"ACGTT"]
    assert stream.take(4).tolist() == [BOS, *b"ACG"]
    assert stream.state == ShardState(epoch=0, position=4, start=0, taken=4)
    assert stream.take(2).tolist() == [*b"TT"]
    assert stream.state == ShardState(epoch=0, position=4, start=4, taken=0)
    assert stream.take(len(stream.peek())).tolist() == [BOS, *b"TGCA", EOS]
    assert stream.state == ShardState(epoch=0, position=8)
    assert stream.newest_epoch == 0
    assert stream.peek().tolist() == [BOS, *b"GG", EOS]
    stream.take(4)
    assert stream.newest_epoch == 1 and stream.skipped == 2 and stream.peek() is None


def test_stream_notices_that_a_record_has_shrunk(nucleotides):
    stream = WindowStream(lambda: (0, 0, "ACG"), WindowCutter(nucleotides, 6, 0), ShardState(0, 0, start=5), step=1)
    with pytest.raises(ValueError, match="has changed since"):
        stream.peek()
