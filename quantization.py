"""Low precision, layer by layer: which recipe every decoder layer runs in, and what a recipe asks of a run.

A decoder layer's linear layers (QKV, attention output, both MLP projections, of every expert where there are experts)
run in FP8, in FP4 or in the model's own dtype. Everything else stays in high precision: LM head, embedding, norms,
attention, router, residual stream. ``fp8_layers``
and ``fp4_layers`` count from 1:

| on | lists | layers |
|---|---|---|
| one format | none | all |
| one format | its own | those; the rest in high precision |
| both | one | those; the other format takes the remaining layers |
| both | both | those; the rest in high precision |

The first and the last layers hold the model's ends together and lose most to a narrow format. To keep them in BF16,
name the others: ``fp8_layers=[2,3,4,5,6,7]`` of eight (hydra_config/llama/L1_llama_1b_fp8_bf16_ends.yaml).

What a run does, in order: the config is validated (config_low_precision.py), :func:`plan_precision` checks what takes
the model config and the device to know, and its :class:`PrecisionPlan` (precision.py) then builds and runs
the layers and pads the batches. quantized_parameters.py: weights held in a compute format.
quantization_stats.py: how much a recipe loses.
"""

import logging
from collections.abc import Sequence
from dataclasses import fields
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedConfig

import te_backend
from config import TrainConfig
from config_low_precision import layer_problems, parse_format
from errors import ConfigError
from precision import PrecisionPlan
from te_reference.emulation import RECIPE_MULTIPLES
from te_reference.recipe import TE_RECIPE_MODULE


logger = logging.getLogger(__name__)

# Lowest and first unsupported compute capability, lowest CUDA version (transformer_engine/pytorch/quantization.py).
HARDWARE: dict[str, tuple[tuple[int, int], tuple[int, int] | None, tuple[int, int]]] = {
    "DelayedScaling": ((8, 9), None, (12, 1)),
    "Float8CurrentScaling": ((8, 9), None, (12, 1)),
    "Float8BlockScaling": ((9, 0), None, (12, 9)),
    "MXFP8BlockScaling": ((10, 0), (12, 0), (12, 8)),
    "NVFP4BlockScaling": ((10, 0), None, (12, 8)),
}


def layer_formats(config: TrainConfig, num_layers: int) -> list[str | None]:
    """``fp8``, ``fp4`` or None per layer, by the table above; :func:`layer_problems` must have found nothing."""
    on = {"fp8": config.fp8_config.enabled, "fp4": config.fp4_config.enabled}
    lists = {"fp8": config.fp8_layers, "fp4": config.fp4_layers}
    formats: list[str | None] = [None] * num_layers
    for name in on:
        for number in lists[name] or []:
            formats[number - 1] = name
    for name, other in (("fp8", "fp4"), ("fp4", "fp8")):
        if on[name] and lists[name] is None:
            formats = [taken or name for taken in formats]
            if on[other]:
                rest = [number for number, taken in enumerate(formats, start=1) if taken == name]
                logger.info("%s_layers is not given: %s takes the remaining layers %s", name, name.upper(), rest)
    return formats


def plan_precision(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    device: torch.device,
    num_shards: int = 1,
    num_expert_shards: int | None = None,
) -> PrecisionPlan:
    """The recipes of a run, checked against the model's sizes and the device, before the model is built.

    Args:
        model_config: reads the number of layers and their sizes.
        device: where the layers will run.
        num_shards: ranks that every parameter is cut over (FSDP2); 1: none.
        num_expert_shards: mixture of experts: ranks that each expert is cut over instead; None: no experts.

    Raises:
        ConfigError: every problem found.
    """
    num_layers = model_config.num_hidden_layers
    if not (config.fp8_config.enabled or config.fp4_config.enabled):
        if problems := fused_mlp_problems(model_config, [None]):
            raise ConfigError(*problems)
        logger.info("precision: no layer in FP8 or FP4")
        return PrecisionPlan((None,) * num_layers)
    if problems := layer_problems(config, num_layers):
        raise ConfigError(*problems)
    te = te_backend.resolve(config.te_backend)
    formats = layer_formats(config, num_layers)
    recipes: dict[str, Any] = {}
    for prefix, section in (("fp8", config.fp8_config), ("fp4", config.fp4_config)):
        if section.enabled:
            name = getattr(section, f"{prefix}_recipe").rpartition(".")[2]
            if not te_backend.is_reference(te):
                problems += hardware_problems(name, torch.cuda.get_device_capability(device), torch.version.cuda)
            try:
                recipes[prefix] = build_recipe(
                    te_backend.recipe_module(te),
                    name,
                    f"{prefix}_format",
                    getattr(section, f"{prefix}_format"),
                    getattr(section, f"{prefix}_recipe_kwargs"),
                )
            except ValueError as error:
                problems.append(f"{prefix}_config: {error}")
                continue
            problems += size_problems(model_config, name)
            if getattr(recipes[prefix], "fp8_dpa", False):
                problems += fp8_attention_problems(
                    config.use_sequence_packing, torch.cuda.get_device_capability(device)
                )
    qinit = config.fp8_config.quantized_model_init_kwargs
    asked = qinit.enabled or bool(config.config_kwargs.get("use_quantized_model_init"))
    if asked:
        for recipe in recipes.values():
            name = type(recipe).__name__
            problems += quantized_init_problems(model_config, name, num_shards, num_expert_shards)
        if num_shards > 1 and not config.use_meta_device:
            problems.append(
                "quantised init with use_meta_device=false: FSDP2 cuts weights that have values already in high "
                "precision, and they would stay there. Set use_meta_device=true, or turn quantised init off."
            )
    if num_expert_shards is not None and not te_backend.is_reference(te):
        names = {type(recipe).__name__ for recipe in recipes.values()}
        problems += te_expert_problems(names, num_expert_shards, asked, config.activation_checkpointing)
    per_layer = tuple(recipes.get(name) for name in formats)
    problems += fused_mlp_problems(model_config, per_layer)
    if problems:
        raise ConfigError(*problems)
    plan = PrecisionPlan(per_layer, te, asked, qinit.preserve_high_precision_init_val)
    logger.info("precision: %s%s", plan.describe(), "; weights held in these formats only" if asked else "")
    return plan


