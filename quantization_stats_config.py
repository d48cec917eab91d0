"""nvdlfw-inspect's statistics config, as far as it is honoured: which layers, tensors, statistics and steps.

quantization_stats_rules.py reads and checks the file; here is what it means.

    section:
      enabled: true
      layers: {layer_name_regex_pattern: ... | layer_types: [...] | exact_layer_names: [...], layer_numbers: [1, 3-5]}
      transformer_engine:
        LogFp8TensorStats:              # or LogNvfp4TensorStats
          enabled: true
          tensors_struct:
            - {tensor: activation, stats: [underflows%, mse], freq: 10, start_step: 0, end_step: 1000}

One way to name the layers, or ``layer_numbers`` (from 1), or both. ``tensors: [activation, weight]`` beside the other
keys of an entry is short for entries that differ in nothing else. Each feature is narrowed to the layers that run in
its format: ``LogFp8TensorStats`` FP8, ``LogNvfp4TensorStats`` FP4.

| statistic | feature |
|---|---|
| underflows%, mse | both |
| scale_inv_min, scale_inv_max | FP8 |
| overflows% | FP8, DelayedScaling only |

What they mean: te_reference/quant_stats.py. In the FP8 feature a statistic may carry the suffix ``_columnwise`` (block
recipes: the copy that the other direction's matrix product takes) and the prefix of another recipe
(``mxfp8_underflows%``: what if the tensor were quantised like that?).
"""

import copy
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from errors import ConfigError
from precision import PrecisionPlan
from te_reference.quant_stats import STAT_PREFIXES


logger = logging.getLogger(__name__)

FEATURES = {"LogFp8TensorStats": "fp8", "LogNvfp4TensorStats": "fp4"}
FEATURE_STATS = {
    "LogFp8TensorStats": ("underflows%", "overflows%", "mse", "scale_inv_min", "scale_inv_max"),
    "LogNvfp4TensorStats": ("underflows%", "mse"),
}
TENSORS = ("activation", "gradient", "weight")
ATTENTION = ("self_attention.layernorm_qkv", "self_attention.proj")
MLP = ("layernorm_mlp.fc1", "layernorm_mlp.fc2")
_COLUMNWISE = "_columnwise"


class LinearLayer(NamedTuple):
    """One that statistics can be of."""

    name: str
    """nvdlfw-inspect's."""
    number: int
    """Of its decoder layer, from 1."""
    format: str | None
    """``fp8`` or ``fp4``; None: high precision."""
    recipe: str | None
    """Class name."""


def linear_layers(plan: PrecisionPlan, has_experts: bool) -> list[LinearLayer]:
    """Those of a model; experts have no statistics (TransformerEngine has none for their operations)."""
    return [
        LinearLayer(
            inspect_name(f"model.layers.{index}", part),
            index + 1,
            plan.formats[index],
            None if recipe is None else type(recipe).__name__,
        )
        for index, recipe in enumerate(plan.recipes)
        for part in (ATTENTION if has_experts else ATTENTION + MLP)
    ]


def inspect_name(layer_name: str, module_name: str) -> str:
    """nvdlfw-inspect's name of a module: ``model.`` in front, and layers counted from 1.

    ``model.layers.0`` and ``self_attention.proj`` -> ``model.model.layers.1.self_attention.proj``.
    """
    prefix, _, index = layer_name.rpartition(".")
    return f"model.{prefix}.{int(index) + 1}.{module_name}"


class Stat(NamedTuple):
    """One entry of ``stats``."""

    name: str
    """As in FEATURE_STATS."""
    recipe: str | None
    """Class name; None: the recipe that the layer runs in."""
    columnwise: bool
    shown: str
    """Its name in the log."""

    @classmethod
    def parse(cls, text: str, feature: str) -> "Stat":
        """``mxfp8_mse_columnwise`` -> mse of MXFP8's column-wise copy."""
        if feature == "LogNvfp4TensorStats":
            return cls(text, None, False, f"nvfp4_{text}")
        name = text.removesuffix(_COLUMNWISE)
        for recipe, prefix in STAT_PREFIXES.items():
            if name.startswith(f"{prefix}_"):
                return cls(name.removeprefix(f"{prefix}_"), recipe, name != text, text)
        return cls(name, None, name != text, text)


@dataclass(frozen=True)
class Request:
    """One tensor's entry of a feature."""

    feature: str
    tensor: str
    stats: tuple[Stat, ...]
    freq: int = 1
    start_step: int = 0
    end_step: int | None = None

    def due(self, iteration: int) -> bool:
        """Whether ``iteration`` is logged."""
        begun = self.start_step <= iteration and (self.end_step is None or iteration <= self.end_step)
        return begun and iteration % self.freq == 0

    def problems(self, own_recipe: str) -> list[str]:
        """Why this cannot be computed for a layer that runs in ``own_recipe``."""
        found = []
        for stat in self.stats:
            recipe = stat.recipe or own_recipe
            if stat.name == "overflows%" and recipe != "DelayedScaling":
                found.append(f"{stat.shown} of {recipe}: only DelayedScaling's scales can be too large. Drop it.")
            elif recipe == "DelayedScaling" != own_recipe:
                found.append(f"{stat.shown}: DelayedScaling needs the scales of earlier steps; {own_recipe} has none.")
            elif recipe == "NVFP4BlockScaling" and self.feature == "LogFp8TensorStats":
                found.append(f"{stat.shown}: use the feature LogNvfp4TensorStats.")
            elif stat.columnwise and recipe in ("DelayedScaling", "Float8CurrentScaling"):
                found.append(f"{stat.shown}: {recipe} has one scale for both directions. Drop {_COLUMNWISE!r}.")
        return found


