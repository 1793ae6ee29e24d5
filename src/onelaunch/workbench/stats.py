"""Statistics over rounds: medians with their interval, paired ratios, geometric means. The only ones in the project."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onelaunch.workbench.result import Estimate

RESAMPLES = 2000
CONFIDENCE = 0.95
SEED = 40
"""Fixed: the same samples always give the same interval."""


def estimate(samples: Sequence[float]) -> Estimate:
    """The median of the samples with its 95 % bootstrap interval (percentiles of the medians of resamples).

    Deterministic. One sample gives an interval of no width: look at ``samples`` before believing an interval.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("an estimate needs at least one sample")
    values = np.asarray(samples, dtype=np.float64)
    draws = np.random.default_rng(SEED).integers(0, values.size, size=(RESAMPLES, values.size))
    medians = np.median(values[draws], axis=1)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(medians, [tail, 100 - tail])
    return Estimate(median=float(np.median(values)), low=float(low), high=float(high), samples=values.size)


def ratio(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """``a / b`` taken round by round, so that what both rounds shared (clocks, temperature) cancels.

    Where one has fewer rounds, the rounds that both have count.
    """
    return estimate([one / other for one, other in zip(a, b, strict=False)])


def unpaired_ratio(a: Estimate, b: Estimate) -> Estimate:
    """``a / b`` where no rounds were shared (other runs, other shapes): the interval is what both intervals leave open."""
    return Estimate(median=a.median / b.median, low=a.low / b.high, high=a.high / b.low, samples=min(a.samples, b.samples))


def mean_ratio(ratios: Sequence[Estimate]) -> Estimate:
    """The geometric mean of ratios; its interval as if all of them erred the same way, ``samples`` of the fewest."""
    return Estimate(
        median=geometric_mean([one.median for one in ratios]),
        low=geometric_mean([one.low for one in ratios]),
        high=geometric_mean([one.high for one in ratios]),
        samples=min(one.samples for one in ratios),
    )


def geometric_mean(values: Sequence[float]) -> float:
    """The mean for ratios; every value must be above zero."""
    return float(np.exp(np.mean(np.log(np.asarray(values, dtype=np.float64)))))


def noise_floor(again: Estimate, least: float = 1.01) -> float:
    """The smallest factor that may be claimed, from an A/A ratio: how far its interval reaches from 1, at least ``least``."""
    return max(least, again.high, 1 / again.low)
