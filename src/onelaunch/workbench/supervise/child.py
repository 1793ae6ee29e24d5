"""The child process: it runs a job, and tells its parent what it does.

``parent.py`` starts it with :func:`work`, reads the running candidate by :func:`read_turn`, and kills the child once it has
the result.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from onelaunch.errors import MeasuringFailed
from onelaunch.operation import AUTO, Direction, find_operation
from onelaunch.workbench.study import Study
from onelaunch.workbench.supervise.job import Job, State, Turn, carry_out

TURN_BYTES = 4096
"""Size of the memory that the child shares with its parent."""

# Shared memory: the time at which the candidate began, or 0, the length of its description, and the description


def write_turn(shared: Any, turn: Turn | None) -> None:
    """Write the candidate that runs from now on into the shared memory, or that none does."""
    view = memoryview(shared).cast("B")
    struct.pack_into("d", view, 0, 0.0)  # invalid while the rest is written
    if turn is not None:
        text = json.dumps(turn).encode()[: TURN_BYTES - 16]
        view[16 : 16 + len(text)] = text
        struct.pack_into("Q", view, 8, len(text))
        struct.pack_into("d", view, 0, time.monotonic())


def read_turn(shared: Any) -> tuple[float, Turn | None]:
    """Return the time at which the running candidate began, by ``time.monotonic``, and the candidate; ``None`` if none runs."""
    view = memoryview(shared).cast("B")
    began, length = struct.unpack_from("dQ", view, 0)
    if not began:
        return 0.0, None
    try:
        return began, Turn(*json.loads(bytes(view[16 : 16 + length])))
    except ValueError:  # the child writes the next one at this moment
        return 0.0, None


def work(job: Job, state: State, connection: Connection, parents: Connection | None, shared: Any, modules: Sequence[str]) -> None:
    """Run the job in a thread of its own, and wait for its end, for an interruption, or for the end of the parent.

    The thread is new because a forked main thread believes that the threads of OpenMP are alive, which did not survive the fork,
    and would wait for them for ever.
    """
    if parents is not None:
        parents.close()
        gc.freeze()  # a study collects garbage after each case; what a forked process inherits need not be traversed, nor copied
    # Ctrl-C in the terminal then reaches the parent alone, which passes it on once. The parent kills the whole group.
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The parent handles it for both. As the command ``study run`` it says what was saved; this process ends with it in any case.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGTERM))
    ended, end = os.pipe()
    sending = threading.Lock()

    def send(kind: str, value: Any) -> None:
        with sending:  # an interruption in the middle of a message would damage it
            connection.send((kind, value))

    worker = threading.Thread(target=_run_and_tell, args=(job, state, send, shared, modules, end), daemon=True)
    worker.start()
    while True:
        ready = wait([connection, ended])
        if ended in ready:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # threads and finalisers of variants must not keep the process
        try:
            connection.recv()
        except (EOFError, OSError):  # the parent is gone
            os._exit(1)
        with sending:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(KeyboardInterrupt))


def _run_and_tell(
    job: Job, state: State, send: Callable[[str, Any], None], shared: Any, modules: Sequence[str], end: int
) -> None:
    """Run the job, and send progress, finished cases, and the result or the exception to the parent."""

    def turn(shape: str, direction: Direction, name: str | None, *, control: bool, step: str) -> None:
        write_turn(shared, None if name is None else Turn(shape, direction, name, control, step))

    try:
        if missing := _missing(job.study, modules):
            send("missing", missing)
        else:
            kept = lambda result: send("kept", result.stored())  # noqa: E731
            tell = lambda step: send("progress", step)  # noqa: E731
            compiled = lambda cases: send("compiled", cases)  # noqa: E731
            result = carry_out(job, tell, state=state, on_turn=turn, on_kept=kept, on_compiled=compiled)
            send("done", result.stored())
    except BaseException as error:  # noqa: BLE001 - raised again by the parent
        described = (type(error), error.args, error.__dict__)
        try:
            pickle.loads(pickle.dumps(described))  # noqa: S301 - of this process
        except Exception:  # noqa: BLE001 - such as an exception that holds a tensor's graph, or whose class is local
            described = (MeasuringFailed, (f"{type(error).__name__}: {error}",), {})
        send("raised", described)
    finally:
        os.write(end, b"x")


def _missing(study: Study, modules: Sequence[str]) -> tuple[str, ...]:
    """Import the modules that registered the operation and its variants, and return the names that are still not known."""
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    if missing := [name for name in study.operation_names() if not _is_known(name)]:
        return tuple(missing)
    return tuple(name for name in study.variant_names() if name != AUTO and study.find_variant(name) is None)


def _is_known(operation: str) -> bool:
    """Return whether an operation of this name is registered."""
    try:
        find_operation(operation)
    except LookupError:
        return False
    return True
