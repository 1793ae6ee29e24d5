"""Judge a variant on the probes of its operation: the edge cases that the operation's file ``probes.py`` lists.

``running.py`` calls :func:`run_probes` before it measures a variant. Tests of operations call it too, and make arguments of
probes by :class:`Prepared`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from onelaunch.errors import CompileError, DecodeStalled, DeviceMemoryError, DriverError, OneLaunchError
from onelaunch.operation import Case, Direction, Operation, Probe, Reading
from onelaunch.wording import in_a_line
from onelaunch.workbench.result import ProbeReport
from onelaunch.workbench.verify.calls import status_of
from onelaunch.workbench.verify.gate import Judge

REFUSALS = ("unsupported", "not_installed")
"""Statuses of a call that the variant refused with a reason."""

FAULTS = (CompileError, DriverError, DecodeStalled, DeviceMemoryError)
"""Errors of onelaunch that are failures. The others say that the variant or the contract does not take the call."""

SEED = 0
"""Seed of the inputs of every probe."""


def run_probes(
    judge: Judge,
    operation: Operation[..., Any],
    variant: str,
    device: torch.device | str = "cpu",
    directions: Sequence[Direction] = ("forward", "forward_backward"),
    probes: Sequence[Probe] | None = None,
) -> ProbeReport:
    """Judge a variant on every probe of its operation, forward and, if an input takes gradients, forward and backward.

    Nothing that the variant raises ends the run, except KeyboardInterrupt.

    Args:
        judge: Judge, whose cached references the variants of an operation share.
        operation: Operation with the probes.
        variant: Name of the variant.
        device: Device to run on.
        directions: Directions to judge. A study asks for those that it measures. A probe without differentiable inputs is judged
            forward in any case.
        probes: Probes of the operation to judge; all of them by default. Tests judge one at a time.

    Returns:
        The number of calls that passed, the number of calls that the variant or the contract refused, and a sentence for each
        call that failed. All are zero for an operation without probes.

    Raises:
        UnknownVariant: The operation has no variant of this name.
    """
    operation.get(variant)
    device, passed, refused, failed = torch.device(device), 0, 0, []
    for probe in operation.listed_probes() if probes is None else probes:
        for direction in _directions(operation, probe, device, directions):
            problem = _refusal(operation, probe, variant, device) if probe.refused else None
            if not probe.refused:
                problem = _outcome(judge, Prepared(operation, probe), probe.case, variant, device, direction)
            if problem is None:
                passed += 1
            elif not problem:
                refused += 1
            else:
                failed.append(f"{probe}, {direction.replace('_', ' and ')}: {problem}")
    return ProbeReport(passed=passed, refused=refused, failed=tuple(failed), directions=tuple(directions))


class Prepared(Operation[..., Any]):
    """Operation whose input maker gives the arguments of one probe. All else is that of the operation itself.

    A judge caches references by the operation's name, so a probe with other arguments than its case has a name of its own.
    """

    def __init__(self, operation: Operation[..., Any], probe: Probe) -> None:
        vars(self).update(vars(operation))
        self._probe = probe
        if probe.prepare is not None:
            self.name = f"{operation.name} at the probe {probe}"

    def make_inputs(self, case: Case, device: torch.device, seed: int) -> Reading:
        """Return the arguments of the probe, drawn with a seed."""
        reading = super().make_inputs(case, device, seed)
        return reading if self._probe.prepare is None else replace(reading, arguments=self._probe.prepare(reading.arguments))


def _directions(
    operation: Operation[..., Any], probe: Probe, device: torch.device, asked: Sequence[Direction]
) -> Sequence[Direction]:
    """Return the directions in which a probe is judged: with gradients only if an input takes any."""
    if probe.refused or not operation.make_inputs(probe.case, device, SEED).differentiable:
        return ("forward",)
    return asked


def _outcome(
    judge: Judge, operation: Operation[..., Any], case: Case, variant: str, device: torch.device, direction: Direction
) -> str | None:
    """Judge one call, and return ``None`` if it passed, an empty string if it was refused, else what was wrong."""
    try:
        verdict = judge.judge(operation, case, variant=variant, device=device, directions=(direction,), seed=SEED)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - another package's code may raise anything, SystemExit too
        return "" if _refuses(error) or status_of(error)[0] in REFUSALS else _said(error)
    return None if verdict.ok else verdict.explain()


def _refusal(operation: Operation[..., Any], probe: Probe, variant: str, device: torch.device) -> str:
    """Call with arguments that the contract refuses, and return an empty string if it did, else what happened."""
    arguments = Prepared(operation, probe).make_inputs(probe.case, device, SEED).arguments
    try:
        with torch.no_grad():
            operation(**arguments, variant=variant)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - as above
        return "" if _refuses(error) else _said(error)
    return "It took arguments that the operation must refuse."


def _refuses(error: BaseException) -> bool:
    """Return whether an error of onelaunch says that a call is not taken."""
    return isinstance(error, OneLaunchError) and not isinstance(error, FAULTS)


def _said(error: BaseException) -> str:
    return f"It raised {type(error).__name__}: {in_a_line(error)}."
