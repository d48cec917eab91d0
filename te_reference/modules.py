"""Linear layers and norms with TransformerEngine's names, layouts and rounding points.

Legend: T tokens (any leading dims), D model width, F FFN width, O output features.

Weights are [out, in]. ``fc1_weight`` stacks [gate; up]; SwiGLU is silu(gate) * up. Norms and activations compute in
FP32 and round once to the input's dtype (TE's kernels do the same). Sources: transformer_engine/pytorch/module/*.py,
transformer_engine/common/normalization.
"""

import torch
import torch.nn.functional as F
from torch import nn


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in FP32, rounded once to the dtype of ``x_TD``."""
    return F.rms_norm(x_TD.float(), weight_D.shape, weight_D.float(), eps).to(x_TD.dtype)


def swiglu(x_T2F: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dim, in FP32, rounded once to the dtype of the input."""
    gate_TF, up_TF = x_T2F.float().chunk(2, dim=-1)
    return (F.silu(gate_TF) * up_TF).to(x_T2F.dtype)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


class _Module(nn.Module):
    """Parameters with deferred initialisation, as TE's modules have it.

    ``device="meta"`` defers; :meth:`reset_parameters` then initialises whatever memory the parameters were given.
    """

    def reset_parameters(self) -> None:
        """Weights N(0, 0.023), norm weights 1 (TE's defaults)."""
        for name, parameter in self.named_parameters(recurse=False):
            with torch.no_grad():
                parameter.fill_(1.0) if name.endswith("layer_norm_weight") else parameter.normal_(0.0, 0.023)

    def _add(self, name: str, *shape: int, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(*shape, device=device, dtype=dtype)))


class RMSNorm(nn.Module):
    """RMS norm over the last dim; parameter ``weight`` [D]."""

    def __init__(self, normalized_shape: int, eps: float = 1e-5, params_dtype=None, device=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(normalized_shape, device=device, dtype=params_dtype))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(1.0)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TD, self.weight, self.eps)


class Linear(_Module):
    """y = x @ weight.T; parameter ``weight`` [O, D]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, params_dtype=None, device=None):
        super().__init__()
        _require(not bias, "te_reference.Linear has no bias: pass bias=False.")
        self.in_features, self.out_features = in_features, out_features
        self._add("weight", out_features, in_features, device=device, dtype=params_dtype)
        if self.weight.device.type != "meta":
            self.reset_parameters()

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TD, self.weight)


class LayerNormLinear(_Module):
    """Norm, then linear; parameters ``layer_norm_weight`` [D] and ``weight`` [O, D]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        params_dtype=None,
        device=None,
    ):
        super().__init__()
        _require(not bias, "te_reference.LayerNormLinear has no bias: pass bias=False.")
        _require(normalization == "RMSNorm", f"normalization={normalization!r}: te_reference has RMSNorm only.")
        self.eps = eps
        self._add("layer_norm_weight", in_features, device=device, dtype=params_dtype)
        self._add("weight", out_features, in_features, device=device, dtype=params_dtype)
        if self.weight.device.type != "meta":
            self.reset_parameters()

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.linear(rms_norm(x_TD, self.layer_norm_weight, self.eps), self.weight)


class LayerNormMLP(_Module):
    """Norm, SwiGLU MLP; parameters ``layer_norm_weight`` [D], ``fc1_weight`` [2F, D], ``fc2_weight`` [D, F]."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        params_dtype=None,
        device=None,
    ):
        super().__init__()
        _require(not bias, "te_reference.LayerNormMLP has no bias: pass bias=False.")
        _require(normalization == "RMSNorm", f"normalization={normalization!r}: te_reference has RMSNorm only.")
        _require(activation == "swiglu", f"activation={activation!r}: te_reference has swiglu only.")
        self.eps = eps
        self._add("layer_norm_weight", hidden_size, device=device, dtype=params_dtype)
        self._add("fc1_weight", 2 * ffn_hidden_size, hidden_size, device=device, dtype=params_dtype)
        self._add("fc2_weight", hidden_size, ffn_hidden_size, device=device, dtype=params_dtype)
        if self.fc1_weight.device.type != "meta":
            self.reset_parameters()

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        normed_TD = rms_norm(x_TD, self.layer_norm_weight, self.eps)
        return F.linear(swiglu(F.linear(normed_TD, self.fc1_weight)), self.fc2_weight)
