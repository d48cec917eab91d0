"""te_reference/formats.py: every code, midpoint and special value against the formats' definitions."""

import math

import numpy as np
import pytest
import torch

from exact_formats import E4M3, E5M2, INF, NAN, TABLES, nearest_code, probes
from te_reference.formats import (
    cast_to_float8,
    e2m1_codes,
    e2m1_values,
    e8m0_codes,
    e8m0_values,
    float8_codes,
    float8_scale,
    pack_e2m1,
    round_to_e2m1,
    stochastically_round_to_e2m1,
)


@pytest.mark.parametrize("dtype, codes", [(E4M3, 127), (E5M2, 124)])
def test_float8_values(dtype, codes):
    values = torch.arange(256).to(torch.uint8).view(dtype).double()
    for code in range(codes):
        assert values[code].item() == float(TABLES[dtype][code])
        assert values[code | 128].item() == -float(TABLES[dtype][code])
    nans = range(127, 128) if dtype == E4M3 else range(125, 128)
    assert all(values[code].isnan() and values[code | 128].isnan() for code in nans)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_float8_cast(dtype):
    x = torch.tensor(probes(dtype))
    codes = float8_codes(cast_to_float8(x.clone(), dtype))
    assert codes.tolist() == [nearest_code(v, dtype) for v in x.tolist()]
    assert float8_codes(cast_to_float8(torch.tensor([NAN, -NAN]), dtype)).tolist() == [127, 127]


def test_e2m1_cast_and_codes():
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert e2m1_values(torch.arange(16).to(torch.uint8)).tolist() == values + [-v for v in values]
    assert [float(v) for v in TABLES["e2m1"]] == values
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(e2m1_codes(e2m1_values(codes)), codes)  # -0 keeps its sign
    x = torch.tensor(probes("e2m1"))
    assert e2m1_codes(round_to_e2m1(x.clone())).tolist() == [nearest_code(v, "e2m1") for v in x.tolist()]
    assert round_to_e2m1(torch.tensor([NAN, -NAN, INF, -INF])).tolist() == [6, 6, 6, -6]
    assert pack_e2m1(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]


@pytest.mark.parametrize("x", [0.1, 0.25, 0.6, 1.2, 1.9, 1.99, 2.5, 3.9, 4.5, 5.9, -0.3, -3.3])
def test_stochastic_rounding_is_unbiased(x):
    draws = stochastically_round_to_e2m1(torch.full((20000,), x), torch.Generator().manual_seed(1))
    grid = sorted({sign * float(v) for v in TABLES["e2m1"] for sign in (1, -1)})
    above = next(v for v in grid if v > x)
    below = max(v for v in grid if v < x)
    assert set(draws.tolist()) == {below, above}
    probability = (x - below) / (above - below)
    # Five standard errors, and the 1/256 granularity of the random bits.
    tolerance = 5 * math.sqrt(probability * (1 - probability) / 20000) + 1 / 256
    assert abs((draws == above).double().mean().item() - probability) < tolerance


def test_stochastic_rounding_keeps_exact_values_and_saturates():
    generator = torch.Generator().manual_seed(0)
    exact = e2m1_values(torch.arange(16).to(torch.uint8)).repeat(100)
    assert torch.equal(stochastically_round_to_e2m1(exact.clone(), generator), exact)
    assert stochastically_round_to_e2m1(torch.tensor([7.0, -INF, NAN]), generator).tolist() == [6, -6, 6]
    a, b = (stochastically_round_to_e2m1(torch.full((99,), 2.5), torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(a, b)


def test_e8m0_rounds_up():
    cases = {0.0: 0, 1.0: 127, 1.0000001: 128, 0.75: 127, 2.0**127: 254, 3e38: 254, INF: 254, NAN: 255}
    cases |= {2.0**-127: 0, 2.0**-126: 1, 1.5 * 2.0**-127: 1, 2.0**-149: 0, 1.5 * 2.0**-126: 2}
    assert e8m0_codes(torch.tensor(list(cases))).tolist() == list(cases.values())
    values = e8m0_values(torch.arange(256).to(torch.uint8))
    assert values[:255].double().tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert values[255].isnan()


def test_float8_scale():
    amax = torch.tensor([2.0, 0.0, INF, NAN, 1e-38, 3e38])
    expected = [224.0, 1.0, 1.0, 1.0, float(np.finfo(np.float32).max), float(np.float32(448) / np.float32(3e38))]
    assert float8_scale(amax, E4M3, power_of_two=False).tolist() == expected
    assert float8_scale(torch.tensor([3.0, 1e-38]), E4M3, power_of_two=True).tolist() == [128.0, 2.0**127]
    assert float8_scale(torch.tensor([2.0]), E5M2, power_of_two=False).tolist() == [28672.0]


def test_float8_scale_is_rounded_once():
    amax = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 10
    expected = np.float32(448) / amax.numpy()
    assert np.array_equal(float8_scale(amax, E4M3, power_of_two=False).numpy(), expected)
    assert not np.array_equal((448 / amax).numpy(), expected)  # why it is not written so: this rounds twice
