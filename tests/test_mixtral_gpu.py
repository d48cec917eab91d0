"""Mixtral on a GPU: TransformerEngine against the reference backend with the same weights, BF16 and FP8; several
ranks."""

import json
import os

import pytest
import torch

import te_backend
from comparison import relative_error
from config import ParallelismConfig
from dist_utils import run_script
from errors import ConfigError
from low_precision import Run, make_config
from modeling_mixtral_te import NVMixtralConfig, NVMixtralForCausalLM
from precision import PrecisionPlan
from quantization import hardware_problems
from quantized_parameters import delayed_scaling_tensors, is_quantized
from weight_init import initialize_weights


pytestmark = pytest.mark.gpu

BACKENDS = ("transformer_engine", "reference")
FP8 = ["fp8_config.enabled=true"]
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
    "max_position_embeddings": 1024,
}


FP8_RECIPES = ("DelayedScaling", "Float8CurrentScaling")


def build(backend: str, layout: str = "bshd", recipe: str | None = None, **fields) -> NVMixtralForCausalLM:
    config = NVMixtralConfig(**SHAPE | fields, te_backend=backend, attn_input_format=layout)
    te = te_backend.resolve(backend)
    recipe = recipe and getattr(te_backend.recipe_module(te), recipe)()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = NVMixtralForCausalLM(config, PrecisionPlan((recipe,) * config.num_hidden_layers, te))
    finally:
        torch.set_default_dtype(torch.float32)
    initialize_weights(model, torch.device("cuda"), seed=0)
    return model.train()


def make_batch(layout: str = "bshd", seed: int = 0) -> dict:
    """1024 tokens, each following from the one before."""
    start = torch.randint(512, (1, 1), generator=torch.Generator().manual_seed(seed)).cuda()
    tokens = (torch.arange(1024, device="cuda")[None] * 7 + start) % 512
    if layout == "bshd":
        return {"input_ids": tokens.view(4, 256), "labels": tokens.view(4, 256)}
    offsets = torch.tensor([0, 1, 300, 301, 700, 1000, 1024], dtype=torch.int32, device="cuda")
    lengths = {"max_length_q": 512, "max_length_k": 512}
    return {"input_ids": tokens, "labels": tokens, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, **lengths}


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("alignment", [1, 16])
def test_logits_and_gradients_agree(layout, alignment):
    models = {backend: build(backend, layout, expert_token_alignment=alignment) for backend in BACKENDS}
    outputs = {backend: model(**make_batch(layout), output_logits=True) for backend, model in models.items()}
    te_output, reference_output = outputs["transformer_engine"], outputs["reference"]
    # A token whose second and third expert are within BF16 rounding of each other may choose differently.
    assert (te_output.tokens_per_expert_LE - reference_output.tokens_per_expert_LE).abs().sum() < 0.01 * 2 * 3 * 1024
    assert relative_error(te_output.logits, reference_output.logits) < 2e-2
    assert te_output.aux_loss.item() == pytest.approx(reference_output.aux_loss.item(), rel=5e-3)
    check_against_fp32(models, outputs, make_batch(layout))


