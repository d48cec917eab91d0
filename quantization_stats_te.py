"""Statistics of quantised tensors on TransformerEngine in one pass over each tensor, without waiting for the device.

nvdlfw-inspect asks TE's buffers for them. Those (2.20.2) compute every statistic twice, with several kernels each, wait
for the device between them, and bring their results to the host one by one: 1.2 s for Llama-3.2-1B on an H200, whose
step takes 0.2 s. :func:`install` puts such buffers in their place, with the same names and values; what these do not
know, they take from TE's functions.
"""

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from nvdlfw_inspect.logging import MetricLogger
from nvdlfw_inspect.utils import gather_along_first_dim
from transformer_engine.debug.features.utils import stats_buffer
from transformer_engine.debug.features.utils.stats_computation import STATS, stats_to_num
from transformer_engine.pytorch import DType


ELEMENTS_PER_PROGRAM = 2**15
PAYLOADS = {DType.kFloat8E4M3: 1, DType.kFloat8E5M2: 2}
# What one pass finds, in this order.
FOUND = ("underflows_num", "total_square_error", "scale_inv_min", "scale_inv_max")


@triton.jit
def _compare_kernel(
    x_ptr,
    q_ptr,
    scale_inv_ptr,
    buffer_ptr,
    numel,
    numel_slot,
    underflows_slot,
    error_slot,
    min_slot,
    max_slot,
    PAYLOAD: tl.constexpr,
    ELEMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    scale_inv = tl.load(scale_inv_ptr)
    if program == 0:
        tl.atomic_add(buffer_ptr + numel_slot, numel.to(tl.float32))
        tl.atomic_min(buffer_ptr + min_slot, scale_inv)
        tl.atomic_max(buffer_ptr + max_slot, scale_inv)
    underflows = tl.zeros([BLOCK], dtype=tl.int32)
    squared_error = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, ELEMENTS, BLOCK):
        offsets = program.to(tl.int64) * ELEMENTS + first + tl.arange(0, BLOCK)
        mask = offsets < numel
        x = tl.load(x_ptr + offsets, mask=mask, other=0).to(tl.float32)
        q = tl.load(q_ptr + offsets, mask=mask, other=0)
        if PAYLOAD == 1:
            q = q.to(tl.float8e4nv, bitcast=True)
        elif PAYLOAD == 2:
            q = q.to(tl.float8e5, bitcast=True)
        q = q.to(tl.float32)
        underflows += ((x != 0) & (q == 0)).to(tl.int32)
        difference = x - q * scale_inv
        squared_error += difference * difference
    tl.atomic_add(buffer_ptr + underflows_slot, tl.sum(underflows, axis=0).to(tl.float32))
    tl.atomic_add(buffer_ptr + error_slot, tl.sum(squared_error, axis=0))


def compare(x: torch.Tensor, quantized: Any, buffer: torch.Tensor, numel_slot: int, slots: list[int]) -> None:
    """Adds to ``buffer`` (FP32) what one pass over a tensor and its quantised copy finds.

    Args:
        x: any shape, floating point.
        quantized: TE's tensor of it. With one scale for all, its row-wise payload is read, else it is dequantised, and
            1 takes the scale's place.
        numel_slot: where the number of elements goes.
        slots: where ``FOUND`` goes: sums, a minimum, a maximum.
    """
    if hasattr(quantized, "_scale_inv"):  # per-tensor scaling
        q, scale_inv, payload = quantized._data, quantized._scale_inv, PAYLOADS[quantized._fp8_dtype]
    else:
        q, payload = quantized.dequantize(dtype=torch.float32), 0
        scale_inv = torch.ones((), device=x.device)
    _compare_kernel[(triton.cdiv(x.numel(), ELEMENTS_PER_PROGRAM),)](
        x.contiguous(),
        q.contiguous(),
        scale_inv,
        buffer,
        x.numel(),
        numel_slot,
        *slots,
        PAYLOAD=payload,
        ELEMENTS=ELEMENTS_PER_PROGRAM,
        BLOCK=2048,
        num_warps=8,
    )


