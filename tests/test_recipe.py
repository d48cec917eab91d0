"""te_reference/recipe.py: names, defaults and the values that are refused."""

import pytest

from te_reference.recipe import (
    RECIPES,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    resolve_recipe_class,
)


def test_resolve_recipe_class():
    for name, cls in RECIPES.items():
        assert resolve_recipe_class(name) is cls
        assert resolve_recipe_class(f"transformer_engine.common.recipe.{name}") is cls
    for wrong in ("FP8", "transformer_engine.recipe.DelayedScaling", "", "torch.nn.Linear"):
        with pytest.raises(ValueError, match="Unknown recipe"):
            resolve_recipe_class(wrong)


def test_recipe_kinds():
    assert DelayedScaling().delayed() and DelayedScaling.float8_per_tensor_scaling()
    assert Float8CurrentScaling().float8_current_scaling() and Float8CurrentScaling().float8_per_tensor_scaling()
    assert Float8BlockScaling().float8_block_scaling() and not Float8BlockScaling().float8_per_tensor_scaling()
    assert MXFP8BlockScaling().mxfp8() and NVFP4BlockScaling().nvfp4() and not NVFP4BlockScaling().mxfp8()


@pytest.mark.parametrize(
    "make",
    [
        lambda: MXFP8BlockScaling(fp8_format=Format.HYBRID),
        lambda: Float8BlockScaling(fp8_format=Format.HYBRID),
        lambda: Float8CurrentScaling(fp8_format=Format.E5M2),
        lambda: DelayedScaling(fp8_format="HYBRID"),
        lambda: NVFP4BlockScaling(fp4_format=Format.E4M3),
        lambda: DelayedScaling(amax_history_len=0),
        lambda: DelayedScaling(amax_compute_algo="mean"),
        lambda: Float8BlockScaling(x_block_scaling_dim=2),
    ],
)
def test_recipe_values_are_checked(make):
    with pytest.raises(ValueError):
        make()


def test_unknown_recipe_fields_are_refused():
    with pytest.raises(TypeError, match="fp8_dpa"):
        DelayedScaling(fp8_dpa=True)


@pytest.mark.gpu
def test_recipes_have_te_names_and_defaults():
    from transformer_engine.common import recipe as te_recipe

    for name, cls in RECIPES.items():
        theirs, ours = getattr(te_recipe, name)(), cls()
        for field, value in vars(ours).items():
            expected = getattr(theirs, field)
            assert (value.name == expected.name) if isinstance(value, Format) else (value == expected), (name, field)
