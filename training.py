"""What the train scripts share besides their loop: building the model, one global batch, validation, resumable state.

Legend: B batch, S sequence, T packed tokens.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from checkpoint import LoadedCheckpoint
from collator import Batch
from config import TrainConfig
from context_parallel import ContextParallel, SplitBatches, all_to_all_size, local_world_size, split_batch
from dataset import OTHER_VALIDATION, TrainLoader, build_train_loader, build_validation_loader, merge_loader_states
from distributed import DistributedContext, HostCopy
from errors import ConfigError
from loss import IGNORE_INDEX
from modeling_llama_te import NVLlamaConfig, NVLlamaForCausalLM
from paths import project_path
from phases import phase
from precision import PrecisionPlan
from quantized_parameters import unchanged_scales


logger = logging.getLogger(__name__)


def model_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Parameter dtype; ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, auto if config.dtype == "auto" else config.dtype)


def build_model_config(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, te_class: type[PretrainedConfig] = NVLlamaConfig
) -> PretrainedConfig:
    """The model config that a run trains: of ``te_class``, or plain ``LlamaConfig`` with ``use_te=false``.

    Its BOS and EOS are the tokenizer's, unless ``config_kwargs`` names them.

    Raises:
        ConfigError: a model of another kind, the vocabulary cannot hold the tokenizer's ids, windows exceed the model's
            positions, a field that the layers cannot honour, or head counts that ``cp_comm_type`` cannot hand out.
    """
    if te_class is not NVLlamaConfig and not config.use_te:
        raise ConfigError(f"use_te=false trains Llama only, this script trains {te_class.model_type}: set use_te=true.")
    config_class = te_class if config.use_te else LlamaConfig
    defaults = config_class()
    overrides = {
        key: float(value) if type(value) is int and isinstance(getattr(defaults, key, None), float) else value
        for key, value in config.config_kwargs.items()
        if value is not None
    }
    overrides.pop("use_quantized_model_init", None)  # how a run holds weights (quantization.py), not what the model is
    if config.use_te:
        overrides["attn_input_format"] = "thd" if config.use_sequence_packing else "bshd"
        overrides["te_backend"] = config.te_backend
        overrides["activation_checkpointing"] = config.activation_checkpointing
    path = project_path(config.config_name_or_path)
    try:
        model_type = PretrainedConfig.get_config_dict(path)[0].get("model_type")
    except OSError as error:
        raise ConfigError(
            f"config_name_or_path={config.config_name_or_path!r} has no readable config.json: give a folder with one "
            f"or a model's name on the Hugging Face Hub. ({error})"
        ) from error
    if model_type != config_class.model_type:
        raise ConfigError(
            f"config_name_or_path={config.config_name_or_path!r} is a {model_type} model, and this script trains "
            f"{config_class.model_type}: train_fsdp2_ep.py is for mixtral, the others are for llama."
        )
    try:
        model_config = config_class.from_pretrained(path, **overrides)
    except Exception as error:  # transformers raises errors of many kinds
        raise ConfigError(f"config_kwargs or {path}/config.json: {error}") from error
    unknown = [key for key in overrides if not hasattr(defaults, key)]
    if "rope_theta" in unknown:
        rope = {**model_config.rope_parameters, "rope_theta": overrides["rope_theta"]}
        rope = ", ".join(f"{name}: {value}" for name, value in rope.items())
        raise ConfigError(
            f"config_kwargs.rope_theta is a part of rope_parameters: '+config_kwargs.rope_parameters={{{rope}}}'."
        )
    if unknown:
        raise ConfigError(f"config_kwargs: {', '.join(unknown)}: {config_class.__name__} has no such field.")
    # A shape may come from a model of other texts, and the final model's generate stops at the config's EOS.
    for name in ("bos_token_id", "eos_token_id"):
        own, known = getattr(tokenizer, name), getattr(model_config, name)
        if own is not None and name not in overrides and own not in (known if isinstance(known, list) else [known]):
            setattr(model_config, name, own)
    if model_config.vocab_size < len(tokenizer):
        raise ConfigError(
            f"vocab_size={model_config.vocab_size} is smaller than the tokenizer's {len(tokenizer)} ids: set "
            f"+config_kwargs.vocab_size={len(tokenizer)} or choose the model's own tokenizer."
        )
    if model_config.max_position_embeddings < config.dataset.max_seq_length:
        raise ConfigError(
            f"dataset.max_seq_length={config.dataset.max_seq_length} exceeds the model's max_position_embeddings="
            f"{model_config.max_position_embeddings}: shorten the windows or override it in config_kwargs."
        )
    if config.use_te and (problems := model_config.problems()):
        raise ConfigError(*problems)
    heads = model_config.num_attention_heads, model_config.num_key_value_heads
    all_to_all_size(config.cp_comm_type, config.cp_size, *heads, local_world_size())
    return model_config


def build_model(
    config: TrainConfig,
    model_config: PretrainedConfig,
    device: torch.device,
    te_class: type[PreTrainedModel] = NVLlamaForCausalLM,
    precision: PrecisionPlan | None = None,
) -> nn.Module:
    """The model (of ``te_class``, or plain ``LlamaForCausalLM`` with ``use_te=false``), on the meta device or on
    ``device``; call weight_init.initialize_weights next."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(model_dtype(config, device))
    try:
        with torch.device("meta" if config.use_meta_device else device):
            if config.use_te:
                model = te_class(model_config) if precision is None else te_class(model_config, precision)
            else:
                model = LlamaForCausalLM(model_config)
                if config.activation_checkpointing != "off":
                    model.gradient_checkpointing_enable({"use_reentrant": False})
    finally:
        torch.set_default_dtype(previous)
    if config.use_torch_compile:
        for layer in model.model.layers:
            layer.compile()
    return model.train()


