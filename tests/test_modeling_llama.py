"""NVLlama on the reference backend against Hugging Face's LlamaForCausalLM: the same weights, FP32, on the CPU."""

import math
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from collator import IGNORE_INDEX
from convert import convert_llama_hf_to_te, hf_to_te_state_dict
from modeling_llama_te import NVLlamaConfig, NVLlamaForCausalLM, recomputed_layers, shift_within_sequences
from weight_init import initialize_weights


SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough that attention is far from uniform
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "gqa": {"num_key_value_heads": 2},
    "mha": {"num_key_value_heads": 6},
    "tied": {"num_key_value_heads": 3, "tie_word_embeddings": True},
    "llama3_rope": {"num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE},
}
LENGTHS = (17, 1, 40, 8)


def make_pair(variant: str, **te_kwargs) -> tuple[LlamaForCausalLM, NVLlamaForCausalLM]:
    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(**SHAPE, **VARIANTS[variant]))
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return hf, convert_llama_hf_to_te(hf, te_backend="reference", **te_kwargs)


def make_documents(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(SHAPE["vocab_size"], (length,), generator=generator) for length in LENGTHS]


def pack(documents: list[torch.Tensor]) -> dict:
    cu_seqlens = torch.tensor([0, *torch.tensor([len(d) for d in documents]).cumsum(0)], dtype=torch.int32)
    tokens = torch.cat(documents)[None]
    return {
        "input_ids": tokens,
        "labels": tokens,
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    }


def pad(documents: list[torch.Tensor]) -> dict:
    longest = max(map(len, documents))
    tokens = torch.zeros(len(documents), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, document in enumerate(documents):
        tokens[row, : len(document)], mask[row, : len(document)] = document, 1
    return {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, IGNORE_INDEX), "attention_mask": mask}


