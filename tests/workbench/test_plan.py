"""Tests of plans: roofline bounds of measurements, reasons not to run, and criteria that are infeasible by arithmetic.

The operation is the made-up one of ``ladder.py`` at the shape ``MEGA`` (N = V = 1000, float16): three launches move 8 MB, two 6
and one 4. ``RATES`` are made-up peaks: 1 TB/s, 100 TFLOP/s in float16 and 10 in float32, 0.5 us a launch. ``prose`` compares a
text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it does not compare one
of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``TINY`` is a shape of small scale.
"""

from __future__ import annotations

import pytest

from onelaunch.operation import Cost
from onelaunch.workbench.study import Criterion, Shape
from onelaunch.workbench.study.plan import bandwidth, floor_microseconds, infeasibility, plan_study, scale_for
from tests.workbench.ladder import MEGA, RATES, TINY, study


def planned(variant, direction="forward", declared=None, device="cuda:0"):
    """Return the plan of the first measurement of a variant at full scale, by default in a study of both directions."""
    found = plan_study(declared or study(directions=("forward", "forward_backward")), RATES, device, "full")
    return next(cell for cell in found.cells if (cell.variant, cell.direction) == (variant, direction))


@pytest.mark.parametrize(
    ("variant", "bytes_", "microseconds"), [("three", 8e6, 8 + 1.5), ("two", 6e6, 6 + 1.0), ("one", 4e6, 4 + 0.5)]
)
def test_a_plan_is_bytes_over_bandwidth_plus_launches(variant, bytes_, microseconds):
    plan = planned(variant).plan
    assert plan.bytes == bytes_
    assert plan.planned_microseconds == pytest.approx(microseconds)
    assert plan.floor_microseconds == pytest.approx(4.0)  # 4 MB at 1 TB/s take 4 us; its 100 MFLOP take 1 us
    assert plan.least_bytes == 4e6
    assert plan.flops == 1e8


def test_the_matrix_rate_of_the_dtype_sets_the_roofline_bound_if_slower():
    single = Shape(name="single", dtype="float32", sizes=MEGA.sizes)  # 100 MFLOP at 10 TFLOP/s take 10 us, 8 MB take 8 us
    assert planned("one", declared=study(shapes=(single,))).plan.floor_microseconds == pytest.approx(10.0)


# Peaks with a measured bandwidth of kernels that only read, above that of copies.
READS = RATES.model_copy(update={"read_bytes_per_second": 1.25e12})


@pytest.mark.parametrize(
    ("written", "rates", "microseconds"),
    [
        (0, READS, 0.8),
        (99_999, READS, 0.8),
        (100_000, READS, 1.0),
        (1_000_000, READS, 1.0),
        (None, READS, 1.0),
        (0, RATES, 1.0),
        (0, READS.model_copy(update={"read_bytes_per_second": 0.5e12}), 1.0),
    ],
    ids=["reads", "just under a tenth", "a tenth", "writes", "not said", "no read rate measured", "reads measured slower"],
)
def test_the_read_bandwidth_bounds_calls_that_write_less_than_a_tenth(written, rates, microseconds):
    cost = Cost(0, 1_000_000, written=written)  # no FLOPs, and 1 MB of which this part is written
    assert floor_microseconds(cost, "float16", rates) == pytest.approx(microseconds)


def test_an_empty_case_has_no_roofline_bound():
    assert floor_microseconds(Cost(0, 0, written=0), "float16", READS) == 0
    assert bandwidth(0, 0, READS) == 1e12


def test_a_plan_states_the_bytes_written():
    """This operation's cost does not say how many are written, and the keys are then left out of the stored plan."""
    assert (planned("one").plan.written, planned("one").plan.least_written) == (None, None)
    assert planned("one").plan.model_dump().keys().isdisjoint({"written", "least_written"})


def test_the_backward_pass_has_a_plan_of_its_own():
    """Forward and backward together move three times the bytes of a forward call."""
    assert planned("one", "forward_backward").plan.bytes == 12e6


def test_a_shape_is_planned_in_its_own_directions():
    once = Shape(name="once", sizes=MEGA.sizes, directions=("forward",))
    cells = plan_study(study(directions=("forward", "forward_backward"), shapes=(once, MEGA)), RATES, "cpu", "full").cells
    assert {(cell.shape.name, cell.direction) for cell in cells} == {
        ("once", "forward"), (MEGA.name, "forward"), (MEGA.name, "forward_backward"),
    }  # fmt: skip


def test_variants_that_cannot_run_are_known_before_the_run(prose):
    assert planned("forward_only").status is None
    backward = planned("forward_only", "forward_backward")
    assert backward.status == "unsupported"
    prose(backward.reason)
    peer = planned("peer")
    assert peer.status == "not_installed"
    assert "a_package_that_nobody_has" in peer.reason
    prose(peer.reason)


@pytest.mark.parametrize("name", ["two", "product"])
def test_variants_that_a_shape_skips_are_planned_but_not_run(name, prose):
    left_out = planned(name, declared=study(shapes=(MEGA.model_copy(update={"skip": (name,)}),)))
    assert left_out.status == "unsupported"
    prose(left_out.reason)
    assert left_out.plan == planned(name).plan
    assert planned(name).status is None


