"""Mixtral's experts in low precision: layouts, resuming, padding, idle experts, quantised weights; over gloo.

What the recipes' rules make equal between ep 1 and ep 2 on the same global batch, up to the order of FP32 sums (which
now and then turns a rounding): delayed scaling everything, as its scales are known before the tensor and reduced over
all ranks; block-wise recipes the forward pass and the input gradients, as their row-wise blocks lie within a token. The
blocks of their weight gradients run over 32 or 128 tokens of an expert, and which these are depends on the rank that
they came from. Current scaling's and NVFP4's scales of a whole tensor come from the tokens that a rank's expert sees at
once: half of them at ep 1, all at ep 2.
"""

import pytest
import torch
import torch.distributed as dist

from config import ParallelismConfig
from dist_utils import run_on_ranks
from distributed import local_tensor
from low_precision import SHAPE, TOKENS, Run, make_config
from quantized_parameters import delayed_scaling_tensors, dequantized, is_quantized, unchanged_scales
from stacked_weights import stacked_weights_class
from te_reference.quantized_weight import QuantizedWeight, WeightQuantizer
from te_reference.recipe import MXFP8BlockScaling


RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
QINIT_RECIPES = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling")


def make_run(recipe: str | None, dp: int = 1, ep: int = 1, fields: dict | None = None, **options) -> Run:
    config = make_config(recipe, parallelism=ParallelismConfig(dp, ep), **options)
    config.fp4_config.fp4_recipe_kwargs = {"disable_stochastic_rounding": True}  # the draws differ between layouts
    return Run(config, "ep", SHAPE | (fields or {}))


def _losses(layouts: list[tuple[str, int, int, bool]], steps: int) -> list[list[float]]:
    return [make_run(recipe, dp, ep, qinit=qinit).train(1, steps) for recipe, dp, ep, qinit in layouts]


def test_layouts_agree_as_far_as_the_recipes_say():
    layouts = [(recipe, dp, ep, False) for recipe in RECIPES for dp, ep in ((2, 1), (1, 2))]
    losses = run_on_ranks(_losses, 2, layouts, 4)[0]
    for recipe, experts_whole, experts_spread in zip(RECIPES, losses[::2], losses[1::2]):
        per_tensor = {"Float8CurrentScaling": 0.02, "NVFP4BlockScaling": 0.06}
        assert experts_spread[0] == pytest.approx(experts_whole[0], rel=per_tensor.get(recipe, 1e-6)), recipe
        assert experts_spread == pytest.approx(experts_whole, rel=per_tensor.get(recipe, 1e-3)), recipe
        assert experts_spread[-1] < experts_spread[0], recipe


def test_quantised_init_trains_alike_in_every_layout():
    layouts = [(recipe, dp, ep, True) for recipe in QINIT_RECIPES for dp, ep in ((2, 1), (1, 2))]
    losses = run_on_ranks(_losses, 2, layouts, 4)[0]
    for recipe, experts_cut, experts_spread in zip(QINIT_RECIPES, losses[::2], losses[1::2]):
        tolerance = 0.04 if recipe == "Float8CurrentScaling" else 1e-3
        assert experts_spread == pytest.approx(experts_cut, rel=tolerance), recipe
    four = run_on_ranks(_losses, 4, [("DelayedScaling", 2, 2, True)], 2)[0][0]
    assert four[0] > four[1]


def _qinit_is_training_with_masters(dp: int, ep: int) -> None:
    """As in tests/test_quantized_parameters.py, with experts whole, cut over dp or spread over ep."""
    for recipe in ("Float8CurrentScaling", "MXFP8BlockScaling"):
        masters = make_run(recipe, dp, ep, qinit=True, preserve=True)
        expected = make_run(recipe, dp, ep).train(1, 3)
        assert masters.train(1, 3) == expected, recipe
        experts = masters.model.model.layers[0].mlp.experts
        assert is_quantized(experts.fc1_weight) and is_quantized(experts.fc2_weight)
        assert sum(map(is_quantized, masters.parameters)) == 2 * 4


@pytest.mark.parametrize("dp, ep", [(1, 1), (2, 1), (1, 2)])
def test_with_masters_from_the_initial_values_it_is_training_with_masters(dp, ep):
    run_on_ranks(_qinit_is_training_with_masters, dp * ep, dp, ep)


def _resume(recipe: str, qinit: bool, layouts: list[tuple[int, int]], folder: str) -> tuple[list, list]:
    """Steps 3 to 5 uninterrupted in the first layout, and resumed after step 2 in the last one."""
    (dp, ep), *_ = layouts
    run = make_run(recipe, dp, ep, qinit=qinit, folder=folder)
    run.train(1, 2)
    run.checkpointer.save(2, {})
    expected = run.train(3, 5)
    resumed = make_run(recipe, *layouts[-1], qinit=qinit, folder=folder)
    assert resumed.checkpointer.load().step == 2
    return expected, resumed.train(3, 5)


@pytest.mark.parametrize("qinit", [False, True])
@pytest.mark.parametrize("recipe", ["DelayedScaling", "MXFP8BlockScaling"])
def test_resumes_bit_for_bit_at_ep_2(recipe, qinit, tmp_path):
    for expected, resumed in run_on_ranks(_resume, 2, recipe, qinit, [(1, 2)], str(tmp_path)):
        assert resumed == expected


def test_scales_move_with_their_experts(tmp_path):
    """Delayed scaling saved at ep 2 and resumed at ep 1: every expert finds its own scales."""
    for expected, resumed in run_on_ranks(_resume, 2, "DelayedScaling", True, [(1, 2), (2, 1)], str(tmp_path)):
        assert resumed == pytest.approx(expected, rel=5e-4)


