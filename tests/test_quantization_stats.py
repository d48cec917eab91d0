"""quantization_stats.py, quantization_stats_config.py, benchmarks/plot_quant_stats.py."""

import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

import te_backend
from config_low_precision import QuantStatsConfig
from dist_utils import run_on_ranks
from errors import ConfigError
from low_precision import SHAPE, Run, make_config
from paths import PROJECT_DIR
from precision import PrecisionPlan
from quantization_stats import LINE, LOG_FOLDER, NoStatistics, StatisticsWriter, inspect_name, start_statistics
from quantization_stats_config import (
    Request,
    Stat,
    layer_pattern,
    linear_layers,
    requests_for,
    restrict_to_formats,
)
from quantization_stats_rules import load_stats_config
from te_reference.emulation import quantize
from te_reference.recipe import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling


sys.path.insert(0, str(PROJECT_DIR / "benchmarks"))
import plot_quant_stats


FP8, FP4 = MXFP8BlockScaling(), NVFP4BlockScaling()
NAMES = [
    f"model.model.layers.{number}.{part}"
    for number in (1, 2, 12)
    for part in ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")
]


def section(feature: str = "LogFp8TensorStats", layers: dict | None = None, **entry) -> dict:
    entry = {"tensor": "activation", "stats": ["mse"], **entry}
    return {
        "enabled": True,
        "layers": layers or {"layer_types": ["all"]},
        "transformer_engine": {feature: {"enabled": True, "tensors_struct": [entry]}},
    }


@pytest.mark.parametrize(
    "layers, numbers, expected",
    [
        ({"layer_name_regex_pattern": "fc1$"}, [1, 12], ["1.layernorm_mlp.fc1", "12.layernorm_mlp.fc1"]),
        ({"layer_types": ["proj", "fc2"]}, [2], ["2.self_attention.proj", "2.layernorm_mlp.fc2"]),
        ({"layer_types": ["proj"], "layer_numbers": ["2-12"]}, [1, 12], ["12.self_attention.proj"]),
        ({"layer_numbers": [1]}, [2], None),
        ({"exact_layer_names": [NAMES[3]]}, [1, 2], ["1.layernorm_mlp.fc2"]),
        ({"layer_types": ["all"]}, [], None),
    ],
)
def test_layers_are_narrowed(layers, numbers, expected):
    pattern = layer_pattern(layers, numbers)
    if expected is None:
        assert pattern is None
    else:
        assert [name.removeprefix("model.model.layers.") for name in NAMES if re.search(pattern, name)] == expected


@pytest.mark.parametrize("layout", ["plain", "ep"])
def test_layers_have_the_numbers_that_nvdlfw_inspect_names_them_by(layout):
    """Its infer_and_assign_layer_names takes a ModuleList's key, which counts from 0, where there is no number."""
    layers = Run(make_config("MXFP8BlockScaling"), layout).model.model.layers
    names = [f"model.model.layers.{getattr(layer, 'layer_number', key)}.x" for key, layer in layers.named_children()]
    assert names == [inspect_name(f"model.layers.{index}", "x") for index in range(len(layers))]


def test_each_feature_gets_the_layers_of_its_format():
    plan = PrecisionPlan((FP8, FP4, None))
    both = {"a": section(), "b": section("LogNvfp4TensorStats"), "off": {**section(), "enabled": False}}
    restricted = restrict_to_formats(both, linear_layers(plan, has_experts=False), "x.yaml")
    features = [
        [request.feature for request in requests_for(restricted, f"model.model.layers.{number}.layernorm_mlp.fc1")]
        for number in (1, 2, 3)
    ]
    assert features == [["LogFp8TensorStats"], ["LogNvfp4TensorStats"], []]


@pytest.mark.parametrize(
    "text, recipe, message",
    [
        ("underflows%", "MXFP8BlockScaling", None),
        ("mxfp8_mse_columnwise", "DelayedScaling", None),
        ("overflows%", "DelayedScaling", None),
        ("overflows%", "Float8CurrentScaling", "only DelayedScaling"),
        ("mse_columnwise", "Float8CurrentScaling", "one scale for both directions"),
        ("fp8_delayed_scaling_mse", "Float8CurrentScaling", "needs the scales of earlier steps"),
        ("nvfp4_mse", "MXFP8BlockScaling", "LogNvfp4TensorStats"),
    ],
)
def test_statistics_are_checked(text, recipe, message):
    request = Request("LogFp8TensorStats", "weight", (Stat.parse(text, "LogFp8TensorStats"),))
    problems = request.problems(recipe)
    assert (message is None and not problems) or message in problems[0]


