"""The order of records, and what cannot be read. Pitfall 14: no record lost or repeated."""

import gzip
import json
import re
import shlex
import subprocess
import sys
from itertools import islice, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from errors import ConfigError
from paths import PROJECT_DIR
from records import (
    IndexedRecords,
    ParquetRecords,
    RecordFeed,
    StreamRecords,
    in_blocks,
    open_records,
    permutation,
)


def write_parquet(path, texts, column="sequence", row_group_size=7):
    pq.write_table(pa.table({column: pa.array(texts, pa.string())}), path, row_group_size=row_group_size)


@pytest.fixture
def folder(tmp_path):
    """200 records in files of unequal length; the text of record i is str(i)."""
    bounds = [0, 13, 90, 91, 150, 200]
    for n, (first, last) in enumerate(pairwise(bounds)):
        write_parquet(tmp_path / f"part-{n}.parquet", [str(i) for i in range(first, last)])
    return tmp_path


def read(records, num_shards, counts, starts=None, seed=1, buffer_size=30):
    """{shard: [(epoch, position, text)]}, ``counts`` records of each shard, the shards taking turns."""
    starts = starts or {shard: (0, shard) for shard in range(num_shards)}
    feed = RecordFeed(records, seed, buffer_size, num_shards, starts)
    return {shard: [feed.next(shard) for _ in range(counts)] for shard in starts}


def test_permutation_is_the_same_everywhere():
    # As NumPy 2.4 gave it. Checkpoints rely on it: another value here means that no run can be resumed exactly.
    assert permutation(8, 42, 0).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]
    assert sorted(permutation(1000, 7, 3, 2).tolist()) == list(range(1000))
    assert permutation(1000, 7, 3).tolist() != permutation(1000, 7, 4).tolist() != permutation(1000, 8, 4).tolist()


