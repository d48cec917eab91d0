"""Context parallelism measured: error and traffic against one rank, memory per rank, the longest context of one device.

    torchrun --nproc_per_node=2 benchmarks/bench_context_parallel.py parity     # also on a CPU, with the reference
    torchrun --nproc_per_node=2 benchmarks/bench_context_parallel.py memory
    python benchmarks/bench_context_parallel.py context
    torchrun --nproc_per_node=4 benchmarks/bench_context_parallel.py context --model Llama-3.1-8B

Ranks may share one card where NCCL allows it (NCCL_MULTI_RANK_GPU_ENABLE=1): errors, traffic and memory are right there
too, and times are not taken. ``parity`` fails if an error exceeds its bound, ``memory`` if two ranks need more than 0.6
of what one needs each. ``context`` trains on one sequence that all ranks share, with parameters sharded by FSDP2 and
every layer recomputed; set PYTORCH_ALLOC_CONF=expandable_segments:True.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import te_backend
from collator import Batch, BSHDCollator, THDCollator
from config import TrainConfig
from context_parallel import (
    ContextParallel,
    all_to_all_size,
    bytes_per_layer,
    init_context_parallel,
    local_world_size,
    set_context_parallel_group,
    split_batch,
)
from distributed import DistributedContext, init_distributed, shut_down
from modeling_llama_te import NVLlamaConfig, NVLlamaForCausalLM
from optimizer import build_optimizer
from paths import PROJECT_DIR
from precision import PrecisionPlan
from train_fsdp2_cp import shard
from training import to_device
from weight_init import initialize_weights


BOUNDS = {"cuda": 1e-2, "cpu": 1e-5}
"""Relative norm of the difference to one rank: BF16 on a GPU, FP32 on a CPU. In FP8 of loss and gradients only: the
last bit of a BF16 sum can decide between two FP8 values, so single hidden states differ by more."""


def build_model(
    device: torch.device, layout: str, name: str = "Llama-3.2-1B", recipe: str | None = None, **overrides
) -> NVLlamaForCausalLM:
    """A model of ``model_configs``, on the meta device; BF16 on a GPU, FP32 on a CPU."""
    config = NVLlamaConfig.from_pretrained(PROJECT_DIR / "model_configs" / name, attn_input_format=layout, **overrides)
    te = te_backend.resolve("auto")
    layer_recipe = None if recipe is None else getattr(te_backend.recipe_module(te), recipe)()
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    with torch.device("meta"):
        model = NVLlamaForCausalLM(config, PrecisionPlan((layer_recipe,) * config.num_hidden_layers, te))
    torch.set_default_dtype(previous)
    return model


def random_batch(layout: str, lengths: list[int], multiple: int) -> Batch:
    """Windows of random bases, on the CPU; the same on every rank."""
    generator = np.random.default_rng(0)
    windows = [generator.choice(np.frombuffer(b"ACGT", dtype=np.uint8), size).astype(np.int64) for size in lengths]
    if layout == "bshd":
        return BSHDCollator(0, multiple)(windows)
    num_tokens = sum(-(-size // multiple) * multiple for size in lengths)
    return THDCollator(0, -(-num_tokens // 128) * 128, max(lengths), sequence_pad_multiple=multiple)(windows)


def _ranks(group: dist.ProcessGroup | None = None, **_) -> int:
    return dist.get_world_size(group)


# Bytes that a rank sends to others, from a collective's arguments.
SENT_BYTES = {
    "batch_isend_irecv": lambda operations: sum(op.tensor.nbytes for op in operations if op.op is dist.isend),
    "all_gather_into_tensor": lambda out, part, **kwargs: part.nbytes * (_ranks(**kwargs) - 1),
    "reduce_scatter_tensor": lambda part, whole, **kwargs: part.nbytes * (_ranks(**kwargs) - 1),
    "all_to_all_single": lambda out, part, **kwargs: part.nbytes * (_ranks(**kwargs) - 1) // _ranks(**kwargs),
}


class Traffic:
    """Counts the bytes that this rank sends through torch.distributed inside a ``with`` block."""

    def __enter__(self) -> "Traffic":
        self.sent_bytes = 0
        self._originals = {name: getattr(dist, name) for name in SENT_BYTES}
        for name, function in self._originals.items():
            setattr(dist, name, self._counted(function, SENT_BYTES[name]))
        return self

    def __exit__(self, *exception) -> None:
        for name, function in self._originals.items():
            setattr(dist, name, function)

    def _counted(self, function: Callable, sent_bytes: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            self.sent_bytes += sent_bytes(*args, **kwargs)
            return function(*args, **kwargs)

        return wrapped


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|."""
    return (torch.linalg.vector_norm(a.double() - b.double()) / torch.linalg.vector_norm(b.double())).item()


