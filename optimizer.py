"""The optimiser: AdamW, with FP32 master weights if asked for."""

import logging
from types import ModuleType

import torch
from torch import nn

from config import TrainConfig
from distributed import global_grad_norm, local_tensor
from phases import phase
from quantized_parameters import drop_stale_transposes, is_quantized, seed_masters


logger = logging.getLogger(__name__)


def build_optimizer(model: nn.Module, config: TrainConfig, te: ModuleType) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; call it after sharding, when the parameters are those that will be trained.

    Weight decay applies to matrices (2 or more dims) only, not to norm weights.

    ``use_fp32_master_weights`` needs FP32 copies only where parameters are not FP32 themselves: ``te.FusedAdam``
    then, else torch's AdamW. Parameters held in a compute format (quantised init) always have FP32 masters: there is
    nothing else that a small update could be added to. Both run one fused kernel over all parameters, on the CPU (6
    times faster there than one operation after the other) as on a GPU, on DTensors as on plain tensors.

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
    quantized = [param for param in params if is_quantized(param)]
    if config.use_fp32_master_weights or quantized:
        if quantized or any(param.dtype != torch.float32 for param in params):
            logger.info("optimizer: FusedAdam with FP32 master weights")
            optimizer = te.optimizers.FusedAdam(
                groups, **options, master_weights=True, master_weight_dtype=torch.float32
            )
            seeded = seed_masters(quantized, optimizer)
            if quantized:
                optimizer.register_step_post_hook(lambda *_: drop_stale_transposes(quantized))
                logger.info(
                    "optimizer: %d parameters are quantised; %d masters start from high-precision initial values",
                    len(quantized),
                    seeded,
                )
            return optimizer
        logger.info(
            "optimizer: the parameters are FP32 and so their own masters; use_fp32_master_weights adds no copies"
        )
    return AdamW(groups, **options, fused=True)


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW that divides the gradients by ``grad_scale`` as it reads them.

    ``grad_scale`` is the hook that torch has for loss scaling; here it carries the clipping divisor. On a GPU the
    update is our own kernel (optimizer_kernel.py), with the same state under the same names.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        if not params[0].is_cuda:
            super().step()
            return
        from optimizer_kernel import adamw_, bias_corrections  # Triton comes with torch's CUDA builds only

        initialize_state(self)
        divisor = torch.ones((), device=params[0].device) if self.grad_scale is None else self.grad_scale
        torch._foreach_add_([self.state[param]["step"] for param in params], 1.0)
        for group in self.param_groups:
            trained = [param for param in group["params"] if param.grad is not None]
            if not trained:
                continue
            corrections = bias_corrections([self.state[param]["step"] for param in trained], group["betas"])
            for param, correction in zip(trained, corrections.unbind(), strict=True):
                state = self.state[param]
                tensors = [local_tensor(t) for t in (param, param.grad, state["exp_avg"], state["exp_avg_sq"])]
                if tensors[0].numel():
                    adamw_(*tensors, correction, divisor, group)


@torch.no_grad()
def clip_and_step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_grad_norm: float
) -> torch.Tensor:
    """Scales all gradients by min(1, max_grad_norm / norm), then updates the parameters. Never waits for the device.

    AdamW scales them as it reads them, which saves a pass over all of them; for FusedAdam they are scaled first.

    Args:
        max_grad_norm: 0: no clipping.

    Returns:
        The global norm before clipping: FP32 scalar.
    """
    with phase("gradient norm"):
        norm = global_grad_norm(parameters)
        divisor = ((norm + 1e-6) / max_grad_norm).clamp_(min=1.0) if max_grad_norm > 0 else torch.ones_like(norm)
        if isinstance(optimizer, AdamW):
            optimizer.grad_scale = divisor
        elif max_grad_norm > 0:
            grads = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
            torch._foreach_mul_(grads, divisor.reciprocal())
    with phase("optimiser"):
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
