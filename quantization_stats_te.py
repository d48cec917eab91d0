"""Statistics of quantised tensors on TransformerEngine in one pass over each tensor, without waiting for the device.

nvdlfw-inspect asks TE's buffers for them. Those (2.20.2) compute every statistic twice, with several kernels each, wait
for the device between them, and bring their results to the host one by one: 1.2 s for Llama-3.2-1B on an H200, whose
step takes 0.2 s. :func:`install` puts such buffers in their place, with the same names and values; what these do not
know, they take from TE's functions. The results of a step are written a step later, when the device has long sent them
and has the next step's work; and TE no longer asks nvdlfw-inspect what can have one answer only.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import nvdlfw_inspect.api as inspect_api
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from nvdlfw_inspect.logging import MetricLogger
from nvdlfw_inspect.utils import gather_along_first_dim
from transformer_engine.debug.features.utils import stats_buffer
from transformer_engine.debug.features.utils.stats_computation import STATS, stats_to_num
from transformer_engine.debug.pytorch.debug_quantization import HIGH_PRECISION, STANDARD_QUANTIZE, DebugQuantizer
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


class Pass(NamedTuple):
    """What :func:`compare` is called with for one recipe."""

    recipe: str
    numel_slot: int
    slots: list[int]


class OnePassBuffer(stats_buffer._Buffer):
    """The statistics of one tensor of one layer, over the micro-batches of a step."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # A mean squared error follows from its sum. One slot more than TE's, for what nobody asked for.
        self._names = [name for name in self.stats_to_compute if _parse(name)[1] != "mse"]
        self._recipes = {_parse(name)[0] for name in self._names} - {"nvfp4"}
        self._initial = torch.zeros(len(STATS) + 1, device=self._buffer.device)
        for name in self._names:
            if _parse(name)[1] == "scale_inv_min":
                self._initial[stats_to_num[name]] = math.inf
        self._buffer = self._initial.clone()
        self._plans: dict[tuple, tuple[list[Pass], list[tuple[int, Callable, Callable]]]] = {}
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
        aux_dict = aux_dict or {}
        comparable = [recipe for recipe in self._recipes if recipe in aux_dict and tensor is not None]
        key = tuple((recipe, hasattr(aux_dict[recipe], "_scale_inv")) for recipe in comparable)
        if key not in self._plans:
            self._plans[key] = self._plan(key)
        passes, others = self._plans[key]
        for recipe, numel_slot, slots in passes:
            compare(tensor, aux_dict[recipe], self._buffer, numel_slot, slots)
        for slot, function, merge in others:
            value = function(tensor, aux_dict)
            value = value.reshape(()).float() if torch.is_tensor(value) else self._buffer.new_full((), value)
            self._buffer[slot] = merge(self._buffer[slot], value)
        self.fed = True

    def reset(self) -> None:
        """Forgets what it was fed."""
        self._buffer.copy_(self._initial)
        self.fed = False

    def _plan(self, key: tuple[tuple[str, bool], ...]) -> tuple[list[Pass], list[tuple[int, Callable, Callable]]]:
        """What one pass per recipe finds, and slot, function and merger of each statistic that is left."""
        left, unused, passes = dict.fromkeys(self._names), len(STATS), []
        for recipe, per_tensor in key:
            prefix = f"{recipe}_" if recipe else ""
            found = FOUND if per_tensor else FOUND[:2]
            slots = [stats_to_num[prefix + name] if prefix + name in left else unused for name in found]
            numel_slot = stats_to_num["numel"] if "numel" in left else unused
            passes.append(Pass(recipe, numel_slot, slots + [unused] * (len(FOUND) - len(found))))
            for name in ("numel", *(prefix + name for name in found)):
                left.pop(name, None)
        return passes, [(stats_to_num[name], *_function_and_merger(name)) for name in left]


def _function_and_merger(name: str) -> tuple[Callable, Callable]:
    recipe, statistic, suffix = _parse(name)
    if statistic not in ("scale_inv_min", "scale_inv_max"):
        return STATS[name][0], torch.add
    smallest = statistic == "scale_inv_min"

    def extreme(tensor: torch.Tensor | None, aux_dict: dict[str, Any]) -> torch.Tensor:
        scales = real_scale_inv(aux_dict[recipe], columnwise=bool(suffix)).float()
        return torch.where(scales == 0, math.inf, scales).min() if smallest else scales.max()

    return extreme, torch.minimum if smallest else torch.maximum


