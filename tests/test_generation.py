"""Generation, padded batches and classification heads against Hugging Face: the same weights, FP32, on the CPU."""

import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

import generate
import generation
import te_reference
from convert import convert_folder, convert_llama_hf_to_te, hf_to_te_state_dict
from dataset import load_tokenizer
from export import save_final_model
from generation import KVCache, PaddedBatch
from modeling_llama_te import InferenceParams as ExportedInferenceParams
from modeling_llama_te import (
    NVLlamaConfig,
    NVLlamaForCausalLM,
    NVLlamaForSequenceClassification,
    NVLlamaForTokenClassification,
)


SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough that attention is far from uniform
    "pad_token_id": 0,
}
PROMPT_LENGTHS = (1, 3, 9, 17)
OPTIONS = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def make_pair(**te_kwargs) -> tuple[LlamaForCausalLM, NVLlamaForCausalLM]:
    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return hf, convert_llama_hf_to_te(hf, te_backend="reference", **te_kwargs)


def make_prompts(lengths=PROMPT_LENGTHS, side="left") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = max(lengths)
    tokens, mask = (
        torch.zeros(len(lengths), size, dtype=torch.int64),
        torch.zeros(len(lengths), size, dtype=torch.int64),
    )
    for row, length in enumerate(lengths):
        place = slice(size - length, size) if side == "left" else slice(length)
        tokens[row, place] = torch.randint(3, SHAPE["vocab_size"], (length,), generator=generator)
        mask[row, place] = 1
    return {"input_ids": tokens, "attention_mask": mask}


def new_params(model: NVLlamaForCausalLM, **overrides) -> te_reference.InferenceParams:
    config = model.config
    kwargs = {"max_batch_size": 4, "max_sequence_length": 128, "num_heads_kv": config.num_key_value_heads}
    kwargs |= {"head_dim_k": config.head_dim, "dtype": torch.float32, "qkv_format": "thd", "max_ctx_len": 128}
    return te_reference.InferenceParams(**(kwargs | overrides))


@pytest.mark.parametrize("attn_input_format", ["bshd", "thd"])
@pytest.mark.parametrize("strategy", ["greedy", "beams"])
def test_tokens_equal_hugging_face(attn_input_format, strategy):
    hf, model = make_pair(attn_input_format=attn_input_format)
    inputs = make_prompts()
    options = OPTIONS | ({"num_beams": 3, "num_return_sequences": 2} if strategy == "beams" else {})
    expected = hf.generate(**inputs, **options)
    assert expected.shape == (len(PROMPT_LENGTHS) * (2 if strategy == "beams" else 1), 17 + 64)
    for use_cache in (True, False):
        assert torch.equal(model.generate(**inputs, **options, use_cache=use_cache), expected), use_cache


@pytest.mark.parametrize("attn_input_format", ["bshd", "thd"])
@pytest.mark.parametrize("strategy", ["greedy", "beams"])
def test_the_step_that_a_graph_holds(monkeypatch, attn_input_format, strategy):
    """The computation of a CUDA graph, run step by step: windows of 16 columns, so several of them."""
    monkeypatch.setattr(generation, "_decodes_in_a_graph", lambda model, tokens, cache: True)
    monkeypatch.setattr(generation, "WINDOW_MULTIPLE", 16)
    hf, model = make_pair(attn_input_format=attn_input_format)
    options = OPTIONS | ({"num_beams": 3, "num_return_sequences": 2} if strategy == "beams" else {})
    assert torch.equal(model.generate(**make_prompts(), **options), hf.generate(**make_prompts(), **options))
    params = new_params(model, max_sequence_length=81, max_ctx_len=81)  # the last window is as long as the room
    output = model.generate(**make_prompts(), **OPTIONS, past_key_values=params)
    assert torch.equal(output, hf.generate(**make_prompts(), **OPTIONS))
    assert list(params.sequences.values()) == [length + 63 for length in PROMPT_LENGTHS]


def test_the_step_takes_the_pairs_that_te_s_layers_return(monkeypatch):
    """TE's TransformerLayer builds both output projections with return_bias=True."""
    monkeypatch.setattr(generation, "_decodes_in_a_graph", lambda model, tokens, cache: True)
    hf, model = make_pair()
    for layer in model.model.layers:
        for module in (layer.self_attention.proj, layer.layernorm_mlp):
            # Rows [B, D] are the step's; the layer itself, which reads the prompts, has [B, S, D].
            module.register_forward_hook(lambda module, inputs, y: (y, y.new_empty(0)) if y.ndim == 2 else y)
    assert torch.equal(model.generate(**make_prompts(), **OPTIONS), hf.generate(**make_prompts(), **OPTIONS))


