"""The records (texts) of a data set, in an order that is a function of (seed, epoch, position) alone.

Order of an epoch
    1. The data set consists of groups: the row groups of Parquet files, or runs of rows of a Hugging Face data set. The
       groups are permuted, and their records numbered 0, 1, 2, ... as they then follow each other.
    2. This sequence is cut into blocks of ``buffer_size`` records, wherever groups begin and end, and each block is
       permuted. What results is position 0, 1, 2, ... of the epoch.
Both permutations are drawn afresh from (seed, epoch) and (seed, epoch, block). So nothing depends on what was read
before, and a reader may begin at any block.

Shard v of V reads positions v, v + V, v + 2V, ... of epoch 0 and goes on into epoch 1, 2, ... by the same step: after
position p of n comes position p + V, or position p + V - n of the following epoch. Every record of an epoch is read by
exactly one shard, whether V divides n or not.

A reader (:class:`RecordFeed`) serves several shards from one pass over the data: it decodes each block once, and keeps
of it the records that these shards have yet to take.
"""

import glob
import logging
import os
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from errors import ConfigError
from paths import PROJECT_DIR, missing_path, project_path


logger = logging.getLogger(__name__)

READ_ROWS = 1024
"""Rows decoded at a time."""
FASTA_SUFFIXES = (".fa", ".fasta", ".fna", ".ffn", ".fas", ".frn")


class Records:
    """A data set whose records are read in groups.

    Attributes:
        name: for messages.
        num_records: empty ones included; None where only reading to the end tells.
        group_sizes: [groups] int64, records per group; None where the data has only its own order.
    """

    def __init__(self, name: str, group_sizes: np.ndarray | None):
        self.name = name
        self.group_sizes = group_sizes
        self.num_records: int | None = None if group_sizes is None else int(group_sizes.sum())

    def read_group(self, group: int) -> Iterator[pa.LargeStringArray]:
        """The texts of one group, in their order, nulls included."""
        raise NotImplementedError

    def scan(self, start: int, group_order: np.ndarray | None = None) -> Iterator[pa.LargeStringArray]:
        """All texts from the ``start``-th on, the groups in the order given, or in their own."""
        order = np.arange(len(self.group_sizes)) if group_order is None else group_order
        ends = np.cumsum(self.group_sizes[order])
        first = int(np.searchsorted(ends, start, side="right"))
        skip = start - int(ends[first - 1]) if first else start
        for group in order[first:]:
            for texts in self.read_group(int(group)):
                if skip < len(texts):
                    yield texts[skip:]
                skip = max(skip - len(texts), 0)


class ParquetRecords(Records):
    """Local Parquet files; a group is a row group. Files are opened by the process that reads them."""

    def __init__(self, name: str, paths: list[Path], text_column: str):
        """
        Raises:
            ConfigError: if a file is damaged, or has no such column, or one that is not text.
        """
        self._text_column = text_column
        self._groups: list[tuple[str, int]] = []
        sizes: list[int] = []
        for path in paths:
            try:
                metadata = pq.read_metadata(path)
            except (OSError, pa.ArrowException) as error:
                raise ConfigError(f"{path}: not a readable Parquet file ({error}): write it again.") from error
            check_text_column(metadata.schema.to_arrow_schema(), text_column, str(path))
            for group in range(metadata.num_row_groups):
                self._groups.append((str(path), group))
                sizes.append(metadata.row_group(group).num_rows)
        super().__init__(name, np.array(sizes, dtype=np.int64))

    def read_group(self, group: int) -> Iterator[pa.LargeStringArray]:
        path, row_group = self._groups[group]
        # No threads: a loader worker is a fork, and has one core.
        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(READ_ROWS, [row_group], [self._text_column], use_threads=False)
            while True:
                try:
                    batch = next(batches, None)
                except (OSError, pa.ArrowException) as error:
                    raise ValueError(f"{path}, row group {row_group}: damaged ({error}): write it again.") from error
                if batch is None:
                    break
                yield as_texts(batch.column(0))


class IndexedRecords(Records):
    """A Hugging Face data set of random access (``datasets.Dataset``); a group is a run of rows."""

    def __init__(self, name: str, dataset: Any, text_column: str):
        check_text_column(dataset.features.arrow_schema, text_column, name)
        self._dataset = dataset.with_format("arrow", columns=[text_column])
        starts = np.arange(0, len(dataset), READ_ROWS, dtype=np.int64)
        super().__init__(name, np.diff(np.append(starts, len(dataset))))

    def read_group(self, group: int) -> Iterator[pa.LargeStringArray]:
        yield as_texts(self._dataset[group * READ_ROWS : (group + 1) * READ_ROWS].column(0))


