"""Contexts and wrappers of ``transformer_engine.pytorch``: low-precision scope, quantised init, recomputation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint


@contextmanager
def autocast(enabled: bool = True, recipe: Any = None) -> Iterator[None]:
    """Low-precision scope. Only the high-precision scope (``enabled=False``) exists so far.

    Raises:
        NotImplementedError: a low-precision scope is asked for.
    """
    if enabled:
        raise NotImplementedError(f"autocast(enabled=True, recipe={recipe}): low precision is not emulated yet.")
    yield


@contextmanager
def quantized_model_init(enabled: bool = True, recipe: Any = None) -> Iterator[None]:
    """Scope in which modules hold quantised parameters. Only ``enabled=False`` exists so far.

    Raises:
        NotImplementedError: quantised parameters are asked for.
    """
    if enabled:
        raise NotImplementedError(f"quantized_model_init(enabled=True, recipe={recipe}): not emulated yet.")
    yield


def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Runs ``function`` without keeping its activations; the backward pass runs it again."""
    kwargs.pop("use_reentrant", None)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
