"""Typical calls of ``gated_scan``, which ``onelaunch tune`` measures where no shape is given."""

from __future__ import annotations

from collections.abc import Iterator

from onelaunch.operation import Case
from onelaunch.ops.gated_scan.contract import gated_scan


@gated_scan.typical
def typical(device: str) -> Iterator[Case]:
    """Yield typical calls on a type of device: a layer's scan, with and without a gate. On a CPU they are small."""
    if device == "cuda":
        yield gated_scan.case("bfloat16", B=4, T=2048, V=1024)
        yield gated_scan.case("bfloat16", B=4, T=2048, V=1024, gate=False)
    else:
        yield gated_scan.case("float32", B=4, T=512, V=64)
