"""Tests of the study of the dual GEMM (the operation ``swiglu``): the write-up's expectations, at its and other shapes.

The write-up is the text whose figures the study's ``notes`` quote. A shape (M, N, K) has M tokens, N hidden and K input
channels. ``RATES`` are made-up peaks of a device.
"""

from __future__ import annotations

import pytest

from onelaunch.operation import find_operation
from onelaunch.workbench.study.plan import plan_study
from onelaunch.workbench.study.read import load_study
from tests.workbench.ladder import RATES

WRITE_UP = ((512, 4096, 7168), (256, 4096, 7168), (256, 3072, 4096), (512, 3072, 7168))
# Numbers of tokens M at the other sizes of the write-up's first shape: those of decoding, and one of many.
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 8192)
MODELS = ((1, 3072, 1024), (512, 3072, 1024), (1, 12288, 4096), (512, 12288, 4096))
"""Shapes of the MLPs of models with 0.6 and 8 billion parameters, for one token and for many."""

# End of a shape's name by the format of the weights.
SUFFIXES = {"dense": "", "fp8": "-fp8", "nvfp4_weights": "-nvfp4"}


@pytest.fixture(scope="module")
def study(pytestconfig):
    return load_study(pytestconfig.rootpath / "studies" / "dual-gemm-swiglu.toml")


def sizes(shape):
    return tuple(shape.sizes[name] for name in "MNK")


def form(shape):
    """Return the format of a shape's weights: ``dense`` (16 bits), ``fp8`` or ``nvfp4_weights``."""
    return shape.options.get("format", "dense")


def test_shapes_are_the_write_ups_those_of_decoding_and_of_models(study):
    full = study.at_scale("full")
    dense = [sizes(shape) for shape in full if form(shape) == "dense"]
    assert tuple(dense) == (*WRITE_UP, *((rows, 4096, 7168) for rows in COUNTS), *MODELS)
    for quantized in ("fp8", "nvfp4_weights"):
        assert {sizes(shape) for shape in full if form(shape) == quantized} <= set(dense)  # a baseline exists for the comparison
    for shape in study.shapes:
        assert shape.options["stacked"]  # one product with both weights is possible
        named = "x".join(map(str, sizes(shape))) + SUFFIXES[form(shape)]
        assert shape.name == (f"small-{named}" if shape.scale == "small" else named)


def test_one_launch_is_compared_with_every_unfused_variant(study):
    for criterion in study.criteria:
        # The tag ``hands`` names the products that a variant writes to memory before the gate is applied: it is unfused.
        if criterion.over == {"hands": "up"}:
            assert {"three_node", "wide"} <= set(study.select(criterion.over))
            assert not set(study.select(criterion.of)) & set(study.select(criterion.over))
    (everywhere,) = [criterion for criterion in study.criteria if criterion.name == "one launch is never slower"]
    dense = [shape.name for shape in study.at_scale("full") if form(shape) == "dense"]
    assert [shape.name for shape in study.shapes_of(everywhere)] == dense


def test_training_is_compared_with_peers(study):
    (training,) = [criterion for criterion in study.criteria if criterion.direction == "forward_backward"]
    assert set(study.select(training.over)) == {"eager", "compiled", "liger", "liger_fused"}


def test_constant_weights_are_promised_at_decoding_shapes(study):
    """The option promises that nothing writes the weights, as in inference. Shapes of up to 128 tokens count as decoding."""
    assert {shape.name for shape in study.at_scale("full") if shape.options.get("constant_weights")} == {
        shape.name for shape in study.at_scale("full") if shape.sizes["M"] <= 128
    }


def test_candidates_of_criteria_are_no_peers(study):
    """No criterion has a peer as its candidate (``of``): peers declare no number of launches. The baseline needs no package."""
    operation = find_operation("swiglu")
    assert operation.get(study.baseline).capabilities.requires is None
    for criterion in study.criteria:
        assert all(operation.get(name).launches == 1 for name in study.select(criterion.of) if name != "two_node")


def test_quantized_weights_are_compared_with_the_same_work_in_16_bits(study):
    for criterion in study.criteria:
        if criterion.over_at is not None:
            (own,) = study.shapes_of(criterion)
            assert sizes(own) == sizes(study.shape(criterion.over_at))
            assert form(study.shape(criterion.over_at)) == "dense"


def test_no_criterion_is_infeasible_or_needs_a_quantized_pytorch_product(study):
    """The control, one product with both weights by PyTorch, cannot take NVFP4 weights. Peaks are made up; no GPU is needed."""
    plan = plan_study(study, RATES, "cpu", "full")
    assert plan.infeasible == {}
    for cell in plan.cells:
        if cell.control:
            assert (cell.status is None) == (form(cell.shape) != "nvfp4_weights")
