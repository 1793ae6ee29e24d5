"""The parent process: it starts children, follows them, and makes of their deaths the statuses of candidates.

``run.py`` calls :func:`supervise`; it and command ``onelaunch study run`` name files by :func:`slug_of`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from onelaunch.device.hardware import describe
from onelaunch.errors import MeasuringFailed
from onelaunch.operation import Direction
from onelaunch.wording import listing
from onelaunch.workbench.result import Result, Status
from onelaunch.workbench.running import Progress
from onelaunch.workbench.spending import with_lost_turn
from onelaunch.workbench.study import Study
from onelaunch.workbench.supervise.child import TURN_BYTES, read_turn, work
from onelaunch.workbench.supervise.job import Job, State, Turn, carry_out

if TYPE_CHECKING:
    from typing_extensions import Self

CALL_LIMIT_SECONDS = 600.0
"""Seconds after which a candidate counts as hung in one step, such as its probes, its verification, its preparation (all of these
compile), one sample, or one count."""

INTERRUPT_SECONDS = 30.0
"""Seconds that the child has to end its call after Ctrl-C, before it is killed. The finished cases are kept either way."""

_LOOK_SECONDS = 0.2
"""Interval in which the parent looks for how long the candidate has been running."""

_MOST_SILENT_DEATHS = 2
"""Number of times that the child may die at one case while no candidate is running, before the case is given up."""


def supervise(
    job: Job,
    on_progress: Callable[[Progress], None],
    *,
    call_limit: float = CALL_LIMIT_SECONDS,
    method: str | None = None,
) -> Result:
    """Run a study in a child process, and return its result.

    Args:
        job: Study with its options.
        on_progress: Callback for the progress, in this process.
        call_limit: Seconds after which a candidate counts as hung.
        method: How the child is started, ``fork`` or ``spawn``; by default :func:`start_method` decides.

    Raises:
        MeasuringFailed: The child died twice before it measured anything.
        OneLaunchError: Any error that :func:`carry_out` raises in the child.
    """
    state, silent = State(), Counter[tuple[str, str]]()
    while True:
        try:
            child = Child(job, state, method or start_method(job.device))
        except (pickle.PicklingError, AttributeError, TypeError) as problem:  # what cannot be sent to a new interpreter
            state.notes.append(_in_this_process(str(problem)))
            return carry_out(job, on_progress, state=state)
        with child:
            ended = child.follow(on_progress, call_limit)
        if isinstance(ended, Result):
            return ended
        if isinstance(ended, Missing):
            state.notes.append(_in_this_process(f"a new process does not know {listing(ended.names)}"))
            return carry_out(job, on_progress, state=state)
        state.kept = with_lost_turn(state.kept, ended.seconds)
        _blame(job.study, state, ended, silent)


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
    """A child process that runs a job, as its parent sees it. Leaving its ``with`` block ends it, and all that it has started."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._connection.close()

    def follow(self, on_progress: Callable[[Progress], None], call_limit: float) -> Result | Missing | Death:
        """Wait for the child's result. The finished cases that it reports become the state of the run."""
        ended: Result | Missing | Death | None = None
        while ended is None:
            try:
                ended = self._step(on_progress, call_limit)
            except KeyboardInterrupt:  # noqa: PERF203 - the loop waits for a fifth of a second anyway
                ended = self._interrupt()
        return ended

    def _interrupt(self) -> Result | None:
        """Pass Ctrl-C on to the child, or end it if it has been told already. Before its first partial result the run ends."""
        if self._state.kept is None:
            raise KeyboardInterrupt
        if self._interrupted:
            return self._state.kept
        self._interrupted = time.monotonic()
        with contextlib.suppress(OSError):
            self._connection.send("interrupt")
        return None

    def _step(self, on_progress: Callable[[Progress], None], call_limit: float) -> Result | Missing | Death | None:
        """Handle the next message, or look at the clock. Return how the child ended, or ``None`` while it runs."""
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
        self._process.join()
        if self._interrupted and self._state.kept is not None:
            return self._state.kept
        began, turn = read_turn(self._shared)
        seconds = time.monotonic() - began if turn is not None else 0.0
        return Death(turn, self._place, _how(self._process.exitcode or 0), seconds=seconds)

    def _kill(self) -> None:
        """Kill the child with its process group, to which compilers and profilers that it has started belong."""
        if self._process.pid is not None and self._process.is_alive():
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()


def _blame(study: Study, state: State, death: Death, silent: Counter[tuple[str, str]]) -> None:
    """Record a death as the status of the candidate that was running. Without one the case is tried again, and then given up.

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
