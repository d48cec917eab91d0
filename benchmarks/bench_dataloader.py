"""Tokens per second that the data side delivers, per loader worker, for padded (BSHD) and packed (THD) batches.

    python benchmarks/bench_dataloader.py
    python benchmarks/bench_dataloader.py --max-seq-length 8192 --stride 200 --tokens 16384 --path my_data

Counts the real tokens (no padding) of batches that arrive in this process, after the first batch of every worker. "in
process" is the cost of making a batch, without the hand-over between processes.
"""

import argparse
import logging
import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import TrainConfig
from dataset import build_train_loader, load_tokenizer


def measure(config: TrainConfig, seconds: float) -> tuple[float, float]:
    """(tokens per second, micro-batches per second) of one rank's loader, over about ``seconds``."""
    loader = build_train_loader(config, load_tokenizer(config.dataset.tokenizer_name_or_path), dp_rank=0, dp_size=1)
    for _ in range(max(config.dataset.num_workers, 1)):
        next(loader)
    tokens = batches = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        tokens += int(next(loader)["attention_mask"].sum())
        batches += 1
    return tokens / elapsed, batches / elapsed


def main() -> None:
    """Prints one line per format and number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default="data/ecoli_536", help="load_dataset_kwargs.path")
    parser.add_argument("--text-column", default="sequence")
    parser.add_argument("--tokenizer", default="./tokenizers/nucleotide_fast_tokenizer")
    parser.add_argument("--max-seq-length", type=int, default=8192)
    parser.add_argument("--stride", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=16384, help="per micro-batch")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)

    print(f"{options.path}, {options.tokens} tokens per micro-batch, windows of {options.max_seq_length}")
    print(f"{'format':8}{'workers':>12}{'tokens/s':>14}{'per worker':>14}{'batches/s':>12}")
    for packing in (False, True):
        for workers in options.workers:
            config = TrainConfig(use_sequence_packing=packing)
            config.dataset.load_dataset_kwargs = {"path": options.path}
            config.dataset.text_column = options.text_column
            config.dataset.tokenizer_name_or_path = options.tokenizer
            config.dataset.max_seq_length = options.max_seq_length
            config.dataset.stride = options.stride
            config.dataset.num_workers = workers
            config.dataset.num_shards = 48 if 48 % max(workers, 1) == 0 else 12 * workers
            if packing:
                config.dataset.token_micro_batch_size = options.tokens
            else:
                config.dataset.micro_batch_size = max(options.tokens // options.max_seq_length, 1)
            rate, batches = measure(config, options.seconds)
            name = "THD" if packing else "BSHD"
            print(f"{name:8}{workers or 'in process':>12}{rate:14,.0f}{rate / max(workers, 1):14,.0f}{batches:12,.0f}")


if __name__ == "__main__":
    main()
