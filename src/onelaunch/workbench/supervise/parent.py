"""Parent process of a study: start child processes, time out or restart them, and record a crash as its candidate's status.

``run.py`` calls :func:`supervise`; it and command ``onelaunch study run`` name files by :func:`slug_of`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onelaunch.device.hardware import describe
from onelaunch.errors import MeasuringFailed, OutputUnwritable
from onelaunch.operation import Direction
from onelaunch.wording import listing
from onelaunch.workbench.merging import merged, refuse_other_devices
from onelaunch.workbench.options import Part, Progress
from onelaunch.workbench.result import Result, Status
from onelaunch.workbench.spending import with_lost_turn
from onelaunch.workbench.study import Study
from onelaunch.workbench.supervise.child import TURN_BYTES, read_turn, work
from onelaunch.workbench.supervise.job import Job, State, Turn, carry_out

CALL_LIMIT_SECONDS = 600.0
"""Seconds after which a candidate counts as hung in one step, such as its probes, its verification, its preparation (all of these
compile), one sample, or one count."""

INTERRUPT_SECONDS = 30.0
"""Seconds that the child has to end its call after Ctrl-C, before it is killed. The finished cases are kept either way."""

_LOOK_SECONDS = 0.2
"""Interval at which the parent checks how long the candidate has been running."""

_MOST_SILENT_DEATHS = 2
"""Number of crashes of the child at one case, while no candidate is running, after which the case is skipped."""


def supervise(
    job: Job,
    on_progress: Callable[[Progress], None],
    *,
    devices: Sequence[str] = (),
    call_limit: float = CALL_LIMIT_SECONDS,
    method: str | None = None,
) -> Result:
    """Run a study in child processes, and return its result.

    Args:
        job: Study with its options.
        on_progress: Callback for the progress, in this process.
        devices: Devices that share the cases, each with a child of its own; by default the device of the job alone. The child of
            the first measures the peaks, and the others start with them.
        call_limit: Seconds after which a candidate counts as hung.
        method: How children are started, ``fork`` or ``spawn``; by default :func:`start_method` decides.

    Raises:
        MeasuringFailed: A child died twice before it measured anything.
        ResultMismatch: The devices are not alike.
        OneLaunchError: Any error that :func:`carry_out` raises in a child.
    """
    with contextlib.ExitStack() as stack:
        claims = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onelaunch-claims-"))) if len(devices) > 1 else None
        run = _ParallelRun(job, devices or (job.device,), on_progress, call_limit, method, claims)
        for part in run.parts:
            stack.callback(part.end)
        while not all(part.ended for part in run.parts):
            try:
                run.step()
            except KeyboardInterrupt:  # noqa: PERF203 - a step waits for a fifth of a second anyway
                run.interrupt()
    return run.merged()


class _ParallelRun:
    """Run whose cases are split into parts, each measured by a child on a device of its own; a single part has all cases.

    A child that is done with its part goes on with shapes that others have not begun.
    """

    def __init__(
        self,
        job: Job,
        devices: Sequence[str],
        on_progress: Callable[[Progress], None],
        call_limit: float,
        method: str | None,
        claims: Path | None,
    ) -> None:
        self._job = job
        self._partial = job.partial if len(devices) > 1 else None
        """File of the merged partial result; ``None`` if the only child saves it."""
        self._saved: list[Result | None] = []
        self._unsaved = ""
        several = len(devices) > 1
        total = _ProgressSum(on_progress, len(devices))
        self.parts = [
            _Supervised(
                _part_of(job, device, Part(index, len(devices), claims)) if several else job,
                functools.partial(total.report, index) if several else on_progress,
                call_limit,
                method,
            )
            for index, device in enumerate(devices)
        ]

    def step(self) -> None:
        """Let each part handle a message of its child or start one. Parts after the first wait for its measured peaks."""
        first = self.parts[0]
        for part in self.parts:
            known = part.state.kept
            if part is not first and known is None:
                if first.state.kept is None:
                    continue
                part.job = replace(part.job, ceilings=first.state.kept.ceilings)
            part.step()
            if part is not first and known is None and part.state.kept is not None and first.state.kept is not None:
                refuse_other_devices(first.state.kept, part.state.kept)
        self._save()

    def interrupt(self) -> None:
        """Pass Ctrl-C on to all children. A part that has measured nothing yet ends; if all are so, the run ends."""
        if all(part.state.kept is None for part in self.parts):
            raise KeyboardInterrupt
        for part in self.parts:
            part.interrupt()

    def merged(self) -> Result:
        """Return the result of all parts."""
        results = [part.result for part in self.parts if part.result is not None]
        if len(self.parts) == 1:
            return results[0]
        names = listing([part.job.device for part in self.parts])
        note = f"Processes measured side by side on {names}, each shape on one of them."
        notes = [note, self._unsaved] if self._unsaved else [note]
        found = merged(results, self._job.earlier)
        return found.model_copy(update={"notes": tuple(dict.fromkeys((*found.notes, *notes)))})

    def _save(self) -> None:
        """Save the merged partial result if a part has a new one. If that fails, the run continues with a note."""
        kept = [part.state.kept for part in self.parts]
        new = [one for one, saved in itertools.zip_longest(kept, self._saved) if one is not saved]
        if self._partial is None or not new:
            return
        self._saved = kept
        if found := [each for each in kept if each is not None]:
            try:
                merged(found, self._job.earlier).save(self._partial, force=True)
            except OutputUnwritable as failure:
                self._unsaved = f"The partial result could not be saved during the run: {failure}"


def _part_of(job: Job, device: str, part: Part) -> Job:
    """Return the job of a part on its device. Its share of the processes that compile is at least 1 if there are any."""
    processes = max(job.processes // part.number, min(job.processes, 1))
    return replace(job, device=device, part=part, partial=None, processes=processes)


class _ProgressSum:
    """Callback for the progress of several parts, which adds up their finished cases."""

    def __init__(self, on_progress: Callable[[Progress], None], parts: int) -> None:
        self._tell = on_progress
        self._latest: list[Progress | None] = [None] * parts

    def report(self, index: int, progress: Progress) -> None:
        """Report the progress of the part with this index."""
        self._latest[index] = progress
        known = [each for each in self._latest if each is not None]
        done, cases = sum(each.cases_done for each in known), sum(each.cases for each in known)
        self._tell(replace(progress, cases_done=done, cases=cases))


class _Supervised:
    """Job whose child is restarted after a crash. The candidate that crashed it gets a status, and is not run again."""

    def __init__(self, job: Job, on_progress: Callable[[Progress], None], call_limit: float, method: str | None) -> None:
        self.job = job
        self.state = State()
        self.ended = False
        self.result: Result | None = None
        """Result of the job once it has ended; ``None`` if it was interrupted before anything was measured."""
        self._on_progress = on_progress
        self._call_limit = call_limit
        self._method = method or start_method(job.device)
        self._child: Child | None = None
        self._silent: Counter[tuple[str, str]] = Counter()

    def step(self) -> None:
        """Handle one message of the child, or its end, or start one."""
        if self.ended:
            return
        if self._child is None:
            try:
                self._child = Child(self.job, self.state, self._method)
            except (pickle.PicklingError, AttributeError, TypeError) as problem:  # what cannot be sent to a new interpreter
                self._here(str(problem))
            return
        ended = self._child.step(self._on_progress, self._call_limit)
        if ended is None:
            return
        self.end()
        if isinstance(ended, Result):
            self.ended, self.result = True, ended
        elif isinstance(ended, Missing):
            self._here(f"a new process does not know {listing(ended.names)}")
        else:
            self.state.kept = with_lost_turn(self.state.kept, ended.seconds)
            _blame(self.job.study, self.state, ended, self._silent)

    def interrupt(self) -> None:
        """Pass Ctrl-C on to the child. The second time, or if it has measured nothing yet, it is ended at once."""
        if self.ended:
            return
        measured = self._child is not None and self.state.kept is not None
        found = self._child.interrupt() if self._child is not None and measured else self.state.kept
        if found is not None or not measured:
            self.ended, self.result = True, found
            self.end()

    def end(self) -> None:
        """End the child, if one runs."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _here(self, why: str) -> None:
        """Run the job in this process, since a child cannot."""
        self.state.notes.append(_in_this_process(why))
        self.ended, self.result = True, carry_out(self.job, self._on_progress, state=self.state)
        self.state.kept = self.result


