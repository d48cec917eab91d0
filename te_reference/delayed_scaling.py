"""State of the DelayedScaling recipe: scales, amax histories and the updates between steps.

A tensor is quantised with a scale that was known before the tensor was: no extra pass over it, at the price of state.
While a step runs, every quantisation raises slot 0 of its amax history ("amax": largest magnitude) to what it saw. At
the end of the outermost autocast region (forward tensors), and when backward reaches the region's first module
(gradients), the amaxes are max-reduced over the amax reduction group and then, for every tensor,

    amax  = max over the history (or slot 0 alone: "most_recent")
    scale = fp8_max * 2^-margin / amax       unchanged while amax is 0 or infinite; at most FP32's largest value
    history is rolled by one: the oldest entry leaves, slot 0 starts at 0

Scales start at 1, so the first step quantises unscaled; its gradients underflow in E5M2 as TE's do.

Sources: transformer_engine/pytorch/quantization.py (``reduce_and_update_fp8_tensors``, ``_amax_and_scale_update``).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from te_reference.formats import FLOAT8_MAX, FP32_MAX
from te_reference.recipe import DelayedScaling, Format


class AmaxTracker:
    """Scales [n] and amax history [L, n], both FP32, of n tensors of one format."""

    def __init__(self, num_tensors: int, dtype: torch.dtype, history_len: int, device: torch.device | str | None):
        self.dtype = dtype
        self.scale = torch.ones(num_tensors, dtype=torch.float32, device=device)
        self.amax_history = torch.zeros(history_len, num_tensors, dtype=torch.float32, device=device)

    def advance(self, recipe: DelayedScaling) -> None:
        """New scales from the history, then one step on in the history."""
        if callable(recipe.amax_compute_algo):
            amax = recipe.amax_compute_algo(self.amax_history)
        elif recipe.amax_compute_algo == "max":
            amax = self.amax_history.amax(dim=0)
        else:
            amax = self.amax_history[0].clone()
        scale = torch.full_like(amax, FLOAT8_MAX[self.dtype] * 2.0**-recipe.margin) / amax
        scale = torch.where(scale.isinf(), FP32_MAX, scale)
        self.scale.copy_(torch.where((amax > 0) & amax.isfinite(), scale, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1, dims=0))
        self.amax_history[0] = 0


class DelayedScalingState:
    """What one linear layer keeps between steps: its input and weight (forward), its output gradient (backward).

    With ``num_groups`` E, what a grouped linear layer keeps: input and weight of each group in turn, as TE orders them
    (ops/basic/grouped_linear.py), and E gradients; scales and amaxes are then [E] instead of [].
    """

    def __init__(self, recipe: DelayedScaling, device: torch.device | str | None = None, num_groups: int | None = None):
        self.recipe = recipe
        gradient_dtype = torch.float8_e5m2 if recipe.fp8_format is Format.HYBRID else torch.float8_e4m3fn
        self.forward = AmaxTracker(2 * (num_groups or 1), torch.float8_e4m3fn, recipe.amax_history_len, device)
        self.backward = AmaxTracker(num_groups or 1, gradient_dtype, recipe.amax_history_len, device)
        self._slots: dict[str, int | slice] = {"activation": 0, "weight": 1, "gradient": 0}
        if num_groups is not None:
            self._slots = {"activation": slice(0, None, 2), "weight": slice(1, None, 2), "gradient": slice(None)}
        self._replaying = False

    def scale(self, role: str) -> torch.Tensor:
        """FP32 scale [] of ``role`` (activation, weight or gradient), detached from later updates."""
        return self._tracker(role).scale[self._slots[role]].clone()

    def record(self, role: str, amax: torch.Tensor) -> None:
        """Raises the current step's entry for ``role`` to ``amax``. Does nothing in a replayed forward pass."""
        if not self._replaying or role == "gradient":
            entry = self._tracker(role).amax_history[0, self._slots[role]]
            entry.copy_(torch.maximum(entry, amax))

    @contextmanager
    def replay_forward(self, scale: torch.Tensor) -> Iterator[None]:
        """Runs a recomputed forward pass with the ``scale`` [2] or [2E] that the first pass used, recording nothing.

        Activation checkpointing needs this: the scales have moved on by the time of the backward pass.
        """
        current, self._replaying = self.forward.scale, True
        self.forward.scale = scale
        try:
            yield
        finally:
            self.forward.scale, self._replaying = current, False

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All of the state, as tensors (not copies)."""
        return {
            "scale_forward": self.forward.scale,
            "amax_history_forward": self.forward.amax_history,
            "scale_backward": self.backward.scale,
            "amax_history_backward": self.backward.amax_history,
        }

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copies a :meth:`state_dict` into this state.

        Raises:
            ValueError: tensors are missing, unknown or of another shape (another amax_history_len).
        """
        own = self.state_dict()
        given = {name: list(tensor.shape) for name, tensor in tensors.items()}
        wanted = {name: list(tensor.shape) for name, tensor in own.items()}
        if given != wanted:
            raise ValueError(
                f"Delayed scaling state has shapes {given}, this recipe needs {wanted}: resume with the "
                "amax_history_len that the run was saved with."
            )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def _tracker(self, role: str) -> AmaxTracker:
        return self.backward if role == "gradient" else self.forward


class AmaxReduction:
    """The scale updates of one outermost autocast region.

    TE rolls the histories of all modules that ever ran at each region's exit; here only those that ran in the region.
    The scales differ only if regions are opened per layer and a history entry of 1024 / layers steps ago still matters.
    """

    def __init__(self) -> None:
        self._states: list[DelayedScalingState] = []
        self._groups: list[dist.ProcessGroup | None] = []

    def join(self, state: DelayedScalingState, group: dist.ProcessGroup | None = None) -> Callable[[], None] | None:
        """Adds a layer that runs in this region (again is harmless).

        Args:
            group: its amax reduction group; None: all ranks.

        Returns:
            What to call after the layer's backward pass: :meth:`finish_backward` for the first layer, whose backward
            pass comes last; None for all others.
        """
        if all(state is not known for known in self._states):
            self._states.append(state)
            self._groups.append(group)
        return self.finish_backward if state is self._states[0] else None

    def finish_forward(self) -> None:
        """At the region's exit, if gradients are enabled. Collective over the groups."""
        self._update([(state.forward, state.recipe) for state in self._states])

    def finish_backward(self) -> None:
        """After the backward pass of the region's first layer. Collective over the groups."""
        self._update([(state.backward, state.recipe) for state in self._states])

    @torch.no_grad()
    def _update(self, trackers: list[tuple[AmaxTracker, DelayedScaling]]) -> None:
        by_group: dict[dist.ProcessGroup | None, list[AmaxTracker]] = defaultdict(list)
        for (tracker, recipe), group in zip(trackers, self._groups, strict=True):
            if recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(group) > 1:
                by_group[group].append(tracker)
        for group, reduced in by_group.items():
            amaxes = torch.cat([tracker.amax_history[0] for tracker in reduced])
            dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
            for tracker, amax in zip(reduced, amaxes.split([tracker.scale.numel() for tracker in reduced])):
                tracker.amax_history[0] = amax
        for tracker, recipe in trackers:
            tracker.advance(recipe)
