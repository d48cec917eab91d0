"""Trains the same job in BF16 and in every low-precision recipe, and compares the losses.

    python benchmarks/compare_recipes.py                                        # the main job; minutes per recipe
    python benchmarks/compare_recipes.py --recipes MXFP8BlockScaling -- num_train_steps=50 validation.max_batches=4
    python benchmarks/compare_recipes.py --ranks 8 -- --config-name L1_llama_1b          # starts the processes itself

What follows ``--`` goes to the train script. ``MXFP8BlockScaling@reference`` runs a recipe with te_backend=reference,
where the device cannot, or to compare. ``--jobs N`` trains N at a time, where one does not fill the device; speeds then
mean nothing. Weights, data order and schedule are the same in all runs, so that their losses differ by arithmetic
alone. Prints a table, and writes ``comparison.json`` and ``comparison.png`` (the relative difference to the baseline,
step by step) into ``--out``. Exit code 1 if a validation loss is further off than
``--tolerance``.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure


PROJECT_DIR = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT_DIR))

from config_low_precision import FP4_RECIPES  # noqa: E402
from te_reference.recipe import RECIPES  # noqa: E402


BASELINE = "baseline"


def overrides_for(recipe: str) -> list[str]:
    """What makes a run use ``recipe`` (``NAME`` or ``NAME@BACKEND``) in all layers.

    Raises:
        ValueError: no such recipe.
    """
    if recipe == BASELINE:
        return []
    name, _, backend = recipe.partition("@")
    if name not in RECIPES:
        raise ValueError(f"{recipe!r}: give one of {', '.join(RECIPES)}, or one of them followed by @reference.")
    prefix = "fp4" if name in FP4_RECIPES else "fp8"
    return [
        f"{prefix}_config.enabled=true",
        f"{prefix}_config.{prefix}_recipe={name}",
        *([f"te_backend={backend}"] if backend else []),
    ]


def run(script: str, recipe: str, ranks: int, extra: list[str], out: Path) -> list[dict]:
    """Trains once; returns the rows of its metrics.jsonl."""
    metrics = out / f"{recipe}.jsonl"
    metrics.unlink(missing_ok=True)
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    command = [*launcher, str(PROJECT_DIR / script), *extra, *overrides_for(recipe), f"logger.metrics_path={metrics}"]
    print(" ".join(command), flush=True)
    subprocess.run(command, cwd=PROJECT_DIR, check=True)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def summarize(rows: dict[str, list[dict]]) -> list[dict]:
    """Per recipe: validation loss, mean training loss of the last tenth, their relative differences to the baseline."""
    summary = []
    for recipe, steps in rows.items():
        tail = steps[-max(len(steps) // 10, 1) :]
        summary.append(
            {
                "recipe": recipe,
                "validation_loss": next(
                    (r["validation_loss"] for r in reversed(steps) if r.get("validation_loss")), None
                ),
                "training_loss": mean(row["loss"] for row in tail),
                "tokens_per_second_per_gpu": mean(row["tokens_per_second_per_gpu"] for row in tail),
            }
        )
    for row in summary:
        for key in ("validation_loss", "training_loss"):
            base = summary[0][key]
            row[f"{key}_difference"] = None if row[key] is None else row[key] / base - 1
    return summary


def table(summary: list[dict]) -> str:
    """The summary as Markdown."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:+.3f} %"

    lines = [
        "| recipe | validation loss | to baseline | training loss, last tenth | to baseline | tokens/s per device |",
        "|---|---|---|---|---|---|",
    ]
    for row in summary:
        validation = "-" if row["validation_loss"] is None else f"{row['validation_loss']:.4f}"
        lines.append(
            f"| {row['recipe']} | {validation} | {percent(row['validation_loss_difference'])} | "
            f"{row['training_loss']:.4f} | {percent(row['training_loss_difference'])} | "
            f"{row['tokens_per_second_per_gpu']:,.0f} |"
        )
    return "\n".join(lines)


def plot(rows: dict[str, list[dict]], path: Path) -> None:
    """Relative difference of the training loss to the baseline over steps, averaged over up to 20 steps."""
    figure = Figure(figsize=(8, 4))
    panel = figure.subplots()
    baseline = [row["loss"] for row in rows[BASELINE]]
    window = max(min(20, len(baseline) // 5), 1)
    for recipe, steps in rows.items():
        if recipe != BASELINE:
            differences = [100 * (row["loss"] / base - 1) for row, base in zip(steps, baseline)]
            smooth = [mean(differences[i : i + window]) for i in range(len(differences) - window + 1)]
            panel.plot([row["step"] for row in steps][window - 1 :], smooth, label=recipe)
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set(xlabel="optimiser steps", ylabel=f"training loss to baseline, %, mean of {window} steps")
    panel.legend()
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--script", default="train_fsdp2.py")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("outputs/compare_recipes"))
    parser.add_argument("--tolerance", type=float, default=0.01, help="of the validation loss, relative")
    parser.add_argument("overrides", nargs="*", help="after --: arguments of the train script, the same for every run")
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    recipes = [BASELINE, *args.recipes]
    for recipe in recipes:
        overrides_for(recipe)  # a wrong name shows before an hour has passed
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [pool.submit(run, args.script, recipe, args.ranks, args.overrides, args.out) for recipe in recipes]
        rows = {recipe: future.result() for recipe, future in zip(recipes, runs)}
    summary = summarize(rows)
    (args.out / "comparison.json").write_text(json.dumps(summary, indent=1))
    print(table(summary))
    plot(rows, args.out / "comparison.png")
    print(f"in {args.out}: comparison.json, comparison.png")
    worst = max(abs(row["validation_loss_difference"] or 0.0) for row in summary)
    if worst > args.tolerance:
        raise SystemExit(f"a validation loss is {100 * worst:.2f} % off the baseline: more than --tolerance.")


if __name__ == "__main__":
    main()
