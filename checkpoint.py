"""Checkpoints of a training run.

``ckpt_dir/<script>/step_<N>/`` holds the state after N optimiser steps:

- ``*.distcp``, ``.metadata``: torch.distributed.checkpoint (DCP). Tensors only, under names that no layout changes:
  ``model.<parameter>`` and ``optimizer.<parameter>.<state>``. Plain, DDP, FSDP2 and HSDP models, on any number of
  ranks, read each other's checkpoints: DCP cuts what is stored to what this rank holds.
- ``rank_<r>.pt``: what the script wants back per rank (position in the data, random generators, ...).
- ``commit.json``: the commit marker. Step counts, and every file with its size.

How a checkpoint comes to count. It is written into ``step_<N>.staging/``: first the rank files, then DCP's data. Rank
0 learns from DCP's own last exchange, in the foreground or in the background thread, that every rank has written
everything. There, with no further communication, it writes the marker (atomically), renames the folder to
``step_<N>`` and prunes. So at any moment a kill leaves either the new checkpoint whole or the previous one untouched.
A folder counts if its marker is there and every file that the marker lists has its size; others are passed over, with
a warning. The newest is the one committed last, not the one with the largest N.

A run that starts afresh in a used folder notes in ``earlier_runs.json``, beside the checkpoints, the number of the last
commit of the runs before it. Those checkpoints are kept: whoever resumes later does not continue from them, does not
prune them, and moves one aside where it saves the same step.

Hyperparameters are not stored: a resumed run follows its own config (learning rate, betas, schedule) and gets from the
checkpoint what no config can say: weights, moments, masters, step counts. Of a parameter held in a compute format the
FP32 master is stored, and the parameter quantised from it again (quantized_parameters.py). Scales and amax histories of
delayed scaling are ``scaling.<module>.<tensor>``.
"""

import fcntl
import json
import logging
import os
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim.lr_scheduler import LambdaLR

from commits import (
    EARLIER_RUNS,
    MARKER,
    committed_checkpoints,
    last_earlier_commit,
    promote,
    read_marker,
    remove,
    write_atomically,
)
from config import CheckpointConfig
from distributed import by_reason, nothing, own_rank, together, unwrap
from optimizer import initialize_state
from quantized_parameters import delayed_scaling_tensors, is_quantized, requantize_from_masters
from scheduler import set_completed_steps


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was loaded besides the model, the optimiser and the scheduler."""

    step: int
    """Optimiser steps completed."""
    rank_states: list[dict[str, Any]]
    """``rank_state`` of every rank that saved; their number need not be today's."""


