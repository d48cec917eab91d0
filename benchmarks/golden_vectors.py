"""Records what independent implementations make of fixed tensors, for the CPU tests, and compares the emulation.

    python benchmarks/golden_vectors.py torchao tests/golden    # CPU; needs torchao 0.18: MXFP8
    python benchmarks/golden_vectors.py te tests/golden         # GPU with TransformerEngine: all else, and te.Linear

Writes ``mxfp8_torchao.npz`` or ``te.npz``: ``<kind>.<rows>x<columns>/input`` holds BF16 bits (uint16), and
``.../<variant>/<field>`` the codes (uint8), scales and amax, all in the tensor's own orientation, without TE's padding.
Exits with 1 if anything differs or fails.

Left out, because the source departs from TE's kernels there: torchao's blocks with a NaN (it makes all of the block
NaN, TE only the value) and its payload of blocks with scale code 0 (it does not scale them); NaNs in TE's NVFP4
reference (its amax becomes NaN, the kernels' does not), and values whose Hadamard transform overflows; stochastic
rounding (random).
"""

import argparse
import sys
import traceback
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch


PROJECT_DIR = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT_DIR))

from te_reference.delayed_scaling import AmaxReduction, DelayedScalingState  # noqa: E402
from te_reference.emulated_linear import emulated_linear  # noqa: E402
from te_reference.emulation import QuantizedTensor, quantize  # noqa: E402
from te_reference.recipe import (  # noqa: E402
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)


SHAPES = {"torchao": [(32, 96), (256, 512)], "te": [(16, 144), (144, 16), (144, 272), (256, 512)]}
# Which results are recorded; all are compared. The small shapes have whole and partial blocks of 128 along either dim.
RECORDED_SHAPES = {
    "mxfp8": [(32, 96)],
    "current_e4m3": [(16, 144)],
    "current_e5m2": [(16, 144)],
    "delayed_e4m3": [(16, 144)],
    "delayed_e5m2": [(16, 144)],
    "block_1d": [(16, 144), (144, 16)],
    "block_2d": [(16, 144)],
    "nvfp4_1d_rht": [(16, 144)],
    "nvfp4_2d": [(16, 144)],
}
DELAYED_SCALE = 37.0  # no power of two; makes large values saturate

Fields = dict[str, torch.Tensor]
Variant = tuple[str, Fields, Fields]  # name, expected, emulated


