"""FASTA -> Parquet with the columns ``name``, ``start``, ``sequence``: one row per record, or per piece of one.

    python data/fasta_to_parquet.py genome.fna.gz --output data/genome --piece-length 8192
    python data/fasta_to_parquet.py genome.fna.gz --output cut --lognormal 8.3 0.9 --clip 200 40000 --seed 0

Reads plain, gzip, bzip2 and xz files, whatever their suffix. Sequence lines may have any length and line end, and any
letters: their case and ambiguity codes are kept. Every input becomes one Parquet file of the same stem. Records without
sequence are skipped and counted.

Cut long records into pieces: a row is read and tokenised as a whole, and rows are what the loader shuffles. Pieces
follow each other without a gap or an overlap, the last one of a record being as long as what is left.
"""

import argparse
import bz2
import gzip
import lzma
import random
import zlib
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


SCHEMA = pa.schema([("name", pa.string()), ("start", pa.int64()), ("sequence", pa.large_string())])
OPENERS: dict[bytes, Callable] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}


def read_fasta(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (name, sequence) of every record; the name is the first word of the header line.

    Raises:
        ValueError: if the file is missing, damaged, not ASCII, or has text before its first ``>``.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file.")
    with path.open("rb") as file:
        magic = file.read(6)
    opener = next((opener for prefix, opener in OPENERS.items() if magic.startswith(prefix)), open)
    name, lines = None, []
    try:
        # Headers may hold any bytes; sequences are ASCII.
        with opener(path, "rt", encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                line = line.strip()
                if line.startswith(">"):
                    if name is not None:
                        yield name, "".join(lines)
                    name, lines = (line[1:].split() or [""])[0], []
                elif line and name is None:
                    raise ValueError(
                        f"{path}, line {number}: {line[:40]!r} comes before any '>' header: not a FASTA file."
                    )
                elif not line.isascii():
                    raise ValueError(f"{path}, line {number}: {line[:40]!r} is not ASCII: not a FASTA file.")
                else:
                    lines.append("".join(line.split()))
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path}: damaged file ({error}): fetch it again.") from error
    if name is not None:
        yield name, "".join(lines)


def lognormal_lengths(mu: float, sigma: float, shortest: int, longest: int, seed: int) -> Iterator[int]:
    """Endless piece lengths in bases: exp(N(mu, sigma)), cut to an integer, clipped to [shortest, longest]."""
    draw = random.Random(seed)
    while True:
        yield min(max(int(draw.lognormvariate(mu, sigma)), shortest), longest)


def cut(
    records: Iterator[tuple[str, str]],
    lengths: Iterator[int] | None,
    min_length: int = 1,
    limit_bases: int | None = None,
) -> Iterator[tuple[str, int, str]]:
    """Yields (record name, offset in the record in bases, piece).

    Args:
        records: (name, sequence).
        lengths: of the pieces, consumed one per piece; None: whole records.
        min_length: shorter pieces are dropped.
        limit_bases: use only this many bases, counted from the start of the input.
    """
    left = limit_bases
    for name, sequence in records:
        if left is not None:
            sequence = sequence[:left]
            left -= len(sequence)
        start = 0
        while start < len(sequence):
            stop = len(sequence) if lengths is None else min(start + next(lengths), len(sequence))
            if stop - start >= min_length:
                yield name, start, sequence[start:stop]
            start = stop
        if left == 0:
            return


def write_parquet(rows: Iterator[tuple[str, int, str]], path: Path, rows_per_group: int) -> tuple[int, int]:
    """Writes rows of :func:`cut`, the file appearing only once complete. Returns (rows, bases).

    Raises:
        ValueError: if there is no row.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".parquet.unfinished")
    num_rows = num_bases = 0
    # Dictionaries and statistics of long unique strings would only add bytes. zstd at a high level takes ACGT text
    # close to the 2 bits per base that it holds.
    options = {
        "compression": "zstd",
        "compression_level": 22,
        "use_dictionary": ["name"],
        "write_statistics": ["start"],
    }
    try:
        with pq.ParquetWriter(unfinished, SCHEMA, **options) as writer:
            while group := list(islice(rows, rows_per_group)):
                writer.write_table(pa.table(list(zip(*group)), schema=SCHEMA))
                num_rows += len(group)
                num_bases += sum(len(sequence) for _, _, sequence in group)
        if not num_rows:
            raise ValueError(f"nothing to write to {path}: the input has no sequence, or --min-length drops all of it.")
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.replace(path)
    return num_rows, num_bases


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fasta", type=Path, nargs="+", help="FASTA files, plain or compressed")
    parser.add_argument("--output", type=Path, required=True, help="folder for the Parquet files")
    parser.add_argument("--piece-length", type=int, help="bases per row; default: a whole record")
    parser.add_argument(
        "--lognormal", type=float, nargs=2, metavar=("MU", "SIGMA"), help="draw every row's length instead"
    )
    parser.add_argument("--clip", type=int, nargs=2, metavar=("MIN", "MAX"), help="bounds of --lognormal, in bases")
    parser.add_argument("--seed", type=int, help="of --lognormal; default 0")
    parser.add_argument("--min-length", type=int, default=1, help="drop rows with fewer bases")
    parser.add_argument("--limit-bases", type=int, help="use only the first so many bases of every file")
    parser.add_argument("--rows-per-group", type=int, default=256, help="rows per Parquet row group")
    options = parser.parse_args(arguments)
    for option in ("piece_length", "min_length", "limit_bases", "rows_per_group"):
        value = getattr(options, option)
        if value is not None and value < 1:
            parser.error(f"--{option.replace('_', '-')}={value} must be at least 1.")
    if options.lognormal is None:
        if options.clip or options.seed is not None:
            parser.error("--clip and --seed belong to --lognormal: add it, or drop them.")
    else:
        if options.piece_length is not None:
            parser.error("--piece-length and --lognormal both set the length of a row: choose one.")
        if options.clip is None or not 1 <= options.clip[0] <= options.clip[1]:
            parser.error("--lognormal needs --clip MIN MAX with 1 <= MIN <= MAX.")
    stems = [path.name.partition(".")[0] for path in options.fasta]
    if len(set(stems)) < len(stems):
        parser.error(f"files of the same stem would overwrite each other: {', '.join(sorted(stems))}.")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Converts every file of the command line."""
    options = parse_arguments(arguments)
    for path in options.fasta:
        lengths = repeat(options.piece_length) if options.piece_length else None
        if options.lognormal:
            lengths = lognormal_lengths(*options.lognormal, *options.clip, options.seed or 0)
        empty = 0

        def records(path: Path = path) -> Iterator[tuple[str, str]]:
            nonlocal empty
            for name, sequence in read_fasta(path):
                empty += not sequence
                yield name, sequence

        target = options.output / f"{path.name.partition('.')[0]}.parquet"
        num_rows, num_bases = write_parquet(
            cut(records(), lengths, options.min_length, options.limit_bases), target, options.rows_per_group
        )
        print(f"{target}: {num_rows} rows, {num_bases} bases" + (f"; {empty} empty records skipped" if empty else ""))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
