"""What all tests share: offline, one CPU thread a process, GPU tests only where there is a GPU."""

import os

import pytest
import torch


DESELECTED = pytest.StashKey[int]()


def pytest_configure(config):
    # Before any test module imports the Hugging Face libraries, and for the processes that tests start.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    gpu_items = [] if torch.cuda.is_available() else [item for item in items if item.get_closest_marker("gpu")]
    config.stash[DESELECTED] = len(gpu_items)
    if gpu_items:
        config.hook.pytest_deselected(items=gpu_items)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_report_collectionfinish(config):
    if config.stash[DESELECTED]:
        return f"no CUDA device: {config.stash[DESELECTED]} GPU tests deselected"
    return []
