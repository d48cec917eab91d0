"""The train scripts as users run them: strategies agree, stopped runs continue as if they had not been, errors come
early.

The ranks are processes of this machine over gloo.
"""

import itertools
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from safetensors.torch import load_file

import training
from config import TrainConfig
from dataset import load_tokenizer
from dist_utils import REPOSITORY, RanksFailed, run_on_ranks, run_script
from errors import ConfigError
from loss import IGNORE_INDEX
from modeling_llama_te import NVLlamaForCausalLM
from training import build_model_config


TINY = [
    "config_kwargs.hidden_size=32",
    "config_kwargs.intermediate_size=64",
    "config_kwargs.head_dim=8",
    "dataset.max_seq_length=64",
    "dataset.micro_batch_size=2",
    "dataset.num_workers=0",
    "dataset.num_shards=12",
    "dataset.buffer_size=16",
    "validation.enabled=false",
    "lr_scheduler_kwargs.num_warmup_steps=4",
    "lr_scheduler_kwargs.num_decay_steps=30",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """60 records of 3 to 150 bases, an empty one and a null among them, in row groups of 16."""
    generator = np.random.default_rng(0)
    records = ["".join(generator.choice(list("ACGT"), size=generator.integers(3, 150))) for _ in range(60)]
    records[7], records[30] = "", None
    folder = tmp_path_factory.mktemp("data")
    pq.write_table(pa.table({"sequence": records}), folder / "records.parquet", row_group_size=16)
    return folder


def call_main(script: str, argv: list[str], folder: str) -> None:
    """Body of one rank: the script with this command line."""
    os.chdir(folder)
    sys.argv = [script, *argv]
    sys.path.insert(0, str(REPOSITORY))
    runpy.run_path(str(REPOSITORY / f"{script}.py"), run_name="__main__")


def call_main_with_a_lost_step(script: str, argv: list[str], folder: str, lost_step: int) -> None:
    original, steps = training.next_global_batch, itertools.count(1)

    def next_global_batch(*args, **kwargs):
        batch = original(*args, **kwargs)
        if next(steps) == lost_step:
            batch.num_targets = batch.num_targets * float("nan")
        return batch

    training.next_global_batch = next_global_batch
    call_main(script, argv, folder)


def train(
    script: str, world_size: int, data: Path, tmp_path: Path, *overrides: str, metrics: str = "m.jsonl"
) -> list[dict]:
    """Runs a script and returns the lines of its metrics file."""
    argv = ["--config-name", "L0_sanity", *TINY, f"dataset.load_dataset_kwargs.path={data}"]
    argv += [f"logger.metrics_path={tmp_path / metrics}", *overrides]
    run_on_ranks(call_main, world_size, script, argv, str(tmp_path), init=False, timeout_seconds=180)
    return [json.loads(line) for line in (tmp_path / metrics).read_text().splitlines()]


def losses(rows: list[dict]) -> list[float]:
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


# ---- Strategies. ----


@pytest.mark.parametrize("packing", [False, True])
def test_strategies_and_rank_counts_agree(data, tmp_path, packing):
    """The same 20 global batches, whose micro-batches hold unequal numbers of targets: the same losses and norms."""
    runs = {}
    for script in ("train_ddp", "train_fsdp2"):
        for world_size in (1, 2, 4):
            runs[script, world_size] = train(
                script,
                world_size,
                data,
                tmp_path,
                f"grad_acc_steps={4 // world_size}",
                f"use_sequence_packing={packing}",
                "num_train_steps=20",
                metrics=f"{script}_{world_size}.jsonl",
            )
    expected = runs["train_ddp", 1]
    assert expected[-1]["loss"] < expected[0]["loss"]
    for key, rows in runs.items():
        assert losses(rows) == pytest.approx(losses(expected), rel=1e-5), key
        for row, expected_row in zip(rows, expected, strict=True):
            assert row["grad_norm"] == pytest.approx(expected_row["grad_norm"], rel=1e-4), key
            assert row["consumed_tokens"] == expected_row["consumed_tokens"], key


def test_hsdp_agrees(data, tmp_path):
    steps = ["num_train_steps=6"]
    expected = train("train_fsdp2", 1, data, tmp_path, "grad_acc_steps=4", *steps, metrics="one.jsonl")
    rows = train("train_fsdp2", 4, data, tmp_path, "hsdp_replicate_size=2", *steps, metrics="hsdp.jsonl")
    assert losses(rows) == pytest.approx(losses(expected), rel=1e-5)


def test_options_that_must_not_change_the_numbers(data, tmp_path):
    """Meta device, recomputed layers, loader workers, kept parameters: bit for bit. Tied weights shard (pitfall 21)."""
    for world_size in (1, 2):
        base = ["num_train_steps=4", "+config_kwargs.tie_word_embeddings=true"]
        expected = losses(train("train_fsdp2", world_size, data, tmp_path, *base, metrics=f"base{world_size}.jsonl"))
        options = ["use_meta_device=false", "activation_checkpointing=full", "dataset.num_workers=3"]
        options = options if world_size == 1 else [*options[:2], "reshard_after_forward=false"]
        for number, option in enumerate(options):
            rows = train(
                "train_fsdp2", world_size, data, tmp_path, *base, option, metrics=f"{world_size}{number}.jsonl"
            )
            assert losses(rows) == expected, option


def test_hugging_face_model_in_the_same_loop_agrees(data, tmp_path):
    """use_te=false starts from other weights (other parameter names), so only the start and the trend are compared."""
    rows = train("train_ddp", 1, data, tmp_path, "use_te=false", "num_train_steps=20", metrics="hf.jsonl")
    assert rows[0]["loss"] == pytest.approx(np.log(256), rel=0.05)
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]


