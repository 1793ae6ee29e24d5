"""Check a variant in a process beside the one that measures: on a probe of its operation, or by the calls of an examination.

``probing.py`` makes the calls, ``ahead.py`` passes them to processes that compile, and each process makes one by
:func:`check_once`. Such a check needs dozens of kernels, for other flags and strides than the calls that are measured need. The
processes compile them side by side, where the measuring process would compile one after the other.

A check counts only if nothing was found. What is wrong, or was left out for lack of memory or time, may be the fault of the other
processes, so the measuring process makes the check again, alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

import torch

from onelaunch.operation import Direction, Variant
from onelaunch.operation.sources import digest_of, digest_of_files, module_digest
from onelaunch.workbench import verify
from onelaunch.workbench.measure.compiling import on_device
from onelaunch.workbench.result import ProbeReport, Verdict
from onelaunch.workbench.study import Study
from onelaunch.workbench.verify import Judge, run_probes
from onelaunch.workbench.verify.reference import pytorch_baseline
from onelaunch.workbench.verify.repeated import examine_once


class ProbeCall(NamedTuple):
    """Judgement of a variant on one probe of its operation."""

    shape: str
    """First shape at which the variant is measured."""
    direction: Direction
    """Direction that stands for all of them in reports of the progress."""
    variant: str
    label: str
    """Name of the variant's report, :meth:`~onelaunch.workbench.study.Study.label`."""
    code: str
    """Digest of the variant's code in the process that measures, of :func:`code_of_variant`."""
    directions: tuple[Direction, ...]
    """Directions in which the variant is judged."""
    probe: int
    """Index of the probe among those of the operation."""
    probes: int
    """Number of probes of the operation."""

    @property
    def step(self) -> str:
        """The step in reports of the progress."""
        return "probe"


class ExamineCall(NamedTuple):
    """Checks of a variant that take many calls, at one case; see ``verify/repeated.py``."""

    shape: str
    direction: Direction
    variant: str
    label: str
    """Name under which the verdict is kept, :meth:`~onelaunch.workbench.study.Study.label`."""
    code: str
    """Digest of the variant's code in the process that measures, of :func:`code_of_variant`."""

    @property
    def step(self) -> str:
        """The step in reports of the progress."""
        return "examine"


def check_once(study: Study, call: ProbeCall | ExamineCall, device: str) -> ProbeReport | Verdict | None:
    """Make a check, and return what it found, or ``None`` if the process that measures has to make it again."""
    where, found = torch.device(device), []

    def check() -> None:
        with contextlib.suppress(SystemExit):  # of a variant, which must not end this process
            found.append(_checked(study, call, where))

    return found[0] if on_device(where, check) is None and found else None


def _checked(study: Study, call: ProbeCall | ExamineCall, device: torch.device) -> ProbeReport | Verdict | None:
    """Make a check, and return what it found if that counts. Its device is current."""
    shape = study.shape(call.shape)
    operation = study.operation_at(shape)
    found: ProbeReport | Verdict
    if isinstance(call, ProbeCall):
        probe = operation.listed_probes()[call.probe]
        # A result that changes after its call is found when the variant is verified, so no probe waits for that.
        found = run_probes(Judge(settle_seconds=0.0), operation, call.variant, device, call.directions, [probe])
        passed = not found.failed
    else:
        torch.compiler.reset()  # as before each case that is measured
        directions = (call.direction,)
        found = examine_once(
            _examiner(), operation, study.case(shape), variant=call.variant, device=device, directions=directions
        )
        passed = found.ok and not found.notes
    # A file that was changed after the measuring process had read it is not what that process runs.
    return found if passed and call.code == code_of_variant(operation.get(call.variant)) != "" else None


@functools.cache
def _examiner() -> Judge:
    """Return the judge of all examinations of this process, so that the variants of a case share its reference outputs."""
    return Judge()


def code_of_variant(variant: Variant) -> str:
    """Return the SHA-256 of all code on which a check of a variant rests; empty if no file holds the variant.

    That is its own code, and that of the probes, the reference outputs, the inputs, the PyTorch baseline, whose error sets the
    tolerance, and the package ``verify``.
    """
    own = digest_of(variant)
    if not own:
        return ""
    baseline = pytorch_baseline(variant.operation)
    judging = [module_digest(name) for name in variant.operation.judging_modules]
    parts = own, *judging, digest_of(baseline) if baseline else "", _code_of_the_gate()
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _code_of_the_gate() -> str:
    """Return the SHA-256 of the files of the package ``verify``."""
    return digest_of_files({path.name: path for path in Path(verify.__file__).parent.glob("*.py")})
