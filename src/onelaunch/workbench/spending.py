"""Meter of the time and money that a run takes.

``supervise/job.py`` makes one in the process that measures, and ``running.py`` stores its state in each result, partial ones
included. Where that process ends early, the seconds of its candidates count up to its last finished case;
``supervise/parent.py`` adds those of the candidate that was running.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from onelaunch.workbench.result import Result, Spent

HOUR = 3600.0
"""Seconds of an hour."""


class Meter:
    """Meter of a run.

    Args:
        began: Start of the run by ``time.monotonic``, which all processes of a machine share; now by default.
        price_per_hour: Price of an hour of the machine; that of the interrupted run if ``None``.
        earlier: Interrupted run that is continued, if any.
        kept: Latest partial result of this run from a process that ended, if any.
    """

    def __init__(
        self,
        began: float | None = None,
        price_per_hour: float | None = None,
        earlier: Result | None = None,
        kept: Result | None = None,
    ) -> None:
        before = earlier.spent if earlier is not None else None
        self._began = time.monotonic() if began is None else began
        self._before = before or Spent(wall_seconds=0.0, device_seconds=0.0)
        self._price = price_per_hour if price_per_hour is not None else self._before.price_per_hour
        latest = kept.spent if kept is not None else before
        self._device_seconds = latest.device_seconds if latest is not None else 0.0
        self._turn: float | None = None

    def watching(self, on_turn: Callable[..., None]) -> Callable[..., None]:
        """Return the callback of a run for the turns of its candidates that adds their seconds up and then calls ``on_turn``."""

        def turn(shape: str, direction: str, name: str | None, **more: Any) -> None:
            self._end_turn()
            if name is not None:
                self._turn = time.monotonic()
            on_turn(shape, direction, name, **more)

        return turn

    def spent(self) -> Spent:
        """Return what was spent until now, together with the interrupted runs that are continued."""
        self._end_turn()
        seconds = max(0.0, time.monotonic() - self._began)
        return Spent(
            wall_seconds=self._before.wall_seconds + seconds,
            device_seconds=self._device_seconds,
            price_per_hour=self._price,
            cost=self._cost(seconds),
        )

    def _cost(self, seconds: float) -> float | None:
        """Return the price of the seconds of this run and of the earlier ones, which may have had a price of their own."""
        if self._price is None:
            return None
        before = self._before.cost if self._before.cost is not None else self._price * self._before.wall_seconds / HOUR
        return before + self._price * seconds / HOUR

    def _end_turn(self) -> None:
        """Add the seconds of the running candidate, if any. A result that is made meanwhile, as after Ctrl-C, ends its turn."""
        if self._turn is not None:
            self._device_seconds += max(0.0, time.monotonic() - self._turn)
            self._turn = None


def with_lost_turn(kept: Result | None, seconds: float) -> Result | None:
    """Return the partial result of a process with the seconds of the candidate that was running when it ended."""
    if kept is None or kept.spent is None:
        return kept
    spent = kept.spent.model_copy(update={"device_seconds": kept.spent.device_seconds + max(0.0, seconds)})
    return kept.model_copy(update={"spent": spent})