def _scales(dp: int, ep: int) -> dict[str, torch.Tensor]:
    run = make_run("DelayedScaling", dp, ep)
    run.train(1, 2)
    tensors = delayed_scaling_tensors(run.model)
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}
    return {name: tensor.clone() for name, tensor in whole.items() if name.endswith("scale")}


def test_every_expert_has_scales_of_its_own_in_every_layout():
    scales = {layout: run_on_ranks(_scales, 2, *layout)[0] for layout in ((2, 1), (1, 2))}
    assert scales[2, 1].keys() == scales[1, 2].keys()
    for name, scale in scales[2, 1].items():
        torch.testing.assert_close(scales[1, 2][name], scale, rtol=1e-3, atol=0)
    fc1 = scales[1, 2]["model.layers.0.mlp.experts.fc1.scaling_fwd.scale"]
    assert fc1.shape == (16,) and len(fc1[::2].unique()) > 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_padding_changes_nothing_and_idle_experts_get_nothing(recipe):
    """Every token alike: six of eight experts get none. Rows padded to 256 instead of the recipe's own multiple."""
    grads = []
    for alignment in (1, 256):
        run = make_run(recipe, fields={"expert_token_alignment": alignment})
        batch = {key: torch.full_like(value, 7) for key, value in run.batch(1, 0).items()}
        output = run.model(**batch, num_items_in_batch=TOKENS)
        output.loss.backward()
        idle = output.tokens_per_expert_LE[0] == 0
        assert idle.sum() == 6
        experts = run.model.model.layers[0].mlp.experts
        for weight in (experts.fc1_weight, experts.fc2_weight):
            assert weight.grad[idle].count_nonzero() == 0 and weight.grad[~idle].count_nonzero() > 0
        grads.append({"loss": output.loss.detach()} | {name: p.grad for name, p in run.model.named_parameters()})
    for name, gradient in grads[0].items():
        assert gradient.isfinite().all(), name
        torch.testing.assert_close(grads[1][name], gradient, rtol=1e-5, atol=1e-8, msg=name)


def _idle_rank(recipe: str | None, dtype: str) -> list[float]:
    """All tokens choose the same two experts in the first layer: at least one of four ranks gets none."""
    run = make_run(recipe, 1, 4, dtype=dtype)
    run.batch = lambda step, rank: {key: torch.full((2, TOKENS // 2), 7) for key in ("input_ids", "shift_labels")}
    losses = run.train(1, 3)
    assert all(local_tensor(parameter.grad or parameter).isfinite().all() for parameter in run.parameters)
    return losses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", [None, "DelayedScaling", "NVFP4BlockScaling"])
def test_a_rank_without_tokens_does_not_hang(recipe, dtype):
    losses = run_on_ranks(_idle_rank, 4, recipe, dtype)[0]
    assert losses[2] < losses[0] and losses[2] == losses[2]


@pytest.mark.parametrize("recipe", RECIPES)
def test_low_precision_is_on_in_the_experts_only_where_asked(recipe):
    """Its loss differs from high precision's a little; layer 2 of 2 alone gives another loss than both."""
    losses = {}
    for layers in (None, [2]):
        options = {"fp4_layers": layers} if recipe == "NVFP4BlockScaling" else {"fp8_layers": layers}
        run = make_run(recipe, **options)
        losses[str(layers)] = run.train(1, 1)[0]
    plain = make_run(None).train(1, 1)[0]
    assert len({plain, *losses.values()}) == 3
    assert list(losses.values()) == pytest.approx([plain] * 2, rel=0.05)


def test_checkpointed_layers_give_the_same_losses():
    expected = make_run("DelayedScaling").train(1, 3)
    assert make_run("DelayedScaling", activation_checkpointing="full").train(1, 3) == expected


def _validation_leaves_scales_alone() -> None:
    run = make_run("DelayedScaling", 1, dist.get_world_size())
    run.train(1, 2)
    before = {name: local_tensor(t).clone() for name, t in delayed_scaling_tensors(run.model).items()}
    with torch.no_grad(), unchanged_scales(run.model):
        run.model(**run.batch(9, run.rank))
    for name, tensor in delayed_scaling_tensors(run.model).items():
        assert torch.equal(local_tensor(tensor), before[name]), name


def test_validation_does_not_move_the_scales():
    run_on_ranks(_validation_leaves_scales_alone, 2)


def test_a_stack_of_single_weights_behaves_as_one_tensor():
    """What TransformerEngine's experts are held in, here over the reference's single weights."""
    values = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(0))
    weights = [QuantizedWeight.of(value, WeightQuantizer(MXFP8BlockScaling())) for value in values]
    expected = torch.stack([weight.dequantize() for weight in weights])
    flip = lambda x: x.flip(1)  # noqa: E731
    stack = torch.nn.Parameter(stacked_weights_class(torch.Tensor)(weights))
    assert is_quantized(stack) and stack.shape == (3, 64, 32) and stack.dtype == torch.float32
    assert torch.equal(dequantized(stack), expected) and torch.equal(stack * 2, expected * 2)
    assert stack.unbind(0)[1] is weights[1]
    with torch.no_grad():
        stack.fill_(2.0)
    assert (weights[2].dequantize() == 2).all()
    reordered = stacked_weights_class(torch.Tensor)(weights, flip, flip)
    reordered.quantize_(values)
    assert torch.equal(reordered.dequantize(), expected)
    assert torch.equal(weights[0].dequantize(), expected[0].flip(0))
