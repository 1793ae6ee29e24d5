"""Made-up but realistic results, for tests of code that reads results. Only the figures in ``NOTES`` were ever measured.

A result holds shapes, one :class:`Cell` (measurement) per shape, direction and variant, and criteria with their outcomes. The
outcomes' sentences and numbers are made up as well, and were not computed from the times. Tests of reports, of stored results and
of ``onelaunch study`` use them.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable
from typing import Any

from onelaunch.workbench.result import (
    Cell,
    ComponentError,
    Decision,
    Estimate,
    Noise,
    Outcome,
    Plan,
    Provenance,
    Regime,
    Result,
    Saving,
    Status,
    StoredCeilings,
    Timing,
    Traffic,
    Verdict,
)
from onelaunch.workbench.study import Criterion, Shape, Study

MIB = 2**20
GPU_CEILINGS = StoredCeilings(  # stand-ins for the measured peaks of a device, which set the roofline bounds
    copy_bytes_per_second=4.02e12,
    matrix_flops_per_second={"float16": 6.86e14, "bfloat16": 7.01e14, "float32": 5.1e13},
    launch_seconds=0.56e-6,
    measured_at="2026-11-20T12:00:00+00:00",
    software="torch 2.11.0, 12.8",
)
CPU_CEILINGS = StoredCeilings(
    copy_bytes_per_second=1.9e10,
    matrix_flops_per_second={"float16": 1.4e11, "bfloat16": 1.4e11, "float32": 1.4e11},
    launch_seconds=1.1e-6,
    measured_at="2026-11-20T12:00:00+00:00",
    software="torch 2.13.0+cpu, CPU",
)

SWEEP = ((1, 512), (4, 512), (4, 2048), (8, 2048), (16, 512), (16, 1024), (16, 2048))
"""Batch and length (B, T) of the shapes of :func:`proceed_on_gpu`, without the shape ``wide``."""

LAUNCHES: dict[str, int | None] = {
    "eager": None,
    "chunked": None,
    "compiled": None,
    "three_launch": 3,
    "three_launch_cublas": 3,
    "semi_fused": 2,
    "fused_stepwise": 1,
    "fused_chunked": 1,
    "fla": 3,
}
"""Kernel launches of one call, by variant; ``None`` if a compiler or PyTorch decides the number."""

SLOWER = {
    "eager": 4000.0,
    "chunked": 60.0,
    "compiled": 9.0,
    "three_launch": 4.3,
    "three_launch_cublas": 3.9,
    "semi_fused": 2.4,
    "fused_stepwise": 90.0,
    "fused_chunked": 1.6,
    "fla": 14.0,
    "gemm": 1.1,
}
"""Factors of the roofline bound, by variant or control. A forward call takes this many bounds and 2 us more."""

NOTES = "The write-up reported 1.61x for two launches over three (T4, B=4 T=2048), never repeated; its own sweep has 0.97x there."
"""The author's notes of the study, which reports show as history."""


def shape(name: str, scale: Any = "full", dtype: str = "float16", **sizes: int) -> Shape:
    return Shape(name=name, dtype=dtype, scale=scale, sizes=sizes)


def estimate(median: float, spread: float = 0.01, samples: int = 20) -> Estimate:
    """Return a median whose interval reaches ``spread`` of it to both sides."""
    return Estimate(median=median, low=median * (1 - spread), high=median * (1 + spread), samples=samples)


def timing(regime: Regime, microseconds: float, rounds: int = 20, spread: float = 0.01) -> Timing:
    """Return times that scatter evenly by ``spread`` around ``microseconds``, the same ones at every call."""
    noise = random.Random(f"{regime}{microseconds}")
    values = tuple(microseconds * noise.uniform(1 - spread, 1 + spread) for _ in range(rounds))
    middle = statistics.median(values)
    least = max(min(values), min(middle, microseconds * (1 - spread / 3)))  # an interval lies within the rounds
    most = min(max(values), max(middle, microseconds * (1 + spread / 3)))
    bounds = (least, most)
    return Timing(
        regime=regime, microseconds=Estimate(median=middle, low=bounds[0], high=bounds[1], samples=rounds), rounds=values
    )


