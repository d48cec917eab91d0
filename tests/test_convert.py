"""Conversion: layouts by hand, logits against Hugging Face, byte-equal round trips, folders, memory, bad input."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import convert
from convert import (
    convert_folder,
    convert_llama_hf_to_te,
    convert_llama_te_to_hf,
    hf_to_te_state_dict,
    te_to_hf_state_dict,
)
from modeling_llama_te import NVLlamaConfig, NVLlamaForCausalLM


REPO = Path(convert.__file__).parent
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPE = {"vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMAS = {
    "gqa": {"num_key_value_heads": 2},
    "mha": {"num_key_value_heads": 4},
    "tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama3-rope": {"num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 256},
    "wide-heads": {"num_key_value_heads": 2, "head_dim": 16},
}
IDS = torch.randint(0, 80, (2, 40), generator=torch.Generator().manual_seed(1))


def randomized(model):
    """Every parameter random, norms too: a swapped pair of norms must show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(1.0)
    return model.eval()


def llama(**kwargs):
    return randomized(LlamaForCausalLM(LlamaConfig(**SHAPE, **kwargs)))


def mixtral(**kwargs):
    config = MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, **kwargs)
    return randomized(MixtralForCausalLM(config))


def to_transformers4(state_dict):
    """A transformers 5 Mixtral state dict under the names of transformers 4, as its release notes describe them."""
    old = {}
    for key, tensor in state_dict.items():
        moe = key.split(".mlp.")[0] + ".block_sparse_moe."
        if key.endswith("gate_up_proj"):
            for expert, gate_up in enumerate(tensor):
                gate, up = gate_up.chunk(2)
                old[f"{moe}experts.{expert}.w1.weight"] = gate.clone()
                old[f"{moe}experts.{expert}.w3.weight"] = up.clone()
        elif key.endswith("down_proj"):
            old |= {f"{moe}experts.{expert}.w2.weight": down.clone() for expert, down in enumerate(tensor)}
        else:
            old[key.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = tensor
    return old


def assert_same_bytes(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype and one[key].shape == other[key].shape, key
        assert torch.equal(one[key].contiguous().view(torch.uint8), other[key].contiguous().view(torch.uint8)), key


def folder_tensors(folder):
    return {key: tensor for path in folder.glob("*.safetensors") for key, tensor in load_file(path).items()}


def write_folder(folder, config, shards):
    """A model folder with these dicts of tensors as its shards."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name, metadata={"format": "pt"}
        )
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def llama_folder(tmp_path):
    llama(num_key_value_heads=2).save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    return tmp_path / "hf"


# ---- Layouts, worked by hand. ----


def test_llama_layout_by_hand():
    """D=2, N=4, K=2, H=1, F=2: rows numbered so that each says where it came from."""
    config = LlamaConfig(
        vocab_size=2,
        hidden_size=4,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    state = {key: torch.zeros_like(tensor) for key, tensor in model.state_dict().items()}
    layer = "model.layers.0."
    state[f"{layer}self_attn.q_proj.weight"] += torch.tensor([[10.0], [11], [12], [13]])
    state[f"{layer}self_attn.k_proj.weight"] += torch.tensor([[20.0], [21]])
    state[f"{layer}self_attn.v_proj.weight"] += torch.tensor([[30.0], [31]])
    state[f"{layer}mlp.gate_proj.weight"] += torch.tensor([[40.0], [41]])
    state[f"{layer}mlp.up_proj.weight"] += torch.tensor([[50.0], [51]])
    state[f"{layer}input_layernorm.weight"] += 1
    state[f"{layer}post_attention_layernorm.weight"] += 2
    te = hf_to_te_state_dict(state, config)
    assert te[f"{layer}self_attention.layernorm_qkv.weight"][:, 0].tolist() == [10, 11, 20, 30, 12, 13, 21, 31]
    assert te[f"{layer}layernorm_mlp.fc1_weight"][:, 1].tolist() == [40, 41, 50, 51]
    assert te[f"{layer}self_attention.layernorm_qkv.layer_norm_weight"].tolist() == [1, 1, 1, 1]
    assert te[f"{layer}layernorm_mlp.layer_norm_weight"].tolist() == [2, 2, 2, 2]


def test_mixtral_layout_by_hand():
    config = MixtralConfig(
        vocab_size=2,
        hidden_size=4,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=2,
    )
    state = {key: torch.zeros_like(tensor) for key, tensor in MixtralForCausalLM(config).state_dict().items()}
    state = to_transformers4(state)
    moe = "model.layers.0.block_sparse_moe."
    for expert in (0, 1):
        for number, name in enumerate(("w1", "w2", "w3"), start=1):
            state[f"{moe}experts.{expert}.{name}.weight"] += 10 * expert + number
    state[f"{moe}gate.weight"] += 7
    te = hf_to_te_state_dict(state, config)
    assert te["model.layers.0.mlp.experts.fc1_weight"][..., 0].tolist() == [[1, 3], [11, 13]]  # [gate; up] per expert
    assert te["model.layers.0.mlp.experts.fc2_weight"][..., 0].tolist() == [[2, 2, 2, 2], [12, 12, 12, 12]]
    assert te["model.layers.0.mlp.gate.weight"].unique().tolist() == [7]
    assert "model.layers.0.post_attention_layernorm.weight" in te


# ---- Models and state dicts. ----


@pytest.mark.parametrize("name", LLAMAS)
def test_llama_logits_equal_hugging_face(name):
    model_hf = llama(**LLAMAS[name])
    model_te = convert_llama_hf_to_te(model_hf, te_backend="reference")
    assert isinstance(model_te, NVLlamaForCausalLM) and not model_te.training
    with torch.no_grad():
        torch.testing.assert_close(model_te(IDS).logits, model_hf(IDS).logits, atol=1e-4, rtol=0)
    back = convert_llama_te_to_hf(model_te)
    assert type(back.config) is LlamaConfig
    assert back.config.rope_parameters == model_hf.config.rope_parameters
    assert not set(back.config.to_dict()) & set(convert.TE_CONFIG_KEYS)
    assert_same_bytes(back.state_dict(), model_hf.state_dict())
    if name == "tied":
        assert model_te.lm_head.weight is model_te.model.embed_tokens.weight
        assert back.lm_head.weight is back.model.embed_tokens.weight


def test_model_keeps_dtype_and_takes_config_fields():
    model_te = convert_llama_hf_to_te(llama().bfloat16(), te_backend="reference", attn_input_format="thd")
    assert {parameter.dtype for parameter in model_te.parameters()} == {torch.bfloat16}
    assert model_te.config.attn_input_format == "thd"
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ValueError, match="atn_input_format: not a field of NVLlamaConfig"):
        convert_llama_hf_to_te(llama(), atn_input_format="thd")
    model_hf = llama()
    model_hf.model.norm.bfloat16()
    with pytest.raises(ValueError, match="cast it to one dtype"):
        convert_llama_hf_to_te(model_hf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_state_dict_round_trip(dtype):
    """Every bit pattern that the random bytes hold, NaN payloads too."""
    model = llama(num_key_value_heads=2)
    generator = torch.Generator().manual_seed(2)
    state = {}
    for key, tensor in model.state_dict().items():
        random_bytes = torch.randint(0, 256, (tensor.numel() * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        state[key] = random_bytes.view(dtype).view(tensor.shape)
    assert_same_bytes(te_to_hf_state_dict(hf_to_te_state_dict(state, model.config), model.config), state)


def test_state_dicts_pass_over_known_extras():
    """transformers < 4.31 saved a RoPE table per layer; TE modules save scaling state."""
    model = llama()
    state = model.state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    te = hf_to_te_state_dict(state, model.config)
    assert not [key for key in te if "inv_freq" in key]
    te |= {"model.layers.0.self_attention.proj._extra_state": None, "model.norm._extra_state": torch.empty(0)}
    assert_same_bytes(te_to_hf_state_dict(te, model.config), model.state_dict())


def test_converted_tensors_share_no_memory_with_the_source():
    model = llama()
    te = hf_to_te_state_dict(model.state_dict(), model.config)
    sources = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    assert not sources & {tensor.untyped_storage().data_ptr() for tensor in te.values()}


def test_mixtral_state_dicts():
    model = mixtral()
    stacked = model.state_dict()  # transformers 5
    per_expert = to_transformers4(stacked)
    te, te_of_old = (hf_to_te_state_dict(state, model.config) for state in (stacked, per_expert))
    assert_same_bytes(te, te_of_old)
    assert te["model.layers.1.mlp.experts.fc1_weight"].shape == (3, 96, 32)
    assert_same_bytes(te_to_hf_state_dict(te, model.config, layout="transformers5"), stacked)
    assert_same_bytes(te_to_hf_state_dict(te, model.config), per_expert)
    with pytest.raises(ValueError, match=r"layout='v4' is not one of transformers4, transformers5"):
        te_to_hf_state_dict(te, model.config, layout="v4")


def test_state_dict_bad_input():
    model = llama()
    state = model.state_dict()
    norm, k = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"
    for broken, message in [
        ({key: value for key, value in state.items() if key != k}, rf"missing keys: {k}$"),
        (state | {"model.layers.2.mlp.up_proj.weight": state[norm]}, r"unexpected keys: model.layers.2.mlp.up_proj"),
        (state | {norm: torch.ones(31)}, r"model.norm.weight is \[31\], by the config \[32\]"),
        (state | {k: state[k].half()}, rf"layernorm_qkv.weight holds one dtype: .*{k} is torch.float16"),
    ]:
        with pytest.raises(ValueError, match=message):
            hf_to_te_state_dict(broken, model.config)
    with pytest.raises(ValueError, match=r"lm_head.weight differs .* tie_word_embeddings"):
        hf_to_te_state_dict(state, LlamaConfig(**{**model.config.to_dict(), "tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"missing keys: lm_head.weight"):
        hf_to_te_state_dict({key: value for key, value in state.items() if key != "lm_head.weight"}, model.config)
    with pytest.raises(ValueError, match="no place for biases"):
        hf_to_te_state_dict(state, LlamaConfig(**SHAPE, attention_bias=True))


# ---- Folders. ----


def test_te_config_keys_are_all_of_them():
    assert set(NVLlamaConfig().to_dict()) - set(LlamaConfig().to_dict()) <= set(convert.TE_CONFIG_KEYS)


@pytest.mark.parametrize("name", ["gqa", "tied"])
def test_folder_to_te(name, tmp_path):
    model = llama(**LLAMAS[name])
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"not copied")
    convert_folder("hf-to-te", tmp_path / "hf", tmp_path / "new" / "te")
    files = {path.name for path in (tmp_path / "new" / "te").iterdir()}
    code = {name for name in files if name.endswith(".py")}
    assert files - code == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert "modeling_llama_te.py" in code
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["te"]
    config = NVLlamaConfig.from_pretrained(tmp_path / "new" / "te", te_backend="reference")
    assert config.architectures == ["NVLlamaForCausalLM"]
    model_te = NVLlamaForCausalLM.from_pretrained(tmp_path / "new" / "te", config=config)
    with torch.no_grad():
        torch.testing.assert_close(model_te(IDS).logits, model.eval()(IDS).logits, atol=1e-4, rtol=0)
    assert ("lm_head.weight" in load_file(tmp_path / "new" / "te" / "model.safetensors")) == (name != "tied")


def test_folders_load_in_transformers_alone(tmp_path):
    """Round trips through the command; then a process that cannot see this project loads what came out."""
    torch.save(IDS, tmp_path / "ids.pt")
    models = {"gqa": llama(**LLAMAS["gqa"]).bfloat16(), "tied": llama(**LLAMAS["tied"]), "mixtral": mixtral()}
    folders = []
    for name, model in models.items():
        hf, te = tmp_path / f"{name}-hf", tmp_path / f"{name}-te"
        model.save_pretrained(hf, max_shard_size="15KB")
        convert.main(["hf-to-te", str(hf), str(te), "--max-shard-size", "30KB"])
        for layout in convert.LAYOUTS if name == "mixtral" else convert.LAYOUTS[:1]:
            back = tmp_path / f"{name}-{layout}"
            convert.main(["te-to-hf", str(te), str(back), "--layout", layout, "--max-shard-size", "30KB"])
            folders.append((name, back))
            for shard in back.glob("*.safetensors"):
                tensors = load_file(shard)
                assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 30_000
            assert json.loads((back / "config.json").read_text()) == json.loads((hf / "config.json").read_text())
            if layout == convert.LAYOUTS[0]:  # also what save_pretrained writes
                assert_same_bytes(folder_tensors(back), folder_tensors(hf))
            else:
                assert_same_bytes(folder_tensors(back), model.state_dict())
    code = f"""
        import torch, sys
        from transformers import AutoModelForCausalLM
        ids = torch.load({str(tmp_path / "ids.pt")!r})
        for folder in sys.argv[1:]:
            model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
            assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
            with torch.no_grad():
                torch.save(model(ids).logits, folder + "/logits.pt")
        assert "convert" not in sys.modules and "modeling_llama_te" not in sys.modules
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    arguments = [sys.executable, "-c", textwrap.dedent(code), *(str(folder) for _, folder in folders)]
    subprocess.run(arguments, check=True, cwd=tmp_path, env=environment)
    for name, folder in folders:
        original = type(models[name]).from_pretrained(tmp_path / f"{name}-hf")
        with torch.no_grad():
            torch.testing.assert_close(torch.load(folder / "logits.pt"), original(IDS).logits, atol=0, rtol=0)


def test_index_is_what_hugging_face_writes(llama_folder, tmp_path):
    convert_folder("hf-to-te", llama_folder, tmp_path / "te", max_shard_bytes=20_000)
    convert_folder("te-to-hf", tmp_path / "te", tmp_path / "back", max_shard_bytes=20_000)
    written, expected = (
        json.loads((folder / "model.safetensors.index.json").read_text())
        for folder in (tmp_path / "back", llama_folder)
    )
    assert written["metadata"] == expected["metadata"]
    assert written["weight_map"].keys() == expected["weight_map"].keys()
    for key, shard in written["weight_map"].items():
        assert key in load_file(tmp_path / "back" / shard)


def test_parts_of_one_tensor_in_different_shards(tmp_path):
    """One key per shard: q, k, v, gate, up of a layer all lie apart; dtypes differ from shard to shard."""
    model = llama(**LLAMAS["gqa"])
    state = {key: t.bfloat16() if "norm" not in key else t for key, t in model.state_dict().items()}
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    source = write_folder(tmp_path / "hf", config, [{key: state[key]} for key in reversed(state)])
    convert_folder("hf-to-te", source, tmp_path / "te")
    del state["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert_same_bytes(load_file(tmp_path / "te" / "model.safetensors"), hf_to_te_state_dict(state, model.config))


def test_te_folder_with_extra_state(tmp_path):
    model = llama()
    tensors = hf_to_te_state_dict(model.state_dict(), model.config)
    tensors["model.layers.0.layernorm_mlp._extra_state"] = torch.zeros(5, dtype=torch.uint8)
    config = NVLlamaConfig(**model.config.to_dict(), te_backend="reference").to_dict()
    config |= {"architectures": ["NVLlamaForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_llama_te.X"}}
    source = write_folder(tmp_path / "te", config, [tensors])
    convert_folder("te-to-hf", source, tmp_path / "hf")
    assert_same_bytes(load_file(tmp_path / "hf" / "model.safetensors"), model.state_dict())
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"] and not set(written) & set(convert.TE_CONFIG_KEYS)


def test_hub_name_in_the_offline_cache(llama_folder, tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--someone--tiny" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    llama_folder.rename(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert convert.resolve_source("someone/tiny") == snapshot
    with pytest.raises(ValueError, match="'someone/else' is neither a folder nor a model that the Hub gives"):
        convert.resolve_source("someone/else")


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def drop_shard_keys(folder):
    shard = folder / "model-00001-of-00005.safetensors"
    tensors = load_file(shard)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors | {"model.extra.weight": torch.ones(1)}, shard)


BAD_FOLDERS = {
    "model type": (lambda f: edit_json(f / "config.json", model_type="mistral"), "config.json: model_type='mistral'"),
    "architecture": (
        lambda f: edit_json(f / "config.json", architectures=["LlamaForSequenceClassification"]),
        r"architectures=\['LlamaForSequenceClassification'\]: hf-to-te takes \['LlamaForCausalLM'\]",
    ),
    "already te": (lambda f: edit_json(f / "config.json", architectures=["NVLlamaForCausalLM"]), "hf-to-te takes"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config no json": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "config invalid": (
        lambda f: edit_json(f / "config.json", num_attention_heads=5),
        "(?s)config.json: .*not a multiple",
    ),
    "activation": (lambda f: edit_json(f / "config.json", hidden_act="gelu"), "hidden_act='gelu'"),
    "shape": (
        lambda f: edit_json(f / "config.json", vocab_size=81),
        r"embed_tokens.weight is \[80, 32\], .* \[81, 32\]",
    ),
    "missing keys": (lambda f: edit_json(f / "config.json", num_hidden_layers=3), "missing keys: model.layers.2"),
    "extra keys": (lambda f: edit_json(f / "config.json", num_hidden_layers=1), "unexpected keys: model.layers.1"),
    "truncated": (
        lambda f: cut(f / "model-00002-of-00005.safetensors"),
        "model-00002-of-00005.safetensors is truncated",
    ),
    "empty shard": (lambda f: (f / "model-00003-of-00005.safetensors").write_bytes(b""), "00003.* is truncated"),
    "missing shard": (lambda f: (f / "model-00004-of-00005.safetensors").unlink(), "model-00004.* is missing"),
    "index": (lambda f: edit_json(f / "model.safetensors.index.json", weight_map=[]), "index.json has no weight_map"),
    "no weights": (lambda f: (f / "model.safetensors.index.json").unlink(), "holds neither model.safetensors nor"),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_bad_folder(name, llama_folder, tmp_path):
    damage, message = BAD_FOLDERS[name]
    damage(llama_folder)
    with pytest.raises(ValueError, match=message):
        convert_folder("hf-to-te", llama_folder, tmp_path / "te")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_index_and_shard_disagree(llama_folder, tmp_path):
    index = llama_folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["lm_head.weight"], weight_map["model.norm.weight"] = sorted(set(weight_map.values()))[:2]
    edit_json(index, weight_map=weight_map)
    with pytest.raises(
        ValueError, match=r"model.safetensors.index.json and .*safetensors disagree on (lm_head|model.norm)"
    ):
        convert_folder("hf-to-te", llama_folder, tmp_path / "te")


def test_tied_folder_with_another_head(llama_folder, tmp_path):
    edit_json(llama_folder / "config.json", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        convert_folder("hf-to-te", llama_folder, tmp_path / "te")


def test_destination_exists_and_full_disk(llama_folder, tmp_path, monkeypatch):
    (tmp_path / "te").mkdir()
    with pytest.raises(ValueError, match="te exists: choose a new folder"):
        convert_folder("hf-to-te", llama_folder, tmp_path / "te")
    assert list((tmp_path / "te").iterdir()) == []
    usage = convert.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"te2 needs 0.00 GB and its disk has 0.00 GB free"):
        convert_folder("hf-to-te", llama_folder, tmp_path / "te2")


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_nothing_half_written_is_left(error, llama_folder, tmp_path, monkeypatch):
    """The failure comes while the second shard is written."""
    write_shard = convert._write_shard

    def fail_on_second(path, *args):
        if "00002" in path.name:
            path.write_bytes(b"half")
            raise error
        write_shard(path, *args)

    monkeypatch.setattr(convert, "_write_shard", fail_on_second)
    with pytest.raises(type(error)):
        convert_folder("hf-to-te", llama_folder, tmp_path / "te", max_shard_bytes=20_000)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_source_cut_while_being_read(llama_folder, tmp_path, monkeypatch):
    check = convert.check_tied

    def cut_then_check(*args):
        cut(llama_folder / "model-00005-of-00005.safetensors")
        check(*args)

    monkeypatch.setattr(convert, "check_tied", cut_then_check)
    with pytest.raises(ValueError, match=r"model-00005-of-00005.safetensors ended before its tensors did"):
        convert_folder("hf-to-te", llama_folder, tmp_path / "te")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_command_line_errors(llama_folder, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"convert.py: .*hf exists"):
        convert.main(["hf-to-te", str(llama_folder), str(llama_folder)])
    with pytest.raises(SystemExit):
        convert.main(["hf-to-te", str(llama_folder), str(tmp_path / "te"), "--max-shard-size", "5 apples"])
    assert "'5 apples' is not a size" in capsys.readouterr().err
    assert convert.parse_size("5GB") == 5_000_000_000
    assert convert.parse_size("2MiB") == 2_097_152
    assert convert.parse_size("123") == 123
    with pytest.raises(ValueError, match="direction='te' is neither"):
        convert_folder("te", llama_folder, tmp_path / "te")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_model(tmp_path):
    """30 million FP32 parameters in one 120 MB file: far less than that is held, whatever the shard size."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=2048, num_hidden_layers=5, num_attention_heads=8
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    code = """
        import convert

        def resident_bytes(field):
            return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

        before = resident_bytes("VmRSS")
        convert.convert_folder("hf-to-te", FOLDER + "/hf", FOLDER + "/te", max_shard_bytes=20_000_000)
        convert.convert_folder("te-to-hf", FOLDER + "/te", FOLDER + "/back")
        print(resident_bytes("VmHWM") - before)
    """.replace("FOLDER", repr(str(tmp_path)))
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, check=True, cwd=REPO, capture_output=True, text=True)
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 100_000_000
    assert int(result.stdout) < 30_000_000  # 1.5 times the largest shard of the way there, a quarter of the way back's
