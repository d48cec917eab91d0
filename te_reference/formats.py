"""Casts to the 8-bit and 4-bit floating-point formats and the scale formats, bit for bit as the GPU rounds.

| format | bits (sign, exponent, mantissa) | largest | smallest normal / subnormal | infinity | NaN codes |
|---|---|---|---|---|---|
| E4M3 | 1, 4, 3 | 448 | 2^-6 / 2^-9 | none | 0x7F, 0xFF |
| E5M2 | 1, 5, 2 | 57344 | 2^-14 / 2^-16 | not produced | 0x7D-0x7F, 0xFD-0xFF |
| E2M1 | 1, 2, 1 | 6 | 1 / 0.5 | none | none |
| E8M0 | 0, 8, 0 | 2^127 | 2^-127 | none | 0xFF |

Casts of values round to nearest, ties to even, and saturate: infinity becomes the largest value. A NaN stays NaN (code
0x7F) in the FP8 formats and becomes +6 in E2M1, which has no NaN (PTX ISA, ``cvt`` with ``.satfinite``).

Sources: OCP Microscaling Formats v1.0 (code tables); TE's recipe_common.cuh, ptx_arch_spec.cuh, ptx.cuh (scales, E8M0
rounding, stochastic rounding).
"""

import torch


FLOAT8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP32_MAX = torch.finfo(torch.float32).max
E8M0_NAN = 255
_FP32_MANTISSA_BITS = 23


def cast_to_float8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts FP32 to ``dtype`` (E4M3 or E5M2), saturating. Overwrites ``x``: pass a temporary."""
    limit = FLOAT8_MAX[dtype]
    # Without the clamp torch casts infinity, and anything that rounds beyond the largest value, to NaN or infinity.
    return x.clamp_(-limit, limit).to(dtype)


def float8_codes(x: torch.Tensor) -> torch.Tensor:
    """The stored bytes (uint8) of a float8 tensor. Every NaN is 0x7F, as the GPU writes it."""
    return torch.where(x.to(torch.float32).isnan(), 0x7F, x.view(torch.uint8))


def _e2m1_steps(magnitudes: torch.Tensor) -> torch.Tensor:
    """Distance of neighbouring E2M1 values: 0.5 below 2, 1 in [2, 4), 2 from 4 on."""
    exponent_bits = magnitudes.clamp(1.0, 4.0).view(torch.int32) & 0x7F800000
    return exponent_bits.view(torch.float32).mul_(0.5)


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Rounds FP32 to the nearest E2M1 value, ties to the even code. Overwrites ``x``."""
    x.nan_to_num_(nan=E2M1_MAX)
    magnitudes = x.abs().clamp_(max=E2M1_MAX)
    steps = _e2m1_steps(magnitudes)
    # Within a step's range an even multiple of the step has an even code, so round-half-even is the code's rule too.
    return magnitudes.div_(steps).round_().mul_(steps).copysign_(x)


def stochastically_round_to_e2m1(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Rounds FP32 up or down to an E2M1 neighbour with 8 random bits per value, unbiased in [-6, 6].

    Adds u/256 of the local step, u uniform in 0..255, to the magnitude and truncates. Overwrites ``x``.

    Args:
        x: FP32 values.
        generator: source of the random bits, on ``x``'s device; None: the device's default one.
    """
    x.nan_to_num_(nan=E2M1_MAX)
    magnitudes = x.abs().clamp_(max=E2M1_MAX)
    words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64, device=x.device)
    words.random_(-(2**63), None, generator=generator)
    jitter = words.view(torch.uint8)[: x.numel()].view(x.shape).to(torch.float32).div_(256)
    # jitter * step is exact (8 bits times a power of two), so this sum rounds once, like a fused multiply-add.
    magnitudes.add_(jitter.mul_(_e2m1_steps(magnitudes)))
    steps = _e2m1_steps(magnitudes)  # the jitter can carry a value into the next range
    return magnitudes.div_(steps).floor_().mul_(steps).clamp_(max=E2M1_MAX).copysign_(x)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """4-bit codes (uint8, 0..15, sign in bit 3) of E2M1 values held in any float dtype."""
    values = values.to(torch.float32)
    bounds = torch.tensor(E2M1_MAGNITUDES[1:], device=values.device)
    return (torch.bucketize(values.abs(), bounds, right=True) + 8 * values.signbit()).to(torch.uint8)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """FP32 values of 4-bit codes."""
    table = torch.tensor(E2M1_MAGNITUDES + tuple(-v for v in E2M1_MAGNITUDES), device=codes.device)
    return table[codes.to(torch.int64)]


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Packs codes [..., C] into bytes [..., C/2], the even index in the low half, as TE stores them."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def e8m0_codes(scales: torch.Tensor) -> torch.Tensor:
    """Exponent codes (uint8) of positive FP32 ``scales``, rounded up to the next power of two.

    Code c stands for 2^(c-127). Zero gives 0, infinity 254, NaN 255; scales up to 2^-127 give 0.
    """
    bits = scales.view(torch.int32)
    exponent, mantissa = bits >> _FP32_MANTISSA_BITS, bits & 0x7FFFFF
    # An FP32 subnormal is mantissa * 2^-149: up to mantissa 0x400000 it is at most 2^-127, code 0.
    round_up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    codes = (exponent + round_up).clamp(max=254)
    return torch.where(scales.isnan(), E8M0_NAN, codes).to(torch.uint8)


def e8m0_values(codes: torch.Tensor) -> torch.Tensor:
    """FP32 powers of two 2^(code-127); NaN for code 255."""
    codes = codes.to(torch.int32)
    # 2^-127 is an FP32 subnormal: exponent field 0, leading mantissa bit set. Code 255 has FP32's quiet NaN.
    bits = torch.where(codes == 0, 0x400000, codes << _FP32_MANTISSA_BITS)
    return torch.where(codes == E8M0_NAN, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def float8_scale(
    amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool, when_overflowing: float = FP32_MAX
) -> torch.Tensor:
    """The factor (FP32, shape of ``amax``) that maps ``amax`` to the largest value of ``dtype``.

    Args:
        amax: FP32 largest magnitudes.
        dtype: E4M3 or E5M2.
        power_of_two: truncate the factor to a power of two.
        when_overflowing: factor where the quotient exceeds FP32, because ``amax`` is tiny.

    Returns:
        max / amax; 1 where amax is 0, infinite or NaN.
    """
    # A tensor divided by a tensor rounds once. `448 / amax` would not: torch computes it as 448 * amax.reciprocal().
    scale = torch.full_like(amax, FLOAT8_MAX[dtype]) / amax
    scale = torch.where(scale.isinf(), when_overflowing, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)
