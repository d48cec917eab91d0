"""quantization_stats_rules.py: every broken rule of a statistics file is an error that names it."""

import copy

import pytest
import yaml

from errors import ConfigError
from low_precision import Run, make_config
from precision import PrecisionPlan
from quantization_stats import inspect_name
from quantization_stats_config import linear_layers, requests_for
from quantization_stats_rules import load_stats_config
from quantized_parameters import low_precision_layers
from te_reference.recipe import DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling


ENTRY = {"tensor": "activation", "stats": ["underflows%", "mxfp8_mse_columnwise"], "freq": 1}
GOOD = {
    "s": {
        "enabled": True,
        "layers": {"layer_types": ["fc1"]},
        "transformer_engine": {"LogFp8TensorStats": {"enabled": True, "tensors_struct": [ENTRY]}},
    }
}
LAYERS = linear_layers(PrecisionPlan((DelayedScaling(), DelayedScaling(), None)), has_experts=False)
SECTION, CHOSEN, FEATURES = ("s",), ("s", "layers"), ("s", "transformer_engine")
FEATURE = (*FEATURES, "LogFp8TensorStats")
STRUCT = (*FEATURE, "tensors_struct")
FIRST = (*STRUCT, 0)
MISSING = object()


def changed(*changes: tuple[tuple, object]) -> dict:
    """GOOD with values set (or removed: MISSING) at paths of keys."""
    content = copy.deepcopy(GOOD)
    for (*path, last), value in changes:
        place = content
        for key in path:
            place = place[key]
        if value is MISSING:
            del place[last]
        else:
            place[last] = value
    return content


def load(folder, content, layers=LAYERS, **options) -> dict:
    path = folder / "x.yaml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(yaml.safe_dump(content))
    return load_stats_config(path, layers, **options)


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [((*FIRST, "start_step"), 0), ((*FIRST, "end_step"), 0)],
        [((*SECTION, "layers"), {"layer_numbers": [1, "2-3"]})],
        [((*SECTION, "layers"), {"layer_numbers": "all", "layer_name_regex_pattern": "fc[12]$"})],
        [((*SECTION, "layers"), {"exact_layer_names": ["model.model.layers.2.self_attention.proj"]})],
        [(FEATURE, {"enabled": True, "tensors": ["weight", "gradient"], "stats": ["mse"], "freq": 2})],
        [(FEATURE, {"enabled": True, "tensors": "weight", "stats": ["mse"]})],
        [(("off",), {"enabled": False, "whatever": 1})],
        [((*FEATURES, "LogNvfp4TensorStats"), {"enabled": False})],
    ],
)
def test_what_is_taken(changes, tmp_path):
    restricted = load(tmp_path, changed(*changes))
    assert any(requests_for(restricted, layer.name) for layer in LAYERS)


