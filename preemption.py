"""Leaving early: SIGTERM and SIGUSR1 end a run after a step, with a checkpoint, on every rank.

1. The handler only sets a flag: a step, a validation or a checkpoint that is under way ends as if nothing had happened.
2. The flag travels in the all-reduce that opens every step anyway (training.next_global_batch), so that all ranks learn
   of it in the same step, whichever of them got the signal. The host reads it at that step's end
   (distributed.HostCopy): no collective and no wait of its own.
3. All ranks save, unless that step is saved anyway, close their files and loaders, and leave with REQUEUE_STATUS.

From the signal to the end it takes at most two steps, a validation, and one checkpoint on top of one that is being
written in the background. Until the first step begins both signals end the process at once, which is their default:
there is nothing to save. A run that has done its last step finishes, with status 0.

Loader workers and wandb's process, which get a signal to the process group too, never see it
(:func:`hidden_from_children`).
"""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from config import TrainConfig
from distributed import DistributedContext, HostCopy


logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

REQUEUE_STATUS = 128 + signal.SIGTERM
"""Exit status of a run that was stopped and wants to go on: 143, as a shell reports of a process that SIGTERM ended.

- Not 0: torchrun, Slurm and Kubernetes would call the job complete.
- From 128 on: Kubeflow's ``restartPolicy: ExitCode`` retries those and gives up on 1 to 127. ``OnFailure`` and a
  Kubernetes Job's ``backoffLimit`` retry any but 0.
- Slurm requeues a job that it preempts (``--requeue``) whatever the status. At a time limit the batch script has to
  call ``scontrol requeue`` itself; that it passed a signal on, or this status, tells it to.
- torchrun that got the signal itself passes it on, waits 30 s before it kills (torch 2.13: ``--shutdown-timeout``), and
  leaves with 1, not with this. SIGUSR1 ends it and leaves its workers alone, unless it is told to pass that on, too:
  ``--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1``. Where only workers got a signal they count as failed,
  and ``--max_restarts`` starts them again in place; they resume from what they have just saved. That needs
  ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``: in the agent's shared store they would find the addresses of those before.
"""


class Preemption:
    """Whether this run is to leave early. Does nothing until :meth:`arm`."""

    def __init__(self) -> None:
        self.signalled = False
        """This rank got a signal."""
        self.left_early = False
        """All ranks have agreed to leave before the last step."""

    @property
    def exit_status(self) -> int:
        return REQUEUE_STATUS if self.left_early else 0

    def arm(self, config: TrainConfig, ctx: DistributedContext) -> None:
        """Takes over both signals for the rest of the process. Call it on every rank, right before the first step."""
        self._config, self._ctx = config, ctx
        checkpoint = config.checkpoint
        if ctx.is_main and checkpoint.ckpt_dir and not (checkpoint.save_every_n_steps or checkpoint.save_final_model):
            logger.warning(
                "checkpoint.ckpt_dir=%s without save_every_n_steps and save_final_model: %s.",
                checkpoint.ckpt_dir,
                "only SIGTERM and SIGUSR1 lead to a checkpoint" if config.can_save else "nothing is saved",
            )
        for number in SIGNALS:
            signal.signal(number, self._take_note)

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True  # no logging here: the handler may have interrupted a write to the same stream

    def stops_after(self, step: int, signalled_ranks: HostCopy) -> bool:
        """Whether the run ends with ``step``, which is not its last; the same on every rank.

        Args:
            signalled_ranks: how many ranks had been signalled when the step began; ``GlobalBatch`` has it.
        """
        self.left_early = step < self._config.num_train_steps and signalled_ranks.read().item() > 0
        if self.left_early and self._ctx.is_main:
            checkpoint = self._config.checkpoint
            logger.warning("Preempted: leaving after step %d of %d.", step, self._config.num_train_steps)
            if checkpoint.ckpt_dir is None:
                logger.warning("Nothing is saved: checkpoint.ckpt_dir is not set.")
            elif not self._config.can_save:
                logger.warning("Nothing is saved: dataset.use_stateful_dataloader=false loses the place in the data.")
            elif not checkpoint.resume_from_checkpoint:
                logger.warning("To go on from there, start again with checkpoint.resume_from_checkpoint=true.")
        return self.left_early


@contextmanager
def hidden_from_children() -> Iterator[None]:
    """Processes started inside never get the two signals: a mask is inherited, and they do not lift it.

    For loader workers: the step that ends a run still needs their batches. They must be ended by other means, since
    ``terminate`` is SIGTERM. For wandb: it has the run's last records to send.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
