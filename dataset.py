"""Records -> tokens -> windows -> micro-batches, as a stream that depends on (data, seed, position) alone.

Shards
    Micro-batch k of the run comes from shard k mod ``num_shards``; each shard reads its records (records.py), cuts them
    (windows.py) and packs them by itself, without end. Rank r of n serves shards r, r + n, ... in turn; its loader
    workers share these likewise. So neither ranks, workers nor accumulation steps change the sequence of micro-batches.

State
    A shard's state is the place of its next token: epoch, position of the record in the epoch, first token of the
    window, tokens of the window that an earlier micro-batch took. No token is stored, so states are a few integers, and
    the states of all ranks, joined, continue at any number of ranks and workers that divides ``num_shards``.
"""

import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from collator import IGNORE_INDEX, Batch, BSHDCollator, THDCollator, build_label_table, round_up
from config import TrainConfig
from distributed import own_rank
from errors import ConfigError
from paths import missing_path, project_path
from preemption import hidden_from_children
from records import RecordFeed, Records, open_records
from windows import ShardState, WindowCutter, WindowStream


logger = logging.getLogger(__name__)

OTHER_VALIDATION = "Set validation.load_dataset_kwargs to data that fits, or validation.enabled=false."


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder (below the working or the project folder) or of a Hub name.

    Raises:
        ConfigError: if there is none.
    """
    path = project_path(name_or_path)
    if missing_path(name_or_path):
        raise ConfigError(f"dataset.tokenizer_name_or_path={name_or_path!r}: no such folder.")
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers and tokenizers raise errors of many kinds
        raise ConfigError(
            f"dataset.tokenizer_name_or_path={name_or_path!r} is no tokenizer ({type(error).__name__}: {error}): give "
            "a folder with tokenizer.json, or a Hub name that this machine can reach (gated ones need HF_TOKEN)."
        ) from error


class Packer:
    """Takes the windows of one micro-batch from a stream and collates them."""

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: PreTrainedTokenizerBase,
        pad_to_multiple: int,
        sequence_pad_multiple: int,
        split: bool,
    ):
        """
        Args:
            config: format, batch size and label masks.
            tokenizer: for the padding token and the label masks.
            pad_to_multiple: S (BSHD) or T (THD) becomes a multiple of this.
            sequence_pad_multiple: the length of every sequence becomes a multiple of this.
            split: THD: cut the last window, so that the batch is full. Otherwise the budget is at least a window.
        """
        data = config.dataset
        # Padding is masked everywhere, so any id will do where the tokenizer has none (Llama-3's).
        pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        pad_token_id = 0 if pad_token_id is None else pad_token_id
        label_table = build_label_table(tokenizer, data.uppercase_labels, data.mask_degenerate_bases)
        self._split = split
        self.collate: BSHDCollator | THDCollator
        if config.use_sequence_packing:
            budget = config.token_micro_batch_size
            if not split:
                budget = max(budget, round_up(data.max_seq_length, sequence_pad_multiple))
            self.collate = THDCollator(
                pad_token_id, budget, data.max_seq_length, pad_to_multiple, sequence_pad_multiple, label_table
            )
        else:
            self._rows = data.micro_batch_size
            multiple = math.lcm(pad_to_multiple, sequence_pad_multiple)
            self.collate = BSHDCollator(pad_token_id, multiple, label_table)

    def count_targets(self, window: np.ndarray) -> int:
        """Valid targets of a whole window: its tokens after the first that have a label."""
        table = self.collate.label_table
        return len(window) - 1 if table is None else int((table[window[1:]] != IGNORE_INDEX).sum())

    def next_windows(self, stream: WindowStream) -> list[np.ndarray]:
        """The windows of the next micro-batch; fewer, or none, where the stream ends."""
        windows: list[np.ndarray] = []
        if isinstance(self.collate, BSHDCollator):
            while len(windows) < self._rows and (window := stream.peek()) is not None:
                windows.append(stream.take(len(window)))
            return windows
        room = self.collate.room
        while room and (window := stream.peek()) is not None:
            count = len(window)
            if self.collate.padded(count) > room:
                if not self._split:
                    break
                count = room
            windows.append(stream.take(count))
            room -= self.collate.padded(count)
        return windows


class ShardedDataset(IterableDataset):
    """The micro-batches of one data-parallel rank, without end; each loader worker yields its share of them in turn."""

    def __init__(
        self,
        records: Records,
        cutter: WindowCutter,
        packer: Packer,
        seed: int,
        buffer_size: int,
        num_shards: int,
        dp_rank: int,
        dp_size: int,
    ):
        """
        Args:
            records, cutter, packer: the three stages.
            seed, buffer_size: of the record order.
            num_shards: of the whole run; a multiple of ``dp_size`` * workers.
            dp_rank, dp_size: this rank's place among the data-parallel ranks.
        """
        self._records = records
        self._cutter = cutter
        self._packer = packer
        self._seed = seed
        self._buffer_size = buffer_size
        self._num_shards = num_shards
        self.shards = list(range(dp_rank, num_shards, dp_size))
        self.load_state_dict({"shards": {shard: [0, shard] for shard in self.shards}})

    def state_dict(self) -> dict[str, Any]:
        """``{"shards": {shard: [epoch, position, start, taken, batches]}}`` of the shards of this process."""
        return {"shards": {shard: list(asdict(self._states[shard]).values()) for shard in self._own_shards()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the states of this rank's shards from those of (at least) these."""
        self._states = {shard: ShardState(*state["shards"][shard]) for shard in self.shards}
        # Shards take turns, so the next one is the first of those that have had the fewest.
        turns = [self._states[shard].batches for shard in self.shards]
        self._turn = turns.index(min(turns))

    def _own_shards(self) -> list[int]:
        """The shards of this process (a loader worker, or the only one), in the order of their turns."""
        worker = get_worker_info()
        order = self.shards[self._turn :] + self.shards[: self._turn]
        return order if worker is None else order[worker.id :: worker.num_workers]

    def __iter__(self) -> Iterator[Batch]:
        own = self._own_shards()
        starts = {shard: (self._states[shard].epoch, self._states[shard].position) for shard in own}
        feed = RecordFeed(self._records, self._seed, self._buffer_size, self._num_shards, starts)
        streams = {
            shard: WindowStream(
                lambda shard=shard: feed.next(shard), self._cutter, replace(self._states[shard]), self._num_shards
            )
            for shard in own
        }
        while True:
            for shard, stream in streams.items():
                skipped = stream.skipped
                batch = self._packer.collate(self._packer.next_windows(stream))
                stream.state.batches += 1
                self._states[shard] = replace(stream.state)
                yield batch | {"epoch": stream.newest_epoch, "skipped_records": stream.skipped - skipped}


