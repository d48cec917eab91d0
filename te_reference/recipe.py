"""Low-precision recipes: the names, fields and defaults of ``transformer_engine.common.recipe`` (2.20.2).

Only fields that the emulation honours exist; any other keyword is a TypeError from the dataclass, never ignored.

| recipe | scale | computed from | activations, weights / gradients |
|---|---|---|---|
| DelayedScaling | 1 FP32 per tensor | largest magnitude of earlier steps | E4M3 / E5M2 |
| Float8CurrentScaling | 1 FP32 per tensor | the tensor itself | E4M3 / E5M2 |
| Float8BlockScaling | power of two per 128 values (weights: 128 x 128) | the block | E4M3 |
| MXFP8BlockScaling | power of two (E8M0) per 32 values | the block | E4M3 |
| NVFP4BlockScaling | E4M3 per 16 values (weights: 16 x 16) and 1 FP32 per tensor | block and tensor | E2M1 |
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch


TE_RECIPE_MODULE = "transformer_engine.common.recipe"


class MaxValues(NamedTuple):
    """Largest finite magnitude in the forward and in the backward pass."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Number formats. HYBRID: E4M3 forward, E5M2 (more range, less precision) for gradients."""

    E2M1 = MaxValues(6, 6)
    E4M3 = MaxValues(448, 448)
    E5M2 = MaxValues(57344, 57344)
    HYBRID = MaxValues(448, 57344)


class Recipe:
    """Base class. The class methods tell recipes apart without importing them."""

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        return issubclass(cls, NVFP4BlockScaling)

    def _require_format(self, name: str, allowed: tuple[Format, ...], why: str) -> None:
        value = getattr(self, name)
        if value not in allowed:
            shown = value.name if isinstance(value, Format) else repr(value)
            choices = " or ".join(f"Format.{choice.name}" for choice in allowed)
            raise ValueError(f"{type(self).__name__}.{name}={shown} is not supported: {why} Use {choices}.")


_PER_TENSOR_WHY = "gradients or activations would lack range or precision."
_BLOCK_WHY = "block scales already give range, and E5M2 gradients diverge in practice."


@dataclass
class DelayedScaling(Recipe):
    """One scale per tensor, from the largest magnitudes ("amax") of earlier steps.

    Raises:
        ValueError: a field has a value that the recipe does not define.
    """

    margin: int = 0
    """The scale is divided by 2**margin: head room against growing values."""
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    """Steps that the amax history covers."""
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "max"
    """"max" of the history, "most_recent", or a function from the history [L, n] to the amax [n]."""
    reduce_amax: bool = True
    """Max-reduce the amax over the amax reduction group, so that all ranks use the same scales."""

    def __post_init__(self) -> None:
        self._require_format("fp8_format", (Format.HYBRID, Format.E4M3), _PER_TENSOR_WHY)
        if not isinstance(self.amax_history_len, int) or self.amax_history_len < 1:
            raise ValueError(
                f"DelayedScaling.amax_history_len={self.amax_history_len!r} must be a whole number from 1."
            )
        if not isinstance(self.margin, int) or abs(self.margin) > 100:
            raise ValueError(f"DelayedScaling.margin={self.margin!r} must be an integer from -100 to 100.")
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"DelayedScaling.amax_compute_algo={self.amax_compute_algo!r} must be max, most_recent or a function."
            )


@dataclass
class Float8CurrentScaling(Recipe):
    """One scale per tensor, from the tensor's own largest magnitude."""

    use_power_2_scales: bool = False
    """Truncate the scale to a power of two."""
    fp8_format: Format = Format.HYBRID

    def __post_init__(self) -> None:
        self._require_format("fp8_format", (Format.HYBRID, Format.E4M3), _PER_TENSOR_WHY)


@dataclass
class Float8BlockScaling(Recipe):
    """One scale per block of 128 values (dim 1) or 128 x 128 values (dim 2)."""

    use_f32_scales: bool = False
    """Keep the FP32 scale instead of truncating it to a power of two."""
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1

    def __post_init__(self) -> None:
        self._require_format("fp8_format", (Format.E4M3,), _BLOCK_WHY)
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        if any(dim not in (1, 2) for dim in dims) or dims.count(2) > 1:
            raise ValueError(
                f"Float8BlockScaling: x, w and grad block_scaling_dim={dims} must each be 1 or 2, and 2 at most once: "
                "every pair of them meets in a matrix product, and no product takes two operands of 128 x 128 blocks."
            )


@dataclass
class MXFP8BlockScaling(Recipe):
    """One power-of-two scale (E8M0) per 32 consecutive values along the summed dim."""

    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    """32 x 32 blocks for weights, so that both directions hold the same values."""

    def __post_init__(self) -> None:
        self._require_format("fp8_format", (Format.E4M3,), _BLOCK_WHY)


@dataclass
class NVFP4BlockScaling(Recipe):
    """FP4 values, one E4M3 scale per 16 of them and one FP32 scale per tensor (arXiv 2509.25149)."""

    disable_rht: bool = False
    """No random Hadamard transform on the operands of the weight gradient."""
    disable_stochastic_rounding: bool = False
    """Round gradients to nearest, too."""
    disable_2d_quantization: bool = False
    """1 x 16 blocks for weights as well."""
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    """Format of the block scales."""

    def __post_init__(self) -> None:
        self._require_format("fp4_format", (Format.E2M1,), "NVFP4 has one value format.")
        self._require_format("fp8_format", (Format.E4M3,), "NVFP4's block scales have one format.")


RECIPES: dict[str, type[Recipe]] = {
    cls.__name__: cls
    for cls in (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)
}


def resolve_recipe_class(name: str) -> type[Recipe]:
    """The class that TE's class path (``transformer_engine.common.recipe.MXFP8BlockScaling``) or bare name stands for.

    Raises:
        ValueError: no such recipe.
    """
    module, _, class_name = name.rpartition(".")
    if module not in ("", TE_RECIPE_MODULE) or class_name not in RECIPES:
        raise ValueError(
            f"Unknown recipe {name!r}: give one of {', '.join(RECIPES)}, alone or after {TE_RECIPE_MODULE!r} and a dot."
        )
    return RECIPES[class_name]
