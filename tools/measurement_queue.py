"""Queue of measurements on the GPUs of a machine: which starts when, and how one is stopped; ``measure_on_gpus.py`` uses it.

A measurement starts when as many GPUs as it needs are free. The order of the queue is kept: a measurement that has to wait holds
back those behind it. Quiet measurements are those that compilers on the machine's CPU cores would disturb. They run side by side
with other quiet ones only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
"""Folder of the repository, in which commands run."""

SETUP_SECONDS = 12
"""Seconds that a command takes to import what it needs before it counts the seconds of ``{left}``."""

POLL_SECONDS, TAIL_LINES = 0.2, 4
"""Seconds between two looks at the running measurements, and number of lines of each log in the summary."""


@dataclass(frozen=True)
class Measurement:
    """Declaration of a measurement: a table ``[[measurements]]`` of ``measurements.toml``, which describes the keys."""

    name: str
    command: tuple[str, ...]
    seconds: float
    gpus: int | Literal["all"] = 1
    environment: dict[str, str] = field(default_factory=dict)
    quiet: bool = False
    visible: bool = False
    stdout: str | None = None
    also: tuple[str, ...] = ()
    codes: tuple[int, ...] = (0,)

    def words(self, gpus: Sequence[int], left: float, out: Path) -> list[str]:
        """Return the words of the command, with values for its placeholders and with ``--also`` for files that exist."""
        gpu = 0 if self.visible else gpus[0]
        values = {"{name}": self.name, "{gpu}": str(gpu), "{left}": str(max(int(left) - SETUP_SECONDS, 1)), "{out}": str(out)}
        present = [out / each for each in self.also if (out / each).exists()]
        words = [*self.command, *(word for each in present for word in ("--also", str(each)))]
        for placeholder, value in values.items():
            words = [word.replace(placeholder, value) for word in words]
        return [sys.executable, *words[1:]] if words[0] == "python" else words

    def variables(self, gpus: Sequence[int]) -> dict[str, str]:
        """Return the environment of the command; ``gpus`` are indices among the GPUs that this process sees."""
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        ids = [seen[gpu] if gpu < len(seen) and seen[gpu] else str(gpu) for gpu in gpus]
        return {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(ids)} if self.visible else {}), **self.environment}


@dataclass(frozen=True)
class Margins:
    """Seconds that lie between the deadline and the signals that stop measurements."""

    start: float = 40.0
    """Seconds that have to be left before the deadline for a measurement to start."""
    stop: float = 30.0
    """Seconds before the deadline at which running measurements are interrupted."""
    kill: float = 25.0
    """Seconds from SIGINT to SIGKILL."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a measurement, as the summary shows it."""

    name: str
    state: Literal["ended", "stopped", "not started"]
    code: int | None = None
    seconds: float = 0.0
    tail: tuple[str, ...] = ()
    """Last lines of its log."""
    good: bool = False
    """Flag that it ended by itself, with one of its exit codes of success."""

    def __str__(self) -> str:
        facts = "" if self.code is None else f", exit code {self.code}, {self.seconds:.0f} s"
        return "\n".join([f"{self.name}: {self.state}{facts}", *(f"    {line}" for line in self.tail)])


@dataclass
class Run:
    """Measurement that runs: its process, GPUs, open files and times by the monotonic clock."""

    measurement: Measurement
    gpus: tuple[int, ...]
    process: subprocess.Popen[bytes]
    log: Path
    """File that its output is appended to."""
    printed_from: int
    """Length of the log when the process started, in bytes."""
    began: float
    stop_at: float
    kill_at: float | None = None
    """Time at which the process is killed, once it was interrupted."""

    def interrupt(self, now: float, margins: Margins) -> None:
        """Send SIGINT to the process and to the processes of onelaunch in its group, but to no compiler.

        Children that train a model save a checkpoint then, as after Ctrl-C on a terminal. An interrupted compiler would fail, and
        a study would store that as a failure of the variant.
        """
        self.kill_at = now + margins.kill
        others = [each.pid for each in processes() if each.group == self.process.pid and each.is_ours]
        send(signal.SIGINT, [self.process.pid, *(pid for pid in others if pid != self.process.pid)])

    def kill(self) -> None:
        """Kill the process, its group and its descendants: torchrun starts each rank in a session of its own."""
        # Once the process has been waited for, its PID may be reused, but not as a group ID while members of its group live.
        members, table = set() if self.process.returncode is not None else {self.process.pid}, processes()
        while new := {each.pid for each in table if each.parent in members or each.group == self.process.pid} - members:
            members |= new
        send(signal.SIGKILL, sorted(members))


class Process(NamedTuple):
    """Process of this machine, as ``/proc`` describes it."""

    pid: int
    parent: int
    group: int
    words: tuple[str, ...]

    @property
    def is_ours(self) -> bool:
        """Flag that a word of the command is the package or one of its modules, as in ``python -m onelaunch.cli``."""
        return any(word.partition(".")[0] == "onelaunch" for word in self.words)


