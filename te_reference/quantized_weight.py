"""Weights held in a compute format: what modules built under ``quantized_model_init`` have as parameters.

A :class:`QuantizedWeight` [O, D] stores payload and scales only (emulation.py), one byte per value and direction where
the recipe quantises directions apart; the dtype that it shows is that of the values it stands for, and of its
gradients. A module multiplies with the payload; any other operation gets the dequantised values. Writing to it
quantises: the optimiser keeps an FP32 master copy, updates that, and calls :meth:`QuantizedWeight.quantize_`.

FSDP2 gathers the payload, not the values: a quarter to half of the bytes. Shards are cut along O and must quantise as
the whole does: O / shards is a multiple of the block's rows, and a scale of the whole tensor comes from an amax that is
max-reduced over the shards.

A stack [E, O, I] holds E weights of a grouped linear layer, each quantised by itself. FSDP2 cuts it along O, too, and
gathers every tensor of a parameter as it does the parameter: payloads have its shape, but block scales have not, so
these, a small part of the bytes, are gathered here.

Sources: transformer_engine/pytorch/quantized_tensor.py, tensor/*_tensor.py, module/base.py (``reset_parameters``).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

from te_reference.delayed_scaling import DelayedScalingState
from te_reference.emulated_linear import packed
from te_reference.emulation import Operands, QuantizedTensor, quantize
from te_reference.recipe import Recipe


aten = torch.ops.aten


@dataclass(frozen=True)
class WeightQuantizer:
    """How a weight, or a shard of one, is quantised."""

    recipe: Recipe
    state: DelayedScalingState | None = None
    """DelayedScaling: of the module that holds the weight."""
    amax_reduction_group: dist.ProcessGroup | None = None
    """Float8CurrentScaling: the ranks that hold the other shards; None: the weight is whole."""

    def __call__(self, weight_OD: torch.Tensor) -> Operands:
        return quantize(
            weight_OD, self.recipe, "weight", state=self.state, amax_reduction_group=self.amax_reduction_group
        )


class QuantizedWeight(torch.Tensor):
    """See the module's docstring. Built by :meth:`of`."""

    operands: Operands
    """What the matrix products take."""
    quantizer: WeightQuantizer

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, operands: Operands, quantizer: WeightQuantizer, shape: torch.Size, dtype: torch.dtype):
        data = operands.rowwise.data
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=data.device)
        self.operands, self.quantizer = operands, quantizer
        self._high_precision_init_val = None
        return self

    @classmethod
    @torch.no_grad()
    def of(cls, weight_OD: torch.Tensor, quantizer: WeightQuantizer) -> "QuantizedWeight":
        """Quantises a plain tensor, whose dtype the result shows."""
        return cls(quantizer(weight_OD.detach()), quantizer, weight_OD.shape, weight_OD.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values that it stands for, as a plain tensor; ``dtype``: None: the shown one."""
        return self.operands.rowwise.dequantize().to(dtype or self.dtype).view(self.shape)

    @torch.no_grad()
    def quantize_(self, weight_OD: torch.Tensor) -> "QuantizedWeight":
        """Takes over the values of a plain tensor of any float dtype. In place: aliases see the new values."""
        new = self.quantizer(weight_OD.detach().to(self.device))
        for old_copy, new_copy in zip(_distinct(self.operands), _distinct(new)):
            for old, value in zip(_tensors(old_copy), _tensors(new_copy)):
                old.copy_(value)
        return self

    def unbind(self, dim: int = 0) -> list["QuantizedWeight"]:
        """The weights of a stack, sharing its memory."""
        assert dim == 0 and self.ndim == 3, "only a stack [E, O, I], along its first dim"
        rowwise, columnwise = _unbind(self.operands.rowwise), _unbind(self.operands.columnwise)
        if self.operands.rowwise is self.operands.columnwise:
            columnwise = rowwise
        weights = map(Operands, rowwise, columnwise)
        return [QuantizedWeight(operands, self.quantizer, self.shape[1:], self.dtype) for operands in weights]

    def untyped_storage(self) -> torch.UntypedStorage:
        """The payload's. FSDP2 compares storages to see whether a parameter was replaced; a wrapper has none."""
        return self.operands.rowwise.data.untyped_storage()

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The initial value before it was quantised, on the CPU, if the module was asked to keep it."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Frees the initial value."""
        self._high_precision_init_val = None

    def __repr__(self) -> str:
        recipe = type(self.quantizer.recipe).__name__
        return f"QuantizedWeight({list(self.shape)}, {self.dtype}, {recipe}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict[str, Any] | None = None):
        target, kwargs = args[0], kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return cls(target.operands, target.quantizer, target.shape, target.dtype)
        if func in (aten.view.default, aten.as_strided.default):
            # FSDP's book-keeping: the whole tensor in another shape. It shares the payload.
            shape = torch.empty(target.shape, device="meta").view(args[1]).shape
            return cls(target.operands, target.quantizer, shape, target.dtype)
        if func is aten.copy_.default and isinstance(target, cls):
            return target.quantize_(_plain(args[1]))
        plain_args, plain_kwargs = tree_map(_plain, args), tree_map(_plain, kwargs)
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable and isinstance(target, cls):  # normal_, fill_, ...
            return target.quantize_(plain_args[0])
        return result

    def fsdp_pre_all_gather(self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any):
        """FSDP2's hook: (tensors to gather along the sharded dim, what the ranks share already)."""
        shards = _distinct(self.operands)
        gathered = []
        for index, shard in enumerate(shards):
            gathered.append(shard.data.view(torch.uint8))
            if shard.block is not None and self.ndim == 3:
                shards[index] = replace(shard, scale_inv=_gather_rows(shard.scale_inv, mesh.get_group()))
            elif shard.block is not None:  # one scale for the whole tensor is the same on every rank
                gathered.append(shard.scale_inv.view(torch.uint8))
        return tuple(gathered), shards

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ):
        """FSDP2's hook: the whole weight, a view of what was gathered."""
        whole, outputs = [], list(all_gather_outputs)
        for shard in metadata:
            # FSDP shows what it gathered in the shape of a cut along the first dim.
            data = outputs.pop(0).view(shard.data.dtype).view(*shard.data.shape[:-2], -1, shard.data.shape[-1])
            scale_inv = shard.scale_inv
            if shard.block is not None and self.ndim == 2:
                scale_inv = outputs.pop(0).view(scale_inv.dtype)
            whole.append(replace(shard, data=data, scale_inv=scale_inv))
        operands = Operands(whole[0], whole[-1])
        if out is not None:
            out.operands = operands
            return None
        return QuantizedWeight(operands, self.quantizer, whole[0].data.shape, param_dtype), ()


