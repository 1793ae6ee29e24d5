"""Tests of ``studies/decode-megakernel.toml``: its bounds on barriers match the plans, and its names its numbers."""

from __future__ import annotations

import re

import pytest

from onelaunch.decode.plan.levels import LEVELS, plan_for
from onelaunch.decode.step.contract import DIMENSIONS
from onelaunch.decode.step.reference import config_of
from onelaunch.workbench.study.read import load_study


@pytest.fixture(scope="module")
def study(pytestconfig):
    """Return the study. Its operation ``decode_step`` is one token of a decoder model at a position of the sequence."""
    return load_study(pytestconfig.rootpath / "studies" / "decode-megakernel.toml")


def test_bounds_on_barriers_match_the_plans(study):
    asked = {criterion.of: criterion for criterion in study.criteria if criterion.measure == "barriers"}
    # ``LEVELS`` are the optimization levels of the megakernel, each a variant with a plan of its own.
    # "graph" is left out: it has a launch per phase, and no criterion bounds its grid barriers.
    assert asked.keys() == LEVELS.keys() - {"graph"}
    for level, criterion in asked.items():
        (shape,) = study.shapes_of(criterion)
        # 132 CTAs: one for each SM of an H100 or H200.
        assert criterion.equals == plan_for(config_of(study.case(shape)), level, 132).barriers()


def test_tokens_per_second_in_names_match_microseconds_per_step(study):
    """A step makes one token. The regime ``running`` times consecutive steps."""
    named = [criterion for criterion in study.criteria if criterion.measure == "time"]
    assert len(named) == 5
    for criterion in named:
        said = int(re.search(r"([\d,]+) tokens/s", criterion.name)[1].replace(",", ""))
        assert 1e6 / criterion.at_most == pytest.approx(said, rel=1e-3)
        assert criterion.regime == "running"


def test_shapes_differ_only_as_their_names_say(study):
    models = {}
    for shape in study.at_scale("full"):
        # All sizes but the last, the position: shapes that share them and the option ``tied`` are of one model.
        sizes = tuple(shape.sizes[name] for name in DIMENSIONS[:-1])
        models.setdefault((sizes, shape.options.get("tied", True)), []).append(shape.name)
        assert shape.name.endswith(f"position {shape.sizes['position']}")
    # Qwen3-0.6B untied, 1.7B, and Qwen3-0.6B; each at so many positions.
    assert sorted(map(len, models.values())) == [2, 2, 8]
    for (_, tied), names in models.items():
        assert tied != any(name.startswith("untied") for name in names)
