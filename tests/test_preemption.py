"""preemption.py: runs that SIGTERM and SIGUSR1 stop at random moments, and that go on as if nothing had happened."""

import itertools
import json
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from config import CheckpointConfig, DatasetConfig, TrainConfig
from dist_utils import REPOSITORY, RanksFailed, free_port, run_on_ranks
from distributed import DistributedContext, HostCopy, init_distributed
from preemption import REQUEUE_STATUS, SIGNALS, Preemption, hidden_from_children
from training import next_global_batch


NUM_STEPS = 80
TINY = [
    "config_kwargs.hidden_size=32",
    "config_kwargs.intermediate_size=64",
    "dataset.max_seq_length=64",
    "dataset.micro_batch_size=2",
    "dataset.buffer_size=16",
    "validation.max_batches=6",
    "validation.every_n_steps=3",
    "lr_scheduler_kwargs.num_warmup_steps=4",
    "lr_scheduler_kwargs.num_decay_steps=70",
    f"num_train_steps={NUM_STEPS}",
]
# Where a run is when its signal is on the way: the function that it has just entered.
PLACES = {
    "start-up": ("training", "build_model"),
    "first step": ("training", "next_global_batch"),
    "training": ("optimizer", "clip_and_step"),
    "validation": ("training", "validate"),
    "saving": ("checkpoint", "Checkpointer.save"),
    "background": ("checkpoint", "Checkpointer._commit"),
    "final model": ("export", "save_final_model"),
}


@dataclass(frozen=True)
class Moment:
    """``number`` comes ``delay_seconds`` after the ``nth`` call at ``place`` has begun, to the whole process group."""

    place: str
    nth: int = 1
    delay_seconds: float = 0.0
    number: int = signal.SIGTERM
    every_rank: bool = True
    """Or the last rank alone."""


def send_at(moment: Moment) -> None:
    module, name = PLACES[moment.place]
    owner = import_module(module)
    *outer, name = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), itertools.count(1)

    def counting(*args, **kwargs):
        if next(calls) == moment.nth:
            threading.Timer(moment.delay_seconds, os.killpg, (os.getpgrp(), moment.number)).start()
        return original(*args, **kwargs)

    setattr(owner, name, counting)


def run_rank(script: str, argv: list[str], folder: str, moment: Moment | None) -> None:
    """Body of one rank, a session of its own as under torchrun."""
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # as in a script; a rank made by forkserver would take that
    os.chdir(folder)
    Path(folder, f"session_{os.getpid()}").touch()
    sys.argv = [script, *argv]
    sys.path.insert(0, str(REPOSITORY))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if moment is not None and (moment.every_rank or rank == world_size - 1):
        send_at(moment)
    runpy.run_path(str(REPOSITORY / f"{script}.py"), run_name="__main__")