@pytest.mark.parametrize("use_te", [True, False])
def test_a_global_batch_without_targets_adds_nothing(tmp_path, use_te):
    texts = ["ACGTTGCA" * 5, "N" * 40, "GATTACAT" * 5]
    pq.write_table(pa.table({"sequence": texts}), tmp_path / "gap.parquet")
    options = [
        f"use_te={use_te}",
        "dataset.micro_batch_size=1",
        "dataset.num_shards=1",
        "dataset.mask_degenerate_bases=true",
    ]
    rows = train("train_ddp", 1, tmp_path / "gap.parquet", tmp_path, *options, "num_train_steps=3")
    assert [row["loss"] == 0 and row["grad_norm"] == 0 for row in rows].count(True) == 1
    assert all(math.isfinite(row["loss"]) for row in rows)


# ---- Stopping and resuming. ----


@pytest.mark.parametrize("script, packing, workers", [("train_ddp", True, 0), ("train_fsdp2", False, 2)])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(data, tmp_path, script, packing, workers):
    """Stopped at steps 3, 4 and 11; an epoch of the 58 usable records ends in between, packs are cut midway."""
    options = [f"use_sequence_packing={packing}", f"dataset.num_workers={workers}", "grad_acc_steps=2"]
    whole = train(script, 1, data, tmp_path, *options, "num_train_steps=20", metrics="whole.jsonl")
    assert whole[-1]["epoch"] >= 1
    checkpoint = [f"checkpoint.ckpt_dir={tmp_path / 'ckpt'}", "checkpoint.save_every_n_steps=100"]
    for stop in (3, 4, 11, 20):
        resume = f"checkpoint.resume_from_checkpoint={stop > 3}"
        rows = train(script, 1, data, tmp_path, *options, *checkpoint, resume, f"num_train_steps={stop}")
    assert losses(rows) == losses(whole)
    for key in ("grad_norm", "learning_rate", "consumed_tokens", "epoch"):
        assert [row[key] for row in rows] == [row[key] for row in whole], key


