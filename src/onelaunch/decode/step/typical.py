"""Typical calls of ``decode_step``, which ``onelaunch tune`` measures where no shape is given."""

from __future__ import annotations

from collections.abc import Iterator

from onelaunch.decode.step.contract import decode_step
from onelaunch.operation import Case

QWEN3_0_6B = {
    "layers": 28,
    "hidden": 1024,
    "intermediate": 3072,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "vocabulary": 151_936,
}
"""Sizes of Qwen3-0.6B."""


@decode_step.typical
def typical(device: str) -> Iterator[Case]:
    """Yield typical calls on a type of device: Qwen3-0.6B at an early and a later position; none on a CPU."""
    if device == "cuda":
        yield decode_step.case("bfloat16", name="Qwen3-0.6B, position 100", position=100, **QWEN3_0_6B)
        yield decode_step.case("bfloat16", name="Qwen3-0.6B, position 1000", position=1000, **QWEN3_0_6B)
