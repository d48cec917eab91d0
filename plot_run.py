"""Pictures of runs: one PNG and an HTML page, from their ``metrics.jsonl``; also while they are running.

    python plot_run.py ckpt/train_fsdp2                                     # plot_run.png and plot_run.html
    python plot_run.py outputs/train_fsdp2/* --x tokens --out sweep.png     # several runs in one picture

A run is its folder or its metrics file. Several are told apart by the values in which their ``config.yaml`` differ. The
page holds the picture, a table of results and one of those values; it opens without a network.
"""

import argparse
import base64
import html
import io
import json
import math
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter

from metrics_file import read_metrics


# Sections of the config that say where a run writes, not how it trains.
NOT_TRAINING = ("checkpoint.", "logger.", "wandb.", "profiler.")
MOST_VALUES_IN_LEGEND = 4
RECIPES = "transformer_engine.common.recipe."  # may be left out on the command line
AXES_OF_X = {"step": ("step", "optimiser steps"), "tokens": ("consumed_tokens", "tokens trained on")}


@dataclass(frozen=True)
class Run:
    name: str
    """Its path, without what all runs share."""
    records: list[dict[str, Any]]
    """Lines of the metrics file, as perf_logger.py documents them."""
    config: dict[str, Any]
    """``config.yaml`` with dotted keys; empty where there is none."""

    def points(self, key: str, x_key: str) -> tuple[list[float], list[float]]:
        """x and y of every record that has the key; null, which stands for no finite number, becomes nan."""
        rows = [(record[x_key], record[key]) for record in self.records if key in record and x_key in record]
        return [x for x, _ in rows], [math.nan if y is None else y for _, y in rows]


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    """Label of the y axis."""
    key: str
    """In the metrics file. A list, one value per layer, is drawn as its mean in a band from least to largest."""
    scale: str = "linear"
    """linear; zero: linear from zero on; log; settled: what is high at first, and spikes, may leave the panel."""
    factor: float = 1.0
    """From the file's unit to the axis's."""
    marker: str | None = None
    """For values that are few."""


TFLOPS = Panel("Model FLOPs", "TFLOP/s per device", "tflops_per_gpu", scale="zero")
PANELS = (
    Panel("Training loss", "nats per token", "loss", scale="settled"),
    Panel("Validation loss", "nats per token", "validation_loss", scale="settled", marker="o"),
    Panel("Learning rate", "learning rate", "learning_rate"),
    Panel("Gradient norm before clipping", "L2 norm", "grad_norm", scale="log"),
    Panel("Throughput without padding", "tokens/s per device", "unpadded_tokens_per_second_per_gpu", scale="zero"),
    Panel("MFU", "% of dense BF16 peak", "mfu", scale="zero", factor=100),
    Panel("Peak memory", "GiB per device", "peak_memory_gib", scale="zero"),
    Panel("Expert load", "std / mean of tokens per expert", "tokens_per_expert_cv", scale="zero"),
)


# --- Reading ----------------------------------------------------------------------------------------------------------


def read_runs(paths: list[Path]) -> list[Run]:
    """The runs of folders with a ``metrics.jsonl``, or of such files.

    Raises:
        ValueError: a path is neither, holds no whole line, or one that is no metrics line.
    """
    files = [(path / "metrics.jsonl" if path.is_dir() else path).resolve() for path in paths]
    parents = [file.parent if path.is_dir() else file for path, file in zip(paths, files)]
    levels = 1 if len(parents) == 1 else 0  # one run alone is named by its last two folders
    shared = os.path.commonpath([parent.parents[levels] for parent in parents])
    return [
        Run(os.path.relpath(parent, shared), read_records(file), read_config(config_of(file)))
        for parent, file in zip(parents, files)
    ]


def read_records(path: Path) -> list[dict[str, Any]]:
    try:
        records = read_metrics(path)
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; give a run's folder, which holds metrics.jsonl, or that file."
        ) from error
    if not records:
        raise ValueError(f"{path}: no step has been logged yet.")
    return records


