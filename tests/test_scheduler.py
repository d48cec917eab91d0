"""scheduler.py: the rates, worked by hand."""

import pytest
import torch

from config import SchedulerConfig
from scheduler import build_scheduler, lr_ratio, set_completed_steps


CONFIG = SchedulerConfig(num_warmup_steps=4, num_decay_steps=8, min_lr_ratio=0.1)


def make(lr: float = 2.0):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    return optimizer, build_scheduler(optimizer, CONFIG)


@pytest.mark.parametrize(
    "step, ratio",
    [
        (1, 0.25),
        (2, 0.5),
        (4, 1.0),
        (6, 0.8681980515339464),  # a quarter of the decay: 0.1 + 0.45 * (1 + sqrt(1/2))
        (8, 0.55),  # half of it: the mean of 0.1 and 1
        (10, 0.2318019484660536),  # 0.1 + 0.45 * (1 - sqrt(1/2))
        (12, 0.1),
        (1000, 0.1),
    ],
)
def test_ratio(step, ratio):
    assert lr_ratio(step, CONFIG) == pytest.approx(ratio, rel=1e-12)


def test_without_warmup_decay_starts_at_once():
    config = SchedulerConfig(num_warmup_steps=0, num_decay_steps=2, min_lr_ratio=0.0)
    assert [lr_ratio(step, config) for step in (1, 2, 3)] == pytest.approx([0.5, 0.0, 0.0])


def test_scheduler_sets_the_rate_of_the_step_to_come():
    optimizer, scheduler = make()
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [2.0 * lr_ratio(step, CONFIG) for step in range(1, 13)]


@pytest.mark.parametrize("completed", [0, 1, 5, 20])
def test_set_completed_steps_equals_stepping(completed):
    optimizer, scheduler = make()
    for _ in range(completed):
        optimizer.step()
        scheduler.step()
    resumed_optimizer, resumed = make()
    set_completed_steps(resumed, completed)
    for _ in range(3):
        assert resumed_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert resumed.get_last_lr() == scheduler.get_last_lr()
        for pair in ((optimizer, scheduler), (resumed_optimizer, resumed)):
            pair[0].step()
            pair[1].step()


def test_a_resumed_run_follows_its_own_learning_rate():
    optimizer, scheduler = make(lr=5.0)
    set_completed_steps(scheduler, 7)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5.0 * 0.55)