class TrainLoader:
    """An endless iterator over a rank's micro-batches that knows its place in the data.

    Attributes:
        skipped_records: empty or null records met so far.
    """

    def __init__(
        self,
        dataset: ShardedDataset,
        num_workers: int,
        stateful: bool,
        order: dict[str, int | None],
        global_batch: str,
    ):
        """
        Args:
            dataset: the rank's micro-batches.
            num_workers: loader processes; 0 reads in this one.
            stateful: carry the state, through ``StatefulDataLoader``.
            order: the settings that a state depends on.
            global_batch: the size of one optimiser step, in words; a resumed run says if it has changed.
        """
        self._dataset = dataset
        self._num_workers = num_workers
        self._stateful = stateful
        self._order = order
        self._global_batch = global_batch
        self._loader: DataLoader | StatefulDataLoader | None = None
        self._iterator: Iterator | None = None
        self._batches = 0
        self.skipped_records = 0

    def __iter__(self) -> "TrainLoader":
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            with warnings.catch_warnings(), hidden_from_children():
                # torchdata 0.11 calls torch.set_vital, which torch 2.13 deprecates. Goes with the next torchdata.
                warnings.filterwarnings("ignore", "'set_vital' is deprecated")
                self._loader = (StatefulDataLoader if self._stateful else DataLoader)(
                    self._dataset,
                    batch_size=None,
                    num_workers=self._num_workers,
                    pin_memory=torch.cuda.is_available(),
                    generator=torch.Generator(),  # else it draws from the default one, which a resumed run restores
                )
                self._iterator = iter(self._loader)
        batch = next(self._iterator)
        self._batches += 1
        if skipped := batch.pop("skipped_records"):
            if not self.skipped_records:
                logger.warning("the data set has empty or null records; they are skipped and counted.")
            self.skipped_records += skipped
        return batch

    def close(self) -> None:
        """Ends the loader processes."""
        iterator, self._iterator, self._loader = self._iterator, None, None
        if iterator is not None and self._num_workers:
            iterator._shutdown_workers()  # asks them, and waits for a few seconds
            for worker in iterator._workers:
                worker.kill()  # hidden_from_children: torch's SIGTERM does not reach them
                worker.join()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as of the last batch handed out; in it ``{"shards": {shard: integers}}``."""
        if not self._stateful:
            raise RuntimeError("the position in the data is not kept: set dataset.use_stateful_dataloader=true.")
        if self._iterator is None:
            shards = self._dataset.state_dict()["shards"]
        else:
            shards = dict(sorted(find_shard_states(self._loader.state_dict())))
            batches = sum(state[-1] for state in shards.values())
            if list(shards) != self._dataset.shards or batches != self._batches:
                raise RuntimeError(
                    f"torchdata's StatefulDataLoader reports {batches} micro-batches of the shards {list(shards)}, "
                    f"but {self._batches} of the shards {self._dataset.shards} were handed out: this torchdata keeps "
                    "worker states differently. Install the version in requirements.txt."
                )
        return {
            "order": dict(self._order),
            "global_batch": self._global_batch,
            "shards": {shard: list(state) for shard, state in shards.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state merged over all ranks (:func:`merge_loader_states`), of any data-parallel size.

        Raises:
            ValueError: if the data order has changed, or a shard is missing.
        """
        changed = [
            f"{name} was {state['order'].get(name)} and is {value}"
            for name, value in self._order.items()
            if state["order"].get(name) != value
        ]
        if changed:
            raise ValueError(
                f"the checkpoint's place in the data has no meaning in another data order: {'; '.join(changed)}. "
                "Restore these settings of dataset and seed, or start a new run in another checkpoint.ckpt_dir."
            )
        missing = sorted(set(self._dataset.shards) - set(state["shards"]))
        if missing:
            raise ValueError(
                f"the checkpoint has no data state of shards {missing}: the states of some ranks are missing."
            )
        saved = state.get("global_batch", self._global_batch)  # older checkpoints lack it
        if saved != self._global_batch and own_rank() == 0:
            logger.warning(
                "the global batch was %s and is %s: change grad_acc_steps to keep it, or the learning rate to suit it",
                saved,
                self._global_batch,
            )
        self.close()
        self._dataset.load_state_dict(state)
        self._batches = sum(state["shards"][shard][-1] for shard in self._dataset.shards)