class OnePassBuffer(stats_buffer._Buffer):
    """The statistics of one tensor of one layer, over the micro-batches of a step."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # A mean squared error follows from its sum. One slot more than TE's, for what nobody asked for.
        self._names = [name for name in self.stats_to_compute if _parse(name)[1] != "mse"]
        self._initial = torch.zeros(len(STATS) + 1, device=self._buffer.device)
        for name in self._names:
            if _parse(name)[1] == "scale_inv_min":
                self._initial[stats_to_num[name]] = math.inf
        self._buffer = self._initial.clone()
        self.fed = False

    @torch.no_grad()
    def feed(self, tensor: torch.Tensor | None, iteration: int, aux_dict: dict[str, Any] | None = None) -> None:
        """Adds one micro-batch's tensor, and of a weight the first one only.

        Args:
            tensor: in high precision; None: only the quantised one is there.
            aux_dict: the tensor quantised, by recipe; '' is the layer's own.
        """
        self.iteration = iteration
        if (self.fed and not self.reduce_within_microbatch) or (tensor is not None and tensor.numel() == 0):
            return
        if not self.fed:
            self._buffer.copy_(self._initial)
        for name in self._compare(tensor, aux_dict or {}):
            value, slot = STATS[name][0](tensor, aux_dict), self._buffer[stats_to_num[name]]
            value = value if torch.is_tensor(value) else slot.new_full((), value)
            merge = {"scale_inv_min": torch.minimum, "scale_inv_max": torch.maximum}.get(_parse(name)[1], torch.add)
            slot.copy_(merge(slot, value.reshape(()).float()))
        self.fed = True

    def _compare(self, tensor: torch.Tensor | None, aux_dict: dict[str, Any]) -> list[str]:
        """Feeds what one pass per recipe finds; returns the names that are left."""
        left, unused = dict.fromkeys(self._names), len(STATS)
        if tensor is None:
            return list(left)
        for recipe in {_parse(name)[0] for name in self._names} & aux_dict.keys() - {"nvfp4"}:
            prefix = f"{recipe}_" if recipe else ""
            found = FOUND if hasattr(aux_dict[recipe], "_scale_inv") else FOUND[:2]
            slots = [stats_to_num[prefix + name] if prefix + name in left else unused for name in found]
            numel_slot = stats_to_num["numel"] if "numel" in left else unused
            compare(tensor, aux_dict[recipe], self._buffer, numel_slot, slots + [unused] * (len(FOUND) - len(found)))
            for name in ("numel", *(prefix + name for name in found)):
                left.pop(name, None)
        return list(left)


def log_stats(buffers: stats_buffer.StatsBuffers) -> dict[tuple, float]:
    """Writes what the buffers were fed, over the ranks that fed them, with one copy to the host."""
    if not buffers._if_run_reduction():
        return {}
    output = {}
    for group, members in buffers.reduction_group_to_buffer.items():
        fed = torch.tensor([[member.fed] for member in members], dtype=torch.float32)
        rows = torch.cat((torch.stack([member._buffer for member in members]), fed.to(members[0]._buffer.device)), 1)
        rank = dist.get_rank(group) if dist.is_initialized() else 0
        all_ranks = gather_along_first_dim(rows.unsqueeze(0), process_group=group)[0].tolist()
        for index, member in enumerate(members):
            if not member.fed:
                continue
            of_ranks = [all_ranks[rank]] if member.skip_reduction else all_ranks
            values = [rows_of_rank[index] for rows_of_rank in of_ranks if rows_of_rank[index][-1]]
            for name in member.stats_to_log:
                value = combine(name, values)
                MetricLogger.log_scalar(f"{member.layer_name}_{member.tensor_name}_{name}", value, member.iteration)
                output[member.layer_name, member.tensor_name, name, member.iteration] = value
            member.fed = False
    buffers.at_least_one_layer_fed = False
    return output


def combine(name: str, rows: list[list[float]]) -> float:
    """One statistic from the buffers of all ranks."""
    recipe, statistic, suffix = _parse(name)
    prefix = f"{recipe}_" if recipe else ""

    def of(part: str) -> list[float]:
        return [row[stats_to_num[part]] for row in rows]

    if statistic == "underflows%":
        return 100 * sum(of(f"{prefix}underflows_num{suffix}")) / sum(of("numel"))
    if statistic == "mse":
        return sum(of(f"{prefix}total_square_error{suffix}")) / sum(of("numel"))
    if statistic in ("scale_inv_min", "scale_inv_max"):
        return (min if statistic == "scale_inv_min" else max)(of(name))
    return float(STATS[name][1](torch.tensor(rows)))


def _parse(name: str) -> tuple[str, str, str]:
    """``mxfp8_mse_columnwise`` -> mxfp8, mse, _columnwise; ``mse`` -> '', mse, ''."""
    base = name.removesuffix("_columnwise")
    for statistic in (*FOUND, "underflows%", "overflows%", "overflows_num", "mse"):
        if base.endswith(statistic):
            return base.removesuffix(statistic).rstrip("_"), statistic, name[len(base) :]
    return "", base, name[len(base) :]


def install() -> None:
    """Makes TE's statistics features use these buffers."""
    stats_buffer._Buffer = OnePassBuffer
    stats_buffer.STATS_BUFFERS.log_stats = functools.partial(log_stats, stats_buffer.STATS_BUFFERS)
