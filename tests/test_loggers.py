"""loggers.py: one record for all loggers, and no step twice after a resume. metrics.jsonl: also test_perf_logger.py."""

import json
import math
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from config import LoggerConfig, TrainConfig, WandbConfig
from config_rules import find_problems
from dist_utils import run_script
from loggers import RunLoggers, scalars


class FakeWandb:
    """What this project uses of wandb, with a server that survives crashes and refuses no step: it shows repeats."""

    def __init__(self):
        self.history: dict[str, list[tuple[int, float]]] = {}  # id -> (step, loss)
        self.inits, self.exit_codes = [], []

    def init(self, **options):
        self.inits.append(options)
        history = self.history.setdefault(options["id"], [])
        continued = history and options["resume"] and options["mode"] == "online"  # offline, wandb cannot know
        return SimpleNamespace(
            starting_step=history[-1][0] + 1 if continued else 0,
            log=lambda metrics, step: history.append((step, metrics["loss"])),
            finish=lambda exit_code: self.exit_codes.append(exit_code),
        )


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def log(config, run_dir, steps, resumed_step=0, close=True):
    """Logs a loss that tells the runs apart: step + the number of steps that the run resumed from / 1000."""
    loggers = RunLoggers(config, run_dir, resumed_step)
    for step in steps:
        loggers.log(
            {"step": step, "loss": step + resumed_step / 1000, "mfu": None, "tokens_per_expert_cv": [0.5, 0.25]}
        )
    if close:
        loggers.close()


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def events(folder, name):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_scalars():
    record = {"step": 3, "mfu": None, "router_entropy": [1.5, None], "loss": 0.5}
    assert scalars(record) == {"step": 3, "router_entropy/layer_1": 1.5, "loss": 0.5}


def test_the_same_record_goes_to_all(tmp_path, wandb):
    config = TrainConfig(logger=LoggerConfig(tensorboard=True), wandb=WandbConfig(mode="online"))
    log(config, tmp_path, [1, 2])
    assert [line["loss"] for line in metrics(tmp_path)] == [1.0, 2.0]
    assert metrics(tmp_path)[0]["mfu"] is None
    assert events(tmp_path / "tensorboard", "loss") == [(1, 1.0), (2, 2.0)]
    assert events(tmp_path / "tensorboard", "tokens_per_expert_cv/layer_2") == [(1, 0.25), (2, 0.25)]
    assert list(wandb.history.values()) == [[(1, 1.0), (2, 2.0)]]


@pytest.mark.parametrize("failing", ["log", "finish"])
def test_a_logger_that_fails_stops_nothing(tmp_path, wandb, monkeypatch, caplog, failing):
    config = TrainConfig(wandb=WandbConfig(mode="online"))
    loggers = RunLoggers(config, tmp_path, 0)

    def fail(*args, **kwargs):
        raise RuntimeError("no network")

    monkeypatch.setattr(loggers._loggers[-1], "_run", SimpleNamespace(log=fail, finish=fail))
    if failing == "log":
        loggers.log({"step": 1, "loss": 1.0})
        loggers.log({"step": 2, "loss": 1.0})
    loggers.close()
    assert caplog.text.count("WandbLogger fails and gets no more records: RuntimeError: no network") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == (2 if failing == "log" else 0)


@pytest.mark.parametrize("close", [True, False], ids=["ended", "killed"])
def test_tensorboard_never_repeats_a_step(tmp_path, close):
    config = TrainConfig(logger=LoggerConfig(tensorboard=True))
    log(config, tmp_path, range(1, 6), close=close)
    log(config, tmp_path, range(4, 8), resumed_step=3, close=close)
    expected = [1, 2, 3, 4.003, 5.003, 6.003, 7.003]
    assert events(tmp_path / "tensorboard", "loss") == [(math.floor(value), pytest.approx(value)) for value in expected]
    assert [line["loss"] for line in metrics(tmp_path)] == expected


def test_tensorboard_files_of_another_run_are_moved_aside(tmp_path):
    config = TrainConfig(logger=LoggerConfig(tensorboard=True))
    log(config, tmp_path, [1, 2])
    log(config, tmp_path, [1])
    assert events(tmp_path / "tensorboard", "loss") == [(1, 1.0)]
    assert events(tmp_path / "tensorboard.1", "loss") == [(1, 1.0), (2, 2.0)]


def test_files_of_another_run_are_moved_aside_under_one_number(tmp_path, wandb):
    config = TrainConfig(logger=LoggerConfig(tensorboard=True), wandb=WandbConfig(mode="online"))
    for content in ("first", "second"):
        log(config, tmp_path, [1])
        (tmp_path / "config.yaml").write_text(content)
        (tmp_path / "final_model").mkdir()
        (tmp_path / "final_model" / "config.json").write_text(content)
    (tmp_path / "metrics.2.jsonl").touch()  # a number that is taken for one file is taken for all
    log(config, tmp_path, [1])
    for n in (1, 3):
        for name in (f"metrics.{n}.jsonl", f"config.{n}.yaml", f"tensorboard.{n}", f"wandb_run.{n}.json"):
            assert (tmp_path / name).exists(), name
    assert [(tmp_path / f"config.{n}.yaml").read_text() for n in (1, 3)] == ["first", "second"]
    assert [(tmp_path / f"final_model.{n}" / "config.json").read_text() for n in (1, 3)] == ["first", "second"]
    assert not (tmp_path / "config.yaml").exists()  # perf_logger.py writes it