def parity(ctx: DistributedContext) -> bool:
    """Prints, per layout, precision and cp_comm_type, errors against one rank and bytes sent per layer."""
    os.environ["NVTE_BATCH_MHA_P2P_COMM"] = (
        "1"  # so that all of TE's sends go through batch_isend_irecv, and are counted
    )
    on_gpu, size = ctx.device.type == "cuda", ctx.world_size
    scale = 8 if on_gpu else 1
    shape = (
        {"num_hidden_layers": 2} if on_gpu else {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512}
    )
    if not on_gpu:
        shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 256}
    multiple = 16 * size  # 2 * size for the chunks, 8 * size for FP8's matrix products
    lengths = {"thd": [509, 3, 1, 256, 1001, 128], "bshd": [1001, 1024]}
    recipes = [None, "Float8CurrentScaling", "DelayedScaling"] if on_gpu else [None]
    comm_types = ["p2p", "all_gather", "a2a"] + (["a2a+p2p"] if size == 4 else [])

    passed = True
    _print(
        ctx,
        "| layout | precision | cp_comm_type | loss | hidden states | gradients | MB per layer, counted (formula) |",
    )
    _print(ctx, "|---|---|---|---|---|---|---|")
    for layout, sizes in lengths.items():
        batch = random_batch(layout, [length * scale for length in sizes], multiple)
        exact = None
        for recipe in recipes:
            precision = recipe or ("bf16" if on_gpu else "fp32")
            alone = run_once(ctx, layout, shape, batch, recipe, None)
            exact = exact or alone
            floor = relative(alone["grads"], exact["grads"])
            for comm_type in comm_types:
                cp = init_context_parallel(
                    ctx, size, comm_type, shape.get("num_attention_heads", 32), shape.get("num_key_value_heads", 8)
                )
                shared = run_once(ctx, layout, shape, batch, recipe, cp)
                errors = [relative(shared[key], alone[key]) for key in ("loss", "hidden", "grads")]
                formula = expected_traffic(comm_type if on_gpu else "p2p", cp, batch, shape, 2 if on_gpu else 4)
                counted = [
                    f"{count / 1e6:.2f} ({by_formula / 1e6:.2f})" for count, by_formula in zip(shared["sent"], formula)
                ]
                cells = [layout, precision, comm_type, *(f"{error:.1e}" for error in errors), " + ".join(counted)]
                _print(ctx, f"| {' | '.join(cells)} |")
                bounded = errors if recipe is None else (errors[0], errors[2])
                passed &= max(bounded) <= BOUNDS[ctx.device.type]
            if recipe is not None:
                _print(ctx, f"| {layout} | {precision} | one rank against BF16 | | | {floor:.1e} | |")
    return passed


def expected_traffic(
    comm_type: str, cp: ContextParallel, batch: Batch, shape: dict, element_bytes: int
) -> tuple[int, int]:
    """:func:`bytes_per_layer` of a batch."""
    heads = shape.get("num_attention_heads", 32), shape.get("num_key_value_heads", 8)
    a2a_size = all_to_all_size(comm_type, cp.cp_size, *heads, local_world_size())
    tokens = batch["input_ids"].numel()
    return bytes_per_layer(comm_type, tokens, cp.cp_size, *heads, shape.get("head_dim", 64), element_bytes, a2a_size)


