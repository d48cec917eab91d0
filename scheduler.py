"""Learning rate: linear warm-up, cosine decay, constant.

The n-th optimiser step (n = 1, 2, ...; the ``step`` of ``metrics.jsonl``) uses ``adamw_kwargs.lr * ratio(n)`` with::

    ratio(n) = n / W                                                   for n <= W = num_warmup_steps
    ratio(n) = m + (1 - m) / 2 * (1 + cos(pi * min((n - W) / D, 1)))   for n > W, D = num_decay_steps, m = min_lr_ratio

so the first step already learns, step W runs at the full rate and step W + D is the first one at the minimum.
"""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from config import SchedulerConfig


def lr_ratio(step: int, config: SchedulerConfig) -> float:
    """Fraction of ``adamw_kwargs.lr`` that optimiser step ``step`` (from 1) uses."""
    if step <= config.num_warmup_steps:
        return step / config.num_warmup_steps
    progress = min((step - config.num_warmup_steps) / config.num_decay_steps, 1.0)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def build_scheduler(optimizer: Optimizer, config: SchedulerConfig) -> LambdaLR:
    """Sets the rate of the first step now, and that of the next one at each ``step()``, after the optimiser's."""
    return LambdaLR(optimizer, lambda completed_steps: lr_ratio(completed_steps + 1, config))


def set_completed_steps(scheduler: LambdaLR, completed_steps: int) -> None:
    """Puts a scheduler where it is after ``completed_steps`` optimiser steps.

    The rates follow from the scheduler's own settings, so a resumed run obeys the config that it was started with.
    """
    rates = [
        base * ratio(completed_steps) for base, ratio in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    position = {"last_epoch": completed_steps, "_step_count": completed_steps + 1, "_last_lr": rates}
    scheduler.load_state_dict(scheduler.state_dict() | position)
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
