"""Log-probabilities of given texts, token by token, packed, over any number of ranks.

Legend: B rows, S columns, T packed tokens, D model width, V vocabulary; c tokens of one chunk.

A text becomes windows (windows.py). With ``stride=0`` they do not overlap, and a window's tokens are those that
validation scores in training: every token with a predecessor in its window. With a stride, consecutive windows share
that many tokens, which give the later window context and are scored in the earlier one only.
Sums are in double precision, so that neither batches nor ranks show in them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from collator import IGNORE_INDEX, Batch, BSHDCollator, THDCollator
from loss import LOGITS_PER_CHUNK
from training import to_device
from windows import WindowCutter


@torch.no_grad()
def token_log_probs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """log p of every target: FP32, of the shape of ``batch["shift_labels"]``; 0 where there is no target.

    Args:
        model: one of this project's, in evaluation mode.
        batch: on the model's device. The logits are never held whole.
    """
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "shift_labels")}
    hidden_TD = model.model(**inputs).last_hidden_state.flatten(0, 1)
    targets_T, weight_VD = batch["shift_labels"].flatten(), model.lm_head.weight
    log_p_T = torch.zeros(targets_T.shape, dtype=torch.float32, device=targets_T.device)
    per_chunk = LOGITS_PER_CHUNK.get(hidden_TD.device.type, LOGITS_PER_CHUNK["cuda"])
    chunk_tokens = max(1, per_chunk // weight_VD.shape[0])
    for hidden_cD, targets_c, log_p_c in zip(*(x.split(chunk_tokens) for x in (hidden_TD, targets_T, log_p_T))):
        logits_cV = (hidden_cD @ weight_VD.t()).float()
        chosen_c = logits_cV.gather(1, targets_c.clamp(min=0).unsqueeze(1)).squeeze(1)
        log_p_c.copy_(torch.where(targets_c == IGNORE_INDEX, 0.0, chosen_c - logits_cV.logsumexp(dim=1)))
    return log_p_T.view(batch["shift_labels"].shape)


class Window(NamedTuple):
    """A window of a record."""

    record: int
    tokens: np.ndarray
    scored_before: int
    """Targets at its beginning that the window before has scored."""


class WindowBatch(NamedTuple):
    """A collated batch and what is in it."""

    batch: Batch
    windows: list[Window]
    spans: list[tuple[int, int, int]]
    """Row, first column and end of each window in the batch."""


@dataclass
class Scores:
    """Per record, over all ranks, from record 0 on."""

    log_likelihood: np.ndarray
    """float64, nats: the sum of log p of the record's targets."""
    num_targets: np.ndarray
    """int64."""

    @property
    def loss(self) -> float:
        """Nats per target."""
        return float(-self.log_likelihood.sum() / self.num_targets.sum())


def cut_windows(texts: Iterable[str | None], cutter: WindowCutter) -> Iterator[Window]:
    """The windows of all texts in order; empty texts have none."""
    repeated = max(len(cutter.prefix) - 1, 0) + cutter.stride if cutter.stride else 0
    for record, text in enumerate(texts):
        tokens = cutter.encode(text) if text else ()
        start: int | None = 0 if len(tokens) else None
        while start is not None:
            first = start == 0
            window, start = cutter.window(tokens, start)
            yield Window(record, window, 0 if first else repeated)


def collate_windows(
    windows: Iterable[Window], collate: BSHDCollator | THDCollator, max_rows: int
) -> Iterator[WindowBatch]:
    """Batches of consecutive windows: ``max_rows`` rows (BSHD), or as many windows as fit into a row (THD)."""
    thd = isinstance(collate, THDCollator)
    held: list[Window] = []
    used = 0
    for window in windows:
        length = len(window.tokens)
        if held and (used + length > collate.room if thd else len(held) == max_rows):
            yield _collate(held, collate, thd)
            held, used = [], 0
        held.append(window)
        used += length
    if held:
        yield _collate(held, collate, thd)


def _collate(windows: list[Window], collate: BSHDCollator | THDCollator, thd: bool) -> WindowBatch:
    lengths = [len(window.tokens) for window in windows]
    starts = np.cumsum(lengths) - lengths if thd else np.zeros_like(lengths)
    rows = [0] * len(windows) if thd else range(len(windows))
    spans = [(row, int(start), int(start) + length) for row, start, length in zip(rows, starts, lengths, strict=True)]
    batch = collate([window.tokens for window in windows])
    for window, (row, start, _) in zip(windows, spans, strict=True):
        batch["shift_labels"][row, start : start + window.scored_before] = IGNORE_INDEX
    return WindowBatch(batch, windows, spans)


def score_texts(
    model: nn.Module,
    texts: Iterable[str | None],
    cutter: WindowCutter,
    collate: BSHDCollator | THDCollator,
    max_rows: int,
    device: torch.device,
) -> Scores:
    """Scores every text; all ranks call it, batch k is rank k mod n's, and all get the whole result.

    Args:
        model: whole on every rank.
        texts: the same on every rank.
        cutter, collate, max_rows: how texts become batches. ``collate.room`` must hold a window.
        device: of the model.

    Raises:
        ValueError: no text has a target.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    sums: dict[int, list[float]] = {}
    num_records = 0

    def counted() -> Iterator[str | None]:
        nonlocal num_records
        for text in texts:
            num_records += 1
            yield text

    for index, (batch, windows, spans) in enumerate(collate_windows(cut_windows(counted(), cutter), collate, max_rows)):
        if index % world_size != rank:
            continue
        valid = (batch["shift_labels"] != IGNORE_INDEX).numpy()
        log_p = token_log_probs(model, to_device(batch, device)).double().cpu().numpy()
        for window, (row, start, end) in zip(windows, spans, strict=True):
            record = sums.setdefault(window.record, [0.0, 0])
            record[0] += log_p[row, start:end].sum()
            record[1] += int(valid[row, start:end].sum())
    return _joined(sums, num_records, world_size)


def _joined(sums: dict[int, list[float]], num_records: int, world_size: int) -> Scores:
    gathered: list[Any] = [sums]
    if world_size > 1:
        gathered = [None] * world_size
        dist.all_gather_object(gathered, sums)
    scores = Scores(np.zeros(num_records), np.zeros(num_records, dtype=np.int64))
    for of_rank in gathered:
        for record, (log_likelihood, num_targets) in of_rank.items():
            scores.log_likelihood[record] += log_likelihood
            scores.num_targets[record] += num_targets
    if not scores.num_targets.sum():
        raise ValueError(f"none of the {num_records} records has a token to score: check the data and the label masks.")
    return scores
