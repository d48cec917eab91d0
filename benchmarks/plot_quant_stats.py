"""Plots quantisation statistics per layer over the steps of a run: one PNG per tensor and statistic.

    python benchmarks/plot_quant_stats.py ckpt/train_fsdp2/quant_stats [--out plots] [--match mlp]

Reads ``<folder>/nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-0.log`` (quantization_stats.py), of either
backend, or the file that is given, such as an earlier run's ``nvdlfw_inspect_globalrank-0.1.log``.
"""

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure


PROJECT_DIR = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT_DIR))

from quantization_stats import LINE, LOG_FOLDER  # noqa: E402


NAME = re.compile(r".*\.layers\.(?P<layer>\d+)\.(?P<part>.+)_(?P<tensor>activation|gradient|weight)_(?P<stat>.+)")
LOGARITHMIC = ("mse", "scale_inv")

# (tensor, statistic) -> (part of the layer, layer) -> {iteration: value}
Series = dict[tuple[str, str], dict[tuple[str, int], dict[int, float]]]


def read_statistics(path: Path, match: str = "") -> Series:
    """Every line of a log whose name contains ``match``.

    Raises:
        ValueError: there is none.
    """
    series: Series = defaultdict(lambda: defaultdict(dict))
    for line in path.read_text(errors="replace").rpartition("\n")[0].splitlines():  # a last line may be cut short
        found = LINE.search(line)
        name = found and NAME.fullmatch(found["name"])
        if name and match in found["name"]:
            curve = series[name["tensor"], name["stat"]][name["part"], int(name["layer"])]
            curve[int(found["iteration"])] = float(found["value"])
    if not series:
        raise ValueError(f"{path} holds no statistic whose name contains {match!r}.")
    return series


def plot(series: Series, out: Path) -> list[Path]:
    """One figure per tensor and statistic: a panel per linear layer, a curve per decoder layer."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for (tensor, stat), curves in sorted(series.items()):
        parts = sorted({part for part, _ in curves})
        last = max(layer for _, layer in curves)
        figure = Figure(figsize=(4 * len(parts), 3.2), layout="constrained")
        panels = figure.subplots(1, len(parts), squeeze=False)
        for panel, part in zip(panels[0], parts):
            for layer in sorted(layer for other, layer in curves if other == part):
                steps, values = zip(*sorted(curves[part, layer].items()))
                colour = colormaps["viridis"]((layer - 1) / max(last - 1, 1))
                panel.plot(steps, values, color=colour, label=str(layer), marker="." if len(steps) < 20 else None)
            panel.set(title=part, xlabel="optimiser steps before")
            if any(kind in stat for kind in LOGARITHMIC) and any(v > 0 for c in curves.values() for v in c.values()):
                panel.set_yscale("log")
            panel.grid(alpha=0.3)
        panels[0][0].set_ylabel(stat)
        panels[0][-1].legend(
            title="layer", fontsize="x-small", ncols=1 + last // 12, loc="upper left", bbox_to_anchor=(1, 1)
        )
        figure.suptitle(f"{tensor}: {stat}")
        written.append(out / f"{tensor}_{stat.replace('%', '_percent')}.png")
        figure.savefig(written[-1], dpi=110, bbox_inches="tight")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="quant_stats in the run's folder, its quant_log_dir, or a file in it")
    parser.add_argument("--out", type=Path, help="folder for the PNG files; default: the log folder, or the file's")
    parser.add_argument("--match", default="", help="only names that contain this")
    args = parser.parse_args()
    path = args.path if args.path.is_file() else args.path / LOG_FOLDER / "nvdlfw_inspect_globalrank-0.log"
    if not path.exists():
        raise SystemExit(f"{path}: no such file; give quant_stats in the run's folder, or its quant_log_dir.")
    try:
        series = read_statistics(path, args.match)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    for written in plot(series, args.out or (path.parent if args.path.is_file() else args.path)):
        print(written)


if __name__ == "__main__":
    main()