@pytest.mark.parametrize(
    "formats, feature, fitting",
    [
        ((FP4, None), "LogFp8TensorStats", "fp4"),
        ((FP8, None), "LogNvfp4TensorStats", "fp8"),
        ((FP8, FP4), None, "fp4"),
    ],
)
def test_the_file_that_fits_is_named_and_does_fit(formats, feature, fitting):
    content, layers = {"a": section(feature)} if feature else {}, linear_layers(PrecisionPlan(formats), False)
    override = f"quant_stats_config.quant_stats_file=./{fitting}_debugging_stats.yaml"
    with pytest.raises(ConfigError, match=rf"set {re.escape(override)}, or"):
        restrict_to_formats(content, layers, "x.yaml")
    restricted = load_stats_config(PROJECT_DIR / f"{fitting}_debugging_stats.yaml", layers)
    assert len(restricted) == len([one for one in formats if one])


def test_due():
    """nvdlfw-inspect's rule: multiples of freq between start and end, both included."""
    request = Request("LogFp8TensorStats", "weight", (), freq=5, start_step=7, end_step=20)
    assert [iteration for iteration in range(40) if request.due(iteration)] == [10, 15, 20]


@pytest.mark.parametrize("name", ["fp8_debugging_stats.yaml", "fp4_debugging_stats.yaml"])
def test_shipped_files(name):
    plan = PrecisionPlan((FP8, FP4) if name.startswith("fp4") else (FP8, None))
    assert load_stats_config(PROJECT_DIR / name, linear_layers(plan, has_experts=True))
    restricted = load_stats_config(PROJECT_DIR / name, linear_layers(plan, has_experts=False))
    for layer in NAMES[:4]:
        assert {request.tensor for request in requests_for(restricted, layer)} == {"activation", "gradient", "weight"}


def collect(folder: str, content: dict, recipe: str, layout: str, steps: int, resume_at: int | None = None, **options):
    """Trains with statistics; returns {(name, iteration): value} of rank 0's file."""
    path = f"{folder}/stats.yaml"
    with open(path, "w") as file:
        yaml.safe_dump(content, file)
    stats_config = QuantStatsConfig(True, path, f"{folder}/logs")
    run = Run(make_config(recipe, quant_stats_config=stats_config, **options), layout)
    for first, last in [(0, steps)] if resume_at is None else [(0, steps), (resume_at, steps)]:
        statistics = start_statistics(run.config, run.precision, run.model.config, Path("unused"))
        statistics.attach(run.model, first)
        for step in range(first + 1, last + 1):
            run.train(step, step)
            statistics.step()
        statistics.close()
    with open(f"{folder}/logs/{LOG_FOLDER}/nvdlfw_inspect_globalrank-0.log") as file:
        found = [LINE.search(line) for line in file]
    return [((match["name"], int(match["iteration"])), float(match["value"])) for match in found]


def test_reference_statistics_are_those_of_the_tensors(tmp_path):
    """The weight is known: its statistics by hand. Names, iterations and the NVFP4 prefix as nvdlfw-inspect's."""
    weights = {"tensor": "weight", "stats": ["mse", "scale_inv_max", "mxfp8_underflows%"], "freq": 2}
    content = {"a": section(layers={"layer_types": ["proj"]}, **weights)}
    values = dict(collect(str(tmp_path), content, "Float8CurrentScaling", "plain", 3))
    assert len(values) == 2 * 3 * 2 and {iteration for _, iteration in values} == {0, 2}
    weight = Run(make_config()).model.model.layers[0].self_attention.proj.weight.detach()
    quantized = quantize(weight, Float8CurrentScaling(), "weight").rowwise
    name = "model.model.layers.1.self_attention.proj_weight"
    assert values[f"{name}_mse", 0] == pytest.approx((weight - quantized.dequantize()).square().mean().item(), rel=1e-6)
    assert values[f"{name}_scale_inv_max", 0] == pytest.approx(weight.abs().max().item() / 448, rel=1e-6)
    mx = quantize(weight, FP8, "weight").rowwise.dequantize()
    assert values[f"{name}_mxfp8_underflows%", 0] == pytest.approx(
        100 * ((mx == 0) & (weight != 0)).float().mean().item()
    )


def test_nvfp4_names_and_resumed_iterations(tmp_path):
    content = {"a": section("LogNvfp4TensorStats", layers={"layer_types": ["fc1"]}, tensor="gradient")}
    rows = collect(str(tmp_path), content, "NVFP4BlockScaling", "plain", 3, resume_at=2)
    names = [f"model.model.layers.{number}.layernorm_mlp.fc1_gradient_nvfp4_mse" for number in (1, 2)]
    # Iteration 2 was logged twice; the resumed run replaced it.
    assert [row[0] for row in rows] == [(name, iteration) for iteration in range(3) for name in names]


