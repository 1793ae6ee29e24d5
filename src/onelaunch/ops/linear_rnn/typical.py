"""Typical calls of ``linear_rnn``, which ``onelaunch tune`` measures where no shape is given."""

from __future__ import annotations

from collections.abc import Iterator

from onelaunch.operation import Case
from onelaunch.ops.linear_rnn.contract import linear_rnn


@linear_rnn.typical
def typical(device: str) -> Iterator[Case]:
    """Yield typical calls on a type of device: a narrow and a wide layer. On a CPU they are small."""
    if device == "cuda":
        yield linear_rnn.case("float16", B=4, T=2048, D=256, V=64)
        yield linear_rnn.case("bfloat16", B=8, T=4096, D=2048, V=2048)
    else:
        yield linear_rnn.case("float32", B=4, T=512, D=256, V=64)
