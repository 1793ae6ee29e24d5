"""Tests of the pictures of the decode plan: the files are current, and the page says what the plan says."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from onelaunch.decode.plan.phases import PRODUCTS
from onelaunch.device.architectures import HOPPER_SMS
from tests.test_documents import ROOT, two_readers
from tools import draw_decode_plan as drawn

PAGE = ROOT / "docs" / "decode.md"


@pytest.fixture(scope="module")
def made():
    """Return the files of the command, by their names."""
    return {path.stem: text for path, text in drawn.files(ROOT).items() if path.suffix == ".html"}


def test_the_committed_pictures_are_up_to_date_and_on_the_page(made):
    text = PAGE.read_text(encoding="utf-8")
    for name in made:
        assert f":file: pictures/decode/{name}.html" in text
        assert f"](pictures/decode/{name}.svg)" in two_readers.for_github(text)
    for path, picture in drawn.files(ROOT).items():
        assert path.read_text(encoding="utf-8") == picture, f"{path.name}: run python -m tools.draw_decode_plan"


def test_pictures_are_well_formed_and_lie_inside(made):
    for text in made.values():
        for svg in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}svg"):
            _, _, width, height = map(float, svg.get("viewBox").split())
            for box in svg.iter("{http://www.w3.org/2000/svg}rect"):
                assert float(box.get("x")) >= -0.01
                assert float(box.get("x")) + float(box.get("width")) <= width + 0.01
                assert float(box.get("y")) + float(box.get("height")) <= height


def test_a_reader_waits_for_the_ctas_that_make_its_words():
    """The numbers of the page: partial results of 8 or 16 CTAs of a head, and vectors that all CTAs of a layer make."""
    plan = drawn.plan("streaming", 8)
    ops = [phase.op for phase in plan.layer]
    layer_ctas = len(drawn.working(plan.phase("qkv")))
    assert layer_ctas == 128
    for op in ("qkv", "gate_up", "down"):
        assert len(drawn.sources(plan, ops.index(op), drawn.READER)) == layer_ctas
    for used, count in ((1, 1), (8, 8), (16, 16)):
        found = drawn.sources(drawn.plan("streaming", used), ops.index("o"), drawn.READER)
        assert len(found) == count
        assert drawn.READER in found
    for cta in range(layer_ctas):  # any other CTA looks alike
        assert len(drawn.sources(plan, ops.index("o"), cta)) == 8


def test_contexts_are_those_of_the_plan():
    plan = drawn.plan("streaming")
    assert (plan.splits, plan.splits * plan.query_merge) == (8, 16) == tuple(drawn.CONTEXTS)[1:]
    assert {
        1: f"below {plan.positions}",
        8: f"{plan.positions} to {plan.merge_from - 1}",
        16: f"from {plan.merge_from} on",
    } == drawn.CONTEXTS


def test_the_page_states_the_weights_and_words_of_the_plan():
    """The table of the page has a row for each phase of ``streaming``."""
    text, plan = PAGE.read_text(encoding="utf-8"), drawn.plan("streaming")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*)$", text, re.MULTILINE))
    for phase in plan.layer:
        if phase.op in PRODUCTS:
            assert f"| {drawn.chunks(plan, phase.op, drawn.READER) * 16} KB |" in rows[phase.name], phase.name
    assert f"{drawn.polled_words(plan.phase('qkv').assignments[0])} tagged words" in rows["qkv"]
    assert max(drawn.chunks(plan, "lm_head", cta) for cta in range(HOPPER_SMS)) == 144
    assert "144 chunks of 16 KB at most" in rows["lm_head"]


def test_the_ring_of_the_page_is_that_of_the_kernel(made):
    (stages,) = re.findall(r"Ring in shared memory: (\d+) chunks", made["stream"])
    assert f"{stages} chunks for this model" in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_all_ctas_together_read_the_weights_once():
    plan = drawn.plan("streaming")
    config = plan.config
    layer = config.hidden_size * (config.query_size + 2 * config.num_key_value_heads * config.head_dim)
    layer += config.query_size * config.hidden_size + 3 * config.hidden_size * config.intermediate_size
    weights = 2 * (config.num_hidden_layers * layer + config.vocab_size * config.hidden_size)
    assert sum(drawn._token_bytes(cta) for cta in range(HOPPER_SMS)) == weights
