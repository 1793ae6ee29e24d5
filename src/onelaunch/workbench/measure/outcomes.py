"""Outcomes of a measurement: statuses, verdicts and times of its candidates, as plain values.

``measure`` of ``timing.py`` makes them, and calls :func:`too_fast` and :func:`invalidate`. ``entry.py`` sets the status and the
reason of a candidate that fails. ``workbench/running.py`` makes the cells of a result from them.
``workbench/cells.py`` calls :func:`below` when a finished cell gets a new bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onelaunch.workbench.result import MEASURED, Noise, Status, Timing, Verdict
from onelaunch.workbench.result.consistency import BELOW_BOUND


@dataclass
class CandidateResult:
    """Outcome of one variant or control: its status, verdict and times.

    ``timing.py`` sets the status and the reason of every candidate before it is verified, or at Ctrl-C, and ``timings`` at the
    end, also if the candidate failed. The second copy of the baseline begins with the default status.
    """

    name: str
    control: bool = False
    status: Status = "ok"
    reason: str = ""
    verdict: Verdict | None = None
    timings: tuple[Timing, ...] = ()
    peak_bytes: int | None = None
    chosen: str = ""
    """Variant that the dispatcher chose for the candidate ``auto``; empty for every other one."""

    @property
    def measured(self) -> bool:
        """True if its times are believed: it is correct, or a peer outside the gate."""
        return self.status in MEASURED


@dataclass
class Measurements:
    """Measurements of one case in one direction."""

    candidates: dict[str, CandidateResult]
    """Outcomes by the name of the variant or control; a control never has the name of a variant."""
    noise: tuple[Noise, ...] = ()
    clocks: dict[str, float] = field(default_factory=dict)
    """Medians over the rounds, with the keys of :attr:`onelaunch.workbench.result.Provenance.clocks`."""
    notes: tuple[str, ...] = ()
    """Sentences on how it was measured: number of input sets, rounds, and the reason if it stopped early."""
    examined: dict[str, Verdict] = field(default_factory=dict)
    """Verdicts of the checks that take many calls, by the variant for which they were asked."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during ``measure`` of ``timing.py``, which raises it.

    ``measurements`` holds the finished rounds, with the status ``interrupted``.
    """

    def __init__(self, measurements: Measurements) -> None:
        super().__init__("interrupted while measuring")
        self.measurements = measurements


def below(timing: Timing | None, bound_microseconds: float) -> bool:
    """Return whether a time is so far below its roofline bound that it must be wrong."""
    return timing is not None and timing.microseconds.median < BELOW_BOUND * bound_microseconds


def _cold(result: CandidateResult) -> Timing | None:
    return next((timing for timing in result.timings if timing.regime == "cold"), None)


def too_fast(result: CandidateResult, bound_microseconds: float) -> bool:
    """Return whether the cold time of a candidate that was measured to the end is well below its bound."""
    return result.measured and below(_cold(result), bound_microseconds)


def invalidate(result: CandidateResult, bound_microseconds: float, *, again: bool) -> None:
    """Set the status ``invalid`` if the cold time is well below its bound; the reason names likely causes and the remedy."""
    cold = _cold(result)
    if cold is None or not too_fast(result, bound_microseconds):
        return
    result.status = "invalid"
    peaks = "the device's peaks were measured too low" + (", and again when this time was seen" if again else "")
    result.reason = (
        f"{cold.microseconds.median:.2f} µs is below its roofline bound of {bound_microseconds:.2f} µs: the variant does less "
        f"work than it must, or {peaks}. If other work ran on the device, end it and measure the peaks again with "
        "onelaunch doctor --refresh"
    )
