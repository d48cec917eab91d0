"""The grouped operations of ``transformer_engine.pytorch.ops``: GroupedLinear, ScaledSwiGLU, Sequential.

Legend: R rows, sorted by group; E groups (experts); I input and O output features; F FFN width.

Rows belong to groups in order: the first ``split_sizes[0]`` rows to group 0, and so on. One call of torch's grouped
product covers all groups, forward and backward; there is no Python loop over them. In low precision (autocast) both
linear layers take activations and gradients that were rounded to the model's dtype: unlike TE's LayerNormMLP, these
operations hand nothing over in FP32.
Sources: transformer_engine/pytorch/ops/basic/{grouped_linear,swiglu}.py, ops/sequential.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from te_reference.context import current_scope, current_weight_init
from te_reference.delayed_scaling import AmaxTracker, DelayedScalingState
from te_reference.emulated_linear import emulated_grouped_linear, packed
from te_reference.modules import _require
from te_reference.quantized_weight import QuantizedWeight, WeightQuantizer, packed_operands
from te_reference.recipe import Recipe


class _GroupedProduct(torch.autograd.Function):
    """y = x W_g^T for the rows of every group g; gradients dx = dy W_g and dW_g = dy^T x."""

    @staticmethod
    def forward(ctx, x_RI, ends_E, *weights):
        weight_EOI = packed(list(weights))
        ctx.save_for_backward(x_RI, ends_E, weight_EOI)
        return F.grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx, dy_RO):
        x_RI, ends_E, weight_EOI = ctx.saved_tensors
        if x_RI.shape[0] == 0:
            return torch.zeros_like(x_RI), None, *torch.zeros_like(weight_EOI).unbind(0)
        dy_RO = dy_RO.contiguous()
        dx_RI = F.grouped_mm(dy_RO, weight_EOI, offs=ends_E) if ctx.needs_input_grad[0] else None
        dweight_EOI = F.grouped_mm(dy_RO.t(), x_RI, offs=ends_E)
        return dx_RI, None, *dweight_EOI.unbind(0)


class GroupedLinear(nn.Module):
    """One linear layer per group; parameters ``weight0`` .. ``weight{E-1}`` [O, I], views of one buffer.

    ``device="meta"`` defers the initialisation, as in TE. Built under ``quantized_model_init``, it holds its weights in
    the compute format.
    """

    num_extra_inputs = 1

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _require(not bias, "te_reference.ops.GroupedLinear has no bias: pass bias=False.")
        dtype = dtype or torch.get_default_dtype()
        align = 16 // dtype.itemsize  # torch's grouped product takes rows of whole 16-byte words
        _require(
            in_features % align == 0 and out_features % align == 0,
            f"in_features={in_features} and out_features={out_features} must be multiples of {align} in {dtype}.",
        )
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self._weight_init = current_weight_init()
        self.scaling_state: DelayedScalingState | None = None
        """Made on first use."""
        self._fp8_metas: dict[str, dict[str, AmaxTracker]] | None = None
        """Delayed scaling, under TE's names: scales and amax histories, input and weight of each group in turn."""
        self._register(torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype))
        if self.weight0.device.type != "meta":
            self.reset_parameters()

    def _register(self, weight_EOI: torch.Tensor) -> None:
        for index, weight_OI in enumerate(weight_EOI.unbind(0)):
            self.register_parameter(f"weight{index}", nn.Parameter(weight_OI))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(I), TE's default."""
        for parameter in self.parameters():
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
        if self._weight_init is not None:
            recipe = self._weight_init.recipe
            self.reset_recipe_state(recipe=recipe)
            self._register(
                QuantizedWeight.of(packed(list(self.parameters())), WeightQuantizer(recipe, self.scaling_state))
            )

    def reset_recipe_state(self, *, recipe: Recipe) -> None:
        """Makes the state of delayed scaling, if the recipe has any and it is not there yet: it may be loaded then."""
        if recipe.delayed() and self.scaling_state is None:
            self.scaling_state = DelayedScalingState(recipe, self.weight0.device, self.num_groups)
            self._fp8_metas = {
                "forward": {"scaling_fwd": self.scaling_state.forward},
                "backward": {"scaling_bwd": self.scaling_state.backward},
            }

    def forward(self, x_RI: torch.Tensor, split_sizes: torch.Tensor) -> torch.Tensor:
        """[R, I] -> [R, O]; ``split_sizes`` int [E], rows of each group, R in all."""
        weights = [getattr(self, f"weight{index}") for index in range(self.num_groups)]
        held = packed_operands(weights) if isinstance(weights[0], QuantizedWeight) else None
        scope = current_scope()
        if scope.recipe is None:
            _require(held is None, "GroupedLinear: quantised weights outside of autocast.")
            return _GroupedProduct.apply(x_RI, split_sizes.cumsum(0).to(torch.int32), *weights)
        self.reset_recipe_state(recipe=scope.recipe)
        state = self.scaling_state if scope.recipe.delayed() else None
        return emulated_grouped_linear(
            x_RI,
            split_sizes,
            weights,
            scope.recipe,
            state,
            quantized_weight=held,
            after_backward=scope.join(state) if state is not None else None,
        )