def plan(of: Shape, launches: int | None, ceilings: StoredCeilings) -> Plan:
    """Return the plan of a variant: one GEMM of B*T rows, and two further inputs of the output's size (log-decay and gate).

    An element has 2 bytes. Each launch after the first adds a round trip of the output through memory.
    An unknown number of launches counts as three.
    """
    tokens, depth, width = of.sizes["B"] * of.sizes["T"], of.sizes["D"], of.sizes["V"]
    least = 2 * (tokens * (depth + 3 * width) + depth * width)
    own = least + 2 * 2 * tokens * width * ((launches or 3) - 1)
    flops = 2 * tokens * depth * width
    rate = ceilings.matrix_flops_per_second[of.dtype]
    floor, planned = (1e6 * max(bytes_ / ceilings.copy_bytes_per_second, flops / rate) for bytes_ in (least, own))
    return Plan(
        flops=flops,
        bytes=own,
        least_bytes=least,
        launches=launches,
        floor_microseconds=floor,
        planned_microseconds=planned + 1e6 * (launches or 3) * ceilings.launch_seconds,
    )


def verdict(error: float = 3.1e-4, names: Iterable[str] = ("y", "final_state")) -> Verdict:
    """Return a passed verdict with this norm-wise error of each output or gradient."""
    components = tuple(
        ComponentError(
            name=name,
            error=error,
            max_error=20 * error,
            allowed=7.2e-4,
            error_by_position=tuple(error * factor for factor in (0.9, 1.0, 1.0, 1.1)),
        )
        for name in names
    )
    return Verdict(ok=True, components=components)


def ok_cell(
    of: Shape,
    variant: str,
    *,
    ceilings: StoredCeilings = GPU_CEILINGS,
    direction: Any = "forward",
    counted: bool = False,
    regimes: tuple[Regime, ...] = ("cold", "warm", "eager"),
    rounds: int = 20,
    control: bool = False,
) -> Cell:
    """Return the measurement of a correct variant that was timed.

    Args:
        of: The shape.
        variant: Name of a variant or control, a key of :data:`SLOWER`, which sets its time.
        ceilings: Peaks of the device, for the roofline bound.
        direction: ``forward`` or ``forward_backward``. The latter takes 2.7 times as long.
        counted: Whether its DRAM bytes were counted by ncu. Otherwise they are those of the plan.
        regimes: Regimes with a time: ``cold`` and ``warm`` caches, and ``eager`` calls from Python.
        rounds: Number of rounds of each time.
        control: Whether this is a control. Its verdict then holds one output, ``gemm``.
    """
    planned = plan(of, LAUNCHES.get(variant, 1), ceilings)
    base = planned.floor_microseconds * SLOWER[variant] * (2.7 if direction == "forward_backward" else 1.0) + 2.0
    factors = {"cold": 1.0, "warm": 0.8, "eager": 1.0}
    added = {"cold": 0.0, "warm": 0.0, "eager": 14.0}
    names = ("y", "final_state") if direction == "forward" else ("y", "final_state", "grad x", "grad weight", "grad log_decay")
    traffic = Traffic(source="analytic", read=planned.bytes * 0.8, written=planned.bytes * 0.2)
    if counted:
        traffic = Traffic(
            source="ncu", read=planned.bytes * 0.85, written=planned.bytes * 0.19, note="cold caches (--cache-control all)"
        )
    return Cell(
        shape=of.name,
        direction=direction,
        variant=variant,
        control=control,
        status="ok",
        plan=planned,
        verdict=verdict(names=("gemm",) if control else names),
        timings=tuple(timing(regime, base * factors[regime] + added[regime], rounds) for regime in regimes),
        traffic=traffic,
        peak_bytes=planned.bytes - planned.least_bytes + 2 * MIB,
    )


def bad_cell(of: Shape, variant: str, status: Status, reason: str, direction: Any = "forward", **more: Any) -> Cell:
    """Return a measurement that failed or did not run; ``more`` holds further fields of :class:`Cell`."""
    return Cell(shape=of.name, direction=direction, variant=variant, status=status, reason=reason, **more)


def provenance(device: str, slug: str, architecture: str, **more: Any) -> Provenance:
    """Return the provenance of a full-scale run on a device; ``more`` replaces fields."""
    versions = {"python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0", "cuda": "12.8", "onelaunch": "0.1.0", "fla": "0.4.1"}
    facts: dict[str, Any] = {
        "driver": "580.65",
        "versions": versions,
        "commit": "d1e54a6",
        "date": "2026-11-20T12:10:00+00:00",
        "clocks": {"sm_mhz": 1980.0, "sm_mhz_lowest": 1965.0, "memory_mhz": 3201.0, "power_w": 412.0, "temperature_c": 51.0},
        "command": "onelaunch study run 040-linear-rnn --scale full",
        "scale": "full",
        "rounds": 20,
    }
    return Provenance(device=device, slug=slug, architecture=architecture, **(facts | more))


