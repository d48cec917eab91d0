"""Speed and memory of a run, from its metrics.jsonl: medians over the logged steps, the first ones left out.

python benchmarks/summarize.py metrics.jsonl [more.jsonl ...] [--skip-steps 20]
"""

import argparse
import json
import statistics
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", type=Path, nargs="+")
    parser.add_argument("--skip-steps", type=int, default=20, help="warm-up steps to leave out")
    args = parser.parse_args()
    for path in args.metrics:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        timed = [row for row in rows if row["step"] > args.skip_steps]
        if not timed:
            raise SystemExit(
                f"{path}: no step after --skip-steps={args.skip_steps}; the run has {rows[-1]['step']} steps."
            )
        medians = {
            key: statistics.median(row[key] for row in timed)
            for key in (
                "step_time_seconds",
                "tokens_per_second_per_gpu",
                "unpadded_tokens_per_second_per_gpu",
                "tflops_per_gpu",
            )
        }
        print(
            f"{path}: {medians['tokens_per_second_per_gpu']:,.0f} tokens/s per GPU "
            f"({medians['unpadded_tokens_per_second_per_gpu']:,.0f} without padding), "
            f"{1e3 * medians['step_time_seconds']:.1f} ms a step, {medians['tflops_per_gpu']:.0f} TFLOP/s, "
            f"peak {rows[-1]['peak_memory_gib']:.2f} GiB allocated, last loss {rows[-1]['loss']:.4f}"
        )


if __name__ == "__main__":
    main()
