"""Generation on TransformerEngine's KV cache, BF16, against the same model without a cache and Hugging Face's."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import generation
import te_backend
from convert import convert_llama_hf_to_te
from modeling_llama_te import NVLlamaForCausalLM


pytestmark = pytest.mark.gpu

PROMPT_LENGTHS = (1, 3, 9, 17)
NEW_TOKENS = 64
OPTIONS = {
    "max_new_tokens": NEW_TOKENS,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
}


def make_pair(
    attn_input_format: str, dtype: torch.dtype = torch.bfloat16, num_attention_heads: int = 8
) -> tuple[LlamaForCausalLM, NVLlamaForCausalLM]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=0,
    )
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            hf = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    return hf, convert_llama_hf_to_te(hf, te_backend="transformer_engine", attn_input_format=attn_input_format)


def make_prompts(lengths=PROMPT_LENGTHS) -> dict[str, torch.Tensor]:
    size = max(lengths)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 512, (len(lengths), size), generator=generator)
    mask = torch.tensor([[0] * (size - length) + [1] * length for length in lengths])
    return {"input_ids": (tokens * mask).cuda(), "attention_mask": mask.cuda()}


def check_logits(hf, model, inputs, atol, **kwargs) -> None:
    """Each step's logits against Hugging Face's for the same tokens, all at once and without a cache."""
    output = model.generate(**inputs, **OPTIONS, output_logits=True, **kwargs)
    sequences, logits_BNV = output.sequences, torch.stack(output.logits, dim=1).float()
    prompt = inputs["input_ids"].shape[1]
    assert sequences.shape[1] == prompt + NEW_TOKENS and logits_BNV.shape[1] == NEW_TOKENS
    assert torch.equal(logits_BNV.argmax(-1), sequences[:, prompt:])
    for subject in (hf, model):
        expected = whole_logits(subject, sequences, inputs["attention_mask"])
        torch.testing.assert_close(logits_BNV, expected, rtol=0, atol=atol)


@torch.no_grad()
def whole_logits(model, sequences_BS: torch.Tensor, prompt_mask_BP: torch.Tensor) -> torch.Tensor:
    """Logits [B, NEW_TOKENS, V] of the new tokens, in one pass without a cache."""
    mask_BS = torch.nn.functional.pad(prompt_mask_BP, (0, NEW_TOKENS), value=1)
    kwargs = {}
    if isinstance(model, LlamaForCausalLM):  # which does not look for padding on the left
        kwargs["position_ids"] = (mask_BS.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=sequences_BS, attention_mask=mask_BS, **kwargs).logits
    return logits[:, prompt_mask_BP.shape[1] - 1 : -1].float()


@pytest.fixture(params=[True, False], ids=["graph", "no_graph"])
def graph(request, monkeypatch) -> bool:
    """Decoding as CUDA graphs, captured anew every 32 tokens, or launch by launch through TE's own cache."""
    if request.param:
        monkeypatch.setattr(generation, "WINDOW_MULTIPLE", 32)
    else:
        monkeypatch.setattr(generation, "_decodes_in_a_graph", lambda model, tokens, cache: False)
    return request.param


@pytest.mark.parametrize("attn_input_format", ["bshd", "thd"])
def test_logits_of_each_step(attn_input_format, graph):
    hf, model = make_pair(attn_input_format)
    # Logits of about 1: BF16 rounding of a few layers is some hundredths, a wrong position or row is tenths.
    check_logits(hf, model, make_prompts(), atol=6e-2)


@pytest.mark.parametrize("attn_input_format", ["bshd", "thd"])
def test_logits_of_each_step_in_fp32(attn_input_format, graph):
    """TE has another attention backend for it, and multiplies in TF32."""
    hf, model = make_pair(attn_input_format, torch.float32)
    check_logits(hf, model, make_prompts(), atol=1e-2)


def test_the_cache_of_the_caller():
    """The lines that users of TransformerEngine write."""
    hf, model = make_pair("thd")
    params = te_backend.resolve("transformer_engine").InferenceParams(
        max_batch_size=4,
        max_sequence_length=256,
        num_heads_kv=model.config.num_key_value_heads,
        head_dim_k=model.config.head_dim,
        dtype=torch.bfloat16,
        qkv_format="thd",
        max_ctx_len=256,
    )
    for layer_number in range(1, model.config.num_hidden_layers + 1):
        params.allocate_memory(layer_number)
    check_logits(hf, model, make_prompts(), atol=6e-2, past_key_values=params)
    with pytest.raises(ValueError, match=r"call its reset\(\)"):
        model.generate(**make_prompts(), past_key_values=params)
    params.reset()
    check_logits(hf, model, make_prompts((5, 2)), atol=6e-2, past_key_values=params)  # fewer sequences than room


def test_more_sequences_than_heads():
    lengths = (4, 1, 7, 2, 9, 3)
    hf, model = make_pair("bshd", num_attention_heads=4)
    check_logits(hf, model, make_prompts(lengths), atol=6e-2)
    _, packed = make_pair("thd", num_attention_heads=4)
    with pytest.raises(ValueError, match="at most num_attention_heads=4 in thd"):
        packed.generate(**make_prompts(lengths), max_new_tokens=2)


@pytest.mark.parametrize("attn_input_format", ["bshd", "thd"])
def test_beams_keep_their_own_caches(attn_input_format, graph):
    """The score that beam search reports for a sequence is the one that Hugging Face gives it."""
    hf, model = make_pair(attn_input_format, num_attention_heads=16)
    inputs = make_prompts()
    output = model.generate(**inputs, **OPTIONS, num_beams=3, output_scores=True)
    logits_BNV = whole_logits(hf, output.sequences, inputs["attention_mask"])
    new_BN = output.sequences[:, inputs["input_ids"].shape[1] :]
    log_p_BN = logits_BNV.log_softmax(-1).gather(2, new_BN.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(output.sequences_scores.float(), log_p_BN.mean(1), rtol=0, atol=1e-2)
