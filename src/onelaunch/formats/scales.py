"""Checks and arithmetic that the formats share."""

from __future__ import annotations

import torch

from onelaunch import checks
from onelaunch.errors import ValueRangeError

LARGEST_SCALE = 448.0
"""Of float8_e4m3fn."""


LEAST = torch.finfo(torch.float32).tiny
"""Scale that may be divided by."""


WIDE = (torch.float32, torch.float64)
"""The same of scales of rows and of whole tensors."""


def check_scale(argument: str, scale: torch.Tensor, like: torch.Tensor) -> None:
    """Raise unless a scale is a tensor of 32 bits or more on the device of the tensor that it belongs to."""
    checks.tensor(argument, scale)
    checks.dtype(argument, scale, WIDE)
    checks.device(argument, scale, like.device)


def bounds(start: int, stop: int | None, rows: int) -> tuple[int, int]:
    """Where a slice of so many rows begins and ends."""
    first, end, _ = slice(start, stop).indices(rows)
    return first, max(first, end)


def matrix(values: torch.Tensor) -> torch.Tensor:
    """Return a checked matrix ``[R, K]`` in float32 or wider."""
    checks.tensor("values", values)
    checks.rank("values", values, "[R, K]")
    if not values.is_floating_point():
        checks.dtype("values", values, checks.FLOATS)
    wide = values.detach().float()
    if checks.values_are_checked(wide) and bool(wide.isinf().any()):
        raise ValueRangeError("values", got="hold infinities", want="no scale reaches them; clamp them first")
    return wide
