"""Variants that a run judges on the probes of their operation, and earlier reports of such probes that still hold.

A probe is an edge case of an operation (``operation/probe.py``). ``running.py`` calls :func:`to_probe` and
:func:`calls_at_probes` before anything is measured, and :func:`still_holding` when it continues an earlier run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onelaunch.operation import AUTO, Direction, Operation
from onelaunch.operation.sources import digest_of, digest_of_files, module_digest
from onelaunch.workbench import verify
from onelaunch.workbench.cells import Key
from onelaunch.workbench.measure.compiling import ProbeCall
from onelaunch.workbench.options import Part
from onelaunch.workbench.result import ProbeReport, Status
from onelaunch.workbench.study import Study
from onelaunch.workbench.study.plan import PlannedCell
from onelaunch.workbench.verify.reference import pytorch_baseline


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


def calls_at_probes(probed: Iterable[Probed], device: torch.device) -> Iterator[ProbeCall]:
    """Yield the calls by which processes compile the kernels of variants for their probes; none on a CPU.

    All probes of one variant come before those of the next: variants share kernels at the same probe, and those of one that were
    compiled earlier are in the cache.
    """
    for each in probed if device.type != "cpu" else ():
        direction: Direction = "forward_backward" if "forward_backward" in each.directions else "forward"
        for index, probe in enumerate(each.operation.listed_probes()):
            if not probe.refused:
                yield ProbeCall(each.planned.shape.name, direction, each.planned.variant, index)


def has_probes(operation: Operation[..., Any], variant: str) -> bool:
    """Return whether a variant of an operation is judged on probes."""
    if variant == AUTO or not operation.listed_probes():
        return False
    facts = operation.get(variant).capabilities
    return facts.requires is None and not facts.recompiles


def code_of(study: Study) -> dict[str, str]:
    """Return a digest by label of all code on which the report of a variant rests.

    That is its own code, and that of the probes, the reference outputs, the inputs, the PyTorch baseline, whose error sets the
    tolerance, and the package ``verify``. Variants whose code no file holds are left out.
    """
    files = Path(verify.__file__).parent.glob("*.py")
    gate = digest_of_files({path.name: path for path in files})
    digests = {}
    for label, variant in study.registered():
        if own := digest_of(variant):
            baseline = pytorch_baseline(variant.operation)
            judging = [module_digest(name) for name in variant.operation.judging_modules]
            parts = own, *judging, digest_of(baseline) if baseline else "", gate
            digests[label] = hashlib.sha256(" ".join(parts).encode()).hexdigest()
    return digests


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
