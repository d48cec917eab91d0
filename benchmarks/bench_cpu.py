"""One training step of the reference backend against Hugging Face's LlamaForCausalLM, on the CPU, in one run.

    OMP_NUM_THREADS=2 python benchmarks/bench_cpu.py

Forward, backward, and AdamW for both. Two comparisons: the same full BSHD batch, and the same real records of varying
length, padded to the longest (Hugging Face) or packed (THD). Medians; ratio = Hugging Face's time / ours.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import torch
from transformers import LlamaForCausalLM


PROJECT_DIR = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT_DIR))

from convert import convert_llama_hf_to_te  # noqa: E402


def time_alternately(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each function; they take turns, so that a disturbance hits all of them."""
    for step in steps.values():
        step()
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def training_step(model: torch.nn.Module, batch: dict) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def real_records(num_records: int, max_length: int) -> list[torch.Tensor]:
    """The bundled genome's first rows as byte ids, cut to ``max_length``."""
    rows = pq.read_table(PROJECT_DIR / "data" / "ecoli_536", columns=["sequence"]).column("sequence").to_pylist()
    return [torch.tensor(list(row[:max_length].encode())) for row in rows[:num_records]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(PROJECT_DIR / "model_configs" / "llama-genome-tiny"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--records", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=4096)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaForCausalLM.config_class.from_pretrained(args.config)
    hf = LlamaForCausalLM(config).train()
    print(f"{torch.get_num_threads()} threads of {os.cpu_count()} CPUs, torch {torch.__version__}")

    tokens = torch.randint(config.vocab_size, (8, 512))
    batch = {"input_ids": tokens, "labels": tokens}
    ours = convert_llama_hf_to_te(hf, te_backend="reference").train()
    seconds = time_alternately({"hf": training_step(hf, batch), "ours": training_step(ours, batch)}, args.repeats)
    print(
        f"BSHD 8 x 512: Hugging Face {1e3 * seconds['hf']:.0f} ms, ours {1e3 * seconds['ours']:.0f} ms, "
        f"ratio {seconds['hf'] / seconds['ours']:.2f}"
    )

    records = real_records(args.records, args.max_length)
    lengths = [len(record) for record in records]
    padded = torch.nn.utils.rnn.pad_sequence(records, batch_first=True)
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    padded_batch = {"input_ids": padded, "attention_mask": mask, "labels": padded.masked_fill(mask == 0, -100)}
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    packed = torch.cat(records)[None]
    packed_batch = {"input_ids": packed, "labels": packed, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    packed_batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    ours = convert_llama_hf_to_te(hf, te_backend="reference", attn_input_format="thd").train()
    steps = {"hf": training_step(hf, padded_batch), "ours": training_step(ours, packed_batch)}
    seconds = time_alternately(steps, args.repeats)
    print(
        f"{len(lengths)} records of {min(lengths)}-{max(lengths)} bases, {sum(lengths) / padded.numel():.0%} of the "
        f"padded batch: Hugging Face padded {1e3 * seconds['hf']:.0f} ms, ours packed {1e3 * seconds['ours']:.0f} ms, "
        f"ratio {seconds['hf'] / seconds['ours']:.2f}"
    )


if __name__ == "__main__":
    main()