@pytest.mark.parametrize(
    "path, value, message",
    [
        (SECTION, None, "s=None must be a mapping with keys among enabled, layers, transformer_engine"),
        ((*SECTION, "enabled"), MISSING, "s needs the key enabled"),
        ((*SECTION, "enabled"), "false", "s.enabled='false' must be true or false, without quotes"),
        ((*SECTION, "enabled"), 0, "s.enabled=0 must be true or false"),
        ((*SECTION, "layer"), {}, "s: the key 'layer' is not one of enabled, layers, transformer_engine"),
        (CHOSEN, MISSING, "s needs the key layers"),
        (CHOSEN, None, "s.layers=None must be a mapping with keys among layer_name_regex_pattern"),
        (CHOSEN, {}, "s.layers={} must be a mapping"),
        (CHOSEN, {"layer_typs": ["fc1"]}, "s.layers: the key 'layer_typs' is not one of"),
        (CHOSEN, {"layer_types": "fc1"}, "s.layers.layer_types='fc1' must be a list of one name or more"),
        (CHOSEN, {"layer_types": []}, r"s.layers.layer_types=\[\] must be a list of one name or more"),
        (CHOSEN, {"layer_types": ["nothing"]}, "layer_types: 'nothing' is in the name of no linear layer of this"),
        (CHOSEN, {"layer_types": ["x"]}, "<1 to 3>.<self_attention.layernorm_qkv, self_attention.proj, layernorm_mlp"),
        (
            CHOSEN,
            {"exact_layer_names": ["layers.1.self_attention.proj"]},
            "'layers.1.self_attention.proj' is no",
        ),
        (CHOSEN, {"layer_name_regex_pattern": "(["}, "is no regular expression .* unterminated"),
        (CHOSEN, {"layer_name_regex_pattern": "(?i)FC1"}, "is no regular expression that can be part of another"),
        (CHOSEN, {"layer_name_regex_pattern": "a)|(b"}, "is no regular expression"),
        (CHOSEN, {"layer_name_regex_pattern": ["fc1"]}, "must be text"),
        (CHOSEN, {"layer_name_regex_pattern": "fc3"}, "layer_name_regex_pattern='fc3' finds no linear layer of this"),
        (
            CHOSEN,
            {"layer_name_regex_pattern": r"layers\.1\.", "layer_numbers": [2]},
            r"finds no linear layer in layers \[2\]",
        ),
        (
            CHOSEN,
            {"layer_name_regex_pattern": "fc1", "layer_types": ["fc1"]},
            "layer_name_regex_pattern and layer_types: keep one",
        ),
        (CHOSEN, {"layer_numbers": "a-b"}, "layer_numbers='a-b' must be all, or a list of layers and ranges"),
        (CHOSEN, {"layer_numbers": None}, "layer_numbers=None must be all"),
        (CHOSEN, {"layer_numbers": [4]}, "within 1-3"),
        (CHOSEN, {"layer_numbers": [0, 1]}, "within 1-3"),
        (CHOSEN, {"layer_numbers": ["2-1"]}, "within 1-3"),
        (CHOSEN, {"layer_numbers": [True]}, "within 1-3"),
        (CHOSEN, {"layer_numbers": []}, "within 1-3"),
        (FEATURES, None, "s.transformer_engine=None must be a mapping with keys among LogFp8TensorStats"),
        (FEATURES, {"FakeQuant": {"enabled": True}}, "the key 'FakeQuant' is not one of LogFp8TensorStats, LogNvfp4"),
        (FEATURE, None, "LogFp8TensorStats=None must be a mapping with keys among enabled, tensors_struct"),
        ((*FEATURE, "enabled"), MISSING, "LogFp8TensorStats needs the key enabled"),
        ((*FEATURE, "enabled"), "true", "LogFp8TensorStats.enabled='true' must be true or false"),
        ((*FEATURE, "freq"), 3, "LogFp8TensorStats: the key 'freq' is not one of enabled, tensors_struct"),
        ((*FEATURE, "tensors"), ["weight"], "the key 'tensors' is not one of enabled, tensors_struct"),
        (FEATURE, {"enabled": True}, "LogFp8TensorStats needs the key tensors_struct"),
        (FEATURE, {"enabled": True, "tensors": ["weight"]}, "LogFp8TensorStats needs the key stats"),
        (FEATURE, {"enabled": True, "tensors": ["wieght"], "stats": ["mse"]}, "'wieght' is not one of activation"),
        (FEATURE, {"enabled": True, "tensors": None, "stats": ["mse"]}, r"such as \[activation, gradient, weight\]"),
        (STRUCT, None, "tensors_struct=None must be a list of entries"),
        (STRUCT, [], r"tensors_struct=\[\] must be a list of entries"),
        (STRUCT, ENTRY, "tensors_struct={.*} must be a list of entries"),
        (STRUCT, ["mse"], r"tensors_struct\[0\]='mse' must be a mapping"),
        (STRUCT, [ENTRY, {**ENTRY, "freq": 2}], "tensors_struct has 2 entries for activation: join them"),
        ((*FIRST, "tensor"), MISSING, r"tensors_struct\[0\] needs the key tensor"),
        (
            (*FIRST, "tensor"),
            "output",
            r"\[0\].tensor: 'output' is not one of activation, gradient, weight",
        ),
        ((*FIRST, "tensor"), ["weight"], r"tensor: \['weight'\] is not one of"),
        ((*FIRST, "stats"), MISSING, r"tensors_struct\[0\] needs the key stats"),
        ((*FIRST, "stats"), [], r"stats=\[\] must be a list of one name or more"),
        ((*FIRST, "stats"), "mse", "stats='mse' must be a list of one name or more"),
        ((*FIRST, "stats"), [1], r"stats=\[1\] must be a list of one name or more"),
        ((*FIRST, "stats"), ["mse", "mse"], "stats names mse more than once"),
        ((*FIRST, "stats"), ["amax"], "'amax' is none of LogFp8TensorStats's, underflows%, overflows%, mse"),
        ((*FIRST, "stats"), ["mxfp8_amax"], "'mxfp8_amax' is none of LogFp8TensorStats's"),
        ((*FIRST, "stats"), ["nvfp4_mse"], "nvfp4_mse: use the feature LogNvfp4TensorStats"),
        ((*FIRST, "stats"), ["mse_columnwise"], "mse_columnwise: DelayedScaling has one scale for both directions"),
        ((*FIRST, "frequency"), 3, "the key 'frequency' is not one of tensor, stats, freq, start_step, end_step"),
        ((*FIRST, "start_end_list"), [[0, 1]], "the key 'start_end_list' is not one of"),
        *(((*FIRST, "freq"), value, "must be a whole number of 1 or more") for value in (0, -2, 1.5, "a", None, True)),
        *(((*FIRST, "start_step"), value, "must be a whole number of 0 or more") for value in ("x", -1, None)),
        ((*FIRST, "end_step"), -1, "end_step=-1 must be a whole number of 0 or more"),
    ],
)
def test_a_broken_rule_is_named(path, value, message, tmp_path):
    with pytest.raises(ConfigError, match=f"x.yaml: .*{message}"):
        load(tmp_path, changed((path, value)))


