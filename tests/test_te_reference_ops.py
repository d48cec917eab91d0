"""Grouped operations, permutation and router of te_reference, against loops over experts written out here."""

import pytest
import torch
import torch.nn.functional as F

import te_reference as te
from te_reference.emulated_linear import packed


T, E, A, D, FFN = 37, 5, 2, 16, 32
COUNTS = [0, 20, 7, 0, 10]  # rows of each group: two groups are empty


def routing(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, E] and map [T, E]: A of the first E - 1 experts per token, the last one gets none."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(T, E - 1, generator=generator).topk(A, dim=1).indices
    map_TE = torch.zeros(T, E, dtype=torch.bool).scatter_(1, chosen, True)
    return torch.rand(T, E, generator=generator) * map_TE, map_TE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_linear_is_one_linear_per_group(dtype):
    linear = te.ops.GroupedLinear(E, D, FFN, bias=False, dtype=dtype)
    assert [(name, tuple(p.shape)) for name, p in linear.named_parameters()] == [
        (f"weight{index}", (FFN, D)) for index in range(E)
    ]
    x = torch.randn(sum(COUNTS), D, dtype=dtype, requires_grad=True)
    dy = torch.randn(sum(COUNTS), FFN, dtype=dtype)
    y = linear(x, torch.tensor(COUNTS))
    y.backward(dy)

    x2 = x.detach().clone().requires_grad_()
    weights = [p.detach().clone().requires_grad_() for p in linear.parameters()]
    y2 = torch.cat([F.linear(rows, w) for rows, w in zip(x2.split(COUNTS), weights)])
    y2.backward(dy)
    torch.testing.assert_close(y, y2)
    torch.testing.assert_close(x.grad, x2.grad)
    for parameter, weight in zip(linear.parameters(), weights):
        torch.testing.assert_close(parameter.grad, weight.grad)
    assert linear.weight0.grad.count_nonzero() == 0  # no rows: a zero gradient, not none and not garbage


def test_grouped_linear_on_no_rows_at_all():
    linear = te.ops.GroupedLinear(E, D, FFN, bias=False)
    x = torch.empty(0, D, requires_grad=True)
    y = linear(x, torch.zeros(E, dtype=torch.int64))
    y.sum().backward()
    assert y.shape == (0, FFN) and all(p.grad.count_nonzero() == 0 for p in linear.parameters())


def test_grouped_linear_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="multiples of 4"):
        te.ops.GroupedLinear(2, 6, 8, bias=False)
    with pytest.raises(ValueError, match="bias=False"):
        te.ops.GroupedLinear(2, 8, 8)


def test_packed_copies_only_what_is_scattered():
    buffer = torch.randn(4, 3, 8)
    assert packed(list(buffer.unbind(0))).data_ptr() == buffer.data_ptr()
    torch.testing.assert_close(packed(list(buffer[1:].unbind(0))), buffer[1:], rtol=0, atol=0)
    scattered = [buffer[2], buffer[0], buffer[1]]
    torch.testing.assert_close(packed(scattered), buffer[[2, 0, 1]], rtol=0, atol=0)
    separate = [torch.full((3, 8), float(index)) for index in range(3)]
    torch.testing.assert_close(packed(separate)[:, 0, 0], torch.arange(3.0), rtol=0, atol=0)


