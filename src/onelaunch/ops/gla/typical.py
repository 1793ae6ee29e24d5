"""Typical calls of ``gla``, which ``onelaunch tune`` measures where no shape is given."""

from __future__ import annotations

from collections.abc import Iterator

from onelaunch.operation import Case
from onelaunch.ops.gla.contract import gla


@gla.typical
def typical(device: str) -> Iterator[Case]:
    """Yield typical calls on a type of device: training with a decay per channel and per head, and one step of text.

    Those on a CPU are small.
    """
    if device == "cuda":
        yield gla.case("bfloat16", B=4, T=2048, H=16, K=128, V=128)
        yield gla.case("bfloat16", B=4, T=2048, H=16, K=128, V=128, decay_per="head")
        yield gla.case("bfloat16", B=1, T=1, H=16, K=128, V=128, initial_state=True, final_state=True)
    else:
        yield gla.case("float32", B=1, T=512, H=4, K=64, V=64)
        yield gla.case("float32", B=1, T=1, H=4, K=64, V=64, initial_state=True, final_state=True)
