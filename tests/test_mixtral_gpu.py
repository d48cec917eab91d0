"""Mixtral on a GPU: TransformerEngine against the reference backend with the same weights, BF16; several ranks."""

import json
import os

import pytest
import torch

import te_backend
from dist_utils import run_script
from modeling_mixtral_te import NVMixtralConfig, NVMixtralForCausalLM
from weight_init import initialize_weights


pytestmark = pytest.mark.gpu

BACKENDS = ("transformer_engine", "reference")
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


def build(backend: str, layout: str = "bshd", **fields) -> NVMixtralForCausalLM:
    config = NVMixtralConfig(**SHAPE | fields, te_backend=backend, attn_input_format=layout)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = NVMixtralForCausalLM(config)
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


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


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
    for output in outputs.values():
        output.loss.backward()
    te_parameters = dict(models["transformer_engine"].named_parameters())
    for name, parameter in models["reference"].named_parameters():
        limit = 0.1 if "mlp." in name else 5e-2  # a few tokens routed otherwise move an expert's gradient
        assert relative_error(te_parameters[name].grad, parameter.grad) < limit, name


def test_fifty_training_steps_agree():
    losses = {}
    for backend in BACKENDS:
        model = build(backend)
        # FP32 masters: without them a last bit decides whether a BF16 weight moves at all.
        te = te_backend.resolve(backend)
        optimizer = te.optimizers.FusedAdam(model.parameters(), lr=3e-4, master_weights=True)
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


@pytest.mark.parametrize(
    "layout, batches",
    [
        ("parallelism.ep_size=2", "use_sequence_packing=false"),
        ("parallelism.ep_size=1", "use_sequence_packing=false"),
        ("parallelism.ep_size=2", "use_sequence_packing=true"),
    ],
)
def test_two_ranks_train_as_one_process_does(tmp_path, layout, batches):
    """NCCL, one rank a card; or sharing one where the NCCL library lets them (NCCL_MULTI_RANK_GPU_ENABLE=1)."""
    if torch.cuda.device_count() < 2 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        pytest.skip("needs two GPUs, or an NCCL that lets two ranks share one")
    losses = {}
    for world_size in (1, 2):
        argv = ["--config-name=L0_sanity", "num_train_steps=10", "dataset.micro_batch_size=2", batches]
        argv += ["validation.enabled=false"]
        argv += [layout] if world_size == 2 else ["grad_acc_steps=2"]
        metrics = tmp_path / f"{world_size}.jsonl"
        run_script("train_fsdp2_ep.py", [*argv, f"logger.metrics_path={metrics}"], world_size, timeout_seconds=280)
        losses[world_size] = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert losses[2] == pytest.approx(losses[1], rel=5e-3)  # BF16
