"""Metrics of a run: throughput, MFU, peak memory, progress bar.

Between two logged steps the logger only adds up integers. At a logged step it reads the loss and the gradient norm off
the device, gathers five numbers from every rank in one collective, and rank 0 hands one record to loggers.py.

FLOPs (:func:`flops_per_step`) are those that the model needs, not those that the hardware runs: padding and activation
recomputation are not counted, so ``mfu`` compares padded and packed runs fairly. ``mfu`` is against the dense BF16 peak
of the card whatever the precision of the run; with FP8 it shows the gain over what BF16 could at best do.
"""

import contextlib
import logging
import math
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PretrainedConfig

from commits import committed_checkpoints, last_earlier_commit
from config import TrainConfig, save_resolved
from distributed import DistributedContext, nothing, together
from loggers import RunLoggers
from profiler import StepProfiler


logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LOG_LINES = 30.0

# Dense BF16 tensor-core peak in TFLOP/s, from NVIDIA's data sheets (half of the figure "with sparsity"). All words of
# the key must be words of the device's name; the first match counts.
PEAK_BF16_TFLOPS: dict[tuple[str, ...], float] = {
    ("A30",): 165.0,
    ("A40",): 149.7,
    ("A100",): 312.0,
    ("L4",): 121.0,
    ("L40",): 181.0,
    ("L40S",): 362.0,
    ("H20",): 148.0,
    ("H100", "PCIe"): 756.0,
    ("H100", "NVL"): 835.0,
    ("H100",): 989.0,
    ("H200", "NVL"): 835.0,
    ("H200",): 989.0,
    ("GH200",): 989.0,
    ("B200",): 2250.0,
    ("B300",): 2250.0,
    ("GB200",): 2500.0,
    ("GB300",): 2500.0,
}


def run_folder(config: TrainConfig, script: str) -> Path:
    """Folder of the run's metrics, saved config and traces; nothing is created here, and rank 0's is used.

    ``ckpt_dir/<script>`` beside the checkpoints, so that a resumed run continues its metrics; without a ``ckpt_dir``
    ``outputs/<script>/<date>_<time>``, to the microsecond (the time of the call, which differs between ranks).
    """
    if config.checkpoint.ckpt_dir is not None:
        return Path(config.checkpoint.ckpt_dir) / script
    return Path("outputs") / script / datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")


def flops_per_step(model_config: PretrainedConfig, num_tokens: int, sum_seq_len_squared: int) -> int:
    """FLOPs that the model needs to train on documents of ``num_tokens`` tokens in all: forward and backward.

    Two FLOPs per multiply-add; the backward pass takes two products for each one of the forward pass, hence 3x.

    - Per token and layer: the matrices of attention, D x (N + 2K)H and NH x D, and of the SwiGLU MLP, 3 of D x F; in
      Mixtral A such MLPs and the router D x E. Once per token: the LM head D x V, tied or not.
    - Causal attention: the i-th token of a document sees i keys, so a document of L tokens has L(L+1)/2 pairs, and a
      pair takes H multiply-adds per query head for its score and H for the weighted sum.
    - Left out: the embedding (a look-up), norms, RoPE, softmax, SiLU, the optimiser.

    Args:
        model_config: Llama or Mixtral.
        num_tokens: sum of the documents' lengths L, without padding.
        sum_seq_len_squared: sum of L^2 over the documents.
    """
    width, heads = model_config.hidden_size, model_config.num_attention_heads  # D, N
    head_dim = getattr(model_config, "head_dim", None) or width // heads  # H
    attention_weights = width * head_dim * (2 * heads + 2 * model_config.num_key_value_heads)
    mlp_weights = 3 * width * model_config.intermediate_size
    num_experts = getattr(model_config, "num_local_experts", None)  # E
    if num_experts is not None:
        mlp_weights = model_config.num_experts_per_tok * mlp_weights + width * num_experts
    layers = model_config.num_hidden_layers
    weights = layers * (attention_weights + mlp_weights) + width * model_config.vocab_size
    pairs_times_2 = sum_seq_len_squared + num_tokens
    multiply_adds = weights * num_tokens + layers * heads * head_dim * pairs_times_2
    return 3 * 2 * multiply_adds