def make_inputs(rows: int, columns: int) -> dict[str, torch.Tensor]:
    """BF16 tensors of every kind, assembled from a fixed bit stream: the same on every machine and version."""
    raw = np.random.PCG64(2026).random_raw(rows * columns)
    sign, mantissa, spread = raw & 1, (raw >> np.uint64(1)) & 127, (raw >> np.uint64(8)) & 63
    # Number of trailing zeros of 16 bits: 0 half the time, 1 a quarter, ...
    low = (raw >> np.uint64(16)) & 0xFFFF | 0x8000
    zeros = np.log2((low & -low.astype(np.int64).astype(np.uint64)).astype(np.float64)).astype(np.uint64)

    def bf16(exponent: Any, mantissa: Any = mantissa) -> torch.Tensor:
        bits = (sign << np.uint64(15)) | (np.uint64(0) + exponent << np.uint64(7)) | mantissa
        return torch.from_numpy(bits.astype(np.uint16).view(np.int16).copy()).view(torch.bfloat16).view(rows, columns)

    normal = bf16(127 - zeros)
    inputs = {
        "normal": normal,
        "heavy_tailed": bf16(96 + spread),
        "zeros": torch.zeros_like(normal),
        "tiny": bf16(27 - zeros),
        "subnormal": bf16(0 * zeros, mantissa | 1),
        "huge": bf16(254 - zeros),
    }
    for kind, value in {"outlier": 3e4, "infinite": torch.inf, "nan": torch.nan}.items():
        inputs[kind] = normal.clone() * (2.0**-8 if kind == "outlier" else 1.0)
        inputs[kind][rows // 2, columns // 3] = value
    inputs["infinite"][-1, -1] = -torch.inf
    inputs["part_zero"] = normal.clone()
    inputs["part_zero"][: rows // 2] = 0
    inputs["part_zero"][:, : columns // 4] = 0
    return inputs


def fields(rowwise: QuantizedTensor, columnwise: QuantizedTensor | None = None) -> Fields:
    """What the emulation stores, under the names of the golden files."""
    found = {}
    for direction, quantized in {"rowwise": rowwise, "columnwise": columnwise}.items():
        if quantized is not None:
            found[f"{direction}_payload"] = quantized.payload()
            found[f"{direction}_scale_inv"] = _plain(quantized.scale_inv)
            if quantized.amax is not None:
                found[f"{direction}_amax"] = quantized.amax
    return found


def _plain(scales: torch.Tensor) -> torch.Tensor:
    return scales if scales.dtype in (torch.float32, torch.uint8) else scales.view(torch.uint8)


# --- torchao ---------------------------------------------------------------------------------------------------------


def torchao_mxfp8(x: torch.Tensor, kind: str) -> Iterator[Variant]:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    if kind == "nan":
        return
    expected = {}
    for direction, matrix in {"rowwise": x, "columnwise": x.T.contiguous()}.items():
        scale, payload = to_mx(matrix, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
        scale, payload = scale.view(torch.uint8).view(matrix.shape[0], -1), payload.view(torch.uint8)
        expected[f"{direction}_scale_inv"] = scale if direction == "rowwise" else scale.T
        expected[f"{direction}_payload"] = payload if direction == "rowwise" else payload.T
    operands = quantize(x, MXFP8BlockScaling(), "activation")
    if kind == "subnormal":
        expected = {name: value for name, value in expected.items() if name.endswith("scale_inv")}
    yield "mxfp8", expected, fields(operands.rowwise, operands.columnwise)


# --- TransformerEngine -----------------------------------------------------------------------------------------------


def te_per_tensor(x: torch.Tensor, kind: str) -> Iterator[Variant]:
    from transformer_engine.pytorch import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    for name, dtype, role in (("e4m3", DType.kFloat8E4M3, "activation"), ("e5m2", DType.kFloat8E5M2, "gradient")):
        for suffix, power_of_two in (("", False), ("_pow2", True)):
            quantizer = Float8CurrentScalingQuantizer(dtype, x.device, force_pow_2_scales=power_of_two)
            recipe = Float8CurrentScaling(use_power_2_scales=power_of_two)
            yield f"current_{name}{suffix}", _float8_fields(quantizer(x)), fields(quantize(x, recipe, role).rowwise)

        scale = torch.tensor([DELAYED_SCALE], device=x.device)
        amax = torch.zeros(1, device=x.device)
        expected = _float8_fields(Float8Quantizer(scale, amax, dtype)(x)) | {"amax": amax[0]}
        recipe = DelayedScaling(amax_history_len=1)
        state = DelayedScalingState(recipe, x.device)
        tracker = state.backward if role == "gradient" else state.forward
        tracker.scale.fill_(DELAYED_SCALE)
        emulated = fields(quantize(x, recipe, role, state=state).rowwise)
        yield f"delayed_{name}", expected, emulated | {"amax": tracker.amax_history[0, 0]}


def _float8_fields(tensor: Any) -> Fields:
    return {"rowwise_payload": tensor._data, "rowwise_scale_inv": tensor._scale_inv.view(())}


def te_block(x: torch.Tensor, kind: str) -> Iterator[Variant]:
    from transformer_engine.pytorch import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    rows, columns = x.shape
    block_rows, block_columns = -(-rows // 128), -(-columns // 128)
    for dim, role in ((1, "activation"), (2, "weight")):
        for suffix, power_of_two in (("", True), ("_f32", False)):
            tensor = Float8BlockQuantizer(
                DType.kFloat8E4M3,
                rowwise=True,
                columnwise=True,
                force_pow_2_scales=power_of_two,
                block_scaling_dim=dim,
            )(x)
            rowwise, columnwise = tensor._rowwise_scale_inv, tensor._columnwise_scale_inv
            expected = {"rowwise_payload": tensor._rowwise_data, "columnwise_payload": tensor._columnwise_data.T}
            if dim == 1:  # stored [blocks, values], values padded to a multiple of 4
                expected["rowwise_scale_inv"] = rowwise[:, :rows].T
                expected["columnwise_scale_inv"] = columnwise[:, :columns]
            else:  # stored [blocks, blocks] of the matrix and of its transpose, padded likewise
                expected["rowwise_scale_inv"] = rowwise[:, :block_columns]
                expected["columnwise_scale_inv"] = columnwise[:, :block_rows].T
            operands = quantize(x, Float8BlockScaling(use_f32_scales=not power_of_two), role)
            yield f"block_{dim}d{suffix}", expected, fields(operands.rowwise, operands.columnwise)


def te_nvfp4_reference(x: torch.Tensor, kind: str) -> Iterator[Variant]:
    from transformer_engine.pytorch.custom_recipes import reference_utils
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef

    for name, tile, transform, role in (
        ("nvfp4_1d", (1, 16), False, "activation"),
        ("nvfp4_1d_rht", (1, 16), True, "activation"),
        ("nvfp4_2d", (16, 16), False, "weight"),
    ):
        if kind == "nan" or (transform and kind in ("huge", "infinite")):
            continue
        reference = NVFP4QuantizerRef(
            dtype=reference_utils.Fp4Formats.E2M1, quant_tile_shape=tile, pow_2_scales=False, with_rht=transform
        )
        tensor = reference.quantize(x)
        step = tile[0]  # the reference repeats a square tile's scale for each of its rows
        expected = {
            "rowwise_payload": _unpack(tensor.data),
            "rowwise_scale_inv": _plain(tensor.scale)[::step],
            "rowwise_amax": tensor.global_amax_row.view(()),
            "columnwise_payload": _unpack(tensor.data_t).T,
            "columnwise_scale_inv": _plain(tensor.scale_t)[::step].T,
            "columnwise_amax": tensor.global_amax_col.view(()),
        }
        operands = quantize(x, NVFP4BlockScaling(disable_rht=not transform), role)
        yield name, expected, fields(operands.rowwise, operands.columnwise)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def compare_te_linear() -> None:
    """Prints how far te.Linear and :func:`emulated_linear` are apart, over steps, in which delayed scales evolve."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as te_recipe

    tokens, in_features, out_features = 512, 1024, 768
    for emulated_recipe in (DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()):
        name = type(emulated_recipe).__name__
        torch.manual_seed(0)
        layer = te.Linear(in_features, out_features, bias=False, params_dtype=torch.bfloat16, device="cuda")
        weight = layer.weight.detach().clone().requires_grad_()
        state = DelayedScalingState(emulated_recipe, "cuda") if emulated_recipe.delayed() else None
        for step in range(3):
            x = torch.randn(tokens, in_features, dtype=torch.bfloat16, device="cuda").requires_grad_()
            dy = (1e-3 * torch.randn(tokens, out_features, device="cuda")).bfloat16()
            layer.zero_grad()
            with te.autocast(enabled=True, recipe=getattr(te_recipe, name)()):
                y = layer(x)
            y.backward(dy)

            x_emulated, weight.grad = x.detach().clone().requires_grad_(), None
            reduction = AmaxReduction()
            after_backward = reduction.join(state) if state else None
            y_emulated = emulated_linear(x_emulated, weight, emulated_recipe, state, after_backward=after_backward)
            if state:
                reduction.finish_forward()
            y_emulated.backward(dy)

            pairs = {"y": (y_emulated, y), "dx": (x_emulated.grad, x.grad), "dw": (weight.grad, layer.weight.grad)}
            errors = {name: relative_error(*pair) for name, pair in pairs.items()}
            print(
                f"te.Linear {name} step {step}: relative difference "
                + ", ".join(f"{n} {e:.2e}" for n, e in errors.items())
            )
        if state:
            meta = layer.fp8_meta
            print("  scales TE      ", meta["scaling_fwd"].scale[:2].tolist(), meta["scaling_bwd"].scale[:1].tolist())
            print("  scales emulated", state.forward.scale.tolist(), state.backward.scale.tolist())


def relative_error(emulated: torch.Tensor, expected: torch.Tensor) -> float:
    return ((emulated.float() - expected.float()).norm() / expected.float().norm()).item()


# --- both ------------------------------------------------------------------------------------------------------------


def count_differences(label: str, expected: Fields, emulated: Fields) -> int:
    """Prints one line per field that differs and returns the number of differing entries."""
    total = 0
    for name, value in expected.items():
        other = emulated[name]
        if value.shape != other.shape:
            raise ValueError(f"{label}/{name}: expected shape {list(value.shape)}, emulated {list(other.shape)}.")
        differs = value != other
        if value.is_floating_point():
            differs &= ~(value.isnan() & other.isnan())
        if count := int(differs.sum()):
            where = differs.nonzero()[0].tolist()
            first = f"first at {where}: {value[tuple(where)].item()!r}, emulated {other[tuple(where)].item()!r}"
            print(f"DIFFERS {label}/{name}: {count} of {differs.numel()}; {first}")
            total += count
    return total


SOURCES = {"torchao": (torchao_mxfp8,), "te": (te_per_tensor, te_block, te_nvfp4_reference)}


def record(source: str, device: str, folder: Path) -> int:
    """Compares every kind, shape and variant; saves the small ones. Returns how many entries differ or parts fail."""
    arrays: dict[str, np.ndarray] = {}
    compared = different = failed = 0
    for shape in SHAPES[source]:
        for (kind, x), part in product(make_inputs(*shape).items(), SOURCES[source]):
            label = f"{kind}.{shape[0]}x{shape[1]}"
            try:
                variants = list(part(x.to(device), kind))
            except (RuntimeError, ValueError, AssertionError):  # one kernel's refusal should not hide the other results
                print(f"FAILED {label}/{part.__name__}\n{traceback.format_exc()}")
                failed += 1
                continue
            for variant, expected, emulated in variants:
                different += count_differences(f"{label}/{variant}", expected, emulated)
                compared += sum(value.numel() for value in expected.values())
                if shape in RECORDED_SHAPES.get(variant, []):
                    arrays[f"{label}/input"] = x.view(torch.int16).numpy().view(np.uint16)
                    for name, value in expected.items():
                        if not (variant.endswith("2d") and name.startswith("columnwise")):  # the same as row-wise
                            arrays[f"{label}/{variant}/{name}"] = value.contiguous().cpu().numpy()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / {"torchao": "mxfp8_torchao.npz", "te": "te.npz"}[source]
    np.savez_compressed(path, **arrays)
    print(f"{source}: {compared - different} of {compared} entries equal, {different} differ, {failed} parts failed")
    print(f"wrote {path}")
    return different + failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", choices=("torchao", "te"))
    parser.add_argument("folder", type=Path, help="where the golden file goes")
    arguments = parser.parse_args()
    if arguments.source == "torchao":
        different = record("torchao", "cpu", arguments.folder)
    else:
        different = record("te", "cuda", arguments.folder)
        compare_te_linear()
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
