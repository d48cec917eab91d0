"""Names for the phases of a step in a profile: ``with phase("backward"):``.

=====================  ================================================================
data wait              the loop waits for the loader
host-to-device copy    the micro-batches' tensors are sent
forward layer <n>      decoder layer n, counted from 1
loss                   LM head and cross entropy, with its gradient (loss.py)
backward               of one micro-batch
gradient norm          global norm and clipping
optimiser              the parameters' update
validation             one pass over the validation set
checkpoint             as far as the loop waits for it
dispatch, combine      expert parallelism: tokens to their experts and back
CP exchange            context parallelism: keys and values between neighbours (reference)
=====================  ================================================================

TE names the exchanges inside its attention by itself, with ``NVTE_NVTX_ENABLED=1``. Hugging Face's model
(``use_te=false``) has neither layers nor loss named.

Ranges exist only while steps are being captured (profiler.py). Otherwise a phase is one shared empty context; entering
and leaving it takes about 0.15 us on one core, some thirty times a step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


RangeMaker = Callable[[str], AbstractContextManager]
_NO_RANGE = nullcontext()
_make_range: RangeMaker | None = None


def phase(name: str) -> AbstractContextManager:
    """A range of that name in the profile that is being made; nothing if there is none."""
    return _NO_RANGE if _make_range is None else _make_range(name)


def name_phases(make_range: RangeMaker | None) -> None:
    """From now on phases become ranges, such as ``torch.profiler.record_function``; None: no more."""
    global _make_range
    _make_range = make_range
