"""The rules between keys of the configuration, on the CPU, before anything is built; every broken one is reported."""

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from config_low_precision import low_precision_problems
from paths import missing_path, project_path


if TYPE_CHECKING:
    from config import TrainConfig


# Fields of a model config that a run sets itself -> the key that says to what.
RUN_KEYS = {
    "te_backend": "te_backend",
    "activation_checkpointing": "activation_checkpointing",
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "model_type": "config_name_or_path",
}


class Rules:
    """Collects the broken ones: the value, the rule, the fix."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            self.problems.append(message)

    def choice(self, name: str, value: Any, allowed: tuple) -> None:
        self.require(value in allowed, f"{name}={value!r} is not one of {', '.join(map(str, allowed))}.")

    def at_least(self, name: str, value: float | None, minimum: float) -> None:
        self.require(value is None or value >= minimum, f"{name}={value} must be at least {minimum}.")


def find_problems(config: "TrainConfig", world_size: int) -> list[str]:
    """All broken rules of ``config`` as run on ``world_size`` processes."""
    rules = Rules()
    check_run(rules, config)
    check_layout(rules, config, world_size)
    check_data(rules, config, world_size)
    check_checkpoint(rules, config)
    check_optimizer(rules, config)
    check_model(rules, config)
    return rules.problems + low_precision_problems(config, world_size)


def is_installed(package: str) -> bool:
    """Whether it can be imported; a mere folder of that name, such as the one that wandb makes, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def check_run(rules: Rules, config: "TrainConfig") -> None:
    rules.choice("te_backend", config.te_backend, ("auto", "transformer_engine", "reference"))
    rules.choice("dtype", config.dtype, ("auto", "float32", "bfloat16"))
    modes = ("off", "full", "selective")
    rules.require(
        config.activation_checkpointing in modes or config.activation_checkpointing.isdecimal(),
        f"activation_checkpointing={config.activation_checkpointing!r} is none of {', '.join(modes)}, nor a number of "
        "layers.",
    )
    rules.require(
        config.use_te or config.activation_checkpointing in ("off", "full"),
        f"use_te=false (Hugging Face's model) recomputes all layers or none: activation_checkpointing="
        f"{config.activation_checkpointing} must be full or off.",
    )
    rules.choice("wandb.mode", config.wandb.mode, ("online", "offline", "disabled"))
    rules.require(
        config.wandb.mode == "disabled" or is_installed("wandb"),
        f"wandb.mode={config.wandb.mode} needs the wandb package: pip install wandb, or wandb.mode=disabled.",
    )
    rules.require(
        not config.logger.tensorboard or is_installed("tensorboard"),
        "logger.tensorboard=true needs the tensorboard package: pip install tensorboard, or logger.tensorboard=false.",
    )
    rules.at_least("num_train_steps", config.num_train_steps, 1)
    rules.require(0 <= config.seed < 2**31, f"seed={config.seed} must be at least 0 and below 2^31.")
    rules.at_least("grad_acc_steps", config.grad_acc_steps, 1)
    rules.at_least("max_grad_norm", config.max_grad_norm, 0)
    rules.at_least("hsdp_replicate_size", config.hsdp_replicate_size, 1)
    rules.at_least("logger.frequency", config.logger.frequency, 1)
    rules.choice("profiler.kind", config.profiler.kind, ("auto", "nsys", "torch"))
    if config.profiler.enabled:
        rules.require(
            config.profiler.kind != "nsys" or torch.cuda.is_available(),
            "profiler.kind=nsys needs a CUDA device, and there is none: set profiler.kind=torch.",
        )
        rules.require(
            1 <= config.profiler.start_step <= min(config.profiler.end_step, config.num_train_steps),
            f"profiler.start_step={config.profiler.start_step} must be at least 1 and at most end_step="
            f"{config.profiler.end_step} and num_train_steps={config.num_train_steps}.",
        )

    if config.quant_stats_config.enabled:
        path = config.quant_stats_config.quant_stats_file
        rules.require(
            Path(project_path(path)).is_file(), f"quant_stats_config.quant_stats_file={path!r}: no such file."
        )


