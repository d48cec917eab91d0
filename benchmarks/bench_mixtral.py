"""Training steps of four layers of Mixtral-8x7B on one GPU: TransformerEngine against Hugging Face, in one run.

    python benchmarks/bench_mixtral.py [--tokens 8192 32768] [--variants te hf_grouped_mm hf_eager te_fp8]

BF16 parameters, vocabulary 32,000, sequences of 8,192 tokens, AdamW (fused), auxiliary loss on; medians of CUDA-event
times. Every variant builds its model afresh and frees it again. te: packed (THD) batches. te_fp8: the same with
DelayedScaling in the decoder layers. A variant that does not
fit or cannot run is reported, not hidden. ``--profile FILE`` writes a Chrome trace of one step of the first variant.
"""

import argparse
import contextlib
import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM


PROJECT_DIR = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT_DIR))

import te_backend  # noqa: E402
from modeling_mixtral_te import NVMixtralConfig, NVMixtralForCausalLM  # noqa: E402
from precision import PrecisionPlan  # noqa: E402
from weight_init import initialize_weights  # noqa: E402


SEQUENCE_TOKENS = 8192
LAYERS = 4
VARIANTS = ("te", "te_fp8", "hf_grouped_mm", "hf_eager")


@contextlib.contextmanager
def bf16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def te_step(num_tokens: int, fp8: bool) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Model, and a function that returns the loss of one forward pass."""
    config = NVMixtralConfig.from_pretrained(
        PROJECT_DIR / "model_configs/Mixtral-8x7B",
        num_hidden_layers=LAYERS,
        attn_input_format="thd",
        te_backend="transformer_engine",
    )
    te = te_backend.resolve("transformer_engine")
    recipe = te_backend.recipe_module(te).DelayedScaling() if fp8 else None
    with bf16(), torch.device("meta"):
        model = NVMixtralForCausalLM(config, PrecisionPlan((recipe,) * LAYERS, te))
    initialize_weights(model, torch.device("cuda"), seed=0)
    ids = torch.randint(config.vocab_size, (1, num_tokens), device="cuda")
    offsets = torch.arange(0, num_tokens + 1, SEQUENCE_TOKENS, dtype=torch.int32, device="cuda")
    batch = {"input_ids": ids, "labels": ids, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    batch |= {"max_length_q": SEQUENCE_TOKENS, "max_length_k": SEQUENCE_TOKENS}
    return model, lambda: model(**batch).loss


def hf_step(num_tokens: int, implementation: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    config = MixtralConfig.from_pretrained(
        PROJECT_DIR / "model_configs/Mixtral-8x7B",
        num_hidden_layers=LAYERS,
        attn_implementation="sdpa",
        output_router_logits=True,
        use_cache=False,
    )
    config._experts_implementation = implementation
    with bf16(), torch.device("cuda"):
        model = MixtralForCausalLM(config)
    ids = torch.randint(config.vocab_size, (num_tokens // SEQUENCE_TOKENS, SEQUENCE_TOKENS), device="cuda")
    return model, lambda: model(input_ids=ids, labels=ids).loss


def build(variant: str, num_tokens: int) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    if variant.startswith("te"):
        return te_step(num_tokens, fp8=variant == "te_fp8")
    return hf_step(num_tokens, variant.removeprefix("hf_"))


def measure(variant: str, num_tokens: int, repeats: int, warm_up: int, trace: str | None) -> tuple[float, float, float]:
    """(thousand tokens/s, peak GiB allocated, last loss)."""
    model, forward = build(variant, num_tokens)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)

    def step() -> torch.Tensor:
        loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(warm_up):
        step()
    torch.cuda.reset_peak_memory_stats()
    times_ms = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        loss = step()
        end.record()
        torch.cuda.synchronize()
        times_ms.append(start.elapsed_time(end))
    if trace is not None:
        with torch.profiler.profile() as profile:
            step()
            torch.cuda.synchronize()
        profile.export_chrome_trace(trace)
        print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70))
    return num_tokens / statistics.median(times_ms), torch.cuda.max_memory_allocated() / 2**30, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="per step")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--profile", metavar="FILE")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    trace = args.profile
    for num_tokens in args.tokens:
        results = {}
        for variant in args.variants:
            try:
                speed, gib, loss = results[variant] = measure(variant, num_tokens, args.repeats, args.warm_up, trace)
                result = f"{speed:6.1f} k tokens/s {gib:6.1f} GiB  loss {loss:.3f}"
            except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
                result = f"did not run: {str(error).splitlines()[0][:200]}"
            print(f"{num_tokens:6d} tokens  {variant:14s} {result}", flush=True)
            trace = None
            gc.collect()
            torch.cuda.empty_cache()
        for variant in results.keys() - {"hf_grouped_mm"}:
            if "hf_grouped_mm" in results:
                print(f"  {variant} / hf_grouped_mm: {results[variant][0] / results['hf_grouped_mm'][0]:.2f}")


if __name__ == "__main__":
    main()
