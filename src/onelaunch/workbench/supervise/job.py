"""A run that another process can carry out: its study and options, what is known of it so far, and the candidate that runs.

``child.py`` calls :func:`carry_out`. For a run in their own process, ``parent.py`` and ``workbench/run.py`` call it too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from onelaunch.device import hardware
from onelaunch.operation import Direction
from onelaunch.workbench.measure.ahead import Groups, Place
from onelaunch.workbench.options import WHOLE, Part, Progress, RunOptions
from onelaunch.workbench.result import Result, Status, StoredCeilings
from onelaunch.workbench.running import Key, Run
from onelaunch.workbench.spending import Meter
from onelaunch.workbench.steps import Steps
from onelaunch.workbench.study import Scale, Study
from onelaunch.workbench.study.plan import plan_study


@dataclass(frozen=True)
class Job:
    """Study to be run, with its options. It can be sent to another process."""

    study: Study
    device: str
    scale: Scale
    options: RunOptions
    partial: Path | None
    """File of the partial result; ``None`` if the parent process saves it, together with other parts."""
    steps: Steps = field(default_factory=Steps)
    processes: int = 0
    """Number of processes that compile before cases are measured; 0 for none."""
    earlier: Result | None = None
    """Interrupted run that is continued."""
    earlier_path: Path = Path()
    """File of that run, for messages."""
    part: Part = WHOLE
    """Part of the cases that is measured on this device, if several devices share them."""
    ceilings: StoredCeilings | None = None
    """Measured peaks of the device if they are known, as from the process of the first part; ``None`` if not."""


@dataclass
class State:
    """Knowledge of the parent about a run."""

    kept: Result | None = None
    """Latest partial result of a child, with the finished cases, if any; ``None`` before the first."""
    failures: dict[Key, tuple[Status, str]] = field(default_factory=dict)
    """Statuses and reasons of candidates that are not run again."""
    compiled: set[Place] = field(default_factory=set)
    """Cases whose calls processes of an earlier child have made."""
    notes: list[str] = field(default_factory=list)
    """Sentences on the child processes that ended early."""


class Turn(NamedTuple):
    """The candidate that is running."""

    shape: str
    direction: Direction
    name: str
    control: bool
    step: str
    """Step in which it runs: ``verified``, ``prepared``, ``timed (cold)`` and so on."""

    @property
    def key(self) -> Key:
        return self.shape, self.direction, self.name, self.control


def _keep_to_own_cores(part: Part) -> None:
    """Keep this thread, and those that it starts, to its part's share of the cores, as others measure beside it."""
    if part == WHOLE or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // part.number
    if share:
        os.sched_setaffinity(0, cores[part.index * share : (part.index + 1) * share])


def carry_out(
    job: Job,
    on_progress: Callable[[Progress], None],
    *,
    state: State | None = None,
    on_turn: Callable[..., None] = lambda *_, **__: None,
    on_kept: Callable[[Result], None] = lambda _: None,
    on_compiled: Callable[[Sequence[Place]], None] = lambda _: None,
) -> Result:
    """Run a study in this process with its device as the current one, and return its result.

    After Ctrl-C the result's ``interrupted`` is true.

    Args:
        job: Study with its options.
        on_progress: Callback for the progress.
        state: Finished cases and failed candidates of earlier processes of this run.
        on_turn: Callback before a candidate runs, as :attr:`Run.on_turn`.
        on_kept: Callback with the partial result, at the beginning, after the probes of each variant, and after each case.
        on_compiled: Callback with the cases whose calls processes have made, as :attr:`Run.on_compiled`.

    Raises:
        ResultMismatch: The run that is to be continued has another study, device, software, commit, scale or number of rounds.
    """
    state = state or State()
    _keep_to_own_cores(job.part)
    known = state.kept or job.earlier
    # A continued run takes over the measured peaks of the device (bandwidth, FLOP rates, launch time), so that all roofline
    # bounds of a result are computed from the same peaks.
    ceilings = known.ceilings if known else job.ceilings or StoredCeilings(**asdict(job.steps.ceilings(job.device)))
    plan = plan_study(job.study, ceilings, job.device, job.scale)
    run = Run(plan, torch.device(job.device), ceilings, job.options, job.steps, on_progress, part=job.part, partial=job.partial)
    run.meter = Meter(job.options.began, job.options.price_per_hour, earlier=job.earlier, kept=state.kept)
    run.failures, run.on_turn, run.on_kept = state.failures, run.meter.watching(on_turn), on_kept
    if state.kept is not None:
        run.take_over(state.kept)
        run.notes = list(state.kept.notes)
    elif job.earlier is not None:
        run.resume_from(job.earlier, job.earlier_path)
    run.notes += state.notes
    on_kept(run.result(interrupted=True))
    run.on_compiled = on_compiled
    # A process that measures beside others compiles all of its cases first: one that did so later would disturb their times.
    run.groups = Groups(job.processes, state.compiled, at_once=job.part != WHOLE)
    with hardware.current(run.device):
        run.measure_all()
    return run.result(interrupted=run.stopped or job.part != WHOLE)  # other processes measure the rest