def build_recipe(
    recipe_module: ModuleType, name: str, format_field: str, format_name: str | None, kwargs: dict[str, Any]
) -> Any:
    """A recipe of TE's or the reference's module.

    Args:
        name: class name.
        format_field: ``fp8_format`` or ``fp4_format``.
        format_name: E4M3, HYBRID or E2M1; None: the recipe's own.
        kwargs: the recipe's other fields.

    Raises:
        ValueError: a field that the recipe does not have, or a value of another type or that it refuses.
    """
    recipe_class = getattr(recipe_module, name)
    known = {field.name for field in fields(recipe_class)} - {"fp8_format", "fp4_format"}
    if unknown := sorted(set(kwargs) - known):
        raise ValueError(
            f"{name} of {recipe_module.__name__} has no field {', '.join(unknown)}: use {', '.join(sorted(known))}."
        )
    if problems := field_type_problems(recipe_class, kwargs):
        raise ValueError(" ".join(problems))
    given = {} if format_name is None else {format_field: parse_format(recipe_module.Format, format_name)}
    try:
        return recipe_class(**given, **kwargs)
    except (AssertionError, TypeError) as error:  # TE's way to refuse a value
        raise ValueError(f"{name}({kwargs}): {error}") from error


FIELD_TYPES = {bool: "true or false", int: "a whole number", float: "a number"}


def field_type_problems(recipe_class: type, kwargs: dict[str, Any]) -> list[str]:
    """Values of another type than the field's default. Recipes only ask whether a value counts as true, and on Hydra's
    command line ``no`` is a string, which does."""
    problems = []
    for field in fields(recipe_class):
        kind = type(field.default)
        if field.name not in kwargs or kind not in FIELD_TYPES:
            continue
        value = kwargs[field.name]
        if type(value) is not kind and not (kind is float and type(value) is int):
            problems.append(
                f"{recipe_class.__name__}.{field.name}={value!r} must be {FIELD_TYPES[kind]} (default: "
                f"{str(field.default).lower()}), not of type {type(value).__name__}."
            )
    return problems


def hardware_problems(name: str, capability: tuple[int, int], cuda: str) -> list[str]:
    """Why a device of this compute capability and CUDA version cannot run a recipe, with what it can run instead."""

    def runs(recipe: str) -> bool:
        lowest, beyond, lowest_cuda = HARDWARE[recipe]
        version = tuple(int(part) for part in cuda.split(".")[:2])
        return lowest <= capability and (beyond is None or capability < beyond) and version >= lowest_cuda

    if runs(name):
        return []
    lowest, beyond, lowest_cuda = HARDWARE[name]
    needed = (
        f"{lowest[0]}.{lowest[1]} or later" if beyond is None else f"{lowest[0]}.{lowest[1]} to below {beyond[0]}.0"
    )
    others = [other for other in HARDWARE if runs(other)]
    instead = f"another recipe ({', '.join(others)}), or " if others else ""
    return [
        f"{TE_RECIPE_MODULE}.{name} needs compute capability {needed} and CUDA {lowest_cuda[0]}.{lowest_cuda[1]}; this "
        f"device has {capability[0]}.{capability[1]} and CUDA {cuda}. Use {instead}te_backend=reference, which "
        "emulates it."
    ]


def fp8_attention_problems(use_sequence_packing: bool, capability: tuple[int, int]) -> list[str]:
    """Why attention cannot run in FP8 (TransformerEngine's ``fp8_dpa``)."""
    if use_sequence_packing and capability < (10, 0):
        return [
            "fp8_recipe_kwargs.fp8_dpa=true: FP8 attention does not train on packed (THD) batches before compute "
            f"capability 10.0; this device has {capability[0]}.{capability[1]}. Drop it, or set "
            "use_sequence_packing=false."
        ]
    return []