def check_against_fp32(models: dict, outputs: dict, batch: dict) -> None:
    """Logits and every gradient of TE are about as close to the same weights in FP32 as those of the reference are.

    A few tokens choose another expert than in FP32, other ones in either backend, and move the gradients by some
    percent; a bound on TE against the reference would be one on those choices.
    """
    exact = build("reference", "thd" if "cu_seq_lens_q" in batch else "bshd").float()
    exact_output = exact(**batch, output_logits=True)
    exact_output.loss.backward()
    for backend in BACKENDS:
        models[backend].zero_grad()
        outputs[backend].loss.backward()
    errors = {}
    for backend in BACKENDS:
        parameters = dict(models[backend].named_parameters())
        errors[backend] = {name: relative_error(parameters[name].grad, p.grad) for name, p in exact.named_parameters()}
        errors[backend]["logits"] = relative_error(outputs[backend].logits, exact_output.logits)
    for name, error in errors["reference"].items():
        assert errors["transformer_engine"][name] < 2 * error, name


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_grouped_linear_agrees_in_fp8(recipe):
    """Forward, dgrad, wgrad, an empty group among them: the same quantised operands, another summation order.

    TE's grouped operations let Hopper's tensor cores keep the forward sums in fewer bits than FP32.
    """
    splits, results = torch.tensor([64, 0, 128, 32], device="cuda"), {}
    for backend in BACKENDS:
        te = te_backend.resolve(backend)
        layer = te.ops.GroupedLinear(4, 256, 384, bias=False, device="cuda", dtype=torch.bfloat16)
        torch.manual_seed(0)
        weights = list(layer.parameters())
        with torch.no_grad():
            for index, weight in enumerate(weights):  # experts of unlike magnitude
                weight.copy_(torch.randn(384, 256, device="cuda") * 0.02 * 4**index)
        x = torch.randn(224, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
        dy = torch.randn(224, 384, device="cuda", dtype=torch.bfloat16) * 1e-3
        for _ in range(2):  # delayed scaling: the second step has scales
            x.grad = None
            for weight in weights:
                weight.grad = None
            with te.autocast(enabled=True, recipe=getattr(te_backend.recipe_module(te), recipe)()):
                y = layer(x, splits)
            y.backward(dy)
        results[backend] = {"forward": y.detach(), "dgrad": x.grad, "wgrad": torch.stack([w.grad for w in weights])}
        assert results[backend]["wgrad"][1].count_nonzero() == 0
    for what, expected in results["reference"].items():
        assert relative_error(results["transformer_engine"][what], expected) < (2e-3 if what == "forward" else 1e-3), (
            what
        )


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_logits_and_gradients_agree_in_fp8(recipe):
    models = {backend: build(backend, recipe=recipe) for backend in BACKENDS}
    for _ in range(2):  # delayed scaling: the second step has scales
        outputs = {backend: model(**make_batch(), output_logits=True) for backend, model in models.items()}
        check_against_fp32(models, outputs, make_batch())
    te_output, reference_output = outputs["transformer_engine"], outputs["reference"]
    assert te_output.lm_loss.item() == pytest.approx(reference_output.lm_loss.item(), rel=5e-3)
    scales = {backend: delayed_scaling_tensors(model) for backend, model in models.items()}
    assert scales["transformer_engine"].keys() == scales["reference"].keys()
    for name, scale in scales["reference"].items():
        if "experts" in name and name.endswith("fwd.scale"):
            torch.testing.assert_close(scales["transformer_engine"][name], scale, rtol=0.1, atol=0, msg=name)


def make_run(backend: str, recipe: str | None, qinit: bool = False, **options) -> Run:
    config = make_config(recipe, te_backend=backend, qinit=qinit, preserve=qinit, dtype="bfloat16", **options)
    config.use_fp32_master_weights = True
    return Run(config, "ep", SHAPE | {"vocab_size": 64}, device="cuda")


def runnable(*recipes: str) -> list[str]:
    """Those that this device can run in hardware."""
    if not torch.cuda.is_available():
        return list(recipes)
    return [r for r in recipes if not hardware_problems(r, torch.cuda.get_device_capability(), torch.version.cuda)]


@pytest.mark.parametrize("qinit", [False, True])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_fp8_training_agrees(recipe, qinit):
    """At a learning rate at which a last bit stays one: at ten times it the loss rises first, and two runs of the
    reference whose weights differ by one BF16 step in 2 % of the elements are 19 % apart after 20 steps."""
    losses = {backend: make_run(backend, recipe, qinit, lr=2.5e-4).train(1, 20) for backend in BACKENDS}
    assert losses["reference"][-1] < 0.9 * losses["reference"][0]
    assert losses["transformer_engine"] == pytest.approx(losses["reference"], rel=3e-2)


@pytest.mark.parametrize("recipe", runnable("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"))
def test_quantised_experts_resume(recipe, tmp_path):
    run = make_run("transformer_engine", recipe, qinit=True, folder=str(tmp_path))
    experts = run.model.model.layers[0].mlp.experts
    assert is_quantized(experts.fc1_weight) and is_quantized(experts.fc2_weight)
    run.train(1, 3)
    run.checkpointer.save(3, {})
    expected = run.train(4, 6)
    resumed = make_run("transformer_engine", recipe, qinit=True, folder=str(tmp_path))
    assert resumed.checkpointer.load().step == 3
    assert resumed.train(4, 6) == pytest.approx(expected, rel=1e-3)


def test_block_scaling_is_refused():
    config = make_config("Float8BlockScaling", te_backend="transformer_engine", parallelism=ParallelismConfig(1, 1))
    with pytest.raises(ConfigError, match="no kernel for it in the experts' grouped products"):
        Run(config, "ep", SHAPE, device="cuda")


def test_fifty_training_steps_agree():
    losses = {}
    for backend in BACKENDS:
        model = build(backend)
        # FP32 masters: without them a last bit decides whether a BF16 weight moves at all.
        te = te_backend.resolve(backend)
        optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-4, master_weights=True)
        losses[backend] = []
        for step in range(50):
            output = model(**make_batch(seed=step))
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[backend].append(output.lm_loss.item())
    assert losses["reference"][-1] < 0.9 * losses["reference"][0]  # it learns
    assert losses["transformer_engine"] == pytest.approx(losses["reference"], rel=5e-3)


