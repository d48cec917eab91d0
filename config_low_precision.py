"""The low-precision part of the schema and its rules; config.py holds the rest. What they mean: quantization.py."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from te_reference.recipe import RECIPES, Format, resolve_recipe_class


if TYPE_CHECKING:
    from config import TrainConfig


FP4_RECIPES = ("NVFP4BlockScaling",)
FP8_RECIPES = tuple(name for name in RECIPES if name not in FP4_RECIPES)


@dataclass
class QuantizedModelInitConfig:
    enabled: bool = False
    """Low-precision layers hold their weights in their compute format only; the optimiser holds FP32 masters. Also, and
    with FP4 alone: ``+config_kwargs.use_quantized_model_init=true``."""
    preserve_high_precision_init_val: bool = False
    """Seed the masters from the initial values before they are quantised, not from the quantised ones."""


@dataclass
class FP8Config:
    enabled: bool = False
    """Run the layers of ``fp8_layers`` in FP8."""
    fp8_recipe: str = "transformer_engine.common.recipe.DelayedScaling"
    """DelayedScaling, Float8CurrentScaling, Float8BlockScaling or MXFP8BlockScaling; with or without the path."""
    fp8_format: str | None = None
    """HYBRID (E4M3 forward, E5M2 gradients) or E4M3; null: the recipe's own (HYBRID for one scale per tensor, else
    E4M3)."""
    fp8_recipe_kwargs: dict[str, Any] = field(default_factory=dict)
    """Other fields of the recipe class."""
    quantized_model_init_kwargs: QuantizedModelInitConfig = field(default_factory=QuantizedModelInitConfig)


@dataclass
class FP4Config:
    enabled: bool = False
    """Run the layers of ``fp4_layers`` in FP4."""
    fp4_recipe: str = "transformer_engine.common.recipe.NVFP4BlockScaling"
    """NVFP4BlockScaling, with or without the path."""
    fp4_format: str | None = None
    """E2M1; null: the same."""
    fp4_recipe_kwargs: dict[str, Any] = field(default_factory=dict)
    """Other fields of the recipe class."""


@dataclass
class QuantStatsConfig:
    enabled: bool = False
    """Log statistics of quantised tensors: nvdlfw-inspect on TransformerEngine, the same numbers on the reference."""
    quant_stats_file: str = "./fp8_debugging_stats.yaml"
    """Which tensors, statistics and steps (nvdlfw-inspect's format); applied to the layers that use each format."""
    quant_log_dir: str | None = None
    """Statistics go to ``<quant_log_dir>/nvdlfw_inspect_statistics_logs/``; null: ``quant_stats`` in the run's own
    folder, beside its metrics."""


def layer_problems(config: "TrainConfig", num_layers: int | None = None) -> list[str]:
    """Broken rules of ``fp8_layers`` and ``fp4_layers``; those that need the number of layers, if it is given."""
    problems = []
    on = {"fp8": config.fp8_config.enabled, "fp4": config.fp4_config.enabled}
    lists = {"fp8": config.fp8_layers, "fp4": config.fp4_layers}
    for name, layers in lists.items():
        if layers is None:
            continue
        if not layers:
            problems.append(f"{name}_layers=[] names no layer: name some, or set {name}_config.enabled=false.")
        if repeated := [layer for layer, count in Counter(layers).items() if count > 1]:
            problems.append(f"{name}_layers names {repeated} more than once.")
        if outside := [n for n in layers if n < 1 or (num_layers is not None and n > num_layers)]:
            last = "the number of layers" if num_layers is None else num_layers
            problems.append(f"{name}_layers={outside} is out of range: layers are counted from 1 to {last}.")
    if all(on.values()):
        given = [name for name, layers in lists.items() if layers is not None]
        if not given:
            problems.append(
                "fp8_config.enabled=true and fp4_config.enabled=true, and neither fp8_layers nor fp4_layers says which "
                "layers run in which: give one of the lists (the other format takes the remaining layers) or both."
            )
        elif len(given) == 1 and num_layers is not None and set(range(1, num_layers + 1)) <= set(lists[given[0]]):
            other = "fp4" if given[0] == "fp8" else "fp8"
            problems.append(
                f"{given[0]}_layers names all {num_layers} layers and leaves none to {other.upper()}: shorten it, or "
                f"set {other}_config.enabled=false."
            )
        elif overlap := sorted(set(lists["fp8"] or []) & set(lists["fp4"] or [])):
            problems.append(f"fp8_layers and fp4_layers both name {overlap}: a layer runs in one format.")
    return problems


def low_precision_problems(config: "TrainConfig", world_size: int) -> list[str]:
    """Broken rules of the low-precision keys, as far as the config alone tells."""
    fp8, fp4, qinit = config.fp8_config, config.fp4_config, config.fp8_config.quantized_model_init_kwargs
    problems = layer_problems(config)
    for prefix, section, allowed in (("fp8", fp8, FP8_RECIPES), ("fp4", fp4, FP4_RECIPES)):
        name, given = getattr(section, f"{prefix}_recipe"), getattr(section, f"{prefix}_format")
        try:
            recipe_class = resolve_recipe_class(name)
        except ValueError as error:
            problems.append(f"{prefix}_config.{prefix}_recipe: {error}")
            continue
        if recipe_class.__name__ not in allowed:
            problems.append(f"{prefix}_config.{prefix}_recipe={name!r} is not one of {', '.join(allowed)}.")
        elif given is not None:
            try:
                recipe_class(**{f"{prefix}_format": parse_format(Format, given)})
            except ValueError as error:
                problems.append(
                    f"{prefix}_config.{prefix}_format={given!r}: {error} Or set it to null: the format then follows "
                    "the recipe."
                )
    asked = config.config_kwargs.get("use_quantized_model_init")
    if qinit.enabled and fp4.enabled and not fp8.enabled:
        problems.append(
            "fp8_config.quantized_model_init_kwargs.enabled=true with fp8_config.enabled=false: the parameters would "
            "have no format. Set fp8_config.enabled=true, turn quantised init off, or, for weights held in FP4, say "
            "+config_kwargs.use_quantized_model_init=true instead."
        )
    if asked not in (None, True, False):
        problems.append(f"config_kwargs.use_quantized_model_init={asked!r} must be true or false.")
    if asked and not (fp8.enabled or fp4.enabled):
        problems.append(
            "config_kwargs.use_quantized_model_init=true with fp8_config.enabled=false and fp4_config.enabled=false: "
            "the parameters would have no format. Turn one on, or drop it."
        )
    if qinit.preserve_high_precision_init_val and not (qinit.enabled or asked):
        problems.append(
            "fp8_config.quantized_model_init_kwargs.preserve_high_precision_init_val=true needs quantised init: set "
            "fp8_config.quantized_model_init_kwargs.enabled=true."
        )
    if qinit.enabled and asked is False:
        problems.append(
            "fp8_config.quantized_model_init_kwargs.enabled=true contradicts config_kwargs.use_quantized_model_init="
            "false: drop one of them."
        )
    if config.use_fp32_master_weights is False and (qinit.enabled or asked):
        problems.append(
            "use_fp32_master_weights=false with quantised init: updates are too small for weights held in 8 bits or "
            "fewer, and add up in FP32 masters only. Set it to true (or leave it out), or turn quantised init off."
        )
    if fp8.enabled or fp4.enabled:
        if not config.use_te:
            problems.append("use_te=false (Hugging Face's model) has no low precision: set use_te=true.")
        if config.use_torch_compile:
            problems.append("use_torch_compile=true: low-precision layers break torch.compile's graphs; drop it.")
        scales_per_rank = fp8.fp8_recipe_kwargs.get("reduce_amax") is False and world_size > 1
        if fp8.enabled and scales_per_rank and config.can_save:  # a preempted run saves, whatever its interval
            problems.append(
                "fp8_config.fp8_recipe_kwargs.reduce_amax=false gives every rank scales of its own, which a checkpoint "
                "does not hold: leave it at true, or set checkpoint.ckpt_dir=null."
            )
    stats = config.quant_stats_config
    if stats.enabled and not (fp8.enabled or fp4.enabled):
        problems.append(
            "quant_stats_config.enabled=true with fp8_config.enabled=false and fp4_config.enabled=false: there is "
            "nothing quantised to measure. Turn one on."
        )
    return problems


def parse_format(formats: Any, name: str) -> Any:
    """The member of a ``Format`` enumeration; raises ValueError if there is none of that name."""
    if name not in formats.__members__:
        raise ValueError(f"{name!r} is no format: use one of {', '.join(formats.__members__)}.")
    return formats[name]
