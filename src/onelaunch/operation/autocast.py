"""Casts that ``torch.autocast`` asks of an operation: tensors are cast where they come in, and nothing below is lowered again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from onelaunch import checks


def low_dtype(first: object) -> torch.dtype | None:
    """Return the autocast dtype of the device of a call's first argument, or ``None`` where autocast is off."""
    kind = first.device.type if isinstance(first, torch.Tensor) else "cpu"
    return torch.get_autocast_dtype(kind) if _lowers(kind) else None


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor that the contract would take anyway, and nothing else: autocast must not hide a wrong argument."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in checks.FLOATS else value


def autocast(first: torch.Tensor, log_decay: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast all to the autocast dtype but the log-decay, which becomes float32 (sums of it lose bits first); nothing without."""
    low = low_dtype(first)
    if low is None:
        return (first, log_decay, *rest)
    return (cast(first, low), cast(log_decay, torch.float32), *(cast(tensor, low) for tensor in rest))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast does not lower the float32 products of a variant."""
    return torch.autocast(device.type, enabled=False) if _lowers(device.type) else nullcontext()


def _lowers(kind: str) -> bool:
    """Return whether autocast is on for a device type; the meta device has none, and PyTorch raises when asked."""
    return kind != "meta" and torch.is_autocast_enabled(kind)