def find_shard_states(node: Any) -> Iterator[tuple[int, list[int]]]:
    """The (shard, state) pairs inside a DataLoader's state, wherever it keeps the states of the workers' data sets."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from value.items() if key == "shards" else find_shard_states(value)


def merge_loader_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the :meth:`TrainLoader.state_dict` of all ranks."""
    return states[0] | {"shards": {s: value for state in states for s, value in state["shards"].items()}}


class ValidationLoader:
    """A finite pass over all windows in record order; each iteration is a new one.

    Micro-batch k goes to rank k mod dp_size, so all ranks together score the same windows for every dp_size.
    """

    def __init__(
        self,
        records: Records,
        cutter: WindowCutter,
        packer: Packer,
        dp_rank: int,
        dp_size: int,
        max_batches: int | None,
    ):
        """``max_batches``: bound of the micro-batches of all ranks together."""
        self._records = records
        self._cutter = cutter
        self._packer = packer
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._max_batches = max_batches

    def __iter__(self) -> Iterator[Batch]:
        texts = (text for array in self._records.scan(0) for text in array.to_pylist())
        numbered = ((0, position, text) for position, text in enumerate(texts))
        stream = WindowStream(lambda: next(numbered, None), self._cutter, ShardState(0, 0), 1)
        k = 0
        while k != self._max_batches and (windows := self._packer.next_windows(stream)):
            if k % self._dp_size == self._dp_rank:
                yield self._packer.collate(windows)
            k += 1


def require_data(
    records: Records, cutter: WindowCutter, packer: Packer, windows: int, tokens: int, targets: int, purpose: str
) -> None:
    """Reads on until ``windows`` windows, ``tokens`` tokens and ``targets`` valid targets are seen.

    Raises:
        ConfigError: if the data set holds fewer.
    """
    num_windows = num_tokens = num_targets = num_records = num_empty = 0
    for array in records.scan(0):
        for text in array.to_pylist():
            ids = cutter.encode(text) if text else ()
            num_records, num_empty = num_records + 1, num_empty + (len(ids) == 0)
            for window in cutter.windows(ids) if len(ids) else ():
                num_windows, num_tokens = num_windows + 1, num_tokens + len(window)
                num_targets += packer.count_targets(window)
                if num_windows >= windows and num_tokens >= tokens and num_targets >= targets:
                    return
    if not num_windows:
        raise ConfigError(
            f"data set {records.name!r} has no usable record: {num_empty} of {num_records} are empty or null."
        )
    if num_windows < windows or num_tokens < tokens:
        raise ConfigError(
            f"data set {records.name!r} holds {num_windows} windows with {num_tokens} tokens in all, fewer than "
            f"{purpose}: use more data, fewer grad_acc_steps or ranks, or a smaller micro-batch."
        )
    raise ConfigError(
        f"data set {records.name!r} has no valid target in its {num_windows} windows: there is nothing to learn. Check "
        "the texts and the label masks (dataset.mask_degenerate_bases)."
    )


