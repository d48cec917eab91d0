"""Linear and grouped linear layers in low precision: the three products of emulation.py's quantised operands.

Legend: T tokens, D input features, O output features; grouped: R rows sorted by group, E groups, I input features.

A grouped layer is one grouped product for all groups, forward, input gradient and weight gradient; scales of whole
tensors, which differ from group to group, multiply the product's rows (the weight gradient's matrices) afterwards.
Sources: transformer_engine/pytorch/module/linear.py, ops/basic/grouped_linear.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from te_reference.delayed_scaling import DelayedScalingState
from te_reference.emulation import (
    RECIPE_MULTIPLES,
    Groups,
    Operands,
    QuantizedTensor,
    check_alignment,
    per_row,
    quantize,
)
from te_reference.recipe import Recipe


def quantized_matmul(a: QuantizedTensor, b: QuantizedTensor, transpose_a: bool, transpose_b: bool) -> torch.Tensor:
    """FP32 product of two quantised matrices, either transposed first; with groups in ``a``, of every group's."""
    in_bf16 = a.data.is_cuda and a.fits_bf16 and b.fits_bf16 and a.groups is None
    a_values, b_values = (q.scaled_values(torch.bfloat16 if in_bf16 else torch.float32) for q in (a, b))
    a_values = a_values.T if transpose_a else a_values
    b_values = b_values.mT if transpose_b else b_values
    if a.groups is not None:
        product = F.grouped_mm(a_values, b_values, offs=a.groups.ends_E)
    elif in_bf16:
        product = torch.mm(a_values, b_values, out_dtype=torch.float32)
    else:
        product = a_values @ b_values
    for scale in (a.tensor_scale(), b.tensor_scale()):
        if scale is not None:
            product *= per_row(scale, a.groups if product.ndim == 2 else None)
    return product


def packed(tensors: list[torch.Tensor]) -> torch.Tensor:
    """[E, *shape] of E tensors of one shape: without a copy if they lie one after the other in one storage.

    No gradient flows through it.
    """
    first = tensors[0].detach()
    count, stride = len(tensors), first.nbytes
    start = first.data_ptr()
    adjacent = all(t.data_ptr() == start + i * stride and t.is_contiguous() for i, t in enumerate(tensors))
    storage = first.untyped_storage()  # neighbours by chance, in storages of their own, are copied
    if not adjacent or storage.data_ptr() + storage.nbytes() < start + count * stride:
        return torch.stack([tensor.detach() for tensor in tensors])
    return first.as_strided((count, *first.shape), (first.numel(), *first.stride()))


Observer = Callable[[str, torch.Tensor, Operands], None]


@dataclass(frozen=True)
class _Call:
    """What one call of a linear layer is asked for, besides its differentiable tensors."""

    recipe: Recipe
    state: DelayedScalingState | None
    activation_dtype: torch.dtype
    quantized_weight: Operands | None
    generator: torch.Generator | None
    observer: Observer | None
    after_backward: Callable[[], None] | None
    grad_enabled: bool
    amax_reduction_group: dist.ProcessGroup | None = None
    groups: Groups | None = None

    def quantize(self, x_RC: torch.Tensor, role: str, rowwise: bool, columnwise: bool) -> Operands:
        if not self.recipe.delayed():
            x_RC = x_RC.to(self.activation_dtype)
        operands = quantize(
            x_RC,
            self.recipe,
            role,
            rowwise=rowwise,
            columnwise=columnwise,
            state=self.state,
            generator=self.generator,
            amax_reduction_group=None if role == "weight" else self.amax_reduction_group,
            groups=None if role == "weight" else self.groups,
        )
        if self.observer is not None:
            self.observer(role, x_RC, operands)
        return operands


class _EmulatedLinear(torch.autograd.Function):
    """``weights``: one matrix, or those of all groups."""

    @staticmethod
    def forward(ctx, x_TD: torch.Tensor, call: _Call, *weights: torch.Tensor) -> torch.Tensor:
        needs_dx, needs_dw = (ctx.needs_input_grad[index] and call.grad_enabled for index in (0, 2))
        x = call.quantize(x_TD, "activation", rowwise=True, columnwise=needs_dw)
        w = call.quantized_weight
        if w is None:
            weight = weights[0] if call.groups is None else packed(list(weights))
            w = call.quantize(weight, "weight", rowwise=True, columnwise=needs_dx)
        ctx.call, ctx.dtypes, ctx.saved = call, (x_TD.dtype, weights[0].dtype), []
        tensors: list[torch.Tensor | None] = []
        for quantized in (x.columnwise if needs_dw else None, w.columnwise if needs_dx else None):
            ctx.saved.append(quantized and (quantized.block, quantized.fits_bf16))
            tensors += [quantized.data, quantized.scale_inv, quantized.amax] if quantized else [None, None, None]
        ctx.save_for_backward(*tensors)
        return quantized_matmul(x.rowwise, w.rowwise, False, True).to(call.activation_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy_TO: torch.Tensor):
        needs_dx, needs_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        tensors = ctx.saved_tensors
        x, w = (
            saved and QuantizedTensor(data, scale_inv, saved[0], amax, saved[1])
            for saved, (data, scale_inv, amax) in zip(ctx.saved, (tensors[:3], tensors[3:]))
        )
        dy = ctx.call.quantize(dy_TO, "gradient", rowwise=needs_dx, columnwise=needs_dw)
        dx_TD, dweights = None, [None] * len(ctx.needs_input_grad[2:])
        if needs_dx:
            dx_TD = quantized_matmul(dy.rowwise, w, False, False).to(ctx.call.activation_dtype).to(ctx.dtypes[0])
        if needs_dw:
            dweight = quantized_matmul(dy.columnwise, x, True, False).to(ctx.call.activation_dtype).to(ctx.dtypes[1])
            dweights = [dweight] if ctx.call.groups is None else dweight.unbind(0)
        if ctx.call.after_backward is not None:
            ctx.call.after_backward()
        return dx_TD, None, *dweights


