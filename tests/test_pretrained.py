"""Starting from the weights of a folder: whole, and sharded, where each rank reads its own rows only."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import pretrained
from config import DatasetConfig, TrainConfig, ValidationConfig
from dataset import build_validation_loader, load_tokenizer
from dist_utils import run_on_ranks, run_script
from export import save_final_model
from modeling_llama_te import NVLlamaConfig, NVLlamaForCausalLM
from weight_init import initialize_weights


SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
CPU = torch.device("cpu")
TOKENIZER = "./tokenizers/nucleotide_fast_tokenizer"


def make_model(**overrides) -> NVLlamaForCausalLM:
    torch.manual_seed(0)
    return NVLlamaForCausalLM(NVLlamaConfig(**(SHAPE | overrides), te_backend="reference"))


def empty_model(**overrides) -> NVLlamaForCausalLM:
    with torch.device("meta"):
        return make_model(**overrides)


@pytest.fixture(scope="module")
def source() -> NVLlamaForCausalLM:
    return make_model()


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run") / "final_model"
    save_final_model(source, load_tokenizer(TOKENIZER), path)
    return path


def assert_same(model, source) -> None:
    expected = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), expected[name].detach().to(parameter.dtype)), name


def test_every_parameter_is_the_stored_one(source, folder):
    model = empty_model()
    initialize_weights(model, CPU, seed=7, init_from_pretrained=str(folder))
    assert_same(model, source)


def test_bf16_from_fp32(source, folder):
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = empty_model()
    finally:
        torch.set_default_dtype(torch.float32)
    initialize_weights(model, CPU, seed=7, init_from_pretrained=str(folder))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert_same(model, source)


def test_tied_embeddings_stay_tied(tmp_path):
    tied = make_model(tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    model = empty_model(tie_word_embeddings=True)
    initialize_weights(model, CPU, seed=7, init_from_pretrained=str(tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(model, tied)
    with pytest.raises(ValueError, match="tie_word_embeddings=true"):
        initialize_weights(empty_model(), CPU, seed=7, init_from_pretrained=str(tmp_path))


def test_several_shards(source, tmp_path):
    source.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = empty_model()
    initialize_weights(model, CPU, seed=7, init_from_pretrained=str(tmp_path))
    assert_same(model, source)


class CountingSlice:
    """A safetensors slice that counts the elements read through it."""

    read = 0

    def __init__(self, stored):
        self.stored = stored

    def __getitem__(self, index):
        result = self.stored[index]
        CountingSlice.read += result.numel()
        return result


def load_sharded(folder: str, replicas: int) -> tuple[dict, int]:
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = empty_model()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fill = pretrained._fill
    pretrained._fill = lambda parameter, stored: fill(parameter, CountingSlice(stored))
    initialize_weights(model, CPU, seed=7, init_from_pretrained=folder)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}, CountingSlice.read


@pytest.mark.parametrize("world_size, replicas", [(3, 1), (4, 2)])
def test_each_rank_reads_its_own_rows_only(source, folder, world_size, replicas):
    expected = dict(source.named_parameters())
    total = sum(parameter.numel() for parameter in expected.values())
    results = run_on_ranks(load_sharded, world_size, str(folder), replicas)
    for parameters, _ in results:
        assert parameters.keys() == expected.keys()
        for name, parameter in parameters.items():
            assert torch.equal(parameter, expected[name].detach()), name
    # 256, 128, 96, 48 and 32 rows over 3 ranks do not divide evenly, but together every element is read once a replica.
    assert sum(read for _, read in results) == replicas * total


def test_hugging_faces_model_from_its_own_layout(tmp_path):
    torch.manual_seed(0)
    expected = LlamaForCausalLM(LlamaConfig(**SHAPE))
    expected.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    initialize_weights(model, CPU, seed=7, init_from_pretrained=str(tmp_path))
    assert_same(model, expected)
    with pytest.raises(ValueError, match="in Hugging Face's layout: convert it first"):
        initialize_weights(empty_model(), CPU, seed=7, init_from_pretrained=str(tmp_path))


def test_another_meaning_of_the_weights_is_said(folder, caplog):
    model = empty_model(rms_norm_eps=1e-3)
    initialize_weights(model, CPU, seed=7, init_from_pretrained=str(folder))
    assert "rms_norm_eps: 1e-06 -> 0.001" in caplog.text


def edited(folder: Path, target: Path, edit) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda tensors: tensors.update(other=torch.zeros(1)), "not in the model: other"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}),
            r"model.norm.weight is \[31\], in the model \[32\]",
        ),
    ],
)
def test_a_folder_of_another_model_is_refused(edit, message, folder, tmp_path):
    path = edited(folder, tmp_path / "edited", edit)
    with pytest.raises(ValueError, match=message):
        initialize_weights(empty_model(), CPU, seed=7, init_from_pretrained=str(path))


def test_folders_that_cannot_be_read_are_named(folder, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    with open(cut / "model.safetensors", "r+b") as file:
        file.truncate(5000)
    (tmp_path / "empty").mkdir()

    def load_weights(path):
        pretrained.load_weights(make_model(), path)

    for load in (load_weights, partial(pretrained.load_model, device=CPU)):
        with pytest.raises(ValueError, match=r"cut/model.safetensors is truncated"):
            load(cut)
        with pytest.raises(ValueError, match="empty"):
            load(tmp_path / "empty")
        with pytest.raises(ValueError, match="nowhere"):
            load(tmp_path / "nowhere")


def test_load_model(source, folder, tmp_path):
    model = pretrained.load_model(folder, CPU, attn_input_format="thd")
    assert not model.training and model.config.attn_input_format == "thd"
    assert_same(model, source)
    path = edited(folder, tmp_path / "edited", lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"missing keys: model\.norm\.weight"):
        pretrained.load_model(path, CPU)
    (path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ValueError, match=r"holds \['GPT2LMHeadModel'\].*convert it first"):
        pretrained.load_model(path, CPU)


def test_a_training_run_starts_from_the_folder(source, folder, tmp_path):
    """Two ranks, FSDP2, a learning rate that moves nothing: the run's validation loss is the folder's."""
    metrics = tmp_path / "metrics.jsonl"
    arguments = [
        *("--config-name", "L0_finetune", f"init_from_pretrained={folder}", "te_backend=reference"),
        *("num_train_steps=1", "adamw_kwargs.lr=1e-12", "validation.max_batches=2"),
        *("dataset.num_workers=0", f"logger.metrics_path={metrics}"),
    ]
    run_script("train_fsdp2.py", arguments, world_size=2, cwd=tmp_path)
    config = TrainConfig(
        dataset=DatasetConfig(micro_batch_size=4, max_seq_length=256),
        validation=ValidationConfig(load_dataset_kwargs={"path": "./data/klebsiella_1084_500k"}, max_batches=2),
    )
    total = targets = 0
    for batch in build_validation_loader(config, load_tokenizer(TOKENIZER), 0, 1):
        with torch.no_grad():
            total += source(**batch, num_items_in_batch=1.0).loss.item()
        targets += int((batch["shift_labels"] != -100).sum())
    record = json.loads(metrics.read_text().splitlines()[-1])
    assert record["validation_loss"] == pytest.approx(total / targets, rel=1e-6)