def test_in_blocks():
    arrays = [pa.array(range(*bounds)) for bounds in [(0, 3), (3, 3), (3, 11), (11, 12)]]
    assert [block.to_pylist() for block in in_blocks(arrays, 5)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert [len(block) for block in in_blocks(arrays[:3], 11)] == [11]


@pytest.mark.parametrize("start", [0, 1, 7, 12, 13, 89, 90, 91, 199, 200, 500])
def test_scan_from_any_record(folder, start):
    records = open_records({"path": str(folder)}, "sequence")
    texts = [text for array in records.scan(start) for text in array.to_pylist()]
    assert texts == [str(i) for i in range(start, 200)]


@pytest.mark.parametrize("num_shards", [1, 3, 8, 200, 333])
@pytest.mark.parametrize("buffer_size", [1, 30, 1000])
def test_every_epoch_reads_every_record_once(folder, num_shards, buffer_size):
    records = open_records({"path": str(folder)}, "sequence")
    shards = read(records, num_shards, counts=3 * 200 // num_shards + 4, buffer_size=buffer_size)
    epochs: dict[int, dict[int, str]] = {}
    for history in shards.values():
        for epoch, position, text in history:
            assert position not in epochs.setdefault(epoch, {}), "one reader per record"
            epochs[epoch][position] = text
    for epoch in range(3):
        assert sorted(epochs[epoch]) == list(range(200))
        assert sorted(map(int, epochs[epoch].values())) == list(range(200))
    orders = [[epochs[epoch][position] for position in range(200)] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2], "each epoch has its own order"


def test_shuffling_reaches_across_the_epoch_and_inside_blocks(folder):
    records = open_records({"path": str(folder)}, "sequence")
    order = [int(text) for _, _, text in read(records, 1, 200)[0]]
    assert np.abs(np.diff(order)).mean() > 30, "neighbours come from anywhere"
    blocks = [sorted(order[start : start + 30]) for start in range(0, 180, 30)]
    for block in blocks:
        runs = 1 + sum(after - before > 1 for before, after in pairwise(block))
        assert runs <= 7, "a block is made of few whole row groups, the first and last of them cut"
    assert read(records, 1, 50, seed=1) == read(records, 1, 50, seed=1)
    assert read(records, 1, 50, seed=1) != read(records, 1, 50, seed=2)


@pytest.mark.parametrize("subset", [[0], [1, 4], [5, 3, 0]])
def test_a_shard_does_not_depend_on_its_reader(folder, subset):
    records = open_records({"path": str(folder)}, "sequence")
    together = read(records, 6, 80)
    alone = read(records, 6, 80, starts={shard: (0, shard) for shard in subset})
    assert all(alone[shard] == together[shard] for shard in subset)


@pytest.mark.parametrize("stops", [[0, 0, 0], [1, 40, 17], [33, 34, 66], [67, 0, 150]])
def test_reading_resumes_anywhere(folder, stops):
    """Shards at different places, within and across epochs of 200 / 3 records each."""
    records = open_records({"path": str(folder)}, "sequence")
    whole = read(records, 3, 250)
    starts = {}
    for shard, stop in enumerate(stops):
        # As the state says it: one step after the last record, even where that lies past the epoch's end.
        epoch, position, _ = whole[shard][stop - 1] if stop else (0, shard - 3, None)
        starts[shard] = (epoch, position + 3)
    resumed = read(records, 3, 80, starts=starts)
    for shard, stop in enumerate(stops):
        assert resumed[shard] == whole[shard][stop : stop + 80]


def test_path_forms(folder, monkeypatch):
    (folder / "notes.txt").write_text("not data")
    expected = [str(i) for i in range(200)]
    monkeypatch.chdir(folder.parent)
    for path in (str(folder), folder.name, f"{folder.name}/*.parquet", f"{folder}/part-?.parquet"):
        records = open_records({"path": path, "split": "train"}, "sequence")
        assert isinstance(records, ParquetRecords)
        assert [text for array in records.scan(0) for text in array.to_pylist()] == expected
    assert open_records({"path": str(folder / "part-0.parquet")}, "sequence").num_records == 13


@pytest.mark.parametrize("kwargs", [{"split": "test"}, {"data_files": "x"}, {"name": "default", "split": "train"}])
def test_arguments_without_effect_on_local_parquet_are_refused(folder, kwargs):
    with pytest.raises(ValueError, match="would have no effect"):
        open_records({"path": str(folder)} | kwargs, "sequence")


def test_missing_column(folder):
    with pytest.raises(ValueError, match=r"part-0.parquet: dataset.text_column='text' is not among.*\(sequence\)"):
        open_records({"path": str(folder)}, "text")


def test_column_of_numbers(tmp_path):
    pq.write_table(pa.table({"sequence": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="holds int64, not text"):
        open_records({"path": str(tmp_path)}, "sequence")


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all.parquet", "./nowhere/*.parquet"])
def test_missing_path(path):
    with pytest.raises(ValueError, match="no such file or folder"):
        open_records({"path": path}, "sequence")


@pytest.mark.parametrize(
    "form, name",
    [("{folder}/{name}", "a b.fna"), ("{name}", "a.fasta"), ("{folder}", "a.FA"), ("{folder}/*", "genome.1.fna.gz")],
)
def test_fasta_is_told_how_to_become_parquet(tmp_path, monkeypatch, form, name):
    """And the command that the message gives does that."""
    data, folder = b">x\nACGT\n", tmp_path / "genomes"
    folder.mkdir()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=r"is FASTA, and .* give FOLDER and the column sequence") as raised:
        open_records({"path": form.format(folder=folder, name=name)}, "text")
    command = re.search(r"run python (.* --output FOLDER)", str(raised.value))[1]
    script, *arguments = shlex.split(command)
    subprocess.run([sys.executable, PROJECT_DIR / script, *arguments], check=True, cwd=tmp_path)
    records = open_records({"path": str(tmp_path / "FOLDER")}, "sequence")
    assert [text for array in records.scan(0) for text in array.to_pylist()] == ["ACGT"]


def test_what_is_neither_local_nor_on_the_hub():
    with pytest.raises(ValueError, match=r"there is no local 'owner/nowhere', and .* could not be loaded"):
        open_records({"path": "owner/nowhere"}, "sequence")


@pytest.mark.parametrize("path", ["data/nowhere", "nowhere/*.parquet", "nowhere.parquet"])
def test_what_can_only_be_local_is_not_looked_for_on_the_hub(path):
    with pytest.raises(ValueError, match=rf"path='{re.escape(path)}': no such file or folder"):
        open_records({"path": path}, "sequence")


@pytest.mark.parametrize("path", [".", "./", str(PROJECT_DIR)])
def test_the_project_folder_is_no_data_set(path, monkeypatch):
    monkeypatch.chdir(PROJECT_DIR)
    with pytest.raises(ConfigError, match=r"is the project's folder or one around it, and has no \*\.parquet files"):
        open_records({"path": path}, "sequence")


def test_damaged_parquet(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not for long")
    with pytest.raises(ValueError, match=r"a.parquet: not a readable Parquet file"):
        open_records({"path": str(tmp_path)}, "sequence")


@pytest.fixture
def json_kwargs(tmp_path):
    """100 records in two JSON files, as arguments of load_dataset."""
    for n in range(2):
        rows = [json.dumps({"sequence": str(i), "other": i}) for i in range(50 * n, 50 * n + 50)]
        (tmp_path / f"{n}.jsonl").write_text("\n".join(rows))
    return {"path": "json", "data_files": str(tmp_path / "*.jsonl"), "cache_dir": str(tmp_path / "cache")}


def test_hugging_face_random_access(json_kwargs):
    records = open_records(json_kwargs | {"split": "train"}, "sequence")
    assert isinstance(records, IndexedRecords) and records.num_records == 100
    history = read(records, 4, 50)
    assert sorted(int(text) for shard in history.values() for epoch, _, text in shard if epoch == 0) == list(range(100))


def test_hugging_face_stream(json_kwargs, caplog):
    records = open_records(json_kwargs | {"split": "train", "streaming": True}, "sequence")
    assert isinstance(records, StreamRecords) and records.num_records is None
    assert caplog.text.count("is a stream") == 1
    whole = read(records, 3, 80)
    first_epoch = {position: text for shard in whole.values() for epoch, position, text in shard if epoch == 0}
    assert sorted(map(int, first_epoch.values())) == list(range(100))
    assert sorted(int(first_epoch[position]) for position in range(30)) == list(range(30)), "its own order, by blocks"
    for stop in (5, 33, 34, 70):
        again = open_records(json_kwargs | {"split": "train", "streaming": True}, "sequence")
        starts = {shard: (whole[shard][stop - 1][0], whole[shard][stop - 1][1] + 3) for shard in range(3)}
        resumed = read(again, 3, 10, starts=starts)
        # Until the stream was read to its end, a place past the end of the epoch is not known as such.
        assert all(
            [record[2] for record in resumed[shard]] == [record[2] for record in whole[shard][stop : stop + 10]]
            for shard in range(3)
        )


def test_stream_shorter_than_the_number_of_shards(json_kwargs):
    records = open_records(json_kwargs | {"split": "train", "streaming": True}, "sequence")
    history = read(records, 333, 1, buffer_size=8, starts={320: (0, 320), 150: (0, 150)})
    assert [record[:2] for shard in (320, 150) for record in history[shard]] == [(3, 20), (1, 50)]


def test_hugging_face_errors(json_kwargs):
    with pytest.raises(ValueError, match=r"has the splits train: choose load_dataset_kwargs.split"):
        open_records(json_kwargs, "sequence")
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"text_column='text' is not among its columns \(sequence, other\)"):
            open_records(json_kwargs | {"split": "train", "streaming": streaming}, "text")
    with pytest.raises(ValueError, match="could not be loaded"):
        open_records(json_kwargs | {"data_files": "/nowhere/*.jsonl"}, "sequence")
    stream = open_records(json_kwargs | {"split": "train", "streaming": True}, "other")
    with pytest.raises(ValueError, match="column 'other' holds 0, which is not text"):
        list(islice(stream.scan(0), 1))


def test_bundled_genomes():
    """Base counts of the GenBank file, taken with grep, fold and uniq."""
    records = open_records({"path": "data/ecoli_536"}, "sequence")
    text = "".join(text for array in records.scan(0) for text in array.to_pylist())
    assert {base: text.count(base) for base in "ACGT"} == {"A": 1222723, "C": 1251581, "G": 1243439, "T": 1221177}
    assert len(text) == 4938920
    records = open_records({"path": "data/klebsiella_1084_500k"}, "sequence")
    text = "".join(text for array in records.scan(0) for text in array.to_pylist())
    assert len(text) == 500_000 and text.startswith("ATGTGGATCCGCCCATTGCAGGCGGAACTGAGC")
