"""Tests of the study of a whole layer of gated linear attention: the write-up's configuration, fla's own, a decoding step.

The write-up is the text whose figures the study's ``notes`` quote. fla is flash-linear-attention, the peer. ``RATES`` are
made-up peaks of a device.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import pytest

from onelaunch.device.hardware import Ceilings
from onelaunch.workbench.measure import rotation, sampling, timing
from onelaunch.workbench.result import ProbeReport
from onelaunch.workbench.run import Steps, run_study
from onelaunch.workbench.study.plan import plan_study
from onelaunch.workbench.study.read import load_study
from onelaunch.workbench.verify import repeated
from tests.workbench.ladder import RATES

# Batch and length (B, T) of the write-up's configuration, and of its sweep over T.
SWEEP = [(8, 4096), *((4, length) for length in (512, 1024, 2048, 4096))]
# Names of the shapes with the write-up's configuration and with fla's.
TARGETS = ("8x4096x2048", "8x4096x2048-fla")


@pytest.fixture(scope="module")
def study(pytestconfig):
    return load_study(pytestconfig.rootpath / "studies" / "058-gla-layer.toml")


def test_shapes_are_the_write_ups_flas_smaller_ones_and_steps(study):
    full = study.at_scale("full")
    sizes = [tuple(shape.sizes.values()) for shape in full]  # (B, T, D, H, K, V)
    assert sizes[: len(SWEEP)] == [(*each, 2048, 16, 128, 128) for each in SWEEP]
    assert study.shape("8x4096x2048-fla").sizes == {"B": 8, "T": 4096, "D": 2048, "H": 16, "K": 64, "V": 128}
    assert {(length, width) for _, length, width, *_ in sizes} >= {(128, 2048), (4096, 1024), (512, 1024)}
    steps = [shape for shape in full if shape.sizes["T"] == 1]
    assert [shape.sizes["B"] for shape in steps] == [1, 16]
    for step in steps:
        assert step.options == {"initial_state": True, "final_state": True}
        assert study.directions_at(step) == ("forward",)


def test_criteria_select_variants_at_every_shape_they_name(study):
    faster, _, forward, training, few = study.criteria
    assert (faster.at, faster.of, faster.over, faster.direction) == (TARGETS, "packed", "fla", "forward_backward")
    assert (forward.of, training.of, few.of) == ("composed", "packed", "composed")
    full = study.at_scale("full")
    assert set(forward.at) == {shape.name for shape in full}
    assert set(training.at) == {shape.name for shape in full if shape.sizes["T"] > 1}
    assert set(few.at) == {shape.name for shape in full if shape.sizes["T"] == 1}


def test_no_criterion_is_infeasible(study):
    plan = plan_study(study, RATES, "cpu", "full")  # made-up peaks, and no GPU needed
    assert plan.infeasible == {}
    assert {cell.variant for cell in plan.cells} == {"unfused", "compiled", "composed", "packed", "packed_states", "fla"}


@pytest.mark.thorough
def test_the_study_runs_without_a_gpu(study, tmp_path, monkeypatch):
    """The run is of small scale, with short samples, made-up peaks, and two of the variants."""
    monkeypatch.setitem(timing.WARM_UP_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(sampling, "CPU_SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(repeated, "SECONDS", 0.05)
    monkeypatch.setattr(rotation, "CACHES", 0)  # two input sets instead of as many as exceed the caches
    quick = study.model_copy(update={"variants": ("unfused", "composed"), "regimes": ("eager",), "criteria": ()})
    # Other tests judge these variants at the probes, which takes seconds.
    steps = Steps(
        ceilings=lambda _: Ceilings(1e12, {"float32": 1e13}, 1e-6, "2026-11-20T12:00:00+00:00", "made up"),
        probe=lambda *_: ProbeReport(passed=1),
    )
    result = run_study(quick, device="cpu", rounds=3, save_to=tmp_path / "result.json", count=False, steps=steps)
    assert {(cell.variant, cell.direction): cell.status for cell in result.cells} == {
        (variant, direction): "ok" for variant in ("unfused", "composed") for direction in ("forward", "forward_backward")
    }
