"""Protocol of a sink, and the warning about one that failed."""

from __future__ import annotations

from typing import Protocol

from onelaunch.errors import OneLaunchError
from onelaunch.workbench.sinks.record import Record


class Sink(Protocol):
    """Place that keeps the results of runs."""

    title: str
    """Name in messages, such as ``TensorBoard``."""

    def send(self, record: Record) -> str:
        """Send one result, and return where it can be found: an address, a folder or an identifier.

        It is called once, after the result is stored, and may raise any exception, which becomes a :class:`SinkNotice`. It must
        not wait without limit for a server.
        """
        ...


class SinkNotice(OneLaunchError, UserWarning):
    """Warning that a result could not be sent to a sink. The result itself is stored."""