def run_once(
    ctx: DistributedContext, layout: str, shape: dict, batch: Batch, recipe: str | None, cp: ContextParallel | None
) -> dict:
    """Loss, last hidden states and all gradients, put together over the ranks, and bytes sent per layer."""
    model = build_model(ctx.device, layout, recipe=recipe, **({"vocab_size": 256} | shape))
    initialize_weights(model, ctx.device, seed=0)
    local = batch
    if cp is not None:
        set_context_parallel_group(model, cp, ctx.device)
        local = split_batch(batch, cp.cp_rank, cp.cp_size)
    num_targets = (batch["shift_labels"] != -100).sum().float().to(ctx.device)
    if recipe == "DelayedScaling":  # a step that finds the scales
        model(**to_device(local, ctx.device), num_items_in_batch=num_targets).loss.backward()
        model.zero_grad()
    states = []
    model.model.norm.register_forward_hook(lambda module, inputs, output: states.append(output.detach()))
    with Traffic() as forward:
        loss = model(**to_device(local, ctx.device), num_items_in_batch=num_targets).loss
    with Traffic() as backward:
        loss.backward()
    hidden = states[0].float().flatten(0, -2)
    total = loss.detach().float()
    grads = torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])
    if cp is not None:
        rows = split_batch({**batch, "input_ids": _numbered(batch)}, cp.cp_rank, cp.cp_size)["input_ids"].flatten()
        whole = torch.zeros(batch["input_ids"].numel(), hidden.shape[1], device=ctx.device)
        whole[rows.to(ctx.device)] = hidden
        hidden = whole
        for value in (hidden, total, grads):
            dist.all_reduce(value)
    real = batch["attention_mask"].flatten().bool().to(ctx.device)
    per_layer = [traffic.sent_bytes // model.config.num_hidden_layers for traffic in (forward, backward)]
    return {"loss": total, "hidden": hidden[real], "grads": grads, "sent": per_layer}


def _numbered(batch: Batch) -> torch.Tensor:
    return torch.arange(batch["input_ids"].numel()).view_as(batch["input_ids"])


def memory(ctx: DistributedContext, num_tokens: int) -> bool:
    """Prints the peak memory of a forward and backward pass over one sequence, alone and shared by all ranks."""
    if ctx.device.type != "cuda":
        raise SystemExit("memory measures a GPU; tests/test_context_parallel.py does it on a CPU.")
    batch = random_batch("bshd", [num_tokens], 2 * ctx.world_size)
    peaks = []
    for shared in (False, True):
        if shared or ctx.is_main:
            model = build_model(ctx.device, "bshd", vocab_size=256)
            local = batch
            if shared:
                cp = init_context_parallel(ctx, ctx.world_size, "p2p", 32, 8)
                set_context_parallel_group(model, cp, ctx.device)
                shard(model, TrainConfig(), ctx)
                local = split_batch(batch, cp.cp_rank, cp.cp_size)
            initialize_weights(model, ctx.device, seed=0)
            torch.cuda.reset_peak_memory_stats()
            model(**to_device(local, ctx.device)).loss.backward()
            peaks.append(torch.cuda.max_memory_allocated() / 2**30)
            del model
            gc.collect()
            torch.cuda.empty_cache()
        dist.barrier()
    if ctx.is_main:
        ratio = peaks[1] / peaks[0]
        print(
            f"one sequence of {num_tokens} tokens: {peaks[0]:.1f} GiB alone, {peaks[1]:.1f} GiB per rank on "
            f"{ctx.world_size} ranks: {ratio:.2f}"
        )
        return ctx.world_size != 2 or ratio <= 0.6
    return True


def context(ctx: DistributedContext, sizes: list[int], name: str, recipe: str | None, comm_type: str) -> bool:
    """Prints tokens/s and peak memory of whole training steps on one sequence of each size, until memory runs out."""
    _print(ctx, f"{name}, {recipe or 'high precision'}, {ctx.world_size} ranks, {comm_type}")
    _print(ctx, "| tokens | seconds per step | tokens/s per rank | peak GiB |")
    _print(ctx, "|---|---|---|---|")
    for num_tokens in sizes:
        try:
            seconds, peak_gib = time_step(ctx, num_tokens, name, recipe, comm_type)
        except torch.OutOfMemoryError:
            _print(ctx, f"| {num_tokens} | out of memory | | |")
            break
        speed = num_tokens / seconds / ctx.world_size
        _print(ctx, f"| {num_tokens} | {seconds:.2f} | {speed:,.0f} | {peak_gib:.1f} |")
    return True


def time_step(
    ctx: DistributedContext, num_tokens: int, name: str, recipe: str | None, comm_type: str
) -> tuple[float, float]:
    """Seconds of a training step (the best of three; of one from 262,144 tokens on) and rank 0's peak memory in GiB."""
    gc.collect()
    positions = {"max_position_embeddings": max(num_tokens, 131_072)}
    model = build_model(ctx.device, "bshd", name, recipe, activation_checkpointing="full", **positions)
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    cp = init_context_parallel(ctx, ctx.world_size, comm_type, *heads)
    set_context_parallel_group(model, cp, ctx.device)
    shard(model, TrainConfig(), ctx)
    initialize_weights(model, ctx.device, seed=0)
    optimizer = build_optimizer(model, TrainConfig(), te_backend.resolve("auto"))

    def local_batch(size: int) -> Batch:
        whole = random_batch("bshd", [size], 32 * ctx.world_size)
        return to_device(split_batch(whole, cp.cp_rank, cp.cp_size), ctx.device)

    def step(batch: Batch) -> float:
        _synchronize(ctx)
        dist.barrier()
        start = time.perf_counter()
        loss = model(**batch, num_items_in_batch=num_tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not torch.isfinite(loss):
            raise RuntimeError(f"{num_tokens} tokens: the loss is {loss.item()}.")
        return time.perf_counter() - start

    batch = local_batch(num_tokens)
    step(local_batch(1024))
    if ctx.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = min(step(batch) for _ in range(1 if num_tokens >= 262_144 else 3))
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if ctx.device.type == "cuda" else float("nan")


def _synchronize(ctx: DistributedContext) -> None:
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()


def _print(ctx: DistributedContext, line: str) -> None:
    if ctx.is_main:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("parity", "memory", "context"))
    parser.add_argument("--tokens", type=int, nargs="+", help="memory: one size; context: sizes to try, ascending")
    parser.add_argument("--model", default="Llama-3.2-1B", help="context: a folder of model_configs")
    parser.add_argument("--recipe", help="context: low-precision recipe of all layers, as DelayedScaling")
    parser.add_argument("--cp_comm_type", default="p2p", help="context: how attention communicates")
    arguments = parser.parse_args()
    ctx = init_distributed()
    if arguments.what == "parity":
        passed = parity(ctx)
    elif arguments.what == "memory":
        passed = memory(ctx, (arguments.tokens or [32_768])[0])
    else:
        sizes = arguments.tokens or [2**n for n in (13, 15, 17, 18, 19, 20)]
        passed = context(ctx, sizes, arguments.model, arguments.recipe, arguments.cp_comm_type)
    if not passed:
        _print(ctx, "a bound was exceeded")
    shut_down(exit_status=int(not passed))


if __name__ == "__main__":
    main()
