"""FASTA files of every kind against the rows they must give."""

import bz2
import gzip
import importlib.util
import lzma
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest


SCRIPT = Path(__file__).resolve().parents[1] / "data" / "fasta_to_parquet.py"
FASTA = ">chr1 first record\nACGTac\ngtNN\n\n>empty\n>chr2\nAC GT\n"
RECORDS = [("chr1", "ACGTacgtNN"), ("empty", ""), ("chr2", "ACGT")]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fasta_to_parquet", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(path: Path) -> list[tuple[str, int, str]]:
    return [tuple(row.values()) for row in pq.read_table(path).to_pylist()]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_reads_every_kind_of_file(script, tmp_path, compress, line_end):
    path = tmp_path / "input"
    path.write_bytes(compress(FASTA.replace("\n", line_end).encode()))
    assert list(script.read_fasta(path)) == RECORDS


def test_reads_a_file_without_a_last_line_end(script, tmp_path):
    path = tmp_path / "a.fa"
    path.write_bytes(b">\xe9 odd header\nAC\nGT")
    assert [sequence for _, sequence in script.read_fasta(path)] == ["ACGT"]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"ACGT\n>late\nACGT\n", "line 1: 'ACGT' comes before any '>' header"),
        (b">a\nAC\xffGT\n", "line 2: .* is not ASCII"),
        (gzip.compress(FASTA.encode() * 50)[:-20], "damaged file"),
        (lzma.compress(FASTA.encode() * 50)[:-20], "damaged file"),
        (b"", "nothing to write"),
        (b">only\n>headers\n", "nothing to write"),
    ],
)
def test_bad_files(script, tmp_path, content, message):
    path = tmp_path / "bad.fna"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        script.main([str(path), "--output", str(tmp_path / "out")])
    assert not list((tmp_path / "out").glob("*")), "no half-written file is left"


def test_missing_file(script, tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        script.main([str(tmp_path / "nowhere.fna"), "--output", str(tmp_path)])


@pytest.fixture
def fasta(tmp_path):
    path = tmp_path / "genome.v1.fna.gz"
    path.write_bytes(gzip.compress(FASTA.encode()))
    return path


@pytest.mark.parametrize(
    "options, expected",
    [
        ([], [("chr1", 0, "ACGTacgtNN"), ("chr2", 0, "ACGT")]),
        (["--piece-length", "4"], [("chr1", 0, "ACGT"), ("chr1", 4, "acgt"), ("chr1", 8, "NN"), ("chr2", 0, "ACGT")]),
        (["--piece-length", "4", "--min-length", "3"], [("chr1", 0, "ACGT"), ("chr1", 4, "acgt"), ("chr2", 0, "ACGT")]),
        (["--limit-bases", "12"], [("chr1", 0, "ACGTacgtNN"), ("chr2", 0, "AC")]),
        (["--limit-bases", "10"], [("chr1", 0, "ACGTacgtNN")]),
    ],
)
def test_rows(script, fasta, tmp_path, options, expected, capsys):
    script.main([str(fasta), "--output", str(tmp_path / "out"), *options])
    assert rows(tmp_path / "out" / "genome.parquet") == expected
    assert f"{len(expected)} rows" in capsys.readouterr().out


def test_empty_records_are_counted(script, fasta, tmp_path, capsys):
    script.main([str(fasta), "--output", str(tmp_path)])
    assert "1 empty records skipped" in capsys.readouterr().out


def test_row_groups_and_schema(script, fasta, tmp_path):
    script.main([str(fasta), "--output", str(tmp_path), "--piece-length", "1", "--rows-per-group", "5"])
    file = pq.ParquetFile(tmp_path / "genome.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [5, 5, 4]
    assert file.schema_arrow.names == ["name", "start", "sequence"]


def test_lognormal_cut(script, tmp_path):
    genome = "".join(random.Random(5).choices("ACGT", k=200_000))
    (tmp_path / "genome.fna").write_text(f">g\n{genome}\n")
    options = ["--lognormal", "8.3", "0.9", "--clip", "200", "40000", "--seed", "0"]
    script.main([str(tmp_path / "genome.fna"), "--output", str(tmp_path), *options])
    draw, start, expected = random.Random(0), 0, []
    while start < len(genome):
        length = max(200, min(40_000, int(draw.lognormvariate(8.3, 0.9))))
        expected.append(("g", start, genome[start : start + length]))
        start += length
    assert rows(tmp_path / "genome.parquet") == expected


@pytest.mark.parametrize(
    "options, message",
    [
        (["--piece-length", "0"], "--piece-length=0 must be at least 1"),
        (["--lognormal", "8", "1"], "--lognormal needs --clip"),
        (["--lognormal", "8", "1", "--clip", "9", "3"], "1 <= MIN <= MAX"),
        (["--lognormal", "8", "1", "--clip", "1", "3", "--piece-length", "4"], "choose one"),
        (["--seed", "1"], "belong to --lognormal"),
    ],
)
def test_bad_options(script, fasta, tmp_path, options, message, capsys):
    with pytest.raises(SystemExit):
        script.main([str(fasta), "--output", str(tmp_path), *options])
    assert message in capsys.readouterr().err


def test_files_of_one_stem(script, fasta, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main([str(fasta), str(fasta), "--output", str(tmp_path)])
    assert "would overwrite each other" in capsys.readouterr().err