def study(shapes: tuple[Shape, ...], criteria: tuple[Criterion, ...], **more: Any) -> Study:
    """Return a declaration like that of the study 040-linear-rnn; ``more`` replaces fields."""
    facts: dict[str, Any] = {
        "name": "040-linear-rnn",
        "question": "Do two launches, or one, beat three for a linear-RNN layer, and why?",
        "operation": "linear_rnn",
        "baseline": "three_launch_cublas",
        "variants": tuple(LAUNCHES),
        "controls": ("gemm",),
        "notes": NOTES,
    }
    return Study(shapes=shapes, criteria=criteria, **(facts | more))


# Criteria of the results below. "gemm" is the control, and "target" a shape.
FASTER = Criterion(name="fused is faster", measure="speedup", of={"launches": [1, 2]}, at="target", at_least=1.3)
TRAFFIC = Criterion(name="traffic halves", measure="dram_bytes_ratio", of="fused_chunked", at="target", at_least=2.0)
CLOSE = Criterion(name="close to the GEMM", measure="time_ratio", of="fused_chunked", over="gemm", at=("target",), at_most=3.0)
EXACT = Criterion(name="exact enough", measure="error", of="fused_chunked", at_most=5e-3)
"""Criterion on the norm-wise error. It names no shape, so it is judged at all of full scale."""


def proceed_on_gpu() -> Result:
    """Return a complete run on a GPU.

    Bytes were counted at one shape, two variants did not run everywhere, and one criterion was infeasible.
    """
    shapes = [shape("target", B=4, T=2048, D=256, V=64)]
    shapes += [shape(f"{b}x{t}", B=b, T=t, D=256, V=64) for b, t in SWEEP if (b, t) != (4, 2048)]
    shapes += [shape("wide", B=8, T=4096, D=2048, V=2048)]
    cells = []
    for of in shapes:
        for direction in ("forward", "forward_backward"):
            for variant in LAUNCHES:
                if variant == "eager" and of.name == "wide":
                    cells.append(bad_cell(of, variant, "out_of_memory", "needs 152 GiB, 139 GiB are here", direction))
                elif variant == "fused_stepwise" and direction == "forward_backward":
                    cells.append(bad_cell(of, variant, "unsupported", "has no backward pass", direction))
                else:
                    cells.append(ok_cell(of, variant, direction=direction, counted=of.name == "target"))
        cells.append(ok_cell(of, "gemm", control=True))
    declared = study(tuple(shapes), (FASTER, TRAFFIC, CLOSE, EXACT), directions=("forward", "forward_backward"))
    outcomes = (
        Outcome(
            criterion=FASTER,
            status="met",
            evidence="fused_chunked is 2.21x [2.19, 2.23] as fast as three_launch_cublas at target (cold, 20 rounds).",
            values={"target": estimate(2.21)},
            best_of=3,
        ),
        Outcome(
            criterion=TRAFFIC, status="infeasible", evidence="At most 1.57x fewer bytes is possible at target, 2x were asked."
        ),
        Outcome(
            criterion=CLOSE,
            status="met",
            evidence="fused_chunked takes 1.38x [1.36, 1.40] the time of gemm at target (cold, 20 rounds).",
            values={"target": estimate(1.38)},
        ),
        Outcome(
            criterion=EXACT,
            status="met",
            evidence="The largest norm-wise error of fused_chunked is 3.1e-04 over 8 shapes.",
            values={of.name: estimate(3.1e-4, samples=1) for of in shapes},
        ),
    )
    saving = Saving(
        shape="target",
        direction="forward",
        variant="fused_chunked",
        saved_microseconds=4.19,
        by_bytes=1.04,
        by_launches=1.12,
        unexplained=2.03,
        traffic_source="ncu",
    )
    return Result(
        study=declared,
        study_digest=declared.digest(),
        provenance=provenance("NVIDIA H200", "nvidia-h200", "sm_90"),
        ceilings=GPU_CEILINGS,
        cells=tuple(cells),
        noise=tuple(
            Noise(shape=of.name, direction="forward", regime="cold", ratio=estimate(1.001, 0.008), floor=1.014) for of in shapes
        ),
        outcomes=outcomes,
        decision=Decision(
            kind="proceed",
            because=(
                "Every feasible criterion is met: 3 of 4; 1 is infeasible and says nothing.",
                "fused_chunked is 2.21x [2.19, 2.23] as fast as three_launch_cublas at target (cold, 20 rounds, best of 3).",
            ),
            savings=(saving,),
            unexplained=(
                "2.03 µs of the 4.19 µs that fused_chunked saves at target are explained by neither bytes nor launches.",
            ),
        ),
    )


