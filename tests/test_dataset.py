"""The stream of micro-batches. Pitfalls: 8 (empty records), 14 and 15 (resume, epochs), 16 (uneven ranks)."""

import json
import os
import pickle
from collections import Counter
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import dataset
from config import TrainConfig
from dataset import build_train_loader, build_validation_loader, load_tokenizer, merge_loader_states
from windows import WindowCutter


BOS, EOS = 2, 3
NUM_SHARDS = 12


@pytest.fixture(scope="module")
def nucleotides():
    return load_tokenizer("./tokenizers/nucleotide_fast_tokenizer")


def text_of(record: int) -> str:
    """``<record number>:`` and up to 60 bases."""
    return f"{record}:" + "".join(np.random.default_rng(record).choice([*"ACGT"], size=record * 7 % 61))


def write_files(folder, texts, num_files=5, row_group_size=8):
    for n, indices in enumerate(np.array_split(np.arange(len(texts)), num_files)):
        column = pa.array([texts[i] for i in indices], pa.string())
        pq.write_table(pa.table({"sequence": column}), folder / f"{n}.parquet", row_group_size=row_group_size)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """200 records in 5 files."""
    return write_files(tmp_path_factory.mktemp("records"), [text_of(i) for i in range(200)])


def make_config(folder, packing=True, grad_acc_steps=1, **options) -> TrainConfig:
    config = TrainConfig(use_sequence_packing=packing, grad_acc_steps=grad_acc_steps, seed=3)
    defaults = {"max_seq_length": 24, "stride": 4, "micro_batch_size": 4, "buffer_size": 30, "num_shards": NUM_SHARDS}
    for key, value in {"load_dataset_kwargs": {"path": str(folder)}, "num_workers": 0, **defaults, **options}.items():
        assert hasattr(config.dataset, key)
        setattr(config.dataset, key, value)
    return config


FORMATS = {
    "bshd": {"packing": False},
    "thd": {"packing": True},
    "thd_whole_windows": {"packing": True, "split_last_document": False},
}


def same(a, b) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[key], b[key]) if torch.is_tensor(a[key]) else a[key] == b[key] for key in a)


def all_same(left, right) -> bool:
    return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right))


def shard_tokens(batches) -> dict[int, list[int]]:
    """The real tokens of each shard, in their order, from micro-batches 0, 1, 2, ... of the whole run."""
    tokens: dict[int, list[int]] = {shard: [] for shard in range(NUM_SHARDS)}
    for k, batch in enumerate(batches):
        tokens[k % NUM_SHARDS] += batch["input_ids"][batch["attention_mask"].bool()].tolist()
    return tokens


def whole_records(tokens: list[int]) -> list[str]:
    """The complete records in a shard's tokens, cut into windows without overlap."""
    *complete, _ = bytes(tokens).replace(bytes([BOS]), b"").split(bytes([EOS]))
    return [text.decode() for text in complete]


