"""Measures that are counted in one call if a criterion asks for them: launches and grid barriers.

A criterion of a study names a measure by its ``name``. The class attributes are explained at
:class:`onelaunch.workbench.decide.measured.CountedMeasure` and its bases. ``count`` returns a count for each request, or the
reason why there is none. A criterion reads the count of ``of``, the name of a variant or tags that stand for the fastest one with
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onelaunch.operation import Operation
from onelaunch.workbench.decide.measured import CountedMeasure
from onelaunch.workbench.measure.count import Request
from onelaunch.workbench.measure.launches import count_barriers, count_launches
from onelaunch.workbench.study import register


@register
class Launches(CountedMeasure):
    """Number of kernels, copies and fills in one call of ``of``."""

    name = "launches"
    meaning = "kernels, copies and fills of one call of `of`, counted"
    noun = "launch"
    does = "launches {count} times"
    no_mean = ""  # a geometric mean exists, since a call launches at least once
    rank = 7

    def count(self, operation: Operation[..., Any], requests: Sequence[Request], *, device: torch.device) -> Sequence[int | str]:
        return count_launches(operation, requests, device=device)


@register
class Barriers(CountedMeasure):
    """Number of grid barriers in one call of ``of``."""

    name = "barriers"
    meaning = "grid barriers in one call of `of`, counted by its kernel"
    noun = "barrier"
    does = "meets {count} barriers over the grid"
    rank = 8

    def count(self, operation: Operation[..., Any], requests: Sequence[Request], *, device: torch.device) -> Sequence[int | str]:
        return count_barriers(operation, requests, device=device)
