"""Profiles of a few steps: a range for Nsight Systems, or torch.profiler's own files.

Only rank 0 captures. The ranges inside a step have the names of phases.py.
"""

import contextlib
import logging
from pathlib import Path

import torch

from config import ProfilerConfig
from distributed import DistributedContext
from phases import name_phases, phase


logger = logging.getLogger(__name__)
MEMORY_EVENTS = 100_000  # allocations and frees that a snapshot keeps, the newest


class StepProfiler:
    """Captures the steps ``start_step`` to ``end_step``, once, on rank 0.

    A run that begins inside the window, resumed, captures at once; one that begins after it never does, and says so.
    The owner closes it in a ``finally``, which ends a capture that is open.

    ``kind=nsys`` calls ``cudaProfilerStart`` and ``cudaProfilerStop``, for ``nsys profile
    --capture-range=cudaProfilerApi``; phases are NVTX ranges.

    ``kind=torch`` writes to ``run_dir/profile_from_step_<n>/``:

    - ``trace.json``: for Perfetto (ui.perfetto.dev) or chrome://tracing.
    - ``operators.txt``: the named ranges, and the twenty operators that cost most by themselves: device time on a GPU.
    - ``memory.pickle`` on a GPU: allocations with their stacks, for pytorch.org/memory_viz. A CPU has no such snapshot:
      ``memory.txt`` has the twenty operators that allocate most, the trace what is allocated over time.
    """

    def __init__(self, config: ProfilerConfig, run_dir: Path, ctx: DistributedContext, resumed_step: int):
        self._device = ctx.device
        self._kind = config.kind
        if config.kind == "auto":
            self._kind = "nsys" if ctx.device.type == "cuda" else "torch"
        self._enabled = config.enabled and ctx.is_main
        self._steps = range(config.start_step, config.end_step + 1)
        self._run_dir = run_dir
        self._first_step: int | None = None
        self._profile: torch.profiler.profile | None = None
        self._step_range = contextlib.ExitStack()
        self.running = False
        if self._enabled and resumed_step >= config.end_step:
            first, end = resumed_step + 1, config.end_step
            logger.warning("Nothing will be profiled: step %d is past profiler.end_step=%d.", first, end)

    def opens_at(self, step: int) -> bool:
        return self._enabled and self._first_step is None and step in self._steps

    def closes_after(self, step: int) -> bool:
        return self.running and step >= self._steps[-1]

    def start(self, step: int) -> None:
        self._first_step, self.running = step, True
        if self._kind == "nsys":
            torch.cuda.profiler.start()
            name_phases(torch.cuda.nvtx.range)
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self._profile = torch.profiler.profile(
            activities=activities, record_shapes=True, profile_memory=True, acc_events=True
        )
        self._profile.start()
        name_phases(torch.profiler.record_function)

    def begin_range(self, step: int) -> None:
        """Names the step in the profile, until :meth:`end_range`."""
        self._step_range.enter_context(phase(f"step {step}"))

    def end_range(self) -> None:
        self._step_range.close()

    def stop(self) -> None:
        """Ends the capture, with what the device has been given so far, and writes its files."""
        self.end_range()
        self.running = False
        name_phases(None)
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        finally:
            if self._kind == "nsys":
                torch.cuda.profiler.stop()
            else:
                self._profile.stop()
        if self._kind == "torch":
            folder = self._run_dir / f"profile_from_step_{self._first_step}"
            try:
                self._write(folder)
            except OSError as error:  # no reason to stop training
                logger.error("The profile cannot be written to %s: %s", folder, error)
            finally:
                self._profile = None
                if self._device.type == "cuda":
                    torch.cuda.memory._record_memory_history(enabled=None)

    def close(self) -> None:
        """Ends a capture that is open."""
        if self.running:
            self.stop()

    def _write(self, folder: Path) -> None:
        on_gpu = self._device.type == "cuda"
        folder.mkdir(parents=True, exist_ok=True)
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
        else:
            (folder / "memory.txt").write_text(self._table("self_cpu_memory_usage"))
        operators = self._table("self_device_time_total" if on_gpu else "self_cpu_time_total")
        (folder / "operators.txt").write_text(f"{self._ranges()}\nThe twenty costliest operators\n{operators}")
        self._profile.export_chrome_trace(str(folder / "trace.json"))
        logger.info("Wrote the profile to %s.", folder)

    def _ranges(self) -> str:
        """Calls and milliseconds of every named range, the costliest first. torch's own table fails for these: they
        take no time on the device themselves."""
        events = [event for event in self._profile.key_averages() if event.is_user_annotation]
        lines = [f"{'Named ranges':30}{'calls':>8}{'CPU ms':>12}{'CUDA ms':>12}"]
        for event in sorted(events, key=lambda event: -max(event.cpu_time_total, event.device_time_total)):
            times = f"{event.cpu_time_total / 1e3:12.3f}{event.device_time_total / 1e3:12.3f}"
            lines.append(f"{event.key:30}{event.count:8}{times}")
        return "\n".join(lines) + "\n"

    def _table(self, sort_by: str) -> str:
        """The twenty costliest operators by ``sort_by``."""
        events = self._profile.key_averages()
        events[:] = [event for event in events if not event.is_user_annotation]
        return events.table(sort_by=sort_by, row_limit=20)
