"""Low-precision linear layers without the hardware: quantise, multiply in FP32, round.

Legend: T tokens, D input features, O output features; [R, C] any matrix; E groups (experts).

This module quantises; emulated_linear.py multiplies.

A linear layer is three matrix products, and each sums over another dim:

    y_TO  = x_TD  @ w_OD^T     forward            sums over D
    dx_TD = dy_TO @ w_OD       input gradient     sums over O
    dw_OD = dy_TO^T @ x_TD     weight gradient    sums over T

A tensor core multiplies narrow floats, adds up in FP32 and applies scales: a scale must be constant along the stretch
that is summed before it is applied. So a block of values that share a scale lies along the summed dim, and x, w and
dy, which each enter two products, are quantised twice, both times from high precision:

| operand | row-wise, blocks along the last dim | column-wise, blocks along the first dim |
|---|---|---|
| x  [T, D] | forward | weight gradient |
| w  [O, D] | forward | input gradient |
| dy [T, O] | input gradient | weight gradient |

With one scale per tensor, or square blocks, both directions hold the same values.

**Quantising.** q = cast(x * s), dequantised as q / s. With s = max / amax the largest magnitude (amax) lands on the
largest value of the format; what falls below its smallest subnormal becomes 0 (underflow).

| recipe | block of x, dy | block of w | factor s | stored |
|---|---|---|---|---|
| delayed | tensor | tensor | known from earlier steps (delayed_scaling.py): values can saturate | FP32 1/s |
| current | tensor | tensor | fp8_max / amax | FP32 1/s |
| block | 1 x 128, 128 x 1 | 128 x 128 | fp8_max / amax, truncated to a power of two | FP32 1/s |
| MXFP8 | 1 x 32, 32 x 1 | 1 x 32, 32 x 1 | 2^-e, e = log2(amax / 448) rounded up | E8M0 e |
| NVFP4 | 1 x 16, 16 x 1 | 16 x 16 | two levels, below | E4M3 S, FP32 amax |

x and w are E4M3; dy is E5M2 with one scale per tensor (format HYBRID), E4M3 with blocks; NVFP4 is E2M1 throughout.
An amax of 0 or infinity gives s = 1 (MXFP8: s = 2^127 or 2^-127). NaNs do not count towards an amax.

**NVFP4.** E4M3 block scales alone reach only from 2^-9 to 448, so the tensor's amax fixes where that window lies:

    S_enc = 448 * 6 / amax_tensor              maps the tensor's amax to the largest block scale times the largest value
    S     = E4M3(amax_block * S_enc / 6)       stored per block
    q     = E2M1(x * S_enc / S)                dequantised as q * S * amax_tensor / (448 * 6)

With 3 bits of magnitude, rounding bias matters: gradients round up or down at random, in proportion (stochastic
rounding), and the operands of the weight gradient are first multiplied by a random Hadamard transform, which spreads
outliers over 16 tokens. It is orthogonal, M M^T = I, so (M^T dy)^T (M^T x) = dy^T x: it changes the rounding errors
only.

**Rounding points.** Products are rounded once, to the activations' dtype. Every recipe but delayed scaling first
rounds a FP32 norm or SwiGLU output to that dtype; delayed scaling quantises it as it is. NVFP4's kernels take BF16,
so its inputs are rounded to BF16 here too.

**Groups.** A grouped linear layer is E linear layers: rows [R, C] sorted by group, weights [E, O, I]. "Tensor" in the
tables above is then the rows of one group, or one group's weight: E scales, E amax histories, E NVFP4 amaxes, as TE's
GroupedLinear has one quantiser per group for input, weight and gradient (pytorch/ops/basic/grouped_linear.py,
module/grouped_linear.py). A block never holds rows of two groups: a group's rows are a multiple of the block's
(``Multiples.group_rows``; padding rows are zeros, which change no amax), so all groups are quantised in one pass.

The products use the stored values exactly: FP8 and E2M1 values times a power of two or an E4M3 scale fit BF16's 8
bits, so on a GPU they are BF16 products that accumulate in FP32. On a CPU they are FP32 products.

Sources: TE 2.20.2 common/recipe/recipe_common.cuh, common/cast/*, pytorch/module/linear.py, pytorch/custom_recipes;
OCP Microscaling Formats v1.0; arXiv 2509.25149 (NVFP4).
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from te_reference.delayed_scaling import DelayedScalingState
from te_reference.formats import (
    E2M1_MAX,
    FP32_MAX,
    cast_to_float8,
    e2m1_codes,
    e8m0_codes,
    e8m0_values,
    float8_codes,
    float8_scale,
    round_to_e2m1,
    stochastically_round_to_e2m1,
)
from te_reference.recipe import Format, Recipe


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROLES = ("activation", "weight", "gradient")
RHT_SIZE = 16
# One fixed draw, the same on every rank and step (transformer_engine/pytorch/tensor/nvfp4_tensor.py).
RHT_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


class Groups(NamedTuple):
    """Which rows of [R, C] belong to which of E groups; they are sorted by group."""

    ends_E: torch.Tensor
    """int32: the row after the last one of each group."""
    index_R: torch.Tensor
    """int64: the group of each row."""

    @classmethod
    def of(cls, split_sizes_E: torch.Tensor, num_rows: int) -> "Groups":
        """From the number of rows of each group, ``num_rows`` in all."""
        groups_E = torch.arange(len(split_sizes_E), device=split_sizes_E.device)
        index_R = groups_E.repeat_interleave(split_sizes_E, output_size=num_rows)
        return cls(split_sizes_E.cumsum(0).to(torch.int32), index_R)


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix [R, C] in a compute format, in its own orientation (TE stores some column-wise copies transposed).

    Or a stack of them [E, R, C]: then every shape below starts with E. Or one whose rows form E ``groups``: then what
    is said to be [] is [E].
    """

    data: torch.Tensor
    """[R, C], float8_e4m3fn or float8_e5m2. E2M1 values are held as E4M3, which contains them."""
    scale_inv: torch.Tensor
    """What a value is multiplied by. FP32 [] per tensor; per block [ceil(R/rows), ceil(C/columns)]: FP32 (block), uint8
    E8M0 codes (MXFP8) or float8_e4m3fn (NVFP4)."""
    block: tuple[int, int] | None = None
    """Rows and columns of a block; None: one scale per tensor."""
    amax: torch.Tensor | None = None
    """NVFP4: FP32 [] amax of the tensor (after the Hadamard transform, if any)."""
    fits_bf16: bool = True
    """Values times block scales are exact in BF16."""
    groups: Groups | None = None
    """None: the matrix is one tensor."""

    def payload(self) -> torch.Tensor:
        """The stored codes, uint8 [R, C]; for NVFP4 one code (0..15) per byte, see :func:`formats.pack_e2m1`."""
        return float8_codes(self.data) if self.amax is None else e2m1_codes(self.data)

    def block_scales(self) -> torch.Tensor:
        """FP32 scales per block, without NVFP4's tensor scale."""
        return e8m0_values(self.scale_inv) if self.scale_inv.dtype == torch.uint8 else self.scale_inv.float()

    def tensor_scale(self) -> torch.Tensor | None:
        """FP32 [] factor that :meth:`scaled_values` leaves out; None: nothing."""
        if self.amax is not None:
            return self.amax * (1 / (E2M1_MAX * 448))
        return self.scale_inv if self.block is None else None

    def scaled_values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values times block scales [R, C]: all but the scale of the whole tensor."""
        values = self.data.to(dtype)
        return values if self.block is None else _times_blocks(values, self.block_scales().to(dtype), self.block)

    def dequantize(self) -> torch.Tensor:
        """FP32 [R, C], rounded as TE's dequantisation kernels round."""
        if self.block is None:
            return self.data.float() * per_row(self.scale_inv, self.groups)
        scales = self.block_scales()
        if self.amax is not None:
            scales = scales * per_row(self.amax, self.groups, self.block[0]) * (1 / (E2M1_MAX * 448))
        return _times_blocks(self.data.float(), scales, self.block)


