"""One training step of a tiny Mixtral on a CPU: te_reference against Hugging Face, in one run.

    OMP_NUM_THREADS=1 python benchmarks/bench_mixtral_cpu.py [--batch 8 --length 512]

The shape is model_configs/mixtral-tiny; forward with auxiliary loss, backward, AdamW. The models take turns, so that
whatever else the machine does hits them alike; CPU time of this process, median and best.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM


PROJECT_DIR = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT_DIR))

from modeling_mixtral_te import NVMixtralConfig, NVMixtralForCausalLM  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = PROJECT_DIR / "model_configs/mixtral-tiny"
    models = {"te_reference": NVMixtralForCausalLM(NVMixtralConfig.from_pretrained(folder, te_backend="reference"))}
    for implementation in ("grouped_mm", "eager"):
        config = MixtralConfig.from_pretrained(folder, output_router_logits=True)
        config._experts_implementation = implementation
        models[f"Hugging Face, {implementation}"] = MixtralForCausalLM(config)
    optimizers = {name: torch.optim.AdamW(model.train().parameters(), fused=True) for name, model in models.items()}
    ids = torch.randint(3, 256, (args.batch, args.length))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(args.repeats + 2):
        for name, model in models.items():
            start = time.process_time()
            model(**batch).loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            seconds[name].append(time.process_time() - start)
    ours = statistics.median(seconds["te_reference"][2:])
    for name, values in seconds.items():
        median, best = statistics.median(values[2:]), min(values[2:])
        ratio = f"te_reference is {median / ours:.2f} times as fast"
        print(f"{name:26s} median {median * 1e3:7.1f} ms, best {best * 1e3:7.1f} ms; {ratio}")


if __name__ == "__main__":
    main()
