"""Tests of statistics: medians, confidence intervals, ratios of paired rounds, geometric means, and noise as a factor.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in
``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test
or the parameter of an entry is gone.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelaunch.workbench import stats

# Lists of times in microseconds.
TIMES = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=40)


@given(TIMES)
def test_the_median_lies_in_its_interval_and_the_interval_among_the_samples(samples):
    found = stats.estimate(samples)
    assert min(samples) <= found.low <= found.median <= found.high <= max(samples)
    assert found.median == pytest.approx(float(np.median(samples)))
    assert found.samples == len(samples)


@given(TIMES)
def test_the_same_samples_give_the_same_interval(samples):
    assert stats.estimate(samples) == stats.estimate(list(samples))


def test_the_interval_covers_the_true_median_about_95_times_in_100():
    generator = np.random.default_rng(1)
    found = [stats.estimate(generator.normal(10.0, 1.0, 25).tolist()) for _ in range(300)]
    covered = sum(one.low <= 10.0 <= one.high for one in found) / len(found)
    assert 0.90 <= covered <= 0.99


def test_one_slow_round_does_not_move_the_median():
    steady = stats.estimate([10.0, 10.1, 9.9, 10.0, 10.05, 9.95, 10.0])
    disturbed = stats.estimate([10.0, 10.1, 9.9, 10.0, 10.05, 9.95, 1000.0])
    assert disturbed.median == pytest.approx(steady.median, rel=0.01)


def test_an_estimate_without_samples_is_refused(prose):
    with prose.raises(ValueError):
        stats.estimate([])


def test_ratios_are_paired_by_round():
    drift = np.linspace(1.0, 3.0, 20)  # the clock rate falls to a third during the measurement
    found = stats.ratio((2.0 * drift).tolist(), drift.tolist())
    assert (found.low, found.median, found.high) == pytest.approx((2.0, 2.0, 2.0))
    unpaired = stats.estimate((2.0 * drift).tolist())
    assert unpaired.high / unpaired.low > 1.2, "the drift must be large enough for this test to prove anything"


def test_a_ratio_uses_only_shared_rounds():
    assert stats.ratio([2.0, 4.0, 6.0], [1.0, 2.0]).samples == 2


def test_the_geometric_mean_of_a_ratio_and_its_inverse_is_one():
    assert stats.geometric_mean([4.0, 0.25]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("ratios", "floor"),
    [([1.0, 1.0, 1.0], 1.01), ([1.1, 1.1, 1.1], 1.1), ([0.8, 0.8, 0.8], 1.25)],
)
def test_the_noise_floor_is_the_deviation_of_an_a_a_ratio_from_one(ratios, floor):
    assert stats.noise_floor(stats.estimate(ratios)) == pytest.approx(floor)


def test_a_ratio_without_shared_rounds_combines_both_intervals():
    one, other = stats.estimate([9.0, 10.0, 11.0]), stats.estimate([4.0, 5.0, 6.0, 5.0])
    found = stats.unpaired_ratio(one, other)
    assert found.median == pytest.approx(2.0)
    assert (found.low, found.high) == pytest.approx((one.low / other.high, one.high / other.low))
    assert found.samples == 3


def test_the_error_of_a_mean_assumes_fully_correlated_errors():
    found = stats.mean_estimate([stats.estimate([1.9, 2.0, 2.1]), stats.estimate([7.6, 8.0, 8.4, 8.0])])
    assert found.median == pytest.approx(4.0)
    assert (found.low, found.high) == pytest.approx((0.95 * 4, 1.05 * 4), rel=0.01)
    assert found.samples == 3


@pytest.mark.parametrize(
    "counts", [(2, 1), *(pytest.param(each, marks=pytest.mark.thorough) for each in ((2, 2), (3, 3), (5, 4))), (6, 6)]
)
def test_the_noise_between_runs_has_95_percent_coverage(counts):
    """Draw medians of runs that scatter by 3 %, and count how often their means differ by more than the noise."""
    generator = np.random.default_rng(2)
    beyond, tries = 0, 4000
    for _ in range(tries):
        sides = [np.exp(generator.normal(2.0, 0.03, count)) for count in counts]
        noise = stats.noise_between_runs(*(side.tolist() for side in sides))
        assert noise is not None
        gain = stats.geometric_mean(sides[0].tolist()) / stats.geometric_mean(sides[1].tolist())
        beyond += max(gain, 1 / gain) > noise
    assert 0.035 <= beyond / tries <= 0.065


def test_the_noise_between_runs_is_that_of_a_two_sample_t_interval():
    """Logarithms 0 and 0.02 against 1 and 1.02 have a pooled standard deviation of 0.0141 and two degrees of freedom."""
    found = stats.noise_between_runs(np.exp([0.0, 0.02]).tolist(), np.exp([1.0, 1.02]).tolist())
    # 4.303 is the two-sided 95 % quantile of Student's t; 0.0141 squared is 0.0002, times 1/2 + 1/2 for the two means.
    assert found == pytest.approx(np.exp(4.303 * 0.0002**0.5))


def test_without_repeats_the_noise_between_runs_is_unknown():
    assert stats.noise_between_runs([1.0], [2.0]) is None
    assert stats.noise_between_runs([1.0, 1.0], [2.0]) == 1.0
    assert stats.noise_between_runs([1e-300, 1e300], [2.0]) == float("inf")
