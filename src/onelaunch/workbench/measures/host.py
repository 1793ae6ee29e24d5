"""Measures of host time: what Python, PyTorch and the driver need for a call, alone and beside PyTorch's matrix product.

A criterion of a study names a measure by its ``name``. The class attributes are explained at
:class:`onelaunch.workbench.decide.measured.TakenMeasure` and its bases.

A criterion reads a value of ``of``, the name of a variant or tags that stand for the fastest one with them; ``among`` is the
number of measurements from which it was chosen.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from onelaunch.operation import Operation
from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.judging import Finding
from onelaunch.workbench.decide.measured import TakenMeasure
from onelaunch.workbench.measure.count import Request
from onelaunch.workbench.measure.host import host_time
from onelaunch.workbench.result import Beside, Cell, CriterionStatus, Estimate, Result
from onelaunch.workbench.study import Alone, Criterion, register
from onelaunch.workbench.verify.calls import status_of


class HostMeasure(TakenMeasure):
    """Base of both measures. A value is judged by its whole interval, since the calls have no A/A run."""

    says: ClassVar[str]
    """Predicate of a value, with ``{amount}`` for it."""

    @property
    def kept(self) -> str:
        return "host"

    def untaken(self, variant: str, shape: str, why: str) -> str:
        return f"The host time of {variant} at {shape} was not taken: {why}"

    @abstractmethod
    def value(self, found: Beside) -> Estimate:
        """Return the value of what was measured."""

    def count(
        self, operation: Operation[..., Any], requests: Sequence[Request], *, device: torch.device
    ) -> Sequence[int | Beside | str]:
        return [_taken(operation, request, device) for request in requests]

    def judge(self, result: Result, criterion: Criterion, cells: Sequence[Cell], among: int) -> Finding:
        del result
        (cell,) = cells
        found = cell.beside.get(self.kept)
        if found is None:
            text = f"not measured: the host time of {cell.variant} at {cell.shape} was not taken"
            return Finding(cell.shape, "not_measured", text, "not taken")
        value = self.value(found)
        status, why = _held(criterion, value)
        both = f"{q.interval(found.microseconds)} against {q.interval(found.product)} of the product"
        said = self.says.format(amount=f"{q.number(value.median)}{self.unit}")
        because = f": {why}" if why else ""
        text = f"{cell.variant} {said} at {cell.shape} ({both}), {criterion.bound} was asked{because}"
        brief = f"{value.median:.3g}" + ("" if status == "met" else f" ({status}{because})")
        return Finding(cell.shape, status, text, brief, value, among)

    def judge_mean(
        self, criterion: Criterion, mean: Estimate, noise: float | None, gain: float | None
    ) -> tuple[CriterionStatus, str, str]:
        del noise, gain
        return *_held(criterion, mean), f" ({mean.low:.3g} to {mean.high:.3g})"

    def amount(self, value: Estimate) -> str:
        return q.interval(value) if self.unit == " µs" else q.ratio_interval(value)


@register
class Host(HostMeasure):
    """Host time of a call of ``of`` in microseconds."""

    name = "host"
    meaning = "time that the host needs for a call of `of` while nobody waits for the device, in microseconds"
    unit = " µs"
    alone = Alone("a host time is compared with microseconds", "a host time is")
    rank = 10
    evidence = "the host time of {of} in microseconds is"
    demand = "a call of {of} takes {bound} of the host"
    told = "a call of {of} takes {amount} of the host"
    says = "takes {amount} of the host"

    def value(self, found: Beside) -> Estimate:
        return found.microseconds


@register
class HostOverProduct(HostMeasure):
    """Host time of a call of ``of`` divided by that of PyTorch's matrix product in the same process."""

    name = "host_over_product"
    meaning = (
        "host time of a call of `of` / that of `torch.mm` of two [64, 64] bfloat16 matrices in the same process, "
        'with `direction = "forward_backward"` both with their backward pass'
    )
    alone = Alone("a host time is compared with that of PyTorch's product", "a host time over that of the product is")
    rank = 11
    evidence = "the host time of {of} over that of PyTorch's product is"
    demand = "a call of {of} takes {bound} the host time of PyTorch's product"
    told = "a call of {of} takes {amount} the host time of PyTorch's product"
    says = "takes {amount} the host time of PyTorch's product"

    def value(self, found: Beside) -> Estimate:
        return found.ratio


def _taken(operation: Operation[..., Any], request: Request, device: torch.device) -> Beside | str:
    """Return the times of a request, or why they could not be taken."""
    if request.control:
        return "a control is no call that a user makes"
    try:
        return host_time(operation, request, device)
    except Exception as error:  # noqa: BLE001 - the other requests are timed whatever this variant raises
        return status_of(error)[1]


def _held(criterion: Criterion, value: Estimate) -> tuple[CriterionStatus, str]:
    """Judge a value by its interval: return the status, and the reason if the interval does not decide."""
    inside, outside = (value.high, value.low) if criterion.at_most is not None else (value.low, value.high)
    bound = criterion.at_most if criterion.at_most is not None else criterion.at_least or 0.0
    sign = -1 if criterion.at_most is not None else 1
    if sign * inside >= sign * bound:
        return "met", ""
    return ("missed", "") if sign * outside < sign * bound else ("inconclusive", "the interval contains the bound")