def check_layout(rules: Rules, config: "TrainConfig", world_size: int) -> None:
    """Ranks: replicas, context and expert parallelism."""
    if config.hsdp_replicate_size >= 1:
        rules.require(
            world_size % config.hsdp_replicate_size == 0,
            f"hsdp_replicate_size={config.hsdp_replicate_size} does not divide the world size {world_size}.",
        )

    rules.at_least("cp_size", config.cp_size, 1)
    rules.choice("cp_comm_type", config.cp_comm_type, ("p2p", "all_gather", "a2a", "a2a+p2p"))
    if config.cp_size > 1:
        chunks = 2 * config.cp_size
        rules.require(
            world_size % config.cp_size == 0,
            f"cp_size={config.cp_size} does not divide the world size {world_size}: start a multiple of "
            f"{config.cp_size} processes.",
        )
        rules.require(
            config.use_te,
            f"use_te=false (Hugging Face's model) cannot share sequences: cp_size={config.cp_size} must be 1.",
        )
        rules.require(
            not config.use_torch_compile,
            f"use_torch_compile=true: attention that communicates cannot be compiled; drop it, or set cp_size=1, not "
            f"{config.cp_size}.",
        )
        rules.require(
            config.dataset.max_seq_length % chunks == 0,
            f"dataset.max_seq_length={config.dataset.max_seq_length} is not a multiple of 2 * cp_size = {chunks}: "
            "every sequence is cut into that many chunks.",
        )
        rules.require(
            config.dataset.token_micro_batch_size is None or config.dataset.token_micro_batch_size % chunks == 0,
            f"dataset.token_micro_batch_size={config.dataset.token_micro_batch_size} is not a multiple of "
            f"2 * cp_size = {chunks}.",
        )

    rules.at_least("parallelism.dp_size", config.parallelism.dp_size, 1)
    rules.at_least("parallelism.ep_size", config.parallelism.ep_size, 1)
    if 0 not in (config.parallelism.dp_size, config.parallelism.ep_size):
        dp_size, ep_size = config.parallelism.sizes(world_size)
        given = config.parallelism.dp_size or config.parallelism.ep_size or 1
        if None in (config.parallelism.dp_size, config.parallelism.ep_size):
            rules.require(
                world_size % given == 0,
                f"parallelism: {given} ranks do not divide the world size {world_size}: start a multiple of {given} "
                "processes.",
            )
            return
        rules.require(
            dp_size * ep_size == world_size,
            f"parallelism.dp_size * ep_size = {dp_size} * {ep_size} is not the world size {world_size}: start that "
            "many processes, or leave one of them null.",
        )


def check_data(rules: Rules, config: "TrainConfig", world_size: int) -> None:
    data = config.dataset
    rules.at_least("dataset.micro_batch_size", data.micro_batch_size, 1)
    rules.at_least("dataset.token_micro_batch_size", data.token_micro_batch_size, 2)
    rules.at_least("dataset.max_seq_length", data.max_seq_length, 4)
    rules.at_least("dataset.buffer_size", data.buffer_size, 1)
    rules.at_least("dataset.num_workers", data.num_workers, 0)
    rules.require(
        0 <= data.stride < max(data.max_seq_length - 2, 1),
        f"dataset.stride={data.stride} must be at least 0 and below max_seq_length - 2 = {data.max_seq_length - 2}, "
        "or windows would not advance.",
    )
    check_data_path(rules, "dataset.load_dataset_kwargs", data.load_dataset_kwargs)
    dp_size = world_size // config.cp_size if config.cp_size >= 1 else world_size
    streams = max(dp_size, 1) * max(data.num_workers, 1)
    rules.require(
        1 <= data.num_shards <= 10**6 and data.num_shards % streams == 0,
        f"dataset.num_shards={data.num_shards} must be at most 10^6 and a multiple of data-parallel size * "
        "max(num_workers, 1) = "
        f"{dp_size} * {max(data.num_workers, 1)} = {streams}; it is part of the data order, so set it once for the "
        "largest run you plan.",
    )
    if data.token_micro_batch_size is not None:
        rules.require(
            config.use_sequence_packing,
            f"dataset.token_micro_batch_size={data.token_micro_batch_size} needs use_sequence_packing=true "
            "(BSHD batches are sized by dataset.micro_batch_size).",
        )
        rules.require(
            data.split_last_document or data.token_micro_batch_size >= data.max_seq_length,
            f"dataset.token_micro_batch_size={data.token_micro_batch_size} cannot hold a window of max_seq_length="
            f"{data.max_seq_length} tokens: raise it, or set dataset.split_last_document=true.",
        )
    for name, path in [
        ("config_name_or_path", config.config_name_or_path),
        ("dataset.tokenizer_name_or_path", data.tokenizer_name_or_path),
    ]:
        rules.require(not missing_path(path), f"{name}={path!r}: no such file or folder.")

    validation = config.validation
    rules.at_least("validation.every_n_steps", validation.every_n_steps, 0)
    rules.at_least("validation.max_batches", validation.max_batches, 1)
    if validation.enabled:
        check_data_path(rules, "validation.load_dataset_kwargs", validation.load_dataset_kwargs)
    else:
        rules.require(
            validation.every_n_steps == 0,
            f"validation.every_n_steps={validation.every_n_steps} would be ignored: set validation.enabled=true.",
        )


def check_data_path(rules: Rules, name: str, load_dataset_kwargs: dict[str, Any]) -> None:
    path = load_dataset_kwargs.get("path")
    rules.require(
        isinstance(path, str) and path.strip() != "",
        f"{name}.path={path!r} names no data: give a Parquet file, a folder of them, or a Hub data set name.",
    )


