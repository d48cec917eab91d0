"""The optimiser: AdamW, with FP32 master weights if asked for."""

import logging
from types import ModuleType

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from config import TrainConfig
from distributed import global_grad_norm


logger = logging.getLogger(__name__)


def build_optimizer(model: nn.Module, config: TrainConfig, te: ModuleType) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; call it after sharding, when the parameters are those that will be trained.

    Weight decay applies to matrices (2 or more dims) only, not to norm weights.

    ``use_fp32_master_weights`` needs FP32 copies only where parameters are not FP32 themselves: ``te.FusedAdam``
    then, else torch's AdamW. Both run one fused kernel over all parameters, on the CPU (6 times faster there than one
    operation after the other) as on a GPU, on DTensors as on plain tensors.

    Args:
        te: the layer backend of ``te_backend.resolve``, for its ``FusedAdam``.

    Raises:
        ValueError: the model has no trainable parameter.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise ValueError(f"{type(model).__name__} has no trainable parameter: nothing to optimise.")
    adamw = config.adamw_kwargs
    groups = [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": adamw.weight_decay},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options = {"lr": adamw.lr, "betas": tuple(adamw.betas), "eps": adamw.eps}
    if config.use_fp32_master_weights:
        if any(param.dtype != torch.float32 for param in params):
            logger.info("optimizer: FusedAdam with FP32 master weights")
            return te.optimizers.FusedAdam(groups, **options, master_weights=True, master_weight_dtype=torch.float32)
        logger.info(
            "optimizer: the parameters are FP32 and so their own masters; use_fp32_master_weights adds no copies"
        )
    return torch.optim.AdamW(groups, **options, fused=True)


@torch.no_grad()
def clip_and_step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_grad_norm: float
) -> torch.Tensor:
    """Scales all gradients by min(1, max_grad_norm / norm), then updates the parameters. Never waits for the device.

    torch's fused AdamW scales the gradients as it reads them, through the hook that is there for loss scaling: one pass
    over all of them less. FusedAdam has no such hook: there they are scaled first.

    Args:
        max_grad_norm: 0: no clipping.

    Returns:
        The global norm before clipping: FP32 scalar.
    """
    norm = global_grad_norm(parameters)
    if max_grad_norm > 0:
        divisor = ((norm + 1e-6) / max_grad_norm).clamp_(min=1.0)
        if isinstance(optimizer, torch.optim.AdamW):
            optimizer.grad_scale, optimizer.found_inf = divisor, None
        else:
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
            torch._foreach_mul_(local, divisor.reciprocal())
    optimizer.step()
    return norm


@torch.no_grad()
def initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives every parameter that has no state yet the state that its first step would start from.

    Weights, gradients and step counts stay as they are. For checkpoints, which are loaded into tensors that are there.

    Raises:
        TypeError: neither torch's AdamW nor FusedAdam.
    """
    fused_adam = hasattr(optimizer, "initialize_state")  # TE's class or the reference's
    if not fused_adam and not isinstance(optimizer, torch.optim.AdamW):
        raise TypeError(f"{type(optimizer).__name__}: only torch.optim.AdamW and FusedAdam can be checkpointed.")
    for group in optimizer.param_groups:
        if fused_adam:
            group.setdefault("step", 0)
        for param in group["params"]:
            if optimizer.state[param]:
                continue
            if fused_adam:
                optimizer.initialize_state(param, store_param_remainders=False)
            else:
                step_device = param.device if group["fused"] else "cpu"
                optimizer.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=step_device),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
