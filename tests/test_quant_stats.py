"""te_reference/quant_stats.py: statistics worked by hand."""

import pytest
import torch

from te_reference.delayed_scaling import DelayedScalingState
from te_reference.emulated_linear import emulated_linear
from te_reference.emulation import quantize
from te_reference.quant_stats import STAT_PREFIXES, measure
from te_reference.recipe import RECIPES, DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling


def test_statistics_by_hand():
    recipe = DelayedScaling()
    state = DelayedScalingState(recipe)
    x = torch.zeros(8, 16)
    # Scale 1: 1000 saturates to 448, 2^-11 underflows (below half the smallest subnormal 2^-9), 1 is exact.
    x[0, :3] = torch.tensor([-1000.0, 2.0**-11, 1.0])
    stats = measure(x, quantize(x, recipe, "activation", state=state), recipe)
    expected = {"underflows%": 100 / 128, "overflows%": 100 / 128, "scale_inv_min": 1.0, "scale_inv_max": 1.0}
    expected |= {"mse": (552**2 + 2.0**-22) / 128, "cur_amax": 1000.0}
    assert stats.values() == pytest.approx(expected)
    other = measure(x * 0, quantize(x * 0, recipe, "activation", state=state), recipe)
    merged = stats.merge(other).values()
    assert merged["underflows%"] == 50 / 128 and merged["cur_amax"] == 1000 and merged["mse"] == expected["mse"] / 2


def test_statistics_of_blocks():
    x = torch.ones(32, 64)
    x[:, 32:] = 2.0**-20
    recipe = MXFP8BlockScaling()
    operands = quantize(x, recipe, "activation")
    values = measure(x, operands, recipe).values()
    # E8M0 codes as TE logs them: 1 / 448 rounds up to 2^-8, and 20 less.
    assert (values["scale_inv_min"], values["scale_inv_max"]) == (99, 119)
    assert values["mse"] == 0 and "overflows%" not in values
    assert measure(x, operands, recipe, columnwise=True).values()["underflows%"] == 0
    with pytest.raises(ValueError, match="Hadamard"):
        measure(x, quantize(x, NVFP4BlockScaling(), "activation"), NVFP4BlockScaling(), columnwise=True)
    with pytest.raises(ValueError, match="not made"):
        measure(x, quantize(x, recipe, "activation", columnwise=False), recipe, columnwise=True)
    assert set(STAT_PREFIXES) == set(RECIPES)


def test_observer_sees_every_operand():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    w, dy = x[:32].clone().requires_grad_(), torch.ones(64, 32)
    seen = {}
    recipe = NVFP4BlockScaling()
    y = emulated_linear(x, w, recipe, observer=lambda role, matrix, operands: seen.update({role: (matrix, operands)}))
    y.backward(dy)
    assert set(seen) == {"activation", "weight", "gradient"}
    assert torch.equal(seen["gradient"][0], dy)
    values = measure(*seen["activation"], recipe).values()
    assert values["mse"] > 0 and 0 < values["underflows%"] < 20
