"""nvdlfw-inspect's statistics config, as far as it is honoured: which layers, tensors, statistics and steps.

    section:
      enabled: true
      layers: {layer_name_regex_pattern: ... | layer_types: [...] | layer_numbers: [...] | exact_layer_names: [...]}
      transformer_engine:
        LogFp8TensorStats:              # or LogNvfp4TensorStats
          enabled: true
          tensors_struct:
            - {tensor: activation, stats: [underflows%, mse], freq: 10, start_step: 0, end_step: 1000}

Each feature is narrowed to the layers that run in its format: ``LogFp8TensorStats`` FP8, ``LogNvfp4TensorStats`` FP4.

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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from config import ConfigError
from precision import PrecisionPlan
from te_reference.quant_stats import STAT_PREFIXES


logger = logging.getLogger(__name__)

FEATURES = {"LogFp8TensorStats": "fp8", "LogNvfp4TensorStats": "fp4"}
FEATURE_STATS = {
    "LogFp8TensorStats": ("underflows%", "overflows%", "mse", "scale_inv_min", "scale_inv_max"),
    "LogNvfp4TensorStats": ("underflows%", "mse"),
}
TENSORS = ("activation", "gradient", "weight")
_COLUMNWISE = "_columnwise"


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
        if self.tensor not in TENSORS:
            found.append(f"tensor {self.tensor!r} is not one of {', '.join(TENSORS)}.")
        for stat in self.stats:
            recipe = stat.recipe or own_recipe
            if stat.name not in FEATURE_STATS[self.feature]:
                found.append(f"{stat.shown}: {self.feature} has {', '.join(FEATURE_STATS[self.feature])}.")
            elif stat.name == "overflows%" and recipe != "DelayedScaling":
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
                for entry in _entries(options):
                    found.append(
                        Request(
                            feature,
                            entry["tensor"],
                            tuple(Stat.parse(text, feature) for text in entry["stats"]),
                            entry.get("freq") or 1,
                            entry.get("start_step") or 0,
                            entry.get("end_step"),
                        )
                    )
    return found


def restrict_to_formats(stats_config: Any, plan: PrecisionPlan, path: str) -> dict[str, Any]:
    """nvdlfw-inspect's config, each enabled section of it narrowed to the layers that run in its feature's format.

    Returns:
        Sections of one feature each, whose layers are one regular expression.

    Raises:
        ConfigError: not such a config, a feature other than the two above, or nothing left to log.
    """
    problems, restricted, found = [], {}, {}
    for title, section in (stats_config if isinstance(stats_config, dict) else {}).items():
        if not isinstance(section, dict) or not {"enabled", "layers", "transformer_engine"} <= section.keys():
            problems.append(f"{path}: {title!r} needs the keys enabled, layers and transformer_engine.")
        elif section["enabled"]:
            for feature, options in section["transformer_engine"].items():
                if feature not in FEATURES:
                    problems.append(f"{path}: {title}: feature {feature!r} is not one of {', '.join(FEATURES)}.")
                elif options.get("enabled", False):
                    found[f"{title}_{feature}"] = (feature, section["layers"], options)
    for title, (feature, layers, options) in found.items():
        numbers = [n for n, name in enumerate(plan.formats, start=1) if name == FEATURES[feature]]
        pattern = layer_pattern(layers, numbers)
        if pattern is None:
            logger.info("%s: %s: no layer of it runs in %s; left out", path, title, FEATURES[feature].upper())
            continue
        restricted[title] = {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": pattern},
            "transformer_engine": {feature: copy.deepcopy(options)},
        }
    if not restricted and not problems:
        formats = sorted({name for name in plan.formats if name})
        fitting = f"quant_stats_config.quant_stats_file=./{formats[0]}_debugging_stats.yaml"  # fp4's has fp8, too
        problems.append(
            f"quant_stats_config.quant_stats_file={path!r} logs no layer of this run, whose layers use "
            f"{', '.join(formats).upper()}: set {fitting}, or a file of your own that does."
        )
    if problems:
        raise ConfigError(*problems)
    for name in {name for name in plan.formats if name} - {FEATURES[feature] for feature, _, _ in found.values()}:
        logger.info("%s has no section for %s: the layers that run in it are left out", path, name.upper())
    return restricted


def layer_pattern(layers: Mapping[str, Any], numbers: list[int]) -> str | None:
    """A regular expression for the names that nvdlfw-inspect's ``layers`` selects among layers ``numbers`` (from 1)."""
    if (wanted := layers.get("layer_numbers")) is not None and wanted not in ("all", ["all"]):
        chosen: set[int] = set()
        for item in wanted if isinstance(wanted, list) else [wanted]:
            first, _, last = str(item).partition("-")
            chosen |= set(range(int(first), int(last or first) + 1))
        numbers = [number for number in numbers if number in chosen]
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
        for entry in _entries(options):
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


def _entries(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per tensor: ``tensors_struct``, or its short form, ``tensors`` with options in common."""
    if "tensors_struct" in options:
        return list(options["tensors_struct"])
    common = {key: value for key, value in options.items() if key not in ("enabled", "tensors")}
    tensors = options.get("tensors", [])
    return [{"tensor": tensor, **common} for tensor in ([tensors] if isinstance(tensors, str) else tensors)]
