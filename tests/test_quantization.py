"""quantization.py: which layer runs in what, what is refused before a model is built, and that layers do as planned."""

import logging
from dataclasses import dataclass

import pytest
import torch

import te_reference
from config import TrainConfig
from config_low_precision import FP8Config
from config_rules import find_problems
from errors import ConfigError
from low_precision import SHAPE, Run, make_config
from modeling_llama_te import NVLlamaConfig
from modeling_mixtral_te import NVMixtralConfig
from paths import PROJECT_DIR, project_path
from precision import PrecisionPlan
from quantization import (
    HARDWARE,
    field_type_problems,
    fp8_attention_problems,
    hardware_problems,
    layer_formats,
    plan_precision,
    quantized_init_problems,
    te_expert_problems,
)
from te_reference import recipe as recipes
from te_reference.emulation import quantize
from te_reference.recipe import RECIPES
from test_config import compose_config


CPU = torch.device("cpu")
FP8, FP4 = ["fp8_config.enabled=true"], ["fp4_config.enabled=true"]


def plan(overrides: list[str], num_shards: int = 1, **sizes) -> PrecisionPlan:
    config = compose_config([*overrides, "te_backend=reference"])
    return plan_precision(config, NVLlamaConfig(**{**SHAPE, "num_hidden_layers": 4, **sizes}), CPU, num_shards)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ([], [None] * 4),
        (FP8, ["fp8"] * 4),
        (FP4, ["fp4"] * 4),
        ([*FP8, "fp8_layers=[2,3]"], [None, "fp8", "fp8", None]),  # the first and the last in high precision
        ([*FP8, *FP4, "fp8_layers=[1,4]"], ["fp8", "fp4", "fp4", "fp8"]),
        ([*FP8, *FP4, "fp4_layers=[2]"], ["fp8", "fp4", "fp8", "fp8"]),
        ([*FP8, *FP4, "fp8_layers=[1]", "fp4_layers=[3]"], ["fp8", None, "fp4", None]),
    ],
)
def test_layer_formats(overrides, expected, caplog):
    config = compose_config(overrides)
    with caplog.at_level(logging.INFO):
        assert layer_formats(config, 4) == expected
    assert list(plan(overrides).formats) == expected
    both_on_one_list = len(overrides) == 3 and "fp" in overrides[1]
    assert ("takes the remaining layers" in caplog.text) == both_on_one_list


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([*FP8, *FP4], "neither fp8_layers nor fp4_layers says"),
        ([*FP8, *FP4, "fp8_layers=[1,2]", "fp4_layers=[2]"], r"both name \[2\]"),
        ([*FP8, "fp8_layers=[0]"], r"fp8_layers=\[0\] is out of range"),
        ([*FP8, "fp8_layers=[1,1]"], r"names \[1\] more than once"),
        ([*FP8, "fp8_layers=[]"], "names no layer"),
        (["fp8_layers=[1]"], r"fp8_layers=\[1\] has no effect with fp8_config.enabled=false"),
        ([*FP8, "fp4_layers=[1]"], r"fp4_layers=\[1\] has no effect with fp4_config.enabled=false"),
        ([*FP8, "fp8_config.fp8_recipe=FP8"], "Unknown recipe 'FP8'"),
        ([*FP8, "fp8_config.fp8_recipe=NVFP4BlockScaling"], "not one of DelayedScaling"),
        ([*FP4, "fp4_config.fp4_recipe=MXFP8BlockScaling"], "not one of NVFP4BlockScaling"),
        # Pitfall 4.
        ([*FP8, "fp8_config.fp8_recipe=MXFP8BlockScaling", "fp8_config.fp8_format=HYBRID"], "E5M2 gradients diverge"),
        ([*FP8, "fp8_config.fp8_format=E3M4"], "'E3M4' is no format"),
        (["fp8_config.quantized_model_init_kwargs.enabled=true"], "enabled=True has no effect with fp8_config.enabled"),
        ([*FP4, "fp8_config.quantized_model_init_kwargs.enabled=true"], "for weights held in FP4, say"),
        (["+config_kwargs.use_quantized_model_init=true"], "the parameters would have no format"),
        (
            [*FP8, "fp8_config.quantized_model_init_kwargs.preserve_high_precision_init_val=true"],
            "needs quantised init",
        ),
        ([*FP8, "+config_kwargs.use_quantized_model_init=true", "use_fp32_master_weights=false"], "in FP32 masters"),
        ([*FP8, "use_te=false"], "use_te=false"),
        ([*FP8, "use_torch_compile=true"], "use_torch_compile=true"),
        (["quant_stats_config.enabled=true"], "nothing quantised to measure"),
        (
            ["fp8_config.fp8_recipe=MXFP8BlockScaling"],
            "fp8_recipe='MXFP8BlockScaling' has no effect with fp8_config.en",
        ),
        ([*FP4, "fp8_config.fp8_format=E4M3"], "fp8_format='E4M3' has no effect"),
        (["+fp4_config.fp4_recipe_kwargs.disable_rht=true"], "has no effect with fp4_config.enabled=false"),
        ([*FP8, "quant_stats_config.quant_log_dir=x"], "has no effect with quant_stats_config.enabled=false"),
        ([*FP8, "quant_stats_config.enabled=true", "quant_stats_config.quant_stats_file=./no.yaml"], "no such file"),
    ],
)
def test_refused_by_the_config_alone(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose_config(overrides)


@pytest.mark.parametrize("preset", ["L2_lingua_8b_mxfp8_qinit", "L1_llama_1b_fp8_bf16_ends"])
def test_a_preset_s_format_can_be_switched_off(preset):
    config = compose_config(["fp8_config.enabled=false"], preset)
    assert config.fp8_config == FP8Config() and config.fp8_layers is None


@pytest.mark.parametrize(
    "overrides, sizes, message",
    [
        ([*FP8, "fp8_layers=[5]"], {}, r"fp8_layers=\[5\] is out of range: layers are counted from 1 to 4"),
        ([*FP8, *FP4, "fp8_layers=[1,2,3,4]"], {}, "leaves none to FP4"),
        (FP8, {"hidden_size": 72}, "hidden_size = 72 is not a multiple of 16, which DelayedScaling needs"),
        ([*FP8, "fp8_config.fp8_recipe=MXFP8BlockScaling"], {"intermediate_size": 144}, "144 is not a multiple of 32"),
        (FP4, {"head_dim": 10}, r"num_attention_heads \* head_dim = 40 is not a multiple of 16"),
        ([*FP8, "+fp8_config.fp8_recipe_kwargs.fp8_dpa=true"], {}, "has no field fp8_dpa"),
        ([*FP8, "+fp8_config.fp8_recipe_kwargs.amax_history_len=0"], {}, "amax_history_len"),
        ([*FP8, "+fp8_config.fp8_recipe_kwargs.reduce_amax=0"], {}, "reduce_amax=0 must be true or false"),
        ([*FP8, "+fp8_config.fp8_recipe_kwargs.reduce_amax=null"], {}, "reduce_amax=None must be true or false"),
        ([*FP8, "+fp8_config.fp8_recipe_kwargs.margin=true"], {}, "margin=True must be a whole number"),
        ([*FP4, "+fp4_config.fp4_recipe_kwargs.disable_rht=no"], {}, "disable_rht='no' must be true or false"),
    ],
)
def test_refused_before_the_model_is_built(overrides, sizes, message):
    with pytest.raises(ConfigError, match=message):
        plan(overrides, **sizes)


QINIT = "+config_kwargs.use_quantized_model_init=true"


@pytest.mark.parametrize(
    "recipe, num_shards, message",
    [
        ("Float8BlockScaling", 1, "cannot train parameters in this format"),
        ("NVFP4BlockScaling", 2, "cannot gather parameters"),
        ("NVFP4BlockScaling", 1, None),
        ("MXFP8BlockScaling", 2, None),
        ("MXFP8BlockScaling", 4, "hidden_size = 64 rows of a weight cannot be cut over 4 ranks in multiples of 32"),
        ("DelayedScaling", 4, None),
        ("DelayedScaling", 3, "cannot be cut over 3 ranks"),
    ],
)
def test_quantised_init_where_te_cannot(recipe, num_shards, message):
    problems = quantized_init_problems(NVLlamaConfig(**SHAPE), recipe, num_shards)
    assert (message is None and not problems) or message in problems[0]
    prefix = "fp4" if recipe == "NVFP4BlockScaling" else "fp8"
    overrides = [f"{prefix}_config.enabled=true", f"{prefix}_config.{prefix}_recipe={recipe}", QINIT]
    if message is None:
        assert plan(overrides, num_shards).quantized_init
    else:
        with pytest.raises(ConfigError, match="quantised init"):
            plan(overrides, num_shards)


def test_quantised_init_on_shards_needs_the_meta_device():
    """Pitfall 3: without it the weights would silently stay in high precision."""
    assert plan([*FP8, QINIT, "use_meta_device=false"], 1).quantized_init
    with pytest.raises(ConfigError, match="use_meta_device=true"):
        plan([*FP8, QINIT, "use_meta_device=false"], 2)


@pytest.mark.parametrize(
    "recipe, num_shards, num_expert_shards, message",
    [
        ("MXFP8BlockScaling", 2, 4, "hidden_size = 64 rows of a weight cannot be cut over 4 ranks"),
        ("MXFP8BlockScaling", 2, 1, None),
        ("NVFP4BlockScaling", 2, 1, "NVFP4BlockScaling on FSDP2 shards"),
        ("DelayedScaling", 8, 4, None),
    ],
)
def test_quantised_init_of_experts(recipe, num_shards, num_expert_shards, message):
    problems = quantized_init_problems(NVMixtralConfig(**SHAPE), recipe, num_shards, num_expert_shards)
    assert (message is None and not problems) or message in problems[0]


def test_the_fused_mlp_runs_mxfp8_only():
    model_config = NVMixtralConfig(**SHAPE, fused_grouped_mlp=True)
    mxfp8 = [*FP8, "fp8_config.fp8_recipe=MXFP8BlockScaling"]
    for overrides, layers in (([], "high precision"), (FP8, "Delayed"), ([*mxfp8, "fp8_layers=[1]"], "high precision")):
        with pytest.raises(ConfigError, match=f"layers in {layers}"):
            plan_precision(compose_config([*overrides, "te_backend=reference"]), model_config, CPU, 1, 1)
    assert plan_precision(compose_config([*mxfp8, "te_backend=reference"]), model_config, CPU, 1, 1).enabled


def test_scales_of_each_rank_cannot_be_saved():
    overrides = [*FP8, "+fp8_config.fp8_recipe_kwargs.reduce_amax=false"]
    assert not find_problems(compose_config(overrides), 2)
    config = compose_config([*overrides, "checkpoint.ckpt_dir=x"])  # where a preempted run saves
    assert not find_problems(config, 1)
    assert "every rank scales of its own" in find_problems(config, 2)[0]


def test_experts_that_te_cannot_run():
    assert not te_expert_problems({"DelayedScaling", "NVFP4BlockScaling"}, 2, False, "off")
    assert not te_expert_problems({"Float8CurrentScaling"}, 2, False, "full")
    assert "no kernel" in te_expert_problems({"Float8BlockScaling"}, 1, False, "off")[0]
    assert "parallelism.dp_size=1" in te_expert_problems({"MXFP8BlockScaling"}, 2, True, "off")[0]
    assert "scales of the next step" in te_expert_problems({"DelayedScaling"}, 1, False, "selective")[0]


# te-notes' table: FP8 from 8.9, block scaling from 9.0 with CUDA 12.9, MXFP8 in 10.x and 11.x, NVFP4 from 10.0.
@pytest.mark.parametrize(
    "capability, cuda, runnable",
    [
        ((8, 0), "12.9", set()),
        ((8, 9), "12.9", {"DelayedScaling", "Float8CurrentScaling"}),
        ((9, 0), "12.8", {"DelayedScaling", "Float8CurrentScaling"}),
        ((9, 0), "13.0", {"DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"}),
        ((10, 0), "13.0", set(HARDWARE)),
        ((12, 0), "13.0", set(HARDWARE) - {"MXFP8BlockScaling"}),
    ],
)
def test_hardware(capability, cuda, runnable):
    assert {name for name in HARDWARE if not hardware_problems(name, capability, cuda)} == runnable


def test_hardware_problem_names_need_device_and_alternatives():
    (problem,) = hardware_problems("MXFP8BlockScaling", (9, 0), "13.0")
    for part in ("compute capability 10.0", "has 9.0", "Float8BlockScaling", "te_backend=reference"):
        assert part in problem


def test_fp8_attention_on_packed_batches():
    assert fp8_attention_problems(True, (9, 0)) and not fp8_attention_problems(True, (10, 0))
    assert not fp8_attention_problems(False, (9, 0))


@pytest.mark.parametrize("name", RECIPES)
def test_changing_only_the_class_is_right(name):
    """Pitfall 4: the format follows the recipe."""
    prefix = "fp4" if name == "NVFP4BlockScaling" else "fp8"
    full_name = f"transformer_engine.common.recipe.{name}"
    result = plan([f"{prefix}_config.enabled=true", f"{prefix}_config.{prefix}_recipe={full_name}"])
    assert result.recipes == (getattr(recipes, name)(),) * 4
    per_tensor = name in ("DelayedScaling", "Float8CurrentScaling")
    assert (result.recipes[0].fp8_format is recipes.Format.HYBRID) == per_tensor
    assert result.pad_to_multiple == (32 if name in ("MXFP8BlockScaling", "NVFP4BlockScaling") else 16)


def test_recipe_fields_and_format_from_the_config():
    overrides = ["fp8_config.fp8_format=E4M3", "+fp8_config.fp8_recipe_kwargs={amax_history_len: 8, margin: 1}"]
    assert plan([*FP8, *overrides]).recipes[0] == recipes.DelayedScaling(
        fp8_format=recipes.Format.E4M3, amax_history_len=8, margin=1
    )


def test_field_types_of_any_recipe_class():
    """TransformerEngine's dataclasses as well as the reference's."""

    @dataclass
    class Recipe:
        margin: int = 0
        threshold: float = 0.5
        fp8_dpa: bool = False
        backward_override: str | None = None

    good = {"margin": 1, "threshold": 1, "fp8_dpa": True, "backward_override": "dequantized"}
    assert field_type_problems(Recipe, good) == []
    bad = {"margin": 1.0, "threshold": "0.5", "fp8_dpa": 1, "backward_override": 3}
    problems = field_type_problems(Recipe, bad)
    assert [problem.split()[0] for problem in problems] == [
        "Recipe.margin=1.0",
        "Recipe.threshold='0.5'",
        "Recipe.fp8_dpa=1",
    ]


def test_plan_without_low_precision():
    result = plan([])
    assert not result.enabled and result.pad_to_multiple == 1 and result.micro_batch_kwargs(0, 2) == {}


@pytest.mark.parametrize("name", ["L2_lingua_8b_mxfp8_qinit", "L2_lingua_70b_mxfp8_qinit", "L1_llama_1b_fp8_bf16_ends"])
def test_shipped_configs(name):
    config = compose_config(name=name)
    model_config = NVLlamaConfig.from_pretrained(project_path(config.config_name_or_path))
    result = plan_precision(config, model_config, CPU, num_shards=1 if name.startswith("L1") else 8)
    if name.startswith("L1"):
        assert result.formats == (None, None, *["fp8"] * 12, None, None)
    else:
        assert result.quantized_init and result.preserve_high_precision_init_val and result.pad_to_multiple == 32
    assert (PROJECT_DIR / "hydra_config" / "llama" / f"{name}.yaml").exists()


def test_shipped_mixtral_config():
    config = compose_config(["te_backend=reference"], "L1_8x7B_ep", "mixtral", "train_fsdp2_ep", world_size=8)
    model_config = NVMixtralConfig.from_pretrained(project_path(config.config_name_or_path))
    result = plan_precision(config, model_config, CPU, num_shards=8, num_expert_shards=1)
    assert result.quantized_init and result.preserve_high_precision_init_val
    assert {type(recipe).__name__ for recipe in result.recipes} == {"MXFP8BlockScaling"}
    assert result.group_rows(0) == 32


def outputs(config: TrainConfig, **shape) -> dict[int, torch.Tensor]:
    """Output of every decoder layer for the same batch and weights."""
    run = Run(config, shape={**SHAPE, **shape})
    seen = {}
    for index, layer in enumerate(run.model.model.layers):
        layer.register_forward_hook(lambda module, args, output, index=index: seen.update({index: output.detach()}))
    run.model(**run.batch(1, 0))
    return seen


def test_each_layer_runs_in_its_own_precision():
    """Layer by layer from the same input: only the layers that are named differ from high precision, and by what their
    own recipe makes of them."""

    def config(**lists):
        result = make_config("Float8CurrentScaling")
        result.fp8_layers, result.fp4_layers = lists.get("fp8"), lists.get("fp4")
        result.fp8_config.enabled, result.fp4_config.enabled = "fp8" in lists, "fp4" in lists
        return result

    shape = {"num_hidden_layers": 3}
    exact = outputs(config(), **shape)
    fp8_first, fp8_second = outputs(config(fp8=[1]), **shape), outputs(config(fp8=[2]), **shape)
    mixed = outputs(config(fp8=[2], fp4=[3]), **shape)
    assert not torch.equal(fp8_first[0], exact[0])
    assert torch.equal(fp8_second[0], exact[0]) and not torch.equal(fp8_second[1], exact[1])
    assert torch.equal(mixed[1], fp8_second[1]) and not torch.equal(mixed[2], fp8_second[2])
    fp8_error = (fp8_second[2] - exact[2]).norm() / exact[2].norm()
    fp4_error = (mixed[2] - fp8_second[2]).norm() / exact[2].norm()
    assert 1e-3 < fp8_error < fp4_error < 0.3


def test_only_linear_layers_are_quantised():
    """Norms, attention, embedding, head: exactly as in high precision, given the same inputs."""
    seen = []
    run = Run(make_config("MXFP8BlockScaling"))
    for module in run.model.modules():
        if hasattr(module, "observer"):
            module.observer = lambda part, role, matrix, operands, recipe: seen.append((part, role))
    run.model(**run.batch(1, 0)).loss.backward()
    assert len(seen) == 2 * 4 * 3  # layers, linear layers of one, tensors of each
    assert {part for part, _ in seen} == {"", "fc1", "fc2"}


def test_kept_weights_are_those_of_the_first_micro_batch():
    run = Run(make_config("Float8CurrentScaling"))
    quantised = []
    for module in run.model.modules():
        if hasattr(module, "observer"):
            module.observer = lambda part, role, matrix, operands, recipe: quantised.append(role)
    expected = run.model(**run.batch(1, 0)).loss
    assert run.precision.micro_batch_kwargs(0, 1) == {}
    for index in range(3):
        kept = run.precision.micro_batch_kwargs(index, 3)
        assert torch.equal(run.model(**run.batch(1, 0), **kept).loss, expected)
    assert quantised.count("weight") == 2 * 8 and quantised.count("activation") == 4 * 8


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("recipe", ["DelayedScaling", "MXFP8BlockScaling"])
def test_activation_checkpointing_changes_nothing(mode, recipe):
    expected = Run(make_config(recipe)).train(1, 4)
    assert Run(make_config(recipe, activation_checkpointing=mode)).train(1, 4) == expected


def test_delayed_scaling_of_a_layer_by_hand():
    """Two steps of one linear layer in the model's region: the second step's scale is 448 / the first one's amax."""
    recipe = recipes.DelayedScaling()
    layer = te_reference.Linear(16, 16, bias=False)
    x = torch.randn(16, 16)
    for factor in (1.0, 3.0):
        with te_reference.autocast(recipe=recipe):
            y = layer(x * factor)
        y.sum().backward()
    state = layer.fp8_meta["scaling_fwd"]
    # Both steps are in the history; weights have not changed.
    amaxes = [(3 * x).abs().max().item(), layer.weight.abs().max().item()]
    assert state.scale.tolist() == pytest.approx([448 / amax for amax in amaxes])
    assert layer.fp8_meta["scaling_bwd"].scale.item() == 57344 / 1.0
    expected = (3 * x * (448 / x.abs().max())).clamp(-448, 448).to(torch.float8_e4m3fn).float() / (448 / x.abs().max())
    weight = quantize(layer.weight.detach(), recipes.Float8CurrentScaling(), "weight").rowwise.dequantize()
    torch.testing.assert_close(y, expected @ weight.T, rtol=1e-5, atol=1e-6)


def test_region_moves_every_history_once():
    run = Run(make_config("DelayedScaling"))
    run.train(1, 1)
    for module in run.model.modules():
        for state in getattr(module, "fp8_meta", {}).values():
            assert (state.amax_history != 0).any(dim=1).sum() == 1  # one step's entry, in the last row
            assert (state.amax_history[-1] != 0).all()


def test_mixed_dtypes_are_refused():
    layer = te_reference.Linear(16, 16, bias=False, params_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"activations are torch.float32 and weight is torch.bfloat16"):
        layer(torch.randn(16, 16))


def test_autocast_needs_a_recipe_and_the_one_that_the_weights_are_held_for():
    with pytest.raises(ValueError, match="needs a recipe"), te_reference.autocast():
        pass
    with te_reference.quantized_model_init(recipe=recipes.MXFP8BlockScaling()):
        layer = te_reference.Linear(32, 32, bias=False)
    with pytest.raises(ValueError, match="its weights are held for"):
        with te_reference.autocast(recipe=recipes.Float8CurrentScaling()):
            layer(torch.randn(32, 32))