def sessions_alive(sessions: set[int]) -> list[int]:
    """Processes of these sessions."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # gone
            continue
        if int(session) in sessions and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    generator = np.random.default_rng(0)
    records = ["".join(generator.choice(list("ACGT"), size=generator.integers(3, 150))) for _ in range(60)]
    folder = tmp_path_factory.mktemp("data")
    pq.write_table(pa.table({"sequence": records}), folder / "records.parquet", row_group_size=16)
    return folder


class Run:
    """A run that is stopped and continued in ``folder``."""

    def __init__(self, script: str, world_size: int, data: Path, folder: Path, *options: str):
        self.script, self.world_size, self.folder = script, world_size, folder
        self.directory = folder / "ckpt" / script
        paths = [f"{section}.load_dataset_kwargs.path={data}" for section in ("dataset", "validation")]
        self.argv = ["--config-name", "L0_sanity", *TINY, *paths, f"checkpoint.ckpt_dir={folder / 'ckpt'}", *options]
        folder.mkdir(exist_ok=True)

    def go(self, moment: Moment | None = None, *options: str) -> tuple[list[int | None], str]:
        """Exit status of every rank, and what they printed if it was not 0."""
        argv = [*self.argv, f"checkpoint.resume_from_checkpoint={self.directory.exists()}", *options]
        try:
            run_on_ranks(run_rank, self.world_size, self.script, argv, str(self.folder), moment, init=False)
            exit_codes, output = [0] * self.world_size, ""
        except RanksFailed as failed:
            exit_codes, output = failed.exit_codes, str(failed)
        assert sessions_alive({int(f.name.split("_")[1]) for f in self.folder.glob("session_*")}) == []
        return exit_codes, output

    def go_with_torchrun(self, moment: Moment) -> str:
        """Two steps, then the signal to torchrun, which passes it on; what all processes printed."""
        done = len(self.metrics())
        torchrun = ["torch.distributed.run", f"--nproc_per_node={self.world_size}", f"--master_port={free_port()}"]
        torchrun += ["--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", str(REPOSITORY / f"{self.script}.py")]
        command = [sys.executable, "-m", *torchrun, *self.argv, "checkpoint.resume_from_checkpoint=true"]
        with open(self.folder / "torchrun.log", "w+") as log:
            agent = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)
            try:
                deadline = time.monotonic() + 60
                while len(self.metrics()) < done + 2 and agent.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.01)
                workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
                time.sleep(moment.delay_seconds)
                agent.send_signal(moment.number)
                assert agent.wait(timeout=30) == 1, Path(log.name).read_text()
            finally:
                agent.kill()
            assert len(workers) >= self.world_size
            assert sessions_alive({agent.pid, *map(int, workers)}) == []
            return Path(log.name).read_text()

    def metrics(self) -> list[dict]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def last_committed(self) -> int:
        markers = [json.loads(path.read_text()) for path in self.directory.glob("step_*/commit.json")]
        return max(markers, key=lambda marker: marker["commit"])["step"] if markers else 0

    def has_stopped_well(self, steps_before: int) -> None:
        """The last step that was done is committed, and nothing is half-written."""
        assert not list(self.directory.glob("*.staging"))
        assert steps_before < self.last_committed() == self.metrics()[-1]["step"] < NUM_STEPS

    def equals(self, whole: "Run") -> None:
        """Bit for bit, every step once."""
        keys = ("step", "loss", "grad_norm", "learning_rate", "epoch", "consumed_tokens", "validation_loss")
        mine, theirs = ([{key: row.get(key) for key in keys} for row in run.metrics()] for run in (self, whole))
        assert [row["step"] for row in mine] == list(range(1, NUM_STEPS + 1))
        assert mine == theirs


def random_moments(seed: int, places: Sequence[str]) -> list[Moment]:
    generator = random.Random(seed)
    return [
        Moment(
            place,
            nth=1 if place == "first step" else generator.randint(1, 2),
            delay_seconds=generator.choice([0.0, generator.uniform(0, 0.03)]),
            number=generator.choice(SIGNALS),
            every_rank=place == "background" or generator.random() < 0.5,  # rank 0 alone commits
        )
        for place in places
    ]


EVERYWHERE = ["training", "validation", "saving", "background"]


@pytest.mark.parametrize(
    "script, world_size, num_workers, places",
    [
        ("train_fsdp2", 1, 2, ["first step", *EVERYWHERE, *EVERYWHERE, "training"]),
        ("train_ddp", 2, 1, [*EVERYWHERE, "torchrun", *EVERYWHERE, "torchrun"]),
    ],
)
def test_stopped_at_random_moments_and_resumed(data, tmp_path, script, world_size, num_workers, places):
    """20 moments in all. Every run continues the one before; checkpoints are written in the background."""
    options = ["checkpoint.save_every_n_steps=2", "checkpoint.async_save=true", "checkpoint.max_checkpoints=2"]
    options.append(f"dataset.num_workers={num_workers}")
    whole = Run(script, world_size, data, tmp_path / "whole", *options)
    assert whole.go()[0] == [0] * world_size
    run = Run(script, world_size, data, tmp_path / "stopped", *options)
    for moment in random_moments(seed=world_size, places=places):
        before = run.last_committed()
        if moment.place == "torchrun":
            output = run.go_with_torchrun(moment)
        else:
            exit_codes, output = run.go(moment)
            assert exit_codes == [REQUEUE_STATUS] * world_size, (moment, output)
            assert "Traceback" not in output, (moment, output)
        assert output.count("Preempted: leaving after step") == 1, (moment, output)
        assert "DataLoader worker" not in output, (moment, output)
        run.has_stopped_well(before)
    assert run.go()[0] == [0] * world_size
    run.equals(whole)


@pytest.mark.parametrize("script", ["train_fsdp2_cp", "train_fsdp2_ep"])
def test_the_other_scripts_leave_alike(data, tmp_path, script):
    """With a profile that is being made, which is closed."""
    window = ["profiler.enabled=true", "profiler.start_step=2", "profiler.end_step=50", "profiler.kind=torch"]
    run = Run(script, 1, data, tmp_path, *window)
    run.argv = [word for word in run.argv if "intermediate_size" not in word and "hidden_size" not in word]
    exit_codes, output = run.go(Moment("training", nth=2))
    assert exit_codes == [REQUEUE_STATUS], output
    assert run.last_committed() == 3 == run.metrics()[-1]["step"]
    trace = json.loads((run.directory / "profile_from_step_2" / "trace.json").read_text())
    assert {"step 2", "step 3", "checkpoint"} <= {event.get("name") for event in trace["traceEvents"]}


def test_a_signal_at_start_up_ends_the_process_at_once(data, tmp_path):
    run = Run("train_ddp", 1, data, tmp_path, "dataset.num_workers=0")
    assert run.go(Moment("start-up"))[0] == [-signal.SIGTERM]
    assert not run.directory.exists()


def test_a_run_that_is_done_finishes(data, tmp_path):
    """The signal comes while the final model is written, which the last step's checkpoint goes before."""
    options = ["num_train_steps=2", "checkpoint.save_every_n_steps=100", "checkpoint.save_final_model=true"]
    run = Run("train_ddp", 1, data, tmp_path, *options, "dataset.num_workers=1")
    assert run.go(Moment("final model"))[0] == [0]
    assert run.last_committed() == 2
    assert (run.directory / "final_model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "options, message",
    [
        (["checkpoint.ckpt_dir=null"], "Nothing is saved: checkpoint.ckpt_dir is not set"),
        (
            ["dataset.use_stateful_dataloader=false", "checkpoint.resume_from_checkpoint=false"],
            "Nothing is saved: dataset.use_stateful_dataloader=false",
        ),
    ],
)
def test_a_run_that_cannot_save_says_so_and_leaves(data, tmp_path, options, message):
    run = Run("train_ddp", 1, data, tmp_path, "checkpoint.save_final_model=false", "dataset.num_workers=0")
    exit_codes, output = run.go(Moment("training"), *options)
    assert exit_codes == [REQUEUE_STATUS]
    assert message in output
    assert not list(tmp_path.rglob("commit.json"))


