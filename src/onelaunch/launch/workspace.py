"""Memory through which the CTAs of one launch talk to each other; zero when made, reusable without clearing.

A kernel that uses :mod:`onelaunch.kernels.scan.look_back` needs words that nobody else writes while it runs. Launches on one
stream follow each other and share a workspace. A captured graph may be replayed on any stream, so every captured call gets words
of its own, cut from a reserve that eager calls keep filled: a memset inside the graph would be a second launch.
"""

from __future__ import annotations

import functools

import torch
from triton.runtime import driver

from onelaunch.launch.imitation import imitated

RESERVE = 4 << 20
"""int64 words of the reserve for captured calls (32 MiB per device, made by the first eager call)."""

LARGE = RESERVE // 4
"""Captured calls that need more words than this clear their own memory in the graph: its memset is short beside their work."""


class Reserve:
    """Zeroed words of one device, handed out once and never taken back: a graph keeps its words as long as it may be replayed."""

    def __init__(self) -> None:
        self._words: torch.Tensor | None = None
        self._used: list[torch.Tensor] = []
        """Spent reserves: graphs still write into them, so they are never freed."""
        self._next = 0

    def fill(self, device: torch.device) -> None:
        """Make sure that at least half of a reserve is left; not during capture."""
        if self._words is None or self._next > RESERVE // 2:
            if self._words is not None:
                self._used.append(self._words)
            self._words = torch.zeros(RESERVE, dtype=torch.int64, device=device)
            self._next = 0

    def take(self, words: int) -> torch.Tensor | None:
        """Return words for one captured call, or ``None`` when too few are left."""
        start = self._next
        if self._words is None or words > LARGE or start + words > RESERVE:
            return None
        self._next += words + words % 2  # 16-byte alignment
        return self._words[start : start + words]


@functools.cache
def _reserve(device: torch.device) -> Reserve:
    return Reserve()


@functools.lru_cache(maxsize=64)
def _shared(device: torch.device, stream: int, words: int) -> torch.Tensor:
    """Return the words of a stream, one tensor for each number of them: every launch must write all of its words."""
    return torch.zeros(words, dtype=torch.int64, device=device)


def _stream(device: torch.device) -> int:
    """Return the stream that Triton will launch on, by Triton's own look-up: PyTorch's makes an object of it, at every launch."""
    return driver.active.get_current_stream(device.index)


def workspace(device: torch.device, words: int) -> torch.Tensor:
    """Return int64 words for one launch on the current stream; the launch must write every one of them."""
    if imitated():
        return torch.empty(words, dtype=torch.int64, device=device)
    if device.type != "cuda":  # the interpreter: launches run one after another
        return _shared(device, 0, words)
    if torch.cuda.is_current_stream_capturing():
        taken = _reserve(device).take(words)
        return torch.zeros(words, dtype=torch.int64, device=device) if taken is None else taken
    _reserve(device).fill(device)
    return _shared(device, _stream(device), words)


@functools.lru_cache(maxsize=64)
def _counters(device: torch.device, stream: int, words: int) -> torch.Tensor:
    """Return zeroed words of a stream, apart from those of :func:`_shared`, which launches leave as they please."""
    return torch.zeros(words, dtype=torch.int64, device=device)


def counters(device: torch.device, words: int) -> torch.Tensor:
    """Return int64 words for one launch on the current stream: zero when it begins, and it must leave them so."""
    if imitated() or torch.cuda.is_current_stream_capturing():
        return workspace(device, words)  # nobody else's
    _reserve(device).fill(device)
    return _counters(device, _stream(device), words)
