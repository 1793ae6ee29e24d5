"""Rounds of a measurement: the order of the candidates, the note on rounds that a time cap left out, and when more are needed.

``timing.py`` takes the rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import torch

from onelaunch.workbench.measure.entry import Entry
from onelaunch.workbench.measure.sampling import LONG_SAMPLE_SECONDS
from onelaunch.workbench.result import Noise

T = TypeVar("T")

STEADY = 1.04
"""A/A noise of calls from Python on a GPU above which more rounds of this regime follow."""

MOST_TIMES = 24
"""Most rounds of calls from Python on a GPU, in those that were asked for, where a criterion reads their times.

With 8, two of 126 forms of the study everyday-calls stayed above 1.05: training of short scans, whose calls wait for PyTorch's
thread of the backward pass.
"""

_MOST_OF_THE_TIME = 0.5
"""Fraction of the time of all rounds from which a note names the candidate that took it, if the time cap ended the rounds and its
samples are long."""


def order(names: Sequence[T], index: int) -> tuple[T, ...]:
    """Return the names in the order of round ``index``: rotated by one every second round, and reversed in odd rounds."""
    if not names:
        return ()
    start = (index // 2) % len(names)
    rotated = (*names[start:], *names[:start])
    return rotated[::-1] if index % 2 else rotated


def by_turns(samples: Mapping[T, Iterator[float | None]]) -> dict[T, float | None]:
    """Take samples whose parts are taken by turns, every second time backwards, and return them; ``None`` where one failed.

    A host is often slower for a while, by a fifth or more. By turns all samples see the same of it.

    Args:
        samples: What :meth:`onelaunch.workbench.measure.sampling.Sampler.parts` yields for each candidate.
    """
    found: dict[T, float | None] = dict.fromkeys(samples)
    left, done = dict(samples), object()
    while left:
        for key, parts in tuple(left.items()):
            part = next(parts, done)
            if part is done:
                del left[key]
            else:
                found[key] = cast("float | None", part)
        left = dict(reversed(left.items()))
    return found


def is_unsteady(noise: Iterable[Noise], device: torch.device) -> bool:
    """Return whether the A/A noise of calls from Python on a GPU is above :data:`STEADY`, since the host has other work too.

    More rounds narrow the interval of the A/A ratio. Whether they follow depends on this interval alone, and not on how a
    variant's times compare with those of another.
    """
    return device.type == "cuda" and any(each.regime == "eager" and each.floor > STEADY for each in noise)


def most_rounds(rounds: int, *, steady_eager: bool) -> int:
    """Return the most rounds of calls from Python: :data:`MOST_TIMES` as many as were asked for, if they are to be steady.

    The times of such calls at kernels of a few microseconds are those of the host, whose noise is often above :data:`STEADY`. At
    a case where no criterion reads them, more rounds of them would take longer than all else: on an H100, 12 candidates of
    ``linear_rnn`` were timed for 24 s with 16 rounds of such calls, at 1x512, and for 48 s with 46 of them, at 4x512, both with
    12 rounds of the other regimes (commit 3a4b8f3e2d95).
    """
    return MOST_TIMES * rounds if steady_eager else rounds


def stopped(entries: Collection[Entry], regimes: int, time_cap_seconds: float, index: int, rounds: int) -> str:
    """Return the note on a time cap, with the candidate that took most of the time, if one did.

    Args:
        entries: All candidates, with the seconds that their samples took.
        regimes: Number of regimes in which each was timed.
        time_cap_seconds: Seconds after which no new round began.
        index: Number of rounds that were taken.
        rounds: Number of rounds that were asked for.
    """
    note = f"Stopped by the time cap of {time_cap_seconds:g} s after {index} of {rounds} rounds."
    slowest = max(entries, key=lambda entry: entry.seconds)
    share = slowest.seconds / max(sum(entry.seconds for entry in entries), 1e-9)
    if share < _MOST_OF_THE_TIME or slowest.seconds < index * regimes * LONG_SAMPLE_SECONDS:
        return note
    return f"{note} {slowest.candidate.name} took {share:.0%} of the time."
