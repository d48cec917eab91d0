"""The weights of a grouped linear layer, held in a compute format as one parameter [E, O, I].

The reference quantises a stack at once (te_reference/quantized_weight.py). TransformerEngine quantises the weight of
each group by itself, into a tensor of its own; a :class:`StackedWeights` shows these as one, so that DTensor, the
optimiser and checkpoints treat both backends' experts alike: gradients, FP32 masters and moments are one tensor each.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import te_backend
from distributed import local_tensor
from te_reference.quantized_weight import quantize_parameter


Reorder = Callable[[torch.Tensor], torch.Tensor]


@functools.cache
def stacked_weights_class(base: type[torch.Tensor]) -> type[torch.Tensor]:
    """:class:`StackedWeights` as a subclass of ``base``: TE's FusedAdam quantises from masters what is a
    ``QuantizedTensor``."""

    class StackedWeights(base):
        """Groups' quantised weights [O, I] as one [E, O, I]; any operation but writing gets the dequantised values.

        Args:
            weights: E tensors with ``quantize_`` and ``dequantize``. The layer multiplies with these very objects.
            reorder: of the values [E, O, I] that are written: how the layer's kernel wants them; None: as they are.
            restore: its inverse.
        """

        __torch_function__ = torch._C._disabled_torch_function_impl

        @staticmethod
        def __new__(cls, weights: list[torch.Tensor], reorder: Reorder | None = None, restore: Reorder | None = None):
            first = weights[0]
            shape = (len(weights), *first.shape)
            self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
            self._weights, self._reorder, self._restore = weights, reorder, restore
            self._high_precision_init_val = None
            return self

        def __init__(self, *args: Any, **kwargs: Any):
            pass  # made whole by __new__

        def unbind(self, dim: int = 0) -> list[torch.Tensor]:
            """The groups' weights themselves."""
            assert dim == 0, "only along the groups"
            return self._weights

        def detach(self) -> "StackedWeights":
            alias = StackedWeights(self._weights, self._reorder, self._restore)
            alias._high_precision_init_val = self._high_precision_init_val
            return alias

        @torch.no_grad()
        def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
            """The values, as a plain tensor; ``dtype``: None: the shown one."""
            values = torch.stack([weight.dequantize(dtype=dtype or self.dtype) for weight in self._weights])
            return values if self._restore is None else self._restore(values)

        @torch.no_grad()
        def quantize_(self, values: torch.Tensor) -> "StackedWeights":
            """Takes over the values of a plain tensor, group by group."""
            values = values if self._reorder is None else self._reorder(values)
            for weight, value in zip(self._weights, values.unbind(0), strict=True):
                weight.quantize_(value)
            return self

        def get_high_precision_init_val(self) -> torch.Tensor | None:
            """The initial value before it was quantised, on the CPU, if it is kept."""
            return self._high_precision_init_val

        def clear_high_precision_init_val(self) -> None:
            """Frees the initial value."""
            self._high_precision_init_val = None

        def __repr__(self) -> str:
            return f"StackedWeights({list(self.shape)}, {type(self._weights[0]).__name__}, device={self.device})"

        @classmethod
        def __torch_dispatch__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
            target, kwargs = args[0], kwargs or {}
            aten = torch.ops.aten
            same_view = func is aten.view.default and tuple(args[1]) == tuple(target.shape)
            if func in (aten.detach.default, aten.alias.default) or same_view:
                return target.detach()
            plain_args, plain_kwargs = tree_map(_plain, args), tree_map(_plain, kwargs)
            result = func(*plain_args, **plain_kwargs)
            if func._schema.is_mutable and isinstance(target, cls):  # copy_, normal_, fill_, ...
                return target.quantize_(plain_args[0])
            return result

    return StackedWeights


def _plain(value: Any) -> Any:
    return value.dequantize() if hasattr(value, "_weights") else value


def hold_quantized(
    parameter: nn.Parameter,
    operation: nn.Module,
    te: ModuleType,
    recipe: Any,
    preserve: bool,
    reorder: Reorder | None = None,
    restore: Reorder | None = None,
) -> nn.Parameter:
    """The parameter [E, O, I], plain or a DTensor, in the compute format that ``operation`` multiplies with.

    Args:
        operation: the backend's GroupedLinear, built under ``quantized_model_init``; its weights are this parameter's.
        recipe: of the layer.
        preserve: keep the parameter's value on the CPU, too.
        reorder, restore: as in :class:`StackedWeights`; TransformerEngine only.
    """
    if te_backend.is_reference(te):
        operation.reset_recipe_state(recipe=recipe)
        return quantize_parameter(parameter, recipe, operation.scaling_state, preserve)
    local = local_tensor(parameter).detach()
    operation.reset_parameters()  # TE's own way to quantised weights, which have what its kernels rely on
    weights = [getattr(operation, f"weight{index}") for index in range(len(local))]
    quantized_tensor = importlib.import_module("transformer_engine.pytorch.quantized_tensor").QuantizedTensor
    stack = stacked_weights_class(quantized_tensor)(weights, reorder, restore)
    stack.quantize_(local)
    if preserve:
        stack._high_precision_init_val = local.cpu()
    if not isinstance(parameter, DTensor):
        return nn.Parameter(stack)
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return nn.Parameter(DTensor.from_local(stack, mesh, placements, run_check=False, shape=shape, stride=stride))
