"""Compile the kernels of a study in several processes before its cases are measured, a group of cases at a time.

``running.py`` asks :class:`Groups` for the cases that are compiled next, and :func:`compile_ahead` makes their calls and the
checks of variants. Nothing is measured while they run, since all calls share the device with them, and calls from Python the host
too.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from onelaunch.operation import Direction
from onelaunch.wording import listing
from onelaunch.workbench.measure.checks import ExamineCall, ProbeCall, check_once
from onelaunch.workbench.measure.compiling import Called, CompileCall, call_once
from onelaunch.workbench.measure.cores import give_way
from onelaunch.workbench.measure.garbage import MANY
from onelaunch.workbench.result import ProbeReport, Verdict
from onelaunch.workbench.study import Study, case_name
from onelaunch.workbench.study.plan import PlannedCell

Call = CompileCall | ProbeCall | ExamineCall
"""Call that a process makes ahead of the measurements."""

Place = tuple[str, Direction]
"""Name of the shape of a case, and its direction."""

PATIENCE = 300.0
"""Seconds without a finished call after which all processes are killed, and the remaining calls given up."""

FIRST_CASES = 4
"""Number of cases in the first group."""

GROWTH = 3
"""Factor by which each group is larger than the one before.

A run that ends early has then compiled little that it did not measure. A group costs the start of its processes, and at its end
some of them wait for the last calls, so that there must not be many groups.
"""

NAMED = 3
"""Number of calls that the note on compilation names."""


class Done(NamedTuple):
    """Outcome of one call."""

    seconds: float
    """Seconds that it took in its process."""
    problem: str | None = None
    """Error of a call that failed; ``None`` for a check, whose errors the process that measures meets again."""
    found: ProbeReport | Verdict | None = None
    """Outcome of a check that counts."""
    parts: int = 1
    """Number of parts into which the call's tuning falls, see :class:`~onelaunch.workbench.measure.compiling.Called`."""


class Made(NamedTuple):
    """Outcome of all calls of a group."""

    failed: list[str]
    """One line for each call that failed, and one if calls were given up. These are no errors, because every call is made again
    when it is measured."""
    seconds: Mapping[Call, float]
    """Seconds that each call took in its process."""
    given_up: bool = False
    """True if a process died, or all were killed."""


class Groups:
    """Groups of cases that are compiled together, each before the first of its cases is measured.

    Args:
        processes: Number of processes that compile; 0 for none.
        compiled: Cases that an earlier process of this run has compiled.
        at_once: Whether all cases are one group, such as those of one of several processes that measure side by side.
    """

    def __init__(self, processes: int, compiled: Collection[Place] = (), *, at_once: bool = False) -> None:
        self.processes = processes
        self._compiled = set(compiled)
        self._size = 0 if at_once else FIRST_CASES
        """Number of cases of the next group; 0 for all."""
        self._seconds = 0.0
        self._longest: dict[str, float] = {}

    def next(self, place: Place | None, waiting: Sequence[Place]) -> list[Place]:
        """Return the cases to compile now, before a case is measured: none if that case is compiled, else it and some others.

        Args:
            place: The case; ``None`` for the first that waits.
            waiting: Cases that are still to be measured, in their order.
        """
        left = [each for each in waiting if each not in self._compiled]
        if not self.processes or not left or (place is not None and place not in left):
            return []
        begin = 0 if place is None else left.index(place)
        group = (left[begin:] + left[:begin])[: self._size or None]
        self._size *= GROWTH
        self._compiled.update(group)
        return group

    def divided(self, cells: Iterable[PlannedCell], group: Collection[Place]) -> tuple[list[PlannedCell], list[PlannedCell]]:
        """Return those of some planned measurements that are of a group, and those of the groups before it."""
        now: list[PlannedCell] = []
        before: list[PlannedCell] = []
        for cell in cells:
            place = cell.shape.name, cell.direction
            if place in group:
                now.append(cell)
            elif place in self._compiled:
                before.append(cell)
        return now, before

    def add(self, made: Made, seconds: float, notes: Sequence[str]) -> list[str]:
        """Add a group that took so many seconds, and return the notes of the run with those of the group.

        After a group that was given up, the process that measures compiles what is left.
        """
        before = self.note()
        self._seconds += seconds
        for call, taken in made.seconds.items():
            name = _described(call)
            self._longest[name] = max(self._longest.get(name, 0.0), taken)
        if made.given_up:
            self.processes = 0
        return [*(note for note in notes if note != before), *made.failed, *filter(None, [self.note()])]

    def note(self) -> str:
        """Return how long all groups took until now and which calls took longest, in a sentence; empty before the first."""
        slowest = sorted(self._longest.items(), key=lambda each: -each[1])[:NAMED]
        if not slowest:
            return ""
        named = listing([f"of {name} ({taken:.0f} s)" for name, taken in slowest])
        return f"Compiling ahead took {self._seconds:.0f} s. The longest calls were {named}."


