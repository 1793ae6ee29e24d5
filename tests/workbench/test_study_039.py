"""Tests of study 039, of chunkwise gated linear attention (the operation ``gla``): its shapes, criteria and what it skips.

They also compare it with 039-overlap, which asks for the share of overlap at its shapes.

The write-up is the text whose figures the study's ``notes`` quote. The study asks its questions again, and adds shapes for
which other projects publish figures. ``RATES`` are made-up peaks of a device.
"""

from __future__ import annotations

import pytest

from onelaunch.operation import find_operation
from onelaunch.workbench.study.plan import plan_study
from onelaunch.workbench.study.read import load_study
from tests.workbench.ladder import RATES

FIELD = ((1, 8192, 96, 128), (2, 16384, 16, 128), (4, 2048, 16, 128), (4, 4096, 64, 128), (8, 2048, 32, 256), (8, 1024, 8, 64))
"""The shapes [B, T, H, D] that fla and Helion publish figures for. D is the width of keys and of values, here K = V."""


@pytest.fixture(scope="module")
def study(pytestconfig):
    return load_study(pytestconfig.rootpath / "studies" / "039-chunkwise-gla.toml")


def sizes(shape):
    """Return (B, T, H, D) of a shape."""
    assert shape.sizes["K"] == shape.sizes["V"]
    return tuple(shape.sizes[name] for name in ("B", "T", "H", "K"))


# Options of a decoding step, which reads a state and returns the next.
DECODING = {"initial_state": True, "final_state": True}
# End of a shape's name by the names of its options. With ``decay_per`` "head", a head has one decay instead of one per channel.
SUFFIXES = {(): "", ("decay_per",): "-head", tuple(DECODING): "-decode"}


def test_shapes_are_the_write_ups_the_fields_long_ones_and_single_steps(study):
    full = study.at_scale("full")
    by_channel = [sizes(shape) for shape in full if not shape.options]
    by_head = [sizes(shape) for shape in full if shape.options == {"decay_per": "head"}]
    assert by_channel[:3] == [(4, 1024, 32, 64), (4, 2048, 32, 64), (4, 4096, 32, 64)]
    assert tuple(by_channel[3:9]) == FIELD == tuple(by_head)
    assert by_channel[9:] == [(8, 4096, 16, 128), (1, 32768, 16, 128), (1, 131072, 16, 128)]
    steps = [sizes(shape) for shape in full if shape.options == DECODING]
    assert steps == [(1, 1, 32, 128), (16, 1, 32, 128), (64, 1, 32, 128)]
    assert len(full) == len(by_channel) + len(by_head) + len(steps)
    for shape in study.shapes:
        named = "x".join(map(str, sizes(shape))) + SUFFIXES[tuple(shape.options)]
        assert shape.name == (f"small-{named}" if shape.scale == "small" else named)


def test_deciding_criteria_are_about_own_variants_only(study):
    # ``requires`` names the package of another project that a variant needs.
    for criterion in study.criteria:
        for name in study.select(criterion.of):
            assert find_operation("gla").get(name).capabilities.requires is None


def test_one_long_sequence_is_compared_with_the_same_work(study):
    """The criterion compares times at two shapes (``at`` and ``over_at``), which have equally many tokens."""
    (long,) = [criterion for criterion in study.criteria if criterion.over_at]
    (own,), other = study.shapes_of(long), study.shape(long.over_at)
    assert own.sizes["B"] * own.sizes["T"] == other.sizes["B"] * other.sizes["T"]
    assert {name: own.sizes[name] for name in "HKV"} == {name: other.sizes[name] for name in "HKV"}


def test_step_loops_over_long_sequences_are_skipped_on_a_gpu(study):
    """Thousands of launches per call would make the study take hours.

    The study declares these skips for shapes of full scale, which are those for a GPU. ``recurrent`` is a loop over steps.
    """
    plan = plan_study(study, RATES, "cpu", "full")  # made-up peaks, and no GPU needed
    assert plan.infeasible == {}
    left_out = {(cell.shape.name, cell.variant) for cell in plan.cells if "left out" in cell.reason}
    for cell in plan.cells:
        if cell.variant == "recurrent":
            assert ((cell.shape.name, "recurrent") in left_out) == (cell.shape.sizes["T"] > 1024)
    assert ("1x131072x16x128", "chunked") in left_out


def test_the_share_of_overlap_is_asked_at_the_same_shapes(study, pytestconfig):
    """All but single steps, which ``hopper`` does not take; the write-up's also with one decay per head."""
    overlap = load_study(pytestconfig.rootpath / "studies" / "039-overlap.toml")
    asked = {shape.name: (shape.sizes, shape.options, shape.dtype) for shape in overlap.shapes}
    before = {shape.name: (shape.sizes, shape.options, shape.dtype) for shape in study.at_scale("full")}
    steps = {name for name in before if name.endswith("-decode")}
    added = asked.keys() - before.keys()
    assert {name: asked[name] for name in asked.keys() - added} == {name: before[name] for name in before.keys() - steps}
    assert added == {f"4x{length}x32x64-head" for length in (1024, 2048, 4096)}
    for name in added:
        sizes_of, _, dtype = before[name.removesuffix("-head")]
        assert asked[name] == (sizes_of, {"decay_per": "head"}, dtype)
    assert overlap.directions == study.directions


def test_the_control_of_overlap_differs_from_hopper_in_nothing_else():
    """The workbench explains a saving by a variant whose tags differ in one factor."""
    hopper, control = (find_operation("gla").get(name) for name in ("hopper", "hopper_in_turns"))
    assert control.tags == {**hopper.tags, "overlap": False}
