"""Collection of garbage between the cases of a run, which keeps the collections within a case short.

``running.py`` calls :func:`collect_garbage` after each case.
"""

from __future__ import annotations

import gc
import sys

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
