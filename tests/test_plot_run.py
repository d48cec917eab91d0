"""plot_run.py: what is read, how runs are told apart, what a picture shows."""

import json
import math
import re
from html.parser import HTMLParser

import matplotlib
import pytest
import yaml
from matplotlib.image import imread

import plot_run


def write_run(folder, losses, config=None, **columns):
    """A run with one line per loss; ``columns``: more values per step, a missing key where the value is Ellipsis."""
    folder.mkdir(parents=True)
    lines = []
    for i, loss in enumerate(losses):
        line = {"step": i + 1, "loss": loss, "consumed_tokens": 10 * (i + 1)}
        line |= {key: values[i] for key, values in columns.items() if values[i] is not ...}
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def panels(figure):
    return {axis.get_title(): axis for axis in figure.axes}


# --- Reading ----------------------------------------------------------------------------------------------------------


def test_a_folder_or_a_file_and_a_line_being_written(tmp_path):
    folder = write_run(tmp_path / "ckpt" / "train_ddp", [3.0, 2.0], validation_loss=[..., 2.5])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    for path in (folder, folder / "metrics.jsonl"):
        (run,) = plot_run.read_runs([path])
        assert [record["step"] for record in run.records] == [1, 2]
        assert run.points("validation_loss", "consumed_tokens") == ([20], [2.5])
        assert run.config == {}
    assert plot_run.read_runs([folder])[0].name == "ckpt/train_ddp"


def test_metrics_that_were_moved_aside_have_their_own_config(tmp_path):
    folder = write_run(tmp_path / "run", [3.0], {"seed": 2})
    for name in ("metrics.1.jsonl", "metrics.2.jsonl", "lr0.5.jsonl"):
        (folder / name).write_text('{"step": 1, "loss": 2.0}\n')
    (folder / "config.1.yaml").write_text("seed: 1\n")
    runs = plot_run.read_runs([folder / name for name in ("metrics.1.jsonl", "metrics.2.jsonl", "lr0.5.jsonl")])
    assert [run.config for run in runs] == [{"seed": 1}, {}, {"seed": 2}]  # unknown rather than another run's
    assert plot_run.read_runs([folder])[0].config == {"seed": 2}


def test_what_cannot_be_read_is_said(tmp_path):
    folder = write_run(tmp_path / "run", [1.0])
    with pytest.raises(SystemExit, match=r"nothing/metrics.jsonl: No such file .* give a run's folder"):
        plot_run.main([str(tmp_path / "nothing" / "metrics.jsonl")])
    (folder / "metrics.jsonl").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="line 1: not a metrics line"):
        plot_run.main([str(folder)])
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit, match="no step has been logged yet"):
        plot_run.main([str(folder)])


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"step": 1, "loss": null}', "nothing to draw"),
        ('{"step": 1, "loss": NaN, "grad_norm": Infinity}', "nothing to draw"),
        ('{"step": 1, "loss": null, "tokens_per_expert_cv": []}', "nothing to draw"),
    ],
)
def test_runs_without_a_value(tmp_path, line, message):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(SystemExit, match=message):
        plot_run.main([str(tmp_path), "--out", str(tmp_path / "x.png")])


def test_odd_files_and_places(tmp_path, capsys):
    run = write_run(tmp_path / "a$\\frac$b", [1.0, 2.0])
    plot_run.main([str(run), "--out", str(tmp_path / "x.png")])
    for out, message in ((tmp_path, "must end in .png"), (tmp_path / "x.html", "must end in .png")):
        with pytest.raises(SystemExit):
            plot_run.main([str(run), "--out", str(out)])
        assert message in capsys.readouterr().err
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="cannot be written"):
        plot_run.main([str(run), "--out", str(tmp_path / "file" / "x.png")])
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    with pytest.raises(SystemExit, match="nothing to draw"):
        plot_run.main([str(run), "--x", "tokens", "--out", str(tmp_path / "x.png")])
    (run / "config.yaml").write_text("a: [")
    with pytest.raises(SystemExit, match=r"config\.yaml: no YAML"):
        plot_run.main([str(run), "--out", str(tmp_path / "x.png")])


# --- Telling runs apart -----------------------------------------------------------------------------------------------


def make_labels(tmp_path, *configs):
    paths = [write_run(tmp_path / f"run{i}" / "train_ddp", [1.0], config) for i, config in enumerate(configs)]
    return plot_run.labels(plot_run.read_runs(paths))


