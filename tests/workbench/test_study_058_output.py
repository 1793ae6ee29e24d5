"""Tests of the study of the output chain: the write-up's open questions, at the projection chain's shapes.

A decoding step is added to these shapes. The output chain is the norm, gate and output projection of a layer of gated linear
attention. The write-up is the text whose figures the study's ``notes`` quote. ``RATES`` are made-up peaks of a device.
"""

from __future__ import annotations

import pytest

from onelaunch.operation import find_operation
from onelaunch.workbench.study.plan import plan_study
from onelaunch.workbench.study.read import load_study
from tests.workbench.ladder import RATES

NAMES = ("B", "T", "D", "H", "V")
"""Sizes that both chains have."""
STEPS = {(rows, 1, 128 * heads, heads, 128) for rows, heads in ((16, 16), (1, 16), (32, 16), (64, 16), (16, 8), (64, 8))}
"""Sizes of the shape with one token of each of 16 sequences."""


@pytest.fixture(scope="module")
def studies(pytestconfig):
    """Return the studies of the output chain and of the projection chain by name."""
    folder = pytestconfig.rootpath / "studies"
    return {name: load_study(folder / f"058-{name}-chain.toml") for name in ("output", "projection")}


@pytest.fixture(scope="module")
def study(studies):
    return studies["output"]


def sizes(shape):
    return tuple(shape.sizes[name] for name in NAMES)


def test_shapes_are_those_of_the_projection_chain_and_decoding_steps(studies):
    ours, theirs = studies["output"], studies["projection"]
    # Shapes with options are left out: the projection chain alone has them.
    for scale, more in (("full", STEPS), ("small", set())):
        assert {sizes(shape) for shape in ours.at_scale(scale)} == more | {
            sizes(shape) for shape in theirs.at_scale(scale) if not shape.options
        }
    for shape in ours.shapes:
        assert not shape.options
        assert ours.directions_at(shape) == (("forward",) if sizes(shape) in STEPS else ours.directions)
    for name in ("directions", "regimes", "rounds", "baseline"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_silu_is_applied_to_the_gate(study):
    """The flag ``activated`` would mean that the gate comes with SiLU applied."""
    query = find_operation("output_chain").query(study.case(study.shapes[0]), "cpu")
    assert "gate" in query.flags
    assert "activated" not in query.flags


def test_criteria_about_fused_select_only_own_variants(study):
    for criterion in study.criteria:
        if isinstance(criterion.of, dict):
            # ``norm_gate`` fuses norm and gate in one launch, ``prologue`` the whole chain.
            assert study.select(criterion.of) == ("norm_gate", "prologue")
        else:
            assert (criterion.of, criterion.over) == ("prologue", "norm_gate")


def test_criteria_named_everywhere_cover_every_shape_of_their_direction(study):
    asked = [criterion for criterion in study.criteria if "everywhere" in criterion.name or "never" in criterion.name]
    assert len(asked) == 4
    for criterion in asked:
        runs = [shape for shape in study.at_scale("full") if criterion.direction in study.directions_at(shape)]
        assert list(study.shapes_of(criterion)) == runs


def test_no_criterion_is_infeasible(study):
    assert plan_study(study, RATES, "cpu", "full").infeasible == {}
    operation, case = find_operation("output_chain"), study.case(study.shapes[0])
    # Bytes of a forward call.
    moved = {name: operation.cost(case, operation.get(name)).bytes for name in ("unfused", "norm_gate")}
    assert operation.cost(case).bytes == 411042048
    assert moved == {"unfused": 1216348416, "norm_gate": 679477504}  # 1.79 times fewer; 1.67 are asked
