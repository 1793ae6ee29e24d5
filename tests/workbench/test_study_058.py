"""Tests of the study of the projection chain: the write-up's questions, configuration and sweep, and further shapes.

The operation ``projections`` is the input side of a layer of gated linear attention. The write-up is the text
whose figures the study's ``notes`` quote. ``RATES`` are made-up peaks of a device.
"""

from __future__ import annotations

import pytest

from onelaunch.operation import find_operation
from onelaunch.workbench.study.plan import plan_study
from onelaunch.workbench.study.read import load_study
from tests.workbench.ladder import RATES

# Batch and length (B, T) of the write-up's configuration, and of its sweep over T.
SWEEP = [(8, 4096), *((4, length) for length in (512, 1024, 2048, 4096))]


@pytest.fixture(scope="module")
def study(pytestconfig):
    return load_study(pytestconfig.rootpath / "studies" / "058-projection-chain.toml")


def test_shapes_are_the_write_ups_and_smaller_ones(study):
    full = study.at_scale("full")
    sizes = [tuple(shape.sizes[name] for name in ("B", "T", "D", "H")) for shape in full if not shape.options]
    assert sizes[: len(SWEEP)] == [(*each, 2048, 16) for each in SWEEP]
    assert {(length, inner) for _, length, inner, _ in sizes} >= {(128, 2048), (128, 1024), (4096, 1024)}
    assert all((shape.sizes["K"], shape.sizes["V"]) == (128, 128) for shape in full if not shape.options)


def test_criteria_named_everywhere_cover_every_shape(study):
    everywhere = [shape.name for shape in study.at_scale("full")]
    names = ("one launch is never slower than torch.compile", "training gains everywhere")
    asked = [each for each in study.criteria if each.name in names]
    assert [list(each.at) for each in asked] == [everywhere] * 2


def test_no_criterion_is_infeasible(study):
    plan = plan_study(study, RATES, "cpu", "full")
    assert plan.infeasible == {}
    traffic = find_operation("projections").cost(study.case(study.shapes[0]))  # the fewest bytes of a forward call
    assert traffic.bytes == 705757184  # 0.706 GB; by the write-up's arithmetic it was 0.672 GB
