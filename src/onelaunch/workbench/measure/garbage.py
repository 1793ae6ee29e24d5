"""Collection of garbage between the cases of a run, which keeps the collections within a case short, and after a lack of memory.

``running.py`` has a :class:`Garbage` for each run, studies of models have one while they take times, and ``entry.py`` calls
:func:`free_what_is_held_by`.
"""

from __future__ import annotations

import gc
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

MANY = 100_000
"""Number of objects that a case, or a call of a process that compiles, may have left without their being passed over."""


class Garbage:
    """Context in which collections of garbage pass over what there was at its beginning, by ``gc.freeze``.

    Its methods are for the cases of a run: what stays after a case is passed over too, and what a case has made until its end.
    ``gc.unfreeze`` ends that for all objects of a process. A context whose caller has frozen objects never calls it, since every
    later collection would traverse them then. So it passes over nothing within a case, of which much ends with the case.
    """

    def __init__(self) -> None:
        self._alone = False
        """True within the context if its caller has frozen nothing."""
        self._within = False
        """True while objects of the present case are passed over."""

    def __enter__(self) -> Self:
        """Free what nothing refers to, since no later collection would, and let these pass over all that is left."""
        self._alone = not gc.get_freeze_count()
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Look at everything again, unless the caller has frozen objects."""
        if self._alone:
            gc.unfreeze()

    def verified(self) -> None:
        """Let the collections of the rest of a case pass over what its first calls have made, if that is much.

        The first case of a process imports PyTorch's compiler, Triton and packages of peers, and samplers collect garbage up to
        three times for each candidate. On a host with an H100, 12 candidates of ``linear_rnn`` were prepared in 16 and 20 s at
        the first case of a process and in 3 s at a later one (commit 3a4b8f3e2d95). On another host a collection among 420,000
        objects took 0.4 s.
        """
        if self._alone and len(gc.get_objects()) > MANY:
            gc.collect()
            gc.freeze()
            self._within = True

    def end_case(self) -> None:
        """Free what a case has left; see :func:`collect_garbage`. Objects of the case are looked at again, since many ended."""
        if self._within:
            gc.unfreeze()
            self._within = False
        collect_garbage()


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
