"""export.py: the final model, and the code next to it; that the code loads elsewhere is in test_generation.py."""

import ast
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import export
from dist_utils import run_on_ranks
from export import save_final_model
from modeling_llama_te import NVLlamaConfig, NVLlamaForCausalLM


SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}


def rewritten(source: str) -> list[str]:
    return export._with_relative_imports("module", source)[0].splitlines()[1:]


def test_imports_of_this_project_become_relative():
    source = """import te_backend
from te_reference import optimizers
def f():
    from te_reference.modules import (
        Linear,
        RMSNorm as Norm,
    )
    return Norm
"""
    assert rewritten(source) == [
        "from .te_backend import __name__ as _",
        "from . import te_backend as te_backend",
        "from .te_reference_optimizers import __name__ as _",
        "from . import te_reference_optimizers as optimizers",
        "def f():",
        "    from .te_reference_modules import Linear, RMSNorm as Norm",
        "    return Norm",
    ]


def test_other_imports_stay_and_optional_packages_are_not_demanded():
    assert rewritten("import torch\nfrom torch import nn\nimport torch.nn.functional as F\n") == [
        "import torch",
        "from torch import nn",
        "import torch.nn.functional as F",
    ]
    lines = ["try:", "    import triton.language as tl", "finally:", "    pass"]
    assert rewritten("import triton.language as tl\n") == lines


def test_no_module_is_left_behind():
    sources = export.model_sources("modeling_llama_te")
    assert {"modeling_llama_te", "loss", "te_backend", "te_reference", "te_reference_inference"} <= set(sources)
    for source in sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert not export._is_ours(node.module), node.module
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                assert node.module in sources, node.module
            elif isinstance(node, ast.Import):
                assert not any(export._is_ours(alias.name) for alias in node.names), ast.unparse(node)


def _architectures() -> list[str | None]:
    models = [
        NVLlamaForCausalLM(NVLlamaConfig(**SIZES, te_backend="reference")),
        LlamaForCausalLM(LlamaConfig(**SIZES)),
    ]
    for model in models:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return [export.project_architecture(model) for model in models]


def test_a_sharded_model_is_what_it_was():
    """FSDP2 gives it a class of another name."""
    assert run_on_ranks(_architectures, 2) == [["NVLlamaForCausalLM", None]] * 2


def tiny_llama(tied: bool, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)).to(dtype)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    vocabulary = {"<pad>": 0, "A": 1, "C": 2}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "<pad>")), pad_token="<pad>")


def check_final_model(path: Path, tied: bool, dtype: torch.dtype) -> None:
    weights = load_file(path / "model.safetensors")
    assert ("lm_head.weight" in weights) != tied
    assert {value.dtype for value in weights.values()} == {dtype}
    assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    expected = tiny_llama(tied, dtype)
    model = LlamaForCausalLM.from_pretrained(path, dtype="auto")
    assert model.dtype == dtype
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    ids_BS = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids_BS).logits, expected.eval()(ids_BS).logits)
    assert AutoTokenizer.from_pretrained(path).convert_tokens_to_ids("C") == 2


@pytest.mark.parametrize("tied, dtype", [(False, torch.float32), (True, torch.bfloat16)])
def test_final_model(tmp_path, tied, dtype, monkeypatch):
    model = tiny_llama(tied, dtype)
    monkeypatch.setattr(type(model.model.norm), "get_extra_state", lambda self: torch.zeros(3, dtype=torch.uint8))
    path = tmp_path / "final_model"
    path.mkdir()
    (path / "model-00001-of-00002.safetensors").write_text("an older model")
    save_final_model(model, tiny_tokenizer(), path)
    monkeypatch.undo()
    check_final_model(path, tied, dtype)
    assert [folder.name for folder in tmp_path.iterdir()] == ["final_model"]
    assert not (path / "model-00001-of-00002.safetensors").exists()


@pytest.mark.parametrize("module", sorted(export.MODEL_MODULES.values()))
def test_the_code_of_a_final_model_needs_no_configuration(module):
    sources = export.model_sources(module)
    assert "config" not in sources
    assert not any(
        name in source for source in sources.values() for name in ("import hydra", "from hydra", "omegaconf")
    )


def test_a_packed_run_s_final_model_takes_plain_batches(tmp_path):
    """How a run computed is not part of its model: no packing, backend or recomputation in the config."""
    heads = {"num_key_value_heads": 1, "head_dim": 8}
    run = {"attn_input_format": "thd", "te_backend": "reference", "activation_checkpointing": "full"}
    model = NVLlamaForCausalLM(NVLlamaConfig(**SIZES, **heads, **run))
    save_final_model(model, tiny_tokenizer(), tmp_path / "final_model")
    loaded = NVLlamaForCausalLM.from_pretrained(tmp_path / "final_model").train()
    ids_BS = torch.arange(8).view(2, 4)
    loaded(ids_BS, labels=ids_BS).loss.backward()
    assert loaded.config.activation_checkpointing == "off"


def test_final_model_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="final model cannot be written"):
        save_final_model(tiny_llama(False, torch.float32), tiny_tokenizer(), tmp_path / "file" / "final_model")


def save_wrapped_final_models(folder: str) -> None:
    model = tiny_llama(True, torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(torch.arange(6).view(1, 6))  # leaves the root's parameters gathered
    save_final_model(model, tiny_tokenizer(), f"{folder}/fsdp2")
    save_final_model(DistributedDataParallel(tiny_llama(False, torch.float32)), tiny_tokenizer(), f"{folder}/ddp")


def test_final_model_of_several_ranks(tmp_path):
    run_on_ranks(save_wrapped_final_models, 2, str(tmp_path))
    check_final_model(tmp_path / "fsdp2", True, torch.bfloat16)
    check_final_model(tmp_path / "ddp", False, torch.float32)
