"""The configuration: one typed schema, one validator.

Hydra merges, in this order, the dataclasses below (every default and its type), a YAML file of ``hydra_config/`` and
the command line. :func:`load_config` turns the result into a :class:`TrainConfig`, checks every cross-field rule on
the CPU before anything is built, and reports all problems at once. Nothing changes a config afterwards.
"""

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config_low_precision import FP4Config, FP8Config, QuantStatsConfig
from config_rules import find_problems
from errors import ConfigError


logger = logging.getLogger(__name__)


@dataclass
class DatasetConfig:
    tokenizer_name_or_path: str = "./tokenizers/nucleotide_fast_tokenizer"
    """Folder or Hub name, for ``AutoTokenizer.from_pretrained``. Documents end as the tokenizer ends a text
    (Llama-3's: without EOS), or with EOS where its tokenizer_config.json has ``closes_documents`` (windows.py)."""
    load_dataset_kwargs: dict[str, Any] = field(default_factory=dict)
    """``path``: a Parquet file, a glob or a folder of them (then nothing else but ``split: train`` and ``streaming``),
    or a Hugging Face data set name (then the rest goes to ``datasets.load_dataset``)."""
    text_column: str = "sequence"
    """Column that holds the text of a record."""
    micro_batch_size: int = 8
    """Sequences per micro-batch and rank (BSHD)."""
    token_micro_batch_size: int | None = None
    """Tokens per micro-batch and rank with sequence packing (THD); null: micro_batch_size * max_seq_length."""
    max_seq_length: int = 512
    """Tokens per window, special tokens included. Longer records become several windows."""
    stride: int = 0
    """Tokens that consecutive windows of one record share."""
    split_last_document: bool = True
    """THD: cut the last window of a micro-batch so that every micro-batch is full; the rest opens the next one."""
    buffer_size: int = 10_000
    """Records per shuffle block: rows are permuted inside blocks of about this many, blocks across the epoch."""
    num_shards: int = 48
    """Virtual shards of the data stream; a multiple of data-parallel size * max(num_workers, 1). Part of the data
    order."""
    num_workers: int = 1
    """Loader processes per rank; 0 reads in the training process."""
    use_stateful_dataloader: bool = True
    """Carry the position in the data in checkpoints (torchdata.StatefulDataLoader)."""
    uppercase_labels: bool = False
    """Upper-case the labels of ``acgt`` (soft-masked genomes); the inputs keep their case."""
    mask_degenerate_bases: bool = False
    """Ignore labels other than A, C, G, T (either case); control characters such as @ and # are among them."""


@dataclass
class ValidationConfig:
    enabled: bool = False
    load_dataset_kwargs: dict[str, Any] = field(default_factory=dict)
    """As dataset.load_dataset_kwargs. Windows do not overlap, so every token is scored once."""
    every_n_steps: int = 0
    """Validate after every n-th optimiser step; 0: after the last step only."""
    max_batches: int | None = None
    """At most this many micro-batches, all data-parallel ranks together; null: the whole set."""


@dataclass
class CheckpointConfig:
    ckpt_dir: str | None = None
    """Checkpoints go to ``ckpt_dir/<script name>/step_<N>/``."""
    save_every_n_steps: int = 0
    """0: none but that of a run which SIGTERM or SIGUSR1 ends early (preemption.py)."""
    resume_from_checkpoint: bool = False
    """Continue from the newest checkpoint committed since a run last started afresh in the folder; from step 0, with a
    warning, if there is none."""
    save_final_model: bool = False
    """After the last step write ``ckpt_dir/<script name>/final_model/``: safetensors, config, tokenizer. One that an
    earlier run left there becomes ``final_model.<n>``, unless this run continues that one."""
    max_checkpoints: int | None = None
    """Keep the newest n committed checkpoints; null: all."""
    async_save: bool = False
    """Write checkpoints in the background."""


@dataclass
class LoggerConfig:
    frequency: int = 1
    """Log every n-th step; the last step always."""
    metrics_path: str | None = None
    """JSON lines file; null: ``metrics.jsonl`` in the run's folder."""
    tensorboard: bool = False
    """Also write TensorBoard events, to ``tensorboard`` in the run's folder."""


@dataclass
class ProfilerConfig:
    enabled: bool = False
    """Capture a few steps of rank 0 (profiler.py)."""
    kind: str = "auto"
    """nsys: open the CUDA profiler's range, with NVTX ranges inside (``nsys profile --capture-range=cudaProfilerApi``);
    torch: write a trace, a table of operators and memory figures into the run's folder; auto: nsys on a GPU, torch on a
    CPU."""
    start_step: int = 10
    """First step inside the range."""
    end_step: int = 12
    """Last step inside the range."""


