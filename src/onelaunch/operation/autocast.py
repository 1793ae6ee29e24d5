"""Casts for ``torch.autocast``: an operation casts its inputs once, and most turn autocast off inside their variants.

``gated_scan`` and ``linear_rnn`` only cast.

The public functions of operations that train call these functions (``contract.py``), and so does the chunkwise form of ``gla``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from onelaunch import checks


def low_dtype(first: object) -> torch.dtype | None:
    """Return the autocast dtype for the device of a call's first argument, or ``None`` if autocast is off."""
    kind = first.device.type if isinstance(first, torch.Tensor) else "cpu"
    return torch.get_autocast_dtype(kind) if _lowers(kind) else None


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor of one of :data:`onelaunch.checks.FLOATS`; return anything else unchanged, so that its check still fails."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in checks.FLOATS else value


def autocast(first: torch.Tensor, log_decay: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast the tensors to the autocast dtype, but the log-decay to float32, since its sums lose precision first.

    Without autocast the tensors are returned as they are.
    """
    low = low_dtype(first)
    if low is None:
        return (first, log_decay, *rest)
    return (cast(first, low), cast(log_decay, torch.float32), *(cast(tensor, low) for tensor in rest))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast does not lower the precision of a variant's float32 products."""
    return torch.autocast(device.type, enabled=False) if _lowers(device.type) else nullcontext()


def _lowers(kind: str) -> bool:
    """Return whether autocast is on for a device type. It never is for the meta device, for which PyTorch would raise."""
    return kind != "meta" and torch.is_autocast_enabled(kind)
