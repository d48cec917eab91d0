"""Where the metrics of a run go: ``metrics.jsonl`` always, TensorBoard and wandb where they are asked for.

All get the same record. Rank 0 alone has loggers. A resumed run takes the steps after its checkpoint again, and none of
them is there twice:

- ``metrics.jsonl`` first loses the lines after the checkpoint's step;
- TensorBoard is told to forget those steps (``purge_step``);
- wandb's history cannot be rewritten: the run whose id ``wandb_run.json`` keeps goes on, and steps that it has already
  are left out.

A new run in a used folder moves the older run's files aside, its ``config.yaml`` and ``final_model`` too, all under the
same number (``metrics.1.jsonl``, ``config.1.yaml``, ``final_model.1``), and is a wandb run of its own.
"""

import importlib
import itertools
import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from commits import write_atomically
from config import TrainConfig
from metrics_file import read_metrics
from preemption import hidden_from_children


logger = logging.getLogger(__name__)


class RunLoggers:
    """The loggers of one run, as one. One that fails while the run goes on is reported and left out from then on.

    Args:
        config: the run's config.
        run_dir: of ``perf_logger.run_folder``; made where it is missing.
        resumed_step: optimiser steps completed before this run; 0 for a new run.

    Raises:
        ValueError: the metrics file cannot be written or continued, or an older run's files not be moved aside.
    """

    def __init__(self, config: TrainConfig, run_dir: Path, resumed_step: int):
        self.metrics_path = Path(config.logger.metrics_path or run_dir / "metrics.jsonl")
        if not resumed_step:
            own = [run_dir / name for name in ("config.yaml", "tensorboard", "wandb_run.json", "final_model")]
            metrics = self.metrics_path.resolve()
            move_aside(*own, *([metrics] if metrics.is_file() else []))  # /dev/null and the like stay
        jsonl = JsonLinesLogger(self.metrics_path, resumed_step)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._loggers: list[JsonLinesLogger | TensorBoardLogger | WandbLogger] = [jsonl]
        if config.logger.tensorboard:
            self._loggers.append(TensorBoardLogger(run_dir / "tensorboard", resumed_step))
        if config.wandb.mode != "disabled":
            self._loggers.append(WandbLogger(config, run_dir, resumed_step, jsonl.last_step))

    def log(self, metrics: dict[str, Any]) -> None:
        """Writes one record: JSON values, ``step`` among them; None is a value that is unknown or no finite number."""
        for each in list(self._loggers):
            self._guarded(each, each.log, metrics)

    def close(self, failed: bool = False) -> None:
        """Ends all of them; ``failed`` is what wandb shows as the run's end."""
        for each in self._loggers:
            self._guarded(each, each.close, failed)
        self._loggers = []

    def _guarded(self, each: Any, call: Callable[[Any], None], argument: Any) -> None:
        try:
            call(argument)
        except Exception as error:  # whatever a client library raises: hours of training do not depend on it
            logger.error("%s fails and gets no more records: %s: %s", type(each).__name__, type(error).__name__, error)
            self._loggers = [other for other in self._loggers if other is not each]


class JsonLinesLogger:
    """Appends whole lines to the metrics file.

    A resumed run first drops the lines of steps after ``resumed_step`` and a last line that was cut short.

    Raises:
        ValueError: if the file cannot be written, or a line that is not its last is not a metrics line.
    """

    def __init__(self, path: Path, resumed_step: int):
        path = path.resolve()
        self.last_step = 0
        """The last step that the file held before anything was dropped from it."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file() and resumed_step:
                self.last_step = drop_later_steps(path, resumed_step)
            self._file = path.open("a", buffering=1)
        except OSError as error:
            raise ValueError(
                f"metrics file {path}: cannot be written ({error.strerror}); set logger.metrics_path to a file that "
                "can be."
            ) from error

    def log(self, metrics: dict[str, Any]) -> None:
        self._file.write(json.dumps(metrics, allow_nan=False) + "\n")

    def close(self, failed: bool) -> None:
        self._file.close()


class TensorBoardLogger:
    """Writes every number as a scalar, under the names of the metrics file, to ``folder``."""

    def __init__(self, folder: Path, resumed_step: int):
        from torch.utils.tensorboard import SummaryWriter  # needs the tensorboard package

        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else None)

    def log(self, metrics: dict[str, Any]) -> None:
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, metrics["step"])
        self._writer.flush()  # what a checkpoint counts as done must survive a kill

    def close(self, failed: bool) -> None:
        self._writer.close()


class WandbLogger:
    """The wandb run of ``config.wandb``, its files below ``run_dir``.

    Args:
        last_step: the last step of the metrics file before the resume: what a run that wandb holds offline has.
    """

    def __init__(self, config: TrainConfig, run_dir: Path, resumed_step: int, last_step: int):
        wandb = importlib.import_module("wandb")
        options, state_file = config.wandb, run_dir / "wandb_run.json"
        kept = {}
        if resumed_step and state_file.is_file():
            kept = json.loads(state_file.read_text())
            last_step = max(last_step, kept["last_step"])  # a run that crashed twice after the same checkpoint
        run_id = options.id or kept.get("id") or uuid.uuid4().hex[:8]
        with hidden_from_children():  # a signal that ends the run must not end wandb's own process before
            self._run = wandb.init(
                mode=options.mode,
                project=options.project,
                name=options.name,
                id=run_id,
                resume=options.resume or ("allow" if resumed_step else None),
                dir=str(run_dir),
                config=asdict(config),
            )
        state_file.write_text(json.dumps({"id": run_id, "last_step": last_step}) + "\n")
        # Online the server says what it has; steps that it lost in a crash are logged again. Offline nobody answers.
        self._first_step = last_step + 1 if options.mode == "offline" else self._run.starting_step
        if self._first_step > resumed_step + 1:
            logger.info("wandb run %s has the steps before %d already.", run_id, self._first_step)

    def log(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] >= self._first_step:
            self._run.log(scalars(metrics), step=metrics["step"])

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """The known numbers of a record; a list, one value per layer, becomes ``name/layer_1``, ``name/layer_2``, ..."""
    named: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, list):
            named |= {f"{name}/layer_{layer}": item for layer, item in enumerate(value, start=1)}
        else:
            named[name] = value
    return {name: value for name, value in named.items() if value is not None}


def move_aside(*paths: Path) -> None:
    """Renames what is there of these from ``name.suffix`` to ``name.<n>.suffix``, with the first number that is free
    for all of them.

    Raises:
        ValueError: one cannot be renamed.
    """
    try:
        found = [path for path in paths if path.is_file() or path.is_dir()]
        for n in itertools.count(1):
            names = [path.with_name(f"{path.stem}.{n}{path.suffix}") for path in found]
            if not any(name.exists() for name in names):
                break
        for path, kept in zip(found, names, strict=True):
            path.rename(kept)
            logger.info("Kept %s of an earlier run as %s.", path.name, kept)
    except OSError as error:
        raise ValueError(f"the files of an earlier run cannot be moved aside: {error}") from error


def drop_later_steps(path: Path, resumed_step: int) -> int:
    """Keeps the records of steps up to ``resumed_step``; the file is replaced in one move: a crash loses nothing.

    Returns:
        The last step that was there; 0 if there was none.
    """
    records = read_metrics(path)
    kept = [record for record in records if record["step"] <= resumed_step]
    if len(kept) < len(records):
        logger.info("Dropped %d lines after step %d from %s.", len(records) - len(kept), resumed_step, path)
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
    return records[-1]["step"] if records else 0