def emulated_linear(
    x: torch.Tensor,
    weight_OD: torch.Tensor,
    recipe: Recipe,
    state: DelayedScalingState | None = None,
    *,
    activation_dtype: torch.dtype | None = None,
    quantized_weight: Operands | None = None,
    generator: torch.Generator | None = None,
    observer: Observer | None = None,
    after_backward: Callable[[], None] | None = None,
    amax_reduction_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """y = x @ weight.T in low precision, differentiable in both.

    Args:
        x: [..., D]. A norm or SwiGLU output may come in FP32 although the model runs in BF16: see ``activation_dtype``.
        weight_OD: [O, D] weight; receives the gradient also when ``quantized_weight`` is given.
        recipe: which arithmetic.
        state: the layer's scales and amax histories; DelayedScaling only.
        activation_dtype: dtype of y and of the gradients before they are cast to their tensors' dtypes; None: that of
            ``x``. All recipes but DelayedScaling round ``x`` to it before they quantise.
        quantized_weight: used in place of quantising ``weight_OD`` (parameters held in the compute format, or a weight
            quantised once for several micro-batches).
        generator: random bits of NVFP4's stochastic rounding, on ``x``'s device; None: the device's default generator.
        observer: called with (role, high-precision matrix, its operands) after each quantisation, for statistics.
        after_backward: called after this layer's backward pass (:meth:`AmaxReduction.join`).
        amax_reduction_group: Float8CurrentScaling: ranks that hold further rows of ``x``; x and the gradient of y have
            one scale over them all. A collective in both passes. None: all rows are here.

    Returns:
        [..., O] in ``activation_dtype``.

    Raises:
        ValueError: sizes that the recipe cannot hold.
    """
    x_TD = x.reshape(torch.Size(x.shape[:-1]).numel(), x.shape[-1])
    # Checked here, so that a gradient that cannot be quantised fails before the forward pass.
    check_alignment("gradient", (x_TD.shape[0], weight_OD.shape[0]), recipe)
    dtype = activation_dtype or x.dtype
    call = _Call(
        recipe=recipe,
        state=state,
        activation_dtype=dtype,
        quantized_weight=quantized_weight,
        generator=generator,
        observer=observer,
        after_backward=after_backward,
        grad_enabled=torch.is_grad_enabled(),
        amax_reduction_group=amax_reduction_group,
    )
    return _EmulatedLinear.apply(x_TD, call, weight_OD).view(*x.shape[:-1], weight_OD.shape[0])


def emulated_grouped_linear(
    x_RI: torch.Tensor,
    split_sizes: torch.Tensor,
    weights: list[torch.Tensor],
    recipe: Recipe,
    state: DelayedScalingState | None = None,
    *,
    quantized_weight: Operands | None = None,
    generator: torch.Generator | None = None,
    after_backward: Callable[[], None] | None = None,
) -> torch.Tensor:
    """y = x @ weight_g.T for the rows of every group g, in low precision, differentiable in all.

    Args:
        x_RI: rows sorted by group, in the dtype of the result.
        split_sizes: int [E], rows of each group; may be 0.
        weights: E weights [O, I].
        recipe, generator, after_backward: as in :func:`emulated_linear`.
        state: with E groups; DelayedScaling only.
        quantized_weight: of the stack [E, O, I], used in place of quantising ``weights``.

    Returns:
        [R, O].

    Raises:
        ValueError: sizes that the recipe cannot hold; rows of a group that are no multiple of ``group_rows``.
    """
    multiple = RECIPE_MULTIPLES[type(recipe).__name__].group_rows
    if (split_sizes % multiple).any():
        raise ValueError(
            f"split_sizes={split_sizes.tolist()}: {type(recipe).__name__} needs every group's rows to be a multiple of "
            f"{multiple}: pad them (moe_permute_and_pad_with_probs)."
        )
    check_alignment("gradient", (x_RI.shape[0], weights[0].shape[0]), recipe)
    call = _Call(
        recipe=recipe,
        state=state,
        activation_dtype=x_RI.dtype,
        quantized_weight=quantized_weight,
        generator=generator,
        observer=None,
        after_backward=after_backward,
        grad_enabled=torch.is_grad_enabled(),
        groups=Groups.of(split_sizes, x_RI.shape[0]),
    )
    return _EmulatedLinear.apply(x_RI, call, *weights)
