"""Token windows -> batches: padding, targets and label masks. NumPy inside, tensors out.

Legend: B batch (micro-batch rows), S sequence, T packed tokens, V vocabulary.

The target of a token is its successor *in the same document*; the last token of a document predicts nothing (-100). So
``shift_labels`` is shifted here, document by document, before anything packs, pads or splits a batch over ranks.

BSHD: one window per row, padded on the right, where a causal mask hides the padding from every real token.

THD: windows back to back in one row of T tokens. ``cu_seq_lens_q`` holds the documents' cumulative real lengths. What
no entry covers stays uninitialised in TransformerEngine's kernels, and a NaN there reaches weight gradients and FP8
scales; so padding at the end of the row is listed as documents of its own, without targets.

    sequence_pad_multiple=1    d0 d0 d0 | d1 d1 | pad pad pad          cu_seq_lens_q        [0, 3, 5, 8]
    sequence_pad_multiple=4    d0 d0 d0 pad | d1 d1 pad pad            cu_seq_lens_q        [0, 3, 5]
                                                                       cu_seq_lens_q_padded [0, 4, 8]
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NotRequired, TypedDict

import numpy as np
import torch


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


IGNORE_INDEX = -100


class Batch(TypedDict):
    """One micro-batch. Tensors are [B, S] in BSHD, [1, T] in THD; the ``NotRequired`` keys are THD's, save the last."""

    input_ids: torch.Tensor
    """int64."""
    labels: torch.Tensor
    """int64, ``input_ids`` after the label masks; -100 = ignored. Not shifted."""
    shift_labels: torch.Tensor
    """int64, ``labels`` shifted left within each document; -100 = predicts nothing."""
    attention_mask: torch.Tensor
    """int64, 1 = token, 0 = padding."""
    cu_seq_lens_q: NotRequired[torch.Tensor]
    """int32 [documents + 1], cumulative real lengths."""
    cu_seq_lens_k: NotRequired[torch.Tensor]
    """The same tensor."""
    cu_seq_lens_q_padded: NotRequired[torch.Tensor]
    """int32 [documents + 1], where each document begins in the buffer; present if sequences are padded one by one."""
    cu_seq_lens_k_padded: NotRequired[torch.Tensor]
    """The same tensor."""
    pad_between_seqs: NotRequired[bool]
    """True with the two keys before; TransformerEngine must be told, or RoPE takes the wrong positions."""
    max_length_q: NotRequired[int]
    """Upper bound of a document's padded length, the same for every batch. BSHD: S of the whole sequences, where a rank
    holds chunks of them (context_parallel.py)."""
    max_length_k: NotRequired[int]
    epoch: NotRequired[int]
    """Epoch of the newest record in the batch; added by the training loader."""


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def build_label_table(
    tokenizer: "PreTrainedTokenizerBase", uppercase_labels: bool, mask_degenerate_bases: bool
) -> np.ndarray | None:
    """The label of every token id, int64 [V]; None if labels are the ids themselves.

    Args:
        tokenizer: must give every base a token of its own, so that a label can be masked at that position only.
        uppercase_labels: ``a c g t`` get the labels of ``A C G T``.
        mask_degenerate_bases: every token other than ``A C G T a c g t`` gets -100: ``N`` and the other ambiguity
            codes, ``@``, ``#``, and the special tokens.

    Raises:
        ValueError: if the tokenizer merges bases or splits one.
    """
    if not (uppercase_labels or mask_degenerate_bases):
        return None

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    bases = {base: ids(base) for base in "ACGTacgt"}
    probe = "ACGTacgtNnAAACCCGGGTTTGATTACA@#gattacaTATATATACGCGCG"
    whole = ids(probe)
    apart = [token for character in probe for token in ids(character)]
    if whole != apart or any(len(tokens) != 1 for tokens in bases.values()):
        raise ValueError(
            f"dataset.uppercase_labels={uppercase_labels} and mask_degenerate_bases={mask_degenerate_bases} need a "
            f"tokenizer with one token per base, but {tokenizer.name_or_path!r} makes {len(whole)} tokens of "
            f"{len(probe)} characters: turn both off, or use tokenizers/nucleotide_fast_tokenizer."
        )
    token_of = {base: tokens[0] for base, tokens in bases.items()}
    table = np.arange(len(tokenizer), dtype=np.int64)
    if mask_degenerate_bases:
        table[:] = IGNORE_INDEX
        table[list(token_of.values())] = list(token_of.values())
    if uppercase_labels:
        for base in "acgt":
            table[token_of[base]] = token_of[base.upper()]
    return table


