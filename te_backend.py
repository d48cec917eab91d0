"""Which implementation of the TransformerEngine layers a model uses. The only place that asks what is installed.

``resolve`` is called with a config value, never at import. What it returns has the names that the models and the train
scripts use: ``TransformerLayer``, ``MultiheadAttention``, ``LayerNormMLP``, ``RMSNorm``, ``RotaryPositionEmbedding``,
``InferenceParams``, ``autocast``, ``quantized_model_init``, ``checkpoint``, ``optimizers``; for mixtures of experts
``ops``, ``router`` and ``moe_*``.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import te_reference
from te_reference import recipe as reference_recipe


logger = logging.getLogger(__name__)

BACKENDS = ("transformer_engine", "reference")


def unavailable_reason() -> str | None:
    """Why TransformerEngine cannot run here, or None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer_engine is not installed (pip install -r requirements-gpu.txt)"
    return None


@functools.cache
def resolve(name: str = "auto") -> ModuleType:
    """The layer implementation for a ``te_backend`` config value; says once which it is and why.

    Args:
        name: ``auto``, ``transformer_engine`` or ``reference``.

    Raises:
        ValueError: an unknown name, or ``transformer_engine`` where it cannot run.
    """
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"te_backend={name!r} is not one of auto, {', '.join(BACKENDS)}.")
    reason = unavailable_reason() if name != "reference" else "te_backend=reference"
    if name == "transformer_engine" and reason:
        raise ValueError(f"te_backend=transformer_engine cannot run here: {reason}. Use te_backend=reference or auto.")
    if reason:
        logger.info("TE backend: te_reference (plain PyTorch): %s", reason)
        return te_reference
    logger.info("TE backend: TransformerEngine %s", importlib.metadata.version("transformer_engine"))
    te = importlib.import_module("transformer_engine.pytorch")
    importlib.import_module("transformer_engine.pytorch.router")  # te.router: TE does not import it by itself
    _quantize_groups_with_the_faster_kernel()
    _let_quantizers_keep_their_group()
    return te


def _quantize_groups_with_the_faster_kernel() -> None:
    """Under delayed scaling TE 2.20.2 casts and transposes all groups of a grouped product in one launch, which moves
    1.3 TB/s on an H200 where its kernel for one tensor moves 3.3; the results are equal. One group without rows more
    makes it launch the latter for each. Goes when the one launch is as fast (benchmarks/bench_mixtral.py te_fp8).
    """
    tex = importlib.import_module("transformer_engine_torch")
    quantizer_class = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor").Float8Quantizer
    split_quantize = tex.split_quantize

    def split_quantize_each(tensor: torch.Tensor, rows: list[int], quantizers: list, **kwargs: Any) -> list:
        if not isinstance(quantizers[0], quantizer_class):
            return split_quantize(tensor, rows, quantizers, **kwargs)
        return split_quantize(tensor, [*rows, 0], [*quantizers, quantizers[0]], **kwargs)[:-1]

    tex.split_quantize = split_quantize_each


def layer_device() -> str:
    """Where a layer built now belongs: torch's default device, as a string (TE defers only for the string ``meta``)."""
    return str(torch.get_default_device())


def is_reference(te: ModuleType) -> bool:
    """Whether a resolved implementation is the plain PyTorch one."""
    return te is te_reference


def recipe_module(te: ModuleType) -> ModuleType:
    """Where a resolved implementation keeps its low-precision recipes: the same class names and fields in both."""
    return reference_recipe if is_reference(te) else importlib.import_module("transformer_engine.common.recipe")


def share_current_scales(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Under Float8CurrentScaling the inputs of a linear layer, and the gradients of its outputs, get one scale on all
    ranks of ``group``, which hold different tokens of the same sequences. Other recipes and modules are as before.

    Args:
        module: of a layer of either implementation.
    """
    if hasattr(module, "amax_reduction_group"):  # the reference's linear layers
        module.amax_reduction_group = group
    if not hasattr(module, "set_meta_tensor") or all(p.ndim != 2 for p in module.parameters(recurse=False)):
        return  # no linear layer of TE's
    set_meta_tensor = module.set_meta_tensor

    def set_meta_tensor_and_group(fwd: bool, recipe: Any) -> None:
        set_meta_tensor(fwd, recipe)
        # Per product input, weight and output; or the gradients of output and input.
        key, tensors = ("scaling_fwd", 3) if fwd else ("scaling_bwd", 2)
        for quantizer in module.quantizers[key][::tensors]:
            if type(quantizer).__name__ == "Float8CurrentScalingQuantizer":
                quantizer.own_amax_reduction_group = group
                quantizer.amax_reduction_group, quantizer.with_amax_reduction = group, True

    module.set_meta_tensor = set_meta_tensor_and_group


def _let_quantizers_keep_their_group() -> None:
    """TE 2.20.2 sets the group over which a quantiser reduces its amax before every use, from its tensor-parallel
    options; without them it must stay what :func:`share_current_scales` set. Goes when TE has an option for that."""
    for name in ("linear", "layernorm_linear", "layernorm_mlp"):
        module = importlib.import_module(f"transformer_engine.pytorch.module.{name}")
        original = module.set_quantizer_amax_reduction_group

        def keep(quantizer: Any, group: dist.ProcessGroup | None, original: Callable = original) -> None:
            if group is None:
                group = getattr(getattr(quantizer, "parent_quantizer", quantizer), "own_amax_reduction_group", None)
            original(quantizer, group)

        module.set_quantizer_amax_reduction_group = keep
