"""Low precision on TransformerEngine, against the emulation, on a GPU that has FP8."""

from statistics import mean

import pytest
import torch

import te_backend
import te_reference
from comparison import relative_error
from dist_utils import run_script
from distributed import local_tensor
from low_precision import Run, make_config
from quantization import HARDWARE, hardware_problems
from quantization_stats import LINE, LOG_FOLDER
from quantized_parameters import delayed_scaling_tensors, dequantized, is_quantized, unchanged_scales
from te_reference.emulation import quantize


pytestmark = pytest.mark.gpu

TE_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
}
FP8_RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")


def runnable(*names: str) -> list[str]:
    """Those recipes that this device has."""
    if not torch.cuda.is_available():
        return list(names)  # deselected anyway
    capability, cuda = torch.cuda.get_device_capability(), torch.version.cuda
    return [name for name in names if not hardware_problems(name, capability, cuda)]


def make_run(backend: str, recipe: str | None, **options) -> Run:
    return Run(make_config(recipe, te_backend=backend, dtype="bfloat16", **options), shape=TE_SHAPE, device="cuda")


def test_hardware_table_is_te_s():
    import transformer_engine.pytorch as te

    capability, cuda = torch.cuda.get_device_capability(), torch.version.cuda
    available = {
        "DelayedScaling": te.is_fp8_available(),
        "Float8BlockScaling": te.is_fp8_block_scaling_available(),
        "MXFP8BlockScaling": te.is_mxfp8_available(),
        "NVFP4BlockScaling": te.is_nvfp4_available(),
    }
    for name, expected in available.items():
        assert (not hardware_problems(name, capability, cuda)) == expected, name
    assert set(available) < set(HARDWARE)


