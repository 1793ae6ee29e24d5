"""A measure in one file, as a contributor would add it to the package: the number of PyTorch operators in one call.

``test_measures.py`` runs this file to register the measure, then declares, counts, judges and reports it. A criterion reads the
number of ``of``, the variant that it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.operation import Operation
from onelaunch.workbench.decide.measured import CountedMeasure
from onelaunch.workbench.measure.count import Request
from onelaunch.workbench.study import Criterion, Shape, Study, register
from onelaunch.workbench.verify.calls import Candidate, make_inputs


@register
class Operators(CountedMeasure):
    """Number of PyTorch operators in one call of ``of``."""

    name = "operators"
    meaning = "PyTorch's operators in one call of `of`, counted"
    noun = "operator"
    does = "runs {count} operators"

    def problem(self, criterion: Criterion) -> str | None:
        return "operators are counted in the forward pass alone" if criterion.direction != "forward" else None

    def infeasible_at(self, study: Study, criterion: Criterion, shape: Shape) -> str | None:
        if criterion.equals == 0:
            return f"{study.operation} runs at least one operator at {shape.name}, the study asks for none"
        return None

    def count(self, operation: Operation[..., Any], requests: Sequence[Request], *, device: torch.device) -> Sequence[int | str]:
        return [_operators(operation, request, device) for request in requests]


class _Operators(TorchDispatchMode):
    """Dispatch mode that counts the operators that run inside it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _operators(operation: Operation[..., Any], request: Request, device: torch.device) -> int | str:
    """Count the operators of one call, or return the reason why they cannot be counted."""
    if request.control:
        return "a control is no call of the operation"
    inputs = make_inputs(operation, request.case, device, 0, request.direction)
    with _Operators() as found:
        Candidate.variant(operation, request.variant)(inputs)
    return found.count