def config_of(metrics: Path) -> Path:
    """The config saved beside a metrics file; of ``metrics.<n>.jsonl``, which a later run moved aside, its own."""
    moved = re.fullmatch(r"(.+)\.(\d+)", metrics.stem)
    if moved is None:
        return metrics.with_name("config.yaml")
    config = metrics.with_name(f"config.{moved[2]}.yaml")
    is_aside = config.is_file() or metrics.with_name(moved[1] + metrics.suffix).is_file()  # or a name such as lr0.5
    return config if is_aside else metrics.with_name("config.yaml")


def read_config(path: Path) -> dict[str, Any]:
    def flatten(node: Any, prefix: str) -> dict[str, Any]:
        if isinstance(node, dict) and node:
            return {k: v for key, value in node.items() for k, v in flatten(value, f"{prefix}.{key}").items()}
        return {prefix[1:]: node}

    try:
        return flatten(yaml.safe_load(path.read_text()), "") if path.is_file() else {}
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: no YAML: {error}") from error


# --- Telling runs apart -----------------------------------------------------------------------------------------------


def differing_values(runs: list[Run]) -> dict[str, list[str]]:
    """Config values that are not the same in all runs: key -> one text per run, ``-`` where it has no such key, or its
    section is off. What turns sections on comes first."""
    found = (key for run in runs for key in run.config if not key.startswith(NOT_TRAINING))
    keys = sorted(dict.fromkeys(found), key=lambda key: not key.endswith(".enabled"))
    values = {key: [as_typed(value_in_use(run.config, key)) for run in runs] for key in keys}
    return {key: texts for key, texts in values.items() if len(set(texts)) > 1}


def value_in_use(config: dict[str, Any], key: str) -> Any:
    return "-" if is_off(config, key) else config.get(key, "-")


def is_off(config: dict[str, Any], key: str) -> bool:
    """Whether a section that the key is in has ``enabled: false``; that very key is in use."""
    switches = (f"{key[:end]}.enabled" for end, letter in enumerate(key) if letter == ".")
    return any(config.get(switch) is False for switch in switches if switch != key)


def as_typed(value: Any) -> str:
    """As on the command line."""
    return value.removeprefix(RECIPES) if isinstance(value, str) else json.dumps(value)


def pairs_apart(columns: list[list[str]]) -> int:
    """How many pairs of runs differ in some of the columns, each of which has a text per run."""
    rows = list(zip(*columns))
    return (len(rows) ** 2 - sum(count**2 for count in Counter(rows).values())) // 2


def keys_for_legend(differing: dict[str, list[str]]) -> list[str]:
    """Not more than fit: one after the other, that which tells most pairs of runs apart that were not yet; of equals,
    that which tells most apart by itself."""
    chosen: list[str] = []
    while len(chosen) < min(len(differing), MOST_VALUES_IN_LEGEND):
        columns = [differing[key] for key in chosen]
        rest = [key for key in differing if key not in chosen]
        chosen.append(
            max(rest, key=lambda key: (pairs_apart([*columns, differing[key]]), pairs_apart([differing[key]])))
        )
    return chosen


def labels(runs: list[Run]) -> list[str]:
    """What the legend calls each run: its differing values, but of sections that it has off; its name too where these
    are many, or say nothing."""
    differing = differing_values(runs)
    shown = list(differing) if len(differing) <= MOST_VALUES_IN_LEGEND else keys_for_legend(differing)
    texts = [
        ", ".join(f"{key}={differing[key][i]}" for key in shown if not is_off(run.config, key))
        for i, run in enumerate(runs)
    ]
    more = len(differing) - len(shown)
    named = more > 0 or not all(texts) or len(set(texts)) < len(runs)
    result = []
    for run, text in zip(runs, texts):
        text = f"{text}, and {more} more" if text and more else text
        result.append((f"{run.name}: {text}" if text else run.name) if named else text)
    return result


# --- Drawing ----------------------------------------------------------------------------------------------------------