# --- the data order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_workers_do_not_change_the_batches(folder, nucleotides, name):
    expected = list(islice(build_train_loader(make_config(folder, **FORMATS[name]), nucleotides, 0, 1), 30))
    for workers in (1, 3):
        config = make_config(folder, **FORMATS[name], num_workers=workers)
        assert all_same(list(islice(build_train_loader(config, nucleotides, 0, 1), 30)), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_and_accumulation_see_the_same_global_batches(folder, nucleotides, name):
    def global_batches(dp_size, grad_acc_steps, workers=0):
        config = make_config(folder, grad_acc_steps=grad_acc_steps, num_workers=workers, **FORMATS[name])
        ranks = [build_train_loader(config, nucleotides, rank, dp_size) for rank in range(dp_size)]
        return [next(ranks[rank]) for _ in range(10) for _ in range(grad_acc_steps) for rank in range(dp_size)]

    expected = global_batches(1, 4)
    assert all_same(global_batches(2, 2), expected)
    assert all_same(global_batches(4, 1), expected)
    assert all_same(global_batches(2, 2, workers=2), expected)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_three_epochs_hold_every_record_once_each(tmp_path, nucleotides, name, workers):
    """128 records, 3 epochs, whether read in this process or by two workers."""
    texts = [text_of(i) for i in range(128)]
    config = make_config(write_files(tmp_path, texts), **FORMATS[name], stride=0, num_workers=workers)
    tokens = shard_tokens(islice(build_train_loader(config, nucleotides, 0, 1), 240))
    epochs = [Counter(), Counter(), Counter()]
    for shard in range(NUM_SHARDS):
        records = whole_records(tokens[shard])
        places = range(shard, 3 * 128, NUM_SHARDS)  # positions run on across epochs
        assert len(records) >= len(places)
        for place, text in zip(places, records):
            epochs[place // 128][text] += 1
    assert epochs[0] == epochs[1] == epochs[2] == Counter(texts)


def test_epoch_of_the_newest_record(tmp_path, nucleotides):
    texts = ["ACGTACGT"] * 24  # windows of 10 tokens; two to a batch; every shard has two records an epoch
    config = make_config(write_files(tmp_path, texts), packing=False, micro_batch_size=2)
    epochs = [batch["epoch"] for batch in islice(build_train_loader(config, nucleotides, 0, 1), 36)]
    assert epochs == [0] * 12 + [1] * 12 + [2] * 12


def test_ranks_with_uneven_files_never_run_out(tmp_path, nucleotides):
    """5 files, 2 ranks: each goes on through the epochs, and together they read all."""
    texts = [text_of(i) for i in range(61)]
    config = make_config(write_files(tmp_path, texts), stride=0, micro_batch_size=1)
    ranks = [build_train_loader(config, nucleotides, rank, 2) for rank in range(2)]
    tokens = shard_tokens(next(ranks[k % 2]) for k in range(480))
    read = [text for shard in tokens.values() for text in whole_records(shard)]
    assert set(read) == set(texts) and len(read) > 2 * 61


def test_more_shards_than_records(tmp_path, nucleotides):
    config = make_config(write_files(tmp_path, ["ACGTTGCA" * 20], num_files=1), stride=0)
    batches = list(islice(build_train_loader(config, nucleotides, 0, 1), 2 * NUM_SHARDS))
    assert all(whole_records(tokens)[0] == "ACGTTGCA" * 20 for tokens in shard_tokens(batches).values())


# --- windows and packing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [0, 4])
def test_packed_batches_are_full_and_hold_the_windows_in_order(folder, nucleotides, stride):
    config = make_config(folder, stride=stride, token_micro_batch_size=50)
    batches = list(islice(build_train_loader(config, nucleotides, 0, 1), 48))
    for batch in batches:
        assert batch["attention_mask"].sum() == 50
        lengths = batch["cu_seq_lens_q"].diff()
        assert lengths.min() >= 1 and lengths.max() <= 24 and batch["cu_seq_lens_q"][-1] == 50
        assert batch["max_length_q"] == 24
        ends = batch["cu_seq_lens_q"][1:] - 1
        assert (batch["shift_labels"][0, ends] == -100).all(), "a document's last token predicts nothing"
        inside = torch.ones(50, dtype=torch.bool)
        inside[ends] = False
        follower = batch["input_ids"][0].roll(-1)
        assert torch.equal(batch["shift_labels"][0, inside], follower[inside])
    whole = make_config(folder, stride=stride, token_micro_batch_size=50, split_last_document=False)
    whole_tokens = shard_tokens(islice(build_train_loader(whole, nucleotides, 0, 1), 48))
    for shard, tokens in shard_tokens(batches).items():
        count = min(len(tokens), len(whole_tokens[shard]))
        assert count > 100 and tokens[:count] == whole_tokens[shard][:count], "splitting moves no token"


def test_whole_windows_leave_padding_that_is_covered(folder, nucleotides):
    config = make_config(folder, split_last_document=False, token_micro_batch_size=50)
    padded = 0
    for batch in islice(build_train_loader(config, nucleotides, 0, 1, pad_to_multiple=16), 24):
        assert batch["input_ids"].shape == (1, 64)
        assert batch["cu_seq_lens_q"][-1] == 64 and batch["cu_seq_lens_q"].diff().max() <= batch["max_length_q"] == 24
        real = int(batch["attention_mask"].sum())
        assert real <= 50 and batch["input_ids"][0, 0] == BOS
        assert (batch["labels"][0, real:] == -100).all() and (batch["shift_labels"][0, real - 1 :] == -100).all()
        padded += real < 50
    assert padded


def test_bshd_rows_are_windows(folder, nucleotides):
    for batch in islice(
        build_train_loader(make_config(folder, packing=False), nucleotides, 0, 1, pad_to_multiple=8), 24
    ):
        assert len(batch["input_ids"]) == 4 and batch["input_ids"].shape[1] in (8, 16, 24)
        assert (batch["input_ids"][:, 0] == BOS).all()
        lengths = batch["attention_mask"].sum(1)
        assert torch.equal(
            batch["attention_mask"], (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
        )


def test_empty_records_are_skipped_and_counted(tmp_path, nucleotides, caplog):
    texts = [("", None, text_of(i))[i % 3] for i in range(120)]
    config = make_config(write_files(tmp_path, texts), stride=0, num_workers=2)
    loader = build_train_loader(config, nucleotides, 0, 1)
    batches = list(islice(loader, 120))
    assert all(batch["cu_seq_lens_q"].diff().min() > 0 and "skipped_records" not in batch for batch in batches)
    read = [text for tokens in shard_tokens(batches).values() for text in whole_records(tokens)]
    assert set(read) == {text for text in texts if text}
    # Two of three records are empty; the shards also passed those that follow the last one they returned.
    assert 1.6 < loader.skipped_records / len(read) < 2.4
    assert caplog.text.count("they are skipped and counted") == 1


def test_label_options_reach_the_batches(tmp_path, nucleotides):
    config = make_config(write_files(tmp_path, ["ACGTacgtN@#"] * 40), uppercase_labels=True, mask_degenerate_bases=True)
    batch = next(build_train_loader(config, nucleotides, 0, 1))
    assert batch["input_ids"][0, :13].tolist() == [BOS, *b"ACGTacgtN@#", EOS]
    assert batch["shift_labels"][0, :13].tolist() == [*b"ACGTACGT", *[-100] * 5]


def make_bpe() -> PreTrainedTokenizerFast:
    """Merges AC and GT; <s> before a text, nothing after it; no padding token."""
    vocabulary = {"<s>": 0, "A": 1, "C": 2, "G": 3, "T": 4, "AC": 5, "GT": 6, "ACGT": 7}
    model = models.BPE(vocab=vocabulary, merges=[("A", "C"), ("G", "T"), ("AC", "GT")])
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def test_any_tokenizer(tmp_path):
    """Its own merges and its own template; a record that it makes nothing of is skipped."""
    config = make_config(write_files(tmp_path, ["ACGTAC", " ", "TTAC"] * 16), micro_batch_size=1, stride=0)
    loader = build_train_loader(config, make_bpe(), 0, 1)
    tokens = [token for batch in islice(loader, 24) for token in batch["input_ids"].flatten().tolist()]
    documents = " ".join(map(str, tokens)).split("0")
    assert {document.strip() for document in documents} >= {"7 5", "4 4 5"}
    assert set(tokens) == {0, 4, 5, 7} and loader.skipped_records > 0


# --- resume --------------------------------------------------------------------------------------------------------


def resume(config, tokenizer, states, rank=0, size=1):
    """A new loader that continues from the states of all ranks, as a checkpoint stores them."""
    loader = build_train_loader(config, tokenizer, rank, size)
    loader.load_state_dict(merge_loader_states(pickle.loads(pickle.dumps(states))))
    return loader


@pytest.mark.parametrize("name", FORMATS)
def test_resume_is_exact_anywhere(folder, nucleotides, name):
    """An epoch is about 110 micro-batches: stops lie inside it, at its end and in later epochs."""
    config = make_config(folder, **FORMATS[name], token_micro_batch_size=100 if "thd" in name else None)
    loader = build_train_loader(config, nucleotides, 0, 1)
    batches, states = [], [loader.state_dict()]
    for batch in islice(loader, 260):
        batches.append(batch)
        states.append(loader.state_dict())
    assert batches[-1]["epoch"] >= 2
    epoch_ends = [k for k in range(1, 260) if batches[k]["epoch"] > batches[k - 1]["epoch"]]
    assert epoch_ends
    for stop in {0, 1, 7, 12, 50, 131, 240, *epoch_ends[:8]}:
        assert all_same(list(islice(resume(config, nucleotides, [states[stop]]), 15)), batches[stop : stop + 15])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_resume_twice_in_a_row(folder, nucleotides, name, workers):
    expected = list(islice(build_train_loader(make_config(folder, **FORMATS[name]), nucleotides, 0, 1), 130))
    config = make_config(folder, **FORMATS[name], num_workers=workers)
    loader = build_train_loader(config, nucleotides, 0, 1)
    resumed = list(islice(loader, 17))
    for stop in (100, 130):
        state = loader.state_dict()
        list(islice(loader, 5))  # what a run did after its last checkpoint is lost
        loader = resume(config, nucleotides, [state])
        assert loader.state_dict() == state
        resumed += islice(loader, stop - len(resumed))
    assert all_same(resumed, expected)


def test_a_used_loader_can_be_rewound(folder, nucleotides):
    loader = build_train_loader(make_config(folder, num_workers=2), nucleotides, 0, 1)
    state = loader.state_dict()
    first = list(islice(loader, 9))
    loader.load_state_dict(state)
    assert all_same(list(islice(loader, 9)), first)


@pytest.mark.parametrize("name", FORMATS)
def test_resume_at_other_sizes(folder, nucleotides, name):
    """4 ranks -> 2 ranks with 3 workers -> 1 -> 12: 24, then 20, 7 and 24 micro-batches."""
    config = make_config(folder, **FORMATS[name])
    expected = list(islice(build_train_loader(config, nucleotides, 0, 1), 75))
    got, states = [], None
    for size, workers, count in [(4, 1, 24), (2, 3, 20), (1, 0, 7), (12, 0, 24)]:
        config = make_config(folder, **FORMATS[name], num_workers=workers)
        if states is None:
            ranks = [build_train_loader(config, nucleotides, rank, size) for rank in range(size)]
        else:
            ranks = [resume(config, nucleotides, states, rank, size) for rank in range(size)]
        # Ranks take turns by micro-batch number, also where the run stopped between multiples of their number.
        done = len(got)
        got += [next(ranks[(done + k) % size]) for k in range(count)]
        states = [rank.state_dict() for rank in ranks]
    assert all_same(got, expected)


def test_another_global_batch_is_said(folder, nucleotides, caplog):
    config = make_config(folder)
    states = [build_train_loader(config, nucleotides, rank, 2).state_dict() for rank in range(2)]
    with caplog.at_level("INFO"):
        resume(config, nucleotides, states, 0, 4)
        config.grad_acc_steps = 2
        resume(config, nucleotides, states, 0, 1)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "the global batch was 192 tokens and is 384 tokens" in said[0]
    assert "global batch: 1 data-parallel ranks * 2 grad_acc_steps * 96 tokens = 192 tokens" in caplog.text


def test_states_are_small_and_plain(folder, nucleotides):
    loader = build_train_loader(make_config(folder, num_workers=2), nucleotides, 1, 2)
    list(islice(loader, 9))
    state = loader.state_dict()
    assert list(state["shards"]) == [1, 3, 5, 7, 9, 11]
    assert all(type(value) is int for values in state["shards"].values() for value in values)
    assert len(pickle.dumps(state)) < 1000


def test_states_that_do_not_fit(folder, tmp_path, nucleotides):
    config = make_config(folder)
    state = build_train_loader(config, nucleotides, 0, 2).state_dict()
    loader = build_train_loader(config, nucleotides, 0, 1)
    with pytest.raises(ValueError, match=r"no data state of shards \[1, 3, 5, 7, 9, 11\]"):
        loader.load_state_dict(state)
    other = build_train_loader(make_config(folder, stride=0, num_shards=24), nucleotides, 0, 1)
    with pytest.raises(ValueError, match="num_shards was 12 and is 24; stride was 4 and is 0"):
        other.load_state_dict(state)
    grown = build_train_loader(make_config(write_files(tmp_path, ["ACGT"] * 300)), nucleotides, 0, 1)
    with pytest.raises(ValueError, match="num_records was 200 and is 300"):
        grown.load_state_dict(state)


def test_without_a_stateful_loader(folder, nucleotides):
    config = make_config(folder, use_stateful_dataloader=False, num_workers=2)
    loader = build_train_loader(config, nucleotides, 0, 1)
    expected = list(islice(build_train_loader(make_config(folder), nucleotides, 0, 1), 5))
    assert all_same(list(islice(loader, 5)), expected)
    with pytest.raises(RuntimeError, match=r"use_stateful_dataloader=true"):
        loader.state_dict()


def test_a_loader_that_loses_states_is_noticed(folder, nucleotides, monkeypatch):
    class Forgetful(DataLoader):
        def state_dict(self):
            return {"workers": {"0": {"shards": {0: [0, 0, 0, 0, 1]}}}}

    monkeypatch.setattr(dataset, "StatefulDataLoader", Forgetful)
    loader = build_train_loader(make_config(folder), nucleotides, 0, 1)
    next(loader)
    with pytest.raises(RuntimeError, match="keeps worker states differently"):
        loader.state_dict()


def test_stream_with_workers_and_resume(tmp_path, nucleotides):
    """A JSON stream gives every worker the whole of it, and resumes exactly."""
    lines = "\n".join(json.dumps({"sequence": text_of(i)}) for i in range(90))
    (tmp_path / "a.jsonl").write_text(lines)
    kwargs = {"path": "json", "data_files": str(tmp_path / "a.jsonl"), "split": "train", "streaming": True}
    kwargs["cache_dir"] = str(tmp_path / "cache")
    config = make_config(None, load_dataset_kwargs=kwargs, stride=0)
    loader = build_train_loader(config, nucleotides, 0, 1)
    expected = list(islice(loader, 60))
    state = loader.state_dict()
    expected += islice(loader, 30)
    counts = Counter(text for tokens in shard_tokens(expected).values() for text in whole_records(tokens))
    assert set(counts) == {text_of(i) for i in range(90)}
    with_workers = make_config(None, load_dataset_kwargs=kwargs, stride=0, num_workers=2)
    assert all_same(list(islice(build_train_loader(with_workers, nucleotides, 0, 1), 60)), expected[:60])
    assert all_same(list(islice(resume(with_workers, nucleotides, [state]), 30)), expected[60:])


# --- validation ----------------------------------------------------------------------------------------------------


def validation_config(folder, **options) -> TrainConfig:
    config = make_config(folder, **options)
    config.validation.load_dataset_kwargs = {"path": str(folder)}
    return config


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("max_batches", [None, 7])
def test_validation_scores_the_same_windows_at_every_size(folder, nucleotides, name, max_batches):
    config = validation_config(folder, **FORMATS[name])
    config.validation.max_batches = max_batches
    loader = build_validation_loader(config, nucleotides, 0, 1)
    expected = list(loader)
    assert all_same(list(loader), expected), "each pass begins anew"
    assert max_batches is None or len(expected) == max_batches
    for size in (2, 4):
        ranks = [list(build_validation_loader(config, nucleotides, rank, size)) for rank in range(size)]
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
        assert all_same([ranks[k % size][k // size] for k in range(len(expected))], expected)


@pytest.mark.parametrize("name", FORMATS)
def test_validation_scores_every_token_once(folder, nucleotides, name):
    batches = list(build_validation_loader(validation_config(folder, **FORMATS[name]), nucleotides, 0, 1))
    targets = torch.cat([batch["shift_labels"].flatten() for batch in batches])
    expected = "".join(text_of(i) + chr(EOS) for i in range(200))
    assert bytes(targets[targets != -100].tolist()).decode() == expected, "in record order, without overlap or cuts"


def test_validation_smaller_than_the_number_of_ranks(tmp_path, nucleotides):
    config = validation_config(write_files(tmp_path, ["ACGT"], num_files=1))
    assert [len(list(build_validation_loader(config, nucleotides, rank, 3))) for rank in range(3)] == [1, 0, 0]


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_less_than_one_global_batch(tmp_path, nucleotides, packing):
    texts = ["A" * 22] * 15  # one full window of 24 tokens each; two micro-batches of two ranks need 16
    config = make_config(write_files(tmp_path, texts), packing=packing, grad_acc_steps=2)
    with pytest.raises(
        ValueError,
        match="15 windows with 360 tokens in all, fewer than one global batch of 2 data-parallel ranks",
    ):
        build_train_loader(config, nucleotides, 0, 2)
    config.grad_acc_steps = 1
    next(build_train_loader(config, nucleotides, 0, 2))


def test_no_usable_record(tmp_path, nucleotides):
    config = validation_config(write_files(tmp_path, ["", None, ""], num_files=2))
    for build in (build_train_loader, build_validation_loader):
        with pytest.raises(ValueError, match="has no usable record: 3 of 3 are empty or null"):
            build(config, nucleotides, 0, 1)


@pytest.mark.parametrize("packing", [False, True])
def test_no_valid_target(tmp_path, nucleotides, packing):
    texts = ["N" * 22] * 40
    config = make_config(write_files(tmp_path, texts), packing=packing, mask_degenerate_bases=True)
    with pytest.raises(ValueError, match=r"has no valid target in its 40 windows: .*dataset\.mask_degenerate_bases"):
        build_train_loader(config, nucleotides, 0, 1)
    build_train_loader(make_config(tmp_path, packing=packing), nucleotides, 0, 1)
    write_files(tmp_path, [*texts[1:], "N" * 30 + "A"])  # the only one is beyond the first global batch
    build_train_loader(config, nucleotides, 0, 1)


def test_only_one_global_batch_is_read_for_the_checks(folder, nucleotides, monkeypatch):
    rows, scan = [], dataset.Records.scan

    def counted(self, start):
        for array in scan(self, start):
            rows.append(len(array))
            yield array

    monkeypatch.setattr(dataset.Records, "scan", counted)
    build_train_loader(make_config(folder, packing=False, mask_degenerate_bases=True), nucleotides, 0, 1)
    assert rows == [8], "one row group of 25"


def test_missing_column(folder, nucleotides):
    with pytest.raises(ValueError, match="text_column='text' is not among its columns"):
        build_train_loader(make_config(folder, text_column="text"), nucleotides, 0, 1)


@pytest.mark.parametrize("column, message", [("text", "is not among its columns"), ("sequence", "no usable record")])
def test_problems_of_the_validation_set_say_whose_they_are(tmp_path, nucleotides, column, message):
    config = validation_config(write_files(tmp_path, ["", None]), text_column=column)
    fix = r"Set validation\.load_dataset_kwargs to data that fits, or validation\.enabled=false"
    with pytest.raises(ValueError, match=rf"(?s)  - the validation set, .*{message}.* {fix}"):
        build_validation_loader(config, nucleotides, 0, 1)


def test_shards_that_cannot_be_divided(folder, nucleotides):
    with pytest.raises(ValueError, match=r"num_shards=12 must be a multiple of data-parallel size 4 \* workers 2 = 8"):
        build_train_loader(make_config(folder, num_workers=2), nucleotides, 0, 4)


def test_missing_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        load_tokenizer("./tokenizers/nowhere")
    with pytest.raises(ValueError, match="is no tokenizer"):
        load_tokenizer(str(tmp_path))


# --- the bundled tokenizer -----------------------------------------------------------------------------------------


def test_nucleotide_tokenizer(nucleotides):
    assert len(nucleotides) == nucleotides.vocab_size == 256
    assert [nucleotides.pad_token_id, nucleotides.bos_token_id, nucleotides.eos_token_id, nucleotides.unk_token_id] == [
        *(0, 2, 3, 26)
    ]
    assert nucleotides("ACGTn")["input_ids"] == [2, 65, 67, 71, 84, 110]  # open, for generate
    assert nucleotides("AC", "G")["input_ids"] == [2, 65, 67, 3, 2, 71]
    assert nucleotides.decode(nucleotides("ACGTn")["input_ids"], skip_special_tokens=True) == "ACGTn"
    text = "".join(map(chr, range(128))) + " Ünïcödé 𝄞\n\n x"
    ids = nucleotides(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode())
    assert nucleotides.decode(ids) == text
    batch = nucleotides(["AC", "ACGT"], padding=True)
    assert batch["input_ids"] == [[2, 65, 67, 0, 0], [2, 65, 67, 71, 84]]
    assert batch["attention_mask"] == [[1, 1, 1, 0, 0], [1] * 5]


def test_nucleotide_tokenizer_survives_saving(nucleotides, tmp_path):
    nucleotides.save_pretrained(str(tmp_path))
    again = AutoTokenizer.from_pretrained(str(tmp_path))
    assert again("ACGTN")["input_ids"] == nucleotides("ACGTN")["input_ids"]
    cutter = WindowCutter(again, max_seq_length=16, stride=0)  # a run on the copy closes documents likewise
    assert [cutter.prefix.tolist(), cutter.suffix.tolist()] == [[2], [3]]
    assert sorted(os.listdir(tmp_path)) == ["tokenizer.json", "tokenizer_config.json"]
