"""The command lines of low precision, with three scripts, from the configuration to the metrics."""

import json
import math

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file

import train_ddp
import train_fsdp2
import train_fsdp2_ep
from config import register_schema
from dist_utils import run_script
from paths import PROJECT_DIR
from quantization_stats import LOG_FOLDER


SCRIPTS = {"train_ddp": train_ddp.main, "train_fsdp2": train_fsdp2.main, "train_fsdp2_ep": train_fsdp2_ep.main}
FP8 = "fp8_config.enabled=true"
SMALL = [
    "num_train_steps=2",
    "dataset.num_workers=0",
    "dataset.micro_batch_size=2",
    "dataset.max_seq_length=64",
    "validation.max_batches=1",
]
COMMANDS = {
    "fp8": [FP8],
    "current": [FP8, "fp8_config.fp8_recipe=Float8CurrentScaling"],
    "block": [FP8, "fp8_config.fp8_recipe=Float8BlockScaling"],
    "mxfp8": [FP8, "fp8_config.fp8_recipe=transformer_engine.common.recipe.MXFP8BlockScaling"],
    "nvfp4": ["fp4_config.enabled=true"],
    "both": [FP8, "fp4_config.enabled=true", "fp8_layers=[1]", "fp4_layers=[2]"],
    "qinit": [FP8, "+config_kwargs.use_quantized_model_init=true"],
    "qinit_masters": [
        FP8,
        "fp8_config.quantized_model_init_kwargs.enabled=true",
        "fp8_config.quantized_model_init_kwargs.preserve_high_precision_init_val=true",
        "use_fp32_master_weights=true",
    ],
    "packed": [FP8, "use_sequence_packing=true"],
    "accumulated": [FP8, "grad_acc_steps=2"],
    "bf16": [FP8, "dtype=bfloat16", "use_fp32_master_weights=true"],
}


def run(script: str, path, *overrides: str) -> list[dict]:
    """Runs a script in this process; returns its metrics."""
    register_schema()
    metrics = path / "metrics.jsonl"
    family = "mixtral" if script == "train_fsdp2_ep" else "llama"
    with initialize_config_dir(version_base="1.3", config_dir=str(PROJECT_DIR / "hydra_config" / family)):
        cfg = compose("L0_sanity", overrides=[*SMALL, f"logger.metrics_path={metrics}", *overrides])
    try:
        SCRIPTS[script](cfg)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_command(script, command, tmp_path):
    rows = run(script, tmp_path, *COMMANDS[command])
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["loss"] < rows[0]["loss"]
    assert abs(rows[-1]["validation_loss"] - math.log(256)) < 0.5


@pytest.mark.parametrize("script", SCRIPTS)
def test_statistics_command(script, tmp_path):
    keys = {"enabled": "true", "quant_log_dir": tmp_path, "quant_stats_file": "./fp8_debugging_stats.yaml"}
    run(script, tmp_path, FP8, *(f"quant_stats_config.{key}={value}" for key, value in keys.items()))
    log = (tmp_path / LOG_FOLDER / "nvdlfw_inspect_globalrank-0.log").read_text()
    linear_layers = 2 if script == "train_fsdp2_ep" else 4  # experts have no statistics
    assert log.count("iteration=000000") == 2 * linear_layers * 3 * 4  # layers, linear layers, tensors, statistics


@pytest.mark.parametrize("script", ["train_fsdp2", "train_fsdp2_ep"])
@pytest.mark.parametrize("recipe", ["fp8_config.fp8_recipe=DelayedScaling", "fp4_config.enabled=true"])
def test_resumed_script(recipe, script, tmp_path):
    """Stopped after step 2 of 4, validation included: the same losses, bit for bit, also with stochastic rounding."""
    fp8 = [FP8] if recipe.startswith("fp8") else []
    keep = [f"checkpoint.ckpt_dir={tmp_path}", "checkpoint.save_every_n_steps=2"]
    (tmp_path / "whole").mkdir()
    whole = run(script, tmp_path / "whole", recipe, *fp8, "num_train_steps=4")
    run(script, tmp_path, recipe, *fp8, *keep)
    rows = run(script, tmp_path, recipe, *fp8, *keep, "num_train_steps=4", "checkpoint.resume_from_checkpoint=true")
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole]


@pytest.mark.parametrize("script", ["train_fsdp2", "train_fsdp2_ep"])
def test_final_model_of_quantised_parameters_is_plain(script, tmp_path):
    keep = [f"checkpoint.ckpt_dir={tmp_path}", "checkpoint.save_final_model=true"]
    run(script, tmp_path, *COMMANDS["qinit"], *keep, "dtype=bfloat16")
    weights = load_file(tmp_path / script / "final_model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert "use_quantized_model_init" not in (tmp_path / script / "final_model" / "config.json").read_text()


def test_refused_before_anything_is_built(tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        run("train_fsdp2", tmp_path, FP8, "fp8_layers=[7]")
    assert "invalid configuration:\n  - fp8_layers=[7] is out of range" in capsys.readouterr().err


def test_experts_over_two_ranks(tmp_path):
    options = ["use_sequence_packing=true", "grad_acc_steps=2", f"logger.metrics_path={tmp_path / 'metrics.jsonl'}"]
    options += [f"checkpoint.ckpt_dir={tmp_path}", "checkpoint.save_final_model=true", "dtype=bfloat16"]
    argv = ["--config-name=L0_sanity", *SMALL, *COMMANDS["qinit_masters"], *options]
    outputs = run_script("train_fsdp2_ep.py", argv, world_size=2)
    assert "8 masters start from high-precision initial values" in outputs[0]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["loss"] < rows[0]["loss"]
    weights = load_file(tmp_path / "train_fsdp2_ep" / "final_model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert weights["model.layers.0.mlp.experts.fc1_weight"].shape == (8, 256, 64)
