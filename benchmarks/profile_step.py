"""Where a training step's GPU time goes, kernel by kernel. Needs a GPU.

    python benchmarks/profile_step.py --config-name L1_llama_1b [key=value ...] [--rows 30]

Builds model, optimiser and data as train_ddp.py does on one rank, warms up, profiles a few steps and prints the wall
time of a step, the sum of its kernels and the kernels in order of their share (milliseconds per step).
"""

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from torch.profiler import ProfilerActivity, profile


PROJECT_DIR = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT_DIR))

import te_backend  # noqa: E402
from config import load_config, register_schema  # noqa: E402
from dataset import build_train_loader, load_tokenizer  # noqa: E402
from distributed import init_distributed, shut_down  # noqa: E402
from optimizer import build_optimizer, clip_and_step  # noqa: E402
from training import build_model, build_model_config, next_global_batch  # noqa: E402
from weight_init import initialize_weights  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-name", default="L1_llama_1b")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    register_schema()
    with initialize_config_dir(version_base="1.3", config_dir=str(PROJECT_DIR / "hydra_config" / "llama")):
        config = load_config(compose(args.config_name, overrides=args.overrides), "train_ddp")
    ctx = init_distributed()
    tokenizer = load_tokenizer(config.dataset.tokenizer_name_or_path)
    model = build_model(config, build_model_config(config, tokenizer), ctx.device)
    initialize_weights(model, ctx.device, config.seed)
    parameters = list(model.parameters())
    optimizer = build_optimizer(model, config, te_backend.resolve(config.te_backend))
    batches = iter(build_train_loader(config, tokenizer, 0, 1))

    def step() -> None:
        batch = next_global_batch(batches, config.grad_acc_steps, ctx.device)
        for micro_batch in batch.micro_batches:
            model(**micro_batch, num_items_in_batch=batch.num_targets).loss.backward()
        clip_and_step(optimizer, parameters, config.max_grad_norm)
        optimizer.zero_grad()

    def timed_steps() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(args.steps):
            step()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / args.steps

    for _ in range(6):
        step()
    wall_ms = min(timed_steps() for _ in range(3))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        timed_steps()
    kernels_ms: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kernels_ms[event.name][0] += event.device_time_total / 1e3 / args.steps
            kernels_ms[event.name][1] += 1 / args.steps
    total_ms = sum(ms for ms, _ in kernels_ms.values())
    print(
        f"{torch.cuda.get_device_name()}: {wall_ms:.1f} ms a step, kernels {total_ms:.1f} ms, "
        f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
    )
    for name, (ms, count) in sorted(kernels_ms.items(), key=lambda item: -item[1][0])[: args.rows]:
        print(f"{ms:8.2f} ms {count:7.1f} x  {name[:150]}")
    shut_down()


if __name__ == "__main__":
    main()
