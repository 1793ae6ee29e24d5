"""Random inputs that operations with a recurrent state share: log-decays of several kinds, and the flags of a case.

``reference.py`` of ``gated_scan`` and ``gla`` calls them (that of ``linear_rnn`` through the one of ``gated_scan``), and
``cost.py`` of both calls :func:`packed_lengths`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from onelaunch.errors import ArgumentError
from onelaunch.operation.case import Case
from onelaunch.operation.query import state_flags

DECAYS = ("model", "weak", "strong", "zero", "forget", "mixed")
"""Values of the option ``decay``, in order: decays as models produce them (0.88 to 0.99); decays near 1; log-decays whose sum
falls below -80 within 16 steps; log-decay 0 (nothing is forgotten); log-decay -inf; and a random mixture of all by channel
and step."""


_RATIO = (1, 3, 2, 4)
"""Ratio of the lengths of packed sequences where only their number is given. No tile divides the lengths of most T."""


def make_log_decay(kind: str, extent: tuple[int, int, int], device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Return a random float32 log-decay of shape ``extent`` and of a kind in :data:`DECAYS`."""
    uniform = torch.rand(extent, device=device, generator=generator)
    if kind == "model":  # logsigmoid of a gate, divided by GLA's gate normalizer of 16
        return F.logsigmoid(4 * uniform - 2) / 16
    if kind == "weak":
        return -1e-3 * uniform
    if kind == "strong":
        return -20 * uniform
    if kind == "zero":
        return torch.zeros_like(uniform)
    if kind == "forget":
        return torch.full_like(uniform, -math.inf)
    if kind == "mixed":
        choice = torch.randint(0, 5, extent, device=device, generator=generator)
        values = torch.stack([-uniform / 16, -1e-3 * uniform, -20 * uniform, 0 * uniform, torch.full_like(uniform, -math.inf)])
        return values.gather(0, choice[None])[0]
    raise ArgumentError(f"decay is {kind!r}; it must be one of {', '.join(DECAYS)}.")


def case_flags(case: Case, defaults: dict[str, Any]) -> tuple[str, ...]:
    """Return the flags of a case's query; ``defaults`` are the operation's options."""
    options = {**defaults, **case.options}
    return state_flags(options["lengths"] is not None, bool(options["initial_state"]), bool(options["final_state"]))


def packed_lengths(case: Case, lengths: int | Sequence[int]) -> list[int]:
    """Return the lengths of packed sequences, from the option ``lengths`` of a case.

    A number stands for so many sequences of different lengths, in the ratio :data:`_RATIO` in turn.

    Raises:
        ArgumentError: The lengths do not add up to T, or B is not 1.
    """
    steps = case.sizes["T"]
    if isinstance(lengths, int):
        weights = [_RATIO[index % len(_RATIO)] for index in range(lengths)]
        ends = [round(steps * total / sum(weights)) for total in itertools.accumulate(weights)]
        lengths = [end - start for start, end in itertools.pairwise([0, *ends])]
    if sum(lengths) != steps or case.sizes["B"] != 1:
        raise ArgumentError(f"lengths add up to {sum(lengths)}; they must add up to T = {steps}, with B = 1.")
    return list(lengths)
