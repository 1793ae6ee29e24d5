"""Tests of the pictures of data flow: bytes and launches are those of the operations, and the committed files are current."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch

from onelaunch.device.architectures import HOPPER_SMS
from onelaunch.ops.gla import configure_hopper, gla
from onelaunch.ops.gla_layer.cost import parts_of
from onelaunch.ops.output_chain import output_chain
from onelaunch.ops.projections import projections
from tests.test_documents import ROOT, two_readers
from tools import draw_data_flow, drawing
from tools.data_flows import flows

FLOWS = {flow.operation.name: flow for flow in flows()}
each_panel = pytest.mark.parametrize(
    ("flow", "panel"),
    [pytest.param(flow, panel, id=f"{name} {panel.variant}") for name, flow in FLOWS.items() for panel in flow.panels],
)


def cost_of(flow, panel):
    """Return the forward cost of a panel's variant; of a composition the sum of the costs of its parts."""
    variants = flow.parts.get(panel.variant)
    if variants is None:
        return flow.operation.cost(flow.case, flow.operation.get(panel.variant), "forward")
    owners = (projections, gla, output_chain)
    costs = [owners[at].cost(case, owners[at].get(variants[at]), "forward") for case, at in parts_of(flow.case)]
    return sum(costs[1:], costs[0])


@each_panel
def test_the_bytes_of_the_arrows_are_those_of_the_cost(flow, panel):
    cost = cost_of(flow, panel)
    again = sum(tensor.bytes for tensor in panel.uncounted)
    assert panel.read + panel.written == cost.bytes + again
    assert panel.written == cost.written


@each_panel
def test_the_launches_are_those_that_the_variant_states(flow, panel):
    stated = flow.operation.get(panel.variant).launches
    if stated is not None:  # otherwise PyTorch decides, or the parts do
        assert sum(launch.times for launch in panel.launches) == stated


@each_panel
def test_each_tensor_is_written_before_it_is_read(flow, panel):
    written = {tensor for launch in panel.launches for tensor in launch.writes}
    known = {tensor for launch in panel.launches for tensor in launch.reads} - written
    for launch in panel.launches:
        assert set(launch.reads) <= known
        known |= set(launch.writes)
    assert {panel.kind(tensor) for tensor in known} >= {"argument", "result"}
    assert set(panel.intermediates) <= written


def test_every_fused_variant_moves_fewer_bytes():
    for flow in FLOWS.values():
        first, second = flow.panels
        assert second.read + second.written < first.read + first.written


def test_time_is_not_cut_at_the_shape_of_gla():
    """Where T is cut, another launch may come first, which the picture does not show."""
    heads, chunks = FLOWS["gla"].case.sizes["B"] * FLOWS["gla"].case.sizes["H"], FLOWS["gla"].case.sizes["T"] // 64
    times = configure_hopper.chunk_times(128, scalar=False, wide=False, store_states=False)
    again = configure_hopper.recomputed_chunk(128, scalar=False, wide=False)
    assert configure_hopper.pass_groups(heads, chunks, HOPPER_SMS, times, again) == 2  # all 128 values in one CTA
    assert configure_hopper.pass_segments(heads, chunks, HOPPER_SMS, times.two, again.two).count == 1


def test_the_scans_carry_their_state_from_cta_to_cta(monkeypatch):
    """With more channels each CTA would loop over time, and there would be no words between CTAs."""
    pytest.importorskip("triton", reason="the launches of the scans import Triton")
    from onelaunch.kernels.scan import launch as scan

    monkeypatch.setattr(scan, "processors", lambda device: HOPPER_SMS)
    for name in ("gated_scan", "linear_rnn"):
        sizes = FLOWS[name].case.sizes
        assert scan.sequential_tiles(torch.device("cuda"), sizes["B"], sizes["V"]) is None


def test_the_committed_pictures_are_up_to_date():
    made = draw_data_flow.files(ROOT)
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m tools.draw_data_flow"
    assert set(made) == set((ROOT / draw_data_flow.FOLDER).iterdir())


@pytest.mark.parametrize("name", FLOWS)
def test_a_page_shows_its_picture(name):
    text = (ROOT / "docs" / "operations" / f"{name}.md").read_text(encoding="utf-8")
    assert f":file: ../pictures/flow/{name}.html" in text
    assert f"](../pictures/flow/{name}.svg)" in two_readers.for_github(text)


def test_pictures_are_well_formed_and_boxes_lie_inside():
    seen = 0
    for text in draw_data_flow.files(ROOT).values():
        for svg in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}svg"):
            if svg.get("class") is None:
                continue  # the image, whose panels are looked at one by one
            seen += 1
            _, _, width, height = map(float, svg.get("viewBox").split())
            assert svg[0].tag.endswith("title")
            for box in svg.iter("{http://www.w3.org/2000/svg}rect"):
                assert float(box.get("x")) >= 0
                assert float(box.get("x")) + float(box.get("width")) <= width
                assert float(box.get("y")) + float(box.get("height")) <= height
    assert seen == 4 * len(FLOWS), "two panels in each of two files"


def test_an_image_has_the_dark_colours_of_the_pages_and_a_caption_that_fits():
    css = (ROOT / "docs" / "_static" / "custom.css").read_text(encoding="utf-8")
    dark = css[css.index('body[data-theme="dark"]') :]
    for name, value in drawing.DARK.items():
        if name not in ("ink", "soft", "barrier"):  # variables of the theme, and the same in both schemes
            assert f"--flow-{name}: {value};" in dark, name
    image = ET.fromstring(drawing.files(ROOT, {"gla": draw_data_flow.figure(FLOWS["gla"])})[ROOT / "gla.svg"])
    lines = ["".join(text.itertext()) for text in image.iter("{http://www.w3.org/2000/svg}text") if text.get("font-size") == "13"]
    assert lines[0].startswith("Forward pass of gla at B=")
    assert "\u25a0" in lines[-1]
    assert max(map(len, lines)) <= drawing.LETTERS + 3
    assert float(image.get("viewBox").split()[3]) > max(
        float(text.get("y")) for text in image.iter() if text.get("font-size") == "13"
    )
