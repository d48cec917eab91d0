"""The precision of every decoder layer, as the models apply it. quantization.py decides on it."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from te_reference.emulation import RECIPE_MULTIPLES


@dataclass(frozen=True)
class PrecisionPlan:
    """The recipe of every decoder layer, and the contexts that apply it."""

    recipes: tuple[Any | None, ...]
    """Per layer, objects of the backend's recipe module; None: high precision."""
    te: ModuleType | None = None
    """The backend (te_backend.resolve); needed if any layer has a recipe."""
    quantized_init: bool = False
    """Layers with a recipe hold their weights in its format only; the optimiser holds FP32 masters."""
    preserve_high_precision_init_val: bool = False
    """Seed those masters from the initial values before they were quantised."""

    @property
    def formats(self) -> tuple[str | None, ...]:
        """``fp8``, ``fp4`` or None per layer."""
        return tuple(None if recipe is None else "fp4" if recipe.nvfp4() else "fp8" for recipe in self.recipes)

    @property
    def first_recipe(self) -> Any | None:
        """Of the first layer that has one; None: no layer has."""
        return next((recipe for recipe in self.recipes if recipe is not None), None)

    @property
    def enabled(self) -> bool:
        """Whether any layer has a recipe."""
        return self.first_recipe is not None

    @property
    def pad_to_multiple(self) -> int:
        """Tokens that the sequence length (BSHD) or the batch (THD) must be a multiple of: 16 for FP8, 32 for MXFP8 and
        NVFP4. Every product of the weight gradient sums over the tokens, in blocks."""
        names = {type(recipe).__name__ for recipe in self.recipes if recipe is not None}
        return max((RECIPE_MULTIPLES[name].tokens for name in names), default=1)

    def group_rows(self, index: int) -> int:
        """What the rows of every expert of layer ``index`` (from 0) must be a multiple of."""
        recipe = self.recipes[index]
        return 1 if recipe is None else RECIPE_MULTIPLES[type(recipe).__name__].group_rows

    def layer_init(self, index: int) -> AbstractContextManager:
        """Surrounds the construction of layer ``index`` (from 0)."""
        if not self.quantized_init or self.recipes[index] is None:
            return nullcontext()
        return self.te.quantized_model_init(
            enabled=True,
            recipe=self.recipes[index],
            preserve_high_precision_init_val=self.preserve_high_precision_init_val,
        )

    def region(self) -> AbstractContextManager:
        """Surrounds one forward pass through all layers.

        One scope for all: at the exit of the outermost scope, delayed scaling reduces all amaxes in one collective and
        moves every history on by one step. Its recipe is that of the first layer that has one: TE lets the first
        module that quantises also update the gradients' scales, and forgets at the exit of a nested scope that one did.
        """
        return self.te.autocast(enabled=True, recipe=self.first_recipe) if self.enabled else nullcontext()

    def layer(self, index: int) -> AbstractContextManager:
        """Surrounds the forward pass of layer ``index`` (from 0) inside :meth:`region`: its own recipe, if another."""
        recipe = self.recipes[index]
        if recipe is self.first_recipe:
            return nullcontext()
        return self.te.autocast(enabled=recipe is not None, recipe=recipe)

    def micro_batch_kwargs(self, index: int, grad_acc_steps: int) -> dict[str, bool]:
        """What the model's forward pass is told about micro-batch ``index`` of a step, on a model that is not sharded:
        with several, weights are quantised in the first and kept for the others."""
        if grad_acc_steps == 1 or not self.enabled or self.quantized_init:
            return {}
        return {"is_first_microbatch": index == 0}

    def describe(self) -> str:
        """``layers 1-14: fp8 (DelayedScaling)``, for the log."""
        runs: list[list[Any]] = []
        for number, recipe in enumerate(self.recipes, start=1):
            name = "high precision" if recipe is None else type(recipe).__name__
            if runs and runs[-1][2] == name:
                runs[-1][1] = number
            else:
                runs.append([number, number, name])
        return "; ".join(f"layer {a}: {name}" if a == b else f"layers {a}-{b}: {name}" for a, b, name in runs)