@pytest.mark.parametrize("interleave", [None, 4])
def test_scaled_swiglu(interleave):
    x = torch.randn(9, 2 * FFN, dtype=torch.float64).float().requires_grad_()
    scales = torch.rand(9, requires_grad=True)
    dy = torch.randn(9, FFN)
    y = te.ops.ScaledSwiGLU(glu_interleave_size=interleave)(x, scales)
    y.backward(dy)

    x64, scales64 = x.detach().double().requires_grad_(), scales.detach().double().requires_grad_()
    if interleave is None:
        gate, up = x64[:, :FFN], x64[:, FFN:]
    else:
        blocks = x64.view(9, FFN // interleave, 2, interleave)
        gate, up = blocks[:, :, 0].reshape(9, FFN), blocks[:, :, 1].reshape(9, FFN)
    expected = gate * torch.sigmoid(gate) * up * scales64[:, None]
    expected.backward(dy.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scales.grad.double(), scales64.grad, rtol=1e-5, atol=1e-5)


def test_sequential_hands_out_extra_inputs_in_order():
    mlp = te.ops.Sequential(
        te.ops.GroupedLinear(E, D, 2 * FFN, bias=False),
        te.ops.ScaledSwiGLU(),
        te.ops.GroupedLinear(E, FFN, D, bias=False),
    )
    x, scales, splits = torch.randn(sum(COUNTS), D), torch.rand(sum(COUNTS)), torch.tensor(COUNTS)
    expected = mlp[2](mlp[1](mlp[0](x, splits), scales), splits)
    torch.testing.assert_close(mlp(x, splits, scales, splits), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="left over"):
        mlp(x, splits, scales, splits, splits)


@pytest.mark.parametrize("align", [None, 1, 8])
def test_permutation_sorts_by_expert_and_unpermutation_sums(align):
    weights, map_TE = routing()
    x = torch.randn(T, D, requires_grad=True)
    weights.requires_grad_()
    counts = map_TE.sum(0)
    if align is None:
        rows, row_weights, row_id_map = te.moe_permute_with_probs(x, weights, map_TE, T * A)
        pad_offsets, padded = None, counts
    else:
        rows, row_weights, row_id_map, pad_offsets, padded = te.moe_permute_and_pad_with_probs(
            x, weights, map_TE, counts, align
        )
        assert (padded % align == 0).all() and (padded - counts < align).all() and padded[E - 1] == 0
        assert (pad_offsets is None) == (align == 1)
    assert rows.shape == (int(padded.sum()), D)
    for expert, (group, group_weights) in enumerate(
        zip(rows.split(padded.tolist()), row_weights.split(padded.tolist()))
    ):
        tokens = map_TE[:, expert].nonzero().flatten()
        torch.testing.assert_close(group[: len(tokens)], x[tokens], rtol=0, atol=0)
        torch.testing.assert_close(group_weights[: len(tokens)], weights[tokens, expert], rtol=0, atol=0)
        assert group[len(tokens) :].count_nonzero() == 0 and group_weights[len(tokens) :].count_nonzero() == 0

    y = te.moe_unpermute(rows * row_weights[:, None], row_id_map, restore_shape=x.shape, pad_offsets=pad_offsets)
    torch.testing.assert_close(y, x * weights.sum(1, keepdim=True))
    dy = torch.randn(T, D)
    y.backward(dy)
    torch.testing.assert_close(x.grad, dy * weights.detach().sum(1, keepdim=True))
    torch.testing.assert_close(weights.grad, (x.detach() * dy).sum(1, keepdim=True) * map_TE)


def test_permutation_refuses_a_wrong_row_count():
    weights, map_TE = routing()
    with pytest.raises(ValueError, match=f"the map has {T * A} pairs"):
        te.moe_permute_with_probs(torch.randn(T, D), weights, map_TE, T * A + 1)


def test_router_is_softmax_then_top_k_renormalised():
    logits = torch.randn(T, E, requires_grad=True)
    arguments = {"num_groups": None, "group_topk": None, "scaling_factor": None, "expert_bias": None}
    weights, map_TE = te.router.fused_topk_with_score_function(
        logits, topk=A, use_pre_softmax=False, score_function="softmax", **arguments
    )
    values, chosen = logits.softmax(-1).topk(A)  # the other order of Mixtral's own code
    expected = torch.zeros(T, E).scatter(1, chosen, values / values.sum(-1, keepdim=True))
    torch.testing.assert_close(weights, expected)
    assert torch.equal(map_TE, expected > 0)
    dweights = torch.randn(T, E)
    gradient = torch.autograd.grad(weights, logits, dweights)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits, dweights)[0])
    with pytest.raises(ValueError, match="softmax only"):
        te.router.fused_topk_with_score_function(
            logits, topk=A, use_pre_softmax=False, score_function="sigmoid", **arguments
        )