def test_resume_at_another_data_parallel_size(data, tmp_path):
    """4 ranks -> 2 -> 1, and from DDP's folder nothing is read by FSDP2: each script has its own."""
    options = ["use_sequence_packing=true", "checkpoint.save_every_n_steps=100", "checkpoint.async_save=true"]
    options += [f"checkpoint.ckpt_dir={tmp_path / 'ckpt'}"]
    whole = train(
        "train_fsdp2", 1, data, tmp_path, options[0], "grad_acc_steps=4", "num_train_steps=15", metrics="w.jsonl"
    )
    for world_size, stop in ((4, 5), (2, 9), (1, 15)):
        rows = train(
            "train_fsdp2",
            world_size,
            data,
            tmp_path,
            *options,
            f"grad_acc_steps={4 // world_size}",
            f"checkpoint.resume_from_checkpoint={world_size < 4}",
            f"num_train_steps={stop}",
        )
    assert losses(rows) == pytest.approx(losses(whole), rel=1e-5)
    assert rows[-1]["consumed_tokens"] == whole[-1]["consumed_tokens"]


def test_killed_between_a_log_and_a_checkpoint(data, tmp_path):
    """Pitfall 23: SIGKILL after step 7 with checkpoints every 3 steps; resumed, every step is logged once."""
    overrides = [*TINY, f"dataset.load_dataset_kwargs.path={data}", f"checkpoint.ckpt_dir={tmp_path / 'ckpt'}"]
    overrides += ["checkpoint.save_every_n_steps=3", "num_train_steps=12"]
    command = [sys.executable, str(REPOSITORY / "train_ddp.py"), "--config-name", "L0_sanity", *overrides]
    metrics = tmp_path / "ckpt" / "train_ddp" / "metrics.jsonl"
    process = subprocess.Popen([*command, "num_train_steps=100000"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 7):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    stop = max(12, before[-1]["step"] + 2)
    subprocess.run(
        [*command, "checkpoint.resume_from_checkpoint=true", f"num_train_steps={stop}"], cwd=tmp_path, check=True
    )
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, stop + 1))
    assert losses(rows)[: len(before)] == losses(before)


def test_a_lost_run_ends_and_its_good_checkpoint_stays(data, tmp_path):
    """NaN at a step that saves and is not logged: nothing takes the place of the only checkpoint that is kept."""
    argv = ["--config-name", "L0_sanity", *TINY, f"dataset.load_dataset_kwargs.path={data}", "num_train_steps=20"]
    argv += [f"checkpoint.ckpt_dir={tmp_path}", "checkpoint.save_every_n_steps=2", "checkpoint.max_checkpoints=1"]
    argv += ["logger.frequency=10"]
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(call_main_with_a_lost_step, 2, "train_ddp", argv, str(tmp_path), 6, init=False)
    assert failed.value.exit_codes == [1, 1]
    last = tmp_path / "train_ddp" / "step_4"
    error = f"FloatingPointError: step 6: loss nan, gradient norm nan: .* checkpoint before that is {last}"
    assert len(re.findall(error, str(failed.value))) == 1
    assert [path.name for path in tmp_path.glob("train_ddp/step_*")] == ["step_4"]
    with pytest.raises(RanksFailed, match=r"step 2: loss nan, .* No checkpoint is committed"):  # of the new run
        run_on_ranks(call_main_with_a_lost_step, 2, "train_ddp", argv, str(tmp_path), 1, init=False)