def draw(runs: list[Run], x: str = "step") -> Figure:
    """One panel per metric that some run has; ``x``: a key of AXES_OF_X."""
    x_key, x_label = AXES_OF_X[x]
    panels = [panel for panel in (known_mfu(panel, runs) for panel in PANELS) if has_values(panel, runs, x_key)]
    if not panels:
        raise ValueError(f"none of the runs has a value beside its {x_key}: there is nothing to draw.")
    columns = 4 if len(panels) > 6 else 3
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.4 * columns, 3.3 * rows), layout="constrained")
    draw_legend(figure, labels(runs))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, panel in zip(axes, panels):
        curves = [run.points(panel.key, x_key) for run in runs]
        for place, (curve, colour) in enumerate(zip(curves, colours(len(runs)))):
            # Later ones are thinner, so that a curve below another one shows on both sides.
            draw_curve(axis, panel, *curve, color=colour, linewidth=1.3 + 1.7 * (1 - (place + 1) / len(runs)))
        axis.set(title=panel.title, ylabel=panel.unit, xlabel=x_label)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.3)
        set_scale(axis, panel, [y for _, y in curves])
    for axis in axes[len(panels) :]:
        axis.remove()
    return figure


def draw_legend(figure: Figure, names: list[str]) -> None:
    """Below the panels, in as many columns as fit; the figure grows by its height."""
    wrapped = [textwrap.fill(name.replace("$", r"\$"), 80, break_on_hyphens=False) for name in names]  # no formulas
    lines = [name.splitlines() for name in wrapped]
    # Inches: a character takes about 0.075, a line 0.14, the space below an entry 0.06.
    fitting = int(figure.get_figwidth() / (0.075 * max(len(line) for of_name in lines for line in of_name) + 0.6))
    columns = max(1, min(len(names), fitting))
    per_column = math.ceil(len(names) / columns)
    heights = [0.14 * len(of_name) + 0.06 for of_name in lines]
    tallest = max(sum(heights[start : start + per_column]) for start in range(0, len(names), per_column))
    figure.set_figheight(figure.get_figheight() + tallest + 0.2)
    handles = [Line2D([], [], color=colour, linewidth=2) for colour in colours(len(names))]
    figure.legend(handles, wrapped, loc="outside lower center", ncols=columns, fontsize="small")


def known_mfu(panel: Panel, runs: list[Run]) -> Panel:
    """The panel, or FLOPs instead of MFU where no run knows its device's peak (CPUs)."""
    return TFLOPS if panel.key == "mfu" and not has_values(panel, runs) else panel


def has_values(panel: Panel, runs: list[Run], x_key: str = "step") -> bool:
    return any(record.get(panel.key) not in (None, []) and x_key in record for run in runs for record in run.records)


def colours(count: int) -> list:
    """Ten strong ones, then ten pale ones; of more runs a gradient."""
    if count <= 20:
        return [matplotlib.colormaps["tab20"](i) for i in (*range(0, 20, 2), *range(1, 20, 2))][:count]
    return [matplotlib.colormaps["viridis"](i / (count - 1)) for i in range(count)]


def draw_curve(axis: Axes, panel: Panel, x: list[float], y: list[Any], **style: Any) -> None:
    """A line; of many points their running mean, with the points themselves pale behind it."""
    if any(isinstance(value, list) for value in y):
        rows = [value if isinstance(value, list) and value else [math.nan] for value in y]
        axis.fill_between(x, [min(row) for row in rows], [max(row) for row in rows], fc=style["color"], alpha=0.15)
        y = [sum(row) / len(row) for row in rows]
    y = [value * panel.factor for value in y]
    window = 1 if panel.marker else len(y) // 100
    if window > 1:
        axis.plot(x, y, color=style["color"], alpha=0.25, linewidth=0.8)
        y = running_mean(y, window)
    axis.plot(x, y, marker=panel.marker or ("." if len(y) == 1 else None), markersize=4, **style)


