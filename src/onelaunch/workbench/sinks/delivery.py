"""Making sinks by name, and sending results to them so that no failure of a sink reaches the caller as an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from onelaunch.device.tools import package_installed
from onelaunch.errors import ArgumentError, ExtraMissing
from onelaunch.wording import did_you_mean, in_a_line, listing, shown
from onelaunch.workbench.result import Result
from onelaunch.workbench.sinks.mlflow_sink import MlflowSink
from onelaunch.workbench.sinks.record import record_of
from onelaunch.workbench.sinks.sink import Sink, SinkNotice
from onelaunch.workbench.sinks.tensorboard_sink import TensorBoardSink
from onelaunch.workbench.sinks.wandb_sink import WandbSink

_SINKS: dict[str, tuple[Callable[[str], Sink], str]] = {
    "wandb": (WandbSink, "wandb"),
    "tensorboard": (TensorBoardSink, "tensorboard"),
    "mlflow": (MlflowSink, "mlflow"),
}
"""Makers of sinks, with the package that each needs, by the names for ``--log``. The extras have the names of the packages."""


def register_sink(name: str, make: Callable[[str], Sink], *, package: str = "") -> None:
    """Register a sink under a name for ``--log``.

    Args:
        name: Name, without a colon.
        make: Function that makes the sink from what follows the colon after its name, an empty string if nothing does. It raises
            :class:`~onelaunch.errors.ArgumentError` for a place that cannot be right.
        package: Python package that it needs, if any.

    Raises:
        ValueError: The name is taken, empty or holds a colon.
    """
    if not name or ":" in name or name in _SINKS:
        raise ValueError(f"a sink cannot be called {name!r}: the name is taken, empty or holds a colon")
    _SINKS[name] = make, package


def sink_names() -> tuple[str, ...]:
    """Return the names of all sinks."""
    return tuple(_SINKS)


def make_sink(spec: str) -> Sink:
    """Return the sink that a text ``name`` or ``name:where`` describes.

    Raises:
        ArgumentError: No sink has this name, the place cannot be right, or it holds a password.
        ExtraMissing: The package of the sink is not installed.
    """
    name, _, where = spec.partition(":")
    if name not in _SINKS:
        raise ArgumentError(f"There is no sink {shown(name)}.{did_you_mean(name, sink_names())} Known: {listing(sink_names())}.")
    if "@" in urlsplit(where).netloc:  # the command is stored in the result
        raise ArgumentError(
            f"The place of the sink {name} holds a user name or a password, which the result would store with the command. "
            "Leave it out, and pass it as the package of the sink documents, such as in an environment variable."
        )
    make, package = _SINKS[name]
    if package and not package_installed(package):
        raise ExtraMissing(f"The sink {name}", package=package, extra=name)
    return make(where)


def deliver(result: Result, sinks: Sequence[Sink], files: Sequence[Path] = ()) -> list[str]:
    """Send a stored result to sinks, and return a line for each that took it, such as ``TensorBoard: runs/040/h200``.

    A sink that fails or is interrupted by Ctrl-C gives a :class:`SinkNotice`, and the next one is tried.

    Args:
        result: The result, which is stored already.
        sinks: Sinks of :func:`make_sink`.
        files: Files of the result and its report, which sinks may keep.
    """
    sent = (_sent(result, sink, tuple(files)) for sink in sinks)
    return [line for line in sent if line is not None]


def _sent(result: Result, sink: Sink, files: tuple[Path, ...]) -> str | None:
    """Send a result to one sink. Return the line that says where it is, or ``None`` after a warning."""
    try:
        return f"{sink.title}: {sink.send(record_of(result, files))}"
    except (Exception, KeyboardInterrupt, SystemExit) as problem:  # noqa: BLE001 - whatever the package raises
        why = "it was interrupted" if isinstance(problem, KeyboardInterrupt) else in_a_line(problem)
        notice = SinkNotice(
            f"The result was not sent to {sink.title}, or not completely: {why}. It is stored. To send it again, run onelaunch "
            "study report with the file of the result and --log."
        )
        warnings.warn(notice, stacklevel=3)
        return None
