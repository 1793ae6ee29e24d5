"""Device memory through which the CTAs of one launch communicate. It is zeroed when allocated, and reused without clearing.

A kernel that uses :mod:`onelaunch.kernels.scan.look_back` needs int64 words that no other launch writes while it runs. It writes
each word once per launch and flips the phase bit in it, so the words that the previous launch left need no clearing. Launches on
one stream run one after another and share a workspace. A captured graph may be replayed on any stream, so each captured call gets
its own words. They are taken from a zeroed reserve that eager calls keep filled, since a memset in the graph would be a second
launch. The launch code of the scans and of ``linear_rnn`` takes words by :func:`workspace`, that of ``swiglu`` for Hopper and of
``output_chain`` by :func:`counters`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from triton.runtime import driver

from onelaunch.launch.imitation import imitated
from onelaunch.launch.recording import recorder
from onelaunch.launch.triton_cache import fall_back

RESERVE = 4 << 20
"""Number of int64 words in the reserve for captured calls: 32 MiB per device, allocated by the first eager call."""

LARGE = RESERVE // 4
"""Largest number of words taken from the reserve. A captured call that needs more clears its own memory in the graph, since
the memset is short compared with its work."""


class Reserve:
    """Zeroed words of one device. Each word is handed out once and never reused, since a graph may be replayed at any time."""

    def __init__(self) -> None:
        self._words: torch.Tensor | None = None
        self._used: list[torch.Tensor] = []
        """Used-up reserves. Graphs still write into them, so they are never freed."""
        self._next = 0

    def fill(self, device: torch.device) -> None:
        """Allocate a new reserve if less than half of the present one is left. Do not call it during a capture."""
        if self._words is None or self._next > RESERVE // 2:
            words = torch.zeros(RESERVE, dtype=torch.int64, device=device)  # first, since memory may run out
            if self._words is not None:
                self._used.append(self._words)
            self._words, self._next = words, 0

    def take(self, words: int) -> torch.Tensor | None:
        """Return words for one captured call, or ``None`` if too few are left or too many are asked for."""
        start = self._next
        if self._words is None or words > LARGE or start + words > RESERVE:
            return None
        self._next += words + words % 2  # keeps the next words aligned to 16 bytes
        return self._words[start : start + words]


@functools.cache
def _reserve(device: torch.device) -> Reserve:
    """Return the reserve of a device."""
    return Reserve()


@functools.lru_cache(maxsize=64)
def _shared(device: torch.device, stream: int, words: int) -> torch.Tensor:
    """Return the shared words of a stream, one tensor for each number of words. Every launch must write all of its words."""
    return torch.zeros(words, dtype=torch.int64, device=device)


def _stream(device: torch.device) -> int:
    """Return the handle of the stream that Triton will launch on, by Triton's own look-up.

    PyTorch's look-up would create a stream object at every launch.
    """
    try:
        return driver.active.get_current_stream(device.index)
    except OSError as problem:  # Triton's driver compiles its own code at the first use, into the cache folder
        if not fall_back(problem):
            raise
        return driver.active.get_current_stream(device.index)


def workspace(device: torch.device, words: int) -> torch.Tensor:
    """Return int64 words for one launch on the current stream; the launch must write every one of them."""
    if imitated():
        return torch.empty(words, dtype=torch.int64, device=device)
    return _provided(_workspace, device, words)


def _provided(function: Callable[[torch.device, int], torch.Tensor], device: torch.device, words: int) -> torch.Tensor:
    """Return what a function of this module provides, and report it if the calling code is recorded."""
    found = function(device, words)
    if (active := recorder()) is not None:
        active.provided(function, (device, words), found)
    return found


def _workspace(device: torch.device, words: int) -> torch.Tensor:
    """Return the words of :func:`workspace`."""
    if device.type != "cuda":  # Triton's interpreter, whose launches run one after another
        return _shared(device, 0, words)
    if torch.cuda.is_current_stream_capturing():
        taken = _reserve(device).take(words)
        return torch.zeros(words, dtype=torch.int64, device=device) if taken is None else taken
    _reserve(device).fill(device)
    return _shared(device, _stream(device), words)


@functools.lru_cache(maxsize=64)
def _counters(device: torch.device, stream: int, words: int) -> torch.Tensor:
    """Return zeroed words of a stream. They are separate from those of :func:`_shared`, which launches leave with any values."""
    return torch.zeros(words, dtype=torch.int64, device=device)


def counters(device: torch.device, words: int) -> torch.Tensor:
    """Return zeroed int64 words for one launch on the current stream; the launch must leave them zero."""
    if imitated():
        return workspace(device, words)
    return _provided(_zeroed, device, words)


def _zeroed(device: torch.device, words: int) -> torch.Tensor:
    """Return the words of :func:`counters`."""
    if device.type != "cuda":  # Triton's interpreter
        return _counters(device, 0, words)
    if torch.cuda.is_current_stream_capturing():
        return _workspace(device, words)  # words that no other launch uses
    _reserve(device).fill(device)
    return _counters(device, _stream(device), words)