@dataclass(frozen=True)
class Operands:
    """A tensor as its two matrix products use it; None where that product is not computed."""

    rowwise: QuantizedTensor | None
    columnwise: QuantizedTensor | None


class Multiples(NamedTuple):
    """What sizes must be multiples of."""

    rows: int
    """Product of a tensor's leading dims."""
    features: int
    """Its last dim."""
    tokens: int
    """What a batch is padded to: tokens are rows of x and dy, and the summed dim of the weight gradient."""
    group_rows: int
    """What the rows of every group are padded to: TE's ``get_align_size_for_quantization``, and whole blocks of 128."""


RECIPE_MULTIPLES = {
    "DelayedScaling": Multiples(8, 16, 16, 16),
    "Float8CurrentScaling": Multiples(8, 16, 16, 16),
    "Float8BlockScaling": Multiples(8, 16, 16, 128),
    "MXFP8BlockScaling": Multiples(32, 32, 32, 32),
    "NVFP4BlockScaling": Multiples(16, 16, 32, 128),
}


def check_alignment(name: str, shape: tuple[int, ...], recipe: Recipe) -> None:
    """Checks that a tensor [..., C] can be an operand.

    Raises:
        ValueError: the product of the leading dims or the last dim is not a multiple of what the recipe needs.
    """
    multiples = RECIPE_MULTIPLES[type(recipe).__name__]
    leading = torch.Size(shape[:-1]).numel()
    if leading % multiples.rows or shape[-1] % multiples.features:
        raise ValueError(
            f"{name} of shape {list(shape)}: {type(recipe).__name__} needs the product of the leading dims ({leading}) "
            f"to be a multiple of {multiples.rows} and the last dim ({shape[-1]}) of {multiples.features}. Pad the "
            "batch, or choose other layer sizes."
        )


