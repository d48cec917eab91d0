"""optimizer.py and te_reference/optimizers.py: against torch's AdamW and the published formula in float64."""

import copy
import logging
import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import te_reference
from config import AdamWConfig, TrainConfig
from dist_utils import run_on_ranks
from optimizer import AdamW, build_optimizer, clip_and_step, initialize_state
from te_reference.optimizers import FusedAdam


OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make_params(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(7, 5), (13,), (1, 3)]]


def set_grads(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_grads(params, step)
        optimizer.step()


def adamw_in_float64(params: list[torch.Tensor], steps: range) -> list[torch.Tensor]:
    """Loshchilov and Hutter (2019), algorithm 2, element by element in double precision."""
    params = [param.detach().double() for param in params]
    moments = [(torch.zeros_like(param), torch.zeros_like(param)) for param in params]
    (beta1, beta2), lr = OPTIONS["betas"], OPTIONS["lr"]
    for t, step in enumerate(steps, start=1):
        generator = torch.Generator().manual_seed(100 + step)
        for param, (m, v) in zip(params, moments, strict=True):
            grad = torch.randn(param.shape, generator=generator).double()
            m.mul_(beta1).add_((1 - beta1) * grad)
            v.mul_(beta2).add_((1 - beta2) * grad**2)
            update = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + OPTIONS["eps"])
            param -= lr * (update + OPTIONS["weight_decay"] * param)
    return params


def test_fused_adam_is_the_published_formula():
    params = make_params(torch.float32)
    expected = adamw_in_float64(params, range(20))
    run(FusedAdam(params, **OPTIONS), params, range(20))
    for param, value in zip(params, expected, strict=True):
        torch.testing.assert_close(param.double(), value, rtol=2e-6, atol=2e-6)


def test_fused_adam_in_fp32_equals_torch_bit_for_bit():
    ours, theirs = make_params(torch.float32), make_params(torch.float32)
    run(FusedAdam(ours, **OPTIONS, master_weights=True), ours, range(5))
    run(torch.optim.AdamW(theirs, **OPTIONS, fused=True), theirs, range(5))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_follow_fp32_adamw_and_params_are_their_rounding(dtype):
    params = make_params(dtype)
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer, expected = (
        FusedAdam(params, **OPTIONS, master_weights=True),
        torch.optim.AdamW(masters, **OPTIONS, fused=True),
    )
    for step in range(5):
        set_grads(params, step)
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        expected.step()
    for param, master in zip(params, masters, strict=True):
        state = optimizer.state[param]
        assert {name: value.dtype for name, value in state.items()} == dict.fromkeys(state, torch.float32)
        assert torch.equal(state["master_param"], master)
        assert torch.equal(param, master.to(dtype))


def test_small_updates_survive_only_with_masters():
    """100 steps of 1e-3 on a weight of 1: less than BF16's half spacing of 1/256 each, 0.1 in all."""
    final = {}
    for master_weights in (False, True):
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = FusedAdam([weight], lr=1e-3, master_weights=master_weights)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)  # a constant gradient: every update is the learning rate
            optimizer.step()
        final[master_weights] = weight[0].item()
    assert final[False] == 1.0
    assert math.isclose(final[True], 0.9, abs_tol=1 / 256)


def test_fp32_parameter_is_its_own_master():
    params = make_params(torch.float32)
    optimizer = FusedAdam(params, **OPTIONS, master_weights=True)
    run(optimizer, params, range(1))
    assert set(optimizer.state[params[0]]) == {"exp_avg", "exp_avg_sq"}


def test_state_dict_keeps_fp32_and_continues_bit_for_bit():
    params = make_params(torch.bfloat16)
    optimizer = FusedAdam(params, **OPTIONS, master_weights=True)
    run(optimizer, params, range(3))
    saved, saved_params = (
        copy.deepcopy(optimizer.state_dict()),
        [nn.Parameter(param.detach().clone()) for param in params],
    )
    run(optimizer, params, range(3, 6))

    resumed = FusedAdam(saved_params, **OPTIONS, master_weights=True)
    resumed.load_state_dict(saved)
    assert resumed.state[saved_params[0]]["master_param"].dtype == torch.float32
    before = saved["state"][0]["master_param"].clone()
    run(resumed, saved_params, range(3, 6))
    assert torch.equal(saved["state"][0]["master_param"], before)  # what was loaded is not aliased
    for param, other in zip(params, saved_params, strict=True):
        assert torch.equal(param, other)
        for name, value in optimizer.state[param].items():
            assert torch.equal(value, resumed.state[other][name])


def test_parameter_without_gradient_stays():
    params = make_params(torch.bfloat16)
    optimizer = FusedAdam(params, **OPTIONS, master_weights=True)
    set_grads(params, 0)
    before, params[1].grad = params[1].detach().clone(), None
    optimizer.step()
    assert torch.equal(params[1], before)


def test_unsupported_arguments_are_refused():
    with pytest.raises(ValueError, match="master_weight_dtype"):
        FusedAdam(make_params(torch.bfloat16), master_weights=True, master_weight_dtype=torch.float16)
    with pytest.raises(ValueError, match="store_param_remainders"):
        params = make_params(torch.bfloat16)
        FusedAdam(params, master_weights=True).initialize_state(params[0], store_param_remainders=True)
    with pytest.raises(TypeError):
        FusedAdam(make_params(torch.bfloat16), amsgrad=True)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)


def config(**kwargs) -> TrainConfig:
    return TrainConfig(adamw_kwargs=AdamWConfig(lr=0.5, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.3), **kwargs)