def test_legend_has_the_values_that_differ(tmp_path):
    base = {"seed": 1, "adamw_kwargs": {"lr": 0.1, "eps": 1e-8}, "use_te": True, "checkpoint": {"ckpt_dir": "a"}}
    other = {**base, "adamw_kwargs": {"lr": 0.2, "eps": 1e-8}, "use_te": False, "checkpoint": {"ckpt_dir": "b"}}
    assert make_labels(tmp_path, base, other) == [
        "adamw_kwargs.lr=0.1, use_te=true",
        "adamw_kwargs.lr=0.2, use_te=false",
    ]


def test_a_section_that_is_off_says_nothing(tmp_path):
    recipe = "transformer_engine.common.recipe.DelayedScaling"
    configs = [
        {"fp8_config": {"fp8_recipe": recipe, "enabled": True}, "fp4_config": {"enabled": False}},
        {"fp8_config": {"fp8_recipe": recipe, "enabled": False}, "fp4_config": {"enabled": True}},
    ]
    runs = plot_run.read_runs([write_run(tmp_path / str(i), [1.0], config) for i, config in enumerate(configs)])
    assert plot_run.labels(runs) == [
        "fp4_config.enabled=false, fp8_config.enabled=true, fp8_config.fp8_recipe=DelayedScaling",
        "fp4_config.enabled=true, fp8_config.enabled=false",
    ]
    outer = {"a": {"enabled": True, "b": {"enabled": False, "c": 1}, "d": 2}}
    (run,) = plot_run.read_runs([write_run(tmp_path / "nested", [1.0], outer)])
    assert [key for key in run.config if plot_run.is_off(run.config, key)] == ["a.b.c"]


def test_legend_has_names_where_values_do_not_tell(tmp_path):
    assert make_labels(tmp_path / "same", {"seed": 1}, {"seed": 1}) == ["run0/train_ddp", "run1/train_ddp"]
    assert make_labels(tmp_path / "one", {"seed": 1}) == ["run0/train_ddp"]
    assert make_labels(tmp_path / "twins", {"seed": 1}, {"seed": 2}, {"seed": 2})[1:] == [
        "run1/train_ddp: seed=2",
        "run2/train_ddp: seed=2",
    ]
    many = [{f"key{k}": i for k in range(6)} for i in range(2)]
    label = make_labels(tmp_path / "many", *many)[1]
    assert label == "run1/train_ddp: key0=1, key1=1, key2=1, key3=1, and 2 more"


