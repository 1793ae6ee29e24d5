"""Statistics over rounds and runs: medians with their interval, paired ratios, geometric means, noise.

They are the only statistics in the project.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from onelaunch.workbench.stored import Estimate

RESAMPLES = 2000
CONFIDENCE = 0.95
SEED = 40
"""Seed of the bootstrap, fixed so that the same samples always give the same interval."""

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % quantiles of Student's t distribution for 1, 2, 3... degrees of freedom. The last also serves for more degrees,
where it is slightly too large and thus on the safe side."""


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the median of the samples with its 95 % bootstrap interval (percentiles of the medians of resamples).

    The same samples always give the same interval. One sample gives an interval of no width, so look at ``samples`` before
    believing an interval.

    Raises:
        ValueError: There are no samples.
    """
    if not samples:
        raise ValueError("an estimate needs at least one sample")
    return _estimate(tuple(samples))


@functools.lru_cache(maxsize=8192)
def _estimate(samples: tuple[float, ...]) -> Estimate:
    """Return :func:`estimate` of samples; a report asks for the same ones many times."""
    values = np.asarray(samples, dtype=np.float64)
    medians = np.median(values[_draws(values.size)], axis=1)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(medians, [tail, 100 - tail])
    return Estimate(median=float(np.median(values)), low=float(low), high=float(high), samples=values.size)


@functools.lru_cache(maxsize=64)
def _draws(count: int) -> np.ndarray:
    """Return which samples, of so many, each resample draws."""
    return np.random.default_rng(SEED).integers(0, count, size=(RESAMPLES, count))


def ratio(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Return ``a / b`` round by round, so that conditions that both rounds shared (clocks, temperature) cancel.

    If one has fewer rounds, only the rounds that both have count.
    """
    return estimate([one / other for one, other in zip(a, b, strict=False)])


def unpaired_ratio(a: Estimate, b: Estimate) -> Estimate:
    """Return ``a / b`` of times that share no rounds. The interval covers everything that both intervals allow."""
    return Estimate(median=a.median / b.median, low=a.low / b.high, high=a.high / b.low, samples=min(a.samples, b.samples))


def mean_estimate(estimates: Sequence[Estimate]) -> Estimate:
    """Return the geometric mean of ratios or times; the interval is as if all erred in one direction, ``samples`` the fewest."""
    if len(estimates) == 1:
        return estimates[0]
    return Estimate(
        median=geometric_mean([one.median for one in estimates]),
        low=geometric_mean([one.low for one in estimates]),
        high=geometric_mean([one.high for one in estimates]),
        samples=min(one.samples for one in estimates),
    )


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean, the right one for ratios; every value must be above zero."""
    return float(np.exp(np.mean(np.log(np.asarray(values, dtype=np.float64)))))


def noise_floor(again: Estimate, least: float = 1.01) -> float:
    """Return the smallest factor that may be claimed after an A/A run: the reach of its interval from 1, at least ``least``."""
    return max(least, again.high, 1 / again.low)


def noise_between_runs(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the largest factor between two sides' times that noise between runs explains, or ``None`` if nothing is repeated.

    Each side gives the median of each of its runs of the same code. The estimator is the half-width of Student's two-sample 95 %
    interval for the difference of the mean logarithms, with one variance pooled over both sides, returned as a factor. It assumes
    that both sides are equally noisy in proportion, so that repeats of one side speak for the other too.

    More runs carry smaller claims. Where medians of runs scatter with a standard deviation of 1 %, two runs against one carry
    changes beyond 17 %, two against two beyond 4.4 %, three against three beyond 2.3 %, and five against five beyond 1.5 %.

    Source: Student's t over repeated executions, as Georges, Buytaert and Eeckhout, "Statistically rigorous Java performance
    evaluation" (2007), and Kalibera and Jones, "Rigorous benchmarking in reasonable time" (2013).
    """
    freedom = len(first) + len(second) - 2
    if freedom < 1:
        return None
    logs = [np.log(np.asarray(side, dtype=np.float64)) for side in (first, second)]
    pooled = sum(float(np.sum((side - side.mean()) ** 2)) for side in logs) / freedom
    error = math.sqrt(pooled * (1 / len(first) + 1 / len(second)))
    with np.errstate(over="ignore"):  # infinite noise carries no claim
        return float(np.exp(STUDENT[min(freedom, len(STUDENT)) - 1] * error))
