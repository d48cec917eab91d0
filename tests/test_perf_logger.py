import json
import logging
import math
import re
import sys

import pytest
import torch
import torch.multiprocessing as mp
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

import perf_logger
from config import CheckpointConfig, LoggerConfig, TrainConfig
from distributed import DistributedContext
from perf_logger import PerfLogger, flops_per_step, peak_bf16_tflops, run_folder


CPU = DistributedContext(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
# D=8, N=2, K=1, H=4, F=16, V=32, 3 layers.
LLAMA = LlamaConfig(
    hidden_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=16,
    vocab_size=32,
    num_hidden_layers=3,
)
KEYS = [
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "step_time_seconds",
    "tokens_per_second_per_gpu",
    "unpadded_tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "peak_memory_gib",
    "consumed_tokens",
]


class Clock:
    """time.perf_counter under the test's control."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(perf_logger.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def make_config(num_train_steps=10, **sections) -> TrainConfig:
    return TrainConfig(num_train_steps=num_train_steps, **sections)


def log(logger: PerfLogger, step: int, loss=2.0, grad_norm=0.5, num_tokens=10, num_unpadded_tokens=8, **options):
    logger.log_step(
        step,
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=1e-3,
        epoch=0,
        num_tokens=num_tokens,
        num_unpadded_tokens=num_unpadded_tokens,
        sum_seq_len_squared=34,
        **options,
    )


def run(config, run_dir, steps, resumed_step=0, consumed_tokens=0):
    logger = PerfLogger(config, run_dir, CPU, LLAMA, resumed_step, consumed_tokens)
    for step in steps:
        logger.start_step(step)
        log(logger, step, loss=2.0 + step)
    logger.close()
    return logger


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- FLOPs, peaks -----------------------------------------------------------------------------------------------------


def test_flops_by_hand():
    # Documents of 3 and 5 tokens: 8 tokens, 9 + 25 = 34, and 1+2+3 + 1+2+3+4+5 = 21 (query, key) pairs.
    # Weights of a layer: QKV 8 x (2+2)*4 = 128, output 8 x 8 = 64, MLP 3 * 8 * 16 = 384: 576. Head 8 x 32 = 256.
    # Forward: 2 * (3*576 + 256) * 8 tokens = 31,744.
    # A pair: 2 products * 2 FLOPs * 2 heads * 4 = 32; 21 pairs * 32 * 3 layers = 2,016.
    assert flops_per_step(LLAMA, num_tokens=8, sum_seq_len_squared=34) == 3 * (31_744 + 2_016)


def test_flops_of_mixtral_by_hand():
    config = MixtralConfig(
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        vocab_size=32,
        num_hidden_layers=3,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    # Two of the four experts a token and the router 8 x 4: 128 + 64 + 2 * 384 + 32 = 992 weights a layer.
    assert flops_per_step(config, 8, 34) == 3 * (2 * (3 * 992 + 256) * 8 + 2_016)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_against_pytorchs_counter(tied):
    """Forward and backward of Hugging Face's model, counted by PyTorch operation by operation."""
    length = 16
    config = LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": tied, "attn_implementation": "eager"})
    model = LlamaForCausalLM(config)
    tokens_BS = torch.arange(length)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens_BS, labels=tokens_BS).loss.backward()
    matrices = counter.get_flop_counts()["Global"][torch.ops.aten.mm]  # attention is bmm there, and not causal
    attention = 3 * 32 * (length * (length + 1) // 2) * 3  # see test_flops_by_hand
    assert flops_per_step(config, length, length**2) == matrices + attention


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Some future card", None),
    ],
)
def test_peak_by_device_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_bf16_tflops(torch.device("cuda", 0)) == peak


def test_peak_of_a_cpu_is_unknown():
    assert peak_bf16_tflops(torch.device("cpu")) is None


# --- Metrics ----------------------------------------------------------------------------------------------------------


def test_one_line(tmp_path, clock):
    logger = PerfLogger(make_config(), tmp_path, CPU, LLAMA, 0, 0)
    clock.now += 0.5
    log(logger, 1, loss=torch.tensor(1.25), grad_norm=torch.tensor(3.0))
    logger.close()
    (line,) = read(tmp_path / "metrics.jsonl")
    assert list(line) == KEYS
    assert 0.05 < line.pop("peak_memory_gib") < 64
    assert line == {
        "step": 1,
        "loss": 1.25,
        "grad_norm": 3.0,
        "learning_rate": 1e-3,
        "epoch": 0,
        "step_time_seconds": 0.5,
        "tokens_per_second_per_gpu": 20.0,
        "unpadded_tokens_per_second_per_gpu": 16.0,
        "tflops_per_gpu": pytest.approx(101_280 / 0.5 / 1e12),  # test_flops_by_hand: padding is no work
        "mfu": None,
        "consumed_tokens": 8,
    }