def test_of_many_values_the_legend_has_those_that_tell_runs_apart(tmp_path):
    """Eight runs of three two-valued keys; five keys in which only the last run differs come first in the files."""
    configs = []
    for i in range(8):
        odd = {f"a{k}": int(i == 7) for k in range(5)}
        configs.append({**odd, "lr": i // 4, "seed": i % 2, "steps": i // 2 % 2, "copy_of_lr": i // 4})
    labels = make_labels(tmp_path, *configs)
    shown = [label.partition(": ")[2] for label in labels]
    assert len(set(shown)) == 8
    assert shown[5] == "copy_of_lr=1, seed=1, steps=0, lr=1, and 5 more"


def test_a_key_that_only_one_run_has(tmp_path):
    assert make_labels(tmp_path, {"seed": 1}, {"seed": 1, "cp_size": 2}) == ["cp_size=-", "cp_size=2"]


# --- Drawing ----------------------------------------------------------------------------------------------------------

GPU = {"mfu": [0.25, 0.5], "tflops_per_gpu": [1.0, 2.0]}
CPU = {"mfu": [None, None], "tflops_per_gpu": [1.0, 2.0]}


def test_panels_are_those_that_have_values(tmp_path):
    path = write_run(tmp_path / "run", [3.0, 2.0], grad_norm=[1.0, None], **GPU)
    axes = panels(plot_run.draw(plot_run.read_runs([path])))
    assert list(axes) == ["Training loss", "Gradient norm before clipping", "MFU"]
    (line,) = axes["MFU"].lines
    assert list(line.get_ydata()) == [25.0, 50.0]
    assert axes["MFU"].get_ylabel() == "% of dense BF16 peak"
    assert math.isnan(axes["Gradient norm before clipping"].lines[0].get_ydata()[1])
    assert all(axis.get_xlabel() == "optimiser steps" and axis.get_ylabel() for axis in axes.values())


def test_flops_where_no_device_has_a_known_peak(tmp_path):
    runs = plot_run.read_runs([write_run(tmp_path / "cpu" / "run", [3.0, 2.0], **CPU)])
    assert "Model FLOPs" in panels(plot_run.draw(runs))
    runs += plot_run.read_runs([write_run(tmp_path / "gpu" / "run", [3.0, 2.0], **GPU)])
    assert "Model FLOPs" not in panels(plot_run.draw(runs))


def test_expert_load_is_a_mean_in_a_band(tmp_path):
    load = [[0.5, 1.5], [0.25, 0.75]]
    path = write_run(tmp_path / "run", [3.0, 2.0], tokens_per_expert_cv=load)
    axis = panels(plot_run.draw(plot_run.read_runs([path])))["Expert load"]
    assert list(axis.lines[0].get_ydata()) == [1.0, 0.5]
    band = axis.collections[0].get_paths()[0].vertices
    assert {(x, y) for x, y in band} >= {(1.0, 0.5), (1.0, 1.5), (2.0, 0.25), (2.0, 0.75)}


def test_many_points_get_a_running_mean(tmp_path):
    path = write_run(tmp_path / "run", [9.0] * 5 + [1.0, 2.0] * 150)
    axis = panels(plot_run.draw(plot_run.read_runs([path]), x="tokens"))["Training loss"]
    points, mean = axis.lines
    assert list(points.get_xdata()[:2]) == [10, 20]
    assert points.get_ydata()[1] == 9.0
    assert set(mean.get_ydata()[10:]) == {4 / 3, 5 / 3}  # of three
    assert axis.get_ylim()[1] < 3


def test_first_steps_and_spikes_of_one_run_do_not_flatten_the_others(tmp_path):
    settled = [1.4, 1.3] * 50
    high_at_first, spiky = settled.copy(), settled.copy()
    high_at_first[:3], spiky[60] = [13.0, 7.0, 3.0], 9.0
    losses = {"settled": settled, "first": high_at_first, "spike": spiky}
    paths = [write_run(tmp_path / name, values, validation_loss=values) for name, values in losses.items()]
    axes = panels(plot_run.draw(plot_run.read_runs(paths)))
    for title in ("Training loss", "Validation loss"):
        low, high = axes[title].get_ylim()
        assert 1.2 < low < 1.3 and 1.4 < high < 1.5
    few = plot_run.read_runs([write_run(tmp_path / "few", [5.0, 3.0, 2.0])])
    assert panels(plot_run.draw(few))["Training loss"].get_ylim()[1] > 4.9  # too few to leave any out


def test_a_long_legend_makes_the_picture_higher_and_the_panels_no_flatter(tmp_path):
    heights = []
    for words in (1, 40):
        name = "_".join(["run"] * words)
        paths = [write_run(tmp_path / str(words) / f"{name}{i}", [3.0, 2.0]) for i in range(12)]
        figure = plot_run.draw(plot_run.read_runs(paths))
        figure.savefig(tmp_path / "picture.png")  # this lays it out
        heights.append(figure.axes[0].get_position().height * figure.get_figheight())
    assert heights[1] == pytest.approx(heights[0], rel=0.1)


def test_running_mean_passes_over_unknown_values():
    assert plot_run.running_mean([1.0, math.nan, 3.0, 5.0], 2) == [1.0, 1.0, 3.0, 4.0]


@pytest.mark.parametrize("count", [1, 5, 12, 25])
def test_every_run_has_a_colour_and_a_line_in_the_legend(tmp_path, count):
    paths = [write_run(tmp_path / f"run{i}" / "t", [3.0, 2.0], {"seed": i}) for i in range(count)]
    figure = plot_run.draw(plot_run.read_runs(paths))
    (legend,) = figure.legends
    names = [entry.get_text() for entry in legend.get_texts()]
    assert names == ([f"seed={i}" for i in range(count)] if count > 1 else ["run0/t"])
    in_legend = [matplotlib.colors.to_hex(handle.get_color()) for handle in legend.legend_handles]
    drawn = [matplotlib.colors.to_hex(line.get_color()) for line in panels(figure)["Training loss"].lines]
    assert drawn == in_legend
    assert len(set(drawn)) == count


# --- The files --------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Cells of the tables, and everything that a browser would fetch."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.sources = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.cells.append(data)


def test_picture_and_page(tmp_path, capsys):
    paths = [
        write_run(tmp_path / f"<run{i}>" / "t", [3.0, 2.0, 2.5], {"seed": i}, validation_loss=[1.5, 1.25, 1.75])
        for i in range(2)
    ]
    plot_run.main([*map(str, paths), "--out", str(tmp_path / "pictures" / "two.png")])
    png = tmp_path / "pictures" / "two.png"
    height, width, _ = imread(png).shape
    assert height > 200
    assert width > 800
    text = png.with_suffix(".html").read_text()
    page = Page(text)
    assert len(page.sources) == 1
    assert page.sources[0].startswith("data:image/png;base64,")
    assert not re.search(r"https?://|@import|url\(", text)
    row = page.cells[page.cells.index("<run1>/t") :]
    assert row[:6] == ["<run1>/t", "3", "30", "2.5000", "1.7500", "1.2500"]
    assert page.cells[-3:-1] == ["<run1>/t", "1"]  # run, seed
    assert "two.html" in capsys.readouterr().out