def test_a_new_run_keeps_the_log_of_an_earlier_one(tmp_path):
    content = {"a": section(layers={"layer_types": ["fc1"], "layer_numbers": [1]})}
    folder = tmp_path / "logs" / LOG_FOLDER
    first = collect(str(tmp_path), content, "MXFP8BlockScaling", "plain", 3)
    written = (folder / "nvdlfw_inspect_globalrank-0.log").read_text()
    second = collect(str(tmp_path), content, "MXFP8BlockScaling", "plain", 1)
    assert (len(first), len(second)) == (3, 1)
    assert sorted(path.name for path in folder.iterdir()) == [
        "nvdlfw_inspect_globalrank-0.1.log",
        "nvdlfw_inspect_globalrank-0.log",
    ]
    assert (folder / "nvdlfw_inspect_globalrank-0.1.log").read_text() == written


def write(folder: Path, first: int, last: int, shared: bool = False) -> StatisticsWriter:
    writer = StatisticsWriter(folder, shared)
    writer.open(first)
    for iteration in range(first, last):
        writer.log_scalar("name", 0.5, iteration)
    writer.close()
    return writer


@pytest.mark.parametrize("shared", [False, True])
def test_a_resumed_run_drops_the_iterations_that_it_repeats(shared, tmp_path, caplog):
    """Where other runs may write, too, what is dropped stays in another file."""
    path = write(tmp_path, 0, 4).path
    with path.open("a") as file:
        file.write(path.read_text().splitlines()[0][:-1])  # cut by a kill, in the value
    before = path.read_text()
    with caplog.at_level("INFO"):
        write(tmp_path, 3, 5, shared)
    assert [int(LINE.search(line)["iteration"]) for line in path.read_text().splitlines()] == [0, 1, 2, 3, 4]
    assert f"Dropped 2 lines from iteration 3 on from {path}" in caplog.text
    others = [other for other in path.parent.iterdir() if other != path]
    assert [other.read_text() for other in others] == ([before] if shared else [])
    write(tmp_path, 5, 6, shared)  # nothing to drop
    assert len(path.read_text().splitlines()) == 6 and len(list(path.parent.iterdir())) == 1 + shared


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file on a full disk, of Linux")
@pytest.mark.parametrize("at_close", [False, True])
def test_a_full_disk_ends_the_statistics_alone(at_close, tmp_path, caplog):
    writer = StatisticsWriter(tmp_path, shared=False)
    writer.open(0)
    writer._file.close()
    writer._file = open("/dev/full", "w", buffering=-1 if at_close else 1)  # noqa: SIM115
    for iteration in range(3):
        writer.log_scalar("name", 0.5, iteration)
    writer.close()
    writer.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "gets no more statistics: [Errno 28] No space left on device" in caplog.text


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_made(folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"set quant_stats_config.quant_log_dir to a folder that .* rank 0: "):
        StatisticsWriter(tmp_path / folder, shared=True)


def default_folder(folder: str) -> str:
    """Each rank with a run folder of its own, as without a ckpt_dir."""
    config = make_config("MXFP8BlockScaling", quant_stats_config=QuantStatsConfig(True))
    run_dir = Path(folder) / f"rank{torch.distributed.get_rank()}"
    statistics = start_statistics(config, PrecisionPlan((FP8,), te_backend.resolve("reference")), None, run_dir)
    statistics._writer.open(0)
    statistics.close()
    return str(statistics._writer.path)


def test_by_default_the_statistics_are_in_the_folder_of_the_run(tmp_path):
    paths = run_on_ranks(default_folder, 2, str(tmp_path))
    folder = tmp_path / "rank0" / "quant_stats" / LOG_FOLDER
    assert paths == [f"{folder}/nvdlfw_inspect_globalrank-{rank}.log" for rank in range(2)]
    assert all(Path(path).is_file() for path in paths) and not (tmp_path / "rank1").exists()


def folder_of_one_rank(folder: str) -> str:
    rank = torch.distributed.get_rank()
    if rank == 1:
        (Path(folder) / "rank1").touch()
    try:
        StatisticsWriter(Path(folder) / f"rank{rank}", shared=True)
    except ConfigError as error:
        return str(error)
    return ""


def test_every_rank_hears_of_a_folder_that_one_cannot_write(tmp_path):
    one, other = run_on_ranks(folder_of_one_rank, 2, str(tmp_path))
    assert "rank 1: " in one and "rank 1: " in other


