"""te_reference/emulation.py: the quantisers and the linear layer.

Expected values: rational arithmetic value by value, torchao's MX format and TE's own kernels (``golden/``, recorded by
benchmarks/golden_vectors.py), hand-worked cases.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from exact_formats import (
    E4M3,
    E5M2,
    amax_of,
    float8_blocks_by_hand,
    fp4_blocks_by_hand,
    fp32,
    kinds,
    mx_blocks_by_hand,
    nearest_code,
)
from te_reference.delayed_scaling import AmaxReduction, DelayedScalingState
from te_reference.emulated_linear import emulated_linear
from te_reference.emulation import RHT_SIGNS, check_alignment, quantize, random_hadamard_transform
from te_reference.recipe import (
    RECIPES,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)


GOLDEN = Path(__file__).parent / "golden"


# --- the quantisers, value by value -----------------------------------------------------------------------------------


def assert_quantized(quantized, payload: np.ndarray, scales: dict, scale_codes: torch.Tensor) -> None:
    assert np.array_equal(quantized.payload().numpy(), payload)
    for index, scale in scales.items():
        assert scale_codes[index].item() == scale, index


KINDS = sorted(kinds(16, 32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_float8_block_scaling(kind, power_of_two):
    # 136 = 128 + 8 rows and 144 = 128 + 16 columns: partial blocks in both directions.
    x = kinds(136, 144)[kind]
    recipe = Float8BlockScaling(use_f32_scales=not power_of_two)
    activation, weight = quantize(x, recipe, "activation"), quantize(x, recipe, "weight")
    assert weight.rowwise is weight.columnwise
    tries = [(weight.rowwise, (128, 128))]
    if kind in ("heavy_tailed", "part_zero"):
        tries += [(activation.rowwise, (1, 128)), (activation.columnwise, (128, 1))]
    for quantized, block in tries:
        assert quantized.block == block
        assert_quantized(quantized, *float8_blocks_by_hand(x.numpy(), block, power_of_two), quantized.scale_inv)


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp8(kind):
    x = kinds(32, 64)[kind]
    operands = quantize(x, MXFP8BlockScaling(), "gradient")
    for quantized, block in ((operands.rowwise, (1, 32)), (operands.columnwise, (32, 1))):
        assert_quantized(quantized, *mx_blocks_by_hand(x.numpy(), block), quantized.scale_inv)
    square = quantize(x, MXFP8BlockScaling(enable_2d_quantization=True), "weight")
    assert square.rowwise is square.columnwise
    assert_quantized(square.rowwise, *mx_blocks_by_hand(x.numpy(), (32, 32)), square.rowwise.scale_inv)


@pytest.mark.parametrize("kind", KINDS)
def test_nvfp4(kind):
    x = kinds(32, 48)[kind]
    recipe = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
    activation, weight = quantize(x, recipe, "gradient"), quantize(x, recipe, "weight")
    assert weight.rowwise is weight.columnwise
    for quantized, block in (
        (activation.rowwise, (1, 16)),
        (activation.columnwise, (16, 1)),
        (weight.rowwise, (16, 16)),
    ):
        assert quantized.amax == amax_of(x.numpy())
        codes = quantized.scale_inv.view(torch.uint8)
        assert_quantized(quantized, *fp4_blocks_by_hand(x.numpy(), block), codes)


@pytest.mark.parametrize("role", ["activation", "gradient"])
def test_nvfp4_transforms_the_columnwise_copy_only(role):
    x = kinds(32, 48)["outlier"]
    operands = quantize(x, NVFP4BlockScaling(disable_stochastic_rounding=True), role)
    for quantized, matrix, block in (
        (operands.rowwise, x, (1, 16)),
        (operands.columnwise, random_hadamard_transform(x), (16, 1)),
    ):
        assert quantized.amax == amax_of(matrix.numpy())
        codes = quantized.scale_inv.view(torch.uint8)
        assert_quantized(quantized, *fp4_blocks_by_hand(matrix.numpy(), block), codes)


# 448 * block amax / tensor amax is exactly 336, a tie of 320 (code 122) and 352, or 232, a tie of 224 (118) and 240.
# The even code would win, but the kernels multiply by FP32(1/6), which is above 1/6, before they multiply by the
# block's amax.
@pytest.mark.parametrize("amax, block_amax, code", [(1.015625, 0.76171875, 123), (1.09375, 0.56640625, 119)])
def test_nvfp4_block_scale_of_a_near_tie(amax, block_amax, code):
    x = torch.zeros(16, 16)
    x[0, 0], x[1, 0] = amax, block_amax
    scales = quantize(x, NVFP4BlockScaling(), "activation").rowwise.scale_inv.view(torch.uint8)
    assert scales[:2, 0].tolist() == [126, code]


def test_nvfp4_without_square_blocks():
    x = kinds(32, 48)["normal"]
    weight = quantize(x, NVFP4BlockScaling(disable_2d_quantization=True), "weight")
    for quantized, block in ((weight.rowwise, (1, 16)), (weight.columnwise, (16, 1))):
        assert_quantized(quantized, *fp4_blocks_by_hand(x.numpy(), block), quantized.scale_inv.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role, dtype", [("activation", E4M3), ("gradient", E5M2)])
def test_per_tensor_scaling(kind, role, dtype):
    x = kinds(16, 32)[kind]
    amax, fp8_max = amax_of(x.numpy()), fp32(448 if dtype == E4M3 else 57344)
    with np.errstate(over="ignore", divide="ignore"):
        scale = fp32(1) if amax == 0 or np.isinf(amax) else min(fp8_max / amax, np.finfo(np.float32).max)
        payload = np.vectorize(lambda v: nearest_code(float(v), dtype))(x.numpy() * scale)
    operands = quantize(x, Float8CurrentScaling(), role)
    assert operands.rowwise is operands.columnwise
    assert_quantized(operands.rowwise, payload, {(): fp32(1) / scale}, operands.rowwise.scale_inv)

    state = DelayedScalingState(DelayedScaling())
    tracker = state.backward if role == "gradient" else state.forward
    tracker.scale.fill_(37)
    delayed = quantize(x, DelayedScaling(), role, state=state).rowwise
    payload = np.vectorize(lambda v: nearest_code(float(v), dtype))(x.clamp(-1e36, 1e36).numpy() * fp32(37))
    assert_quantized(delayed, payload, {(): fp32(1) / fp32(37)}, delayed.scale_inv)
    assert tracker.amax_history[0, 0] == amax


def test_hand_worked_blocks():
    """One block of each kind, by hand: amax 3.5 along 32 values."""
    x = torch.zeros(32, 32)
    x[0, :4] = torch.tensor([3.5, -1.0, 0.01, 2.0**-12])
    mx = quantize(x, MXFP8BlockScaling(), "activation").rowwise
    # 3.5 / 448 = 2^-7 exactly, so e = -7 (code 120) and values are multiplied by 128: 448, -128, 1.28, 2^-5.
    assert mx.scale_inv[0, 0] == 120
    assert mx.dequantize()[0, :4].tolist() == [3.5, -1.0, 1.25 / 128, 2.0**-12]
    fp4 = quantize(x, NVFP4BlockScaling(), "activation").rowwise
    # The largest block has S = 448 and maps 3.5 to 6: -1 becomes -1.714 -> -1.5, the rest 0.
    assert fp4.scale_inv.view(torch.uint8)[0, 0] == 0x7E
    assert fp4.payload()[0, :4].tolist() == [7, 11, 0, 0]
    assert fp4.dequantize()[0, :2].tolist() == pytest.approx([3.5, -0.875])


# --- golden vectors ---------------------------------------------------------------------------------------------------


GOLDEN_RECIPES = {
    "mxfp8": (MXFP8BlockScaling(), "activation"),
    "current_e4m3": (Float8CurrentScaling(), "activation"),
    "current_e5m2": (Float8CurrentScaling(), "gradient"),
    "delayed_e4m3": (DelayedScaling(), "activation"),
    "delayed_e5m2": (DelayedScaling(), "gradient"),
    "block_1d": (Float8BlockScaling(), "activation"),
    "block_2d": (Float8BlockScaling(), "weight"),
    "nvfp4_1d_rht": (NVFP4BlockScaling(), "activation"),
    "nvfp4_2d": (NVFP4BlockScaling(), "weight"),
}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.npz")), ids=lambda path: path.stem)
def test_golden_vectors(path):
    golden = np.load(path)
    checked = 0
    for name in golden.files:
        label, variant, field = [*name.split("/"), ""][:3]
        if variant == "input":
            continue
        x = torch.from_numpy(golden[f"{label}/input"].view(np.int16)).view(torch.bfloat16)
        recipe, role = GOLDEN_RECIPES[variant]
        state = DelayedScalingState(recipe) if recipe.delayed() else None
        if state:
            state.forward.scale.fill_(37)
            state.backward.scale.fill_(37)
        operands = quantize(x.reshape(golden[f"{label}/input"].shape), recipe, role, state=state)
        direction, _, what = field.partition("_")
        if field == "amax":
            actual = (state.backward if role == "gradient" else state.forward).amax_history[0, 0]
        elif what == "payload":
            actual = getattr(operands, direction).payload()
        elif what == "amax":
            actual = getattr(operands, direction).amax
        else:
            scales = getattr(operands, direction).scale_inv
            actual = scales.view(torch.uint8) if scales.element_size() == 1 else scales
        assert np.array_equal(actual.numpy(), golden[name], equal_nan=golden[name].dtype == np.float32), name
        checked += 1
    assert checked >= 10


# --- the three matrix products ----------------------------------------------------------------------------------------


def all_recipes() -> list:
    return [cls() for cls in RECIPES.values()]


def case(T: int = 64, D: int = 160, O: int = 96, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(T, D, generator=generator) * torch.exp2(torch.randint(-6, 6, (T, 1), generator=generator).float())
    w = torch.randn(O, D, generator=generator) * 0.02
    dy = torch.randn(T, O, generator=generator) * 1e-3
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), dy.to(dtype)


def warm_state(recipe, x, w, dy):
    """Delayed scaling with scales that fit the case."""
    if not recipe.delayed():
        return None
    state = DelayedScalingState(recipe)
    for role, tensor in (("activation", x), ("weight", w), ("gradient", dy)):
        state.record(role, tensor.detach().abs().amax().float())
    reduction = AmaxReduction()
    reduction.join(state)
    reduction.finish_forward()
    reduction.finish_backward()
    return state


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda r: type(r).__name__)
def test_products_use_the_right_copies(recipe):
    x, w, dy = case()
    state = warm_state(recipe, x, w, dy)
    generator = torch.Generator().manual_seed(5)
    y = emulated_linear(x, w, recipe, state, generator=generator)
    y.backward(dy)

    generator.manual_seed(5)
    state = warm_state(recipe, x, w, dy)
    qx, qw, qdy = (
        quantize(t.detach(), recipe, role, state=state, generator=generator)
        for t, role in ((x, "activation"), (w, "weight"), (dy, "gradient"))
    )

    def double(quantized):
        return quantized.dequantize().double()

    expected_y = double(qx.rowwise) @ double(qw.rowwise).T
    expected_dx = double(qdy.rowwise) @ double(qw.columnwise)
    expected_dw = double(qdy.columnwise).T @ double(qx.columnwise)
    for actual, expected in ((y, expected_y), (x.grad, expected_dx), (w.grad, expected_dw)):
        assert (actual.double() - expected).norm() < 1e-6 * expected.norm()


# Relative error of one product of normal operands: sqrt(2) * RMS relative rounding error, with head room.
BOUNDS = {"NVFP4BlockScaling": 0.25}


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_close_to_high_precision(recipe, dtype):
    x, w, dy = case(dtype=dtype)
    state = warm_state(recipe, x, w, dy)
    y = emulated_linear(x, w, recipe, state, generator=torch.Generator().manual_seed(0))
    y.backward(dy)
    assert y.dtype == x.grad.dtype == w.grad.dtype == dtype
    xd, wd, dyd = x.detach().double(), w.detach().double(), dy.double()
    for actual, expected in ((y, xd @ wd.T), (x.grad, dyd @ wd), (w.grad, dyd.T @ xd)):
        assert actual.isfinite().all()
        assert (actual.double() - expected).norm() < BOUNDS.get(type(recipe).__name__, 0.07) * expected.norm()


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda r: type(r).__name__)
def test_shapes_frozen_tensors_and_no_tokens(recipe):
    x, w, dy = case()
    state = warm_state(recipe, x, w, dy)
    y = emulated_linear(x.detach().view(2, 32, 160), w, recipe, state)
    assert y.shape == (2, 32, 96)
    y.sum().backward()  # an expanded, non-contiguous gradient
    assert w.grad.isfinite().all() and x.grad is None
    w.grad = None
    emulated_linear(x, w.detach(), recipe, state).backward(dy)
    assert x.grad.isfinite().all() and w.grad is None
    none = torch.zeros(0, 160, requires_grad=True)
    y = emulated_linear(none, w, recipe, state)
    assert y.shape == (0, 96)
    y.sum().backward()
    assert none.grad.shape == (0, 160) and not w.grad.any()


def test_a_given_quantised_weight_is_used():
    x, w, dy = case()
    recipe = MXFP8BlockScaling()
    held = quantize(w.detach(), recipe, "weight")
    other = (w.detach() * 3).requires_grad_()
    y = emulated_linear(x, other, recipe, quantized_weight=held)
    assert torch.equal(y, emulated_linear(x, w, recipe))
    y.backward(dy)
    assert other.grad.shape == w.shape


def test_hadamard_transform_is_orthogonal_and_fixed():
    M_transposed = random_hadamard_transform(torch.eye(16))  # M^T applied to the identity
    assert torch.equal(M_transposed @ M_transposed.T, torch.eye(16))
    assert torch.equal(M_transposed[0], torch.tensor(RHT_SIGNS) / 4)  # H's first column is all ones
    assert set(M_transposed.abs().unique().tolist()) == {0.25}
    # By the definition of Sylvester's matrix: H_2n = [[H, H], [H, -H]].
    H = torch.ones(1, 1)
    for _ in range(4):
        H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1)))
    assert torch.equal(M_transposed.T, torch.diag(torch.tensor(RHT_SIGNS).float()) @ H / 4)


def test_hadamard_transform_leaves_the_weight_gradient():
    x, _, dy = case()
    x, dy = x.detach().bfloat16().float(), dy.bfloat16().float()
    transformed = random_hadamard_transform(dy).double().T @ random_hadamard_transform(x).double()
    expected = dy.double().T @ x.double()
    assert (transformed - expected).norm() < 5e-3 * expected.norm()  # BF16 rounding after the transform


def test_nvfp4_gradients_average_to_the_unrounded_product():
    """Stochastic rounding of dy: over many draws dx approaches dy @ dequantised w, not a biased product."""
    x, w, dy = case(T=32, D=32, O=64)
    recipe = NVFP4BlockScaling()
    weight = quantize(w.detach(), recipe, "weight").columnwise.dequantize().double()
    expected = dy.bfloat16().double() @ weight
    generator = torch.Generator().manual_seed(11)
    y = emulated_linear(x, w, recipe, generator=generator)
    draws = 200
    total = torch.zeros_like(expected)
    for _ in range(draws):
        total += torch.autograd.grad(y, x, dy, retain_graph=True)[0].double()
    single = (torch.autograd.grad(y, x, dy, retain_graph=True)[0].double() - expected).norm() / expected.norm()
    mean = (total / draws - expected).norm() / expected.norm()
    assert single > 0.05
    assert mean < 2 * single / math.sqrt(draws)


def test_rounding_points():
    x = torch.tensor([1.0 + 2.0**-4 + 2.0**-10] * 16).repeat(8, 1)  # BF16 rounds it to a tie of E4M3, FP32 does not
    w = torch.eye(16)
    delayed = emulated_linear(
        x, w, DelayedScaling(), DelayedScalingState(DelayedScaling()), activation_dtype=torch.bfloat16
    )
    assert delayed.dtype == torch.bfloat16 and delayed[0, 0] == 1.125
    block = emulated_linear(x, w, Float8BlockScaling(), activation_dtype=torch.bfloat16)
    assert block[0, 0] == 1.0


def test_gradients_of_a_float32_input_are_rounded_to_the_activation_dtype():
    x, w, dy = case()
    emulated_linear(x, w, Float8CurrentScaling(), activation_dtype=torch.bfloat16).backward(dy.bfloat16())
    assert x.grad.dtype == torch.float32 and torch.equal(x.grad, x.grad.bfloat16().float())


@pytest.mark.parametrize(
    "recipe, good, bad",
    [
        (Float8CurrentScaling(), (8, 16), [(4, 16), (8, 24)]),
        (DelayedScaling(), (2, 4, 32), [(3, 3, 16)]),
        (Float8BlockScaling(), (136, 144), [(132, 144), (136, 136)]),
        (MXFP8BlockScaling(), (32, 64), [(16, 64), (32, 48)]),
        (NVFP4BlockScaling(), (16, 48), [(8, 48), (16, 40)]),
    ],
)
def test_alignment(recipe, good, bad):
    check_alignment("x", good, recipe)
    for shape in bad:
        with pytest.raises(ValueError, match=f"{type(recipe).__name__} needs"):
            check_alignment("x", shape, recipe)


def test_linear_refuses_sizes_before_computing():
    with pytest.raises(ValueError, match="gradient of shape"):
        emulated_linear(torch.ones(32, 32), torch.ones(24, 32), MXFP8BlockScaling())
    with pytest.raises(ValueError, match="activation of shape"):
        emulated_linear(torch.ones(32, 40), torch.ones(32, 40), MXFP8BlockScaling())
    with pytest.raises(ValueError, match="17"):
        emulated_linear(torch.ones(17, 32), torch.ones(32, 32), Float8CurrentScaling())
    with pytest.raises(ValueError, match="DelayedScalingState"):
        emulated_linear(torch.ones(8, 32), torch.ones(32, 32), DelayedScaling())
    with pytest.raises(ValueError, match="role"):
        quantize(torch.ones(8, 32), Float8CurrentScaling(), "bias")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda r: type(r).__name__)
def test_gpu_equals_cpu(recipe):
    x, w, dy = case(dtype=torch.bfloat16)
    for role, tensor in (("activation", x), ("weight", w), ("gradient", dy)):
        if recipe.nvfp4() and role == "gradient":
            continue  # other random bits
        on_cpu = quantize(tensor.detach(), recipe, role, state=warm_state(recipe, x, w, dy))
        state = None
        if recipe.delayed():
            state = DelayedScalingState(recipe, "cuda")
            state.load_state_dict(warm_state(recipe, x, w, dy).state_dict())
        on_gpu = quantize(tensor.detach().cuda(), recipe, role, state=state)
        assert torch.equal(on_cpu.rowwise.payload(), on_gpu.rowwise.payload().cpu())
        assert torch.equal(on_cpu.rowwise.scale_inv, on_gpu.rowwise.scale_inv.cpu())
