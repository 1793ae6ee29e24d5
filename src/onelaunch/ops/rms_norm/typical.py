"""Typical calls of ``rms_norm``, which ``onelaunch tune`` measures where no shape is given."""

from __future__ import annotations

from collections.abc import Iterator

from onelaunch.operation import Case
from onelaunch.ops.rms_norm.contract import rms_norm


@rms_norm.typical
def typical(device: str) -> Iterator[Case]:
    """Yield typical calls on a type of device: the norms of layers of two widths. On a CPU they are small."""
    if device == "cuda":
        yield rms_norm.case("bfloat16", M=8192, D=2048)
        yield rms_norm.case("bfloat16", M=8192, D=4096)
        yield rms_norm.case("bfloat16", M=8192, D=4096, residual="none")
    else:
        yield rms_norm.case("float32", M=64, D=256)
