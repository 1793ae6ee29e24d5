"""Typical calls of ``swiglu``, which ``onelaunch tune`` measures where no shape is given."""

from __future__ import annotations

from collections.abc import Iterator

from onelaunch.operation import Case
from onelaunch.ops.swiglu.contract import swiglu


@swiglu.typical
def typical(device: str) -> Iterator[Case]:
    """Yield typical calls on a type of device: training of a large model, and generating text for a few users.

    Those on a CPU are small.
    """
    if device == "cuda":
        yield swiglu.case("bfloat16", M=8192, N=11008, K=4096)
        yield swiglu.case("bfloat16", M=16, N=4096, K=7168, stacked=True, constant_weights=True)
    else:
        yield swiglu.case("float32", M=128, N=512, K=256)
