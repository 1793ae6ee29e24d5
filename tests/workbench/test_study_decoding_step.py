"""Tests of the studies of single steps of decoding: their shapes can run in one launch on Hopper GPUs, and are few rows.

The GPUs are pretended (``tests/devices.py``).
"""

from __future__ import annotations

import pytest

from onelaunch.workbench.study.read import load_study
from tests.devices import HOPPERS, forget, pretend

STEPS = {"040-decoding-step": "fused_few_rows", "058-decoding-step": "one_launch"}
"""Variant in one launch by study."""

pytest.importorskip("triton", reason="without Triton, kernels refuse every call")


@pytest.fixture(params=STEPS)
def study(request, pytestconfig):
    return load_study(pytestconfig.rootpath / "studies" / f"{request.param}.toml")


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_every_shape_runs_in_one_launch(study, gpu, monkeypatch):
    device = pretend(HOPPERS[gpu], monkeypatch)
    try:
        for shape in study.at_scale("full"):
            operation, case = study.operation_at(shape), study.case(shape)
            assert operation.get(STEPS[study.name]).why_not(operation.query(case, device)) is None, shape.name
    finally:
        monkeypatch.undo()
        forget()


def test_shapes_are_steps_with_states_of_at_most_64_rows(study):
    """Those of the group ``stateless`` have none, since fla's layer cannot take them; only its criterion asks for them alone."""
    shapes = study.at_scale("full")
    assert all(shape.sizes["B"] * shape.sizes["T"] <= 64 for shape in shapes)
    stateless = {shape.name for shape in shapes if "stateless" in shape.groups}
    for shape in shapes:
        options = study.case(shape).options
        states = [options.get(name, False) for name in ("initial_state", "final_state")]
        assert states == [shape.name not in stateless] * 2, shape.name
    assert {shape.sizes["B"] for shape in shapes if shape.sizes["T"] == 1 and shape.name not in stateless} >= {1, 16, 64}
    assert [each.over for each in study.criteria if each.at is not None and "stateless" in each.at] == ["fla"] * bool(stateless)


def test_bounds_are_those_that_were_asked_for(study):
    bounds = {each.at[0]: each.at_most for each in study.criteria if each.measure == "time_over_floor"}
    asked = {"040-decoding-step": {"1x1": 1.5, "16x1": 1.5}, "058-decoding-step": {"1x1": 1.45, "16x1": 1.25}}
    assert bounds == asked[study.name]
