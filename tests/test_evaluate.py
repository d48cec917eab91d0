"""evaluate.py against training's validation loss and against Hugging Face, record by record; FP32 on the CPU."""

import json
import math
import random
import sys
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import evaluate
from config import DatasetConfig, TrainConfig, ValidationConfig
from convert import convert_llama_hf_to_te
from dataset import build_validation_loader, load_tokenizer
from dist_utils import REPOSITORY, run_on_ranks
from export import save_final_model
from modeling_llama_te import NVLlamaForCausalLM
from scoring import cut_windows
from training import validate
from windows import WindowCutter


OVERWRITTEN = str(REPOSITORY / "data/../data/klebsiella_1084_500k/klebsiella_1084.parquet")
BOS, EOS = 2, 3
WINDOW = 40
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
TOKENIZER = "./tokenizers/nucleotide_fast_tokenizer"


@pytest.fixture(scope="module")
def hf() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


@pytest.fixture(scope="module")
def model_folder(hf, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "final_model"
    save_final_model(convert_llama_hf_to_te(hf, te_backend="reference"), load_tokenizer(TOKENIZER), folder)
    return folder


@pytest.fixture(scope="module")
def texts() -> list[str | None]:
    draw = random.Random(0)
    lengths = [5, 90, 1, 38, 39, 0, 150, 2, 37, 64]
    texts: list[str | None] = ["".join(draw.choices("ACGTacgtN", k=length)) for length in lengths]
    return [*texts, None]


@pytest.fixture(scope="module")
def parquet(texts, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "records.parquet"
    ids = [f"id{index}" for index in range(len(texts))]
    pq.write_table(pa.table({"sequence": texts, "id": ids}), path, row_group_size=4)
    return path


def run(capsys, model_folder: Path, data: Path, *arguments: str) -> dict:
    evaluate.main([str(model_folder), str(data), "--max-seq-length", str(WINDOW), *arguments])
    return json.loads(capsys.readouterr().out)


def log_probs(hf: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """log p of every token but the first."""
    with torch.no_grad():
        logits = hf(torch.tensor([tokens])).logits[0, :-1]
    return logits.double().log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def hf_score(hf: LlamaForCausalLM, text: str | None) -> float:
    """A record's sum, over windows of WINDOW tokens that do not overlap: BOS and 39 bases, EOS in the last."""
    if not text:
        return 0.0
    rest, total = [*text.encode()], 0.0
    while len(rest) > WINDOW - 2:
        count = min(WINDOW - 1, len(rest) - 1)
        total += log_probs(hf, [BOS, *rest[:count]]).sum().item()
        rest = rest[count:]
    return total + log_probs(hf, [BOS, *rest, EOS]).sum().item()


def validation_loss(model_folder: Path, data: Path, packing: bool) -> float:
    """What a training run on these data logs."""
    config = TrainConfig(
        use_sequence_packing=packing,
        dataset=DatasetConfig(max_seq_length=WINDOW, micro_batch_size=3, mask_degenerate_bases=True),
        validation=ValidationConfig(load_dataset_kwargs={"path": str(data)}),
    )
    attn_input_format = "thd" if packing else "bshd"
    model = NVLlamaForCausalLM.from_pretrained(model_folder, attn_input_format=attn_input_format)
    loader = build_validation_loader(config, load_tokenizer(TOKENIZER), 0, 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return validate(model, loader, torch.device("cpu"), next(iter(loader)))
    finally:
        dist.destroy_process_group()


def test_loss_is_the_validation_loss_of_training(model_folder, parquet, capsys):
    expected = [validation_loss(model_folder, parquet, packing) for packing in (True, False)]
    assert expected[0] == pytest.approx(expected[1], abs=1e-6)
    for arguments in (["--batch-tokens", "16384"], ["--batch-tokens", "41"], ["--no-packing", "--batch-tokens", "200"]):
        result = run(capsys, model_folder, parquet, "--mask-degenerate-bases", *arguments)
        assert result["loss"] == pytest.approx(expected[0], abs=1e-6)
        assert result["bits_per_token"] == pytest.approx(expected[0] / math.log(2), abs=1e-6)
        assert result["perplexity"] == pytest.approx(math.exp(expected[0]), rel=1e-6)


def test_scores_equal_hugging_face_record_by_record(hf, model_folder, parquet, texts, capsys, tmp_path):
    table_path = tmp_path / "scores.parquet"
    result = run(capsys, model_folder, parquet, "--scores", str(table_path), "--id-column", "id")
    table = pq.read_table(table_path).to_pydict()
    expected = [hf_score(hf, text) for text in texts]
    assert table["record"] == list(range(len(texts)))
    assert table["name"] == [f"id{index}" for index in range(len(texts))]
    assert [score or 0.0 for score in table["log_likelihood"]] == pytest.approx(expected, abs=1e-4)
    assert [score is None for score in table["log_likelihood"]] == [not text for text in texts]
    targets = sum(len(text) + 1 for text in texts if text)
    assert sum(table["num_targets"]) == targets == result["num_targets"]
    assert result["loss"] == pytest.approx(-sum(expected) / targets, abs=1e-6)
    bases = sum(len(text) for text in texts if text)
    assert result["bits_per_base"] == pytest.approx(-sum(expected) / math.log(2) / bases, rel=1e-6)
    assert (result["num_records"], result["num_records_without_target"]) == (len(texts), 2)


def test_a_stride_gives_context_and_scores_every_token_once(hf, model_folder, parquet, texts, capsys, tmp_path):
    stride = 7
    table_path = tmp_path / "scores.parquet"
    run(capsys, model_folder, parquet, "--scores", str(table_path), "--stride", str(stride))
    table = pq.read_table(table_path).to_pydict()
    for text, score, num_targets in zip(texts, table["log_likelihood"], table["num_targets"], strict=True):
        if not text:
            continue
        tokens, total, start, scored = [*text.encode()], 0.0, 0, 0
        while True:  # scored: tokens of the record that have been
            last = len(tokens) - start <= WINDOW - 2
            end = len(tokens) if last else min(start + WINDOW - 1, len(tokens) - 1)
            log_p = log_probs(hf, [BOS, *tokens[start:end], *([EOS] if last else [])])
            total += log_p[scored - start :].sum().item()
            if last:
                break
            start, scored = end - stride, end
        assert score == pytest.approx(total, abs=1e-4)
        assert num_targets == len(text) + 1


def score_on_a_rank(model_folder: str, data: str, folder: str) -> dict:
    options = evaluate.parse_arguments([model_folder, data, "--max-seq-length", str(WINDOW), "--batch-tokens", "64"])
    scores, _, characters = evaluate.evaluate(options, torch.device("cpu"))
    return {**evaluate.summary(scores, characters), "scores": scores.log_likelihood.tolist()}


def test_ranks_share_the_work(model_folder, parquet, capsys, tmp_path):
    alone = run(capsys, model_folder, parquet)
    results = run_on_ranks(score_on_a_rank, 3, str(model_folder), str(parquet), str(tmp_path))
    assert results[0] == results[1] == results[2]
    for key, value in alone.items():
        assert results[0][key] == pytest.approx(value, rel=1e-6), key


def test_fasta(model_folder, parquet, texts, capsys, tmp_path):
    fasta, scores = tmp_path / "records.fa", tmp_path / "scores.parquet"
    fasta.write_text(
        "".join(f">r{index} more words\n{text[:30]}\n{text[30:]}\n" for index, text in enumerate(texts[:-1]))
    )
    result = run(capsys, model_folder, fasta, "--scores", str(scores))
    assert pq.read_table(scores)["name"].to_pylist() == [f"r{index}" for index in range(len(texts) - 1)]
    assert result["loss"] == pytest.approx(run(capsys, model_folder, parquet)["loss"], abs=1e-6)


def test_windows_know_what_was_scored_before():
    """Hand-worked, as in windows.py: max_seq_length=6, stride=1, BOS and EOS."""
    cutter = WindowCutter(load_tokenizer(TOKENIZER), max_seq_length=6, stride=1)
    windows = list(cut_windows(["abcdefg", "", "x"], cutter))
    assert [bytes(window.tokens.tolist()) for window in windows] == [b"\2abcde", b"\2efg\3", b"\2x\3"]
    assert [(window.record, window.scored_before) for window in windows] == [(0, 0), (0, 1), (2, 0)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["MODEL"], "give either data or --lm-eval-tasks"),
        (["MODEL", "DATA", "--lm-eval-tasks", "x"], "give either data or --lm-eval-tasks"),
        (["nowhere", "DATA"], "'nowhere': no such folder"),
        (["./model_configs/llama-genome-tiny", "DATA"], "convert it first"),
        (["MODEL", "./nowhere"], "no such file or folder"),
        (["MODEL", "DATA", "--text-column", "text"], "dataset.text_column='text' is not among its columns"),
        (["MODEL", "DATA", "--id-column", "name"], "--id-column='name' is not among sequence, id"),
        (["MODEL", "DATA", "--stride", "38"], "must exceed"),
        (["MODEL", "DATA", "--scores", "/nowhere/x.parquet"], "its folder does not exist"),
        (["MODEL", str(REPOSITORY / "data/klebsiella_1084_500k"), "--scores", OVERWRITTEN], "or the data itself"),
        (["MODEL", "DATA", "--lm-eval-limit", "3"], "needs --lm-eval-tasks"),
        (["MODEL", "DATA", "--scores", "/proc/1/x.parquet"], "its folder cannot be written to"),
        (["MODEL", "--lm-eval-tasks", "x", "--scores", "x.parquet"], "--scores=x.parquet has no effect with --lm-eval"),
        (["MODEL", "--lm-eval-tasks", "x", "--lm-eval-limit", "0"], "--lm-eval-limit=0 must be at least 1"),
        (["MODEL", "EMPTY"], "none of the 2 records has a token to score"),
        (["MODEL", "--lm-eval-tasks", "x"], "pip install lm-eval"),
    ],
)
def test_bad_input(arguments, message, model_folder, parquet, tmp_path, capsys):
    pq.write_table(pa.table({"sequence": pa.array(["", None], pa.string())}), tmp_path / "empty.parquet")
    places = {"MODEL": str(model_folder), "DATA": str(parquet), "EMPTY": str(tmp_path / "empty.parquet")}
    with pytest.raises(SystemExit) as error:
        evaluate.main([*(places.get(argument, argument) for argument in arguments), "--max-seq-length", str(WINDOW)])
    assert message in f"{error.value} {capsys.readouterr().err}"


def test_lost_weights_are_said(hf, parquet, tmp_path):
    lost = convert_llama_hf_to_te(hf, te_backend="reference")
    with torch.no_grad():
        lost.model.norm.weight.fill_(float("nan"))
    save_final_model(lost, load_tokenizer(TOKENIZER), tmp_path / "lost")
    with pytest.raises(SystemExit, match=r"the loss of .*lost is nan: its weights are no trained model's"):
        evaluate.main([str(tmp_path / "lost"), str(parquet), "--max-seq-length", str(WINDOW)])


def test_the_harness_gets_the_model(model_folder, monkeypatch, capsys):
    """A stand-in for lm-eval with the two names that the adapter uses."""
    seen = {}

    class HFLM:
        def __init__(self, pretrained, **kwargs):
            seen.update(kwargs, model=pretrained)

    harness = types.ModuleType("lm_eval")
    harness.simple_evaluate = lambda model, tasks, limit: {"results": {task: {"acc": limit} for task in tasks}}
    package = types.ModuleType("evaluate")
    package.__file__ = "/site-packages/evaluate/__init__.py"
    models, huggingface = types.ModuleType("lm_eval.models"), types.ModuleType("lm_eval.models.huggingface")
    huggingface.HFLM = HFLM
    for module in (harness, models, huggingface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "evaluate", package)
    arguments = ["--lm-eval-tasks", "a,b", "--lm-eval-limit", "3", "--max-seq-length", "64", "--batch-tokens", "128"]
    evaluate.main([str(model_folder), *arguments])
    assert json.loads(capsys.readouterr().out) == {"a": {"acc": 3}, "b": {"acc": 3}}
    assert isinstance(seen["model"], NVLlamaForCausalLM)
    assert (seen["batch_size"], seen["max_length"]) == (2, 64)