@dataclass
class GlobalBatch:
    """This rank's part of one optimiser step."""

    micro_batches: list[Batch]
    """On the device."""
    num_targets: torch.Tensor
    """Valid targets of all micro-batches of all ranks, or 1 if there is none: what losses are divided by. FP32 scalar
    on the device."""
    signalled_ranks: HostCopy
    """How many ranks had been asked to leave when the step began: FP32 scalar, for preemption.py."""
    num_tokens: int
    """Of this rank, padding included."""
    num_unpadded_tokens: int
    """Of this rank."""
    sum_seq_len_squared: int
    """Sum over this rank's sequences of length^2, for counting attention FLOPs; this rank's share of it where several
    ranks share a sequence."""
    epoch: int


def count_targets(batch: Batch) -> int:
    """Valid targets of a micro-batch."""
    return int((batch["shift_labels"] != IGNORE_INDEX).sum())


def sequence_lengths(batch: Batch) -> torch.Tensor:
    """Real length of every sequence of a micro-batch, padding left out: int64 [sequences]."""
    if "cu_seq_lens_q" not in batch:
        return batch["attention_mask"].sum(dim=1)
    lengths = batch["cu_seq_lens_q"].diff().long()
    starts = batch.get("cu_seq_lens_q_padded", batch["cu_seq_lens_q"])[:-1].long()
    return lengths * batch["attention_mask"][0, starts]  # tail padding forms sequences of its own


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on ``device``, without waiting for the copy."""
    pin = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=True)


def to_device(batch: dict[str, Any], device: torch.device) -> Batch:
    """The micro-batch with its tensors on ``device``, without waiting for the copy; ``epoch`` left out."""
    moved = {key: send(value, device) if torch.is_tensor(value) else value for key, value in batch.items()}
    moved.pop("epoch", None)
    return moved


def next_global_batch(
    batches: Iterator[Batch],
    grad_acc_steps: int,
    device: torch.device,
    signalled: bool = False,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> GlobalBatch:
    """Reads ``grad_acc_steps`` micro-batches and counts the targets of the global batch.

    Args:
        batches: of this data-parallel rank.
        grad_acc_steps: micro-batches per optimiser step.
        device: where they go.
        signalled: whether this rank was asked to leave (preemption.py).
        cp_rank, cp_size: context parallelism: this rank keeps, and counts, its chunks of every sequence.
    """
    with phase("data wait"):
        whole_batches = [next(batches) for _ in range(grad_acc_steps)]
    squares = sum(int(sequence_lengths(batch).square().sum()) for batch in whole_batches)
    micro_batches = [split_batch(batch, cp_rank, cp_size) for batch in whole_batches]
    # The only collective of a step besides gradients and logging; nobody waits for its result.
    totals = send(torch.tensor([sum(map(count_targets, micro_batches)), signalled], dtype=torch.float32), device)
    dist.all_reduce(totals)
    num_targets, signalled_ranks = totals.unbind()
    with phase("host-to-device copy"):
        moved = [to_device(batch, device) for batch in micro_batches]
    return GlobalBatch(
        micro_batches=moved,
        num_targets=num_targets.clamp(min=1),  # Hugging Face's loss of no target would be 0/0
        signalled_ranks=HostCopy(signalled_ranks),
        num_tokens=sum(batch["input_ids"].numel() for batch in micro_batches),
        num_unpadded_tokens=sum(int(batch["attention_mask"].sum()) for batch in micro_batches),
        sum_seq_len_squared=(squares + cp_rank) // cp_size,  # these add up to the whole over the ranks of a group
        epoch=max(batch["epoch"] for batch in micro_batches),
    )


def is_due(step: int, every_n_steps: int, num_train_steps: int) -> bool:
    """Whether something done every n steps (0: never) and after the last step is done after ``step``."""
    return step == num_train_steps or (every_n_steps > 0 and step % every_n_steps == 0)


def saves_after(step: int, config: TrainConfig, preempted: bool) -> bool:
    """Whether a checkpoint is saved after ``step``: one that is due, or the last of a run that is leaving early."""
    every_n_steps = config.checkpoint.save_every_n_steps
    due = every_n_steps > 0 and is_due(step, every_n_steps, config.num_train_steps)
    return due or (preempted and config.can_save)


@torch.no_grad()
def validate(model: nn.Module, batches: Iterable[Batch], device: torch.device, spare_batch: Batch) -> float:
    """Mean loss per valid target over the whole validation set, all ranks together: nats per token.

    Every rank must take part in every forward pass of a sharded model. Ranks may hold different numbers of
    micro-batches: one that has run out repeats its last without targets; one that has none, ``spare_batch``.
    """
    total = torch.zeros(2, dtype=torch.float64)  # sum of losses, targets
    iterator, batch = iter(batches), spare_batch
    model.eval()
    with unchanged_scales(model):
        while True:
            following = next(iterator, None)
            more = torch.tensor(float(following is not None), device=device)
            dist.all_reduce(more, op=dist.ReduceOp.MAX)
            if not more.item():
                break
            if following is not None:
                batch = following
            else:
                batch = {**batch, "shift_labels": torch.full_like(batch["shift_labels"], IGNORE_INDEX)}
            loss = model(**to_device(batch, device), num_items_in_batch=torch.ones((), device=device)).loss
            total += torch.tensor([loss.item(), count_targets(batch)], dtype=torch.float64)
    model.train()
    total = total.to(device)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def rank_state(loader: TrainLoader, consumed_tokens: int, device: torch.device) -> dict[str, Any]:
    """What a checkpoint keeps per rank: position in the data, RNG, this rank's part of the tokens consumed."""
    return {
        "loader": loader.state_dict(),
        "rng": torch.get_rng_state(),
        "device_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "consumed_tokens": consumed_tokens,
    }


