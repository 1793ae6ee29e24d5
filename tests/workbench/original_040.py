"""The original write-up 040 as a result of the workbench: with the numbers that it measured, or with those that it lacked.

The write-up fused a linear-RNN layer's GEMM, scan and gate on a Tesla T4, and decided to proceed. Its figures are in
``fixtures/040-original.json``. Only ``test_original_040.py`` uses this module. It checks that the workbench does not decide to
proceed from these figures, and that each missing or contradictory figure alone prevents it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onelaunch.workbench import stats
from onelaunch.workbench.decide.criteria import evaluate
from onelaunch.workbench.decide.decision import decide
from onelaunch.workbench.result import Cell, ComponentError, Noise, Provenance, Result, StoredCeilings, Timing, Traffic, Verdict
from onelaunch.workbench.study import Criterion, Shape, Study
from onelaunch.workbench.study.plan import infeasibility, plan_study

FIGURES: dict[str, Any] = json.loads((Path(__file__).parent / "fixtures" / "040-original.json").read_text())
DEVICE = FIGURES["device"]
CEILINGS = StoredCeilings(
    copy_bytes_per_second=DEVICE["copy_bytes_per_second"],
    matrix_flops_per_second={"float16": DEVICE["matrix_flops_per_second"]},
    launch_seconds=DEVICE["launch_seconds"],
    measured_at="2026-02-01T00:00:00+00:00",
    software="data sheet",
)
TARGET = "4x2048"
"""Shape (B x T) of the write-up's headline. Its sweep over shapes holds the same shape again, with other times."""


def study(*, ratio: float) -> Study:
    """Return the write-up's declaration.

    Args:
        ratio: How many times fewer DRAM bytes ``semi_fused`` has to move than the baseline.
    """
    criteria = FIGURES["criteria"]
    shapes = [
        Shape(name=f"{row['B']}x{row['T']}", dtype="float16", sizes={"B": row["B"], "T": row["T"], "D": 256, "V": 64})
        for row in FIGURES["sweep"]
    ]
    return Study(
        name="040-original",
        question="Do two launches, or one, beat three?",
        operation="linear_rnn",
        baseline="three_launch",
        variants=("eager", "three_launch", "three_launch_cublas", "semi_fused", "fused_stepwise"),
        regimes=("cold",),
        shapes=tuple(shapes),
        criteria=(
            Criterion(
                name="faster", measure="speedup", of={"launches": [1, 2]}, at=TARGET, at_least=criteria["speedup_at_least"]
            ),
            Criterion(name="correct", measure="error", of="semi_fused", at=TARGET, at_most=criteria["error_at_most"]),
            Criterion(name="traffic", measure="dram_bytes_ratio", of="semi_fused", at=TARGET, at_least=ratio),
        ),
    )


def original(*, steady: bool = False, counted: bool = False, control: float | None = None, ratio: float | None = None) -> Result:
    """Return the write-up's numbers as a result, judged and decided. Without arguments they are as it reported them.

    Args:
        steady: Pretend that the headline was measured in twenty equal rounds with an A/A noise of 1 %. In truth the write-up's
            own sweep measured that shape again: two rounds, with a baseline that differs from itself 1.62-fold.
        counted: Pretend that bytes were counted, and equal those of the arithmetic.
        control: Milliseconds of ``three_launch_cublas`` (the library's product, scan and gate in three launches), had they been
            measured. ``None``: they were not, as in the write-up.
        ratio: Bound on bytes to use in place of the write-up's 2.0.
    """
    declared = study(ratio=ratio or FIGURES["criteria"]["dram_bytes_ratio_at_least"])
    plan = plan_study(declared, CEILINGS, "cuda:0", "full")
    cells = tuple(
        cell
        for planned in plan.cells
        if (cell := _cell(planned, _rounds(planned.shape.name, planned.variant, steady, control), counted)) is not None
    )
    baseline = _rounds(TARGET, "three_launch", steady, control)
    again = stats.ratio(baseline[::-1], baseline)  # the write-up measured the same kernel at the same shape with 1.38 and 0.85 ms
    noise = Noise(shape=TARGET, direction="forward", regime="cold", ratio=again, floor=stats.noise_floor(again))
    result = Result(
        study=declared,
        study_digest=declared.digest(),
        provenance=Provenance(
            device=DEVICE["name"],
            slug=DEVICE["slug"],
            architecture=DEVICE["architecture"],
            driver="",
            versions={},
            commit="",
            date="2026-02-01T00:00:00+00:00",
            scale="full",
        ),
        ceilings=CEILINGS,
        cells=cells,
        noise=(noise,),
    )
    refuted = {c.name: why for c in declared.criteria if (why := infeasibility(declared, c)) is not None}
    judged = result.model_copy(update={"outcomes": evaluate(result, refuted)})
    return judged.model_copy(update={"decision": decide(judged)})


def _rounds(shape: str, variant: str, steady: bool, control: float | None) -> tuple[float, ...]:
    """Return a variant's times at a shape in microseconds: those reported, unless ``steady`` or ``control`` replace them."""
    rows = [FIGURES["headline"]] if shape == TARGET else []
    if not (steady and rows):
        rows += [row for row in FIGURES["sweep"] if f"{row['B']}x{row['T']}" == shape]
    times = tuple(1e3 * row[variant] for row in rows if variant in row)
    if variant == "three_launch_cublas" and control is not None and shape == TARGET:
        times = (1e3 * control,)
    return 20 * times if steady and shape == TARGET else times


def _cell(planned: Any, rounds: tuple[float, ...], counted: bool) -> Cell | None:
    """Return the measurement of a planned variant, or ``None`` if ``rounds`` is empty."""
    if not rounds:
        return None
    error = FIGURES["norm_errors"].get(planned.variant, 3e-4)  # it reported none for three_launch_cublas
    half = planned.plan.bytes / 2
    return Cell(
        shape=planned.shape.name,
        direction="forward",
        variant=planned.variant,
        status="ok",
        plan=planned.plan,
        verdict=Verdict(ok=True, components=(ComponentError(name="y", error=error, max_error=0.0078, allowed=1e-3),)),
        timings=(Timing(regime="cold", microseconds=stats.estimate(rounds), rounds=rounds),),
        traffic=Traffic(source="ncu" if counted else "analytic", read=half, written=half),
    )