def test_build_optimizer_decays_matrices_only():
    model = make_model()
    optimizer = build_optimizer(model, config(), te_reference)
    decayed, rest = optimizer.param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert {id(param) for param in decayed["params"]} == {id(model[0].weight), id(model[2].weight)}
    assert {id(param) for param in rest["params"]} == {id(model[1].weight), id(model[1].bias), id(model[2].bias)}
    assert (decayed["lr"], decayed["betas"], decayed["eps"]) == (0.5, (0.8, 0.9), 1e-6)


@pytest.mark.parametrize(
    "dtype, masters, kind",
    [
        (torch.float32, False, AdamW),
        (torch.bfloat16, False, AdamW),
        (torch.float32, True, AdamW),
        (torch.bfloat16, True, FusedAdam),
    ],
)
def test_build_optimizer_keeps_masters_only_where_needed(dtype, masters, kind, caplog):
    caplog.set_level(logging.INFO)
    optimizer = build_optimizer(make_model(dtype), config(use_fp32_master_weights=masters), te_reference)
    assert type(optimizer) is kind
    assert ("their own masters" in caplog.text) == (masters and dtype == torch.float32)
    if kind is FusedAdam:
        assert optimizer.master_weights


def test_build_optimizer_without_parameters():
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(make_model().requires_grad_(False), config(), te_reference)


@pytest.mark.parametrize("fused_adam", [False, True])
def test_initialize_state_changes_nothing_that_can_be_seen(fused_adam):
    def make(params):
        if fused_adam:
            return FusedAdam(params, **OPTIONS, master_weights=True)
        return torch.optim.AdamW(params, **OPTIONS, fused=True)

    params, twins = make_params(torch.bfloat16), make_params(torch.bfloat16)
    set_grads(params, 7)
    optimizer, untouched = make(params), make(twins)
    initialize_state(optimizer)
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)
        assert param.grad is not None
    run(optimizer, params, range(2))
    run(untouched, twins, range(2))
    initialize_state(optimizer)  # a second time: no state is reset
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)
        assert optimizer.state[param].keys() == untouched.state[twin].keys()
        for name, value in untouched.state[twin].items():
            assert value.dtype == optimizer.state[param][name].dtype
            assert torch.equal(value, optimizer.state[param][name])


def test_initialize_state_refuses_other_optimizers():
    with pytest.raises(TypeError, match="SGD"):
        initialize_state(torch.optim.SGD(make_params(torch.float32), lr=0.1))


def sharded_steps(dtype: torch.dtype, masters: bool) -> list[torch.Tensor]:
    """Three steps on an FSDP2 model whose last matrix has fewer rows than there are ranks; gathered weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1, bias=False)).to(dtype)
    fully_shard(model)
    optimizer = build_optimizer(model, config(use_fp32_master_weights=masters), te_reference)
    for step in range(3):
        model(torch.full((2, 4), step + 1.0, dtype=dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if masters:
        assert all(isinstance(optimizer.state[param]["master_param"], DTensor) for param in model.parameters())
    return [param.full_tensor().detach() for param in model.parameters()]


def all_sharded_steps() -> list[list[torch.Tensor]]:
    return [
        sharded_steps(torch.float32, False),
        sharded_steps(torch.bfloat16, False),
        sharded_steps(torch.bfloat16, True),
    ]


def test_sharded_parameters_as_on_one_rank():
    one, two = run_on_ranks(all_sharded_steps, 1)[0], run_on_ranks(all_sharded_steps, 2)[0]
    for params, others in zip(one, two, strict=True):
        for param, other in zip(params, others, strict=True):
            rounding = 1e-6 if param.dtype == torch.float32 else 2**-7
            torch.testing.assert_close(param, other, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e6])
@pytest.mark.parametrize("masters", [False, True])
def test_clip_and_step_equals_torch_clipping_then_stepping(max_norm, masters):
    """torch.nn.utils.clip_grad_norm_ and a separate step; BF16 with masters takes the path that scales first."""
    dtype = torch.bfloat16 if masters else torch.float32
    ours, theirs = make_model(dtype), make_model(dtype)
    generator = torch.Generator().manual_seed(1)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        other.data.copy_(one.data)
        one.grad = torch.randn(one.shape, generator=generator).to(dtype)
        other.grad = one.grad.clone()
    optimizers = [
        build_optimizer(model, config(use_fp32_master_weights=masters), te_reference) for model in (ours, theirs)
    ]
    norm = clip_and_step(optimizers[0], list(ours.parameters()), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or float("inf"))
    optimizers[1].grad_scale = torch.ones(())
    optimizers[1].step()
    assert norm.item() == pytest.approx(float(expected), rel=1e-6 if dtype == torch.float32 else 1e-2)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_torchs_fused_adamw(dtype):
    """Five steps on a GPU; torch's fused kernel also computes in FP32 and rounds what it stores once."""
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(1000, 33, device="cuda").to(dtype))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizers = [AdamW([ours], lr=1e-2, weight_decay=0.1, fused=True)]
    optimizers += [torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1, fused=True)]
    for _ in range(5):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad / 2
        optimizers[0].grad_scale = torch.full((), 2.0, device="cuda")
        for optimizer in optimizers:
            optimizer.step()
        for actual, expected in zip(
            (ours, *optimizers[0].state[ours].values()), (theirs, *optimizers[1].state[theirs].values()), strict=True
        ):
            # FP32 arithmetic in another order, rounded once: at most to the next BF16 value.
            rtol = 1e-5 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6)
            actual.detach().copy_(expected)
