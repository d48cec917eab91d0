"""Records -> tokens -> windows.

A window is what the model sees at once: the prefix (BOS), then a stretch of the record, and the suffix (EOS) where the
record ends. It holds up to ``max_seq_length`` tokens; consecutive windows of a record share ``stride`` tokens of the
record. With max_seq_length=6, stride=1 and the record ``abcdefg``:

    BOS a b c d e
                BOS e f g EOS

Prefix and suffix are what the tokenizer puts around a text. One that leaves a text open, as ``generate`` needs it, may
still have records closed with its EOS: by ``"closes_documents": true`` in its tokenizer_config.json.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase


CLOSES_DOCUMENTS = "closes_documents"
"""Key of tokenizer_config.json."""


def is_byte_identity(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether every text's ids are its UTF-8 bytes.

    256 ids leave no room for a merged token if every byte has its own. The probe holds every ordered pair of ASCII
    characters, so that a normaliser, a prefix space or a split that drops characters would show.
    """
    if len(tokenizer) != 256:
        return False
    ascii_pairs = "".join(chr(first) + chr(second) for first in range(128) for second in range(128))
    probe = f" \n{ascii_pairs}é€𝄞ÿ¡\n "
    return tokenizer(probe, add_special_tokens=False)["input_ids"] == list(probe.encode())


class WindowCutter:
    """Tokens and windows of one record.

    Attributes:
        prefix, suffix: what stands before every window and after a record; int64 arrays, possibly empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, stride: int):
        """
        Args:
            tokenizer: its special tokens are found by encoding a probe with and without them.
            max_seq_length: tokens per window, special tokens included.
            stride: tokens that consecutive windows share.

        Raises:
            ValueError: if windows would not advance, or a tokenizer that closes documents has no EOS.
        """
        plain = tokenizer("ACGT", add_special_tokens=False)["input_ids"]
        framed = tokenizer("ACGT")["input_ids"]
        places = [i for i in range(len(framed)) if framed[i : i + len(plain)] == plain]
        if not places:
            raise ValueError(f"tokenizer {tokenizer.name_or_path!r} adds special tokens inside a text: not supported.")
        self.prefix = np.array(framed[: places[0]], dtype=np.int64)
        suffix = framed[places[0] + len(plain) :]
        if not suffix and tokenizer.init_kwargs.get(CLOSES_DOCUMENTS):
            if tokenizer.eos_token_id is None:
                raise ValueError(
                    f"tokenizer {tokenizer.name_or_path!r} has {CLOSES_DOCUMENTS}, but no eos_token: set it."
                )
            suffix = [tokenizer.eos_token_id]
        self.suffix = np.array(suffix, dtype=np.int64)
        self.max_seq_length = max_seq_length
        self.stride = stride
        self._room = max_seq_length - len(self.prefix)
        if self._room - len(self.suffix) <= stride:
            raise ValueError(
                f"dataset.max_seq_length={max_seq_length} must exceed dataset.stride={stride} plus the "
                f"{len(self.prefix) + len(self.suffix)} special tokens of a record: raise it, or lower the stride."
            )
        self._tokenizer = tokenizer
        self._bytes = is_byte_identity(tokenizer)

    def encode(self, text: str) -> np.ndarray:
        """[tokens] ids of a record, without special tokens; uint8 for a byte tokenizer, int64 otherwise."""
        if self._bytes:
            return np.frombuffer(text.encode(), dtype=np.uint8)
        ids = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return np.array(ids, dtype=np.int64)

    def window_end(self, start: int, length: int) -> int:
        """End of the window that begins at token ``start`` of a record of ``length`` tokens.

        A window that is not the last leaves at least one token, so that no window holds only what the one before held.
        """
        if length - start <= self._room - len(self.suffix):
            return length
        return min(start + self._room, length - 1)

    def window(self, tokens: np.ndarray, start: int) -> tuple[np.ndarray, int | None]:
        """The window that begins at token ``start``, and where the next one begins; None after the last."""
        end = self.window_end(start, len(tokens))
        if end < len(tokens):
            return np.concatenate([self.prefix, tokens[start:end]]), end - self.stride
        return np.concatenate([self.prefix, tokens[start:end], self.suffix]), None

    def windows(self, tokens: np.ndarray) -> Iterator[np.ndarray]:
        """Every window of a record of one or more tokens."""
        start: int | None = 0
        while start is not None:
            window, start = self.window(tokens, start)
            yield window


@dataclass
class ShardState:
    """The place of a shard's next token."""

    epoch: int
    position: int
    """Of the record in its epoch; past the epoch's end it means one in a later epoch."""
    start: int = 0
    """First token of the window, counted in the record without special tokens."""
    taken: int = 0
    """Tokens of the window, special tokens included, that an earlier micro-batch took."""
    batches: int = 0
    """Micro-batches handed out."""


class WindowStream:
    """The windows of a sequence of records, taken whole or in parts."""

    def __init__(
        self,
        next_record: Callable[[], tuple[int, int, str | None] | None],
        cutter: WindowCutter,
        state: ShardState,
        step: int,
    ):
        """
        Args:
            next_record: gives (epoch, position, text), beginning at the state's; None at the end.
            cutter: makes windows.
            state: where to begin; kept up to date.
            step: from the position of one record to that of the next.
        """
        self._next_record = next_record
        self._cutter = cutter
        self._step = step
        self._tokens: np.ndarray | None = None
        self._window: np.ndarray | None = None
        self._next_start: int | None = None
        self.state = state
        self.newest_epoch = state.epoch
        self.skipped = 0

    def peek(self) -> np.ndarray | None:
        """What is left of the current window, at least one token; None after the last record."""
        if self._window is None:
            if self._tokens is None and not self._load():
                return None
            window, self._next_start = self._cutter.window(self._tokens, self.state.start)
            self._window = window[self.state.taken :]
        return self._window

    def take(self, count: int) -> np.ndarray:
        """Moves past the first ``count`` tokens of :meth:`peek` and returns them."""
        part, state = self._window[:count], self.state
        self.newest_epoch = max(self.newest_epoch, state.epoch)
        if count < len(self._window):
            self._window = self._window[count:]
            state.taken += count
            return part
        self._window = None
        state.taken = 0
        if self._next_start is None:
            self._tokens = None
            state.position, state.start = state.position + self._step, 0
        else:
            state.start = self._next_start
        return part

    def _load(self) -> bool:
        while (record := self._next_record()) is not None:
            epoch, position, text = record
            tokens = self._cutter.encode(text) if text else None
            if tokens is not None and len(tokens) > self.state.start:
                self.state.epoch, self.state.position, self._tokens = epoch, position, tokens
                return True
            if self.state.start:
                raise ValueError(
                    f"record {position} of epoch {epoch} ends before token {self.state.start}, where the checkpoint "
                    "continues: the data set has changed since. Restore it, or start a new run."
                )
            self.skipped += 1
        return False
