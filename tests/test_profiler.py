"""profiler.py and phases.py: what is captured, on which rank, under which names, and that a capture always ends."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

import phases
from config import ProfilerConfig, TrainConfig
from config_rules import find_problems
from dist_utils import REPOSITORY, run_on_ranks
from distributed import DistributedContext
from phases import name_phases, phase
from profiler import StepProfiler


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def run_steps(folder: Path, steps: range, kind="auto", resumed_step=0, device=CPU, rank=0, end_step=3) -> None:
    """Steps as a training loop makes them; the window is 2 to ``end_step``."""
    config = ProfilerConfig(enabled=True, kind=kind, start_step=2, end_step=end_step)
    profiler = StepProfiler(config, folder, DistributedContext(rank, rank, 2, device), resumed_step)
    try:
        for step in steps:
            if profiler.opens_at(step):
                profiler.start(step)
            profiler.begin_range(step)
            with phase("backward"):
                torch.ones(4, 4) @ torch.ones(4, 4)
                if step == 99:
                    raise FloatingPointError
            profiler.end_range()
            if profiler.closes_after(step):
                profiler.stop()
    finally:
        profiler.close()
        profiler.close()
    assert not profiler.running


@pytest.fixture
def cuda_calls(monkeypatch):
    """What a run on a GPU would tell the CUDA profiler and NVTX; "(" and ")" are a range's ends."""
    calls = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(f"{name}("))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append(")"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return calls


# The same windows for both kinds: steps that are run, those after which the run had resumed, those captured.
WINDOWS = [
    (range(1, 6), 0, [2, 3]),
    (range(3, 6), 2, [3]),  # resumed inside the window: at once
    (range(4, 6), 3, []),  # resumed after it
    (range(1, 3), 0, [2]),  # training ends inside it
    (range(1, 2), 0, []),  # or before it
]


@pytest.mark.parametrize("steps, resumed_step, captured", WINDOWS)
def test_nsys_window(tmp_path, cuda_calls, caplog, steps, resumed_step, captured):
    run_steps(tmp_path, steps, resumed_step=resumed_step, device=CUDA)
    ranges = [call for step in captured for call in (f"step {step}(", "backward(", ")", ")")]
    assert cuda_calls == (["start", *ranges, "stop"] if captured else [])
    assert ("Nothing will be profiled" in caplog.text) == (resumed_step >= 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("steps, resumed_step, captured", WINDOWS)
def test_torch_window(tmp_path, steps, resumed_step, captured):
    run_steps(tmp_path, steps, resumed_step=resumed_step)
    assert [folder.name for folder in tmp_path.iterdir()] == [f"profile_from_step_{step}" for step in captured[:1]]
    for folder in tmp_path.iterdir():
        names = names_in(folder)
        assert {name for name in names if name.startswith("step ")} == {f"step {step}" for step in captured}
        assert names.count("backward") == names.count("aten::mm") == len(captured)
    assert phases.phase("backward") is phases.phase("loss")  # no ranges any more


def names_in(folder: Path) -> list[str]:
    return [str(event.get("name")) for event in json.loads((folder / "trace.json").read_text())["traceEvents"]]


@pytest.mark.parametrize("kind", ["nsys", "torch"])
def test_a_step_that_fails_closes_the_capture(tmp_path, cuda_calls, kind):
    with pytest.raises(FloatingPointError):
        run_steps(tmp_path, range(98, 100), kind, device=CUDA if kind == "nsys" else CPU, end_step=200)
    if kind == "nsys":
        assert cuda_calls[-3:] == [")", ")", "stop"]
    else:
        assert {"step 98", "step 99"} <= set(names_in(tmp_path / "profile_from_step_98"))


def test_a_device_that_fails_closes_the_capture(tmp_path, cuda_calls, monkeypatch):
    def synchronize(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_steps(tmp_path, range(1, 3), device=CUDA)
    assert cuda_calls[-1] == "stop"


@pytest.mark.parametrize("kind, device", [("nsys", CUDA), ("torch", CPU)])
def test_rank_0_alone_captures(tmp_path, cuda_calls, kind, device):
    run_steps(tmp_path, range(1, 6), kind, device=device, rank=1)
    assert cuda_calls == [] and not list(tmp_path.iterdir())


def test_tables(tmp_path):
    run_steps(tmp_path, range(1, 6))
    folder = tmp_path / "profile_from_step_2"
    ranges, operators = (folder / "operators.txt").read_text().split("The twenty costliest operators")
    assert "backward" in ranges and "aten::mm" not in ranges
    assert "aten::mm" in operators and "backward" not in operators
    assert "aten::empty" in (folder / "memory.txt").read_text()
    assert "[memory]" in names_in(folder)


def test_a_full_disk_does_not_stop_training(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    run_steps(tmp_path / "file", range(1, 6))
    assert "cannot be written" in caplog.text


def test_a_phase_is_nothing_unless_somebody_captures():
    assert phase("backward") is phase("loss")
    names = []
    try:
        name_phases(lambda name: names.append(name) or torch.profiler.record_function(name))
        with phase("backward"), phase("loss"):
            pass
    finally:
        name_phases(None)
    assert names == ["backward", "loss"]


@pytest.mark.parametrize("kind, problem", [("nsys", "needs a CUDA device"), ("perf", "not one of auto, nsys, torch")])
def test_kinds_that_cannot_be(monkeypatch, kind, problem):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = TrainConfig(profiler=ProfilerConfig(enabled=True, kind=kind))
    assert [line for line in find_problems(config, 1) if "profiler.kind" in line and problem in line]


# ---- The scripts. ----

EVERY_SCRIPT = {
    "step 2",
    "data wait",
    "host-to-device copy",
    "forward layer 1",
    "forward layer 2",
    "loss",
    "backward",
    "gradient norm",
    "optimiser",
    "validation",
    "checkpoint",
}


def call_main(script: str, argv: list[str], folder: str) -> None:
    os.chdir(folder)
    sys.argv = [script, *argv]
    sys.path.insert(0, str(REPOSITORY))
    runpy.run_path(str(REPOSITORY / f"{script}.py"), run_name="__main__")


@pytest.mark.parametrize(
    "script, options, more",
    [
        ("train_ddp", ["activation_checkpointing=full"], set()),
        ("train_fsdp2", [], set()),
        ("train_fsdp2_cp", ["cp_size=2", "activation_checkpointing=full"], {"CP exchange"}),
        ("train_fsdp2_ep", [], {"dispatch", "combine"}),
    ],
)
def test_every_phase_has_its_name(tmp_path, script, options, more):
    argv = ["--config-name=L0_sanity", "num_train_steps=4", "dataset.max_seq_length=64", "validation.max_batches=2"]
    argv += ["dataset.num_workers=0", "checkpoint.ckpt_dir=ckpt", "checkpoint.save_every_n_steps=1", *options]
    argv += ["validation.every_n_steps=1", "profiler.enabled=true", "profiler.start_step=2", "profiler.end_step=3"]
    run_on_ranks(call_main, 2, script, [*argv, "profiler.kind=torch"], str(tmp_path), init=False, timeout_seconds=120)
    (folder,) = tmp_path.rglob("profile_from_step_*")
    names = set(names_in(folder))
    assert EVERY_SCRIPT | more <= names
    assert not {"step 1", "step 4"} & names


# ---- On a GPU. ----


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nsys", "torch"])
def test_on_a_gpu(tmp_path, kind):
    config = ProfilerConfig(enabled=True, kind=kind, start_step=1, end_step=1)
    profiler = StepProfiler(config, tmp_path, DistributedContext(0, 0, 1, CUDA), 0)
    profiler.start(1)
    profiler.begin_range(1)
    with phase("backward"):
        torch.ones(64, 64, device=CUDA) @ torch.ones(64, 64, device=CUDA)
    profiler.stop()
    if kind == "nsys":
        return
    folder = tmp_path / "profile_from_step_1"
    assert {"step 1", "backward"} <= set(names_in(folder))
    assert "CUDA total" in (folder / "operators.txt").read_text()
    assert (folder / "memory.pickle").stat().st_size > 0