class Missing(NamedTuple):
    """Names of the operation and variants that the child does not know."""

    names: tuple[str, ...]


class Death(NamedTuple):
    """End of a child that sent no result."""

    turn: Turn | None
    """Candidate that was running."""
    place: tuple[str, Direction] | None
    """Shape and direction that were measured; ``None`` before the first."""
    how: str
    """How it ended, as a predicate after "the measuring process"."""
    hung: bool = False
    """True if the parent ended it, because the candidate ran too long."""
    seconds: float = 0.0
    """Seconds for which the candidate had been running."""


def start_method(device: str) -> str:
    """Return how the child of a run on a device is started: ``fork``, or ``spawn`` for a new interpreter."""
    if sys.platform != "linux" or torch.device(device).type != "cpu" or torch.cuda.is_initialized():
        return "spawn"  # a forked process cannot use CUDA, nor the frameworks of macOS
    return "fork"


def slug_of(device: str) -> str:
    """Return the name of a device in the names of files, without initialising CUDA in this process."""
    if torch.device(device).type == "cpu" or torch.cuda.is_initialized():
        return _slug(device)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_slug, device).result()


def _slug(device: str) -> str:
    return describe(device).slug


class Child:
    """Handle of a child process that runs a job. :meth:`end` kills it with every process that it has started."""

    def __init__(self, job: Job, state: State, method: str) -> None:
        context: Any = multiprocessing.get_context(method)
        self._state = state
        self._shared = context.RawArray("c", TURN_BYTES)
        self._connection, theirs = context.Pipe()
        own = self._connection if method == "fork" else None  # a forked child holds this end too, and must close it
        arguments = (job, state, theirs, own, self._shared, _modules(job.study))
        self._process = context.Process(target=work, args=arguments, name=f"onelaunch {job.study.name}")
        with warnings.catch_warnings():
            # Python warns of a fork with several threads. The child uses nothing of theirs: see work.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()
        self._place: tuple[str, Direction] | None = None
        self._interrupted = 0.0
        """Time of Ctrl-C; 0 before it."""

    def end(self) -> None:
        """Kill the process with every process that it has started."""
        self._kill()
        self._connection.close()

    def interrupt(self) -> Result | None:
        """Pass Ctrl-C on to the child. If it has been told already, return what it has measured so far."""
        if self._interrupted:
            return self._state.kept
        self._interrupted = time.monotonic()
        with contextlib.suppress(OSError):
            self._connection.send("interrupt")
        return None

    def step(self, on_progress: Callable[[Progress], None], call_limit: float) -> Result | Missing | Death | None:
        """Handle the next message, or check the time limits. Return how the child ended, or ``None`` while it runs.

        The finished cases that it reports become the state of the run.
        """
        if not wait([self._connection, self._process.sentinel], timeout=_LOOK_SECONDS):
            return self._late(call_limit)
        if not self._connection.poll():
            return self._dead()
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            return self._dead()
        if kind == "progress":
            self._place = value.shape, value.direction
            on_progress(value)
        elif kind == "kept":
            self._state.kept = _read(value)
        elif kind == "compiled":
            self._state.compiled.update(value)
        elif kind == "done":
            return _read(value)
        elif kind == "missing":
            return Missing(value)
        elif value[0] is KeyboardInterrupt and self._state.kept is not None:  # while the child put its result together
            return self._state.kept
        else:
            raise _revived(*value)
        return None

    def _late(self, call_limit: float) -> Result | Death | None:
        """End a child whose candidate runs too long, or that does not end after Ctrl-C."""
        now = time.monotonic()
        if self._interrupted and now - self._interrupted > INTERRUPT_SECONDS:
            self._kill()
            return self._state.kept
        began, turn = read_turn(self._shared)
        if turn is None or now - began <= call_limit or self._interrupted:
            return None
        self._kill()
        return Death(
            turn, self._place, f"was ended, since a call was not done after {call_limit:g} s", hung=True, seconds=now - began
        )

    def _dead(self) -> Result | Death:
        self._end_others()
        self._process.join()
        if self._interrupted and self._state.kept is not None:
            return self._state.kept
        began, turn = read_turn(self._shared)
        seconds = time.monotonic() - began if turn is not None else 0.0
        return Death(turn, self._place, _how(self._process.exitcode or 0), seconds=seconds)

    def _end_others(self, *, waiting: bool = True) -> None:
        """Kill what a child that has ended by itself has left: processes that compile while it judges variants, or after Ctrl-C.

        The child is reaped after that, so that its number, which is that of its group, cannot be another process's yet.

        Args:
            waiting: Whether to wait for the child's end first. Otherwise one that still runs is killed too.
        """
        if (number := self._process.pid) is not None and hasattr(os, "waitid"):
            with contextlib.suppress(OSError):  # the child was reaped before, or has left nothing
                os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT | (0 if waiting else os.WNOHANG))
                os.killpg(number, signal.SIGKILL)

    def _kill(self) -> None:
        """Kill the child with its process group, to which compilers and profilers that it has started belong."""
        self._end_others(waiting=False)
        if self._process.pid is not None and self._process.is_alive():
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()