@pytest.mark.parametrize("alignment", [1, 16])
def test_experts_without_tokens_get_zero_gradients(alignment):
    """Every token of one document of equal tokens chooses alike in the first layer: six experts get nothing there."""
    model = build("transformer_engine", expert_token_alignment=alignment)
    batch = {key: torch.full_like(value, 7) for key, value in make_batch().items()}
    output = model(**batch)
    output.loss.backward()
    idle = output.tokens_per_expert_LE[0] == 0
    assert idle.sum() == 6
    experts = model.model.layers[0].mlp.experts
    for weight in (experts.fc1_weight, experts.fc2_weight):
        assert torch.isfinite(weight.grad).all()
        assert weight.grad[idle].count_nonzero() == 0 and weight.grad[~idle].count_nonzero() > 0


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_nothing(mode):
    grads = []
    for checkpointing in ("off", mode):
        model = build("transformer_engine", activation_checkpointing=checkpointing)
        model(**make_batch()).loss.backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in grads[0].items():
        assert relative_error(grads[1][name], gradient) < 1e-3, name


def test_fused_mlp_says_what_is_missing():
    major, minor = torch.cuda.get_device_capability()
    if major == 10:
        pytest.skip("the fused kernel can run here")
    fields = {"te_backend": "transformer_engine", "fused_grouped_mlp": True, "expert_token_alignment": 256}
    config = NVMixtralConfig(**SHAPE, **fields)
    with pytest.raises(ValueError, match=f"compute capability 10.x \\(here {major}.{minor}\\)"):
        config.check()


QINIT = [*FP8, "fp8_config.quantized_model_init_kwargs.enabled=true"]
CURRENT = [*FP8, "fp8_config.fp8_recipe=Float8CurrentScaling"]


@pytest.mark.parametrize(
    "ranks, ep_size, options",
    [
        (2, 2, []),
        (2, 1, []),
        (2, 2, ["use_sequence_packing=true"]),
        (2, 2, FP8),
        (2, 1, FP8),
        (2, 2, QINIT),
        (2, 2, CURRENT),
        (4, 4, []),
        (4, 2, []),
        (4, 4, QINIT),
        (4, 2, FP8),
    ],
)
def test_ranks_train_as_one_process_does(tmp_path, ranks, ep_size, options):
    """NCCL, one rank a card; or sharing one where the NCCL library lets them (NCCL_MULTI_RANK_GPU_ENABLE=1)."""
    if torch.cuda.device_count() < ranks and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        pytest.skip(f"needs {ranks} GPUs, or an NCCL that lets ranks share one")
    losses = {}
    for world_size in (1, ranks):
        argv = ["--config-name=L0_sanity", "num_train_steps=10", "dataset.micro_batch_size=2", *options]
        argv += ["validation.enabled=false", f"grad_acc_steps={ranks // world_size}"]
        argv += [f"parallelism.ep_size={ep_size}"] if world_size > 1 else []
        metrics = tmp_path / f"{world_size}.jsonl"
        run_script("train_fsdp2_ep.py", [*argv, f"logger.metrics_path={metrics}"], world_size, timeout_seconds=280)
        losses[world_size] = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    # BF16. FP8: one process quantises each of its micro-batches by itself.
    assert losses[ranks] == pytest.approx(losses[1], rel=2e-2 if FP8[0] in options else 5e-3)
