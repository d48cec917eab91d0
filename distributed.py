"""Processes, devices, meshes and the collectives that every strategy needs.

One process drives one device: NCCL and a GPU where CUDA is there, else gloo and the CPU. A single process started
without torchrun forms a group of one, so that the scripts have no special case.
"""

import atexit
import functools
import logging
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from errors import ConfigError


PATIENCE = timedelta(seconds=5)
"""How long ranks that fail wait for each other."""


@dataclass(frozen=True)
class DistributedContext:
    """This process: ``rank`` of ``world_size``, ``local_rank`` on its node, and the ``device`` that it drives."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def init_distributed(timeout_minutes: int = 30) -> DistributedContext:
    """Joins the process group that torchrun's environment describes, or makes one of a single process.

    Ranks other than 0 log warnings and errors only from then on.

    Raises:
        ValueError: this process has had a run before.
    """
    if dist.is_initialized():
        raise ValueError(
            "this process has had a run, whose process group is still there: Hydra's multirun (-m, --multirun) has all "
            "its runs in one process and is not supported. Start a process per run, for example in a shell loop."
        )
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        # Several ranks may share a card (functional tests), so a local rank beyond the last card wraps around.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    options = {"timeout": timedelta(minutes=timeout_minutes)}
    if "RANK" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, **options)
    if rank > 0:
        logging.getLogger().setLevel(logging.WARNING)
    return DistributedContext(rank, local_rank, world_size, device)


def all_reduce_sum(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum over the group (None: all ranks), in place."""
    dist.all_reduce(value, group=group)
    return value