def test_a_resume_does_not_go_behind_a_run_that_started_afresh(data, tmp_path):
    """The metrics are those of the run in between, so the checkpoint of the first must not be continued with them."""
    options = [f"checkpoint.ckpt_dir={tmp_path / 'ckpt'}", "adamw_kwargs.lr=1e-3"]
    save, fresh = "checkpoint.save_every_n_steps=2", "checkpoint.resume_from_checkpoint=false"
    first = train("train_ddp", 1, data, tmp_path, *options, save, fresh, "num_train_steps=2")
    train("train_ddp", 1, data, tmp_path, *options, fresh, "num_train_steps=3", "checkpoint.save_every_n_steps=0")
    third = [*options, save, "checkpoint.resume_from_checkpoint=true", "num_train_steps=3"]
    rows = train("train_ddp", 1, data, tmp_path, *third)
    assert losses(rows)[:2] == losses(first)
    assert sorted(path.name for path in tmp_path.glob("m.*")) == ["m.1.jsonl", "m.2.jsonl", "m.jsonl"]
    folder = tmp_path / "ckpt" / "train_ddp"
    configs = [(folder / f"config{n}.yaml").read_text() for n in (".1", ".2", "")]
    assert ["save_every_n_steps: 2" in text for text in configs] == [True, False, True]
    assert json.loads((folder / "earlier_runs.json").read_text()) == {"last_commit": 1}


# ---- What a run leaves. ----


def test_final_model_loads_and_validation_is_logged(data, tmp_path):
    rows = train(
        "train_fsdp2",
        2,
        data,
        tmp_path,
        "num_train_steps=3",
        f"checkpoint.ckpt_dir={tmp_path / 'ckpt'}",
        "checkpoint.save_final_model=true",
        "validation.enabled=true",
        f"validation.load_dataset_kwargs.path={data}",
        "validation.every_n_steps=2",
    )
    assert [("validation_loss" in row) for row in rows] == [False, True, True]
    folder = tmp_path / "ckpt" / "train_fsdp2" / "final_model"
    model = NVLlamaForCausalLM.from_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name]), name
    assert (folder / "tokenizer_config.json").exists()
    assert "max_seq_length: 64" in (tmp_path / "ckpt" / "train_fsdp2" / "config.yaml").read_text()


def test_validation_loss_is_per_token_and_independent_of_ranks(data, tmp_path):
    """Pitfall 11. Batches of very unequal numbers of tokens: the mean over tokens does not depend on how they fall."""
    values = []
    for world_size, micro_batch_size in ((1, 1), (1, 8), (3, 2)):
        rows = train(
            "train_ddp",
            world_size,
            data,
            tmp_path,
            "num_train_steps=1",
            "adamw_kwargs.lr=1e-30",  # the weights stay the initial ones
            f"dataset.micro_batch_size={micro_batch_size}",
            "validation.enabled=true",
            "validation.max_batches=null",
            f"validation.load_dataset_kwargs.path={data}",
            metrics=f"{world_size}{micro_batch_size}.jsonl",
        )
        values.append(rows[-1]["validation_loss"])
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)


