"""Collection of garbage between the cases of a run, which keeps the collections within a case short, and after a lack of memory.

``running.py`` calls :func:`collect_garbage` after each case, and ``entry.py`` :func:`free_what_is_held_by`. Studies of models
take their times inside of :func:`passing_over`.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def collect_garbage() -> None:
    """Free what a case has left, and let later collections pass over what stays until ``gc.unfreeze`` is called.

    Samplers collect garbage up to three times for each candidate. Looking each time at all that the first calls have imported,
    such as PyTorch's compiler, Triton and a peer's package, takes 0.3 s and more. Functions that PyTorch has compiled are dropped
    first, as the next case would do, since they would become garbage that no collection sees.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    gc.freeze()


@contextmanager
def passing_over() -> Iterator[None]:
    """Collect garbage, and let collections inside pass over all objects that are left."""
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:  # otherwise it would let every later collection traverse what the caller has frozen
            gc.unfreeze()


def free_what_is_held_by(error: BaseException) -> None:
    """Free the memory of the calls that ended with an exception, and what PyTorch has cached, for those that follow.

    The exception's traceback holds the local variables of these calls. Graphs of autograd hold each other, until they are
    collected. A GPU's memory that a destroyed CUDA graph had is not returned before PyTorch's cache is emptied.
    """
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
