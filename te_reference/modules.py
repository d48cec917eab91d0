"""Linear layers and norms with TransformerEngine's names, layouts and rounding points, in the precision of the scope.

Legend: T tokens (any leading dims), D model width, F FFN width, O output features.

Weights are [out, in]. ``fc1_weight`` stacks [gate; up]; SwiGLU is silu(gate) * up. Norms and activations compute in
FP32 and round once to the input's dtype (TE's kernels do the same), or hand FP32 to the quantiser. Sources:
transformer_engine/pytorch/module/*.py, transformer_engine/common/normalization.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from te_reference.context import current_scope, current_weight_init
from te_reference.delayed_scaling import AmaxTracker, DelayedScalingState
from te_reference.emulated_linear import emulated_linear
from te_reference.emulation import Operands, quantize
from te_reference.quantized_weight import QuantizedWeight, quantize_parameter
from te_reference.recipe import Recipe


class _RMSNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + eps), n = x r and h = g w: dx = r (h - n mean(h n)), dw = sum of g n over tokens.

    torch decomposes its rms_norm into twice as many passes on a CPU.
    """

    @staticmethod
    def forward(ctx, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        x = x_TD.float()
        r_T1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_TD, weight_D, r_T1)
        return (x * r_T1).mul_(weight_D.float())

    @staticmethod
    def backward(ctx, grad_TD: torch.Tensor):
        x_TD, weight_D, r_T1 = ctx.saved_tensors
        n_TD = x_TD.float() * r_T1
        gn_TD = grad_TD * n_TD
        grad_weight_D = gn_TD.flatten(0, -2).sum(0)
        mean_T1 = (gn_TD @ weight_D.float()).div_(x_TD.shape[-1]).unsqueeze(-1)
        grad_x_TD = torch.addcmul(grad_TD * weight_D.float(), n_TD, mean_T1, value=-1).mul_(r_T1)
        return grad_x_TD.to(x_TD.dtype), grad_weight_D.to(weight_D.dtype), None


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight: FP32, not rounded yet."""
    return _RMSNorm.apply(x_TD, weight_D, eps)


class _SwiGLU(torch.autograd.Function):
    """Writes both halves of the gradient where they belong: no concatenation."""

    @staticmethod
    def forward(ctx, x_T2F: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = x_T2F.float().chunk(2, dim=-1)
        activated_TF = F.silu(gate_TF)
        ctx.save_for_backward(x_T2F, activated_TF)
        return activated_TF * up_TF

    @staticmethod
    def backward(ctx, grad_TF: torch.Tensor) -> torch.Tensor:
        x_T2F, activated_TF = ctx.saved_tensors
        gate_TF, up_TF = x_T2F.float().chunk(2, dim=-1)
        grad_T2F = torch.empty(x_T2F.shape, dtype=torch.float32, device=x_T2F.device)
        grad_gate_TF, grad_up_TF = grad_T2F.chunk(2, dim=-1)
        torch.mul(grad_TF, activated_TF, out=grad_up_TF)
        torch.ops.aten.silu_backward.grad_input(grad_TF * up_TF, gate_TF, grad_input=grad_gate_TF)
        return grad_T2F.to(x_T2F.dtype)


def swiglu(x_T2F: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dim: FP32, not rounded yet."""
    return _SwiGLU.apply(x_T2F)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# What :attr:`_Module.observer` is called with: which linear layer of the module ("", "fc1", "fc2"), role, matrix in
# high precision, its quantised copies, recipe.
ModuleObserver = Callable[[str, str, torch.Tensor, Operands, Recipe], None]


