"""What was measured on which device: tables that ship with the package, one JSON file per device.

Written from stored results by ``onelaunch study adopt``, read by the dispatcher. A file holds
``{"device": name, "source": [...], "rows": [{operation, direction, dtype, flags, sizes, microseconds: {variant: time}}]}``, where
flags are the query's and may be absent.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

TABLES = Path(__file__).parent

NEAR = 3.0
"""How far a measured call may lie from this one: the sum over all sizes of |log2(ratio)|, and one for each flag that differs."""


@dataclass(frozen=True)
class Measured:
    """Times of an operation's variants at one size on one device (median of the cold regime)."""

    device: str
    sizes: Mapping[str, int]
    microseconds: Mapping[str, float]
    flags: frozenset[str] = frozenset()
    """Of the query."""

    def where(self) -> str:
        said = [f"{key}={value}" for key, value in self.sizes.items()] + sorted(self.flags)
        return f"{', '.join(said)} on {self.device}"


def nearest(
    slug: str, operation: str, direction: str, dtype: torch.dtype, sizes: Mapping[str, int], flags: Iterable[str] = ()
) -> Measured | None:
    """The measured call nearest to this one, or ``None`` when none is near enough to be believed."""
    rows = _rows(slug).get((operation, direction, str(dtype).removeprefix("torch.")), ())
    wanted = frozenset(flags)

    def distance(row: Measured) -> float:
        return len(row.flags ^ wanted) + sum(abs(math.log2(max(row.sizes[key], 1) / max(sizes[key], 1))) for key in row.sizes)

    best = min(rows, key=distance, default=None)
    return best if best is not None and distance(best) <= NEAR else None


@functools.cache
def _rows(slug: str) -> dict[tuple[str, str, str], list[Measured]]:
    path = TABLES / f"{slug}.json"
    if not path.exists():
        return {}
    table = json.loads(path.read_text())
    rows: dict[tuple[str, str, str], list[Measured]] = {}
    for row in table["rows"]:
        key = (row["operation"], row["direction"], row["dtype"])
        flags = frozenset(row.get("flags", ()))
        rows.setdefault(key, []).append(Measured(table["device"], row["sizes"], row["microseconds"], flags))
    return rows
