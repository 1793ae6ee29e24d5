"""Calls that ``torch.compile`` leaves out of its graphs: those with collectives.

A compiler drops a collective whose result this rank does not read, and the other ranks wait for it in vain. ``contexts.py``,
``state_scan.py`` and ``halo.py`` call :func:`uncompiled`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function; while ``torch.compile`` traces, break the graph before it, which ``fullgraph=True`` makes an error."""
    if torch.compiler.is_compiling():
        return torch.compiler.disable(function)(*args, **kwargs)
    return function(*args, **kwargs)