def set_scale(axis: Axes, panel: Panel, curves: list[list[Any]]) -> None:
    if panel.scale == "log":
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    if panel.scale == "zero":
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
        if axis.get_ylim()[1] >= 1000:
            axis.yaxis.set_major_formatter(EngFormatter(sep=""))
    if panel.scale == "settled":
        # From each run's last three quarters: the first steps of one run would flatten all curves.
        late = [[value for value in y[len(y) // 4 if len(y) >= 8 else 0 :] if not math.isnan(value)] for y in curves]
        ends = [end for values in late if values for end in np.quantile(values, (0.02, 0.98))]
        if ends:
            margin = 0.1 * (max(ends) - min(ends)) or 0.05
            axis.set_ylim(min(ends) - margin, max(ends) + margin)


def running_mean(values: list[float], window: int) -> list[float]:
    """Mean of the last ``window`` values that are numbers, at every place."""
    known = [not math.isnan(value) for value in values]
    sums = [0.0, *accumulate(value if is_known else 0.0 for value, is_known in zip(values, known))]
    counts = [0, *accumulate(known)]
    means = []
    for end in range(1, len(values) + 1):
        start = max(0, end - window)
        count = counts[end] - counts[start]
        means.append((sums[end] - sums[start]) / count if count else math.nan)
    return means


# --- The page ---------------------------------------------------------------------------------------------------------


def results(run: Run) -> dict[str, str]:
    """A line of the results table."""

    def each(key: str) -> list[float]:
        return [record[key] for record in run.records if record.get(key) is not None]

    def text(key: str, choose: Callable[[list[float]], float], form: str) -> str:
        values = each(key)
        return format(choose(values), form) if values else "-"

    return {
        "steps": f"{run.records[-1]['step']:,}",
        "tokens": text("consumed_tokens", max, ",.0f"),
        "last loss (nats/token)": text("loss", lambda values: values[-1], ".4f"),
        "last validation loss": text("validation_loss", lambda values: values[-1], ".4f"),
        "least validation loss": text("validation_loss", min, ".4f"),
        "tokens/s per device (median)": text("unpadded_tokens_per_second_per_gpu", median, ",.0f"),
        "MFU (median)": text("mfu", median, ".1%"),
        "peak memory (GiB)": text("peak_memory_gib", max, ".2f"),
    }


def table(header: list[str], rows: list[list[str]]) -> str:
    def line(tag: str, cells: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line("th", header) + "".join(line("td", row) for row in rows) + "</table>"


def page(runs: list[Run], png: bytes) -> str:
    """HTML with the picture inside."""
    summaries = [results(run) for run in runs]
    parts = [table(["run", *summaries[0]], [[run.name, *line.values()] for run, line in zip(runs, summaries)])]
    if differing := differing_values(runs):
        parts.append("<h2>Config values that differ</h2>")
        parts.append(
            table(["run", *differing], [[run.name, *column] for run, column in zip(runs, zip(*differing.values()))])
        )
    picture = f'<img alt="Curves of the runs" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    style = (
        "body{font-family:sans-serif;margin:1em}img{max-width:100%}table{border-collapse:collapse}"
        "td,th{padding:.3em .8em;border:1px solid #ccc;text-align:right}"
    )
    head = (
        f'<meta charset="utf-8"><title>{html.escape(", ".join(run.name for run in runs))}</title><style>{style}</style>'
    )
    return f"<!doctype html><html><head>{head}</head><body>{picture}<h2>Results</h2>{''.join(parts)}</body></html>\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder with metrics.jsonl, or that file")
    parser.add_argument("--x", choices=AXES_OF_X, default="step", help="the x axis; default: step")
    parser.add_argument("--out", type=Path, default=Path("plot_run.png"), help="the PNG; the page goes beside it")
    args = parser.parse_args(argv)
    if args.out.suffix != ".png":
        parser.error(f"--out={args.out} must end in .png; the page goes beside it as .html.")
    try:
        runs = read_runs(args.runs)
        picture = io.BytesIO()
        draw(runs, args.x).savefig(picture, format="png", dpi=110)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_bytes(picture.getvalue())
        args.out.with_suffix(".html").write_text(page(runs, picture.getvalue()))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    except OSError as error:
        raise SystemExit(f"--out={args.out} cannot be written: {error.strerror}.") from error
    print(f"wrote {args.out} and {args.out.with_suffix('.html')}")


if __name__ == "__main__":
    main()
