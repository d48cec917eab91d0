"""The rules of a statistics file (quantization_stats_config.py says what it holds), checked before a model is built.

What nvdlfw-inspect would take but read differently from what stands there is refused, too: it uses the first of two
entries for a tensor, allows one section per layer, and finds ``fc1`` written as text in any name with an f, a c or a 1.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from errors import ConfigError
from quantization import HARDWARE
from quantization_stats_config import (
    FEATURE_STATS,
    FEATURES,
    TENSORS,
    LinearLayer,
    Stat,
    chosen_numbers,
    layer_pattern,
    requests_for,
    restrict_to_formats,
)


WAYS_TO_NAME = ("layer_name_regex_pattern", "layer_types", "exact_layer_names")
STEPS = ("freq", "start_step", "end_step")


def load_stats_config(
    path: Path, layers: Sequence[LinearLayer], capability: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Reads a statistics file for a model.

    Args:
        layers: all of the model (:func:`quantization_stats_config.linear_layers`).
        capability: compute capability of the device on which TransformerEngine quantises; None: the reference does.

    Returns:
        As :func:`quantization_stats_config.restrict_to_formats`.

    Raises:
        ConfigError: every problem found.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is no YAML file: {' '.join(str(error).split())}. Repair it.") from error
    content = {} if content is None else content
    if problems := list(file_problems(content, layers)):
        raise ConfigError(*(f"{path}: {problem}" for problem in problems))
    restricted = restrict_to_formats(content, layers, str(path))
    if problems := list(dict.fromkeys(layer_problems(restricted, layers, capability))):
        raise ConfigError(*(f"{path}: {problem}" for problem in problems))
    return restricted


def layer_problems(
    restricted: dict[str, Any], layers: Iterable[LinearLayer], capability: tuple[int, int] | None = None
) -> Iterator[str]:
    """What some layer of the model cannot have, of a restricted config."""
    for layer in layers:
        sections = [
            title
            for title, section in restricted.items()
            if re.search(section["layers"]["layer_name_regex_pattern"], layer.name)
        ]
        if len(sections) > 1:
            yield f"{' and '.join(sections)} both select {layer.name}: nvdlfw-inspect takes one. Join or narrow them."
        for request in requests_for(restricted, layer.name):
            yield from request.problems(layer.recipe)
            for stat in request.stats:
                lowest = HARDWARE[stat.recipe or layer.recipe][0]
                if capability is not None and capability < lowest:
                    yield (
                        f"{stat.shown}: TransformerEngine quantises so from compute capability {lowest[0]}.{lowest[1]} "
                        f"on; this device has {capability[0]}.{capability[1]}. Drop it, or set te_backend=reference."
                    )


def file_problems(content: Any, layers: Sequence[LinearLayer]) -> Iterator[str]:
    """What is wrong with a file, whatever the layers run in. What is not enabled is not looked at."""
    if not isinstance(content, dict):
        yield f"{content!r} is not a mapping of sections (quantization_stats_config.py shows one)."
        return
    for title, section in content.items():
        yield from _key_problems(title, section, required=("enabled", "layers", "transformer_engine"))
        if not _is_on(section):
            continue
        if "layers" in section:
            yield from selection_problems(f"{title}.layers", section["layers"], layers)
        if "transformer_engine" in section:
            where, features = f"{title}.transformer_engine", section["transformer_engine"]
            yield from _key_problems(where, features, optional=tuple(FEATURES))
            for feature in FEATURES:
                if isinstance(features, dict) and feature in features:
                    yield from feature_problems(f"{where}.{feature}", feature, features[feature])


def selection_problems(where: str, chosen: Any, layers: Sequence[LinearLayer]) -> Iterator[str]:
    """Of a section's ``layers``."""
    problems = list(_key_problems(where, chosen, optional=(*WAYS_TO_NAME, "layer_numbers")))
    if isinstance(chosen, dict):
        ways = [way for way in WAYS_TO_NAME if way in chosen]
        if len(ways) > 1:
            problems.append(f"{where} has {' and '.join(ways)}: keep one.")
        if "layer_name_regex_pattern" in ways:
            problems += _pattern_problems(f"{where}.layer_name_regex_pattern", chosen["layer_name_regex_pattern"])
        for way in ("layer_types", "exact_layer_names"):
            if way in ways:
                example = "fc1" if way == "layer_types" else layers[0].name
                problems += _list_problems(f"{where}.{way}", chosen[way], example)
        if "layer_numbers" in chosen:
            problems += _number_problems(f"{where}.layer_numbers", chosen["layer_numbers"], layers[-1].number)
    if not problems:
        problems += _match_problems(where, chosen, layers)
    yield from problems