def quantize_parameter(
    parameter: torch.nn.Parameter, recipe: Recipe, state: DelayedScalingState | None, preserve: bool
) -> torch.nn.Parameter:
    """The parameter (plain, or FSDP2's DTensor), quantised; with ``preserve``, its value is kept on the CPU, too."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        local = parameter.to_local().detach()
        quantized = QuantizedWeight.of(local, WeightQuantizer(recipe, state, _shard_group(parameter)))
        result = torch.nn.Parameter(
            DTensor.from_local(
                quantized, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        )
        holder = result._local_tensor
    else:
        local = parameter.detach()
        holder = result = torch.nn.Parameter(QuantizedWeight.of(local, WeightQuantizer(recipe, state)))
    if preserve:
        holder._high_precision_init_val = local.cpu().clone()
    return result


def _shard_group(parameter: DTensor) -> dist.ProcessGroup | None:
    """The ranks that hold the other shards of a weight, or of the weights of this rank's part of a stack."""
    rows = parameter.ndim - 2
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard) and placement.dim == rows:
            return parameter.device_mesh.get_group(axis)
    return None


def _gather_rows(scale_inv: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Block scales [E, rows, columns] of all shards, one below the other."""
    shards = [torch.empty_like(scale_inv) for _ in range(dist.get_world_size(group))]
    dist.all_gather([shard.view(torch.uint8) for shard in shards], scale_inv.view(torch.uint8), group=group)
    return torch.cat([shard.view(torch.uint8) for shard in shards], dim=1).view(scale_inv.dtype)


def _unbind(stack: QuantizedTensor) -> list[QuantizedTensor]:
    amaxes = [None] * len(stack.data) if stack.amax is None else stack.amax.unbind(0)
    parts = zip(stack.data.unbind(0), stack.scale_inv.unbind(0), amaxes)
    return [replace(stack, data=data, scale_inv=scale_inv, amax=amax) for data, scale_inv, amax in parts]


def packed_operands(weights: list[QuantizedWeight]) -> Operands:
    """Operands of the stack of ``weights``; without a copy if :meth:`QuantizedWeight.unbind` made them of one."""

    def pack(quantized: list[QuantizedTensor]) -> QuantizedTensor:
        amax = None if quantized[0].amax is None else packed([q.amax for q in quantized])
        data, scale_inv = packed([q.data for q in quantized]), packed([q.scale_inv for q in quantized])
        return replace(quantized[0], data=data, scale_inv=scale_inv, amax=amax)

    rowwise = pack([weight.operands.rowwise for weight in weights])
    same = weights[0].operands.rowwise is weights[0].operands.columnwise
    return Operands(rowwise, rowwise if same else pack([weight.operands.columnwise for weight in weights]))


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantizedWeight) else value


def _distinct(operands: Operands) -> list[QuantizedTensor]:
    """The row-wise and the column-wise copy, or the one that serves as both."""
    same = operands.rowwise is operands.columnwise
    return [operands.rowwise] if same else [operands.rowwise, operands.columnwise]


def _tensors(quantized: QuantizedTensor) -> list[torch.Tensor]:
    """Payload, scales, NVFP4's amax."""
    return [t for t in (quantized.data, quantized.scale_inv, quantized.amax) if t is not None]