def test_training_can_save_the_rope_table_of_inference_mode():
    """TE's RoPE saves its table for the backward pass, which torch refuses of a tensor made under inference_mode."""
    _, model = make_pair()
    with torch.inference_mode():
        model.generate(**make_prompts(), **OPTIONS | {"max_new_tokens": 2})
    assert not model.model.rotary(8, torch.device("cpu")).is_inference()


@pytest.mark.parametrize("attn_input_format", ["bshd", "thd"])
def test_logits_of_each_step_equal_hugging_face(attn_input_format):
    hf, model = make_pair(attn_input_format=attn_input_format)
    options = OPTIONS | {"max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
    expected, actual = hf.generate(**make_prompts(), **options), model.generate(**make_prompts(), **options)
    assert len(actual.logits) == 8
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), rtol=0, atol=1e-4)


def test_sampling_equals_hugging_face_given_the_seed():
    hf, model = make_pair(attn_input_format="thd")
    options = OPTIONS | {"do_sample": True, "temperature": 0.7, "top_k": 20, "num_return_sequences": 3}
    sequences = []
    for subject in (hf, model):
        torch.manual_seed(5)
        sequences.append(subject.generate(**make_prompts(), **options))
    assert torch.equal(*sequences)


def test_eos_ends_a_sequence_and_the_others_go_on():
    hf, model = make_pair()
    free = hf.generate(**make_prompts(), **OPTIONS)
    options = OPTIONS | {"eos_token_id": int(free[2, 17 + 5])}
    assert torch.equal(model.generate(**make_prompts(), **options), hf.generate(**make_prompts(), **options))


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@pytest.mark.parametrize("attn_input_format", ["bshd", "thd"])
def test_a_cache_of_the_caller(attn_input_format, name):
    """As users of TransformerEngine write it, under transformers' old and new name."""
    hf, model = make_pair(attn_input_format=attn_input_format)
    params = new_params(model)
    for layer_number in range(1, model.config.num_hidden_layers + 1):
        params.allocate_memory(layer_number)
    memory = [tensor.data_ptr() for layer in params.cache_manager.cache.values() for tensor in layer]
    output = model.generate(**make_prompts(), **OPTIONS, use_cache=True, **{name: params})
    assert torch.equal(output, hf.generate(**make_prompts(), **OPTIONS))
    assert memory == [tensor.data_ptr() for layer in params.cache_manager.cache.values() for tensor in layer]
    # The last token of a sequence is never fed back.
    assert list(params.sequences.values()) == [length + 63 for length in PROMPT_LENGTHS]
    with pytest.raises(ValueError, match=r"call its reset\(\)"):
        model.generate(**make_prompts(), **OPTIONS, **{name: params})
    params.reset()
    assert torch.equal(model.generate(**make_prompts(), **OPTIONS, **{name: params}), output)


def test_prompts_padded_on_the_right_are_refused():
    _, model = make_pair()
    with pytest.raises(ValueError, match=r"attention_mask ends with padding in row 0: .* Pad prompts on the left"):
        model.generate(**make_prompts(side="right"), **OPTIONS)


def test_inference_params_can_be_imported_with_the_model():
    assert ExportedInferenceParams is te_reference.InferenceParams


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"max_batch_size": 3}, "4 sequences exceed InferenceParams.max_batch_size=3"),
        ({"max_sequence_length": 16, "max_ctx_len": 16}, "17 tokens exceeds InferenceParams.max_sequence_length=16"),
        ({"max_sequence_length": 40, "max_ctx_len": 17}, "41 tokens exceeds InferenceParams.max_sequence_length=40"),
        ({"max_ctx_len": 16}, "max_ctx_len=16"),
        ({"qkv_format": "bshd", "max_ctx_len": None}, "max_ctx_len=None"),
    ],
)
def test_a_cache_without_room_is_refused(overrides, message):
    _, model = make_pair(attn_input_format="thd")
    with pytest.raises(ValueError, match=message):
        model.generate(**make_prompts(), **OPTIONS, past_key_values=new_params(model, **overrides))


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"position_ids": torch.arange(17).expand(4, -1)}, "position_ids"),
        ({"past_key_values": object()}, "past_key_values is a builtins.object"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size"),
    ],
)
def test_what_the_cache_cannot_do_is_refused(kwargs, message):
    _, model = make_pair()
    with pytest.raises(ValueError, match=message):
        model.generate(**make_prompts(), **OPTIONS, **kwargs)