def linear_products(backend: str, recipe: str, split_accumulation: bool) -> tuple[torch.Tensor, ...]:
    """Forward, dgrad and wgrad of one linear layer."""
    te = te_backend.resolve(backend)
    fp8_recipe = getattr(te_backend.recipe_module(te), recipe)()
    if split_accumulation and backend == "transformer_engine":
        fp8_recipe.fp8_gemm_fprop = te_backend.recipe_module(te).MMParams(use_split_accumulator=True)
    generator = torch.Generator("cuda").manual_seed(0)
    layer = te.Linear(1024, 768, bias=False, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        layer.weight.copy_(torch.randn(768, 1024, generator=generator, device="cuda") * 0.02)
    x = torch.randn(512, 1024, generator=generator, device="cuda").bfloat16().requires_grad_()
    dy = (torch.randn(512, 768, generator=generator, device="cuda") * 1e-3).bfloat16()
    for _ in range(2):  # delayed scaling: the second step has scales
        x.grad = layer.weight.grad = None
        with te.autocast(enabled=True, recipe=fp8_recipe):
            y = layer(x)
        y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("split_accumulation", [True, False])
@pytest.mark.parametrize("recipe", runnable(*FP8_RECIPES, "MXFP8BlockScaling"))
def test_linear_agrees(recipe, split_accumulation):
    """The same quantised operands, another summation order.

    By default TE lets Hopper's tensor cores keep the forward sums of the per-tensor recipes in fewer bits than FP32;
    with split accumulation, as in both backward products, the sums are FP32.
    """
    actual, expected = (
        linear_products(backend, recipe, split_accumulation) for backend in ("transformer_engine", "reference")
    )
    errors = [relative_error(a, e) for a, e in zip(actual, expected)]
    print(f"{recipe}, split accumulation {split_accumulation}: forward, dgrad, wgrad: {errors}")
    assert max(errors[1:]) < 1e-3
    short_sums = not split_accumulation and recipe in ("DelayedScaling", "Float8CurrentScaling")
    assert errors[0] < (2e-3 if short_sums else 1e-3)


@pytest.mark.parametrize("qinit", [False, True])
@pytest.mark.parametrize("recipe", runnable(*FP8_RECIPES))
def test_training_agrees(recipe, qinit):
    if qinit and recipe == "Float8BlockScaling":
        pytest.skip("quantised init is refused for it")
    options = {"use_fp32_master_weights": True, "lr": 2.5e-4}
    high_precision = make_run("reference", None, **options).train(1, 30)
    options |= {"qinit": qinit, "preserve": qinit}
    te_losses, losses = (make_run(name, recipe, **options).train(1, 30) for name in ("transformer_engine", "reference"))
    assert losses[-1] < 0.9 * losses[0]
    # Two runs that round the same operands alike, but for a last bit here and there: closer together than the recipe is
    # to BF16, in every step.
    effect = max(abs(loss / expected - 1) for loss, expected in zip(losses, high_precision))
    assert 1e-3 < effect < 0.2
    assert te_losses == pytest.approx(losses, rel=effect)
    assert mean(te_losses) == pytest.approx(mean(losses), rel=5e-3)


@pytest.mark.parametrize("use_meta_device", [True, False])
@pytest.mark.parametrize("recipe", runnable("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"))
def test_quantised_init(recipe, use_meta_device):
    """Pitfall 3: the type, the initial values, the masters."""
    run = make_run("transformer_engine", recipe, qinit=True, preserve=True, use_meta_device=use_meta_device)
    plain = dict(make_run("transformer_engine", None).model.named_parameters())
    quantised = {name: p for name, p in run.model.named_parameters() if is_quantized(p)}
    assert len(quantised) == 2 * 4
    for name, parameter in quantised.items():
        assert torch.equal(run.optimizer.state[parameter]["master_param"], plain[name].float())
        assert local_tensor(parameter).get_high_precision_init_val() is None
        if recipe != "DelayedScaling":
            assert 0 < relative_error(dequantized(parameter), plain[name]) < 0.04


@pytest.mark.parametrize("recipe", runnable("DelayedScaling", "Float8CurrentScaling"))
def test_transposes_follow_the_weights(recipe):
    """The cached transpose of an FP8 weight, where there is one, is that of the weight after the last update."""
    run = make_run("transformer_engine", recipe, qinit=True)
    run.train(1, 3)
    run.model(**run.batch(4, 0)).loss.backward()
    for parameter in filter(is_quantized, run.parameters):
        weight = local_tensor(parameter)
        if weight._transpose is not None and not weight._transpose_invalid:
            assert torch.equal(weight._transpose, weight._data.T)


@pytest.mark.parametrize("qinit", [False, True])
@pytest.mark.parametrize("recipe", runnable("DelayedScaling", "Float8CurrentScaling"))
def test_resume(tmp_path, recipe, qinit):
    """Pitfalls 1 and 2. A scale that were not restored would be 1, and the loss far off."""
    options = {"qinit": qinit, "folder": str(tmp_path)}
    run = make_run("transformer_engine", recipe, **options)
    run.train(1, 5)
    run.checkpointer.save(5, {})
    expected = run.train(6, 8)
    # Copies: TE updates the scales of all models of the process when one of them has run.
    before = {name: tensor.clone() for name, tensor in delayed_scaling_tensors(run.model).items()}
    resumed = make_run("transformer_engine", recipe, **options)
    assert resumed.checkpointer.load().step == 5
    assert resumed.train(6, 8) == pytest.approx(expected, rel=1e-3)
    after = delayed_scaling_tensors(resumed.model)
    assert (len(before) > 0) == (recipe == "DelayedScaling")
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=2e-2, atol=1e-4)


def test_validation_does_not_move_the_scales():
    run = make_run("transformer_engine", "DelayedScaling")
    run.train(1, 2)
    before = {name: tensor.clone() for name, tensor in delayed_scaling_tensors(run.model).items()}
    with torch.no_grad(), unchanged_scales(run.model):
        run.model(**run.batch(9, 0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in delayed_scaling_tensors(run.model).items())


def test_layers_run_in_their_own_precision():
    """Layer 1 in high precision, layer 2 in FP8: only the second has scales."""
    config = make_config("DelayedScaling", te_backend="transformer_engine", dtype="bfloat16")
    config.fp8_layers = [2]
    run = Run(config, shape=TE_SHAPE, device="cuda")
    run.train(1, 2)
    tensors = delayed_scaling_tensors(run.model)
    assert tensors and all(name.startswith("model.layers.1.") for name in tensors)
    for name, tensor in tensors.items():  # one entry per step in every history: the region rolled it once per step
        if name.endswith("amax_history"):
            assert (tensor != 0).any(dim=1).sum() == 2, name


def test_checkpointed_layers_and_kept_weights():
    expected = make_run("transformer_engine", "Float8CurrentScaling").train(1, 3)
    recomputed = make_run("transformer_engine", "Float8CurrentScaling", activation_checkpointing="full").train(1, 3)
    assert recomputed == pytest.approx(expected, rel=1e-3)
    run = make_run("transformer_engine", "Float8CurrentScaling")
    losses = [run.model(**run.batch(1, 0), is_first_microbatch=index == 0).loss.item() for index in range(3)]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-4)