def spread(folder: str) -> list | None:
    content = {"a": section(tensor="activation", stats=["mse", "underflows%"], layers={"layer_numbers": [1]})}
    stats = {"path": f"{folder}/stats.yaml"}
    if torch.distributed.get_rank() == 0:
        with open(stats["path"], "w") as file:
            yaml.safe_dump(content, file)
    torch.distributed.barrier()
    config = make_config(
        "MXFP8BlockScaling", quant_stats_config=QuantStatsConfig(True, stats["path"], f"{folder}/logs")
    )
    run = Run(config, "fsdp2")
    own = {}
    statistics = start_statistics(config, run.precision, run.model.config, Path("unused"))
    statistics.attach(run.model, 0)
    run.train(1, 1)
    for key, value in statistics._collected.items():
        own[key.layer] = value.values()["mse"]
    statistics.step()
    statistics.close()
    return list(own.items())


def test_ranks_are_merged(tmp_path):
    """The mse over both ranks is the mean of theirs: they hold equally many tokens."""
    one, other = (dict(pairs) for pairs in run_on_ranks(spread, 2, str(tmp_path)))
    log = (tmp_path / "logs" / LOG_FOLDER / "nvdlfw_inspect_globalrank-0.log").read_text()
    merged = {m["name"]: float(m["value"]) for m in map(LINE.search, log.splitlines())}
    assert len(one) == 4
    for layer in one:
        assert merged[f"{layer}_activation_mse"] == pytest.approx((one[layer] + other[layer]) / 2, rel=1e-5)


def test_off_by_default():
    assert isinstance(start_statistics(make_config(), PrecisionPlan((None,)), None, Path("unused")), NoStatistics)


def test_a_new_run_without_statistics_moves_an_earlier_run_s_aside(tmp_path):
    (tmp_path / "quant_stats").mkdir()
    (tmp_path / "quant_stats" / "log").write_text("of an earlier run")
    statistics = start_statistics(make_config(), PrecisionPlan((None,)), None, tmp_path)
    statistics.attach(None, 3)  # resumed
    assert (tmp_path / "quant_stats" / "log").exists()
    statistics.attach(None, 0)
    assert (tmp_path / "quant_stats.1" / "log").read_text() == "of an earlier run"
    assert not (tmp_path / "quant_stats").exists()


def test_weights_without_high_precision(tmp_path, caplog):
    """Of quantised weights, what needs their high-precision values is left out, and said so."""
    with pytest.raises(ConfigError, match="statistics of weights in high precision only"):
        collect(str(tmp_path), {"a": section(tensor="weight")}, "MXFP8BlockScaling", "plain", 1, qinit=True)
    content = {"a": section(tensor="weight", stats=["scale_inv_min", "mse"])}
    entries = content["a"]["transformer_engine"]["LogFp8TensorStats"]["tensors_struct"]
    entries.append({"tensor": "activation", "stats": ["mse"]})
    with caplog.at_level("INFO"):
        rows = collect(str(tmp_path), content, "MXFP8BlockScaling", "plain", 1, qinit=True)
    assert "mse of weight left out: quantised init holds no weight in high precision" in caplog.text
    names = {name.rpartition("fc1_")[2] for (name, _), _ in rows if "fc1_" in name}
    assert names == {"weight_scale_inv_min", "activation_mse"}
    assert len(rows) == 2 * SHAPE["num_hidden_layers"] * 4


def test_plots(tmp_path):
    content = {"a": section(stats=["mse", "underflows%"])}
    collect(str(tmp_path), content, "MXFP8BlockScaling", "plain", 3)
    log = tmp_path / "logs" / LOG_FOLDER / "nvdlfw_inspect_globalrank-0.log"
    written = plot_quant_stats.plot(plot_quant_stats.read_statistics(log), tmp_path / "plots")
    assert [path.name for path in written] == ["activation_mse.png", "activation_underflows_percent.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_read_statistics(tmp_path):
    line = (
        "2026-01-31 12:00:00,000 - INFO - model.model.layers.3.layernorm_mlp.fc1_gradient_nvfp4_underflows% \t\t\t\t "
    )
    # As TE writes it; the last line is cut short.
    text = f"{line}iteration=000010 \t\t\t\t value=0.2500\nanother line\n{line}iteration=000020 \t\t\t\t value=1e-"
    (tmp_path / "log").write_text(text)
    expected = {("gradient", "nvfp4_underflows%"): {("layernorm_mlp.fc1", 3): {10: 0.25}}}
    assert plot_quant_stats.read_statistics(tmp_path / "log") == expected
    with pytest.raises(ValueError, match="no statistic whose name contains 'proj'"):
        plot_quant_stats.read_statistics(tmp_path / "log", "proj")