_CPU_BLOCK_ROWS = 1024  # of the backward pass: what it works on stays in the cache


class _ScaledSwiGLU(torch.autograd.Function):
    """y = silu(g) u s of rows [g; u] and scales s. In few buffers: new memory costs a CPU more than the arithmetic."""

    @staticmethod
    def forward(ctx, x_R2F, scales_R):
        ctx.save_for_backward(x_R2F, scales_R)
        gate_RF, up_RF = x_R2F.float().chunk(2, dim=-1)
        return F.silu(gate_RF).mul_(up_RF).mul_(scales_R.float().unsqueeze(-1)).to(x_R2F.dtype)

    @staticmethod
    def backward(ctx, dy_RF):
        """With a = dy silu(g): du = a s, ds = a.u, and dg = silu'(g) (dy u) s."""
        x_R2F, scales_R = ctx.saved_tensors
        dx_R2F = torch.empty_like(x_R2F, dtype=torch.float32)
        dscales_R = torch.empty_like(scales_R, dtype=torch.float32)
        block_rows = max(1, min(len(dy_RF), _CPU_BLOCK_ROWS) if dy_RF.device.type == "cpu" else len(dy_RF))
        buffers = dy_RF.new_empty((3, block_rows, dy_RF.shape[1]), dtype=torch.float32)
        tensors = (x_R2F, scales_R.unsqueeze(-1), dy_RF, dx_R2F, dscales_R)
        for x, scales, dy, dx, dscales in zip(*(tensor.split(block_rows) for tensor in tensors)):
            scales, dy = scales.float(), dy.float()
            (strided_gate, up), (dgate, dup) = x.float().chunk(2, dim=-1), dx.chunk(2, dim=-1)
            gate, a, b = buffers[:, : len(dy)].unbind(0)
            gate.copy_(strided_gate)  # torch's silu_backward takes four times as long over strided rows
            torch.ops.aten.silu.out(gate, out=a).mul_(dy)
            torch.linalg.vecdot(a, up, out=dscales)
            torch.mul(a, scales, out=dup)
            torch.mul(dy, up, out=b)
            torch.ops.aten.silu_backward.grad_input(b, gate, grad_input=a)
            torch.mul(a, scales, out=dgate)
        return dx_R2F.to(x_R2F.dtype), dscales_R.to(scales_R.dtype)


class ScaledSwiGLU(nn.Module):
    """silu(gate) * up * scale of each row, in FP32, rounded once; no parameters.

    Args:
        glu_interleave_size: None: rows are [gate; up]. n: blocks of n gate values alternate with blocks of n up values.
    """

    num_extra_inputs = 1

    def __init__(self, glu_interleave_size: int | None = None):
        super().__init__()
        self.glu_interleave_size = glu_interleave_size

    def forward(self, x_R2F: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """[R, 2F] -> [R, F]; ``scales`` [R], rounded to the dtype of the input first, as TE does."""
        if self.glu_interleave_size is not None:
            x_R2F = x_R2F.unflatten(-1, (-1, 2, self.glu_interleave_size)).transpose(-3, -2).flatten(-3)
        return _ScaledSwiGLU.apply(x_R2F, scales.to(x_R2F.dtype))


class Sequential(nn.Sequential):
    """Operations one after the other; each takes its extra inputs, in order, from those of the call."""

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor) -> torch.Tensor:
        for operation in self:
            own, extra_inputs = (
                extra_inputs[: operation.num_extra_inputs],
                extra_inputs[operation.num_extra_inputs :],
            )
            input = operation(input, *own)
        _require(not extra_inputs, f"{len(extra_inputs)} extra inputs are left over.")
        return input
