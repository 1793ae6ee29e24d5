"""Statistics over rounds and runs: medians with intervals, paired ratios, geometric means, noise.

``measure`` makes the intervals and noise of results with these functions. ``decide``, ``measures`` and ``report`` compute the
ratios and means that they judge, compare and show with them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from onelaunch.workbench.stored import Estimate

_RESAMPLES = 2000
"""Number of bootstrap resamples."""

_CONFIDENCE = 0.95
"""Confidence level of all intervals."""

SEED = 40
"""Seed of the bootstrap, fixed so that the same samples always give the same interval."""

_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % quantiles of Student's t distribution for 1, 2, 3 and more degrees of freedom.

The last value is also used for more degrees of freedom. It is slightly too large there, which is on the safe side.
"""


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the median of the samples with its 95 % bootstrap interval (percentiles of the medians of resamples).

    The same samples always give the same interval. One sample gives an interval of width 0, so check ``samples`` before
    relying on an interval.

    Raises:
        ValueError: There are no samples.
    """
    if not samples:
        raise ValueError("an estimate needs at least one sample")
    return _estimate(tuple(samples))


@functools.lru_cache(maxsize=8192)
def _estimate(samples: tuple[float, ...]) -> Estimate:
    """Return the estimate of samples, cached because a report asks for the same ones many times."""
    values = np.asarray(samples, dtype=np.float64)
    medians = np.median(values[_draws(values.size)], axis=1)
    tail = 50 * (1 - _CONFIDENCE)  # percent outside of the interval at each end
    low, high = np.percentile(medians, [tail, 100 - tail])
    return Estimate(median=float(np.median(values)), low=float(low), high=float(high), samples=values.size)


@functools.lru_cache(maxsize=64)
def _draws(count: int) -> np.ndarray:
    """Return the indices that each bootstrap resample draws from ``count`` samples, shape ``[_RESAMPLES, count]``."""
    return np.random.default_rng(SEED).integers(0, count, size=(_RESAMPLES, count))


def ratio(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Return the estimate of ``a / b`` from ratios taken round by round.

    Conditions that both share in a round (clocks, temperature) cancel. Rounds that only one of them has are ignored.
    """
    return estimate([one / other for one, other in zip(a, b, strict=False)])


def unpaired_ratio(a: Estimate, b: Estimate) -> Estimate:
    """Return ``a / b`` of times that share no rounds. The interval covers every ratio that the two intervals allow."""
    return Estimate(median=a.median / b.median, low=a.low / b.high, high=a.high / b.low, samples=min(a.samples, b.samples))


def mean_estimate(estimates: Sequence[Estimate]) -> Estimate:
    """Return the geometric mean of ratios or times.

    The interval assumes that all values err in the same direction. ``samples`` is the smallest of theirs.
    """
    if len(estimates) == 1:
        return estimates[0]
    return Estimate(
        median=geometric_mean([one.median for one in estimates]),
        low=geometric_mean([one.low for one in estimates]),
        high=geometric_mean([one.high for one in estimates]),
        samples=min(one.samples for one in estimates),
    )


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean, which is the proper mean of ratios. Every value must be above 0."""
    return float(np.exp(np.mean(np.log(np.asarray(values, dtype=np.float64)))))


def mean_ratio(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Return the geometric mean of the ratios ``a / b`` of pairs, with the 95 % interval of Student's t for their mean logarithm.

    It suits few pairs, each of which scatters by much, such as errors at several seeds. All values must be above 0 and finite.
    One pair gives an interval of width 0.
    """
    logs = np.log(np.asarray(a, dtype=np.float64)) - np.log(np.asarray(b, dtype=np.float64))
    freedom = logs.size - 1
    half = _STUDENT[min(freedom, len(_STUDENT)) - 1] * float(logs.std(ddof=1)) / math.sqrt(logs.size) if freedom else 0.0
    middle, low, high = (float(np.exp(logs.mean() + side)) for side in (0.0, -half, half))
    return Estimate(median=middle, low=low, high=high, samples=logs.size)


LEAST_NOISE = 1.01
"""Smallest noise floor, however well two copies of a variant agree: 1 %."""


def noise_floor(again: Estimate, least: float = LEAST_NOISE) -> float:
    """Return the smallest factor that may be claimed after an A/A run, in which one variant is timed twice in the same rounds.

    It is the distance of the far end of the A/A ratio's interval from 1, as a factor, and at least ``least``.
    """
    return max(least, again.high, 1 / again.low)


def noise_between_runs(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the largest factor between two sides' times that noise between runs explains, or ``None`` without repeated runs.

    Each side is a list of medians, one for each of its runs of the same code. The estimator is the half-width of Student's
    two-sample 95 % interval for the difference of the mean logarithms, with one variance pooled over both sides, returned as a
    factor. It assumes that both sides are equally noisy in proportion, so that repeats of one side also inform about the other.

    More runs allow smaller claims. If the medians of runs have a standard deviation of 1 %, a change can be claimed beyond 17 %
    with two runs against one, 4.4 % with two against two, 2.3 % with three against three, and 1.5 % with five against five.

    Source: Student's t over repeated executions, as Georges, Buytaert and Eeckhout, "Statistically rigorous Java performance
    evaluation" (2007), and Kalibera and Jones, "Rigorous benchmarking in reasonable time" (2013).
    """
    freedom = len(first) + len(second) - 2
    if freedom < 1:
        return None
    logs = [np.log(np.asarray(side, dtype=np.float64)) for side in (first, second)]
    pooled = sum(float(np.sum((side - side.mean()) ** 2)) for side in logs) / freedom
    error = math.sqrt(pooled * (1 / len(first) + 1 / len(second)))
    with np.errstate(over="ignore"):  # an overflow gives infinite noise, which allows no claim
        return float(np.exp(_STUDENT[min(freedom, len(_STUDENT)) - 1] * error))