def interrupted_on_cpu() -> Result:
    """Return a run on a CPU that was stopped by hand after two of four shapes, the second with 7 of 10 rounds.

    It has no counters and no judged criterion.
    """
    shapes = tuple(shape(f"small-{t}", "small", "float32", B=2, T=t, D=64, V=64) for t in (128, 512, 1024, 2048))
    variants = ("eager", "chunked", "compiled", "fused_chunked")
    cells = [
        ok_cell(of, variant, ceilings=CPU_CEILINGS, rounds=7 if of is shapes[1] else 10)
        for of in shapes[:2]
        for variant in variants[:2]
    ]
    cells += [bad_cell(of, "compiled", "error", "torch.compile found no C++ compiler: install g++") for of in shapes[:2]]
    cells += [bad_cell(of, "fused_chunked", "unsupported", "needs a GPU") for of in shapes[:2]]
    cells += [
        bad_cell(of, variant, "interrupted", "stopped by hand before it ran", plan=plan(of, 1, CPU_CEILINGS))
        for of in shapes[2:]
        for variant in variants
    ]
    faster = Criterion(name="chunked is faster", measure="speedup", of="chunked", at="small-2048", at_least=3.0)
    declared = study(shapes, (faster,), baseline="eager", variants=variants, controls=(), notes="", name="cpu-chunks")
    return Result(
        study=declared,
        study_digest=declared.digest(),
        provenance=provenance("AMD EPYC 9654", "cpu", "x86_64", driver="", clocks={}, scale="small", rounds=10),
        ceilings=CPU_CEILINGS,
        cells=tuple(cells),
        outcomes=(
            Outcome(criterion=faster, status="not_measured", evidence="small-2048 was not reached before the interruption."),
        ),
        decision=Decision(kind="measure_more", because=("1 of 1 criteria is not measured.",)),
        interrupted=True,
    )


def wrong_and_invalid() -> Result:
    """Return a run from which nothing can be concluded.

    One variant is wrong, one is faster than its roofline bound, and one is not installed.
    """
    of = shape("target", B=4, T=2048, D=256, V=64)
    wrong = Verdict(
        ok=False,
        components=(ComponentError(name="y", error=math.inf, max_error=math.inf, allowed=7.2e-4),),
        problems=("y has NaN in 12 % of its elements: they were never written.",),
    )
    fast = ok_cell(of, "fused_chunked").model_copy(
        update={
            "status": "invalid",
            "reason": "0.61 µs is below the floor of 1.83 µs: the time is not believed",
            "timings": (timing("cold", 0.61),),
        }
    )
    cells = (
        ok_cell(of, "three_launch_cublas"),
        bad_cell(of, "semi_fused", "incorrect", "y is wrong", verdict=wrong, plan=plan(of, 2, GPU_CEILINGS)),
        fast,
        bad_cell(of, "fla", "not_installed", "needs the package fla: pip install flash-linear-attention"),
    )
    declared = study((of,), (FASTER,), variants=("three_launch_cublas", "semi_fused", "fused_chunked", "fla"), controls=())
    return Result(
        study=declared,
        study_digest=declared.digest(),
        provenance=provenance("NVIDIA H200", "nvidia-h200", "sm_90"),
        ceilings=GPU_CEILINGS,
        cells=cells,
        outcomes=(
            Outcome(criterion=FASTER, status="not_measured", evidence="No correct variant with 1 or 2 launches was timed."),
        ),
        decision=Decision(kind="debug", because=("semi_fused is incorrect at target: y has NaN in 12 % of its elements.",)),
    )


def nothing_ran() -> Result:
    """Return a run in which every measurement failed and nothing was decided."""
    of = shape("only", B=1, T=64, D=32, V=32)
    declared = study((of,), (), variants=("three_launch_cublas",), controls=(), notes="")
    return Result(
        study=declared,
        study_digest=declared.digest(),
        provenance=provenance("NVIDIA H200", "nvidia-h200", "sm_90"),
        ceilings=GPU_CEILINGS,
        cells=(bad_cell(of, "three_launch_cublas", "error", "RuntimeError: CUDA error: an illegal memory access"),),
    )


def largest() -> Result:
    """Return the largest of these results: nine variants at twenty shapes."""
    shapes = tuple(shape(f"T{64 * index}", B=2, T=64 * index, D=256, V=64) for index in range(1, 21))
    declared = study(shapes, (), controls=())
    return Result(
        study=declared,
        study_digest=declared.digest(),
        provenance=provenance("NVIDIA H200", "nvidia-h200", "sm_90"),
        ceilings=GPU_CEILINGS,
        cells=tuple(ok_cell(of, variant) for of in shapes for variant in LAUNCHES),
        decision=Decision(kind="measure_more", because=("No criterion was declared.",)),
    )


ALL = (proceed_on_gpu, interrupted_on_cpu, wrong_and_invalid, nothing_ran, largest)
"""The functions above that make results, for tests that run once for each."""
