"""Bound on the work that a request has enqueued on the device, and the check whether the request was cancelled.

The device completes what is enqueued, whatever happens to the request. A request that must end soon after it is cancelled
therefore enqueues little at a time. :class:`Pace` bounds units of work that are enqueued one by one: steps, and the halves of
layers in a prompt. :class:`TokenTimes` chooses the number of tokens of a launch. Both go by measured times. The engines in
``engines.py`` call them before they enqueue work; ``forward.py`` calls a :class:`Pace` between the halves of layers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

_RECENT = 4
"""Number of units whose longest time is the estimate of the next one: two layers, whose halves take different times."""


class Stopped(Exception):
    """Signal that a request was cancelled before its next unit of work. Engines raise it and catch it."""


class Mark(Protocol):
    """Point in the device's work, such as a CUDA event."""

    def query(self) -> bool:
        """Return whether the device has passed the point."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed the point."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this point to a later one; the device has passed both."""
        ...


class HostMark:
    """Point in the work of a CPU, which is done when it is enqueued."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end_event: Any) -> float:
        return 1e3 * (end_event.time - self.time)


def mark(device: torch.device) -> Mark:
    """Return a mark behind the work that is enqueued on the current stream of a device."""
    if device.type != "cuda":
        return HostMark()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class Pace:
    """Pace of one request's units of work. It is called before each unit, and waits until the unit may be enqueued.

    Args:
        device: Device of the work.
        bound: Longest work, in seconds, to have enqueued at a time; ``None`` for no bound. A unit that takes longer is enqueued
            alone.
        cancelled: Function that returns whether the request was cancelled.
    """

    def __init__(self, device: torch.device, bound: float | None, cancelled: Callable[[], bool]) -> None:
        self._device, self._bound, self._cancelled = device, bound, cancelled
        # Marks between units. The device has passed the first one.
        self._marks: deque[Mark] = deque()
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def __call__(self) -> None:
        """Wait until one more unit may be enqueued.

        Raises:
            Stopped: the request was cancelled.
        """
        self.check()
        if self._bound is None:
            return
        self._marks.append(mark(self._device))
        while len(self._marks) > 1:
            # The number of marks is that of the enqueued units with the next one. Units of two kinds alternate in a prompt.
            fits = len(self._recent) > 1 and len(self._marks) * max(self._recent) <= self._bound
            if fits and not self._marks[1].query():
                return
            self._pass_first()
            self.check()

    def check(self) -> None:
        """Raise :class:`Stopped` if the request was cancelled."""
        if self._cancelled():
            raise Stopped

    def drain(self) -> None:
        """Wait until the device has done all units, and forget their times, since the next ones are of another kind."""
        if self._bound is None:
            return
        self._marks.append(mark(self._device))
        self._marks[-1].synchronize()
        self._marks.clear()
        self._recent.clear()
        self.check()

    def _pass_first(self) -> None:
        """Wait for the first enqueued unit, and note its time."""
        start = self._marks.popleft()
        self._marks[0].synchronize()
        self._recent.append(start.elapsed_time(self._marks[0]) / 1e3)


class TokenTimes:
    """Measured time per token of an engine's launches, and the number of tokens per launch that follows from it.

    A token's time is taken to grow with the bytes that the device reads for it: weights, and the keys and values so far.

    Args:
        weights_bytes: Bytes of the weights.
        position_bytes: Bytes of the keys and values of one position.
        most: Largest number of tokens per launch.
    """

    def __init__(self, weights_bytes: int, position_bytes: int, most: int) -> None:
        self._weights_bytes, self._position_bytes, self._most = weights_bytes, position_bytes, most
        self._measured: dict[bool, tuple[float, int]] = {}  # seconds per token, and bytes, by whether tokens were sampled

    def launches(self, bound: float | None, position: int, *, sampled: bool) -> tuple[int, int]:
        """Return how many launches to have enqueued at a time, two if possible, and the tokens of each.

        Args:
            bound: Longest work, in seconds, to have enqueued; ``None`` for no bound. A launch has at least one token.
            position: Position of the launch's first token.
            sampled: Flag of tokens that are drawn, which takes longer than taking the largest logit.
        """
        if bound is None:
            return 2, self._most
        if sampled not in self._measured:
            return 1, 1
        seconds, measured_bytes = self._measured[sampled]
        seconds *= max(self._bytes(position + self._most) / measured_bytes, 1.0)
        each = int(bound / 2 / seconds) if seconds > 0 else self._most
        return (2, min(each, self._most)) if each else (1, 1)

    def add(self, seconds: float, tokens: int, position: int, *, sampled: bool) -> None:
        """Note the time of a launch of ``tokens`` tokens from ``position`` on."""
        self._measured[sampled] = seconds / tokens, self._bytes(position)

    def _bytes(self, position: int) -> int:
        """Return the bytes that the device reads for a token at a position."""
        return self._weights_bytes + position * self._position_bytes