def test_convergence_config_overfits(tmp_path):
    run_script("train_fsdp2.py", ["--config-name", "L0_convergence", "logger.metrics_path=m.jsonl"], cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < 0.1


@pytest.mark.parametrize(
    "shape, config_kwargs, expected",
    [
        ("Llama-3.2-1B", {}, (2, 3)),  # its own are Llama-3's
        ("Llama-3.2-1B", {"eos_token_id": 65}, (2, 65)),
        ("llama-genome-tiny", {"eos_token_id": [10, 3]}, (2, [10, 3])),
    ],
)
def test_the_model_stops_at_the_eos_of_its_tokenizer(shape, config_kwargs, expected):
    config = TrainConfig(config_name_or_path=f"./model_configs/{shape}", config_kwargs=config_kwargs)
    model_config = build_model_config(config, load_tokenizer(config.dataset.tokenizer_name_or_path))
    assert (model_config.bos_token_id, model_config.eos_token_id) == expected


def test_whole_numbers_are_floats_where_a_field_is_one():
    config = TrainConfig(config_kwargs={"rms_norm_eps": 1, "num_hidden_layers": 3})
    model_config = build_model_config(config, load_tokenizer(config.dataset.tokenizer_name_or_path))
    assert type(model_config.rms_norm_eps) is float and model_config.num_hidden_layers == 3
    config.config_kwargs["rms_norm_eps"] = "x"
    with pytest.raises(ConfigError, match=r"'rms_norm_eps' expected float, got str"):
        build_model_config(config, load_tokenizer(config.dataset.tokenizer_name_or_path))


def test_rope_theta_has_a_place():
    config = TrainConfig(config_name_or_path="./model_configs/Llama-3.2-1B", config_kwargs={"rope_theta": 7})
    tokenizer = load_tokenizer(config.dataset.tokenizer_name_or_path)
    with pytest.raises(ConfigError) as error:
        build_model_config(config, tokenizer)
    fix = re.search(r"'\+(config_kwargs\.rope_parameters=.*)'", str(error.value))[1]
    overrides = OverridesParser.create().parse_overrides([fix])  # what it says is what Hydra reads
    config.config_kwargs = {"rope_parameters": overrides[0].value()}
    rope = build_model_config(config, tokenizer).rope_parameters
    assert rope["rope_theta"] == 7 and rope["rope_type"] == "llama3" and rope["factor"] == 32.0


# ---- Bad input, on every rank alike, before anything is written. ----


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["+config_kwargs.vocab_size=100"], "vocab_size=100 is smaller than the tokenizer's 256"),
        (["+config_kwargs.num_key_value_heads=3"], "not divisible by num_key_value_heads=3"),
        (["+config_kwargs.no_such_field=1"], "no_such_field"),
        (["dataset.max_seq_length=100000"], "max_position_embeddings"),
        (["dataset.text_column=text"], "sequence"),
        (["dataset.load_dataset_kwargs.path=./nowhere"], "nowhere"),
        (["dataset.micro_batch_size=4096"], "global batch"),
        (["grad_acc_steps=0", "dtype=float16"], "dtype='float16'"),
    ],
)
def test_bad_input_ends_with_the_reason(data, tmp_path, overrides, message):
    with pytest.raises(RanksFailed, match=r"ValueError|invalid configuration") as error:
        train("train_fsdp2", 2, data, tmp_path, "num_train_steps=2", *overrides)
    assert message in str(error.value)
    assert None not in error.value.exit_codes
    assert not (tmp_path / "m.jsonl").exists()


def without_targets() -> None:
    training.require_targets([{"shift_labels": torch.full((1, 4), IGNORE_INDEX)}], torch.device("cpu"))


def test_a_validation_set_without_targets_is_refused():
    with pytest.raises(RanksFailed, match=r"the validation set has no valid target.* validation\.enabled=false"):
        run_on_ranks(without_targets, 2)


def test_a_finished_run_says_so_and_a_shorter_one_is_refused(data, tmp_path):
    checkpoint = [f"checkpoint.ckpt_dir={tmp_path / 'ckpt'}", "checkpoint.save_every_n_steps=100"]
    train("train_ddp", 1, data, tmp_path, *checkpoint, "num_train_steps=3")
    resume = [*checkpoint, "checkpoint.resume_from_checkpoint=true"]
    assert len(train("train_ddp", 1, data, tmp_path, *resume, "num_train_steps=3")) == 3
    with pytest.raises(RanksFailed, match=r"its checkpoint has 3: raise it"):
        train("train_ddp", 1, data, tmp_path, *resume, "num_train_steps=2")
    assert "num_train_steps: 3" in (tmp_path / "ckpt" / "train_ddp" / "config.yaml").read_text()


def test_more_ranks_than_validation_batches(data, tmp_path):
    """Ranks without a batch take part with a spare one: the loss is that of one rank."""
    losses_by_ranks = []
    for world_size in (1, 2):
        rows = train(
            "train_fsdp2",
            world_size,
            data,
            tmp_path,
            "num_train_steps=1",
            "adamw_kwargs.lr=1e-30",
            "validation.enabled=true",
            "validation.max_batches=1",
            f"validation.load_dataset_kwargs.path={data}",
            metrics=f"{world_size}.jsonl",
        )
        losses_by_ranks.append(rows[-1]["validation_loss"])
    assert losses_by_ranks[0] == pytest.approx(losses_by_ranks[1], rel=1e-6)
