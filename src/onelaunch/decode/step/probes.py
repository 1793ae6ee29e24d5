"""Edge cases of ``decode_step``, on which studies and tests judge each of its variants.

A case is written as arguments of ``decode_step.case``: dtype; sizes of the model, and the position of the token; and options.
``tied`` shares the embedding with the LM head, ``bias`` gives attention biases, with ``no_output_bias`` to queries, keys and
values alone; ``no_qk_norm`` leaves heads as they are, and every layer with a number divisible by ``unrotated``, counted from 1,
does not rotate them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onelaunch.decode.step.contract import decode_step
from onelaunch.operation import Case, Probe
from onelaunch.operation.probe import elsewhere, named

SIZES = {"layers": 2, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocabulary": 200}
"""Sizes of the model of a case that names no others."""

CASES: dict[str, dict[str, Any]] = {
    "first": {"dtype": "float32", "position": 0},
    "second": {"dtype": "bfloat16", "position": 1},
    "untied_with_biases": {"dtype": "bfloat16", "position": 37, "tied": False, "bias": True},
    "a_window": {"dtype": "float16", "position": 255},
    "beyond_a_window": {"dtype": "float32", "position": 256, "tied": False},
    "one_key_head": {"dtype": "float32", "position": 60, "kv_heads": 1, "head_dim": 16, "rope_theta": 1e4},
    "odd_sizes": {"dtype": "bfloat16", "position": 13, "layers": 1, "hidden": 40, "intermediate": 56, "vocabulary": 77},
    "llama": {"dtype": "bfloat16", "position": 21, "hidden": 96, "heads": 6, "no_qk_norm": True, "tied": False},
    "qwen2": {"dtype": "bfloat16", "position": 9, "heads": 14, "head_dim": 16, "no_qk_norm": True, "bias": True,
              "no_output_bias": True},
    "smollm3": {"dtype": "float32", "position": 33, "layers": 3, "no_qk_norm": True, "unrotated": 2},
}  # fmt: skip
"""Cases by name. Variants in PyTorch that are captured attend over a window of the cache, of 256 positions at first."""


@decode_step.probes
def probes() -> Iterator[Case | Probe]:
    """Yield the cases, and a call with the token on another device, which the contract must refuse."""
    yield from named(decode_step.case, {name: {**SIZES, **given} for name, given in CASES.items()})
    yield Probe(decode_step.case("float32", name="token_elsewhere", **SIZES, position=3), elsewhere("token"), refused=True)