def build_train_loader(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    dp_rank: int,
    dp_size: int,
    pad_to_multiple: int = 1,
    sequence_pad_multiple: int = 1,
) -> TrainLoader:
    """The training data of data-parallel rank ``dp_rank`` of ``dp_size``: an endless stream of :class:`Batch`.

    Args:
        config: reads ``dataset``, ``seed``, ``grad_acc_steps`` and ``use_sequence_packing``.
        tokenizer: from :func:`load_tokenizer`.
        dp_rank, dp_size: ranks that share a batch (context parallel) have the same ``dp_rank``.
        pad_to_multiple: S (BSHD) or T (THD) becomes a multiple of this, in tokens.
        sequence_pad_multiple: the length of every sequence becomes a multiple of this, in tokens (context parallel).

    Raises:
        ConfigError: if the data set cannot be read, is smaller than one global batch, has no valid target, or its
            shards cannot be divided.
    """
    data = config.dataset
    streams = dp_size * max(data.num_workers, 1)
    if data.num_shards % streams:
        raise ConfigError(
            f"dataset.num_shards={data.num_shards} must be a multiple of data-parallel size {dp_size} * workers "
            f"{max(data.num_workers, 1)} = {streams}."
        )
    records = open_records(data.load_dataset_kwargs, data.text_column)
    cutter = WindowCutter(tokenizer, data.max_seq_length, data.stride)
    packer = Packer(config, tokenizer, pad_to_multiple, sequence_pad_multiple, data.split_last_document)
    micro_batches = dp_size * config.grad_acc_steps
    factors = f"{dp_size} data-parallel ranks * {config.grad_acc_steps} grad_acc_steps"
    if config.use_sequence_packing:
        tokens = config.token_micro_batch_size
        global_batch, factors = f"{micro_batches * tokens} tokens", f"{factors} * {tokens} tokens"
        require_data(records, cutter, packer, 1, micro_batches * tokens, 1, f"one global batch of {factors}")
    else:
        rows = data.micro_batch_size
        global_batch, factors = f"{micro_batches * rows} windows", f"{factors} * {rows} windows"
        require_data(records, cutter, packer, micro_batches * rows, 0, 1, f"one global batch of {factors}")
    if own_rank() == 0:
        logger.info("global batch: %s = %s", factors, global_batch)
    dataset = ShardedDataset(records, cutter, packer, config.seed, data.buffer_size, data.num_shards, dp_rank, dp_size)
    order = {
        "seed": config.seed,
        "num_shards": data.num_shards,
        "buffer_size": data.buffer_size,
        "max_seq_length": data.max_seq_length,
        "stride": data.stride,
        "num_records": records.num_records,
    }
    return TrainLoader(dataset, data.num_workers, data.use_stateful_dataloader, order, global_batch)


def build_validation_loader(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    dp_rank: int,
    dp_size: int,
    pad_to_multiple: int = 1,
    sequence_pad_multiple: int = 1,
) -> ValidationLoader:
    """This rank's share of the validation set, as :class:`Batch`; ranks may differ in length by one.

    Windows do not overlap, and packing does not cut them: every token with a predecessor in its window is scored once.

    Args, Raises: as :func:`build_train_loader`.
    """
    data, validation = config.dataset, config.validation
    cutter = WindowCutter(tokenizer, data.max_seq_length, stride=0)
    packer = Packer(config, tokenizer, pad_to_multiple, sequence_pad_multiple, split=False)
    try:
        records = open_records(validation.load_dataset_kwargs, data.text_column)
        require_data(records, cutter, packer, 1, 1, 0, "one window")  # targets: training.require_targets
    except ConfigError as error:
        problem = " ".join(error.problems)
        raise ConfigError(
            f"the validation set, read with the training set's dataset.text_column: {problem} {OTHER_VALIDATION}"
        ) from error
    return ValidationLoader(records, cutter, packer, dp_rank, dp_size, validation.max_batches)