@dataclass
class WandbConfig:
    mode: str = "disabled"
    """online, offline or disabled."""
    project: str = "llama3-native-te"
    """Project that the run belongs to."""
    name: str | None = None
    """Name of the run; null: wandb makes one up."""
    id: str | None = None
    """Run id; null: a new one, and in a run resumed from a checkpoint the one kept in the run's folder."""
    resume: str | None = None
    """wandb's ``resume``: allow, must, never or auto; null: allow in a run resumed from a checkpoint."""


@dataclass
class AdamWConfig:
    lr: float = 3e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Applied to matrices (2-D parameters) only, not to norms."""


@dataclass
class SchedulerConfig:
    num_warmup_steps: int = 100
    """Linear warm-up, in optimiser steps."""
    num_decay_steps: int = 1000
    """Cosine decay after the warm-up, in optimiser steps; constant at the minimum from then on."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a fraction of adamw_kwargs.lr."""


@dataclass
class ParallelismConfig:
    dp_size: int | None = None
    """Ranks over which each expert is sharded; null: world size / ep_size (1 if that is null too)."""
    ep_size: int | None = None
    """Ranks that share the experts of a layer, each holding 1/ep_size of them; null: world size / dp_size."""

    def sizes(self, world_size: int) -> tuple[int, int]:
        """(dp, ep) of a run on ``world_size`` processes."""
        if self.ep_size is not None:
            return self.dp_size or world_size // self.ep_size, self.ep_size
        return self.dp_size or 1, world_size // (self.dp_size or 1)