def test_a_resumed_run_leaves_the_final_model_where_it_is(tmp_path):
    (tmp_path / "final_model").mkdir()
    log(TrainConfig(), tmp_path, [4], resumed_step=3)
    assert (tmp_path / "final_model").exists()


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_wandb_continues_the_same_run_and_never_repeats_a_step(tmp_path, wandb, mode):
    config = TrainConfig(wandb=WandbConfig(mode=mode))
    log(config, tmp_path, range(1, 6))
    log(config, tmp_path, range(4, 5), resumed_step=3, close=False)  # killed again before it had caught up
    log(config, tmp_path, range(4, 8), resumed_step=3)
    (run_id,) = wandb.history
    assert wandb.history[run_id] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0), (6, 6.003), (7, 7.003)]
    assert [options["resume"] for options in wandb.inits] == [None, "allow", "allow"]
    assert json.loads((tmp_path / "wandb_run.json").read_text())["id"] == run_id
    assert wandb.exit_codes == [0, 0]


def test_wandb_gets_again_what_its_server_lost(tmp_path, wandb):
    config = TrainConfig(wandb=WandbConfig(mode="online"))
    log(config, tmp_path, range(1, 6))
    (history,) = wandb.history.values()
    del history[3:]  # 4 and 5 were in flight when the machine went
    log(config, tmp_path, range(3, 7), resumed_step=2)
    assert [step for step, _ in history] == [1, 2, 3, 4, 5, 6]


def test_a_new_run_in_a_used_folder_is_another_wandb_run(tmp_path, wandb):
    config = TrainConfig(wandb=WandbConfig(mode="online"))
    log(config, tmp_path, [1, 2])
    log(config, tmp_path, [1])
    assert [len(history) for history in wandb.history.values()] == [2, 1]


def test_wandb_options(tmp_path, wandb):
    config = TrainConfig(wandb=WandbConfig(mode="offline", project="p", name="n", id="i", resume="must"))
    loggers = RunLoggers(config, tmp_path / "run", 7)
    loggers.close(failed=True)
    assert wandb.inits == [
        {
            "mode": "offline",
            "project": "p",
            "name": "n",
            "id": "i",
            "resume": "must",
            "dir": str(tmp_path / "run"),
            "config": asdict(config),
        }
    ]
    assert wandb.exit_codes == [1]


# --- Packages that are not there --------------------------------------------------------------------------------------


def test_packages_are_asked_for_before_anything_is_built(monkeypatch):
    config = TrainConfig(logger=LoggerConfig(tensorboard=True), wandb=WandbConfig(mode="online"))
    for package in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    problems = "\n".join(find_problems(config, 1))
    assert "wandb.mode=online needs the wandb package: pip install wandb" in problems
    assert "logger.tensorboard=true needs the tensorboard package: pip install tensorboard" in problems


def test_a_folder_named_wandb_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    problems = find_problems(TrainConfig(wandb=WandbConfig(mode="offline")), 1)
    assert any("needs the wandb package" in problem for problem in problems)


# --- A script ---------------------------------------------------------------------------------------------------------

FAKE_PACKAGE = """
import json, os
from types import SimpleNamespace

def init(**options):
    def log(metrics, step):
        with open(os.environ["WANDB_SERVER"], "a") as file:
            file.write(json.dumps([options["id"], step]) + "\\n")
    steps = [json.loads(line)[1] for line in open(os.environ["WANDB_SERVER"])]
    return SimpleNamespace(starting_step=max(steps, default=-1) + 1, log=log, finish=lambda exit_code: None)
"""


def test_a_script_resumed_twice_from_one_checkpoint(tmp_path):
    """Saved at step 3, went on to step 5 without saving, then from step 3 again to step 6."""
    (tmp_path / "wandb.py").write_text(FAKE_PACKAGE)
    server = tmp_path / "server"
    server.touch()
    environment = {"PYTHONPATH": str(tmp_path), "WANDB_SERVER": str(server)}
    argv = ["--config-name", "L0_sanity", f"checkpoint.ckpt_dir={tmp_path}/ckpt", "logger.tensorboard=true"]
    argv += ["wandb.mode=online", "validation.enabled=false", "dataset.micro_batch_size=1"]
    run_script(
        "train_fsdp2.py", [*argv, "num_train_steps=3", "checkpoint.save_every_n_steps=3"], environment=environment
    )
    argv.append("checkpoint.resume_from_checkpoint=true")
    run_script("train_fsdp2.py", [*argv, "num_train_steps=5"], environment=environment)  # saves nothing
    run_script("train_fsdp2.py", [*argv, "num_train_steps=6"], environment=environment)  # from step 3 again
    ids, steps = zip(*map(json.loads, server.read_text().splitlines()))
    assert len(set(ids)) == 1
    assert steps == (1, 2, 3, 4, 5, 6)
    run_dir = tmp_path / "ckpt" / "train_fsdp2"
    assert [step for step, _ in events(run_dir / "tensorboard", "loss")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4, 5, 6]
