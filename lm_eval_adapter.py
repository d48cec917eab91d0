"""Tasks of EleutherAI's language-model evaluation harness, on this project's models. Needs ``pip install lm-eval``.

The harness takes any transformers model: it asks for logits of rows padded on the right, and for ``generate``. Both are
there, so the adapter only loads the model and hands it over.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dataset import load_tokenizer
from pretrained import load_model


@contextmanager
def _without_this_folder() -> Iterator[None]:
    """The harness imports a package called ``evaluate``, and must not find evaluate.py here instead."""
    folder, saved = Path(__file__).resolve().parent, list(sys.path)
    ours = sys.modules.get("evaluate")
    if ours is not None and Path(ours.__file__ or "").resolve().parent == folder:
        del sys.modules["evaluate"]
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    try:
        yield
    finally:
        sys.path[:] = saved


def run_lm_eval(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Runs ``options.lm_eval_tasks`` and returns the harness's results per task.

    Args:
        options: evaluate.py's.
        device: of the model.

    Raises:
        ValueError: the harness is not installed, or has no such task; several processes.
    """
    if dist.get_world_size() > 1:
        raise ValueError("--lm-eval-tasks runs in one process: start it without torchrun.")
    try:
        with _without_this_folder():
            import lm_eval
            from lm_eval.models.huggingface import HFLM

            import evaluate  # noqa: F401 (the package, before anything can import the script)
    except ImportError as error:
        raise ValueError(f"--lm-eval-tasks needs EleutherAI's harness ({error}): pip install lm-eval.") from error
    tokenizer = load_tokenizer(options.tokenizer or options.model)
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    layout = {"attn_input_format": "bshd", "self_attn_mask_type": None}
    model = load_model(options.model, device, dtype, te_backend=options.te_backend, **layout)
    rows = max(1, options.batch_tokens // options.max_seq_length)
    adapter = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=rows, max_length=options.max_seq_length)
    tasks = options.lm_eval_tasks.split(",")
    try:
        return lm_eval.simple_evaluate(model=adapter, tasks=tasks, limit=options.lm_eval_limit)["results"]
    except KeyError as error:
        raise ValueError(f"--lm-eval-tasks={options.lm_eval_tasks}: {error}") from error
