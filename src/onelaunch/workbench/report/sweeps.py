"""Sizes over which plots show times: which dimensions of a shape are its amount of work, and which belong to the model.

``plots.py`` draws the plots of a report with them, and ``sizes.py`` chooses those of the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onelaunch.workbench.study import Shape

_SWEPT = ("B", "T", "N")
"""Dimensions (batch, time, tokens) whose product is the amount of work for fixed sizes of the model."""

_ROWS = ("M", "position")
"""Dimensions that alone are the amount of work where a shape has them: rows of a product, or the position of a decoded token.

The other sizes then belong to the model, also one that is called N.
"""


Model = tuple[str, tuple[tuple[str, int], ...], tuple[tuple[str, str], ...], str]
"""Operation (empty for the study's), sizes of the model, options and dtype of a shape."""


def swept(shape: Shape) -> tuple[str, ...]:
    """Return the dimensions whose product is the amount of work: :data:`_ROWS` alone, else those of :data:`_SWEPT`."""
    rows = tuple(key for key in _ROWS if key in shape.sizes)
    return rows or tuple(key for key in _SWEPT if key in shape.sizes)


def model_of(shape: Shape) -> Model:
    """Return what shapes must have in common for a plot over their sizes."""
    fixed = tuple((key, value) for key, value in shape.sizes.items() if key not in swept(shape))
    return shape.operation or "", fixed, tuple((key, str(value)) for key, value in shape.options.items()), shape.dtype


def amount(shape: Shape) -> int:
    """Return the amount of work: the product of the sizes that :func:`swept` names."""
    return math.prod(shape.sizes[key] for key in swept(shape))


def spaced(values: Sequence[int], most: int) -> list[int]:
    """Return those of the ascending values whose labels do not overlap on a logarithmic axis with space for ``most``."""
    spaced: list[int] = []
    for value in values:
        if not spaced or value >= (values[-1] / values[0]) ** (1 / most) * spaced[-1]:
            spaced.append(value)
    return spaced