def restore(
    loaded: LoadedCheckpoint | None, loader: TrainLoader, num_train_steps: int, ctx: DistributedContext
) -> tuple[int, int]:
    """Continues from the ranks' saved states, however many they were.

    Returns:
        Optimiser steps completed and tokens consumed, all ranks together: zeros without a checkpoint.

    Raises:
        ValueError: the checkpoint is past ``num_train_steps``.
    """
    if loaded is None:
        return 0, 0
    if loaded.step > num_train_steps:
        raise ValueError(
            f"num_train_steps={num_train_steps} counts from the run's start, and its checkpoint has {loaded.step}: "
            "raise it."
        )
    if loaded.step == num_train_steps and ctx.is_main:
        logger.warning("step %d of %d is done already: nothing left to train", loaded.step, num_train_steps)
    states = loaded.rank_states
    loader.load_state_dict(merge_loader_states([state["loader"] for state in states]))
    if ctx.rank < len(states):
        torch.set_rng_state(states[ctx.rank]["rng"])
        if ctx.device.type == "cuda" and states[ctx.rank]["device_rng"] is not None:
            torch.cuda.set_rng_state(states[ctx.rank]["device_rng"], ctx.device)
    return loaded.step, sum(state["consumed_tokens"] for state in states)


def build_loaders(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    ctx: DistributedContext,
    pad_to_multiple: int,
    cp: ContextParallel | None = None,
) -> tuple[TrainLoader, Iterable[Batch] | None]:
    """This rank's training data, and its part of the validation set, None without one. Collective.

    Args:
        pad_to_multiple: the tokens that each rank holds of a batch become a multiple of this.
        cp: context parallelism: its ranks read the same training batches, which ``next_global_batch`` splits.

    Raises:
        ConfigError: data that cannot be read, or too little of it; nothing to validate on.
    """
    place, multiples = (ctx.rank, ctx.world_size), (pad_to_multiple,)
    if cp is not None:
        place, multiples = (cp.dp_rank, cp.dp_size), (cp.cp_size * pad_to_multiple, cp.sequence_multiple)
    loader = build_train_loader(config, tokenizer, *place, *multiples)
    if not config.validation.enabled:
        return loader, None
    validation: Iterable[Batch] = build_validation_loader(config, tokenizer, *place, *multiples)
    if cp is not None:
        validation = SplitBatches(validation, cp.cp_rank, cp.cp_size)
    require_targets(validation, ctx.device)
    return loader, validation


def require_targets(validation: Iterable[Batch], device: torch.device) -> None:
    """Reads the validation set until a micro-batch of some rank has a valid target.

    Raises:
        ConfigError: on every rank, if none has.
    """
    found = torch.tensor(float(any(count_targets(batch) for batch in validation)), device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if not found.item():
        raise ConfigError(
            f"the validation set has no valid target: check its data and the label masks. {OTHER_VALIDATION}"
        )
