"""Initial weights that do not depend on the layout: drawn from a seed, or those of another model.

Every parameter is drawn whole, from a generator seeded by (seed, parameter name), and each rank keeps its shard of it.
So one process, DDP and FSDP2 on any number of ranks, with or without the meta device, start from the same numbers; the
cost is that every rank draws every parameter, one at a time.
"""

import zlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from paths import project_path
from pretrained import load_weights
from quantized_parameters import set_local_values


def initialize_weights(
    model: nn.Module, device: torch.device, seed: int, init_from_pretrained: str | None = None
) -> None:
    """Gives every parameter memory on ``device`` and its initial value: norms 1, matrices N(0, initializer_range).

    Args:
        model: a Hugging Face style model (``config.initializer_range``, ``tie_weights``), sharded or not, on the meta
            device or not.
        device: where the parameters go.
        seed: with the parameter's name, the seed of its values.
        init_from_pretrained: a folder to take all values from instead, see :func:`pretrained.load_weights`.

    Raises:
        ValueError: that folder does not hold this model's parameters.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
        for module in model.modules():
            # Built under quantised init on the meta device: the backend makes the compute format, sharded or not, from
            # values of its own, which are replaced below.
            if getattr(module, "primary_weights_in_fp8", False):
                module.reset_parameters()
        for buffer in model.buffers():  # to_empty left them uninitialised
            buffer.zero_()  # Mixtral's router bias
        for module in model.modules():
            # Hugging Face's RoPE. Not a module with parameters: drawing sharded ones gives all ranks one generator
            # state, and stochastic rounding wants them different.
            if module._buffers and not module._parameters:
                model._init_weights(module)
        model.tie_weights()
    if init_from_pretrained is not None:
        load_weights(model, project_path(init_from_pretrained))
        return
    for name, parameter in model.named_parameters():
        _draw(parameter, name, seed, model.config.initializer_range, device)


@torch.no_grad()
def _draw(parameter: nn.Parameter, name: str, seed: int, std: float, device: torch.device) -> None:
    if parameter.ndim == 1:
        parameter.fill_(1.0)
        return
    generator = torch.Generator(device).manual_seed(seed * 2**32 + zlib.crc32(name.encode()))
    values = torch.empty(parameter.shape, dtype=torch.float32, device=device)
    values = values.normal_(0.0, std, generator=generator).to(parameter.dtype)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        whole = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
        values = whole.redistribute(placements=parameter.placements).to_local()
    set_local_values(parameter, values)