@pytest.mark.parametrize("backend", ["transformer_engine", "reference"])
def test_statistics(tmp_path, backend):
    """Both backends write the same names and nearly the same numbers; in a process of its own, as TE asks for."""
    if backend == "transformer_engine":
        pytest.importorskip("nvdlfw_inspect")
    rows = {}
    for name in {backend, "reference"}:
        run_script(
            "train_fsdp2.py",
            [
                "--config-name=L0_sanity",
                "num_train_steps=11",
                "validation.max_batches=1",
                "fp8_config.enabled=true",
                "fp8_config.fp8_recipe=Float8CurrentScaling",
                f"te_backend={name}",
                f"logger.metrics_path={tmp_path / name}.jsonl",
                "quant_stats_config.enabled=true",
                f"quant_stats_config.quant_log_dir={tmp_path / name}",
            ],
            timeout_seconds=300,
        )
        log = (tmp_path / name / LOG_FOLDER / "nvdlfw_inspect_globalrank-0.log").read_text()
        rows[name] = {(m["name"], m["iteration"]): float(m["value"]) for m in map(LINE.search, log.splitlines())}
    assert rows[backend].keys() == rows["reference"].keys()
    for key, value in rows[backend].items():
        if key[1] == "000000" and "scale_inv" in key[0]:
            # Of single extreme elements. A gradient may have been rounded to the next E5M2 value on its way.
            limit = 2**-3 if "gradient" in key[0] else 2e-2
            assert value == pytest.approx(rows["reference"][key], rel=limit), key


@pytest.mark.parametrize("tensor_name", ["activation", "weight"])
@pytest.mark.parametrize("recipe", ["fp8_current_scaling", "fp8_block_scaling"])
def test_statistics_in_one_pass_are_te_s(recipe, tensor_name):
    """Two micro-batches of an activation, of a weight the first one."""
    pytest.importorskip("nvdlfw_inspect")
    from transformer_engine.debug.features.utils.stats_computation import STATS
    from transformer_engine.pytorch import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    from quantization_stats_te import OnePassBuffer, combine

    stats = ["underflows%", "mse", "scale_inv_min", "scale_inv_max"]
    arguments = ("layer", tensor_name, stats, None, tensor_name == "activation")
    ours, ours_bf16, theirs = OnePassBuffer(*arguments), OnePassBuffer(*arguments), OnePassBuffer.__base__(*arguments)
    dtype = DType.kFloat8E5M2 if tensor_name == "activation" else DType.kFloat8E4M3
    if recipe == "fp8_current_scaling":
        quantizer = Float8CurrentScalingQuantizer(fp8_dtype=dtype, device=torch.device("cuda"))
    else:
        quantizer = Float8BlockQuantizer(fp8_dtype=DType.kFloat8E4M3, rowwise=True, columnwise=True)
    for seed in range(2):
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(384, 1024, generator=generator, device="cuda")
        x = (x * torch.rand(384, 1024, generator=generator, device="cuda") ** 12).bfloat16()
        x[0] = 0
        # TE subtracts in x's dtype: what it finds in BF16 is off by 1 %.
        for buffer, same_x in ((ours, x.float()), (ours_bf16, x), (theirs, x.float())):
            quantized = quantizer(same_x)
            buffer.feed(same_x, 10, {"": quantized, recipe: quantized})
    for name in stats:
        expected = float(STATS[name][1](theirs._buffer.unsqueeze(0)))
        assert expected > 0
        for buffer in (ours, ours_bf16):
            assert combine(name, [buffer._buffer.tolist()]) == pytest.approx(expected, rel=1e-4), name


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("dim, role", [(1, "activation"), (2, "weight")])
def test_scales_of_blocks_without_te_s_padding(dim, role, columnwise):
    pytest.importorskip("nvdlfw_inspect")
    from transformer_engine.pytorch import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    from quantization_stats_te import real_scale_inv

    x = torch.randn(272, 1168, device="cuda", dtype=torch.bfloat16)  # 3 x 10 blocks
    quantizer = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)
    operands = quantize(x, te_reference.recipe.Float8BlockScaling(), role)
    expected = (operands.columnwise if columnwise else operands.rowwise).scale_inv
    found = real_scale_inv(quantizer(x), columnwise)
    assert sorted(found.flatten().tolist()) == sorted(expected.flatten().tolist())


def test_reference_namespace_is_te_s():
    """Every name of the reference exists in TE."""
    te = te_backend.resolve("transformer_engine")
    assert [name for name in te_reference.__all__ if not hasattr(te, name)] == []