def test_an_empty_prompt_is_refused():
    _, model = make_pair()
    inputs = make_prompts()
    inputs["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="prompt 1 of the batch has no token"):
        model.generate(**inputs, **OPTIONS)


# ---- The reference InferenceParams, as a serving loop would drive it. ----


def test_sequences_come_and_go():
    """Continuous batching: each step's output is that of the whole sequence run at once, without a cache."""
    torch.manual_seed(0)
    layer = te_reference.TransformerLayer(
        32, 64, 4, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0, layer_number=1, bias=False,
        normalization="RMSNorm", activation="swiglu", fuse_qkv_params=True, attn_input_format="thd",
        self_attn_mask_type="padding_causal",
    )  # fmt: skip
    angles = te_reference.RotaryPositionEmbedding(8)(64)
    params = te_reference.InferenceParams(3, 64, 2, 8, torch.float32, max_ctx_len=64, qkv_format="thd")
    inputs = {sequence: torch.randn(20, 32) for sequence in (7, 8, 9)}
    done = dict.fromkeys(inputs, 0)

    def offsets(lengths):
        return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)

    for step in ({7: 5, 8: 2}, {7: 1, 8: 1}, {8: 1, 9: 6}, {8: 1, 9: 1}):
        params.pre_step(OrderedDict(step))
        new = torch.cat([inputs[sequence][done[sequence] :][:count] for sequence, count in step.items()])
        cu_seqlens = offsets(list(step.values()))
        with torch.no_grad():
            out = layer(new, inference_params=params, rotary_pos_emb=angles, cu_seqlens_q=cu_seqlens)
        for (sequence, count), rows in zip(step.items(), out.split(list(step.values())), strict=True):
            done[sequence] += count
            whole = inputs[sequence][: done[sequence]]
            with torch.no_grad():
                expected = layer(whole, rotary_pos_emb=angles, cu_seqlens_q=offsets([len(whole)]))
            torch.testing.assert_close(rows, expected[-count:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "steps, message",
    [
        (({1: 2}, {1: 2}), "can only advance by 1, not 2"),
        (({1: 2, 2: 2}, {2: 1, 1: 1}), "must begin with those in the cache"),
        (({1: 2, 2: 2, 3: 1},), "3 sequences exceed max_batch_size=2"),
        (({1: 9},), "9 tokens exceeds max_sequence_length=8"),
    ],
)
def test_steps_that_the_cache_cannot_take(steps, message):
    params = te_reference.InferenceParams(2, 8, 1, 4, torch.float32)
    with pytest.raises(ValueError, match=message):
        for step in steps:
            params.pre_step(OrderedDict(step))


def test_beams_move_their_rows():
    params = te_reference.InferenceParams(3, 4, 1, 1, torch.float32)
    params.allocate_memory(1)
    cache = KVCache(params)
    cache.begin_prompt([2, 2, 2], 2, thd=False, num_heads=1)
    params.step(1, torch.arange(6.0).view(3, 2, 1, 1), torch.arange(6.0, 12.0).view(3, 2, 1, 1))
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    keys, values = params.cache_manager.cache[1]
    assert keys[:, :2].flatten().tolist() == [4, 5, 0, 1, 0, 1]
    assert values[:, :2].flatten().tolist() == [10, 11, 6, 7, 6, 7]


# ---- Padded batches outside generation. ----


def test_packing_a_padded_batch_and_back():
    mask = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 1]]).bool()
    tokens = torch.tensor([[9, 1, 2], [3, 9, 9], [9, 9, 4]])
    assert PaddedBatch(mask, packed=True).pack(tokens).tolist() == [[1, 2, 3, 4]]
    rows = PaddedBatch(mask, packed=False)
    assert rows.pack(tokens).tolist()[0] == [1, 2]
    assert [row[0] for row in rows.pack(tokens).tolist()] == [1, 3, 4]
    for packed in (True, False):
        layout = PaddedBatch(mask, packed)
        back = layout.unpack(layout.pack(tokens).unsqueeze(-1))[..., 0]
        assert torch.equal(back[mask], tokens[mask])