def _blame(study: Study, state: State, death: Death, silent: Counter[tuple[str, str]]) -> None:
    """Record a crash as the status of the candidate that was running. If none was, the case is retried, and then skipped.

    Raises:
        MeasuringFailed: The child has died twice before the first case.
    """
    if (turn := death.turn) is not None:
        status: Status = "timed_out" if death.hung else "crashed"
        state.failures[turn.key] = status, f"The measuring process {death.how} while {turn.name} was {turn.step}."
        if death.hung:  # each further case would take as long again
            for direction in study.directions:
                for shape in study.shapes:
                    if study.operation_at(shape) is not study.operation_at(study.shape(turn.shape)):
                        continue
                    key = (shape.name, direction, turn.name, turn.control)
                    state.failures.setdefault(key, (status, f"It was not run, since it ran too long at {turn.shape}."))
        case = f"{turn.shape}, {turn.direction.replace('_', ' and ')}"
        state.notes.append(
            f"{case}: The measuring process {death.how} while {turn.name} was {turn.step}. A new one went on without it."
        )
        return
    silent[death.place or ("", "")] += 1
    again = silent[death.place or ("", "")] < _MOST_SILENT_DEATHS
    if death.place is None:
        if again:
            return
        raise MeasuringFailed(f"The measuring process {death.how} before it measured anything")
    shape, direction = death.place
    case = f"{shape}, {direction.replace('_', ' and ')}"
    state.notes.append(f"{case}: The measuring process {death.how} while no variant was running.")
    if not again:
        for name, control in (*((each, False) for each in study.variant_names()), *((each, True) for each in study.controls)):
            state.failures[shape, direction, name, control] = (
                "crashed",
                f"The measuring process {death.how}, for the second time at this shape.",
            )


def _how(code: int) -> str:
    """Return how a process with this exit code ended, as a predicate."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (as the system does for lack of memory)" if name == "SIGKILL" else "")
    return f"was killed by signal {-code}"


def _in_this_process(why: str) -> str:
    return f"Everything was measured in the process that also decides, without supervision: {why}."


def _modules(study: Study) -> tuple[str, ...]:
    """Return the names of the modules that registered the operations of a study and their variants, except the main module."""
    made = (*study.operations(), *(variant.run for _, variant in study.registered()))
    names = (getattr(each, "__module__", None) for each in made)
    return tuple(dict.fromkeys(name for name in names if name and name not in ("__main__", "__mp_main__")))


def _read(text: str) -> Result:
    return Result.model_validate(json.loads(text))


def _revived(cls: type[BaseException], arguments: tuple[Any, ...], attributes: Mapping[str, Any]) -> BaseException:
    """Return the exception that the child raised. Its constructor is not called, since it may take other arguments."""
    error = cls.__new__(cls, *arguments)
    error.args = arguments
    error.__dict__.update(attributes)
    return error