def requests_for(stats_config: Mapping[str, Any], layer: str) -> list[Request]:
    """The entries of a restricted config (:func:`restrict_to_formats`) that apply to a layer's name."""
    found = []
    for section in stats_config.values():
        if re.search(section["layers"]["layer_name_regex_pattern"], layer):
            for feature, options in section["transformer_engine"].items():
                for entry in entries_of(options):
                    found.append(
                        Request(
                            feature,
                            entry["tensor"],
                            tuple(Stat.parse(text, feature) for text in entry["stats"]),
                            entry.get("freq", 1),
                            entry.get("start_step", 0),
                            entry.get("end_step"),
                        )
                    )
    return found


def restrict_to_formats(stats_config: Mapping[str, Any], layers: Sequence[LinearLayer], path: str) -> dict[str, Any]:
    """nvdlfw-inspect's config, each enabled section of it narrowed to the layers that run in its feature's format.

    Args:
        stats_config: a file's content that breaks no rule (quantization_stats_rules.py).
        layers: all of the model (:func:`linear_layers`).

    Returns:
        Sections of one feature each, whose layers are one regular expression.

    Raises:
        ConfigError: nothing left to log.
    """
    found, restricted = [], {}
    for title, section in stats_config.items():
        if section["enabled"]:
            for feature, options in section["transformer_engine"].items():
                if options["enabled"]:
                    found.append((title, feature, section["layers"], options))
    for title, feature, chosen, options in found:
        numbers = sorted({layer.number for layer in layers if layer.format == FEATURES[feature]})
        pattern = layer_pattern(chosen, numbers)
        if pattern is None or not any(re.search(pattern, layer.name) for layer in layers):
            logger.info("%s: %s: no layer of it runs in %s; left out", path, title, FEATURES[feature].upper())
            continue
        restricted[f"{title}_{feature}"] = {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": pattern},
            "transformer_engine": {feature: copy.deepcopy(options)},
        }
    formats = sorted({layer.format for layer in layers if layer.format})
    if not restricted:
        fitting = f"quant_stats_config.quant_stats_file=./{formats[0]}_debugging_stats.yaml"  # fp4's has fp8, too
        raise ConfigError(
            f"quant_stats_config.quant_stats_file={path!r} logs no layer of this run, whose layers use "
            f"{', '.join(formats).upper()}: set {fitting}, or a file of your own that does."
        )
    for name in sorted(set(formats) - {FEATURES[feature] for _, feature, _, _ in found}):
        logger.info("%s has no section for %s: the layers that run in it are left out", path, name.upper())
    return restricted


def layer_pattern(layers: Mapping[str, Any], numbers: Iterable[int]) -> str | None:
    """A regular expression for the names that nvdlfw-inspect's ``layers`` selects among layers ``numbers`` (from 1)."""
    chosen = chosen_numbers(layers.get("layer_numbers", "all"))
    numbers = [number for number in numbers if chosen is None or number in chosen]
    if not numbers:
        return None
    if "exact_layer_names" in layers:
        names = f"(?:{'|'.join(map(re.escape, layers['exact_layer_names']))})$"
    elif "layer_name_regex_pattern" in layers:
        names = f"(?:{layers['layer_name_regex_pattern']})"
    else:
        types = layers.get("layer_types", ["all"])
        names = "" if "all" in types else f"(?:{'|'.join(map(re.escape, types))})"
    return rf"^(?=.*\.layers\.(?:{'|'.join(map(str, numbers))})\.).*{names}"


def chosen_numbers(wanted: Any) -> set[int] | None:
    """What ``layer_numbers`` names: ``3``, ``3-5``, or a list of these; None: ``all``.

    Raises:
        ValueError: something else.
    """
    chosen: set[int] = set()
    for item in wanted if isinstance(wanted, list) else [wanted]:
        if item == "all":
            return None
        first, _, last = str(item).partition("-")
        span = range(int(first), int(last or first) + 1)
        if isinstance(item, bool) or not span:
            raise ValueError(f"{item!r} is no layer number, nor a range of them")
        chosen.update(span)
    return chosen


def without_quantized_weights(stats_config: dict[str, Any], path: str) -> dict[str, Any]:
    """The restricted config without the statistics that compare a weight with its high-precision values, which
    quantised init does not hold; says so.

    Raises:
        ConfigError: nothing is left.
    """
    left = {}
    for title, section in stats_config.items():
        ((feature, options),) = section["transformer_engine"].items()
        entries = []
        for entry in entries_of(options):
            kept = [text for text in entry["stats"] if Stat.parse(text, feature).name.startswith("scale_inv")]
            kept = kept if entry["tensor"] == "weight" else entry["stats"]
            if dropped := [text for text in entry["stats"] if text not in kept]:
                logger.info(
                    "%s: %s: %s of weight left out: quantised init holds no weight in high precision",
                    path,
                    title,
                    ", ".join(dropped),
                )
            entries += [{**entry, "stats": kept}] if kept else []
        if entries:
            features = {feature: {"enabled": True, "tensors_struct": entries}}
            left[title] = {**section, "transformer_engine": features}
    if not left:
        raise ConfigError(
            f"{path} asks for statistics of weights in high precision only, which quantised init does not hold: name "
            "other tensors, scale_inv_min or scale_inv_max."
        )
    return left


def entries_of(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per tensor: ``tensors_struct``, or its short form, ``tensors`` with options in common."""
    if "tensors_struct" in options:
        return list(options["tensors_struct"])
    common = {key: value for key, value in options.items() if key not in ("enabled", "tensors")}
    tensors = options.get("tensors", [])
    return [{"tensor": tensor, **common} for tensor in ([tensors] if isinstance(tensors, str) else tensors)]
