"""Checks and constants of scales that the quantized formats share.

``float8.py`` and ``nvfp4.py`` call them.
"""

from __future__ import annotations

import torch

from onelaunch import checks
from onelaunch.errors import ValueRangeError

LARGEST_SCALE = 448.0
"""Largest finite number of float8_e4m3fn, the dtype of float8 elements and of NVFP4's block scales."""


LEAST = torch.finfo(torch.float32).tiny
"""Smallest scale that quantization chooses for a matrix or row: the least normal float32 number, so that division is safe."""


WIDE = (torch.float32, torch.float64)
"""Dtypes that scales of rows and of whole tensors may have: as stored, and upcast for an oracle."""


def check_scale(argument: str, scale: torch.Tensor, like: torch.Tensor) -> None:
    """Raise unless ``scale`` is a float32 or float64 tensor on the device of ``like``, the tensor that it scales."""
    checks.tensor(argument, scale)
    checks.dtype(argument, scale, WIDE)
    checks.device(argument, scale, like.device)


def bounds(start: int, stop: int | None, rows: int) -> tuple[int, int]:
    """Return first and end of the slice ``start:stop`` of ``rows`` rows; the end is at least the first."""
    first, end, _ = slice(start, stop).indices(rows)
    return first, max(first, end)


def matrix(values: torch.Tensor) -> torch.Tensor:
    """Check that ``values`` is a floating-point matrix ``[R, K]`` and return it in float32, detached.

    Infinities raise if values are checked: on a CPU, or with ``ONELAUNCH_CHECK_VALUES=1``.
    """
    checks.tensor("values", values)
    checks.rank("values", values, "[R, K]")
    if not values.is_floating_point():
        checks.dtype("values", values, checks.FLOATS)  # raises, and names the usual dtypes
    wide = values.detach().float()
    if checks.values_are_checked(wide) and bool(wide.isinf().any()):
        raise ValueRangeError("values", got="hold infinities", want="no scale reaches them; clamp them first")
    return wide
