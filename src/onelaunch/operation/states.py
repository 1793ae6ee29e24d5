"""Initial states that are not float32, for functions with the names and signatures of fla (flash-linear-attention).

``functions.py`` of ``gated_scan`` and of ``gla`` call :func:`float32_state`.
"""

from __future__ import annotations

import torch

from onelaunch import checks


def float32_state(state: torch.Tensor | None, first: torch.Tensor) -> torch.Tensor | None:
    """Return an initial state in float32 if it has the dtype, one of ``checks.FLOATS``, of a call's first tensor.

    A state of any other dtype is returned unchanged, so it still fails the check of the operation.
    """
    if not isinstance(state, torch.Tensor) or not isinstance(first, torch.Tensor) or state.dtype is torch.float32:
        return state
    return state.float() if state.dtype is first.dtype and state.dtype in checks.FLOATS else state
