"""What was measured on which device: tables that ship with the package, one JSON file per device.

Written from stored results by ``onelaunch study adopt``, read by the dispatcher. A file holds
``{"device": name, "source": [...], "rows": [{operation, direction, dtype, sizes, microseconds: {variant: time}}]}``.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

TABLES = Path(__file__).parent

NEAR = 3.0
"""How far a measured size may lie from the call's: the sum over all sizes of |log2(ratio)|."""


@dataclass(frozen=True)
class Measured:
    """Times of an operation's variants at one size on one device (median of the cold regime)."""

    device: str
    sizes: Mapping[str, int]
    microseconds: Mapping[str, float]

    def where(self) -> str:
        return f"{', '.join(f'{key}={value}' for key, value in self.sizes.items())} on {self.device}"


def nearest(slug: str, operation: str, direction: str, dtype: torch.dtype, sizes: Mapping[str, int]) -> Measured | None:
    """The measured sizes nearest to the given ones, or ``None`` when none is near enough to be believed."""
    rows = _rows(slug).get((operation, direction, str(dtype).removeprefix("torch.")), ())
    best = min(rows, key=lambda row: _distance(row.sizes, sizes), default=None)
    return best if best is not None and _distance(best.sizes, sizes) <= NEAR else None


def _distance(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    return sum(abs(math.log2(max(a[key], 1) / max(b[key], 1))) for key in a)


@functools.cache
def _rows(slug: str) -> dict[tuple[str, str, str], list[Measured]]:
    path = TABLES / f"{slug}.json"
    if not path.exists():
        return {}
    table = json.loads(path.read_text())
    rows: dict[tuple[str, str, str], list[Measured]] = {}
    for row in table["rows"]:
        key = (row["operation"], row["direction"], row["dtype"])
        rows.setdefault(key, []).append(Measured(table["device"], row["sizes"], row["microseconds"]))
    return rows