@pytest.mark.parametrize(
    "content, message",
    [
        (b"\xff\xfe\x00 abc", "x.yaml is no YAML file"),
        (b"\x81\x82 abc", "x.yaml is no YAML file"),
        (b"a: [1, 2", "x.yaml is no YAML file: .* line 1"),
        (b"a: b: c", "x.yaml is no YAML file: .* line 1"),
        (b"- 1", r"\[1\] is not a mapping of sections"),
        (b"", "logs no layer of this run, whose layers use FP8: set quant_stats_config"),
        (b"{}", "logs no layer"),
    ],
)
def test_a_file_of_another_kind(content, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, content)


def test_all_problems_are_reported_at_once(tmp_path):
    content = changed(((*SECTION, "enabled"), "no"), ((*CHOSEN, "layer_types"), ["x"]), ((*FIRST, "freq"), 0))
    content |= {"t": None}
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, content)
    assert len(caught.value.problems) == 4
    start, end = ((*FIRST, "start_step"), 5), ((*FIRST, "end_step"), 2)
    with pytest.raises(ConfigError, match="end_step=2 is before start_step=5"):
        load(tmp_path, changed(start, end))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_stats_config(tmp_path / "none.yaml", LAYERS)


def test_a_layer_in_two_sections_is_refused(tmp_path):
    """nvdlfw-inspect raises at the first forward pass."""
    with pytest.raises(ConfigError, match=r"s_\w+ and t_\w+ both select model.model.layers.1.layernorm_mlp.fc1"):
        load(tmp_path, GOOD | {"t": changed((CHOSEN, {"layer_numbers": [1]}))["s"]})
    assert len(load(tmp_path, GOOD | {"t": changed((CHOSEN, {"layer_types": ["fc2"]}))["s"]})) == 2


def test_a_pattern_of_layers_in_another_format_is_left_out(tmp_path, caplog):
    both = linear_layers(PrecisionPlan((MXFP8BlockScaling(), NVFP4BlockScaling())), has_experts=False)
    second = changed((CHOSEN, {"layer_name_regex_pattern": r"layers\.2\."}))["s"]
    with caplog.at_level("INFO"):
        assert list(load(tmp_path, GOOD | {"t": second}, both)) == ["s_LogFp8TensorStats"]
    assert "t: no layer of it runs in FP8; left out" in caplog.text


def test_what_if_recipes_that_the_device_cannot_quantise_to(tmp_path):
    with pytest.raises(ConfigError, match=r"mxfp8_mse_columnwise: .* capability 10.0 on; this device has 9.0"):
        load(tmp_path, GOOD, capability=(9, 0))
    assert load(tmp_path, GOOD, capability=(10, 0))


@pytest.mark.parametrize("layout", ["plain", "ep"])
def test_the_linear_layers_are_those_of_the_model(layout):
    run = Run(make_config("MXFP8BlockScaling"), layout)
    found = [
        inspect_name(layer_name, f"{module_name}.{part}" if part else module_name)
        for layer_name, layer, _ in low_precision_layers(run.model)
        for module_name, module in layer.named_modules()
        if hasattr(module, "observer")
        for part in module.linear_names
    ]
    assert sorted(found) == sorted(layer.name for layer in linear_layers(run.precision, has_experts=layout == "ep"))
