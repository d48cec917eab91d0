"""Runs a function or a script on N processes over gloo, for tests.

``run_on_ranks`` forks its ranks from a server that has imported torch and transformers once, so a launch costs a
fraction of a second; the server itself never runs a tensor operation, so nothing threaded is forked. ``run_script``
starts real interpreters with torchrun's environment, as a user would. Both give up after a timeout, end every process
that they started, and raise with each rank's output.
"""

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


REPOSITORY = Path(__file__).resolve().parents[1]
_PRELOAD = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.llama.modeling_llama"]
_GRACE_SECONDS = 5.0  # what the other ranks get to fail by themselves once one has


class RanksFailed(AssertionError):
    """At least one rank failed or hung. ``exit_codes`` per rank: negative = that signal, None = still running."""

    def __init__(self, what: str, exit_codes: list[int | None], outputs: list[str]):
        self.exit_codes = exit_codes
        report = "".join(f"\n--- rank {rank}\n{output[-6000:]}" for rank, output in enumerate(outputs))
        super().__init__(f"{what}: exit codes {exit_codes}{report}")


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def run_on_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 60, init: bool = True
) -> list[Any]:
    """Calls ``function(*args)`` on ``world_size`` processes and returns what each rank returned; None of a rank whose
    process ended with status 0 in there, as the scripts' do (``distributed.shut_down``).

    Args:
        function: defined at the top level of an importable module (a test file will do).
        args: picklable; the ranks tell themselves apart by ``torch.distributed.get_rank()`` or ``RANK``.
        init: join a gloo process group before the call and leave it after; false: the function does that itself.

    Raises:
        RanksFailed: a rank raised, was killed or ran past ``timeout_seconds``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes = []
        for rank in range(world_size):
            environment = _rank_environment(rank, world_size, port)
            # Not a daemon: those may not start loader workers.
            processes.append(context.Process(target=_run_rank, args=(function, args, environment, init, folder)))
        try:
            for process in processes:
                process.start()
            exit_codes = _wait([lambda p=p: p.exitcode for p in processes], timeout_seconds)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        outputs = _read_outputs(folder, world_size)
        if any(exit_codes) or None in exit_codes:
            raise RanksFailed(f"{function.__name__} on {world_size} ranks", exit_codes, outputs)
        results = [Path(folder, f"{rank}.pkl") for rank in range(world_size)]
        return [pickle.loads(result.read_bytes()) if result.exists() else None for result in results]


def _run_rank(function: Callable, args: tuple, environment: dict[str, str], init: bool, folder: str) -> None:
    """Body of one rank's process."""
    rank = environment["RANK"]
    log = os.open(os.path.join(folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # for loader workers; a child inherits the forkserver
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if init:
            dist.init_process_group("gloo")
        result = function(*args)
        if init:
            dist.barrier()
            dist.destroy_process_group()
    except SystemExit:
        raise  # shut_down's, on a GPU
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # not sys.exit: no waiting for threads that wait for other ranks
    with open(os.path.join(folder, f"{rank}.pkl"), "wb") as file:
        pickle.dump(result, file)


def run_script(
    script: str | Path,
    argv: Sequence[str] = (),
    world_size: int = 1,
    *,
    timeout_seconds: float = 120,
    cwd: str | Path = REPOSITORY,
    environment: dict[str, str] | None = None,
) -> list[str]:
    """Runs ``python script argv...`` on ``world_size`` processes, as torchrun would, and returns each rank's output.

    Args:
        script: path, relative to the repository.
        environment: added to this process's environment.

    Raises:
        RanksFailed: a rank exited with another code than 0 or ran past ``timeout_seconds``.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes = []
        for rank in range(world_size):
            variables = os.environ | _rank_environment(rank, world_size, port) | (environment or {})
            with open(os.path.join(folder, f"{rank}.log"), "wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(REPOSITORY / script), *argv],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=cwd,
                        env=variables,
                        start_new_session=True,  # so that loader workers end with their rank
                    )
                )
        try:
            exit_codes = _wait([p.poll for p in processes], timeout_seconds)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        outputs = _read_outputs(folder, world_size)
        if any(exit_codes) or None in exit_codes:
            raise RanksFailed(f"{script} on {world_size} ranks", exit_codes, outputs)
        return outputs


def _read_outputs(folder: str, world_size: int) -> list[str]:
    """What each rank printed; a rank that died before it could print has no file."""
    logs = [Path(folder, f"{rank}.log") for rank in range(world_size)]
    return [log.read_text(errors="replace") if log.exists() else "" for log in logs]


def _wait(polls: list[Callable[[], int | None]], timeout_seconds: float) -> list[int | None]:
    """Exit codes once all have exited, or a little after the first failure, or at the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        codes = [poll() for poll in polls]
        if None not in codes or time.monotonic() > deadline:
            return codes
        if any(codes):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.02)
