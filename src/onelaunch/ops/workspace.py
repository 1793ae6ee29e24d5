"""Memory through which the programs of one launch talk to each other; zero when made, reusable without clearing.

A kernel that uses :mod:`onelaunch.ops.lookback_kernels` needs words that nobody else writes while it runs. Launches on one stream
follow each other and share a workspace. A captured graph may be replayed on any stream, so every captured call gets words of
its own, cut from a reserve that eager calls keep filled: a memset inside the graph would be a second launch.
"""

from __future__ import annotations

import functools

import torch

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
        """Words for one captured call, or ``None`` when too few are left."""
        words += words % 2  # 16-byte alignment
        if self._words is None or words > LARGE or self._next + words > RESERVE:
            return None
        self._next += words
        return self._words[self._next - words : self._next]


@functools.cache
def _reserve(device: torch.device) -> Reserve:
    return Reserve()


@functools.lru_cache(maxsize=64)
def _shared(device: torch.device, stream: int, words: int) -> torch.Tensor:
    """One per stream and number of words: every launch must write all of its words."""
    return torch.zeros(words, dtype=torch.int64, device=device)


def workspace(device: torch.device, words: int) -> torch.Tensor:
    """int64 words for one launch on the current stream; the launch must write every one of them."""
    if device.type != "cuda":  # the interpreter: launches run one after another
        memory = _shared(device, 0, words)
    elif torch.cuda.is_current_stream_capturing():
        memory = _reserve(device).take(words)
        if memory is None:
            memory = torch.zeros(words, dtype=torch.int64, device=device)
    else:
        _reserve(device).fill(device)
        memory = _shared(device, torch.cuda.current_stream(device).cuda_stream, words)
    return memory[:words]