def peak_bf16_tflops(device: torch.device) -> float | None:
    """Dense BF16 peak of one device in TFLOP/s; None for a CPU, a part of a card (MIG) and cards not in the table."""
    if device.type != "cuda":
        return None
    words = set(re.findall(r"\w+", torch.cuda.get_device_name(device)))
    if "MIG" in words:
        return None
    return next((peak for key, peak in PEAK_BF16_TFLOPS.items() if words.issuperset(key)), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held at once since the process started: by PyTorch's allocator on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


class PerfLogger:
    """Writes the metrics of every ``logger.frequency``-th step, of the last step and of those with a validation loss.

    The clock starts when the logger is built: build it right before the step loop, on every rank, and close it in a
    ``finally``. Steps are consecutive, the first is ``resumed_step + 1``.

    Args:
        config: the run's config.
        run_dir: from :func:`run_folder`; only rank 0 writes there.
        ctx: this process.
        model_config: for the FLOPs.
        resumed_step: optimiser steps completed before this run; 0 for a new run.
        consumed_tokens: tokens that those steps took, all ranks together: the sum over the saved ranks of
            :attr:`rank_consumed_tokens`; 0 for a new run.

    Raises:
        ValueError: if the metrics file cannot be written or continued.
    """

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        ctx: DistributedContext,
        model_config: PretrainedConfig,
        resumed_step: int,
        consumed_tokens: int,
    ):
        self._ctx = ctx
        self._model_config = model_config
        self._checkpoints = None if config.checkpoint.ckpt_dir is None else run_dir
        self._frequency = config.logger.frequency
        self._num_train_steps = config.num_train_steps
        self._peak_tflops = peak_bf16_tflops(ctx.device)
        self._profiler = StepProfiler(config.profiler, run_dir, ctx, resumed_step)

        self.rank_consumed_tokens = consumed_tokens if ctx.is_main else 0
        """This rank's part of the tokens consumed so far, padding excluded: save it with the rank's state."""
        self._step = self._logged_step = resumed_step
        self._latest: dict[str, torch.Tensor | float] = {}  # what must be finite
        self._window = [0, 0, 0]  # tokens, tokens without padding, sum of squared lengths since the last logged step
        self._run_tokens_per_gpu, self._run_seconds = 0.0, 0.0
        self._shown: dict[str, str] = {}  # beside the bar, and in the summary; the latest validation loss stays
        self._validation_loss: dict[str, str] = {}

        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(self._profiler.close)
        self._loggers: RunLoggers | None = None

        def open_files() -> None:
            self._loggers = RunLoggers(config, run_dir, resumed_step)
            save_resolved(config, run_dir / "config.yaml")

        together(open_files if ctx.is_main else nothing, ValueError, "the run's files cannot be written")
        no_bar = None if ctx.is_main else True  # None: where stderr is not a terminal
        bar = tqdm(total=self._num_train_steps, initial=resumed_step, unit="step", dynamic_ncols=True, disable=no_bar)
        self._bar = self._cleanup.enter_context(bar)
        if not self._bar.disable:
            self._cleanup.enter_context(logging_redirect_tqdm())
        self._last_line_at = self._start = time.perf_counter()

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Keeps what runs inside (validation, checkpoints) out of the step time. Waits for the device on both sides."""
        self._synchronize()
        entered = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._start += time.perf_counter() - entered

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """:meth:`untimed`, for a checkpoint: of good weights only.

        Raises:
            FloatingPointError: as :meth:`log_step`, of a step that was not one to log.
        """
        with self.untimed():
            self._require_finite()
            yield

    def start_step(self, step: int) -> None:
        """Opens the profiler window if it begins here, and in it the step's range, which :meth:`log_step` ends."""
        if self._profiler.opens_at(step):
            with self.untimed():
                self._profiler.start(step)
        self._profiler.begin_range(step)

    def log_step(
        self,
        step: int,
        *,
        loss: torch.Tensor | float,
        grad_norm: torch.Tensor | float,
        learning_rate: float,
        epoch: int,
        num_tokens: int,
        num_unpadded_tokens: int,
        sum_seq_len_squared: int,
        validation_loss: torch.Tensor | float | None = None,
        more_metrics: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Counts a finished optimiser step, and logs it if it is one to log. Every rank calls it.

        Args:
            step: optimiser steps completed.
            loss: nats per valid token over the global batch, the same on every rank; a device tensor [] is read only at
                a logged step.
            grad_norm: global norm before clipping; likewise.
            learning_rate: the one that this step used.
            epoch: of the newest record.
            num_tokens: this rank's tokens over the step's micro-batches, padding included.
            num_unpadded_tokens: likewise, without padding.
            sum_seq_len_squared: sum over this rank's documents of their squared length; with context parallelism this
                rank's share of it.
            validation_loss: nats per valid token, where validation ran after this step; the same on every rank, or None
                on every rank.
            more_metrics: further JSON values, asked for at a logged step only.

        Raises:
            FloatingPointError: on every rank, once the step is logged, if its loss, gradient norm or validation loss is
                not finite.
        """
        assert step == self._step + 1, f"step {step} does not follow step {self._step}"
        self._step, self._latest = step, {"loss": loss, "gradient norm": grad_norm}
        self._profiler.end_range()
        if self._profiler.closes_after(step):
            with self.untimed():
                self._profiler.stop()
        self._bar.update()
        self.rank_consumed_tokens += num_unpadded_tokens
        for i, count in enumerate((num_tokens, num_unpadded_tokens, sum_seq_len_squared)):
            self._window[i] += count
        if step % self._frequency and step != self._num_train_steps and validation_loss is None:
            return

        # The host waits for the device here, and in no step that is not logged.
        loss, grad_norm = float(loss), float(grad_norm)
        self._latest = {"loss": loss, "gradient norm": grad_norm}
        tokens, unpadded_tokens, squares, consumed_tokens, peak_bytes = self._gather()
        self._synchronize()
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        gpus = self._ctx.world_size
        tflops = flops_per_step(self._model_config, unpadded_tokens, squares) / seconds / gpus / 1e12
        metrics = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "epoch": epoch,
            "step_time_seconds": seconds / (step - self._logged_step),
            "tokens_per_second_per_gpu": tokens / seconds / gpus,
            "unpadded_tokens_per_second_per_gpu": unpadded_tokens / seconds / gpus,
            "tflops_per_gpu": tflops,
            "mfu": tflops / self._peak_tflops if self._peak_tflops else None,
            "peak_memory_gib": peak_bytes / 2**30,
            "consumed_tokens": consumed_tokens,
        }
        if validation_loss is not None:
            metrics["validation_loss"] = self._latest["validation loss"] = float(validation_loss)
        if more_metrics is not None:
            metrics |= more_metrics()
        self._window, self._logged_step = [0, 0, 0], step
        self._run_tokens_per_gpu += unpadded_tokens / gpus
        self._run_seconds += seconds
        if self._ctx.is_main:
            self._write(metrics, now)
        self._require_finite()

    def _require_finite(self) -> None:
        """Ends a run that is lost, on every rank alike: all have the same losses and norm. Called where the host has
        waited for the device anyway."""
        values = {name: float(value) for name, value in self._latest.items()}
        if all(map(math.isfinite, values.values())):
            return
        found = []
        if (folder := self._checkpoints) is not None:
            found = committed_checkpoints(folder, after_commit=last_earlier_commit(folder))
        if not math.isfinite(values["loss"]):  # that of the weights after the step before
            found = [(marker, path) for marker, path in found if marker["step"] < self._step - 1]
        last = (
            f"The last checkpoint before that is {found[-1][1]}" if found else "No checkpoint is committed before that"
        )
        raise FloatingPointError(
            f"step {self._step}: {', '.join(f'{name} {value}' for name, value in values.items())}: the run is lost. "
            f"{last}. The same run would come to the same end: change what drives it there, such as adamw_kwargs.lr, "
            "lr_scheduler_kwargs.num_warmup_steps, max_grad_norm or the precision."
        )

    def close(self) -> None:
        """Ends the profiler window, the bar and the loggers, and prints a summary of the run on rank 0."""
        self._cleanup.close()
        if self._loggers is not None:
            self._loggers.close(failed=sys.exception() is not None)
        if self._shown:
            shown = self._shown | {"tokens/s": f"{self._run_tokens_per_gpu / self._run_seconds:,.0f} on average"}
            print(f"{self._progress(shown)}; metrics in {self._loggers.metrics_path}", flush=True)
            self._shown = {}

    def _synchronize(self) -> None:
        if self._ctx.device.type == "cuda":
            torch.cuda.synchronize(self._ctx.device)

    def _gather(self) -> list[int]:
        """Totals over the ranks of the window's counts and of the consumed tokens; greatest peak memory in bytes."""
        counts = [*self._window, self.rank_consumed_tokens, peak_memory_bytes(self._ctx.device)]
        if self._ctx.world_size == 1:
            return counts
        mine = torch.tensor(counts, dtype=torch.int64, device=self._ctx.device)
        all_ranks = [torch.empty_like(mine) for _ in range(self._ctx.world_size)]
        torch.distributed.all_gather(all_ranks, mine)
        *counts, peaks = torch.stack(all_ranks, dim=1).tolist()
        return [*map(sum, counts), max(peaks)]

    def _progress(self, shown: dict[str, str]) -> str:
        values = ", ".join(f"{name} {value}" for name, value in shown.items())
        return f"step {self._logged_step}/{self._num_train_steps}: {values}"

    def _write(self, metrics: dict[str, Any], now: float) -> None:
        # JSON has no NaN or infinity.
        values = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in metrics.items()}
        self._loggers.log(values)
        if "validation_loss" in metrics:
            self._validation_loss = {"val loss": f"{metrics['validation_loss']:.4f}"}
        self._shown = {"loss": f"{metrics['loss']:.4f}"} | self._validation_loss
        self._shown["tokens/s"] = f"{metrics['unpadded_tokens_per_second_per_gpu']:,.0f}"
        self._shown["lr"] = f"{metrics['learning_rate']:.2e}"
        self._bar.set_postfix(self._shown, refresh=False)
        if self._bar.disable and now - self._last_line_at >= SECONDS_BETWEEN_LOG_LINES:
            self._last_line_at = now
            logger.info(self._progress(self._shown))