def test_mfu(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(perf_logger, "peak_bf16_tflops", lambda device: 100.0)
    logger = PerfLogger(make_config(), tmp_path, CPU, LLAMA, 0, 0)
    clock.now += 1e-9  # 101,280 FLOPs in a nanosecond are 101.28 TFLOP/s
    log(logger, 1)
    logger.close()
    assert read(tmp_path / "metrics.jsonl")[0]["mfu"] == pytest.approx(1.0128, rel=1e-3)


def test_steps_between_logged_ones_add_up(tmp_path, clock):
    config = make_config(num_train_steps=8, logger=LoggerConfig(frequency=3))
    logger = PerfLogger(config, tmp_path, CPU, LLAMA, 0, 0)
    for step in range(1, 9):
        clock.now += step  # step n takes n seconds
        log(logger, step, validation_loss=1.5 if step == 4 else None)
    logger.close()
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [3, 4, 6, 8]  # every third, the validated, the last
    assert [line["step_time_seconds"] for line in lines] == [2.0, 4.0, 5.5, 7.5]
    assert [line["tokens_per_second_per_gpu"] for line in lines] == [30 / 6, 10 / 4, 20 / 11, 20 / 15]
    assert [line["consumed_tokens"] for line in lines] == [24, 32, 48, 64]
    assert [line.get("validation_loss") for line in lines] == [None, 1.5, None, None]
    assert ["validation_loss" in line for line in lines] == [False, True, False, False]


def test_values_are_read_off_the_device_at_logged_steps_only(tmp_path):
    class Counting:
        reads = 0

        def __float__(self):
            Counting.reads += 1
            return 1.0

    logger = PerfLogger(make_config(logger=LoggerConfig(frequency=4)), tmp_path, CPU, LLAMA, 0, 0)
    for step in range(1, 8):
        log(logger, step, loss=Counting(), grad_norm=Counting())
    logger.close()
    assert Counting.reads == 2


def test_untimed(tmp_path, clock):
    logger = PerfLogger(make_config(), tmp_path, CPU, LLAMA, 0, 0)
    clock.now += 2
    with logger.untimed():
        clock.now += 50
    clock.now += 1
    log(logger, 1)
    with pytest.raises(KeyError), logger.untimed():
        clock.now += 7
        raise KeyError
    clock.now += 4
    log(logger, 2)
    logger.close()
    assert [line["step_time_seconds"] for line in read(tmp_path / "metrics.jsonl")] == [3.0, 4.0]


@pytest.mark.parametrize(
    "lost", [{"loss": math.nan}, {"loss": math.inf}, {"grad_norm": math.nan}, {"validation_loss": math.nan}]
)
def test_not_a_number_ends_the_run(tmp_path, lost):
    """Once it is logged, as null; JSON has no other word."""
    logger = PerfLogger(make_config(), tmp_path, CPU, LLAMA, 0, 0)
    log(logger, 1, validation_loss=2.0)
    ((key, value),) = lost.items()
    name = {"grad_norm": "gradient norm"}.get(key, key.replace("_", " "))
    with pytest.raises(FloatingPointError, match=f"step 2: .*{name} {value}.*: the run is lost. No checkpoint is"):
        log(logger, 2, **{key: torch.tensor(value)})
    logger.close()
    first, second = read(tmp_path / "metrics.jsonl")
    assert first[key] is not None and second[key] is None


def test_lost_weights_are_not_saved_after_a_step_that_is_not_logged(tmp_path):
    logger = PerfLogger(make_config(logger=LoggerConfig(frequency=5)), tmp_path, CPU, LLAMA, 0, 0)
    log(logger, 1, loss=math.nan)
    with pytest.raises(FloatingPointError, match="step 1"), logger.saving():
        raise AssertionError("they would be saved")
    logger.close()


def test_a_step_out_of_order_is_a_bug_of_the_caller(tmp_path):
    logger = PerfLogger(make_config(), tmp_path, CPU, LLAMA, 0, 0)
    log(logger, 1)
    with pytest.raises(AssertionError):
        log(logger, 1)
    logger.close()


# --- Files ------------------------------------------------------------------------------------------------------------


def test_resumed_run_never_repeats_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    config = make_config()
    run(config, tmp_path, range(1, 6))
    before = path.read_text().splitlines()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # the crash cut this line; the last checkpoint was that of step 3
    first = run(config, tmp_path, range(4, 7), resumed_step=3, consumed_tokens=24)
    lines = read(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert path.read_text().splitlines()[:3] == before[:3]
    assert lines[-1]["consumed_tokens"] == 48 == first.rank_consumed_tokens
    run(config, tmp_path, range(7, 11), resumed_step=6, consumed_tokens=48)  # twice in a row
    assert [line["step"] for line in read(path)] == list(range(1, 11))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "metrics.jsonl"]


def test_resume_completes_a_line_without_its_newline(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    run(make_config(), tmp_path, [3], resumed_step=2, consumed_tokens=16)
    assert [line["step"] for line in read(path)] == [1, 2, 3]


def test_resume_refuses_a_file_that_is_not_its_own(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(ValueError, match="line 1: not a metrics line"):
        PerfLogger(make_config(), tmp_path, CPU, LLAMA, 2, 16)
    assert (tmp_path / "metrics.jsonl").read_text() == "a,b\n1,2\n3,4\n"


def test_new_run_keeps_the_old_files(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for n in range(1, 4):
        run(make_config(num_train_steps=n), tmp_path, range(1, n + 1))
    counts = {path.name: len(read(path)) for path in tmp_path.glob("*.jsonl")}
    assert counts == {"metrics.1.jsonl": 1, "metrics.2.jsonl": 2, "metrics.jsonl": 3}
    assert "metrics.2.jsonl" in caplog.text
    configs = [(tmp_path / name).read_text() for name in ("config.1.yaml", "config.2.yaml", "config.yaml")]
    assert [re.findall(r"^num_train_steps: (\d)$", text, re.M) for text in configs] == [["1"], ["2"], ["3"]]


def test_metrics_path(tmp_path):
    path = tmp_path / "elsewhere" / "run.jsonl"
    run(make_config(logger=LoggerConfig(metrics_path=str(path))), tmp_path / "run", [1])
    assert len(read(path)) == 1
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_metrics_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written .*logger.metrics_path"):
        run(make_config(logger=LoggerConfig(metrics_path=str(tmp_path / "file" / "m.jsonl"))), tmp_path, [1])


def test_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make_config(checkpoint=CheckpointConfig(ckpt_dir="ckpt"))
    assert str(run_folder(config, "train_ddp")) == "ckpt/train_ddp"
    folder = run_folder(make_config(), "train_ddp")
    assert folder.match("outputs/train_ddp/2[0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]_*")
    assert not list(tmp_path.iterdir())


# --- Several ranks ----------------------------------------------------------------------------------------------------


def run_rank(rank: int, run_dir, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ctx = DistributedContext(rank, rank, 2, torch.device("cpu"))
    logger = PerfLogger(make_config(logger=LoggerConfig(frequency=2)), run_dir, ctx, LLAMA, 4, consumed_tokens=1000)
    for step in (5, 6):
        log(logger, step, num_tokens=10 * (rank + 1), num_unpadded_tokens=5 + rank)
    (run_dir / f"consumed_{rank}").write_text(str(logger.rank_consumed_tokens))
    logger.close()
    torch.distributed.destroy_process_group()


def test_two_ranks_one_file(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    mp.spawn(run_rank, (run_dir, str(tmp_path / "store")), nprocs=2)
    (line,) = read(run_dir / "metrics.jsonl")
    assert line["step"] == 6
    assert line["consumed_tokens"] == 1000 + 2 * (5 + 6)
    assert line["tokens_per_second_per_gpu"] * line["step_time_seconds"] == pytest.approx((10 + 20) / 2)
    assert line["unpadded_tokens_per_second_per_gpu"] * line["step_time_seconds"] == pytest.approx((5 + 6) / 2)
    saved = [int((run_dir / f"consumed_{rank}").read_text()) for rank in range(2)]
    assert sum(saved) == line["consumed_tokens"]  # what a checkpoint hands back


# --- Bar, summary -----------------------------------------------------------------------------------------------------


def test_summary_is_printed_once(tmp_path, capsys):
    logger = PerfLogger(make_config(num_train_steps=1), tmp_path, CPU, LLAMA, 0, 0)
    log(logger, 1, loss=1.23456, validation_loss=1.5)
    logger.close()
    logger.close()
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1
    assert out[0].startswith("step 1/1: loss 1.2346, val loss 1.5000, tokens/s ")
    assert str(tmp_path / "metrics.jsonl") in out[0]


def test_log_lines_go_around_the_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    root, handler = logging.getLogger(), logging.StreamHandler(sys.stdout)
    root.addHandler(handler)
    try:
        logger = PerfLogger(make_config(num_train_steps=2), tmp_path, CPU, LLAMA, 0, 0)
        assert handler not in root.handlers
        log(logger, 1, loss=1.75)
        logging.getLogger("test").warning("said in between")
        log(logger, 2)
        logger.close()
        assert handler in root.handlers
    finally:
        root.removeHandler(handler)
    captured = capsys.readouterr()
    assert "said in between\n" in captured.out
    assert "loss=1.7500" in captured.err
    assert "2/2" in captured.err


def test_without_a_terminal_a_line_now_and_then(tmp_path, clock, caplog):
    caplog.set_level(logging.INFO)
    logger = PerfLogger(make_config(), tmp_path, CPU, LLAMA, 0, 0)
    for step in range(1, 8):
        clock.now += 10
        log(logger, step)
    logger.close()
    assert [record.message.split(":")[0] for record in caplog.records] == ["step 3/10", "step 6/10"]


# --- On a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    ctx = DistributedContext(0, 0, 1, torch.device("cuda", 0))
    config = make_config(num_train_steps=2)
    block = torch.zeros(2**28, device="cuda")  # 1 GiB
    logger = PerfLogger(config, tmp_path, ctx, LLAMA, 0, 0)
    for step in (1, 2):
        logger.start_step(step)
        log(logger, step, loss=block.sum(), grad_norm=block.sum())
    logger.close()
    assert all(line["peak_memory_gib"] >= 1.0 for line in read(tmp_path / "metrics.jsonl"))