class StreamRecords(Records):
    """A Hugging Face data set that can only be read from its start (``datasets.IterableDataset``)."""

    def __init__(self, name: str, dataset: Any, text_column: str):
        first = next(iter(dataset), None)
        if first is None:
            raise ValueError(f"data set {name} has no records.")
        if text_column not in first:
            raise ValueError(missing_column(text_column, list(first), name))
        self._dataset = dataset.select_columns([text_column])
        self._text_column = text_column
        super().__init__(name, None)
        logger.warning(
            "%s is a stream, read in its own order: records are shuffled inside blocks of dataset.buffer_size only, "
            "every loader process reads the whole stream, and a resumed run reads again all that comes before its "
            "position in the epoch. Parquet files have none of these limits.",
            name,
        )

    def scan(self, start: int, group_order: np.ndarray | None = None) -> Iterator[pa.LargeStringArray]:
        assert group_order is None
        position = 0
        # Not iter(dataset): in a loader worker that would hand out the worker's share only.
        for rows in self._dataset.iter(batch_size=READ_ROWS):
            texts = rows[self._text_column]
            if (bad := next((text for text in texts if not isinstance(text, str | None)), None)) is not None:
                raise ValueError(f"{self.name}: column {self._text_column!r} holds {bad!r}, which is not text.")
            if start < position + len(texts):
                yield pa.array(texts[max(start - position, 0) :], type=pa.large_string())
            position += len(texts)
        self.num_records = position


def as_texts(column: pa.Array | pa.ChunkedArray) -> pa.LargeStringArray:
    """One array of 64-bit offsets, so that no block of long texts overflows."""
    column = column.cast(pa.large_string())
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def missing_column(text_column: str, columns: list[str], name: str) -> str:
    """The message for a column that is not there."""
    return (
        f"{name}: dataset.text_column={text_column!r} is not among its columns ({', '.join(columns)}): name "
        "the one that holds the text."
    )


