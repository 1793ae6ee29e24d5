"""Typical calls of ``gla_layer``, which ``onelaunch tune`` measures where no shape is given."""

from __future__ import annotations

from collections.abc import Iterator

from onelaunch.operation import Case
from onelaunch.ops.gla_layer.contract import gla_layer


@gla_layer.typical
def typical(device: str) -> Iterator[Case]:
    """Yield typical calls on a type of device: a layer of two widths. On a CPU they are small."""
    if device == "cuda":
        yield gla_layer.case("bfloat16", B=4, T=2048, D=2048, H=16, K=128, V=128)
        yield gla_layer.case("bfloat16", B=4, T=512, D=1024, H=8, K=128, V=128)
    else:
        yield gla_layer.case("float32", B=2, T=64, D=128, H=2, K=32, V=64)
