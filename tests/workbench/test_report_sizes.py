"""Tests of what the documentation says of sizes: which variant wins where, and plots of time against size.

``prose`` compares a text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from onelaunch.workbench.report import plots, sizes
from onelaunch.workbench.report.sizes import docs_sizes
from onelaunch.workbench.report.summary import valid_timing
from onelaunch.workbench.report.sweeps import amount, model_of, swept
from onelaunch.workbench.result import Result
from tests.workbench import results
from tests.workbench.drawn import texts_of

H200 = Path(__file__).parents[2] / "results" / "nvidia-h200"


@pytest.fixture
def texts_alone(monkeypatch):
    """Let a plot be the list of its texts. Drawing takes most of the time."""
    monkeypatch.setattr(
        plots, "_svg", lambda figure, title: "<svg><text>" + "</text><text>".join(texts_of(figure)) + "</text></svg>"
    )


def of_three_sizes(*, times: tuple[float, ...] = (10.0, 20.0, 40.0)) -> Result:
    """Return a result of one model at three lengths, at which ``three_launch_cublas`` takes these microseconds."""
    shapes = tuple(results.shape(f"T{length}", B=1, T=length, D=64, V=64) for length in (512, 1024, 2048))
    cells = []
    for shape, time in zip(shapes, times, strict=True):
        for variant, factor in (
            ("three_launch_cublas", 1.0),
            ("fused_chunked", 0.5),
            ("fla", 0.25 if shape is shapes[0] else 2.0),
        ):
            cell = results.ok_cell(shape, variant)
            timing = results.timing("cold", time * factor)
            cells.append(cell.model_copy(update={"timings": (timing,)}))
    base = results.largest()
    study = base.study.model_copy(update={"shapes": shapes})
    return base.model_copy(update={"study": study, "cells": tuple(cells), "noise": ()})


def test_winners_are_those_with_the_smallest_medians(texts_alone, prose):
    said = docs_sizes([(of_three_sizes(), "results/x.json")], "linear_rnn")
    assert "- `fused_chunked` at 2: T1024, T2048" in said
    assert "- `fla` (not of onelaunch) at 1: T512" in said
    prose(re.sub(r"```.*?```", "", said, flags=re.DOTALL))


def test_a_plot_has_every_size_and_the_bound():
    """Times of less than one power of ten have labels too. The style of a plot would hold for the whole page."""
    said = docs_sizes([(of_three_sizes(), "results/x.json")], "linear_rnn")
    (svg,) = re.findall(r"<svg.*?</svg>", said, re.DOTALL)
    shown = ["".join(each.itertext()).strip() for each in ET.fromstring(svg).iter("text")]
    assert {"512", "1,024", "2,048", "roofline bound", "fused_chunked", "fla"} <= set(shown)
    assert len([text for text in shown if text.endswith("µs")]) >= 2
    assert "<style" not in said


def test_without_several_sizes_a_sentence_takes_the_place_of_a_plot():
    said = docs_sizes([(Result.load(H200 / "058-gla-layer.json"), "results/x.json")], "gated_scan")
    assert said == sizes.NOTHING
    few = of_three_sizes()
    few = few.model_copy(update={"cells": tuple(cell for cell in few.cells if cell.shape != "T512")})
    said = docs_sizes([(few, "results/x.json")], "linear_rnn")
    assert "no plot is drawn" in said
    assert "<svg" not in said


def test_a_study_of_several_operations_is_shown_by_operation(texts_alone):
    stored = Result.load(H200.parent / "nvidia-h100" / "everyday-calls.json")
    said = docs_sizes([(stored, "results/x.json")], "gated_scan")
    assert "`fused` at 10" in said  # `auto` chose it
    assert "hopper" not in said


def test_the_winners_on_the_pages_agree_with_the_results(texts_alone):
    """Every count on a page is recomputed from the medians of the committed result."""
    stored = Result.load(H200 / "039-chunkwise-gla.json")
    said = docs_sizes([(stored, "results/x.json")], "gla").partition("forward + backward")[0]
    counted: dict[str, int] = {}
    for shape in stored.study.shapes:
        cells = [cell for cell in stored.cells if (cell.shape, cell.direction) == (shape.name, "forward") and not cell.control]
        times = {
            cell.variant: timing.microseconds.median
            for cell in cells
            if not cell.outside and (timing := valid_timing(cell, "cold"))
        }
        if times:
            best = min(times, key=lambda name: times[name])
            counted[best] = counted.get(best, 0) + 1
    assert {name: int(count) for name, count in re.findall(r"^- `(\w+)`.*? at (\d+)", said, re.MULTILINE)} == counted


def test_rows_and_positions_are_sizes_of_their_own():
    swiglu = results.shape("s", M=64, N=4096, K=7168)
    decode = results.shape("d", layers=28, hidden=1024, position=1000)
    other = results.shape("o", B=2, T=512, D=64, V=64)
    assert (swept(swiglu), amount(swiglu)) == (("M",), 64)
    assert (swept(decode), amount(decode)) == (("position",), 1000)
    assert (swept(other), amount(other)) == (("B", "T"), 1024)
    assert model_of(swiglu) == model_of(results.shape("t", M=1, N=4096, K=7168))
    assert model_of(other) != model_of(results.shape("p", B=2, T=512, D=128, V=64))