def check_text_column(schema: pa.Schema, text_column: str, name: str) -> None:
    """Raises ConfigError unless ``schema`` has the column and it holds text."""
    if text_column not in schema.names:
        raise ConfigError(missing_column(text_column, schema.names, name))
    kind = schema.field(text_column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ConfigError(
            f"{name}: column {text_column!r} holds {kind}, not text: set dataset.text_column to a column of strings."
        )


def find_parquet_files(path: str) -> list[Path] | None:
    """The Parquet files that ``path`` names: a file, a folder of them, a glob pattern; None if it names no such thing.

    A relative path is looked up below the working folder, then below the project folder.
    """
    return find_files(path, lambda file: file.suffix == ".parquet")


def is_fasta(file: Path) -> bool:
    """By its name, of which ``.gz``, ``.bz2`` and ``.xz`` are no part."""
    name = file.with_suffix("") if file.suffix.lower() in (".gz", ".bz2", ".xz") else file
    return name.suffix.lower() in FASTA_SUFFIXES


def find_files(path: str, wanted: Callable[[Path], bool]) -> list[Path] | None:
    """As :func:`find_parquet_files`, of the files that are ``wanted``."""
    if glob.has_magic(path):
        for base in (Path.cwd(), PROJECT_DIR):
            found = sorted(Path(name) for name in glob.glob(str(base / path), recursive=True))
            if found := [file for file in found if wanted(file)]:
                return found
        return None
    local = Path(project_path(path))
    if local.is_dir():
        return sorted(file for file in local.iterdir() if wanted(file)) or None
    return [local] if local.is_file() and wanted(local) else None


def open_records(load_dataset_kwargs: dict[str, Any], text_column: str) -> Records:
    """Opens local Parquet files, or what ``datasets.load_dataset`` makes of the arguments.

    Args:
        load_dataset_kwargs: ``path``, and for ``load_dataset`` its other arguments. Of local Parquet files ``path`` is
            one file, their folder or a glob pattern.
        text_column: the column to read.

    Raises:
        ConfigError: naming what is missing or contradictory.
    """
    path = os.path.expanduser(load_dataset_kwargs["path"])
    files = find_parquet_files(path)
    if files is None:
        return open_hugging_face(path, load_dataset_kwargs, text_column)
    ignored = {key: value for key, value in load_dataset_kwargs.items() if key not in ("path", "split", "streaming")}
    if ignored or load_dataset_kwargs.get("split", "train") != "train":
        raise ConfigError(
            f"load_dataset_kwargs={load_dataset_kwargs}: {path!r} is local Parquet, read as one split, so "
            f"{', '.join(ignored) or 'split'} would have no effect: drop it, and choose files by a folder or a glob "
            "pattern in path."
        )
    return ParquetRecords(path, files, text_column)


def open_hugging_face(path: str, load_dataset_kwargs: dict[str, Any], text_column: str) -> Records:
    """The part of :func:`open_records` that goes through ``datasets.load_dataset``."""
    local = project_path(path)
    if files := find_files(path, is_fasta):
        named = " ".join(shlex.quote(str(file)) for file in files[:3]) + " ..." * (len(files) > 3)
        raise ConfigError(
            f"load_dataset_kwargs.path={path!r} is FASTA, and data sets are read from Parquet files: run python "
            f"data/fasta_to_parquet.py {named} --output FOLDER, and give FOLDER and the column sequence."
        )
    exists = Path(local).exists()
    if missing_path(path):
        raise ConfigError(f"load_dataset_kwargs.path={path!r}: no such file or folder, or no *.parquet file matches.")
    named = load_dataset_kwargs.keys() & {"data_files", "data_dir"}  # else datasets would read whatever files it finds
    if exists and not named and PROJECT_DIR.is_relative_to(Path(local).resolve()):
        raise ConfigError(
            f"load_dataset_kwargs.path={path!r} is the project's folder or one around it, and has no *.parquet files: "
            "give a Parquet file or a folder of them."
        )
    import datasets  # takes seconds, and Parquet files need none of it

    try:
        dataset = datasets.load_dataset(**(load_dataset_kwargs | {"path": local}))
    except Exception as error:  # datasets raises errors of many kinds
        # With data_files, path is the name of a reader, such as json.
        missing = "" if exists or "data_files" in load_dataset_kwargs else f"there is no local {path!r}, and "
        raise ConfigError(
            f"{missing}load_dataset_kwargs={load_dataset_kwargs} could not be loaded ({type(error).__name__}: {error})"
            ": give a Parquet file, a folder of them, or a Hugging Face data set's name that this machine can reach."
        ) from error
    if isinstance(dataset, dict):
        raise ConfigError(f"data set {path!r} has the splits {', '.join(dataset)}: choose load_dataset_kwargs.split.")
    kind = StreamRecords if isinstance(dataset, datasets.IterableDataset) else IndexedRecords
    return kind(path, dataset, text_column)


def permutation(size: int, *key: int) -> np.ndarray:
    """A permutation of range(size), [size] int64, that is a function of ``key`` (integers >= 0) alone.

    Sorts raw draws of a PCG64: NumPy keeps those the same in every version, unlike ``Generator.permutation``.
    """
    return np.argsort(np.random.PCG64(np.random.SeedSequence(key)).random_raw(size), kind="stable")


def in_blocks(arrays: Iterable[pa.Array], size: int) -> Iterator[pa.Array]:
    """Joins and cuts ``arrays`` into arrays of ``size``, the last one of what is left."""
    parts: list[pa.Array] = []
    missing = size
    for array in arrays:
        while len(array) >= missing:
            yield pa.concat_arrays([*parts, array[:missing]])
            array, parts, missing = array[missing:], [], size
        if len(array):
            parts.append(array)
            missing -= len(array)
    if parts:
        yield pa.concat_arrays(parts)


class RecordFeed:
    """Hands out the records of some shards, each shard's in its order, from one pass over the data."""

    def __init__(
        self, records: Records, seed: int, buffer_size: int, num_shards: int, starts: dict[int, tuple[int, int]]
    ):
        """
        Args:
            records: the data set; at least one record.
            seed: of the order, >= 0.
            buffer_size: records per block.
            num_shards: V, of the whole run.
            starts: for each shard to serve, the (epoch, position) to begin at; the position may lie past the epoch's
                end, and then means one in a later epoch.
        """
        self._records = records
        self._seed = seed
        self._buffer_size = buffer_size
        self._num_shards = num_shards
        self._wanted = {shard: self._inside_epoch(*start) for shard, start in starts.items()}
        self._queues: dict[int, deque] = {shard: deque() for shard in starts}
        self._blocks = self._read_blocks()

    def next(self, shard: int) -> tuple[int, int, str | None]:
        """(epoch, position, text) of the shard's next record. There always is one; its text may be empty or None."""
        queue = self._queues[shard]
        while not queue:
            next(self._blocks)
        return queue.popleft()

    def _inside_epoch(self, epoch: int, position: int) -> tuple[int, int]:
        if self._records.num_records is None:
            return epoch, position
        epochs, position = divmod(position, self._records.num_records)
        return epoch + epochs, position

    def _read_blocks(self) -> Iterator[None]:
        """Files one block of records at a time under the shards that want them."""
        while True:
            epoch = min(epoch for epoch, _ in self._wanted.values())
            first = min(position for of_epoch, position in self._wanted.values() if of_epoch == epoch)
            block = first // self._buffer_size
            sizes = self._records.group_sizes
            group_order = None if sizes is None else permutation(len(sizes), self._seed, epoch)
            for texts in in_blocks(self._records.scan(block * self._buffer_size, group_order), self._buffer_size):
                self._file_block(epoch, block, texts)
                block += 1
                yield
            for shard, (of_epoch, position) in self._wanted.items():
                if of_epoch == epoch:
                    self._wanted[shard] = self._inside_epoch(epoch, position)

    def _file_block(self, epoch: int, block: int, texts: pa.LargeStringArray) -> None:
        start = block * self._buffer_size
        order = permutation(len(texts), self._seed, epoch, 1 + block)
        for shard, (of_epoch, position) in self._wanted.items():
            if of_epoch == epoch and position < start + len(texts):
                positions = np.arange(position, start + len(texts), self._num_shards)
                chosen = texts.take(pa.array(order[positions - start])).to_pylist()
                self._queues[shard].extend(zip([epoch] * len(chosen), positions.tolist(), chosen))
                self._wanted[shard] = (epoch, int(positions[-1]) + self._num_shards)
