"""Training steps of four layers of Mixtral-8x7B on one GPU: TransformerEngine against Hugging Face, in one run.

    python benchmarks/bench_mixtral.py [--tokens 8192 32768] [--variants te te_fp8 hf_grouped_mm hf_eager]

BF16 parameters, vocabulary 32,000, sequences of 8,192 tokens, AdamW, auxiliary loss on; medians of CUDA-event times.
Every variant builds its model afresh and frees it again. te: this project's AdamW. te_fp8: the same with DelayedScaling
in the decoder layers, te_fp8_current with Float8CurrentScaling. hf_*: torch's fused AdamW. A variant that does not fit
or cannot run is reported, not hidden. ``--layout thd`` packs the sequences of the te variants; ``--profile FOLDER``
writes a Chrome trace and a table of one step of every variant.
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
from optimizer import AdamW  # noqa: E402
from precision import PrecisionPlan  # noqa: E402
from weight_init import initialize_weights  # noqa: E402


SEQUENCE_TOKENS = 8192
LAYERS = 4
RECIPES = {"te": None, "te_fp8": "DelayedScaling", "te_fp8_current": "Float8CurrentScaling"}
VARIANTS = (*RECIPES, "hf_grouped_mm", "hf_eager")


@contextlib.contextmanager
def bf16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def te_step(num_tokens: int, recipe_name: str | None, layout: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Model, and a function that returns the loss of one forward pass."""
    config = NVMixtralConfig.from_pretrained(
        PROJECT_DIR / "model_configs/Mixtral-8x7B",
        num_hidden_layers=LAYERS,
        attn_input_format=layout,
        te_backend="transformer_engine",
    )
    te = te_backend.resolve("transformer_engine")
    recipe = recipe_name and getattr(te_backend.recipe_module(te), recipe_name)()
    with bf16(), torch.device("meta"):
        model = NVMixtralForCausalLM(config, PrecisionPlan((recipe,) * LAYERS, te))
    initialize_weights(model, torch.device("cuda"), seed=0)
    ids = torch.randint(config.vocab_size, (num_tokens // SEQUENCE_TOKENS, SEQUENCE_TOKENS), device="cuda")
    if layout == "bshd":
        return model, lambda: model(input_ids=ids, labels=ids).loss
    ids = ids.view(1, num_tokens)
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


def measure(variant: str, num_tokens: int, args: argparse.Namespace) -> tuple[float, float, float]:
    """(thousand tokens/s, peak GiB allocated, last loss)."""
    if variant in RECIPES:
        model, forward = te_step(num_tokens, RECIPES[variant], args.layout)
    else:
        model, forward = hf_step(num_tokens, variant.removeprefix("hf_"))
    optimizer_class = AdamW if variant in RECIPES else torch.optim.AdamW
    optimizer = optimizer_class(model.train().parameters(), lr=1e-5, fused=True)

    def step() -> torch.Tensor:
        loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(args.warm_up):
        step()
    torch.cuda.reset_peak_memory_stats()
    times_ms = []
    for _ in range(args.repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        loss = step()
        end.record()
        torch.cuda.synchronize()
        times_ms.append(start.elapsed_time(end))
    if args.profile is not None:
        with torch.profiler.profile() as profile:
            step()
            torch.cuda.synchronize()
        args.profile.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(args.profile / f"{variant}_{num_tokens}.json"))
        table = profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=90)
        (args.profile / f"{variant}_{num_tokens}.txt").write_text(table)
    return num_tokens / statistics.median(times_ms), torch.cuda.max_memory_allocated() / 2**30, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="per step")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--layout", choices=("thd", "bshd"), default="bshd", help="of the te variants")
    parser.add_argument("--profile", metavar="FOLDER", type=Path)
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for num_tokens in args.tokens:
        results = {}
        for variant in args.variants:
            try:
                speed, gib, loss = results[variant] = measure(variant, num_tokens, args)
                result = f"{speed:6.1f} k tokens/s {gib:6.1f} GiB  loss {loss:.3f}"
            except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
                result = f"did not run: {str(error).splitlines()[0][:200]}"
            print(f"{num_tokens:6d} tokens  {variant:14s} {result}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
        for baseline in ("hf_grouped_mm", "hf_eager"):
            for variant in RECIPES:
                if {variant, baseline} <= results.keys():
                    print(f"  {variant} / {baseline}: {results[variant][0] / results[baseline][0]:.2f}")


if __name__ == "__main__":
    main()
