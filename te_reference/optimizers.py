"""``transformer_engine.pytorch.optimizers.FusedAdam`` in plain PyTorch: AdamW in FP32 for any float parameters.

With g the gradient, t the step (one counter per parameter group), and everything in FP32::

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    w = w - lr (weight_decay w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))

``w`` is the master copy of a BF16 or FP16 parameter if ``master_weights`` is set (the parameter becomes its rounded
value), else the parameter itself. BF16 keeps 8 significant bits: without a master, an update below 1/512 of a weight is
rounded away. The state has TE's names: ``exp_avg``, ``exp_avg_sq``, ``master_param``, all FP32, DTensors where the
parameter is one. An FP32 parameter is its own master and has no ``master_param`` (TE keeps a copy of its initial value
that it never updates).

A parameter that is held in a compute format (quantized_weight.py) is quantised anew from its master after every update.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from te_reference.quantized_weight import QuantizedWeight


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW with FP32 state, as TE's class of this name with its defaults.

    Args:
        params: parameters or parameter groups; FP32, BF16, FP16 or quantised, plain or DTensor.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        master_weights: keep an FP32 copy of every parameter of a lower precision.
        master_weight_dtype: torch.float32, the only master dtype that is emulated.

    Raises:
        ValueError: another master dtype; later, quantised parameters without ``master_weights``.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
    ):
        if master_weight_dtype != torch.float32:
            raise ValueError(
                f"master_weight_dtype={master_weight_dtype}: te_reference keeps masters in torch.float32 only."
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.master_weights = master_weights

    @torch.no_grad()
    def initialize_state(self, param: torch.nn.Parameter, store_param_remainders: bool) -> None:
        """Zero moments and, where one is kept, the master: the parameter's present value in FP32.

        Raises:
            ValueError: ``store_param_remainders`` (TE's 16-bit masters) is set.
        """
        if store_param_remainders:
            raise ValueError("store_param_remainders=True: te_reference keeps whole FP32 masters only.")
        state = self.state[param]
        state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
        state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        quantized = isinstance(_local(param), QuantizedWeight)
        if quantized and not self.master_weights:
            raise ValueError("quantised parameters need master_weights=True: an update is smaller than their steps.")
        if quantized or (self.master_weights and param.dtype != torch.float32):
            state["master_param"] = torch.zeros_like(param, dtype=torch.float32)
            value = _local(param.detach())
            _local(state["master_param"]).copy_(value.dequantize(torch.float32) if quantized else value)

    @torch.no_grad()
    def set_scaled_state(self, param: torch.nn.Parameter, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Sets ``exp_avg``, ``exp_avg_sq`` or ``master_param`` of an initialised parameter.

        Args:
            unscaled_state: FP32; this rank's shard, where the parameter is a DTensor.
        """
        _local(self.state[param][state_name]).copy_(unscaled_state)

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One update of every parameter that has a gradient; returns the closure's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, store_param_remainders=False)
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[torch.nn.Parameter]) -> None:
        weights, rounded_params, rounded_weights, quantized = [], [], [], []
        for param in params:
            weight = _local(self.state[param].get("master_param", param.detach()))
            if weight.dtype != torch.float32:
                weight = weight.float()
            if isinstance(_local(param), QuantizedWeight):
                quantized.append((_local(param), weight))
            elif param.dtype != torch.float32:
                rounded_params.append(_local(param.detach()))
                rounded_weights.append(weight)
            weights.append(weight)
        # The kernel counts the steps itself, in one float per parameter.
        steps = torch.full((len(params),), group["step"] - 1.0, device=weights[0].device).unbind()
        adamw(
            weights,
            [_local(param.grad).float() for param in params],
            [_local(self.state[param]["exp_avg"]) for param in params],
            [_local(self.state[param]["exp_avg_sq"]) for param in params],
            [],
            list(steps),
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if rounded_params:
            torch._foreach_copy_(rounded_params, rounded_weights)
        for local_param, weight in quantized:  # in the same order on every rank: a shard's scale may take a reduction
            local_param.quantize_(weight)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the state stays FP32: torch casts it to the parameter's dtype, and would so ruin masters."""
        super().load_state_dict(state_dict)
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, param in zip(keys, params, strict=True):
            if key in state_dict["state"]:
                saved = state_dict["state"][key]
                self.state[param] = {name: value.detach().to(param.device).clone() for name, value in saved.items()}
