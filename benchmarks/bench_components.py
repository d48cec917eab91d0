"""Where a training step's time outside the decoder layers goes: loss, optimiser, gradient norm. Needs a GPU.

    python benchmarks/bench_components.py [--tokens 16384] [--model Llama-3.2-1B]

BF16 parameters of the given model config. Medians of CUDA-event times in milliseconds; peak memory beyond what was held
before, in GiB.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch


PROJECT_DIR = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT_DIR))

import loss  # noqa: E402
import te_backend  # noqa: E402
from distributed import global_grad_norm  # noqa: E402
from modeling_llama_te import NVLlamaConfig, NVLlamaForCausalLM  # noqa: E402
from optimizer import clip_and_step  # noqa: E402
from weight_init import initialize_weights  # noqa: E402


def timed(label: str, function: Callable[[], object], repeats: int = 15, warm_up: int = 4) -> None:
    """Prints the median time and the peak extra memory of ``function``."""
    for _ in range(warm_up):
        function()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times_ms = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times_ms.append(start.elapsed_time(end))
    extra_gib = (torch.cuda.max_memory_allocated() - held) / 2**30
    print(f"{label:44s} {statistics.median(times_ms):8.2f} ms {extra_gib:7.2f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--model", default="Llama-3.2-1B")
    args = parser.parse_args()
    device = torch.device("cuda")
    config = NVLlamaConfig.from_pretrained(PROJECT_DIR / "model_configs" / args.model, attn_input_format="thd")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = NVLlamaForCausalLM(config)
    initialize_weights(model, device, seed=0)
    parameters = list(model.parameters())
    print(torch.cuda.get_device_name(), torch.__version__, f"{sum(p.numel() for p in parameters) / 1e9:.3f} billion")

    hidden_TD = torch.randn(args.tokens, config.hidden_size, device=device, requires_grad=True)
    weight_VD = model.lm_head.weight
    targets_T = torch.randint(256, (args.tokens,), device=device)
    for exponent in (26, 27, 28, 29, 30):
        loss.LOGITS_PER_CHUNK["cuda"] = 2**exponent

        def head() -> None:
            hidden_TD.grad = weight_VD.grad = None
            loss.linear_cross_entropy(hidden_TD, weight_VD, targets_T).backward()

        timed(f"loss, {2**exponent // config.vocab_size} tokens a chunk", head)

    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    options = {"lr": 1e-6, "betas": (0.9, 0.95), "weight_decay": 0.1}
    timed("gradient norm", lambda: global_grad_norm(parameters))
    fused = torch.optim.AdamW(parameters, fused=True, **options)
    timed("torch AdamW, fused", fused.step)
    timed("the same with gradient norm and clipping", partial(clip_and_step, fused, parameters, 1.0))
    del fused
    capturable = torch.optim.AdamW(parameters, foreach=True, capturable=True, **options)
    timed("torch AdamW, foreach under torch.compile", torch.compile(capturable.step))
    del capturable
    te = te_backend.resolve("transformer_engine")
    masters = te.optimizers.FusedAdam(parameters, master_weights=True, **options)
    timed("TE FusedAdam, FP32 masters and moments", masters.step)


if __name__ == "__main__":
    main()
