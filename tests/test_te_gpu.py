"""TransformerEngine against the reference backend on a GPU: the same weights, BF16."""

import pytest
import torch

import te_backend
from comparison import relative_error
from modeling_llama_te import NVLlamaConfig, NVLlamaForCausalLM
from weight_init import initialize_weights


pytestmark = pytest.mark.gpu

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


def build(backend: str, attn_input_format: str, **overrides) -> NVLlamaForCausalLM:
    config = NVLlamaConfig(**{**SHAPE, **overrides}, te_backend=backend, attn_input_format=attn_input_format)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = NVLlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    initialize_weights(model, torch.device("cuda"), seed=0)
    return model


def make_batch(attn_input_format: str, seed: int = 0) -> dict:
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = torch.randint(512, (1, 1024), generator=generator, device="cuda")
    # A learnable stream: every token follows from the one before.
    tokens = (torch.arange(1024, device="cuda")[None] * 7 + tokens[:, :1]) % 512
    if attn_input_format == "bshd":
        return {"input_ids": tokens.view(4, 256), "labels": tokens.view(4, 256)}
    cu_seqlens = torch.tensor([0, 1, 300, 301, 700, 1000, 1024], dtype=torch.int32, device="cuda")
    lengths = {"max_length_q": 512, "max_length_k": 512}
    return {
        "input_ids": tokens,
        "labels": tokens,
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        **lengths,
    }


@pytest.mark.parametrize("attn_input_format", ["bshd", "thd"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_agree(attn_input_format, tied):
    models = {
        backend: build(backend, attn_input_format, tie_word_embeddings=tied)
        for backend in ("transformer_engine", "reference")
    }
    missing, unexpected = models["transformer_engine"].load_state_dict(models["reference"].state_dict(), strict=False)
    assert not unexpected and all(name.endswith("_extra_state") for name in missing)
    outputs = {backend: model(**make_batch(attn_input_format), output_logits=True) for backend, model in models.items()}
    assert relative_error(outputs["transformer_engine"].logits, outputs["reference"].logits) < 2e-2
    for output in outputs.values():
        output.loss.backward()
    te_parameters = dict(models["transformer_engine"].named_parameters())
    for name, parameter in models["reference"].named_parameters():
        assert relative_error(te_parameters[name].grad, parameter.grad) < 5e-2, name


@pytest.mark.parametrize("attn_input_format", ["bshd", "thd"])
def test_fifty_training_steps_agree(attn_input_format):
    losses = {}
    for backend in ("transformer_engine", "reference"):
        model = build(backend, attn_input_format)
        # FP32 masters: without them a last bit decides whether a BF16 weight moves at all.
        te = te_backend.resolve(backend)
        optimizer = te.optimizers.FusedAdam(model.parameters(), lr=3e-4, master_weights=True)
        losses[backend] = []
        for step in range(50):
            loss = model(**make_batch(attn_input_format, seed=step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[backend].append(loss.item())
    assert losses["reference"][-1] < 0.9 * losses["reference"][0]  # it learns
    for te_loss, reference_loss in zip(losses["transformer_engine"], losses["reference"], strict=True):
        assert te_loss == pytest.approx(reference_loss, rel=5e-3)


def test_padding_beyond_the_documents_leaves_gradients_finite():
    """Pitfall 7: the tail padding is an entry of cu_seqlens of its own, so that no gradient row is uninitialised."""
    model = build("transformer_engine", "thd")
    batch = make_batch("thd")
    batch["labels"] = batch["labels"].clone()
    batch["labels"][:, 1000:] = -100
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