@pytest.mark.parametrize("attn_input_format", ["bshd", "thd"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(attn_input_format, side):
    hf, model = make_pair(attn_input_format=attn_input_format)
    inputs = make_prompts(side=side)
    real = inputs["attention_mask"].bool()
    position_ids = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)  # Hugging Face does not look for left padding
    expected = hf(**inputs, position_ids=position_ids).logits
    torch.testing.assert_close(model(**inputs).logits[real], expected[real], rtol=0, atol=1e-4)


def test_rows_without_a_mask_are_sequences_to_a_thd_model():
    hf, model = make_pair(attn_input_format="thd")
    tokens = torch.randint(SHAPE["vocab_size"], (3, 11), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(input_ids=tokens).logits, hf(input_ids=tokens).logits, rtol=0, atol=1e-4)


# ---- Classification heads. ----


@pytest.mark.parametrize("attn_input_format", ["bshd", "thd"])
@pytest.mark.parametrize(
    "hf_class, te_class",
    [
        (LlamaForSequenceClassification, NVLlamaForSequenceClassification),
        (LlamaForTokenClassification, NVLlamaForTokenClassification),
    ],
)
def test_classification_heads_equal_hugging_face(hf_class, te_class, attn_input_format):
    torch.manual_seed(0)
    hf = hf_class(LlamaConfig(**SHAPE, num_labels=5)).eval()
    model = te_class(
        NVLlamaConfig(**SHAPE, num_labels=5, attn_input_format=attn_input_format, te_backend="reference")
    ).eval()
    state = hf.state_dict()
    head = {name: state.pop(name) for name in list(state) if name.startswith("score.")}
    state["lm_head.weight"] = torch.zeros(SHAPE["vocab_size"], SHAPE["hidden_size"])
    converted = hf_to_te_state_dict(state, hf.config)
    del converted["lm_head.weight"]
    model.load_state_dict(converted | head)
    inputs = make_prompts(side="right")
    per_token = te_class is NVLlamaForTokenClassification
    labels = torch.tensor([1, 0, 4, 2])
    if per_token:
        labels = labels[:, None].expand(inputs["input_ids"].shape).masked_fill(inputs["attention_mask"] == 0, -100)
    expected, actual = hf(**inputs, labels=labels), model(**inputs, labels=labels)
    real = inputs["attention_mask"].bool() if per_token else ...
    torch.testing.assert_close(actual.logits[real], expected.logits[real], rtol=0, atol=1e-4)
    assert actual.loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
    actual.loss.backward()
    assert model.model.layers[0].self_attention.layernorm_qkv.weight.grad.abs().sum() > 0


def test_a_new_classification_head_is_initialised(tmp_path):
    _, model = make_pair()
    model.save_pretrained(tmp_path)
    head = NVLlamaForTokenClassification.from_pretrained(tmp_path, num_labels=3)
    assert torch.equal(head.score.bias, torch.zeros(3))
    assert head.score.weight.std() > 0.05
    assert torch.equal(head.model.embed_tokens.weight, model.model.embed_tokens.weight)


# ---- generate.py, and the model code in an exported folder. ----


@pytest.fixture(scope="module")
def final_model(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = NVLlamaConfig(
        **(SHAPE | {"vocab_size": 256, "bos_token_id": 2, "eos_token_id": 3}), te_backend="reference"
    )
    folder = tmp_path_factory.mktemp("run") / "final_model"
    save_final_model(NVLlamaForCausalLM(config), load_tokenizer("./tokenizers/nucleotide_fast_tokenizer"), folder)
    return folder


def test_generate_command(final_model, capsys):
    prompts = ["ACGTTGCA", "G"]
    arguments = [str(final_model), *(part for prompt in prompts for part in ("--prompt", prompt))]
    generate.main([*arguments, "--max-new-tokens", "12", "--ignore-eos", "--logprobs"])
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    model = NVLlamaForCausalLM.from_pretrained(final_model)
    for prompt, result in zip(prompts, results, strict=True):
        assert result["prompt"] == prompt and len(result["tokens"]) == 12
        tokens = torch.tensor([[2, *prompt.encode()]])
        for token, log_p in zip(result["tokens"], result["logprobs"], strict=True):
            with torch.no_grad():
                expected = model(input_ids=tokens).logits[0, -1].log_softmax(-1)
            assert token == int(expected.argmax())
            assert log_p == pytest.approx(expected[token].item(), abs=1e-5)
            tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)
    generate.main([*arguments, "--max-new-tokens", "12", "--ignore-eos", "--no-cache", "--logprobs"])
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == results


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere", "--prompt", "A"], "'nowhere': no such folder"),
        (["MODEL"], "give --prompt"),
        (["MODEL", "--prompt", "A", "--temperature", "2"], "--temperature has an effect with --do-sample only"),
        (["MODEL", "--prompt", "A", "--max-new-tokens", "0"], "--max-new-tokens=0 must be at least 1"),
        (["MODEL", "--prompt", "A", "--num-beams", "0"], "--num-beams=0 must be at least 1"),
        (["MODEL", "--prompt", "A", "--num-return-sequences", "0"], "--num-return-sequences=0 must be at least 1"),
        (["MODEL", "--prompt", "A", "--do-sample", "--top-p", "2"], "--top-p=2.0 must be above 0 and at most 1"),
        (["MODEL", "--prompt", "A", "--do-sample", "--top-k", "-1"], "--top-k=-1 must be at least 0"),
        (["MODEL", "--prompt", "A", "--device", "meta"], "--device=meta cannot be used here"),
        (["MODEL", "--prompt", "A", "--do-sample", "--temperature", "nan"], "--temperature=nan must be a number above"),
        (["MODEL", "--prompt", "A", "--device", "cudaa"], "--device=cudaa cannot be used here"),
        (["MODEL", "--prompt", "A", "--device", "cuda:99"], "--device=cuda:99 cannot be used here"),
        (["MODEL", "--prompt-file", "LATIN1"], "is no text in UTF-8"),
    ],
)
def test_generate_command_refuses(arguments, message, final_model, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_bytes("ACGT é".encode("latin-1"))
    places = {"MODEL": str(final_model), "LATIN1": str(tmp_path / "prompts.txt")}
    with pytest.raises(SystemExit) as error:
        generate.main([places.get(argument, argument) for argument in arguments])
    assert message in f"{error.value} {capsys.readouterr().err}"


def run_elsewhere(code, tmp_path, *arguments):
    """What a fresh interpreter prints that runs in another folder and cannot import the project."""
    (tmp_path / "load.py").write_text(code)
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, "load.py", *map(str, arguments)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


CONTINUE_ELSEWHERE = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder, trust in ((sys.argv[1], True), (sys.argv[2], False)):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
    inputs = tokenizer("ACGT", return_tensors="pt")
    sequence = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    prompt = inputs["input_ids"].tolist()
    print(json.dumps([type(model).__name__, prompt, sequence[0, len(prompt[0]):].tolist()]))
"""


def test_plain_transformers_continue_a_prompt_as_generate_py_does(final_model, tmp_path, capsys):
    """Nothing but AutoTokenizer and generate; of the converted folder without any code of this project."""
    convert_folder("te-to-hf", final_model, tmp_path / "hf")
    assert not list((tmp_path / "hf").glob("*.py"))
    generate.main([str(final_model), "--prompt", "ACGT", "--max-new-tokens", "40", "--logprobs"])
    expected = json.loads(capsys.readouterr().out)["tokens"]
    lines = run_elsewhere(CONTINUE_ELSEWHERE, tmp_path, final_model, tmp_path / "hf")
    assert [json.loads(line) for line in lines] == [
        [name, [[2, *b"ACGT"]], expected] for name in ("NVLlamaForCausalLM", "LlamaForCausalLM")
    ]


LOAD_ELSEWHERE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
inputs = {"input_ids": torch.tensor([[2, *b"ACGT"]]), "attention_mask": torch.ones(1, 5, dtype=torch.int64)}
tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
assert "modeling_llama_te" not in sys.modules and "te_reference" not in sys.modules
head = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, num_labels=2)
assert type(head).__name__ == "NVLlamaForSequenceClassification", type(head)
model.save_pretrained(sys.argv[2])  # the code travels on
again = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True)
assert torch.equal(again.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None), tokens)
print(type(model).__name__, tokens.tolist())
"""


def test_the_model_code_travels_with_the_weights(final_model, tmp_path):
    model = NVLlamaForCausalLM.from_pretrained(final_model)
    tokens = torch.tensor([[2, *b"ACGT"]])
    expected = model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None)
    lines = run_elsewhere(LOAD_ELSEWHERE, tmp_path, final_model, "saved_again")
    assert lines[-1] == f"NVLlamaForCausalLM {expected.tolist()}"
