"""Split calls of scans that have more sequences than one launch takes into calls of fewer, one after the other.

A grid of the kernels in ``kernels/scan`` has one CTA along y per batch entry and tile of channels, and a GPU allows 65535. The
Triton variants of ``gated_scan`` and of ``linear_rnn`` call :func:`in_parts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onelaunch.operation.requirements import FEWEST_CHANNELS, LARGEST_GRID_Y

Results = tuple[torch.Tensor, torch.Tensor]
"""Output and final states, each with the sequences as first dimension; an unwanted final state has no elements."""


def in_parts(call: Any, batched: tuple[str, ...], run: Callable[[Any], Results]) -> Results:
    """Return ``run(call)``, or the joined results of ``run`` for parts of the batch, of as many sequences as a launch takes.

    Packed sequences are never split: they are one batch entry. The gradient of a tensor that all parts share, such as a weight,
    is the sum of those of the parts, each rounded to its dtype. ``torch.compile`` makes a graph for each number of parts.

    Args:
        call: Checked arguments of the call, a named tuple with a field ``log_decay`` ``[B, T, V]``.
        batched: Names of its fields that have the batch as first dimension, or may be ``None``.
        run: Function that launches the kernels, differentiable.
    """
    batch, _, channels = call.log_decay.shape
    most = max(LARGEST_GRID_Y // -(-channels // FEWEST_CHANNELS), 1)
    if batch <= most:
        return run(call)
    fields = {name: value for name, value in call._asdict().items() if name in batched and value is not None}
    parts = zip(*(value.split(most) for value in fields.values()), strict=True)
    outputs, finals = zip(*(run(call._replace(**dict(zip(fields, part, strict=True)))) for part in parts), strict=True)
    return torch.cat(outputs), torch.cat(finals)
