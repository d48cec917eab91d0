"""Casts and block quantisers from the formats' definitions, value by value, in rational and NumPy FP32 arithmetic."""

import math
from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise

import numpy as np
import torch


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INF, NAN = math.inf, math.nan


def format_table(exponent_bits: int, mantissa_bits: int, bias: int, codes: int) -> list[Fraction]:
    """Magnitudes of codes 0, 1, ..., from the definition of a binary floating-point format."""
    table = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        assert exponent < 1 << exponent_bits
        leading = 1 if exponent else 0
        significand = Fraction(leading << mantissa_bits | mantissa, 1 << mantissa_bits)
        table.append(significand * Fraction(2) ** (max(exponent, 1) - bias))
    return table


# E4M3's last code and E5M2's last four of each sign are NaN or infinity.
TABLES = {E4M3: format_table(4, 3, 7, 127), E5M2: format_table(5, 2, 15, 124), "e2m1": format_table(2, 1, 1, 8)}
SIGN_BIT = {E4M3: 128, E5M2: 128, "e2m1": 8}


def nearest_code(value: float, fmt) -> int:
    """Code of the format's value nearest to ``value``, ties to the even code, saturating: exact."""
    table, sign = TABLES[fmt], SIGN_BIT[fmt] if math.copysign(1, value) < 0 else 0
    if math.isnan(value):
        return 7 if fmt == "e2m1" else 127
    if abs(value) >= table[-1]:
        return len(table) - 1 | sign
    magnitude = Fraction(abs(value))
    above = bisect_left(table, magnitude)
    below = max(above - 1, 0)
    distance = (magnitude - table[below]) - (table[above] - magnitude)
    nearest = below if distance < 0 else above if distance > 0 else (below if below % 2 == 0 else above)
    return nearest | sign


def probes(fmt) -> list[float]:
    """Every value, every midpoint and its FP32 neighbours, and what saturates; both signs."""
    table = [float(value) for value in TABLES[fmt]]
    midpoints = [(a + b) / 2 for a, b in pairwise(table)]
    neighbours = [float(np.nextafter(np.float32(m), np.float32(towards))) for m in midpoints for towards in (0, 1e9)]
    beyond = [table[-1] * factor for factor in (1.01, 1.0625, 1.2, 10)] + [1e38, INF]
    magnitudes = table + midpoints + neighbours + beyond
    return magnitudes + [-m for m in magnitudes]


def kinds(rows: int, columns: int) -> dict[str, torch.Tensor]:
    """BF16-representable tensors of all the kinds that may break a quantiser."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, columns, generator=generator)
    heavy = normal**3 * torch.exp2(torch.randint(-30, 30, (rows, columns), generator=generator).float())
    found = {"normal": normal, "heavy_tailed": heavy, "zeros": torch.zeros(rows, columns), "subnormal": normal * 1e-39}
    found |= {"tiny": normal * 1e-30, "huge": normal.clamp(-3, 3) * 1e38}
    for kind, value in {"outlier": 3e4, "infinite": -INF, "nan": NAN}.items():
        found[kind] = normal * 1e-3
        found[kind][rows // 2, 3] = value
    found["part_zero"] = normal.clone()
    found["part_zero"][: rows // 2] = 0
    return {kind: x.bfloat16().float() for kind, x in found.items()}


def blocks_of(x: np.ndarray, block: tuple[int, int]):
    for i in range(0, x.shape[0], block[0]):
        for j in range(0, x.shape[1], block[1]):
            yield (i // block[0], j // block[1]), np.s_[i : i + block[0], j : j + block[1]]


def fp32(value) -> np.float32:
    return np.float32(value)


def amax_of(values: np.ndarray) -> np.float32:
    finite_or_infinite = np.abs(values[~np.isnan(values)])
    return fp32(finite_or_infinite.max()) if finite_or_infinite.size else fp32(0)


def fp8_scale_by_hand(amax: np.float32, power_of_two: bool, overflow: float) -> np.float32:
    if amax == 0 or np.isinf(amax):
        return fp32(1)
    with np.errstate(over="ignore"):
        scale = fp32(448) / amax
    scale = fp32(overflow) if np.isinf(scale) else scale
    return fp32(2.0 ** (math.frexp(float(scale))[1] - 1)) if power_of_two else scale


def float8_blocks_by_hand(x: np.ndarray, block: tuple[int, int], power_of_two: bool):
    payload, scale_inv = np.zeros(x.shape, np.uint8), {}
    for index, region in blocks_of(x, block):
        scale = fp8_scale_by_hand(amax_of(x[region]), power_of_two, float(np.finfo(np.float32).max))
        scale_inv[index] = fp32(1) / scale
        with np.errstate(over="ignore"):
            payload[region] = np.vectorize(lambda v: nearest_code(float(v), E4M3))(x[region] * scale)
    return payload, scale_inv


def mx_blocks_by_hand(x: np.ndarray, block: tuple[int, int]):
    payload, codes = np.zeros(x.shape, np.uint8), {}
    for index, region in blocks_of(x, block):
        scaled_amax = amax_of(x[region]) * fp32(Fraction(1, 448))
        exponent = 127 if np.isinf(scaled_amax) else -127
        while exponent < 127 and Fraction(float(scaled_amax)) > Fraction(2) ** exponent:
            exponent += 1
        codes[index] = exponent + 127
        factor = fp32(2.0**-exponent)
        with np.errstate(over="ignore"):
            payload[region] = np.vectorize(lambda v: nearest_code(float(v), E4M3))(x[region] * factor)
    return payload, codes


def fp4_blocks_by_hand(x: np.ndarray, block: tuple[int, int]):
    fp32_max = np.finfo(np.float32).max
    amax = amax_of(x)
    encode = fp32(1)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if amax > 0 and fp32(2688) / amax > 0:
            encode = min(fp32(2688) / amax, fp32_max)
        payload, scales = np.zeros(x.shape, np.uint8), {}
        for index, region in blocks_of(x, block):
            code = nearest_code(float(amax_of(x[region]) * (encode * fp32(Fraction(1, 6)))), E4M3)
            scales[index] = code
            decode = fp32(float(TABLES[E4M3][code])) * (fp32(1) / encode)
            factor = min(fp32(1) / decode, fp32_max)
            payload[region] = np.vectorize(lambda v, f=factor: nearest_code(float(v), "e2m1"))(x[region] * factor)
    return payload, scales
