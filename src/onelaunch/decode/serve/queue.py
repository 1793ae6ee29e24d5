"""Queue of requests for the device, which runs one at a time, in the order of their arrival."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator

from onelaunch.decode.serve.metrics import Metrics
from onelaunch.decode.serve.problems import RequestError

_LONGEST_RETRY = 600
"""Largest number of seconds that a refused client is told to wait."""


class Queue:
    """Bounded first-in, first-out queue. It belongs to one event loop.

    Args:
        most: Largest number of requests that wait.
        metrics: Metrics to keep up to date.
    """

    def __init__(self, most: int, metrics: Metrics) -> None:
        self._most, self._metrics = most, metrics
        self._places = 0  # requests that are admitted and do not have the turn
        self._busy = False
        self._line: deque[asyncio.Future[None]] = deque()
        self._seconds = 1.0  # moving average of how long a request keeps the turn
        self._closed = False

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """Admit a request, and give it a place in the queue for the duration of the block.

        Raises:
            RequestError: the queue is full, or the server is shutting down.
        """
        if self._closed:
            raise _shutting_down()
        if self._places + self._busy > self._most:
            message = f"{self._places} requests are waiting, as many as the queue holds. Try again later."
            seconds = min(max(math.ceil(self._places * self._seconds), 1), _LONGEST_RETRY)
            raise RequestError(429, message, code="queue_full", retry_after=seconds)
        place = Place(self)
        self._count(1)
        try:
            yield place
        finally:
            if not place.has_had_turn:
                self._count(-1)

    def close(self) -> None:
        """Refuse the requests that wait, and all later ones."""
        self._closed = True
        for waiter in self._line:
            if not waiter.done():
                waiter.set_exception(_shutting_down())
        self._line.clear()

    async def acquire(self) -> None:
        """Wait for the turn."""
        if self._closed:
            raise _shutting_down()
        if not self._busy:
            self._busy = True
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._next()  # the turn came at the same moment
            raise

    def release(self, seconds: float) -> None:
        """Give the turn to the next request; this one had it for so many seconds."""
        self._seconds += (seconds - self._seconds) / 8
        self._next()

    def begin(self) -> None:
        """Count a request as running."""
        self._count(-1)
        self._metrics.running.set(1)

    def end(self) -> None:
        """Count no request as running."""
        self._metrics.running.set(0)

    def _next(self) -> None:
        while self._line:
            waiter = self._line.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._busy = False

    def _count(self, change: int) -> None:
        self._places += change
        self._metrics.waiting.set(self._places)


class Place:
    """Place of one request in a queue."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.has_had_turn = False

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the turn, and keep it for the duration of the block."""
        await self._queue.acquire()
        self.has_had_turn, begin = True, time.perf_counter()
        self._queue.begin()
        try:
            yield
        finally:
            self._queue.end()
            self._queue.release(time.perf_counter() - begin)


def _shutting_down() -> RequestError:
    return RequestError(503, "The server is shutting down.", code="shutting_down", retry_after=1)