def quantize(
    x_RC: torch.Tensor,
    recipe: Recipe,
    role: str,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    state: DelayedScalingState | None = None,
    generator: torch.Generator | None = None,
    amax_reduction_group: dist.ProcessGroup | None = None,
    groups: Groups | None = None,
) -> Operands:
    """Quantises a matrix for the matrix products of a linear layer.

    Args:
        x_RC: high-precision matrix, or a stack [E, R, C] of them, each quantised by itself; any float dtype.
        recipe: which arithmetic.
        role: activation (x), weight (w) or gradient (dy).
        rowwise: make the copy with blocks along the last dim.
        columnwise: make the copy with blocks along the first dim.
        state: scales and amax history; needed by, and only used by, DelayedScaling.
        generator: random bits of stochastic rounding, on ``x_RC``'s device; None: the device's default generator.
        amax_reduction_group: Float8CurrentScaling: ranks that hold the other parts of the matrix; the scale comes from
            the amax of them all. None: the matrix is whole.
        groups: the rows' groups, each quantised by itself and a multiple of ``group_rows`` long; None: one tensor.

    Raises:
        ValueError: unknown role, wrong alignment, or no state for DelayedScaling.
    """
    if role not in ROLES:
        raise ValueError(f"role={role!r} must be one of {', '.join(ROLES)}.")
    check_alignment(role, tuple(x_RC.shape[-2:]), recipe)
    x_RC = x_RC.contiguous()

    if recipe.float8_per_tensor_scaling():
        dtype = E5M2 if role == "gradient" and recipe.fp8_format is Format.HYBRID else E4M3
        x_RC, amax = x_RC.float(), tensor_amax(x_RC, groups)
        if recipe.float8_current_scaling():
            if amax_reduction_group is not None:
                dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=amax_reduction_group)
            scale = float8_scale(amax, dtype, recipe.use_power_2_scales)
        elif state is None:
            raise ValueError(
                "DelayedScaling needs a DelayedScalingState: it quantises with the scales of earlier steps."
            )
        else:
            scale = state.scale(role)
            state.record(role, amax)
        data = cast_to_float8(x_RC * per_row(scale, groups), dtype)
        quantized = QuantizedTensor(data, scale.reciprocal(), groups=groups)
        return Operands(quantized, quantized)

    if recipe.nvfp4():
        # BF16 values in FP32: the kernels' input dtype, this code's compute dtype.
        x_RC = x_RC.bfloat16().float()
        stochastic = role == "gradient" and not recipe.disable_stochastic_rounding
        transform = role != "weight" and not recipe.disable_rht
        square = role == "weight" and not recipe.disable_2d_quantization

        def quantize_blocks(x: torch.Tensor, block: tuple[int, int]) -> QuantizedTensor:
            columns_transformed = transform and block == (16, 1)
            x = random_hadamard_transform(x) if columns_transformed else x
            return _quantize_e2m1_blocks(x, block, stochastic, generator, groups)

        size = 16
    elif recipe.mxfp8():
        quantize_blocks, size = partial(_quantize_mx_blocks, groups=groups), 32
        square = role == "weight" and recipe.enable_2d_quantization
    else:
        dims = {
            "activation": recipe.x_block_scaling_dim,
            "weight": recipe.w_block_scaling_dim,
            "gradient": recipe.grad_block_scaling_dim,
        }

        def quantize_blocks(x: torch.Tensor, block: tuple[int, int]) -> QuantizedTensor:
            return _quantize_float8_blocks(x, block, not recipe.use_f32_scales, groups)

        size, square = 128, dims[role] == 2

    if square:
        quantized = quantize_blocks(x_RC, (size, size))
        return Operands(quantized, quantized)
    return Operands(
        quantize_blocks(x_RC, (1, size)) if rowwise else None,
        quantize_blocks(x_RC, (size, 1)) if columnwise else None,
    )