class _Module(nn.Module):
    """Parameters with deferred initialisation, and linear layers in the precision of the scope.

    ``device="meta"`` defers; :meth:`reset_parameters` then initialises whatever memory the parameters were given, and
    quantises it if the module was built under ``quantized_model_init``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, AmaxTracker] = {}
        """Delayed scaling: scales and amax histories, made on first use."""
        self.observer: ModuleObserver | None = None
        """Sees every quantisation of a training step (quant_stats)."""
        self.amax_reduction_group: dist.ProcessGroup | None = None
        """Current scaling: ranks that hold other tokens of the same sequences; inputs and gradients have one scale over
        them all. None: this rank's own."""
        self._weight_init = current_weight_init()
        self._states: dict[str, DelayedScalingState] = {}
        self._kept_weights: dict[str, Operands] = {}

    @property
    def linear_names(self) -> list[str]:
        """Its linear layers: ``""`` alone, or ``fc1`` and ``fc2``."""
        return [_layer_name(name) for name, parameter in self.named_parameters(recurse=False) if parameter.ndim == 2]

    @property
    def primary_weights_in_fp8(self) -> bool:
        """Whether the weights are held in a compute format only (TE's name, for FP4 as well)."""
        return self._weight_init is not None

    def reset_parameters(self) -> None:
        """Weights N(0, 0.023), norm weights 1 (TE's defaults)."""
        for name, parameter in list(self.named_parameters(recurse=False)):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            with torch.no_grad():
                local.fill_(1.0) if name.endswith("layer_norm_weight") else local.normal_(0.0, 0.023)
            if self._weight_init is not None and parameter.ndim == 2:
                recipe, preserve = self._weight_init.recipe, self._weight_init.preserve_high_precision_init_val
                state = self._state(name, recipe) if recipe.delayed() else None
                setattr(self, name, quantize_parameter(parameter, recipe, state, preserve))

    def init_fp8_meta_tensors(self, recipe: Recipe) -> None:
        """Makes the state of delayed scaling, if the recipe has any: before it is loaded, for example."""
        for name, parameter in self.named_parameters(recurse=False):
            if recipe.delayed() and parameter.ndim == 2:
                self._state(name, recipe)

    def _add(self, name: str, *shape: int, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(*shape, device=device, dtype=dtype)))

    def _initialize(self) -> None:
        """Ends every ``__init__``."""
        if all(parameter.device.type != "meta" for parameter in self.parameters(recurse=False)):
            self.reset_parameters()

    def _linear(
        self, x_TD: torch.Tensor, weight_name: str, dtype: torch.dtype, is_first_microbatch: bool | None
    ) -> torch.Tensor:
        """x @ weight.T in the scope's precision.

        Args:
            x_TD: in ``dtype``, or FP32 not yet rounded to it.
            weight_name: of a parameter of ``dtype``.
            dtype: of the result.
            is_first_microbatch: None: quantise the weight; True: quantise and keep it; False: take the kept one.
        """
        weight_OD = getattr(self, weight_name)
        _require(
            weight_OD.dtype == dtype,
            f"{type(self).__name__}: activations are {dtype} and {weight_name} is {weight_OD.dtype}: cast one of them.",
        )
        scope = current_scope()
        if scope.recipe is None:
            return F.linear(x_TD.to(dtype), weight_OD)
        state = self._state(weight_name, scope.recipe) if scope.recipe.delayed() else None
        observe = None
        if self.observer is not None and torch.is_grad_enabled() and not scope.replaying:
            layer = _layer_name(weight_name)

            def observe(role: str, matrix: torch.Tensor, operands: Operands) -> None:
                self.observer(layer, role, matrix, operands, scope.recipe)

        quantized_weight = None
        if isinstance(weight_OD, QuantizedWeight):
            self._check_recipe(weight_OD, scope.recipe)
            quantized_weight = weight_OD.operands
            if observe is not None:
                observe("weight", weight_OD.dequantize(), quantized_weight)
        elif is_first_microbatch is not None:
            if is_first_microbatch and not scope.replaying:
                self._kept_weights[weight_name] = quantize(weight_OD.detach(), scope.recipe, "weight", state=state)
                if observe is not None:
                    observe("weight", weight_OD.detach(), self._kept_weights[weight_name])
            quantized_weight = self._kept_weights[weight_name]
        return emulated_linear(
            x_TD,
            weight_OD,
            scope.recipe,
            state,
            activation_dtype=dtype,
            quantized_weight=quantized_weight,
            observer=observe,
            after_backward=scope.join(state) if state is not None else None,
            amax_reduction_group=self.amax_reduction_group,
        )

    def _state(self, weight_name: str, recipe: Recipe) -> DelayedScalingState:
        if weight_name not in self._states:
            state = DelayedScalingState(recipe, getattr(self, weight_name).device)
            prefix = _layer_name(weight_name) + "_" if _layer_name(weight_name) else ""
            self.fp8_meta |= {f"{prefix}scaling_fwd": state.forward, f"{prefix}scaling_bwd": state.backward}
            self._states[weight_name] = state
        return self._states[weight_name]

    def _check_recipe(self, weight: QuantizedWeight, recipe: Recipe) -> None:
        _require(
            weight.quantizer.recipe == recipe,
            f"{type(self).__name__}: its weights are held for {weight.quantizer.recipe}, autocast asks for {recipe}: "
            "use one recipe for both.",
        )


def _layer_name(weight_name: str) -> str:
    """``fc1`` of ``fc1_weight``, nothing of ``weight``."""
    return weight_name.removesuffix("weight").removesuffix("_")


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
        return rms_norm(x_TD, self.weight, self.eps).to(x_TD.dtype)


class Linear(_Module):
    """y = x @ weight.T; parameter ``weight`` [O, D]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, params_dtype=None, device=None):
        super().__init__()
        _require(not bias, "te_reference.Linear has no bias: pass bias=False.")
        self.in_features, self.out_features = in_features, out_features
        self._add("weight", out_features, in_features, device=device, dtype=params_dtype)
        self._initialize()

    def forward(self, x_TD: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        return self._linear(x_TD, "weight", x_TD.dtype, is_first_microbatch)


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
        self._initialize()

    def forward(self, x_TD: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        normed_TD = rms_norm(x_TD, self.layer_norm_weight, self.eps)
        return self._linear(normed_TD, "weight", x_TD.dtype, is_first_microbatch)


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
        self._initialize()

    def forward(self, x_TD: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        normed_TD = rms_norm(x_TD, self.layer_norm_weight, self.eps)
        hidden_T2F = self._linear(normed_TD, "fc1_weight", x_TD.dtype, is_first_microbatch)
        return self._linear(swiglu(hidden_T2F), "fc2_weight", x_TD.dtype, is_first_microbatch)
