"""Variants that a run checks once, on the probes of their operation and by many calls, and earlier reports that still hold.

A probe is an edge case of an operation (``operation/probe.py``). ``running.py`` calls :func:`to_probe` and :func:`calls_ahead`
before cases are measured, and :func:`still_holding` when it continues an earlier run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from onelaunch.operation import AUTO, Direction, Operation
from onelaunch.workbench.cells import Key
from onelaunch.workbench.measure.ahead import Call
from onelaunch.workbench.measure.checks import ExamineCall, ProbeCall, code_of_variant
from onelaunch.workbench.measure.compiling import calls_to_compile
from onelaunch.workbench.options import Part
from onelaunch.workbench.result import ProbeReport, Status
from onelaunch.workbench.study import Study
from onelaunch.workbench.study.plan import PlannedCell

LARGEST_CHECKED = 256 << 20
"""Largest case that processes check, by the fewest bytes that a call must move. Each process has reference outputs of its own,
which together with inputs and intermediate results in float64 take ten times as much and more: 30 GB for 12 of this size."""


class Probed(NamedTuple):
    """A variant that is judged on the probes of its operation."""

    label: str
    """Name of its report, :meth:`~onelaunch.workbench.study.Study.label`."""
    planned: PlannedCell
    """First measurement of the variant."""
    operation: Operation[..., Any]
    directions: tuple[Direction, ...]
    """Directions in which the variant is measured anywhere."""
    shapes: frozenset[str]
    """Names of the shapes at which it is measured."""

    def is_in(self, reports: Mapping[str, ProbeReport]) -> bool:
        """Return whether the variant's report, perhaps of an interrupted quick run, covers the directions of this run."""
        report = reports.get(self.label)
        return report is not None and set(self.directions) <= set(report.directions)

    def ended(self, failures: Mapping[Key, tuple[Status, str]]) -> tuple[str, ...]:
        """Return the reasons why the variant is not judged: failures of a run in which it ended a process, perhaps at a probe."""
        of_it = (self.planned.variant, False)
        return tuple(reason for key, (_, reason) in failures.items() if key[2:] == of_it and key[0] in self.shapes)


def to_probe(study: Study, cells: Sequence[PlannedCell], part: Part) -> list[Probed]:
    """Return the variants that this part of a run judges on probes; each variant is of one part.

    Variants of other projects' packages are left out: ``auto`` never chooses them, and some tune for minutes at each size.
    So are those that ``torch.compile`` compiles anew for each size, and ``auto`` itself, whose choices are judged in their own
    tests.
    """
    found: dict[str, Probed] = {}
    for cell in cells:
        if cell.control or cell.status is not None:
            continue
        operation = study.operation_at(cell.shape)
        label = study.label(operation.name, cell.variant)
        if label not in found and has_probes(operation, cell.variant):
            planned = [each for each in cells if (each.variant, study.operation_at(each.shape)) == (cell.variant, operation)]
            directions = tuple(dict.fromkeys(each.direction for each in planned))
            found[label] = Probed(label, cell, operation, directions, frozenset(each.shape.name for each in planned))
    return list(part.of(list(found.values())))


def calls_at_probes(probed: Iterable[Probed], codes: Mapping[str, str], device: torch.device) -> Iterator[ProbeCall]:
    """Yield the calls by which processes judge variants on their probes; none on a CPU, and none of a variant that autotunes.

    Variants that list their kernels are judged so too. At a case of the study such a variant may need a whole model, and these
    processes do not call it there. But the models of the probes of ``decode_step`` have less than 1 MB, so that each process can
    have one with its reference. Launches whose CTAs wait for each other run by turns with those of other processes, and a wait
    that times out fails the check, so that it is made again alone. Variants of an operation with a probe larger than
    :data:`LARGEST_CHECKED` are left to the process that measures.

    All probes of one variant come before those of the next: variants share kernels at the same probe, and those of one that were
    compiled earlier are in the cache.

    Args:
        probed: Variants to judge.
        codes: Digests of their code by label, of :func:`code_of`.
        device: Device on which they will be judged.
    """
    for each in probed if device.type != "cpu" else ():
        shape, direction, name = each.planned.shape.name, each.directions[-1], each.planned.variant
        probes = len(each.operation.listed_probes())
        alone = each.operation.get(name).capabilities.tunes or not _are_small(each)
        for index in () if alone else range(probes):
            yield ProbeCall(shape, direction, name, each.label, codes.get(each.label, ""), each.directions, index, probes)