def test_the_baseline_comes_first_and_controls_last_and_forward_only():
    cells = plan_study(study(baseline="two", directions=("forward", "forward_backward")), RATES, "cpu", "full").cells
    forward = [cell.variant for cell in cells if cell.direction == "forward"]
    backward = [cell.variant for cell in cells if cell.direction == "forward_backward"]
    assert (forward[0], backward[0], forward[-1]) == ("two", "two", "product")
    assert "product" not in backward
    control = next(cell for cell in cells if cell.control)
    assert control.plan.floor_microseconds == pytest.approx(2.0)  # the control's own bytes, not the operation's


def test_only_the_shapes_of_the_scale_are_planned():
    assert {cell.shape.name for cell in plan_study(study(), RATES, "cpu", "small").cells} == {"tiny"}
    assert plan_study(study(), RATES, "cpu", "full").shapes == (MEGA,)
    assert (scale_for("cpu"), scale_for("cuda")) == ("small", "full")


def traffic(at_least, **more):
    """Return the criterion that the baseline ``three`` moves at least so many times the DRAM bytes of ``one``."""
    return Criterion(name="traffic", measure="dram_bytes_ratio", of="one", at_least=at_least, **more)


def test_fewer_bytes_than_the_minimum_are_infeasible_with_the_arithmetic(prose):
    why = infeasibility(study(), traffic(2.5))
    prose(why)
    assert infeasibility(study(), traffic(2.0)) is None
    assert infeasibility(study(), traffic(1.6, over="two")) is not None


def test_the_most_wasteful_of_several_baselines_counts():
    assert infeasibility(study(), traffic(1.9, over={"launches": [2, 3]})) is None
    assert infeasibility(study(), traffic(1.9, over={"launches": [1, 2]})) is not None


def test_infeasible_at_too_many_shapes_for_in_at_least():
    half = Shape(name="half", dtype="float16", sizes={"N": 1, "V": 1})  # the ratio of bytes is 2 at every size
    declared = study(shapes=(MEGA, half))
    assert infeasibility(declared, traffic(2.5, in_at_least=1)) is not None
    assert infeasibility(declared, traffic(1.5, in_at_least=1)) is None


def test_a_mean_of_bytes_is_infeasible_by_the_mean_of_the_arithmetic(prose):
    half = Shape(name="half", dtype="float16", sizes={"N": 10, "V": 1})  # the ratio of bytes is 2 at every size
    declared = study(shapes=(MEGA, half))
    assert infeasibility(declared, traffic(1.9, combine="geomean")) is None
    why = infeasibility(declared, traffic(2.5, combine="geomean"))
    prose(why)
    at_most = Criterion(name="t", measure="dram_bytes_ratio", of="one", combine="geomean", at_most=0.1)
    assert infeasibility(declared, at_most) is None


def test_a_bound_below_the_minimum_of_bytes_is_infeasible(prose):
    def least(at_most):
        return Criterion(name="least", measure="dram_bytes_over_least", of="one", at_most=at_most)

    assert infeasibility(study(), least(1.6)) is None
    why = infeasibility(study(), least(0.9))
    prose(why)


def test_a_time_below_the_roofline_bound_is_infeasible(prose):
    def floor(at_most):
        return Criterion(name="floor", measure="time_over_floor", of="one", at_most=at_most)

    assert infeasibility(study(), floor(1.5)) is None
    prose(infeasibility(study(), floor(0.9)))


def test_criteria_are_checked_at_every_scale():
    """The criterion is about ``mega``, a shape of full scale, and a small run is planned."""
    declared = study(traffic(2.5))
    assert set(plan_study(declared, RATES, "cpu", "small").infeasible) == {"traffic"}


@pytest.mark.parametrize(
    ("dtype", "asked", "feasible"),
    [
        ("float16", 5e-3, True),
        ("float16", 2e-4, True),
        ("float16", 1e-4, False),
        ("bfloat16", 2e-3, True),
        ("bfloat16", 5e-4, False),
        ("float32", 1e-6, True),
        ("float32", 1e-9, False),
    ],
)
def test_an_error_below_the_rounding_of_the_dtype_is_infeasible(dtype, asked, feasible):
    declared = study(shapes=(Shape(name="s", dtype=dtype, sizes=TINY.sizes),))
    why = infeasibility(declared, Criterion(name="e", measure="error", of="one", at_most=asked))
    assert (why is None) == feasible
    assert why is None or dtype in why


def test_the_error_of_one_rounding_is_feasible():
    import torch

    exact = torch.randn(100_000, dtype=torch.float64)
    # A quarter of the unit roundoff is the smallest error that a criterion may ask for.
    for dtype, finest in ((torch.float16, 0.25 * 2.0**-11), (torch.bfloat16, 0.25 * 2.0**-8)):
        error = (exact.to(dtype).double() - exact).norm() / exact.norm()
        assert finest < error


def test_times_are_not_infeasible_before_they_are_measured():
    assert infeasibility(study(), Criterion(name="t", measure="speedup", of="one", at_least=1e6)) is None
    assert infeasibility(study(), Criterion(name="t", measure="time_ratio", of="one", over="product", at_most=1e-6)) is None
