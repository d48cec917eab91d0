"""What low precision keeps between steps: parameters held in a compute format, and the state of delayed scaling.

A parameter is quantised if the tensor that this rank holds is: TransformerEngine's ``QuantizedTensor`` or the
reference's ``QuantizedWeight``, plain or inside FSDP2's DTensor. Both have ``quantize_(values)`` and ``dequantize()``.

Its FP32 master copy in the optimiser is the parameter; what the module holds follows from it, bit for bit, by
quantising. So a checkpoint keeps the master only, and reads into any layout and any number of ranks, which the formats
themselves do not allow (blocks do not cut everywhere).

Delayed scaling is the only recipe with state: per linear layer scales and amax histories of input, weight and output
gradient, the same on all ranks once reduced; an expert's are where the expert is. TE's modules pickle them into
``_extra_state``, whose size varies; here the tensors themselves are saved.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distributed import local_tensor
from precision import PrecisionPlan


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether this rank holds the tensor in a compute format."""
    return hasattr(local_tensor(tensor), "quantize_")


@torch.no_grad()
def dequantized(tensor: torch.Tensor) -> torch.Tensor:
    """The values that a quantised tensor stands for, in the dtype that it shows; any other tensor as it is. Sharded
    stays sharded."""
    if not is_quantized(tensor):
        return tensor
    values = local_tensor(tensor).dequantize()
    if not isinstance(tensor, DTensor):
        return values
    return DTensor.from_local(
        values,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@torch.no_grad()
def set_local_values(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Writes this rank's part of a parameter: quantising it where it is quantised, and replacing the high-precision
    initial value where one is kept.

    Args:
        values: of the local tensor's shape, in the parameter's dtype.
    """
    local = local_tensor(parameter)
    if not is_quantized(parameter):
        local.copy_(values)
        return
    local.quantize_(values)
    kept = _initial_value(local)
    if kept is not None:
        kept.copy_(values)


def _initial_value(local: torch.Tensor) -> torch.Tensor | None:
    """The high-precision initial value (on the CPU) that a quantised tensor keeps, if any."""
    getter = getattr(local, "get_high_precision_init_val", None)
    return None if getter is None else getter()


@torch.no_grad()
def seed_masters(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Starts the masters of quantised parameters from the initial values that these had before they were quantised,
    where those were kept (``preserve_high_precision_init_val``), and frees these. Otherwise a master starts from the
    quantised value.

    Args:
        optimizer: FusedAdam with master weights.

    Returns:
        How many parameters kept their initial value.
    """
    count = 0
    for parameter in parameters:
        local = local_tensor(parameter)
        value = _initial_value(local)
        if value is not None:
            optimizer.initialize_state(parameter, store_param_remainders=False)
            optimizer.set_scaled_state(parameter, "master_param", value.to(local.device, torch.float32))
            local.clear_high_precision_init_val()
            count += 1
    return count


@torch.no_grad()
def requantize_from_masters(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Sets every quantised parameter to what its master makes it, as the optimiser does after an update.

    A collective over FSDP2's ranks under current scaling: all call it, with the parameters in the same order.
    """
    for parameter in parameters:
        if is_quantized(parameter):
            local_tensor(parameter).quantize_(local_tensor(optimizer.state[parameter]["master_param"]))


def drop_stale_transposes(parameters: Iterable[nn.Parameter]) -> None:
    """To be called after every update by TE's FusedAdam.

    Before Blackwell, TE's per-tensor FP8 weights cache their transpose for the input gradient. FusedAdam's kernel for
    delayed scaling writes the payload behind the tensor's back and leaves the cache as it is, so that the input
    gradient would go on with the weights of the first step. Goes when TE's fused_adam.py (2.20.2) resets the caches.
    """
    for parameter in parameters:
        reset = getattr(local_tensor(parameter), "_reset_caches", None)
        if reset is not None:
            reset()


def low_precision_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """(name, layer, recipe) of every decoder layer that has a recipe."""
    for name, module in model.named_modules():
        plan = getattr(module, "precision", None)
        if isinstance(plan, PrecisionPlan):
            for index, (layer, recipe) in enumerate(zip(module.layers, plan.recipes, strict=True)):
                if recipe is not None:
                    yield f"{name}.layers.{index}".removeprefix("."), layer, recipe


def delayed_scaling_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Scales and amax histories (FP32, shared memory) of all linear layers with delayed scaling, by name; those of
    experts spread over ranks are DTensors.

    Makes them where the module has not run yet: they are loaded before it does.
    """
    tensors = {}
    for layer_name, layer, recipe in low_precision_layers(model):
        if not recipe.delayed():
            continue
        for name, module in layer.named_modules():
            if hasattr(module, "scaling_tensors"):
                named = module.scaling_tensors().items()
                tensors |= {f"{layer_name}.{name}.{key}": tensor for key, tensor in named}
            num_weights = sum(parameter.ndim == 2 for parameter in module.parameters(recurse=False))
            if not num_weights or not hasattr(module, "init_fp8_meta_tensors"):
                continue
            module.fp8_meta.setdefault("num_gemms", num_weights)  # TE sets it in the first forward pass
            module.init_fp8_meta_tensors(recipe)
            for key, state in module.fp8_meta.items():
                if hasattr(state, "amax_history"):
                    tensors[f"{layer_name}.{name}.{key}.scale"] = state.scale
                    tensors[f"{layer_name}.{name}.{key}.amax_history"] = state.amax_history
    return tensors


@contextmanager
def unchanged_scales(model: nn.Module) -> Iterator[None]:
    """For validation: its forward passes record the amaxes of their tensors, too; they must not scale later training
    steps, or a run would depend on when it validates."""
    tensors = delayed_scaling_tensors(model)
    histories = [local_tensor(tensor) for name, tensor in tensors.items() if name.endswith(".amax_history")]
    current = [history[0].clone() for history in histories]
    try:
        yield
    finally:
        for history, amax in zip(histories, current):
            history[0] = amax
