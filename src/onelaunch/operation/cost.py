"""Costs: the work that a call cannot avoid, as plain arithmetic."""

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
    """Work that a way of computing cannot avoid: pure arithmetic, no measurement."""

    flops: int
    """FLOPs of the matrix products; the elementwise rest never decides here. 0 sets no bound."""
    bytes: int
    """Fewest bytes to and from memory: every launch reads its inputs once and writes its outputs once. 0 sets no bound."""
    launches: int | None = None
    """Kernels in the default path; ``None`` when a compiler decides."""
    matrix_dtype: str | None = None
    """Dtype of the matrix products' operands, where it is not the case's: the peak of this dtype bounds ``flops``."""
    written: int | None = None
    """Bytes of ``bytes`` that are written. Where they are few, the bandwidth of reads sets the bound; ``None``, where nothing is
    said, leaves it to that of copies."""

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
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            _sum(self.launches, other.launches),
            self.matrix_dtype,
            _sum(self.written, other.written),
        )


def _sum(one: int | None, other: int | None) -> int | None:
    """Return the sum of two numbers, or ``None`` where one of them is not known."""
    return None if one is None or other is None else one + other


def launch_count(variant: Variant | None, direction: Direction) -> int | None:
    """Return the launches that a variant declares: ``launches`` forward, plus ``backward_launches``; for ``None``, the fewest."""
    if variant is None:
        return 1 if direction == "forward" else 2
    forward, backward = variant.capabilities.launches, variant.capabilities.backward_launches
    if direction == "forward":
        return forward
    return None if forward is None or backward is None else forward + backward