def block_amax(x_RC: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """FP32 largest magnitude per block [ceil(R/rows), ceil(C/columns)], or [] for ``block=None``. NaNs do not count."""
    magnitudes = x_RC.float().abs().nan_to_num_(nan=0.0, posinf=torch.inf)
    if block is None:
        return magnitudes.amax(dim=(-2, -1)) if magnitudes.numel() else magnitudes.new_zeros(x_RC.shape[:-2])
    return _split_blocks(magnitudes, block).amax(dim=(-3, -1))


def tensor_amax(x_RC: torch.Tensor, groups: Groups | None) -> torch.Tensor:
    """FP32 largest magnitude [] of a matrix, [E] of a stack or of the rows of every group: 0 where there are none."""
    if groups is None:
        return block_amax(x_RC, None)
    row_amax_R = block_amax(x_RC, (1, x_RC.shape[1])).squeeze(1)
    return row_amax_R.new_zeros(len(groups.ends_E)).scatter_reduce_(0, groups.index_R, row_amax_R, "amax")


def per_row(scales: torch.Tensor, groups: Groups | None, block_rows: int = 1) -> torch.Tensor:
    """Scales of whole tensors ([] or [E]) so that they multiply a matrix or a stack, or a value per row of blocks."""
    if groups is None:
        return scales[..., None, None]
    return scales[groups.index_R[::block_rows]].unsqueeze(1)


def random_hadamard_transform(x_TC: torch.Tensor) -> torch.Tensor:
    """M^T x for every 16 rows of ``x_TC`` (FP32 holding BF16 values), rounded to BF16; M = diag(signs) H / 4."""
    index = torch.arange(RHT_SIZE, device=x_TC.device)
    common_bits = index[:, None] & index
    # Sylvester's H: entry (i, j) is -1 where i and j share an odd number of one bits.
    odd = sum((common_bits >> bit) & 1 for bit in range(4)) % 2
    signs = torch.tensor(RHT_SIGNS, dtype=torch.float32, device=x_TC.device)
    M = signs[:, None] * (1.0 - 2.0 * odd) / 4
    T, C = x_TC.shape
    transformed = torch.matmul(M.T, x_TC.view(T // RHT_SIZE, RHT_SIZE, C)).bfloat16().float().view(T, C)
    return transformed + 0.0  # a tensor core's sum starts at +0: what is zero is +0, also where it was rounded to it


def _split_blocks(x_RC: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[..., R/rows, rows, C/columns, columns]; partial last blocks are filled with zeros."""
    (*stack, R, C), (rows, columns) = x_RC.shape, block
    if R % rows or C % columns:
        x_RC = F.pad(x_RC, (0, -C % columns, 0, -R % rows))
    return x_RC.view(*stack, -(-R // rows), rows, -(-C // columns), columns)


def _times_blocks(x_RC: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Multiplies every block of ``x_RC`` by its entry of ``scales`` (same dtype). A new tensor."""
    product = _split_blocks(x_RC, block) * scales[..., :, None, :, None]
    R, C = x_RC.shape[-2:]
    return product.flatten(-4, -3).flatten(-2)[..., :R, :C].contiguous()


def _quantize_float8_blocks(
    x_RC: torch.Tensor, block: tuple[int, int], power_of_two: bool, groups: Groups | None
) -> QuantizedTensor:
    # Where the quotient overflows FP32, TE's block kernels use the largest value of the input's dtype.
    scale = float8_scale(block_amax(x_RC, block), E4M3, power_of_two, torch.finfo(x_RC.dtype).max)
    data = cast_to_float8(_times_blocks(x_RC.float(), scale, block), E4M3)
    return QuantizedTensor(data, scale.reciprocal(), block, fits_bf16=power_of_two, groups=groups)


def _quantize_mx_blocks(x_RC: torch.Tensor, block: tuple[int, int], groups: Groups | None) -> QuantizedTensor:
    codes = e8m0_codes(block_amax(x_RC, block) * (1 / 448))
    data = cast_to_float8(_times_blocks(x_RC.float(), e8m0_values(254 - codes), block), E4M3)
    return QuantizedTensor(data, codes, block, groups=groups)


def _quantize_e2m1_blocks(
    x_RC: torch.Tensor,
    block: tuple[int, int],
    stochastic: bool,
    generator: torch.Generator | None,
    groups: Groups | None,
) -> QuantizedTensor:
    amax = tensor_amax(x_RC, groups)
    encode_scale = (torch.full_like(amax, 448 * E2M1_MAX) / amax).clamp(max=FP32_MAX)
    # 1 for a tensor of zeros, and for an infinite amax (quotient 0).
    encode_scale = torch.where((amax == 0) | (encode_scale == 0), 1.0, encode_scale)
    encode_scale = per_row(encode_scale, groups, block[0])
    block_scales = cast_to_float8(block_amax(x_RC, block) * (encode_scale * (1 / E2M1_MAX)), E4M3)
    # A block scale that underflows to 0 gives the largest factor: its values are then arbitrary but dequantise to 0.
    factors = (block_scales.float() * encode_scale.reciprocal()).reciprocal().clamp(max=FP32_MAX)
    scaled = _times_blocks(x_RC, factors, block)
    values = stochastically_round_to_e2m1(scaled, generator) if stochastic else round_to_e2m1(scaled)
    return QuantizedTensor(values.to(E4M3), block_scales, block, amax, groups=groups)