class HostCopy:
    """A tensor on its way from the device to the host.

    The copy is queued when this is made, so :meth:`read` waits for what the device had been given before that, and for
    nothing after it.
    """

    def __init__(self, tensor: torch.Tensor):
        self._value, self._copied = tensor, None
        if tensor.device.type == "cuda":
            self._value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._value.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> torch.Tensor:
        """The tensor, on the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._value


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself where DDP wraps it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the very object, not an alias."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _sharded_axes(parameter: torch.Tensor) -> tuple:
    """(mesh, mesh axes over which the parameter is sharded)."""
    if not isinstance(parameter, DTensor):
        return None, ()
    axes = tuple(axis for axis, placement in enumerate(parameter.placements) if isinstance(placement, Shard))
    return parameter.device_mesh, axes


def global_grad_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """L2 norm of all gradients of all ranks, each element counted once whatever the sharding: FP32 scalar.

    Gradients may live on different meshes (dense and expert parameters): squares are summed per (mesh, sharded axes)
    and reduced over those axes only; replicated gradients are not reduced at all.
    """
    groups: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        # Keyed by the parameter, not the gradient: every rank must make the same reductions, also one without a
        # gradient.
        grads = groups[_sharded_axes(parameter)]
        if parameter.grad is not None:
            grads.append(local_tensor(parameter.grad))
    total = 0.0
    for (mesh, axes), grads in groups.items():
        grads = [grad for grad in grads if grad.numel()]
        square = torch.zeros((), device=parameters[0].device)
        if grads:
            square = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square_().sum()
        for axis in axes:
            all_reduce_sum(square, mesh.get_group(axis))
        total = total + square
    return total.sqrt()


def own_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def sum_gradients(model: nn.Module) -> None:
    """Makes DDP, or every FSDP module of ``model``, sum gradients over its ranks instead of averaging them.

    The loss is a sum over ranks (loss.py). Multiplied by their number, to be averaged again, it would send gradients of
    another magnitude through low precision than one rank's, which delayed scaling does not know in its first step.
    """
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, _sum_bucket)
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else a scaled sum is asked for, which gloo lacks


def _sum_bucket(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does with a bucket of gradients; its own hook also divides."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def together(function: Callable[[], Any], error_type: type[Exception], what: str) -> list[Any]:
    """Calls ``function`` and returns every rank's result; if one rank failed, all raise, so that nobody waits for it.

    A barrier, too.

    Args:
        function: this rank's part.
        error_type: what to raise.
        what: the message's beginning: what could not be done, and the fix.
    """
    result, failure, cause = None, None, None
    try:
        result = function()
    except Exception as error:
        failure, cause = f"{type(error).__name__}: {error}", error
    outcomes = [(result, failure)]
    if dist.is_initialized():
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, (result, failure))
    failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}
    if failures:
        raise error_type(f"{what}. {by_reason(failures)}") from cause
    return [result for result, _ in outcomes]


def by_reason(failures: dict[int, str]) -> str:
    """Failures by rank in one line, equal ones together: ``rank 0, 2: ...; rank 1: ...``."""
    ranks: dict[str, list[str]] = defaultdict(list)
    for rank, failure in sorted(failures.items()):
        ranks[failure].append(str(rank))
    return "; ".join(f"rank {', '.join(several)}: {failure}" for failure, several in ranks.items())


def nothing() -> None:
    """What the other ranks do in :func:`together` while rank 0 works."""


def errors_once(main: Callable[..., None]) -> Callable[..., None]:
    """Decorates a script's ``main``: an error that several ranks raise is printed by rank 0 alone; all exit with 1.
    A config's problems are printed without a traceback.

    The ranks learn of each other's errors from the process group's store, not by a collective, in which other ranks may
    wait for them. Nobody leaves before the error is printed: torchrun ends all ranks as soon as one has left.
    """

    @functools.wraps(main)
    def guarded(*args: Any) -> None:
        try:
            main(*args)
        except Exception as error:
            get_error_handler().record_exception(error)  # for torchrun's summary
            if dist.is_initialized() and dist.get_world_size() > 1:
                _print_once(error)
            elif isinstance(error, ConfigError):
                print(_text(error), file=sys.stderr, flush=True)
            else:
                raise
            sys.exit(1)

    return guarded


def _text(error: Exception) -> str:
    text = f"\n{error}" if isinstance(error, ConfigError) else "".join(traceback.format_exception(error))
    return text.encode(errors="backslashreplace").decode()  # odd file names


def _print_once(error: Exception) -> None:
    """Prints the error, unless rank 0 has printed, or prints within PATIENCE, the same."""
    store = dist.distributed_c10d._get_default_store()
    rank, others = dist.get_rank(), range(1, dist.get_world_size())
    text = _text(error)
    if rank == 0:
        print(text, file=sys.stderr, flush=True)
        with suppress(RuntimeError):  # the store's errors: too late, or its host is gone
            store.set("printed", text)
            store.wait([f"seen by {other}" for other in others], PATIENCE)  # rank 0 may be the store's host
        return
    printed = ""
    with suppress(RuntimeError):
        store.wait(["printed"], PATIENCE)
        printed = store.get("printed").decode()
    # Its cause, too: together's error is the same everywhere, and what led to it may be known to this rank alone.
    said = ["".join(traceback.format_exception_only(part)) for part in (error, error.__cause__) if part is not None]
    if isinstance(error, ConfigError):
        said = [text]
    if not all(f"\n{part}" in f"\n{printed}" for part in said):
        print(f"rank {rank}:\n{text}", file=sys.stderr, flush=True)
    with suppress(RuntimeError):
        store.set(f"seen by {rank}", "")


def leave_group() -> None:
    """Waits for all ranks and leaves the process group."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def shut_down(exit_status: int = 0) -> None:
    """Waits for all ranks, leaves the process group and ends this process. Call it last, after ``main`` has returned.

    Two races of torch 2.13's gloo, whose threads release the Python tensors of a collective after its ``wait`` returned
    and need the GIL for that:

    - A DDP reducer that is the last owner of a group destroys it with the GIL held and joins a thread that waits for
      the GIL. So no DDP model may be alive here.
    - DTensor's caches keep groups alive, so the threads outlive ``destroy_process_group``. A thread that asks for the
      GIL of an interpreter that is shutting down is unwound through a destructor, and the process aborts. So without
      CUDA the exit handlers run and the process leaves at once. With CUDA, gloo carries no collective of the last
      seconds, and profilers rely on a regular exit.
    """
    leave_group()
    if torch.cuda.is_initialized():
        sys.exit(exit_status)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)
