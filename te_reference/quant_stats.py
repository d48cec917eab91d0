"""How well a quantised tensor holds its original: the statistics that TE logs, under its names.

| name | meaning |
|---|---|
| underflows% | values that are not 0 and became 0, percent of all values |
| overflows% | values beyond the format's largest value, percent (DelayedScaling only: its scale may be too large) |
| mse | mean squared difference of the dequantised values from the original |
| scale_inv_min, scale_inv_max | smallest and largest stored scale other than 0; for MXFP8 the E8M0 exponent codes |
| cur_amax | largest magnitude of the original |

Sums and extremes are kept rather than ratios, so that micro-batches and ranks merge exactly.

Sources: transformer_engine/debug/features/log_fp8_tensor_stats.py, log_nvfp4_tensor_stats.py,
utils/stats_computation.py.
"""

from dataclasses import dataclass

import torch

from te_reference.emulation import Operands, QuantizedTensor, block_amax
from te_reference.formats import FLOAT8_MAX
from te_reference.recipe import Recipe


STAT_PREFIXES = {
    "DelayedScaling": "fp8_delayed_scaling",
    "Float8CurrentScaling": "fp8_current_scaling",
    "Float8BlockScaling": "fp8_block_scaling",
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4",
}
"""What TE puts before a statistic's name, with an underscore, to say which recipe it is of."""


@dataclass(frozen=True)
class QuantStats:
    """Statistics of one tensor, or of several merged. All fields are FP64 tensors [], on the tensor's device."""

    numel: torch.Tensor
    underflows: torch.Tensor
    overflows: torch.Tensor | None
    """None: the recipe's scales leave nothing to overflow."""
    squared_error: torch.Tensor
    scale_inv_min: torch.Tensor
    scale_inv_max: torch.Tensor
    cur_amax: torch.Tensor

    def merge(self, other: "QuantStats") -> "QuantStats":
        """The statistics of both together."""
        return QuantStats(
            numel=self.numel + other.numel,
            underflows=self.underflows + other.underflows,
            overflows=None if self.overflows is None else self.overflows + other.overflows,
            squared_error=self.squared_error + other.squared_error,
            scale_inv_min=torch.minimum(self.scale_inv_min, other.scale_inv_min),
            scale_inv_max=torch.maximum(self.scale_inv_max, other.scale_inv_max),
            cur_amax=torch.maximum(self.cur_amax, other.cur_amax),
        )

    def values(self) -> dict[str, float]:
        """The statistics by name. Synchronises with the device."""
        values = {
            "underflows%": 100 * self.underflows / self.numel,
            "mse": self.squared_error / self.numel,
            "scale_inv_min": self.scale_inv_min,
            "scale_inv_max": self.scale_inv_max,
            "cur_amax": self.cur_amax,
        }
        if self.overflows is not None:
            values["overflows%"] = 100 * self.overflows / self.numel
        return {name: value.item() for name, value in values.items()}


@torch.no_grad()
def measure(x_RC: torch.Tensor, operands: Operands, recipe: Recipe, columnwise: bool = False) -> QuantStats:
    """Compares a matrix with its row-wise or column-wise quantised copy.

    Args:
        x_RC: the matrix before quantisation (:func:`emulated_linear`'s observer gets both).
        operands: its quantised copies.
        recipe: the recipe that made them.
        columnwise: measure the copy with blocks along the first dim.

    Raises:
        ValueError: that copy was not made; the tensor is empty; or NVFP4's column-wise copy is asked for, which holds
            the Hadamard transform of the matrix, not the matrix.
    """
    if columnwise and recipe.nvfp4():
        raise ValueError("columnwise=True: NVFP4's column-wise copy is Hadamard-transformed; measure the row-wise one.")
    quantized = operands.columnwise if columnwise else operands.rowwise
    if quantized is None:
        raise ValueError(f"The {'column' if columnwise else 'row'}-wise copy was not made: nothing to measure.")
    if not x_RC.numel():
        raise ValueError(f"A tensor of shape {list(x_RC.shape)} has no values to measure.")

    x_RC = x_RC.float()
    count = torch.tensor(x_RC.numel(), dtype=torch.float64, device=x_RC.device)
    stored = quantized.scale_inv.double()
    nonzero = stored[stored != 0]
    return QuantStats(
        numel=count,
        underflows=(x_RC.count_nonzero() - quantized.data.float().count_nonzero()).double(),
        overflows=_overflows(x_RC, quantized) if recipe.delayed() else None,
        squared_error=(x_RC - quantized.dequantize()).double().square().sum(),
        scale_inv_min=nonzero.min() if nonzero.numel() else stored.new_zeros(()),
        scale_inv_max=stored.max(),
        cur_amax=block_amax(x_RC, None).double(),
    )


def _overflows(x_RC: torch.Tensor, quantized: QuantizedTensor) -> torch.Tensor:
    return (x_RC.abs() > FLOAT8_MAX[quantized.data.dtype] * quantized.scale_inv).sum().double()