def feature_problems(where: str, feature: str, options: Any) -> Iterator[str]:
    """Of a feature's options."""
    if isinstance(options, dict) and "tensors_struct" not in options and "tensors" in options:
        yield from _key_problems(where, options, required=("enabled", "tensors", "stats"), optional=STEPS)
        if _is_on(options):
            tensors = options["tensors"]
            tensors = [tensors] if isinstance(tensors, str) else tensors
            yield from _list_problems(f"{where}.tensors", tensors, ", ".join(TENSORS))
            for tensor in tensors if isinstance(tensors, list) else ():
                yield from _tensor_problems(f"{where}.tensors", tensor)
            yield from entry_problems(where, feature, options)
        return
    yield from _key_problems(where, options, required=("enabled", "tensors_struct"))
    if not _is_on(options) or "tensors_struct" not in options:
        return
    where, entries = f"{where}.tensors_struct", options["tensors_struct"]
    if not isinstance(entries, list) or not entries:
        yield f"{where}={entries!r} must be a list of entries, such as [{{tensor: activation, stats: [mse]}}]."
        return
    for index, entry in enumerate(entries):
        at = f"{where}[{index}]"
        yield from _key_problems(at, entry, required=("tensor", "stats"), optional=STEPS)
        if isinstance(entry, dict):
            if "tensor" in entry:
                yield from _tensor_problems(f"{at}.tensor", entry["tensor"])
            yield from entry_problems(at, feature, entry)
    tensors = [entry.get("tensor") for entry in entries if isinstance(entry, dict)]
    for tensor in TENSORS:
        if tensors.count(tensor) > 1:
            yield f"{where} has {tensors.count(tensor)} entries for {tensor}: join them."


def entry_problems(where: str, feature: str, entry: dict[str, Any]) -> Iterator[str]:
    """Of the statistics and steps of an entry."""
    if "stats" in entry:
        stats = entry["stats"]
        problems = list(_list_problems(f"{where}.stats", stats, "underflows%, mse"))
        yield from problems
        for text in stats if not problems else ():
            if Stat.parse(text, feature).name not in FEATURE_STATS[feature]:
                yield f"{where}.stats: {text!r} is none of {feature}'s, {', '.join(FEATURE_STATS[feature])}."
    for key in STEPS:
        least, value = int(key == "freq"), entry.get(key)
        if key in entry and (type(value) is not int or value < least):
            yield f"{where}.{key}={value!r} must be a whole number of {least} or more, or be left out."
    start, end = entry.get("start_step", 0), entry.get("end_step", 0)
    if "end_step" in entry and type(start) is type(end) is int and 0 <= end < start:
        yield f"{where}.end_step={end} is before start_step={start}: nothing would be logged."


def _key_problems(
    where: str, value: Any, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> Iterator[str]:
    """Of a mapping with these keys, one at least; ``enabled`` is true or false wherever it is a key."""
    allowed = required + optional
    if not isinstance(value, dict) or not value:
        yield f"{where}={value!r} must be a mapping with keys among {', '.join(allowed)}."
        return
    if "enabled" in required and value.get("enabled") is False:
        return
    for key in required:
        if key not in value:
            yield f"{where} needs the key {key}."
    for key in value:
        if key not in allowed:
            yield f"{where}: the key {key!r} is not one of {', '.join(allowed)}."
    if "enabled" in value and "enabled" in required and value["enabled"] is not True:
        yield f"{where}.enabled={value['enabled']!r} must be true or false, without quotes."


def _is_on(value: Any) -> bool:
    """Whether there is something to look at; where ``enabled`` is wrong, too."""
    return isinstance(value, dict) and value.get("enabled") is not False


def _list_problems(where: str, value: Any, example: str) -> Iterator[str]:
    """Of a list of texts, each there once."""
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        yield f"{where}={value!r} must be a list of one name or more, such as [{example}]."
        return
    for item in dict.fromkeys(value):
        if value.count(item) > 1:
            yield f"{where} names {item} more than once."


def _tensor_problems(where: str, tensor: Any) -> Iterator[str]:
    if tensor not in TENSORS:
        yield f"{where}: {tensor!r} is not one of {', '.join(TENSORS)}."


def _pattern_problems(where: str, pattern: Any) -> Iterator[str]:
    if not isinstance(pattern, str):
        yield f"{where}={pattern!r} must be text."
        return
    try:
        re.compile(pattern)
        re.compile(f"(?:{pattern})")  # as layer_pattern has it
    except re.error as error:
        yield f"{where}={pattern!r} is no regular expression that can be part of another: {error}."


def _number_problems(where: str, numbers: Any, last: int) -> Iterator[str]:
    try:
        chosen = chosen_numbers(numbers)
    except ValueError:
        chosen = set()
    if chosen is not None and (not chosen or min(chosen) < 1 or max(chosen) > last):
        yield f"{where}={numbers!r} must be all, or a list of layers and ranges within 1-{last}, such as [1-{last}]."


def _match_problems(where: str, chosen: dict[str, Any], layers: Sequence[LinearLayer]) -> Iterator[str]:
    """Names and patterns without a linear layer of the model, whatever that runs in."""
    parts = dict.fromkeys(layer.name.partition(f".layers.{layer.number}.")[2] for layer in layers)
    names = f"of this model, which has model.model.layers.<1 to {layers[-1].number}>.<{', '.join(parts)}>"
    for wanted in chosen.get("layer_types", ()):
        if wanted != "all" and not any(wanted in layer.name for layer in layers):
            yield f"{where}.layer_types: {wanted!r} is in the name of no linear layer {names}."
    for wanted in chosen.get("exact_layer_names", ()):
        if not any(wanted == layer.name for layer in layers):
            yield f"{where}.exact_layer_names: {wanted!r} is no linear layer {names}."
    pattern = layer_pattern(chosen, {layer.number for layer in layers})
    if "layer_name_regex_pattern" in chosen and not any(re.search(pattern, layer.name) for layer in layers):
        numbers = f" in layers {chosen['layer_numbers']}" if "layer_numbers" in chosen else ""
        pattern = chosen["layer_name_regex_pattern"]
        yield f"{where}.layer_name_regex_pattern={pattern!r} finds no linear layer{numbers} {names}."