def assert_gradients_equal(model: NVLlamaForCausalLM, hf: LlamaForCausalLM, rtol: float) -> None:
    expected = hf_to_te_state_dict({name: p.grad for name, p in hf.named_parameters()}, hf.config)
    for name, parameter in model.named_parameters():
        error = (parameter.grad - expected[name]).norm() / expected[name].norm()
        assert error < rtol, f"{name}: {error}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_padded_batch_equals_hugging_face(variant):
    hf, model = make_pair(variant)
    batch = pad(make_documents())
    expected, actual = hf(**batch), model(**batch, output_logits=True)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(actual.logits[real], expected.logits[real], rtol=0, atol=1e-4)
    assert actual.loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
    expected.loss.backward()
    actual.loss.backward()
    assert_gradients_equal(model, hf, 1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_batch_equals_hugging_face_document_by_document(variant):
    hf, model = make_pair(variant, attn_input_format="thd")
    documents = make_documents()
    count = sum(LENGTHS) - len(LENGTHS)
    expected_loss = 0.0
    logits = []
    for document in documents:
        output = hf(input_ids=document[None])
        logits.append(output.logits[0])
        if len(document) > 1:
            loss = torch.nn.functional.cross_entropy(output.logits[0, :-1], document[1:], reduction="sum") / count
            loss.backward()
            expected_loss += loss.item()
    actual = model(**pack(documents), output_logits=True)
    torch.testing.assert_close(actual.logits[0], torch.cat(logits), rtol=0, atol=1e-4)
    assert actual.loss.item() == pytest.approx(expected_loss, abs=1e-5)
    actual.loss.backward()
    assert_gradients_equal(model, hf, 1e-4)


def test_packed_equals_unpacked():
    """Loss and gradients of a THD batch are those of its documents run one by one through the same model."""
    _, model = make_pair("gqa", attn_input_format="thd")
    documents = make_documents()
    count = sum(LENGTHS) - len(LENGTHS)
    total = 0.0
    for document in documents:
        loss = model(**pack([document]), num_items_in_batch=count).loss
        loss.backward()
        total += loss.item()
    one_by_one = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    packed = model(**pack(documents), num_items_in_batch=count).loss
    packed.backward()
    assert packed.item() == pytest.approx(total, rel=1e-5)
    for name, parameter in model.named_parameters():
        error = (parameter.grad - one_by_one[name]).norm() / one_by_one[name].norm()
        assert error < 1e-5, f"{name}: {error}"


def test_documents_do_not_see_each_other():
    _, model = make_pair("gqa", attn_input_format="thd")
    documents = make_documents()
    before = model(**pack(documents), output_logits=True).logits[0]
    documents[2] = (documents[2] + 1) % SHAPE["vocab_size"]
    after = model(**pack(documents), output_logits=True).logits[0]
    start, end = sum(LENGTHS[:2]), sum(LENGTHS[:3])
    changed = (before != after).any(dim=1)
    assert changed[start:end].all()
    assert not changed[:start].any()
    assert not changed[end:].any()


def test_documents_padded_apart_equal_documents_back_to_back():
    """cu_seqlens holds real lengths, cu_seqlens_padded the offsets: positions restart at the padded offsets."""
    _, model = make_pair("gqa", attn_input_format="thd")
    documents = make_documents()
    expected = model(**pack(documents), output_logits=True).logits[0]
    multiple = 8
    padded = [torch.nn.functional.pad(d, (0, -len(d) % multiple)) for d in documents]
    batch = pack(padded)
    offsets, real = batch["cu_seq_lens_q"], pack(documents)["cu_seq_lens_q"]
    batch |= {"cu_seq_lens_q": real, "cu_seq_lens_k": real, "pad_between_seqs": True}
    batch |= {"cu_seq_lens_q_padded": offsets, "cu_seq_lens_k_padded": offsets}
    actual = model(**batch, output_logits=True).logits[0]
    rows = torch.cat([torch.arange(len(d)) + int(start) for d, start in zip(documents, offsets, strict=False)])
    torch.testing.assert_close(actual[rows], expected, rtol=1e-5, atol=1e-5)


def test_shift_labels_are_used_and_equal_labels():
    """Pitfall 6: shift_labels decide; given both, labels are ignored."""
    _, model = make_pair("gqa")
    batch = pad(make_documents())
    by_labels = model(**batch).loss
    shifted = shift_within_sequences(batch["labels"], None)
    by_shift_labels = model(**{**batch, "labels": torch.zeros_like(shifted)}, shift_labels=shifted).loss
    assert by_shift_labels.item() == by_labels.item()


def test_no_target_crosses_a_document():
    """Hand-worked: [1 2 3][4][5 6] -> [2 3 .][.][6 .]."""
    labels = torch.tensor([[1, 2, 3, 4, 5, 6]])
    shifted = shift_within_sequences(labels, torch.tensor([0, 3, 4, 6]))
    assert shifted.tolist() == [[2, 3, -100, -100, 6, -100]]
    assert shift_within_sequences(labels, torch.tensor([0, 0, 6])).tolist() == [[2, 3, 4, 5, 6, -100]]


def test_recomputed_layers():
    assert recomputed_layers("off", 5) == recomputed_layers("0", 5) == set()
    assert recomputed_layers("full", 5) == recomputed_layers("5", 5) == {0, 1, 2, 3, 4}
    assert recomputed_layers("selective", 5) == {0, 2, 4}
    assert recomputed_layers("3", 32) == {0, 10, 21}
    with pytest.raises(ValueError, match="activation_checkpointing='6' is none of off, full, selective, nor a number"):
        NVLlamaConfig(**(SHAPE | {"num_hidden_layers": 5}), activation_checkpointing="6").check()


@pytest.mark.parametrize("fields", [{"rope_theta": 0.0}, {"rms_norm_eps": float("nan")}])
def test_numbers_that_would_only_fail_in_training(fields):
    name, value = next(iter(fields.items()))
    with pytest.raises(ValueError, match=f"{name}={value!r} must be a number above 0"):
        NVLlamaConfig(**SHAPE | fields).check()


@pytest.mark.parametrize("mode", ["full", "selective", "1"])
def test_activation_checkpointing_changes_nothing(mode):
    _, model = make_pair("gqa", attn_input_format="thd")
    batch = pack(make_documents())
    model(**batch).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.config.activation_checkpointing = mode
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


@pytest.mark.parametrize("variant", ["gqa", "tied"])
def test_initial_weights_do_not_depend_on_the_meta_device(variant):
    """Pitfall 21: tied embeddings stay tied through the meta device."""
    config = NVLlamaConfig(**SHAPE, **VARIANTS[variant], te_backend="reference")
    direct = NVLlamaForCausalLM(config)
    initialize_weights(direct, torch.device("cpu"), seed=3)
    with torch.device("meta"):
        deferred = NVLlamaForCausalLM(config)
    initialize_weights(deferred, torch.device("cpu"), seed=3)
    assert (deferred.lm_head.weight is deferred.model.embed_tokens.weight) == (variant == "tied")
    for (name, one), (other_name, other) in zip(direct.named_parameters(), deferred.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(one, other), name
        if one.ndim == 2:
            assert one.std().item() == pytest.approx(SHAPE["initializer_range"], rel=0.1)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"num_key_value_heads": 4}, "num_attention_heads=6 is not divisible by num_key_value_heads=4"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_input_format": "sbhd"}, "attn_input_format='sbhd'"),
    ],
)
def test_a_config_that_no_layer_can_honour_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        NVLlamaForCausalLM(NVLlamaConfig(**{**SHAPE, "num_key_value_heads": 2, **overrides}))


def test_an_unknown_rope_type_is_refused():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    config = NVLlamaConfig(**SHAPE, num_key_value_heads=2, rope_parameters=rope, te_backend="reference")
    with pytest.raises(ValueError, match="rope_type='yarn'"):
        NVLlamaForCausalLM(config)


@pytest.mark.parametrize(
    "rope, message",
    [
        ({"rope_theta": 1e4}, "rope_type=None: the layers have default, linear, llama3 RoPE"),
        ({"rope_type": ["llama3"], "rope_theta": 1e4}, r"rope_type=\['llama3'\]"),
        ({"rope_type": "default"}, "rope_theta=None must be a number above 0, for default RoPE"),
        ({"rope_type": "default", "rope_theta": math.nan}, "rope_theta=nan"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 0}, "factor=0 must be a number above 0, for linear RoPE"),
        ({"rope_type": "llama3", "rope_theta": 1e4}, "original_max_position_embeddings=None"),
        ({**LLAMA3_ROPE, "low_freq_factor": "1"}, "low_freq_factor='1'"),
        ({**LLAMA3_ROPE, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "low_freq_factor must be below"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "rotate whole heads"),
    ],
)
def test_rope_parameters_that_give_no_angles_are_refused(rope, message):
    config = NVLlamaConfig(**SHAPE)
    config.rope_parameters = rope  # as from_pretrained does with an override: nothing is filled in
    assert any(re.search(message, problem) for problem in config.problems())


def test_a_thd_model_asks_for_cu_seqlens():
    _, model = make_pair("gqa", attn_input_format="thd")
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