def real_scale_inv(quantized: Any, columnwise: bool) -> torch.Tensor:
    """The stored scales of a quantised tensor [..., columns], any shape.

    TE pads those of blocks for its matrix products and leaves whatever was in that memory before: not part of it.
    """
    if hasattr(quantized, "_scale_inv"):
        return quantized._scale_inv
    stored = quantized._columnwise_scale_inv if columnwise else quantized._rowwise_scale_inv
    columns = quantized.shape[-1]
    rows = quantized.numel() // columns
    if not hasattr(quantized, "_is_2D_scaled"):  # MXFP8
        return stored[: -(-rows // 32), :columns] if columnwise else stored[:rows, : -(-columns // 32)]
    # FP8 block scaling: along the last dimension what is not divided into blocks, or is only there.
    last = (rows if columnwise else columns) if quantized._is_2D_scaled else (columns if columnwise else rows)
    return stored[:, : -(-last // 128) if quantized._is_2D_scaled else last]


class Fed(NamedTuple):
    """What a buffer was fed in one step."""

    layer_name: str
    tensor_name: str
    stats: tuple[str, ...]
    iteration: int
    over_ranks: bool


class Reading(NamedTuple):
    """The buffers of one reduction group after a step, on their way to the host."""

    fed: dict[int, Fed]  # by index of the buffer
    rows: torch.Tensor  # (ranks, buffers, slots + 1), pinned; the last says whether that rank's buffer was fed
    rank: int
    arrived: torch.cuda.Event


class Log:
    """Writes what the buffers were fed, over the ranks that fed them, with one copy to the host per step."""

    def __init__(self, buffers: stats_buffer.StatsBuffers):
        self._buffers = buffers
        self._readings: list[Reading] = []

    def step(self) -> None:
        """After every step: writes the last one's statistics and asks for this one's. Collective over all ranks."""
        self.write()
        if not self._buffers._if_run_reduction():
            return
        for group, members in self._buffers.reduction_group_to_buffer.items():
            fed = torch.tensor([[member.fed] for member in members], dtype=torch.float32).pin_memory()
            rows = torch.stack([member._buffer for member in members])
            rows = torch.cat((rows, fed.to(rows.device, non_blocking=True)), 1)
            rows = gather_along_first_dim(rows.unsqueeze(0), process_group=group)[0].to("cpu", non_blocking=True)
            rank = dist.get_rank(group) if dist.is_initialized() else 0
            arrived = torch.cuda.current_stream().record_event()
            self._readings.append(Reading(_take_fed(members), rows, rank, arrived))
        self._buffers.at_least_one_layer_fed = False

    def write(self) -> None:
        """Writes what the last step left, here and now."""
        for reading in self._readings:
            reading.arrived.synchronize()
            ranks = reading.rows.tolist()
            for index, fed in reading.fed.items():
                rows = [rank[index] for rank in (ranks if fed.over_ranks else [ranks[reading.rank]]) if rank[index][-1]]
                for name in fed.stats:
                    value = combine(name, rows)
                    MetricLogger.log_scalar(f"{fed.layer_name}_{fed.tensor_name}_{name}", value, fed.iteration)
        self._readings.clear()


def _take_fed(members: list[OnePassBuffer]) -> dict[int, Fed]:
    taken = {}
    for index, member in enumerate(members):
        if member.fed:
            names = member.layer_name, member.tensor_name, tuple(member.stats_to_log)
            taken[index] = Fed(*names, member.iteration, over_ranks=not member.skip_reduction)
            member.reset()
    return taken


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


def _ask_only_what_varies() -> None:
    """TE asks nvdlfw-inspect up to seven things about every operand and result of every linear layer, in each step with
    statistics. The features that quantization_stats_config.py lets through answer one of them; the others have TE's
    default answers: no tensor is modified, every operand of a product in low precision is quantised."""

    def plans(self: DebugQuantizer) -> tuple[str, str]:
        plan = HIGH_PRECISION if self.parent_quantizer is None else STANDARD_QUANTIZE
        return plan, plan if self.columnwise_gemm_name is not None else HIGH_PRECISION

    def looks_at(self: DebugQuantizer) -> tuple[bool, bool, bool]:
        answer = inspect_api.transformer_engine.inspect_tensor_enabled(
            layer_name=self.layer_name, tensor_name=self.tensor_name, iteration=self.iteration
        )
        return self.process_enabled_api_call(answer), False, False

    DebugQuantizer.get_tensors_plan = plans
    DebugQuantizer.get_enabled_look_at_tensors = looks_at
    DebugQuantizer.get_plans_for_output_tensors = lambda self: (False, HIGH_PRECISION)
    DebugQuantizer.log_messages_about_plans = lambda self: None


def install() -> Log:
    """Makes TE's statistics features use these buffers, and returns what writes them: ``write`` it at the end."""
    stats_buffer._Buffer = OnePassBuffer
    _ask_only_what_varies()
    log = Log(stats_buffer.STATS_BUFFERS)
    stats_buffer.STATS_BUFFERS.log_stats = log.step
    return log