@dataclass
class TrainConfig:
    config_name_or_path: str = "./model_configs/llama-genome-tiny"
    """Model config: a folder, a JSON file or a Hub name."""
    config_kwargs: dict[str, Any] = field(
        default_factory=lambda: {"attn_input_format": None, "self_attn_mask_type": None}
    )
    """Overrides of the model config's fields; null keeps the model config's (or the derived) value."""
    init_from_pretrained: str | None = None
    """Start from the weights of this folder, in TE's layout (``convert.py hf-to-te``, or a ``final_model``), or, with
    use_te=false, in Hugging Face's; null: random weights. Set config_name_or_path to the same folder."""
    num_train_steps: int = 1000
    """Optimiser steps in all, also counted across resumed runs."""
    grad_acc_steps: int = 1
    """Micro-batches per optimiser step and rank."""
    seed: int = 42
    """Initial weights, data order and every other random draw."""
    te_backend: str = "auto"
    """auto: TransformerEngine where CUDA and TE are there, else te_reference; transformer_engine; reference."""
    use_te: bool = True
    """false: plain Hugging Face LlamaForCausalLM in the same loop."""
    dtype: str = "auto"
    """Parameter dtype: float32 or bfloat16; auto: bfloat16 on a GPU, float32 on a CPU."""
    use_fp32_master_weights: bool | None = None
    """FP32 master copies of BF16 (or quantised) parameters in the optimiser; null: of quantised ones only."""
    use_sequence_packing: bool = False
    """THD: windows are packed back to back without padding; else BSHD: one window per row, padded on the right."""
    use_meta_device: bool = True
    """Build the model without memory and initialise it after sharding."""
    use_torch_compile: bool = False
    """torch.compile each decoder layer (reference backend and use_te=false; TE layers are already fused)."""
    activation_checkpointing: str = "off"
    """Layers to recompute in the backward pass: off, full (all), selective (every second), or how many, for as little
    memory as is missing."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; 0: no clipping."""
    fp8_config: FP8Config = field(default_factory=FP8Config)
    fp4_config: FP4Config = field(default_factory=FP4Config)
    fp8_layers: list[int] | None = None
    """Layers in FP8, counted from 1; null: all (or those that ``fp4_layers`` leaves)."""
    fp4_layers: list[int] | None = None
    """Layers in FP4, counted from 1; null: all (or those that ``fp8_layers`` leaves)."""
    quant_stats_config: QuantStatsConfig = field(default_factory=QuantStatsConfig)
    hsdp_replicate_size: int = 1
    """FSDP2: number of replicas; parameters are sharded over world size / this many ranks."""
    reshard_after_forward: bool = True
    """FSDP2: free a layer's gathered parameters after its forward pass and gather them again in the backward pass.
    false: keep them, which is faster and takes as much memory as all layers in ``dtype``."""
    cp_size: int = 1
    """Context parallelism: ranks that share every sequence. Data-parallel size = world size / this."""
    cp_comm_type: str = "p2p"
    """How TE's attention communicates over those ranks: p2p, all_gather, a2a or a2a+p2p (context_parallel.py)."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    adamw_kwargs: AdamWConfig = field(default_factory=AdamWConfig)
    lr_scheduler_kwargs: SchedulerConfig = field(default_factory=SchedulerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    @property
    def can_save(self) -> bool:
        """Whether a checkpoint can be saved: there is a folder, and the loader knows its place in the data."""
        return self.checkpoint.ckpt_dir is not None and self.dataset.use_stateful_dataloader

    @property
    def token_micro_batch_size(self) -> int:
        """Tokens per micro-batch and rank, padding included."""
        return self.dataset.token_micro_batch_size or self.dataset.micro_batch_size * self.dataset.max_seq_length


# Keys that only some scripts read.
SCRIPT_KEYS = {
    "hsdp_replicate_size": {"train_fsdp2"},
    "reshard_after_forward": {"train_fsdp2", "train_fsdp2_cp", "train_fsdp2_ep"},
    "cp_size": {"train_fsdp2_cp"},
    "cp_comm_type": {"train_fsdp2_cp"},
    "parallelism": {"train_fsdp2_ep"},
}


def register_schema() -> None:
    """Makes the schema known to Hydra as ``schema``, the base of every file in ``hydra_config/``."""
    ConfigStore.instance().store(name="schema", node=TrainConfig)


def load_config(
    cfg: DictConfig, script: str, world_size: int | None = None, overrides: list[str] | None = None
) -> TrainConfig:
    """Validates the merged config and returns it typed.

    A preset may set a key for one of its scripts (``cp_size``), or for a format that the command line switches off:
    that is left out, with a word. On the command line such a key is an error.

    Args:
        cfg: what Hydra composed.
        script: name of the train script, without ``.py``.
        world_size: number of processes; None reads ``WORLD_SIZE``.
        overrides: of the command line; None asks Hydra.

    Raises:
        ConfigError: with every problem found.
    """
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:  # a value that is missing, or an interpolation that cannot be resolved
        reason = str(error).partition("\n")[0]
        problem = f"{error.full_key}: {reason}: give it a value on the command line."
        if (source := re.search(r"interpolation '\${([\w.]+)}': Incompatible value 'None'", reason)) is not None:
            problem = f"{error.full_key} takes the value of {source[1]}, which has none: give {source[1]}=... on the "
            problem += "command line."
        raise ConfigError(problem) from None
    assert isinstance(config, TrainConfig)
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    if overrides is None:
        overrides = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    problems = unknown_keys(config)
    given = [override.lstrip("+").partition("=")[0] for override in overrides]
    for path, node, key, reason in unread_keys(config, script):
        value, default = getattr(node, key), getattr(type(node)(), key)
        if value == default:
            continue
        if any(f"{name}.".startswith(f"{path}.") for name in given):
            problems.append(f"{path}={value!r} {reason}")
        else:
            logger.info("the preset's %s=%s is left out", path, value)
            setattr(node, key, default)
    outputs = [(config.checkpoint, "ckpt_dir"), (config.logger, "metrics_path")]
    for section, key in [*outputs, (config.quant_stats_config, "quant_log_dir")]:
        if (path := getattr(section, key)) is not None:
            setattr(section, key, os.path.expanduser(path))
    problems += find_problems(config, world_size)
    if problems:
        raise ConfigError(*problems)
    return config


def unread_keys(config: TrainConfig, script: str) -> Iterator[tuple[str, Any, str, str]]:
    """(path, node, key, reason) of the keys that a run of ``script`` with this config does not read."""
    for key, scripts in SCRIPT_KEYS.items():
        if script not in scripts:
            readers = ", ".join(sorted(scripts))
            yield key, config, key, f"is read by {readers} only; {script} would ignore it. Remove it."
    for name in ("fp8_config", "fp4_config", "quant_stats_config"):
        section = getattr(config, name)
        if section.enabled:
            continue
        reason = f"has no effect with {name}.enabled=false: set that to true, or drop it."
        for key in vars(section).keys() - {"enabled", "quantized_model_init_kwargs"}:
            yield f"{name}.{key}", section, key, reason
        if name != "quant_stats_config":
            layers = f"{name.removesuffix('_config')}_layers"
            yield layers, config, layers, reason
    if not config.fp8_config.enabled and not config.fp4_config.enabled:  # FP4's weights may start as it says
        reason = "has no effect with fp8_config.enabled=false: set that to true, or drop it."
        section = config.fp8_config.quantized_model_init_kwargs
        for key in vars(section):
            yield f"fp8_config.quantized_model_init_kwargs.{key}", section, key, reason


def unknown_keys(node: Any, prefix: str = "") -> list[str]:
    """Keys that the schema does not have; Hydra lets ``+key=value`` add them."""
    names = {f.name for f in fields(node)}
    problems = [f"{prefix}{key} is no key of the schema: see config.py." for key in vars(node) if key not in names]
    for name in names:
        if is_dataclass(getattr(node, name)):
            problems += unknown_keys(getattr(node, name), f"{prefix}{name}.")
    return problems


def save_resolved(config: TrainConfig, path: Path) -> None:
    """Writes the config that a run uses, every default included, as YAML."""

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
        return value

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(plain(config), sort_keys=False))