def check_checkpoint(rules: Rules, config: "TrainConfig") -> None:
    checkpoint = config.checkpoint
    rules.require(checkpoint.ckpt_dir != "", "checkpoint.ckpt_dir='' is empty: name a folder, or null for none.")
    rules.at_least("checkpoint.save_every_n_steps", checkpoint.save_every_n_steps, 0)
    rules.at_least("checkpoint.max_checkpoints", checkpoint.max_checkpoints, 1)
    for key in ("save_every_n_steps", "resume_from_checkpoint", "save_final_model"):
        rules.require(
            not getattr(checkpoint, key) or checkpoint.ckpt_dir is not None,
            f"checkpoint.{key}={getattr(checkpoint, key)} needs checkpoint.ckpt_dir.",
        )
    rules.require(
        config.dataset.use_stateful_dataloader
        or not (checkpoint.save_every_n_steps or checkpoint.resume_from_checkpoint),
        "dataset.use_stateful_dataloader=false would lose the position in the data: set it to true, or turn off "
        "checkpoint.save_every_n_steps and resume_from_checkpoint.",
    )

    for name, path in [
        ("init_from_pretrained", config.init_from_pretrained),
        ("config_name_or_path", config.config_name_or_path),
        ("dataset.tokenizer_name_or_path", config.dataset.tokenizer_name_or_path),
    ]:
        if path is not None and checkpoint.ckpt_dir is not None:
            mine = Path(project_path(path)).resolve()
            rules.require(
                mine.name != "final_model" or mine.parent.parent != Path(checkpoint.ckpt_dir).resolve(),
                f"{name}={path!r} lies where this run's own final model goes: choose another checkpoint.ckpt_dir.",
            )
    for name, path in [
        ("logger.metrics_path", config.logger.metrics_path),
        ("quant_stats_config.quant_log_dir", config.quant_stats_config.quant_log_dir),
    ]:
        rules.require(path != "", f"{name}='' is empty: name a place, or null for the run's folder.")
    if config.init_from_pretrained is not None:
        folder = Path(project_path(config.init_from_pretrained))
        rules.require(
            (folder / "config.json").is_file(),
            f"init_from_pretrained={config.init_from_pretrained!r} is no folder with a config.json: give a local model "
            "folder (python convert.py hf-to-te downloads and converts one from the Hub).",
        )


def check_optimizer(rules: Rules, config: "TrainConfig") -> None:
    optimizer, schedule = config.adamw_kwargs, config.lr_scheduler_kwargs
    rules.require(0 < optimizer.lr < 1e3, f"adamw_kwargs.lr={optimizer.lr} must be positive and below 1000.")
    rules.require(
        len(optimizer.betas) == 2 and all(0 <= beta < 1 for beta in optimizer.betas),
        f"adamw_kwargs.betas={optimizer.betas} must be two numbers in [0, 1).",
    )
    rules.require(0 < optimizer.eps < 1, f"adamw_kwargs.eps={optimizer.eps} must be positive and below 1.")
    rules.require(
        0 <= optimizer.weight_decay < math.inf,
        f"adamw_kwargs.weight_decay={optimizer.weight_decay} must be at least 0 and finite.",
    )
    rules.at_least("lr_scheduler_kwargs.num_warmup_steps", schedule.num_warmup_steps, 0)
    rules.at_least("lr_scheduler_kwargs.num_decay_steps", schedule.num_decay_steps, 1)
    rules.require(
        0 <= schedule.min_lr_ratio <= 1, f"lr_scheduler_kwargs.min_lr_ratio={schedule.min_lr_ratio} must be in [0, 1]."
    )


def check_model(rules: Rules, config: "TrainConfig") -> None:
    """Layers and the batch layout that they take."""
    attn_input_format = "thd" if config.use_sequence_packing else "bshd"
    given = config.config_kwargs.get("attn_input_format")
    rules.require(
        given in (None, attn_input_format),
        f"config_kwargs.attn_input_format={given!r} contradicts use_sequence_packing="
        f"{str(config.use_sequence_packing).lower()}, which makes {attn_input_format} batches.",
    )
    for name, key in RUN_KEYS.items():
        rules.require(
            config.config_kwargs.get(name) is None,
            f"config_kwargs.{name}={config.config_kwargs.get(name)!r} would have no effect: the run's own key is {key} "
            f"({key}={getattr(config, key)}). Set that one.",
        )
    mask_types = ("padding_causal",) if config.use_sequence_packing else ("causal",)
    mask_type = config.config_kwargs.get("self_attn_mask_type")
    rules.require(
        mask_type in (None, *mask_types),
        f"config_kwargs.self_attn_mask_type={mask_type!r} must be {mask_types[0]} for {attn_input_format} batches.",
    )
    if not config.use_te:
        rules.require(
            not config.use_sequence_packing,
            "use_te=false (Hugging Face's model) takes padded batches: set use_sequence_packing=false or use_te=true.",
        )
        rules.require(
            config.te_backend == "auto",
            f"te_backend={config.te_backend} has no meaning with use_te=false: drop one of them.",
        )
    elif config.te_backend == "transformer_engine":
        rules.require(
            not config.use_torch_compile, "use_torch_compile=true: TE layers break torch.compile's graphs; drop it."
        )
