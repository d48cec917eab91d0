"""Tokens per second of generation: this project with and without its KV cache, and Hugging Face with its own.

    python benchmarks/bench_generation.py                                             # a tiny model
    python benchmarks/bench_generation.py --model model_configs/Llama-3.2-1B          # on the GPU, if there is one

All run the same random weights and prompts in one process, greedy, in turn, ``--repeats`` times, and the fastest run
of each counts. One JSON object on standard output; ``vs_*`` are ratios of tokens per second.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import te_backend
from convert import convert_llama_hf_to_te
from paths import project_path


def build(options: argparse.Namespace, device: torch.device) -> tuple[LlamaForCausalLM, Any]:
    """The Hugging Face model with random weights, and the same on the layers of ``--te-backend``."""
    config = LlamaConfig.from_pretrained(project_path(options.model))
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, options.dtype))
    try:
        with device:
            hf = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    model = convert_llama_hf_to_te(hf, te_backend=options.te_backend, attn_input_format=options.attn_input_format)
    return hf, model.eval()


def seconds(model: Any, inputs: dict[str, torch.Tensor], new_tokens: int, **kwargs: Any) -> float:
    """Wall time of one greedy generation."""
    if inputs["input_ids"].is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0, **kwargs)
    if inputs["input_ids"].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="./model_configs/llama-genome-tiny", help="folder with a Llama config.json")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--device", help="default: cuda where it is, else cpu")
    parser.add_argument("--te-backend", default="auto")
    parser.add_argument("--attn-input-format", choices=["thd", "bshd"], default="thd")
    parser.add_argument("--skip-no-cache", action="store_true", help="leave out the slow run without a cache")
    options = parser.parse_args()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options.dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")

    hf, model = build(options, device)
    shape = (options.batch_size, options.prompt_tokens)
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(4, hf.config.vocab_size, shape, generator=generator).to(device)
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    runs = {
        "hugging_face_cache": (hf, {}),
        "cache": (model, {}),
        "no_cache": (model, {"use_cache": False}),
    }
    if options.skip_no_cache:
        del runs["no_cache"]
    for subject, kwargs in runs.values():
        seconds(subject, inputs, 8, **kwargs)  # warm-up
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(options.repeats):
        for name, (subject, kwargs) in runs.items():
            best[name] = min(best[name], seconds(subject, inputs, options.new_tokens, **kwargs))
    rates = {name: options.batch_size * options.new_tokens / best[name] for name in runs}
    result = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "backend": te_backend.resolve(options.te_backend).__name__,
        **{name: getattr(options, name) for name in ("model", "dtype", "attn_input_format", "batch_size")},
        **{name: getattr(options, name) for name in ("prompt_tokens", "new_tokens")},
        "tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "vs_hugging_face_cache": round(rates["cache"] / rates["hugging_face_cache"], 2),
    }
    if "no_cache" in rates:
        result["vs_no_cache"] = round(rates["cache"] / rates["no_cache"], 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