class Checkpointer:
    """Saves, finds, loads and prunes the checkpoints of one script. Every rank makes one and calls the same methods.

    Args:
        config: without ``ckpt_dir``, nothing can be saved or loaded.
        script: name of the train script, without ``.py``.
        model: plain, DDP or FSDP2; its parameters must be materialised before ``save`` and ``load``.
        optimizer: of ``optimizer.build_optimizer``.
        scheduler: of ``scheduler.build_scheduler``.

    Raises:
        ValueError: on every rank, if any of them cannot write to the folder or does not see the others' files, if
            another run has it in use, or if its ``earlier_runs.json`` is damaged.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        script: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
    ):
        self.config, self.model, self.optimizer, self.scheduler = config, model, optimizer, scheduler
        self.directory = None if config.ckpt_dir is None else Path(config.ckpt_dir).absolute() / script
        self._pending: tuple[Future, str] | None = None
        """The save in the background, and what to say if it fails."""
        self._group: dist.ProcessGroup | None = None
        if self.directory is None:
            return
        _check_writable(self.directory, f"checkpoint.ckpt_dir={config.ckpt_dir!r}")
        self._lock: TextIO | None = None
        in_use = f"{self.directory} is in use by another run: wait for it, or give another checkpoint.ckpt_dir"
        together(self._take_lock if own_rank() == 0 else nothing, ValueError, in_use)
        if config.async_save and dist.is_initialized():
            # The background thread communicates while the training loop does, and must not share its groups.
            self._group = dist.new_group(backend="gloo")
        separate = self._separate_earlier_runs if own_rank() == 0 else nothing
        self._last_earlier_commit: int = together(separate, ValueError, f"{self.directory} cannot be used")[0]
        """Commits up to this number are of earlier runs: never loaded or pruned, and moved aside where their step is
        saved again."""

    def _take_lock(self) -> None:
        """Rank 0: one run at a time; the operating system lets go when the process ends, however it does."""
        self._lock = open(self.directory.with_name(f".{self.directory.name}.lock"), "a")  # noqa: SIM115  held as long as this object
        fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _separate_earlier_runs(self) -> int:
        """Rank 0: the number of the last commit that is not this run's; a run that starts afresh notes it on disk."""
        last_earlier = last_earlier_commit(self.directory)
        committed = committed_checkpoints(self.directory)
        if self.config.resume_from_checkpoint or not committed:
            return last_earlier
        logger.warning(
            "%s holds %d checkpoints of an earlier run. This run starts afresh; the others are kept, and no longer "
            "resumed from: %s says so. To continue from them instead, delete that file and set "
            "checkpoint.resume_from_checkpoint=true.",
            self.directory,
            len(committed),
            self.directory / EARLIER_RUNS,
        )
        if (last := committed[-1][0]["commit"]) > last_earlier:
            write_atomically(self.directory / EARLIER_RUNS, json.dumps({"last_commit": last}) + "\n")
            return last
        return last_earlier

    def save(self, step: int, rank_state: dict[str, Any]) -> None:
        """Saves the state after ``step`` optimiser steps.

        Returns when the checkpoint is committed; with ``async_save``, as soon as the state has been copied to CPU
        memory and the previous checkpoint is committed.

        Args:
            rank_state: picklable; this rank's part of what the script wants back.

        Raises:
            RuntimeError: on every rank, if this checkpoint or the one in the background could not be written.
        """
        self._wait()
        staging = self.directory / f"step_{step}.staging"
        what = (
            f"{self.directory / f'step_{step}'} cannot be written: make room, or make the folder writable, and start "
            "again with checkpoint.resume_from_checkpoint=true; what was committed before is whole"
        )
        together(partial(self._make_staging, staging) if own_rank() == 0 else nothing, RuntimeError, what)
        # Before DCP's exchange, so that its end on rank 0 means that these files are whole too.
        together(partial(_save_object, rank_state, staging / f"rank_{own_rank()}.pt"), RuntimeError, what)
        initialize_state(self.optimizer)
        progress = {
            "step": step,
            "scheduler_steps": self.scheduler.last_epoch,
            "optimizer_steps": self.optimizer.param_groups[0].get("step"),  # FusedAdam's; AdamW counts per parameter
        }
        options = {
            "storage_writer": _CommittingWriter(staging, partial(self._commit, staging, progress)),
            "no_dist": not dist.is_initialized(),
        }
        try:
            if self.config.async_save:
                self._pending = dcp.async_save(self._tensors(), process_group=self._group, **options), what
            else:
                dcp.save(self._tensors(), **options)
        except CheckpointException as error:
            raise RuntimeError(f"{what}. {_reasons(error)}") from error

    def load(self) -> LoadedCheckpoint | None:
        """Loads the newest committed checkpoint of this run, not of earlier ones, into model, optimiser and scheduler.

        Returns:
            None, with a warning, if there is none.

        Raises:
            ValueError: on every rank, if the checkpoint is of another model or another kind of optimiser.
        """
        self._wait()
        find = partial(committed_checkpoints, self.directory, warn=True) if own_rank() == 0 else nothing
        found = together(find, RuntimeError, f"{self.directory} cannot be read")[0]
        own = [(marker, folder) for marker, folder in found if marker["commit"] > self._last_earlier_commit]
        if not own:
            if own_rank() == 0 and found:
                logger.warning(
                    "starting from step 0: the %d checkpoints in %s belong to earlier runs, says %s. Delete that file "
                    "to make them count again.",
                    len(found),
                    self.directory,
                    self.directory / EARLIER_RUNS,
                )
            elif own_rank() == 0:
                logger.warning("no committed checkpoint in %s: starting from step 0", self.directory)
            return None
        progress, folder = own[-1]
        initialize_state(self.optimizer)
        tensors = self._tensors()
        reader = dcp.FileSystemReader(folder)
        try:
            metadata = reader.read_metadata()
        except Exception as error:  # a damaged pickle raises anything
            raise RuntimeError(f"{folder} is damaged: move it away to resume from the one before. {error}") from error
        _check_same_tensors(tensors, metadata, folder)
        try:
            # In place: the tensors are the model's and the optimiser's own, so nothing is cast or copied twice.
            dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
        except CheckpointException as error:
            raise RuntimeError(f"{folder} cannot be read. {_reasons(error)}") from error
        for group in self.optimizer.param_groups:
            if "step" in group:
                group["step"] = progress["optimizer_steps"]
        requantize_from_masters(unwrap(self.model).parameters(), self.optimizer)
        set_completed_steps(self.scheduler, progress["scheduler_steps"])
        if own_rank() == 0:
            logger.info("resuming from %s", folder)

        def read_rank_states() -> list[dict[str, Any]]:
            paths = [folder / f"rank_{rank}.pt" for rank in range(progress["world_size"])]
            # Pickles, as DCP's own metadata: load only checkpoints that you trust.
            return [torch.load(path, "cpu", weights_only=False) for path in paths]

        read = read_rank_states if own_rank() == 0 else nothing  # one reader, however many ranks
        return LoadedCheckpoint(progress["step"], together(read, RuntimeError, f"{folder} cannot be read")[0])

    def close(self) -> None:
        """Waits until the checkpoint in the background is committed; raises, as ``save`` does, if it could not be."""
        self._wait()

    def _wait(self) -> None:
        if self._pending is None:
            return
        (pending, what), self._pending = self._pending, None
        try:
            pending.result()
        except CheckpointException as error:
            raise RuntimeError(f"{what}. {_reasons(error)}") from error

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of a checkpoint by its name; they share the memory of the model and the optimiser."""
        weights = model_tensors(self.model)
        tensors = {f"model.{name}": weight for name, weight in weights.items() if not is_quantized(weight)}
        scaling = delayed_scaling_tensors(unwrap(self.model))
        tensors |= {f"scaling.{name}": tensor for name, tensor in scaling.items()}
        for name, param in unwrap(self.model).named_parameters():
            for key, value in self.optimizer.state.get(param, {}).items():
                # An FP32 parameter is its own master. TE keeps a copy of its initial value there, and never uses it.
                own_master = param.dtype == torch.float32 and not is_quantized(param)
                if not (key == "master_param" and own_master):
                    tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    def _make_staging(self, staging: Path) -> None:
        """Rank 0: an empty staging folder, after tidying up what a killed run left."""
        for leftover in self.directory.glob("step_*.staging"):
            if read_marker(leftover) is not None:
                self._make_final(leftover)  # killed between commit and rename
            else:
                logger.warning("removing %s: it was never committed", leftover)
                remove(leftover)
        staging.mkdir()

    def _commit(self, staging: Path, progress: dict[str, Any]) -> None:
        """Rank 0, once every rank has written everything: makes the checkpoint count, then prunes."""
        commits = [marker["commit"] for marker, _ in committed_checkpoints(self.directory)]
        progress = progress | {
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
            "commit": max([self._last_earlier_commit, *commits]) + 1,  # the order of commits
            "files": {file.name: file.stat().st_size for file in staging.iterdir()},
        }
        write_atomically(staging / MARKER, json.dumps(progress, indent=1))
        self._make_final(staging)
        logger.info("saved %s", staging.with_suffix(""))
        if self.config.max_checkpoints is not None:
            own = committed_checkpoints(self.directory, after_commit=self._last_earlier_commit)
            for _, folder in own[: -self.config.max_checkpoints]:
                try:
                    remove(folder)
                except OSError as error:  # the new checkpoint is whole all the same
                    logger.warning("cannot remove the old checkpoint %s: %s", folder, error)

    def _make_final(self, staging: Path) -> None:
        """Rank 0: ``promote``, after moving a checkpoint of an earlier run out of the way."""
        final = staging.with_suffix("")
        there = read_marker(final)
        if there is not None and there["commit"] <= self._last_earlier_commit:
            aside = final.with_name(f"{final.name}.earlier_{uuid.uuid4().hex[:8]}")
            os.rename(final, aside)
            logger.warning("kept %s of an earlier run as %s", final, aside.name)
        promote(staging)


class _CommittingWriter(dcp.FileSystemWriter):
    """DCP's file writer; DCP calls ``finish`` on rank 0 only, after every rank has written its data.

    An error in there is raised on every rank.
    """

    def __init__(self, path: Path, commit: Callable[[], None]):
        super().__init__(path)
        self._commit = commit

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self._commit()


def _reasons(error: CheckpointException) -> str:
    """What DCP's own message hides in tracebacks, in one line."""
    return by_reason({rank: f"{type(e).__name__}: {e}" for rank, (e, _) in error.failures.items()})


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, without DDP's ``module.``; tied ones once, under their first name.

    TE's ``_extra_state`` (the scales and amax histories of delayed scaling, pickled) is left out: its size changes from
    step to step and differs per rank, so DCP cannot hold it.

    Raises:
        ValueError: the model is still on the meta device.
    """
    model = unwrap(model)
    state = model.state_dict()  # before named_parameters: it makes FSDP2 put back its sharded parameters
    names = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    tensors = {name: value for name, value in state.items() if name not in tied and not name.endswith("_extra_state")}
    if meta := [name for name, value in tensors.items() if value.is_meta]:
        raise ValueError(f"{meta[0]} and {len(meta) - 1} more are on the meta device: initialise the model first.")
    return tensors


def _check_same_tensors(tensors: dict[str, torch.Tensor], metadata: Metadata, folder: Path) -> None:
    """Raises ValueError unless names, shapes and dtypes of a checkpoint are those of this run.

    DCP itself would skip stored tensors that nobody asks for, and cast.
    """
    saved = metadata.state_dict_metadata
    problems = [f"{name} is not in the checkpoint" for name in tensors if name not in saved]
    problems += [f"{name} is in the checkpoint only" for name in saved if name not in tensors]
    for name, tensor in tensors.items():
        if name in saved:
            then, now = (saved[name].size, saved[name].properties.dtype), (tensor.size(), tensor.dtype)
            if then != now:
                problems.append(f"{name} is {list(then[0])} {then[1]} there, {list(now[0])} {now[1]} here")
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems[:5])
        listed += f"\n  - and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"{folder} does not fit this run in {len(problems)} tensors:{listed}\nResume with the model config, dtype, "
            "use_fp32_master_weights, quantised init and, under delayed scaling, fp8_config that it was saved with, or "
            "choose another checkpoint.ckpt_dir."
        )


def _check_writable(directory: Path, name: str) -> None:
    """Makes ``directory`` and writes to it from every rank, so that a run does not find out after hours of training."""
    token = together(lambda: uuid.uuid4().hex, ValueError, name)[0]

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f".probe_{token}_{own_rank()}").touch()

    def look() -> None:
        if not (directory / f".probe_{token}_0").exists():
            raise OSError("it is not the folder that rank 0 sees")

    try:
        together(write, ValueError, f"{name} cannot be written: give a folder that every rank can write to")
        together(look, ValueError, f"{name} is not shared: give a folder on a file system that all nodes share")
    finally:
        with suppress(OSError):
            (directory / f".probe_{token}_{own_rank()}").unlink()


def _save_object(value: Any, path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