def linear_sizes(model_config: PreTrainedConfig) -> dict[str, int]:
    """Features in and out of a decoder layer's linear layers, by what they are made of."""
    heads, head_dim = model_config.num_attention_heads, model_config.head_dim
    head_dim = head_dim or model_config.hidden_size // heads
    return {
        "hidden_size": model_config.hidden_size,
        "num_attention_heads * head_dim": heads * head_dim,
        "(num_attention_heads + 2 * num_key_value_heads) * head_dim": (heads + 2 * model_config.num_key_value_heads)
        * head_dim,
        "intermediate_size": model_config.intermediate_size,
    }


def size_problems(model_config: PreTrainedConfig, name: str) -> list[str]:
    """Layer sizes that a recipe cannot hold."""
    multiple = RECIPE_MULTIPLES[name].features
    return [
        f"{what} = {size} is not a multiple of {multiple}, which {name} needs: change the model's sizes, or choose "
        "another recipe."
        for what, size in linear_sizes(model_config).items()
        if size % multiple
    ]


def fused_mlp_problems(model_config: PreTrainedConfig, per_layer: Sequence[Any]) -> list[str]:
    """Why the layers' recipes rule out TransformerEngine's fused grouped MLP, if the model config asks for it."""
    names = ["high precision" if recipe is None else type(recipe).__name__ for recipe in per_layer]
    others = sorted(set(names) - {"MXFP8BlockScaling"})
    if not getattr(model_config, "fused_grouped_mlp", False) or not others:
        return []
    return [
        f"fused_grouped_mlp=true with layers in {', '.join(others)}: the fused kernel runs MXFP8 only. Put every layer "
        "in fp8_config.fp8_recipe=MXFP8BlockScaling, or set fused_grouped_mlp=false."
    ]


def te_expert_problems(
    names: set[str], num_expert_shards: int, quantized_init: bool, activation_checkpointing: str
) -> list[str]:
    """Why TransformerEngine's grouped products cannot run these recipes, each expert cut over ``num_expert_shards``
    ranks."""
    problems = []
    if "DelayedScaling" in names and activation_checkpointing not in ("off", "0"):
        problems.append(
            f"DelayedScaling with activation_checkpointing={activation_checkpointing}: TransformerEngine 2.20's "
            "grouped products would run again with the scales of the next step. Use another recipe, or "
            "activation_checkpointing=off."
        )
    if "Float8BlockScaling" in names:
        problems.append(
            "Float8BlockScaling: TransformerEngine 2.20 has no kernel for it in the experts' grouped products. Use "
            "DelayedScaling or Float8CurrentScaling, or te_backend=reference, which emulates it."
        )
    if quantized_init and num_expert_shards > 1:
        problems.append(
            f"quantised init with experts cut over {num_expert_shards} ranks: TransformerEngine 2.20 gathers quantised "
            "weights along their first dim only, and each expert of a stack is cut along its rows. Set "
            "parallelism.dp_size=1, turn quantised init off, or use te_backend=reference."
        )
    return problems


def quantized_init_problems(
    model_config: PreTrainedConfig, name: str, num_shards: int, num_expert_shards: int | None = None
) -> list[str]:
    """Why weights cannot be held in a recipe's format, cut over ``num_shards`` ranks, experts (None: there are none)
    over ``num_expert_shards``."""
    if name == "Float8BlockScaling":
        return [
            "quantised init with Float8BlockScaling: TransformerEngine 2.20 cannot train parameters in this format. "
            "Use DelayedScaling, Float8CurrentScaling or MXFP8BlockScaling, or turn quantised init off."
        ]
    if num_shards == 1:
        return []
    if name == "NVFP4BlockScaling":
        return [
            "quantised init with NVFP4BlockScaling on FSDP2 shards: TransformerEngine 2.20 cannot gather parameters in "
            "this format. Use train_ddp.py, an FP8 recipe, or turn quantised init off."
        ]
    rows = 32 if name == "MXFP8BlockScaling" else 1
    sizes = linear_sizes(model_config)
    del sizes["num_attention_heads * head_dim"]  # features in only; a weight is cut along its features out
    cuts = [(what, size, num_shards) for what, size in sizes.items()]
    if num_expert_shards is not None:
        cuts = [cut for cut in cuts if cut[0] != "intermediate_size"]
        cuts += [(what, sizes[what], num_expert_shards) for what in ("hidden_size", "intermediate_size")]
    return [
        f"quantised init: {what} = {size} rows of a weight cannot be cut over {ranks} ranks in multiples of {rows}, "
        f"which {name} needs: use fewer ranks{'' if num_expert_shards else ' (or hsdp_replicate_size)'}, or turn "
        "quantised init off."
        for what, size, ranks in cuts
        if size % (ranks * rows)
    ]
