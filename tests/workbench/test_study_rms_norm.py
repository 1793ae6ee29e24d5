"""Tests of the study of ``rms_norm``: shapes of models, and fla and Liger as peers.

``RATES`` are made-up peaks of a device.
"""

from __future__ import annotations

import itertools

import pytest

from onelaunch.model_studies.declare import find_model_study
from onelaunch.operation import find_operation
from onelaunch.workbench.study.plan import plan_study
from onelaunch.workbench.study.read import load_study
from tests.workbench.ladder import RATES


@pytest.fixture(scope="module")
def study(pytestconfig):
    return load_study(pytestconfig.rootpath / "studies" / "rms-norm.toml")


def test_shapes_are_named_by_their_sizes_and_hold_those_of_models(study):
    full = study.at_scale("full")
    for shape in full:
        autocast = "autocast" in shape.groups
        form = {"none": "-alone", "float32": "" if autocast else "-float32"}.get(shape.options.get("residual"), "")
        form = f"-autocast{form}" if autocast else form
        assert shape.name == f"{shape.sizes['M']}x{shape.sizes['D']}{form}"
        assert (shape.directions == ("forward",)) == (shape.sizes["M"] <= 16)
    plain = {(shape.sizes["M"], shape.sizes["D"]) for shape in full if not shape.options}
    assert set(itertools.product((1, 16, 8192, 32768), (1024, 2048, 4096, 8192))) <= plain


def test_norms_under_autocast_are_those_of_the_models_that_are_trained_so(study):
    """Their forms are those of ``test_norms.py``, where a model runs under autocast."""
    found = {(shape.sizes["M"], shape.sizes["D"]) for shape in study.at_scale("full") if "autocast" in shape.groups}
    models = [model for model in find_model_study("in-model").models if model.precision == "autocast"]
    assert found == {(model.tokens, model.width) for model in models}


def test_liger_is_asked_only_where_it_can_run(study):
    operation = find_operation("rms_norm")
    for shape in study.at_scale("full"):
        flags = operation.query(study.case(shape), "cuda:0").flags
        assert ("liger" in shape.skip) == ("float32_residual" in flags)
    for criterion in study.criteria:
        if criterion.over == "liger":
            assert not [shape.name for shape in study.shapes_of(criterion) if "liger" in shape.skip]


def test_training_moves_twice_the_bytes_of_the_forward_pass(study):
    operation, (shape,) = find_operation("rms_norm"), [each for each in study.shapes if each.name == "8192x4096"]
    forward, both = (operation.cost(study.case(shape), None, direction).bytes for direction in ("forward", "forward_backward"))
    assert both == pytest.approx(2 * forward, rel=1e-3)
    assert plan_study(study, RATES, "cpu", "full").infeasible == {}