def _described(call: Call) -> str:
    """Return a phrase for a call; the calls of one variant on all probes, and the parts of one tuning, have the same."""
    if isinstance(call, ProbeCall):
        return f"{call.variant} on a probe"
    examined = " examined" if isinstance(call, ExamineCall) else ""
    return f"{call.variant}{examined} at {case_name(call.shape, call.direction)}"


def compile_ahead(
    study: Study,
    calls: Iterable[Call],
    device: str,
    processes: int,
    report: Callable[[Call, int, int], None],
    take: Callable[[Call, ProbeReport | Verdict], None] = lambda *_: None,
) -> Made:
    """Make calls of a study in several processes, and report the progress after each.

    Args:
        study: Study of the calls. Each process receives a copy.
        calls: Calls to make, in this order.
        device: Device of all processes. Each process makes one call at a time, so the device needs memory for as many calls as
            there are processes.
        processes: Number of processes.
        report: Callback in this process, with the call, the number of calls that are done, and the number of all calls.
        take: Callback in this process, with a check and what it found, if that counts.
    """
    waiting = list(calls)
    failed: list[str] = []
    seconds: dict[Call, float] = {}
    if not waiting:
        return Made(failed, seconds)
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    most = sum(call.parts if isinstance(call, CompileCall) else 1 for call in waiting)
    pool = ProcessPoolExecutor(min(processes, most), mp_context=context, initializer=give_way)
    given_up = ""
    try:
        futures = {pool.submit(_timed, study, call, device): call for call in waiting}
        left = set(futures)
        try:
            for done, future in enumerate(_ended(left), start=1):
                call, made = futures[future], future.result()
                seconds[call] = made.seconds
                if isinstance(call, CompileCall) and call.part == 0:
                    others = {pool.submit(_timed, study, each, device): each for each in _other_parts(call, made.parts)}
                    futures.update(others)
                    left.update(others)  # the set itself, of which the loop takes the next ones
                if made.problem:
                    failed.append(f"Not compiled ahead: {call.variant} at {call.shape}: {made.problem}")
                if made.found is not None:
                    take(call, made.found)
                report(call, done, len(futures))
        except BrokenProcessPool:
            given_up = "A process died while it compiled."
        except TimeoutError as stuck:
            given_up = str(stuck)
            for worker in set(multiprocessing.active_children()) - before:
                worker.kill()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # so that Ctrl-C need not wait for a compiler
    if given_up:
        failed.append(f"{given_up} The calls that were left are compiled when they are measured.")
    return Made(failed, seconds, given_up=bool(given_up))


def _timed(study: Study, call: Call, device: str) -> Done:
    """Make a call in this process, and return its outcome with the time that it took."""
    start, found, called = time.perf_counter(), None, Called()
    if isinstance(call, CompileCall):
        called = call_once(study, call, device)
    else:
        found = check_once(study, call, device)
    # Each call ends with a collection of garbage. Looking at all that the calls before have imported would take it 0.3 s. It is
    # done seldom, since what is passed over is never freed: cycles that hold memory of the device may be among it.
    if len(gc.get_objects()) > MANY:
        gc.freeze()
    return Done(time.perf_counter() - start, called.problem, found, called.parts)


def _other_parts(call: CompileCall, parts: int) -> list[CompileCall]:
    """Return the calls that follow the first part of a tuning, if all of it falls into so many parts."""
    return [call._replace(part=part, parts=parts) for part in range(1, parts)]


def _ended(waiting: set[Future[Done]]) -> Iterator[Future[Done]]:
    """Yield the futures of calls as they end, also of those that are added meanwhile, and remove them.

    The waits are short, since Ctrl-C is raised in this thread by another one, and not before a wait is over.

    Raises:
        TimeoutError: No call ended for :data:`PATIENCE`.
    """
    latest = time.monotonic()
    while waiting:
        done = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED).done
        waiting -= done
        if done:
            latest = time.monotonic()
        elif time.monotonic() - latest > PATIENCE:
            raise TimeoutError(f"Processes that compile were ended, since none was done with its call within {PATIENCE:g} s.")
        yield from done