class BSHDCollator:
    """Windows -> :class:`Batch` [B, S], padded on the right to the longest, then to a multiple."""

    def __init__(self, pad_token_id: int, pad_to_multiple: int = 1, label_table: np.ndarray | None = None):
        """
        Args:
            pad_token_id: id in the padded positions.
            pad_to_multiple: S becomes a multiple of this, in tokens.
            label_table: from :func:`build_label_table`.
        """
        self.pad_token_id = pad_token_id
        self.pad_to_multiple = pad_to_multiple
        self.label_table = label_table

    def __call__(self, windows: Sequence[np.ndarray]) -> Batch:
        """``windows``: B integer arrays of one or more token ids each."""
        size = round_up(max(map(len, windows)), self.pad_to_multiple)
        input_ids_BS = np.full((len(windows), size), self.pad_token_id, dtype=np.int64)
        labels_BS = np.full_like(input_ids_BS, IGNORE_INDEX)
        attention_mask_BS = np.zeros_like(input_ids_BS)
        for row, window in enumerate(windows):
            input_ids_BS[row, : len(window)] = window
            labels_BS[row, : len(window)] = window if self.label_table is None else self.label_table[window]
            attention_mask_BS[row, : len(window)] = 1
        shift_labels_BS = np.full_like(labels_BS, IGNORE_INDEX)
        shift_labels_BS[:, :-1] = labels_BS[:, 1:]
        return Batch(
            input_ids=torch.from_numpy(input_ids_BS),
            labels=torch.from_numpy(labels_BS),
            shift_labels=torch.from_numpy(shift_labels_BS),
            attention_mask=torch.from_numpy(attention_mask_BS),
        )


class THDCollator:
    """Windows -> :class:`Batch` [1, T], back to back, T the same for every batch."""

    def __init__(
        self,
        pad_token_id: int,
        num_tokens: int,
        max_seq_length: int,
        pad_to_multiple: int = 1,
        sequence_pad_multiple: int = 1,
        label_table: np.ndarray | None = None,
    ):
        """
        Args:
            pad_token_id: id in the padded positions.
            num_tokens: budget of a batch, in tokens, the padding of single sequences included.
            max_seq_length: bound of a window's length, in tokens.
            pad_to_multiple: T is ``num_tokens``, rounded up to a multiple of this.
            sequence_pad_multiple: every document is padded on its right to a multiple of this (2 * context-parallel
                size), and so is T. Above 1 the batch has the ``*_padded`` keys.
            label_table: from :func:`build_label_table`.

        Raises:
            ValueError: if the budget cannot hold one padded token.
        """
        if num_tokens < sequence_pad_multiple:
            raise ValueError(
                f"token_micro_batch_size={num_tokens} holds no sequence padded to a multiple of "
                f"{sequence_pad_multiple}: raise it to at least {sequence_pad_multiple}."
            )
        self.pad_token_id = pad_token_id
        self.room = num_tokens // sequence_pad_multiple * sequence_pad_multiple
        self.num_tokens = round_up(num_tokens, math.lcm(pad_to_multiple, sequence_pad_multiple))
        self.max_length = round_up(max_seq_length, sequence_pad_multiple)
        self.sequence_pad_multiple = sequence_pad_multiple
        self.label_table = label_table

    def padded(self, length: int) -> int:
        """Tokens of ``room`` that a document of ``length`` tokens takes."""
        return round_up(length, self.sequence_pad_multiple)

    def __call__(self, windows: Sequence[np.ndarray]) -> Batch:
        """``windows``: integer arrays of one or more token ids each, of at most ``room`` padded tokens in all."""
        lengths = np.array([len(window) for window in windows], dtype=np.int64)
        padded = -(-lengths // self.sequence_pad_multiple) * self.sequence_pad_multiple
        used = int(padded.sum())
        assert used <= self.room and lengths.max() <= self.max_length, (used, self.room, lengths.max(), self.max_length)
        starts = np.cumsum(padded) - padded
        # Documents of padding, none longer than a window, cover the rest of the row.
        filler = np.diff(np.append(np.arange(used, self.num_tokens, self.max_length), self.num_tokens))

        input_ids_T = np.full(self.num_tokens, self.pad_token_id, dtype=np.int64)
        if self.sequence_pad_multiple == 1:
            real_T = np.s_[:used]
        else:
            real_T = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lengths)])
        tokens = np.concatenate(windows)
        input_ids_T[real_T] = tokens
        labels_T = np.full_like(input_ids_T, IGNORE_INDEX)
        labels_T[real_T] = tokens if self.label_table is None else self.label_table[tokens]
        attention_mask_T = np.zeros_like(input_ids_T)
        attention_mask_T[real_T] = 1
        targets_T = labels_T.copy()
        targets_T[starts] = IGNORE_INDEX  # a document's first token is nobody's target
        shift_labels_T = np.full_like(labels_T, IGNORE_INDEX)
        shift_labels_T[:-1] = targets_T[1:]

        cu_seq_lens = cumulative(np.concatenate([lengths, filler]))
        batch = Batch(
            input_ids=torch.from_numpy(input_ids_T)[None],
            labels=torch.from_numpy(labels_T)[None],
            shift_labels=torch.from_numpy(shift_labels_T)[None],
            attention_mask=torch.from_numpy(attention_mask_T)[None],
            cu_seq_lens_q=cu_seq_lens,
            cu_seq_lens_k=cu_seq_lens,
            max_length_q=self.max_length,
            max_length_k=self.max_length,
        )
        if self.sequence_pad_multiple > 1:
            cu_seq_lens_padded = cumulative(np.concatenate([padded, filler]))
            batch["cu_seq_lens_q_padded"] = cu_seq_lens_padded
            batch["cu_seq_lens_k_padded"] = cu_seq_lens_padded
            batch["pad_between_seqs"] = True
        return batch


def cumulative(lengths: np.ndarray) -> torch.Tensor:
    """[n] lengths -> [n + 1] int32 offsets, from 0."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