def _are_small(probed: Probed) -> bool:
    """Return whether a call moves at most :data:`LARGEST_CHECKED` bytes at each probe, and false where the cost is not known."""
    probes = [probe for probe in probed.operation.listed_probes() if not probe.refused]
    try:
        sizes = [probed.operation.cost(probe.case, None, probed.directions[-1]).bytes for probe in probes]
    except Exception:  # noqa: BLE001 - the operation may be of another package, whose cost fails at its probes
        return False
    return max(sizes, default=0) <= LARGEST_CHECKED


class ReportsAtProbes:
    """Reports of variants at single probes, which other processes have made."""

    def __init__(self) -> None:
        self._found: dict[str, dict[int, ProbeReport]] = {}

    def add(self, call: ProbeCall, report: ProbeReport) -> ProbeReport | None:
        """Add the report at one probe, in which no call failed. Return that of all probes once there is one for each."""
        found = self._found.setdefault(call.label, {})
        found[call.probe] = report
        if len(found) < call.probes:
            return None
        passed, refused = sum(each.passed for each in found.values()), sum(each.refused for each in found.values())
        return report.model_copy(update={"passed": passed, "refused": refused, "code": call.code})


def calls_to_examine(
    study: Study,
    cells: Iterable[PlannedCell],
    examined: Collection[tuple[str, Direction]],
    codes: Mapping[str, str],
    device: torch.device,
) -> Iterator[ExamineCall]:
    """Yield the calls by which processes examine variants, each at its first case in a direction; none on a CPU.

    A variant that autotunes is left out, since its choices must not be timed while other processes use the device, and so are
    ``auto`` and cases larger than :data:`LARGEST_CHECKED`.

    Args:
        study: Study of the cases.
        cells: Measurements of the cases that are compiled now.
        examined: Labels and directions that are examined already.
        codes: Digests of the variants' code by label, of :func:`code_of`.
        device: Device on which they will be measured.
    """
    known = set(examined)
    for cell in cells if device.type != "cpu" else ():
        if cell.control or cell.status is not None or cell.variant == AUTO:
            continue
        operation = study.operation_at(cell.shape)
        label = study.label(operation.name, cell.variant)
        first = (label, cell.direction) not in known
        known.add((label, cell.direction))
        if first and cell.plan.least_bytes <= LARGEST_CHECKED and not operation.get(cell.variant).capabilities.tunes:
            yield ExamineCall(cell.shape.name, cell.direction, cell.variant, label, codes.get(label, ""))


def calls_ahead(
    study: Study,
    cells: Sequence[PlannedCell],
    before: Iterable[PlannedCell],
    probed: Iterable[Probed],
    examined: Collection[tuple[str, Direction]],
    codes: Mapping[str, str],
    device: torch.device,
    processes: int,
) -> tuple[Call, ...]:
    """Return all calls that processes make before cases are measured; the parameters are those of the functions above.

    ``before`` are the measurements of the cases that were compiled before, see
    :func:`~onelaunch.workbench.measure.compiling.calls_to_compile`.

    Calls that take long come first. Examinations come last: they find kernels that the calls before have compiled.
    """
    long, others = calls_to_compile(study, cells, processes, before)
    at_probes, examinations = calls_at_probes(probed, codes, device), calls_to_examine(study, cells, examined, codes, device)
    return (*long, *at_probes, *others, *examinations)


def has_probes(operation: Operation[..., Any], variant: str) -> bool:
    """Return whether a variant of an operation is judged on probes."""
    if variant == AUTO or not operation.listed_probes():
        return False
    facts = operation.get(variant).capabilities
    return facts.requires is None and not facts.recompiles


def code_of(study: Study) -> dict[str, str]:
    """Return the digest of :func:`~onelaunch.workbench.measure.checks.code_of_variant` by label, where it is not empty."""
    found = {label: code_of_variant(variant) for label, variant in study.registered()}
    return {label: code for label, code in found.items() if code}


def still_holding(
    reports: Mapping[str, ProbeReport], codes: Mapping[str, str], measured_now: Collection[str]
) -> dict[str, ProbeReport]:
    """Return the reports of an earlier run, at another commit, that this run may take over.

    Args:
        reports: Reports by label.
        codes: Present digests by label, of :func:`code_of`.
        measured_now: Labels of the variants that this run measures. Their reports must be of the present code; the others belong
            to measurements of the earlier run.
    """
    return {
        label: each
        for label, each in reports.items()
        if label not in measured_now or (each.code != "" and each.code == codes.get(label))
    }
