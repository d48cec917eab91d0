"""Grouped linear layers in low precision against one emulated linear layer per group (tests/test_emulation.py checks
those against independent arithmetic)."""

import pytest
import torch

from te_reference.delayed_scaling import DelayedScalingState
from te_reference.emulated_linear import emulated_grouped_linear, emulated_linear
from te_reference.emulation import RECIPE_MULTIPLES, Groups, quantize
from te_reference.quantized_weight import QuantizedWeight, WeightQuantizer, packed_operands
from te_reference.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)


RECIPES = {
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "current_pow2": Float8CurrentScaling(use_power_2_scales=True),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8_2d": MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),  # the draws would differ
}
E, I, O = 5, 160, 96  # 160 and 96: partial blocks of 128
SCALES = torch.tensor([1.0, 1e-3, 40.0, 0.0, 7.0])  # groups of unlike magnitude, one of zeros
# Rows before padding, in multiples of what a linear layer takes by itself; group 1 is empty.
COUNTS = {"mxfp8": [32, 0, 96, 64, 160], "nvfp4": [16, 0, 144, 48, 128]}


def recipe_and_counts(name: str) -> tuple:
    counts = COUNTS.get(name.removesuffix("_2d"), [8, 0, 136, 40, 128])
    multiple = RECIPE_MULTIPLES[type(RECIPES[name]).__name__].group_rows
    return RECIPES[name], counts, [-(-count // multiple) * multiple for count in counts]


def random_rows(counts: list[int], features: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, features, generator=generator) * scale for n, scale in zip(counts, SCALES)]


def pad(groups: list[torch.Tensor], padded: list[int]) -> torch.Tensor:
    return torch.cat([torch.nn.functional.pad(x, (0, 0, 0, n - len(x))) for x, n in zip(groups, padded)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_forward_and_gradients_are_those_of_one_linear_layer_per_group(name, dtype):
    """Three steps, so that delayed scaling has scales. The groups run unpadded, the grouped layer on padded rows."""
    recipe, counts, padded = recipe_and_counts(name)
    generator = torch.Generator().manual_seed(9)
    weights = [(torch.randn(O, I, generator=generator) * 0.1 * s).to(dtype) for s in (1, 5, 0.01, 1, 1)]
    grouped_state = DelayedScalingState(recipe, num_groups=E) if recipe.delayed() else None
    states = [DelayedScalingState(recipe) if recipe.delayed() else None for _ in range(E)]
    for step in range(3):
        rows = [x.to(dtype) for x in random_rows(counts, I, step)]
        dys = [dy.to(dtype) for dy in random_rows(counts, O, 100 + step)]
        x = pad(rows, padded).requires_grad_()
        params = [w.clone().requires_grad_() for w in weights]
        y = emulated_grouped_linear(x, torch.tensor(padded), params, recipe, grouped_state)
        y.backward(pad(dys, padded))
        starts = [sum(padded[:g]) for g in range(E)]
        for g, (own, dy, state) in enumerate(zip(rows, dys, states)):
            if counts[g] == 0:
                assert params[g].grad.count_nonzero() == 0
                continue
            own, weight = own.clone().requires_grad_(), weights[g].clone().requires_grad_()
            expected = emulated_linear(own, weight, recipe, state)
            expected.backward(dy)
            mine = slice(starts[g], starts[g] + counts[g])
            tolerance = {"rtol": 1e-5 if dtype == torch.float32 else 1e-2, "atol": 1e-6 * float(SCALES[g]) + 1e-9}
            torch.testing.assert_close(y[mine], expected, **tolerance)
            torch.testing.assert_close(x.grad[mine], own.grad, **tolerance)
            tolerance["atol"] *= 1 + 10 * float(SCALES[g])  # sums over rows of x and dy
            torch.testing.assert_close(params[g].grad, weight.grad, **tolerance)
            rest = slice(mine.stop, starts[g] + padded[g])
            assert y[rest].count_nonzero() == 0 and x.grad[rest].count_nonzero() == 0
        if recipe.delayed():
            for state in (grouped_state, *states):
                state.forward.advance(recipe)
                state.backward.advance(recipe)
            for g in (g for g in range(E) if counts[g]):
                assert torch.equal(grouped_state.forward.scale[2 * g : 2 * g + 2], states[g].forward.scale)
                assert torch.equal(grouped_state.backward.scale[g : g + 1], states[g].backward.scale)


@pytest.mark.parametrize("role", ["activation", "gradient"])
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])
def test_groups_are_quantised_bit_for_bit_as_alone(name, role):
    recipe, _, padded = recipe_and_counts(name)
    rows = random_rows(padded, I, 3)
    whole = quantize(torch.cat(rows), recipe, role, groups=Groups.of(torch.tensor(padded), sum(padded)))
    for direction in ("rowwise", "columnwise"):
        both = getattr(whole, direction)
        alone = [getattr(quantize(x, recipe, role), direction) for x in rows if len(x)]
        assert torch.equal(both.payload(), torch.cat([q.payload() for q in alone]))
        assert torch.equal(both.dequantize(), torch.cat([q.dequantize() for q in alone]))
        if both.block is not None:
            assert torch.equal(both.block_scales(), torch.cat([q.block_scales() for q in alone]))


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])
def test_stacks_are_quantised_bit_for_bit_as_alone(name):
    recipe = RECIPES[name]
    stack = torch.randn(E, O, I, generator=torch.Generator().manual_seed(0)) * SCALES[:, None, None]
    held = QuantizedWeight.of(stack, WeightQuantizer(recipe))
    alone = [QuantizedWeight.of(weight, WeightQuantizer(recipe)) for weight in stack]
    assert torch.equal(held.dequantize(), torch.stack([weight.dequantize() for weight in alone]))
    for weight, expected in zip(held.unbind(0), alone):
        for direction in ("rowwise", "columnwise"):
            one, other = getattr(weight.operands, direction), getattr(expected.operands, direction)
            assert torch.equal(one.payload(), other.payload())
            assert torch.equal(one.scale_inv.float(), other.scale_inv.float())
    again = packed_operands(held.unbind(0))
    assert again.rowwise.data.data_ptr() == held.operands.rowwise.data.data_ptr()  # no copy
    assert torch.equal(again.columnwise.dequantize(), held.operands.columnwise.dequantize())


def test_rows_that_blocks_of_two_groups_would_share_are_refused():
    x, weights = torch.ones(64, 32), [torch.ones(32, 32)] * 2
    with pytest.raises(ValueError, match=r"\[40, 24\].*multiple of 32"):
        emulated_grouped_linear(x, torch.tensor([40, 24]), weights, MXFP8BlockScaling())