def processes() -> list[Process]:
    """Return the processes of this machine; none where there is no ``/proc``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            _, parent, group = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            found.append(Process(int(folder.name), int(parent), int(group), tuple(words)))
    return found


def send(number: signal.Signals, pids: Sequence[int]) -> None:
    """Send a signal to processes, of which some may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class Queue:
    """Queue of measurements on the GPUs of a machine, with a deadline by the monotonic clock."""

    def __init__(
        self, waiting: Sequence[Measurement], gpus: int, out: Path, deadline: float, margins: Margins | None = None
    ) -> None:
        self.waiting, self.gpus, self.out = list(waiting), gpus, out
        self.deadline, self.margins = deadline, margins or Margins()
        self.running: list[Run] = []
        self.outcomes: list[Outcome] = []
        self._began = time.monotonic()

    def run(self) -> list[Outcome]:
        """Run all measurements, and return their outcomes in the order in which they ended."""
        while self.waiting or self.running:
            self._step(time.monotonic())
            time.sleep(POLL_SECONDS if self.running else 0)
        return self.outcomes

    def cancel(self) -> None:
        """Stop all measurements and start no other; a signal handler may call it."""
        self.deadline = min(self.deadline, time.monotonic())

    def _step(self, now: float) -> None:
        """Stop measurements that are late, take note of those that have ended, and start those that can start."""
        for run in tuple(self.running):
            if run.process.poll() is not None:
                self._end(run, now)
            elif run.kill_at is None and now >= min(run.stop_at, self.deadline - self.margins.stop):
                self._say(f"stop {run.measurement.name}")
                run.interrupt(now, self.margins)
            elif run.kill_at is not None and now >= run.kill_at:
                run.kill()
        if now > self.deadline - self.margins.start:
            self.outcomes += [Outcome(each.name, "not started") for each in self.waiting]
            self.waiting = []
        while self.waiting and (free := self._gpus_for(self.waiting[0])):
            self._start(self.waiting.pop(0), free, now)

    def _gpus_for(self, measurement: Measurement) -> tuple[int, ...]:
        """Return the GPUs on which a measurement can start now; none if it has to wait."""
        if any(run.measurement.quiet != measurement.quiet for run in self.running):
            return ()
        taken = {gpu for run in self.running for gpu in run.gpus}
        free = [gpu for gpu in range(self.gpus) if gpu not in taken]
        needed = needs(measurement, self.gpus)
        return tuple(free[:needed]) if len(free) >= needed else ()

    def _start(self, measurement: Measurement, gpus: tuple[int, ...], now: float) -> None:
        left = min(measurement.seconds, self.deadline - self.margins.stop - now)
        log = self.out / "logs" / f"{measurement.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        words, where = measurement.words(gpus, left, self.out), ", ".join(map(str, gpus))
        with log.open("ab") as output, self._stdout(measurement, output) as stdout:
            output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}, GPUs {where}: {' '.join(words)}\n".encode())
            output.flush()
            printed_from = output.tell()
            known: dict[str, Any] = {"cwd": ROOT, "env": measurement.variables(gpus), "start_new_session": True}
            try:
                process: subprocess.Popen[bytes] = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=stdout, stderr=output, **known
                )
            except OSError as problem:
                output.write(f"{problem}\n--- not started\n".encode())
                self.outcomes.append(Outcome(measurement.name, "not started", tail=(str(problem),)))
                return
        self.running.append(Run(measurement, gpus, process, log, printed_from, now, now + left))
        self._say(f"start {measurement.name} on GPUs {where}, for {left:.0f} s at most")

    def _stdout(self, measurement: Measurement, log: IO[bytes]) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Return the file for the output of a command: its log, or the file that is to become its result."""
        return contextlib.nullcontext(log) if measurement.stdout is None else self._partial(measurement.stdout).open("wb")

    def _partial(self, name: str) -> Path:
        return self.out / f"{name}.part"

    def _end(self, run: Run, now: float) -> None:
        """Free the GPUs of a run that has ended. Its output replaces that of an earlier run only if it ended well."""
        run.kill()  # descendants that it has left behind
        self.running.remove(run)
        measured, code, seconds = run.measurement, run.process.returncode, now - run.began
        state: Literal["ended", "stopped"] = "ended" if run.kill_at is None else "stopped"
        good = state == "ended" and code in measured.codes
        lines = run.log.read_bytes()[run.printed_from :].decode(errors="replace").splitlines()
        tail = [line for line in lines if line.strip()][-TAIL_LINES:]
        if good and measured.stdout is not None:
            self._partial(measured.stdout).replace(self.out / measured.stdout)
        with run.log.open("a", encoding="utf-8") as output:
            output.write(f"--- {state} with exit code {code} after {seconds:.0f} s\n")
        self.outcomes.append(Outcome(measured.name, state, code, seconds, tuple(tail), good))
        self._say(f"{state} {measured.name}, exit code {code}")

    def _say(self, words: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - self._began:5.0f} s] {words}\n")
        sys.stdout.flush()


def needs(measurement: Measurement, gpus: int) -> int:
    """Return the number of GPUs that a measurement needs on a machine with ``gpus`` GPUs."""
    return gpus if measurement.gpus == "all" else measurement.gpus
