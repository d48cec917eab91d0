"""te_reference/delayed_scaling.py: scales worked by hand, updates in forward and backward, ranks, recomputation."""

import numpy as np
import pytest
import torch

from dist_utils import run_on_ranks
from exact_formats import INF
from te_reference.delayed_scaling import AmaxReduction, DelayedScalingState
from te_reference.emulated_linear import emulated_linear
from te_reference.recipe import DelayedScaling


def step(state, activation: float, weight: float = 1.0) -> list[float]:
    """One step that sees these amaxes; the scales after it."""
    state.record("activation", torch.tensor(activation))
    state.record("weight", torch.tensor(weight))
    reduction = AmaxReduction()
    reduction.join(state)
    reduction.finish_forward()
    return state.forward.scale.tolist()


def test_delayed_scales_by_hand():
    state = DelayedScalingState(DelayedScaling(amax_history_len=3))
    assert state.forward.scale.tolist() == [1, 1] and state.backward.scale.tolist() == [1]
    assert step(state, 2.0) == [224, 448]
    assert step(state, 1.0) == [224, 448]  # 2.0 is still in the history
    assert step(state, 1.0) == [224, 448]
    assert step(state, 1.0) == [448, 448]  # now it has left
    assert step(state, 0.0) == [448, 448]
    assert state.forward.amax_history[0].tolist() == [0, 0]


def test_delayed_scale_exceptions():
    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", margin=2)
    state = DelayedScalingState(recipe)
    assert step(state, 7.0)[0] == 16  # 448 / 7 / 2^2
    assert step(state, 0.0)[0] == 16  # nothing seen: keep
    assert step(state, INF)[0] == 16
    assert step(state, 1e-38)[0] == float(np.finfo(np.float32).max)
    mean = DelayedScaling(amax_history_len=2, amax_compute_algo=lambda history: history.mean(dim=0))
    assert step(DelayedScalingState(mean), 4.0)[0] == 224


def test_delayed_scaling_saturates_until_the_scale_follows():
    recipe = DelayedScaling()
    state = DelayedScalingState(recipe)
    x, w = torch.full((8, 16), 1000.0), torch.eye(16)
    reduction = AmaxReduction()
    reduction.join(state)
    assert (emulated_linear(x, w, recipe, state) == 448).all()
    reduction.finish_forward()
    assert emulated_linear(x, w, recipe, state)[0, 0].item() == pytest.approx(1000, rel=1e-6)


def test_gradient_scale_is_updated_in_backward():
    recipe = DelayedScaling()
    first, second = DelayedScalingState(recipe), DelayedScalingState(recipe)
    w1, w2 = (torch.eye(16).requires_grad_() for _ in range(2))
    reduction = AmaxReduction()
    hook, none = reduction.join(first), reduction.join(second)
    assert none is None and reduction.join(first) == hook
    y = emulated_linear(torch.ones(8, 16), w1, recipe, first, after_backward=hook)
    y = emulated_linear(y, w2, recipe, second, after_backward=none)
    y.backward(torch.full((8, 16), 0.5))
    assert second.backward.scale.tolist() == [57344 / 0.5] and first.backward.scale.tolist() == [57344 / 0.5]


def test_recomputation_uses_the_first_passes_scale_and_records_nothing():
    recipe = DelayedScaling()
    state = DelayedScalingState(recipe)
    x, w = torch.full((8, 16), 1000.0), torch.eye(16)
    used = state.forward.scale.clone()
    first = emulated_linear(x, w, recipe, state)
    step(state, 1000.0)
    history = state.forward.amax_history.clone()
    with state.replay_forward(used):
        assert torch.equal(emulated_linear(x, w, recipe, state), first)
    assert torch.equal(state.forward.amax_history, history) and state.forward.scale[0] != 1


def test_delayed_state_round_trip():
    state = DelayedScalingState(DelayedScaling(amax_history_len=4))
    step(state, 3.0)
    saved = {name: tensor.clone() for name, tensor in state.state_dict().items()}
    other = DelayedScalingState(DelayedScaling(amax_history_len=4))
    other.load_state_dict(saved)
    assert step(other, 1.0) == step(state, 1.0)
    with pytest.raises(ValueError, match="amax_history_len"):
        DelayedScalingState(DelayedScaling(amax_history_len=5)).load_state_dict(saved)


def reduced_scales(reduce_amax: bool) -> tuple[list[float], list[float]]:
    rank = torch.distributed.get_rank()
    states = [DelayedScalingState(DelayedScaling(reduce_amax=reduce_amax)) for _ in range(2)]
    reduction = AmaxReduction()
    for number, state in enumerate(states):
        reduction.join(state)
        state.record("activation", torch.tensor([2.0, 4.0, 8.0][rank + number]))
        state.record("gradient", torch.tensor(1.0 + rank))
    reduction.finish_forward()
    reduction.finish_backward()
    return [s.forward.scale[0].item() for s in states], [s.backward.scale[0].item() for s in states]


@pytest.mark.parametrize("reduce_amax", [True, False])
def test_amaxes_are_reduced_over_the_ranks(reduce_amax):
    rank0, rank1 = run_on_ranks(reduced_scales, 2, reduce_amax)
    assert rank1 == ([112.0, 56.0], [28672.0, 28672.0])
    assert rank0 == (rank1 if reduce_amax else ([224.0, 112.0], [57344.0, 57344.0]))
