"""Typical calls of ``output_chain``, which ``onelaunch tune`` measures where no shape is given."""

from __future__ import annotations

from collections.abc import Iterator

from onelaunch.operation import Case
from onelaunch.ops.output_chain.contract import output_chain


@output_chain.typical
def typical(device: str) -> Iterator[Case]:
    """Yield typical calls on a type of device: the end of a layer of two widths. On a CPU they are small."""
    if device == "cuda":
        yield output_chain.case("bfloat16", B=4, T=2048, H=16, V=128, D=2048)
        yield output_chain.case("bfloat16", B=4, T=512, H=8, V=128, D=1024)
    else:
        yield output_chain.case("float32", B=2, T=64, H=2, V=64, D=256)
