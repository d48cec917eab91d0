"""Contexts of ``transformer_engine.pytorch``: low-precision scope, quantised init, recomputation.

The current scope is a context variable: a backward pass may run in another thread, and recomputes there what it needs
in a scope of its own.

Source: transformer_engine/pytorch/quantization.py, distributed.py.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from te_reference.delayed_scaling import AmaxReduction, DelayedScalingState
from te_reference.recipe import Recipe


@dataclass(frozen=True)
class Scope:
    """What a module's forward pass runs in."""

    recipe: Recipe | None = None
    """None: high precision."""
    region: AmaxReduction | None = None
    """The outermost autocast's scale updates; None outside of one."""
    amax_reduction_group: dist.ProcessGroup | None = None
    """Of the innermost autocast."""
    stash: list[tuple[DelayedScalingState, torch.Tensor]] | None = None
    """Where a checkpointed forward pass keeps the scales that it used, for its recomputation."""
    replaying: bool = False
    """A recomputed forward pass: its amaxes are known already, so no scale is updated."""

    def join(self, state: DelayedScalingState) -> Callable[[], None] | None:
        """A layer with delayed scaling runs in this scope. Returns what to call after its backward pass, if anything
        (:meth:`AmaxReduction.join`)."""
        if self.stash is not None:
            self.stash.append((state, state.forward.scale.clone()))
        if self.region is None or not torch.is_grad_enabled():
            return None
        return self.region.join(state, self.amax_reduction_group)


@dataclass(frozen=True)
class WeightInit:
    """How modules that are built now hold their weights."""

    recipe: Recipe
    preserve_high_precision_init_val: bool


_HIGH_PRECISION = Scope()
_SCOPE: ContextVar[Scope] = ContextVar("scope", default=_HIGH_PRECISION)
_WEIGHT_INIT: ContextVar[WeightInit | None] = ContextVar("weight_init", default=None)


def current_scope() -> Scope:
    """The innermost scope."""
    return _SCOPE.get()


def current_weight_init() -> WeightInit | None:
    """None: modules hold their weights in high precision."""
    return _WEIGHT_INIT.get()


@contextmanager
def autocast(
    enabled: bool = True, recipe: Recipe | None = None, amax_reduction_group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Low-precision scope for the modules that are called in it. Scopes nest; the innermost decides.

    Delayed scaling: the outermost scope is the region at whose exit amaxes are reduced and scales updated, if gradients
    are enabled. A module may run once per region.

    Args:
        enabled: False: high precision, inside a low-precision scope for example.
        recipe: needed if ``enabled``.
        amax_reduction_group: of the modules called in this scope; None: all ranks.

    Raises:
        ValueError: enabled without a recipe.
    """
    if enabled and recipe is None:
        raise ValueError("autocast(enabled=True) needs a recipe, such as te_reference.recipe.DelayedScaling().")
    outer = _SCOPE.get()
    outermost = outer.region is None and not outer.replaying
    scope = replace(
        outer,
        recipe=recipe if enabled else None,
        region=AmaxReduction() if outermost else outer.region,
        amax_reduction_group=amax_reduction_group,
    )
    token = _SCOPE.set(scope)
    try:
        yield
    finally:
        _SCOPE.reset(token)
    if outermost and torch.is_grad_enabled():
        scope.region.finish_forward()


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Modules built in this scope hold their weights in the recipe's format only (quantized_weight.py).

    Args:
        enabled: False: in high precision.
        recipe: needed if ``enabled``.
        preserve_high_precision_init_val: keep each initial value, before it is quantised, on the CPU until
            ``clear_high_precision_init_val`` of the weight is called.

    Raises:
        ValueError: enabled without a recipe.
    """
    if enabled and recipe is None:
        raise ValueError("quantized_model_init(enabled=True) needs a recipe.")
    token = _WEIGHT_INIT.set(WeightInit(recipe, preserve_high_precision_init_val) if enabled else None)
    try:
        yield
    finally:
        _WEIGHT_INIT.reset(token)


class _Reusable(AbstractContextManager):
    """A context that may be entered again: a graph inside another one is recomputed once more."""

    def __init__(self, make: Callable[[], AbstractContextManager]):
        self._make, self._entered = make, []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.pop().__exit__(*exception)


def checkpoint(function: Callable, *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """Runs ``function`` without keeping its activations; the backward pass runs it again.

    The second run quantises as the first did: in the same recipe and, for delayed scaling, with the same scales, which
    have moved on since. It updates no scale. ``use_reentrant`` is TE's argument; the result is the same either way.
    """
    del use_reentrant
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    scope = replace(_SCOPE.get(), stash=[])

    @contextmanager
    def enter(scope: Scope) -> Iterator[None]:
        token = _SCOPE.set(scope)
        try:
            yield
        finally:
            _SCOPE.reset(token)

    @contextmanager
    def replay() -> Iterator[None]:
        with ExitStack() as stack:
            for state, scale in scope.stash:
                stack.enter_context(state.replay_forward(scale))
            stack.enter_context(enter(Scope(scope.recipe, replaying=True)))
            yield

    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (enter(scope), _Reusable(replay)), **kwargs
    )
