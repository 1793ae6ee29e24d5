"""An operation with costs and tags that never runs, to test plans, criteria and decisions with numbers computed by hand.

It is a layer of a matrix product and two elementwise steps over ``[N, V]`` in float16. Per row and channel, three launches move
8 bytes, two move 6 and one moves 4. Importing this module registers it. :func:`measured` makes a result of measurements with
made-up times. Most tests of declared studies take only its :data:`RATES`, and ``tests/test_fuzz.py`` changes results and
declarations of it at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from onelaunch.operation import Case, Cost, Direction, Query, Variant, operation
from onelaunch.workbench import stats
from onelaunch.workbench.result import (
    Cell,
    ComponentError,
    Noise,
    Plan,
    Provenance,
    Result,
    StoredCeilings,
    Timing,
    Traffic,
    Verdict,
)
from onelaunch.workbench.study import Criterion, Shape, Study

RATES = StoredCeilings(
    copy_bytes_per_second=1e12,
    matrix_flops_per_second={"float16": 1e14, "bfloat16": 1e14, "float32": 1e13},
    launch_seconds=0.5e-6,
    measured_at="2026-11-20T12:00:00+00:00",
    software="made up",
)
"""Peak rates at which 1 MB takes 1 us, 100 MFLOP in float16 take 1 us, and a launch takes 0.5 us."""


class LadderCall(NamedTuple):
    """Argument of :func:`ladder`. It exists because an operation needs one; nothing is computed from it."""

    x: torch.Tensor

    def query(self) -> Query:
        return Query("ladder", str(self.x.device), self.x.dtype, tuple(self.x.shape))


@operation(
    dimensions=("N", "V"),
    outputs=("y",),
    bind=LadderCall,
    options={"kind": "plain", "masked": False},  # without effect; shapes of a study may name other values
    defaults={"cpu": ("three",), "cuda": ("one",)},
)
def ladder(x: torch.Tensor, *, variant: str = "auto") -> torch.Tensor:
    """Return twice ``x``. No test calls it: times and errors of its variants are made up, and bytes come from :func:`cost`."""
    return 2 * x


@ladder.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    # Without a variant, the cost is the least of any implementation: that of one launch.
    launches = variant.launches if variant is not None else 1
    # Passes over the N x V elements by number of launches: one read and one write, and one more for each further launch.
    # An unknown number of launches counts as three.
    passes = {3: 4, 2: 3, 1: 2}.get(launches or 3, 4) * (1 if direction == "forward" else 3)
    elements = case.sizes["N"] * case.sizes["V"]
    return Cost(flops=100 * elements, bytes=passes * elements * case.dtype.itemsize, launches=launches)


@ladder.queries
def query(case: Case, device: str, grad: bool) -> Query:
    return Query("ladder", device, case.dtype, (case.sizes["N"], case.sizes["V"]), grad)


def _register(name: str, **tags: Any) -> Variant:
    """Register a variant. Studies select variants by ``tags`` such as ``launches`` and ``fuses`` (names of fused steps)."""

    @ladder.variant(name, **tags)
    def run(call: LadderCall) -> tuple[torch.Tensor]:
        return (2 * call.x,)

    return run


_register("three", launches=3, fuses=(), gemm="own")
_register("three_library", launches=3, fuses=(), gemm="library")
_register("two", launches=2, fuses=("b", "c"), gemm="library")
_register("one", launches=1, fuses=("a", "b", "c"), gemm="own")
_register("forward_only", launches=1, fuses=("a", "b", "c"), gemm="own", carry="serial", backward=False)
# A variant of another project: its package is not installed, and its number of launches is not known.
_register("peer", requires="a_package_that_nobody_has")


@ladder.control("product", oracle=lambda x: 2 * x, cost=lambda case: Cost(0, 2 * case.sizes["N"] * case.sizes["V"], 1))
def product(call: LadderCall) -> torch.Tensor:
    """Stand for the matrix product alone: a control, which is timed beside the variants and never dispatched."""
    return 2 * call.x


MEGA = Shape(name="mega", dtype="float16", sizes={"N": 1000, "V": 1000})
"""Shape whose roofline bound at :data:`RATES` is 4 us by bytes (1 us by FLOPs): 8 MB for three launches, 6 for two, 4 for one."""

TINY = Shape(name="tiny", dtype="float32", scale="small", sizes={"N": 10, "V": 10})
"""Shape of small scale, for machines without a GPU. :data:`MEGA` is of full scale."""


def study(*criteria: Criterion, **more: Any) -> Study:
    """Return a study of all variants with ``three`` as the baseline; ``more`` replaces fields."""
    facts: dict[str, Any] = {
        "name": "ladder-study",
        "question": "Is one launch enough?",
        "operation": "ladder",
        "baseline": "three",
        "controls": ("product",),
        "shapes": (MEGA, TINY),
        "regimes": ("cold",),
    }
    return Study(**(facts | more), criteria=criteria)


def plan(of: Shape, variant: str, direction: Direction = "forward") -> Plan:
    """Return the plan of a variant or control. Its times are bytes over bandwidth alone, which FLOPs never exceed at MEGA."""
    case = study().case(of)
    own = ladder.controls[variant].cost(case) if variant in ladder.controls else ladder.cost(case, ladder.get(variant), direction)
    least = ladder.cost(case, None, direction)
    return Plan(
        flops=own.flops,
        bytes=own.bytes,
        least_bytes=least.bytes,
        launches=own.launches,
        floor_microseconds=1e6 * least.bytes / RATES.copy_bytes_per_second,
        planned_microseconds=1e6 * own.bytes / RATES.copy_bytes_per_second,
    )


def ok_cell(
    variant: str,
    time: float,
    *,
    of: Shape = MEGA,
    rounds: int = 20,
    spread: float = 0.0,
    error: float = 1e-4,
    counted: float | None = None,
    peak: int | None = None,
    launches: int | None = None,
    barriers: int | None = None,
    direction: Direction = "forward",
) -> Cell:
    """Return a measurement with a passed verdict.

    Args:
        variant: Name of the variant or control.
        time: Microseconds of a call.
        of: The shape.
        rounds: Number of rounds.
        spread: Fraction by which the rounds' times lie above and below ``time`` in turn.
        error: Norm-wise error of the output.
        counted: DRAM bytes that ncu counted; ``None`` for those of the plan, which are computed.
        peak: Peak memory of a call in bytes; ``None`` if not measured.
        launches: Counted launches of a call; ``None`` if not counted.
        barriers: Counted grid barriers of a call; ``None`` if not counted.
        direction: ``forward`` or ``forward_backward``.
    """
    values = tuple(time * (1 + spread * (-1) ** index) for index in range(rounds))
    planned = plan(of, variant, direction)
    by_arithmetic = Traffic(source="analytic", read=planned.bytes / 2, written=planned.bytes / 2)
    return Cell(
        shape=of.name,
        direction=direction,
        variant=variant,
        control=variant in ladder.controls,
        status="ok",
        plan=planned,
        verdict=Verdict(ok=True, components=(ComponentError(name="y", error=error, max_error=error, allowed=1e-3),)),
        timings=(Timing(regime="cold", microseconds=stats.estimate(values), rounds=values),),
        traffic=by_arithmetic if counted is None else Traffic(source="ncu", read=counted, written=0.0),
        peak_bytes=peak,
        launches=launches,
        barriers=barriers,
    )


def bad_cell(variant: str, status: Any, reason: str = "", *, of: Shape = MEGA, **more: Any) -> Cell:
    """Return a measurement without times, such as one that failed; ``more`` holds further fields of :class:`Cell`."""
    return Cell(shape=of.name, direction="forward", variant=variant, status=status, reason=reason, plan=plan(of, variant), **more)


def noise(floor: float = 1.01, of: Shape = MEGA, direction: Direction = "forward") -> Noise:
    """Return an A/A run (the baseline timed against itself) after which a factor below ``floor`` may not be claimed."""
    same = stats.estimate([1.0] * 20)
    return Noise(shape=of.name, direction=direction, regime="cold", ratio=same, floor=floor)


def measured(declared: Study, *cells: Cell, floor: float | None = 1.01, scale: str = "full", **more: Any) -> Result:
    """Return a result of these measurements on a made-up GPU, without judged criteria or a decision.

    Args:
        declared: The study.
        cells: Measurements, from :func:`ok_cell` and :func:`bad_cell`.
        floor: Noise floor of an A/A run at each shape and direction with a measurement; ``None`` for no A/A run.
        scale: Scale of the run: ``full`` or ``small``.
        more: Further fields of the result.
    """
    places = dict.fromkeys((cell.shape, cell.direction) for cell in cells)
    runs = [] if floor is None else [noise(floor, declared.shape(shape), direction) for shape, direction in places]
    facts: Mapping[str, Any] = {
        "device": "Some GPU",
        "slug": "some-gpu",
        "architecture": "sm_90",
        "driver": "1.0",
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "commit": "abc1234",
        "date": "2026-11-20T12:00:00+00:00",
    }
    return Result(
        study=declared,
        study_digest=declared.digest(),
        provenance=Provenance(**facts, scale=scale, rounds=20),
        ceilings=RATES,
        cells=cells,
        noise=tuple(runs),
        **more,
    )