# ---- The parts. ----


@pytest.fixture
def restore_handlers():
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def armed(num_train_steps: int = 10, **checkpoint) -> Preemption:
    preemption = Preemption()
    config = TrainConfig(num_train_steps=num_train_steps, checkpoint=CheckpointConfig(**checkpoint))
    preemption.arm(config, DistributedContext(0, 0, 1, torch.device("cpu")))
    return preemption


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted(restore_handlers, number):
    preemption = armed()
    assert not preemption.signalled
    os.kill(os.getpid(), number)
    assert preemption.signalled
    assert preemption.exit_status == 0  # until all ranks have agreed


def test_ranks_leave_when_any_was_signalled_but_not_after_the_last_step(restore_handlers, caplog):
    preemption = armed(num_train_steps=3, ckpt_dir="ckpt", save_every_n_steps=5)
    assert not preemption.stops_after(1, HostCopy(torch.tensor(0.0)))
    assert not preemption.stops_after(3, HostCopy(torch.tensor(2.0)))
    assert preemption.exit_status == 0 and not caplog.text
    assert preemption.stops_after(2, HostCopy(torch.tensor(1.0)))
    assert preemption.exit_status == 143
    assert "leaving after step 2 of 3" in caplog.text
    assert "resume_from_checkpoint=true" in caplog.text  # it is not set


@pytest.mark.parametrize(
    "options, warning",
    [
        ({}, "only SIGTERM and SIGUSR1 lead to a checkpoint"),
        ({"stateful": False}, "save_final_model: nothing is saved"),
        ({"save_every_n_steps": 5}, ""),
        ({"save_final_model": True}, ""),
    ],
)
def test_a_folder_that_nothing_is_saved_to_is_said(restore_handlers, caplog, options, warning):
    options = dict(options)
    config = TrainConfig()
    config.dataset.use_stateful_dataloader = options.pop("stateful", True)
    config.checkpoint = CheckpointConfig(ckpt_dir="ckpt", **options)
    Preemption().arm(config, DistributedContext(0, 0, 1, torch.device("cpu")))
    assert warning in caplog.text if warning else not caplog.text


def test_can_save():
    assert not TrainConfig().can_save
    assert TrainConfig(checkpoint=CheckpointConfig(ckpt_dir="ckpt")).can_save
    stateless = DatasetConfig(use_stateful_dataloader=False)
    assert not TrainConfig(checkpoint=CheckpointConfig(ckpt_dir="ckpt"), dataset=stateless).can_save


def test_children_do_not_get_the_signals():
    program = "import signal; print(*(s.name for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    outputs = []
    for context in (hidden_from_children(), nullcontext()):
        with context:
            outputs.append(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)
    assert sorted(outputs[0].split()) == ["SIGTERM", "SIGUSR1"]
    assert outputs[1].split() == []


def reads_a_batch_of_a_busy_device() -> tuple[float, float]:
    """Seconds until a global batch was there, and until the host knew who had been signalled."""
    ctx = init_distributed()
    tokens_BS = torch.ones(2, 8, dtype=torch.long)
    batch = {"input_ids": tokens_BS, "attention_mask": tokens_BS, "shift_labels": tokens_BS, "epoch": 0}
    seconds = []
    # First NCCL and pinned memory are set up: twice, as a batch is there until the next one is; allocating may wait.
    for cycles in (1, 1, 2 * 10**9):
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)  # about a second
        start = time.perf_counter()
        global_batch = next_global_batch(iter([dict(batch)]), 1, ctx.device, signalled=True)
        seconds = [time.perf_counter() - start]
        assert global_batch.signalled_ranks.read().item() == 1.0
        seconds.append(time.perf_counter() - start)
    torch.distributed.destroy_process_group()
    return seconds[0], seconds[1]


@pytest.mark.gpu
def test_nobody_waits_for_the_device_to_read_a_batch():
    ((read, known),) = run_on_ranks(reads_a_batch_of_a_busy_device, 1, init=False)
    assert read < 0.3 < 0.6 < known
