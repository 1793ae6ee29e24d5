"""Lower bounds on the work of a call: FLOPs, bytes and launches, computed from its sizes.

``cost.py`` of each operation returns a :class:`Cost`, most with the launches of :func:`launch_count`, and so do the controls in
files ``reference.py``. The workbench plans with it and computes roofline bounds from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

from onelaunch.errors import (
    CostError,
)

if TYPE_CHECKING:
    from onelaunch.operation.query import Direction
    from onelaunch.operation.variant import Variant


@dataclass(frozen=True, slots=True)
class Cost:
    """Work that an implementation cannot avoid. It is computed from the sizes and never measured."""

    flops: int
    """FLOPs of the matrix products. Elementwise work is left out, since it never sets the bound here. 0 sets no bound."""
    bytes: int
    """Smallest number of bytes to and from device memory, if every launch reads its inputs once and writes its outputs once. 0
    sets no bound."""
    launches: int | None = None
    """Number of kernel launches in the default path; ``None`` if PyTorch, another library or a compiler decides it."""
    matrix_dtype: str | None = None
    """Dtype of the matrix products' operands if it differs from the case's dtype. Its measured peak bounds ``flops``."""
    written: int | None = None
    """Written part of ``bytes``. If it is small, the bandwidth of reads sets the bound. If it is large or ``None`` (not stated),
    the bandwidth of copies does."""

    def __post_init__(self) -> None:
        for name in ("flops", "bytes", "launches", "written"):
            value = getattr(self, name)
            if value is None and name in ("launches", "written"):
                continue
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
                raise CostError(name, got=value, want="a number of at least 0 (0 sets no bound)")
        if self.written is not None and self.written > self.bytes:
            raise CostError("written", got=self.written, want=f"at most bytes, {self.bytes}, of which it is a part")

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of both. Its ``matrix_dtype`` is that of the left operand, since a cost holds only one."""
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            _sum(self.launches, other.launches),
            self.matrix_dtype,
            _sum(self.written, other.written),
        )


def _sum(one: int | None, other: int | None) -> int | None:
    """Return the sum of two numbers, or ``None`` if one of them is not known."""
    return None if one is None or other is None else one + other


def launch_count(variant: Variant | None, direction: Direction) -> int | None:
    """Return the number of launches that a variant declares for a direction; for ``None``, the smallest possible number.

    That smallest number is one launch for each pass. Forward and backward together have ``launches`` plus ``backward_launches``.
    """
    if variant is None:
        return 1 if direction == "forward" else 2
    forward, backward = variant.capabilities.launches, variant.capabilities.backward_launches
    if direction == "forward":
        return forward
    return None if forward is None or backward is None else forward + backward
