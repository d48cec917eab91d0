"""Trains with every script on several ranks and on one, resumes each run's checkpoint on the other, compares losses.

    python benchmarks/compare_layouts.py --ranks 2                               # a rank per GPU; gloo on a CPU
    python benchmarks/compare_layouts.py --ranks 4 --scripts train_fsdp2 train_fsdp2_ep -- fp8_config.enabled=true

Both see the same global batches: one rank accumulates over as many micro-batches as there are ranks, and with context
parallelism all ranks share every sequence. What follows ``--`` goes to the train scripts. Prints per script the largest
relative difference of a step's loss: between the layouts, and between either run and its second half as the other
layout continues it. Exit code 1 if one exceeds ``--tolerance``.
"""

import argparse
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


PROJECT_DIR = Path(__file__).resolve().parents[1]
ARGUMENTS = {
    "train_ddp": ("L0_sanity", "grad_acc_steps"),
    "train_fsdp2": ("L0_sanity", "grad_acc_steps"),
    "train_fsdp2_cp": ("L0_sanity_cp", "cp_size"),
    "train_fsdp2_ep": ("L0_sanity", "grad_acc_steps"),
}
"""Per script its preset, and what is as large as the ranks are many: grad_acc_steps on one rank, cp_size on all."""


def train(script: str, ranks: int, options: argparse.Namespace, folder: Path, resume: bool) -> dict[int, float]:
    """Runs ``script`` with its checkpoints in ``folder``; returns each step's loss."""
    preset, key = ARGUMENTS[script]
    size = {"grad_acc_steps": options.ranks // ranks, "cp_size": ranks}[key]
    metrics = folder / f"{ranks}_ranks_{'resumed' if resume else 'whole'}.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [f"{script}.py", f"--config-name={preset}", f"{key}={size}", f"num_train_steps={options.steps}"]
    command += [f"checkpoint.ckpt_dir={folder}", f"checkpoint.save_every_n_steps={options.steps // 2}"]
    command += [f"checkpoint.resume_from_checkpoint={resume}", f"logger.metrics_path={metrics}", *options.overrides]
    done = subprocess.run(command, cwd=PROJECT_DIR, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout[-4000:]}")
    return {row["step"]: row["loss"] for row in map(json.loads, metrics.read_text().splitlines())}


def largest_difference(losses: dict[int, float], expected: dict[int, float]) -> float:
    """The largest relative difference of a step that ``losses`` has."""
    return max(abs(loss / expected[step] - 1) for step, loss in losses.items())


def compare(script: str, options: argparse.Namespace) -> list[float]:
    """Differences of: several ranks to one; one continued by several; several continued by one."""
    whole, folders = {}, {}
    for ranks in (1, options.ranks):
        folders[ranks] = options.out / f"{script}_{ranks}"
        folders[ranks].mkdir(parents=True)
        whole[ranks] = train(script, ranks, options, folders[ranks], resume=False)
        shutil.rmtree(folders[ranks] / script / f"step_{options.steps}")
    differences = [largest_difference(whole[options.ranks], whole[1])]
    for saved, resumed in ((1, options.ranks), (options.ranks, 1)):
        losses = train(script, resumed, options, folders[saved], resume=True)
        if min(losses) != options.steps // 2 + 1:
            raise RuntimeError(f"{script}: went on at step {min(losses)} from the checkpoint of {options.steps // 2}.")
        differences.append(largest_difference(losses, whole[saved]))
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--scripts", nargs="+", choices=ARGUMENTS, default=list(ARGUMENTS))
    parser.add_argument("--jobs", type=int, default=1, help="scripts compared at a time")
    parser.add_argument("--tolerance", type=float, default=1e-2, help="relative; BF16 sums in another order")
    parser.add_argument("--out", type=Path, default=Path("compare_layouts"), help="folder of checkpoints and metrics")
    parser.add_argument("overrides", nargs="*", help="after --: overrides for the train scripts")
    options = parser.parse_args()
    options.out = options.out.resolve()
    if options.out.exists():
        raise SystemExit(f"{options.out} exists: remove it, or name another folder with --out.")
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = dict(zip(options.scripts, pool.map(lambda script: compare(script, options), options.scripts)))
    print(f"| script | {options.ranks} ranks against 1 | 1 -> {options.ranks} resumed | {options.ranks} -> 1 resumed |")
    print("|---|---|---|---|")
    for script, differences in rows.items():
        print(f"| `{script}` | {' | '.join(f'{difference:.1e}' for difference in differences)} |")
    if max(max(differences) for differences in rows.values()) > options.tolerance:
        raise SystemExit(f"more than {options.tolerance}")


if __name__ == "__main__":
    main()
