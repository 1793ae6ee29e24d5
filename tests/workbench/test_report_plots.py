"""Tests of plots: any name and number can be drawn; lines, labels and colours are used where a reader can tell them apart.

A plot is an SVG with a title. The results are the made-up ones of ``results.py``, and one that is committed in ``results/``.

A test marked ``thorough`` does not run in ``make test``. ``thorough_but`` marks all parameters but the named ones ``thorough``.
"""

from __future__ import annotations

import functools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from onelaunch.workbench.report import markdown, page
from onelaunch.workbench.report.details import details
from onelaunch.workbench.report.plots import LONGEST_LABEL, Plot, plots
from onelaunch.workbench.report.series import MOST_SERIES, Series
from onelaunch.workbench.report.summary import over_roofline, summarize
from onelaunch.workbench.result import Result
from tests.thorough import thorough_but
from tests.workbench import results
from tests.workbench.drawn import unseen_changed

H200 = Path(__file__).parents[2] / "results" / "nvidia-h200"


@functools.cache
def of_a_study_with_many_variants() -> tuple[Result, tuple[Plot, ...]]:
    """Return the committed result of study 040, which has more variants than a plot shows prominently, and its plots."""
    result = Result.load(H200 / "040-linear-rnn.json")
    return result, page.plots(result)


def named(shape: str, variant: str) -> Result:
    """Return a result of two shapes in which the first shape and its fastest variant have these names."""
    shapes = (results.shape(shape, B=1, T=512, D=64, V=64), results.shape("other", B=2, T=512, D=64, V=64))
    cells = tuple(
        results.ok_cell(of, "fused_chunked" if name == variant else name).model_copy(update={"variant": name})
        for of in shapes
        for name in ("three_launch_cublas", variant)
    )
    base = results.largest()
    return base.model_copy(update={"study": base.study.model_copy(update={"shapes": shapes}), "cells": cells})


def labels(plot: Plot) -> list[str]:
    """Return all texts of a plot."""
    return ["".join(each.itertext()) for each in ET.fromstring(plot.svg).iter("text")]


@pytest.mark.parametrize("name", thorough_but("$x_{$", of=["$x_{$", "a$b$", "$\\frac{1}{$", "$$", "50$"]))
def test_a_dollar_sign_in_a_name_is_drawn_as_such(name: str) -> None:
    drawn = plots(named(name, name))
    assert drawn
    assert any(name in labels(plot) for plot in drawn)


@pytest.mark.parametrize(
    "name",
    thorough_but(
        "a\x00b",
        "<&>",
        of=["a\nb", "a\x00b", "a\x1b[2Jb", "x" * 300, "_hidden", "../up", "\u202ereversed", "é ×", "<&>", "]]>", ""],
    ),
)
def test_any_name_can_be_drawn(name: str) -> None:
    for plot in plots(named(name, name)):
        for label in labels(plot):
            assert len(label) <= LONGEST_LABEL + 2 or label.isprintable()
            assert "\n" not in label
            assert "\x00" not in label


def test_a_long_name_is_clipped_with_an_ellipsis() -> None:
    found = [label for plot in plots(named("shape", "x" * 300)) for label in labels(plot) if label.startswith("x")]
    assert found
    assert set(found) == {"x" * (LONGEST_LABEL - 1) + "…"}


def test_a_name_with_a_leading_underscore_is_in_the_legend() -> None:
    """Matplotlib leaves such a name out of a legend by default."""
    assert any("_mine" in label for label in labels(plots(named("shape", "_mine"))[0]))


def without_bounds(result: Result) -> Result:
    """Return the result with a cost of zero bytes and FLOPs for each measurement, so that its roofline bounds are 0."""
    nothing = {"floor_microseconds": 0.0, "planned_microseconds": 0.0, "least_bytes": 0, "bytes": 0, "flops": 0}
    cells = [
        cell.model_copy(update={"plan": cell.plan.model_copy(update=nothing) if cell.plan else None}) for cell in result.cells
    ]
    return result.model_copy(update={"cells": tuple(cells)})


@pytest.mark.parametrize(
    "make", thorough_but(results.interrupted_on_cpu, of=[results.proceed_on_gpu, results.interrupted_on_cpu, results.largest])
)
def test_a_roofline_bound_of_zero_gives_a_report_without_ratios(make) -> None:
    result = without_bounds(make())
    assert {over_roofline(cell, "cold") for cell in result.cells} == {None}
    assert {row[-1] for table in summarize(result).use for row in table.rows} == {"–"}
    assert not [plot for plot in page.plots(result) if plot.title.startswith("Distance")]
    assert "roofline bound 0 µs" in markdown.render(result)
    assert "ZeroDivision" not in page.render(result)
    assert details(result)


def test_shapes_of_size_zero_are_drawn_side_by_side() -> None:
    shapes = tuple(results.shape(f"b{b}", B=b, T=64, D=32, V=32) for b in (0, 1))
    base = without_bounds(results.largest())
    cells = tuple(
        results.ok_cell(shapes[1], "eager").model_copy(update={"shape": of.name, "traffic": None, "plan": None}) for of in shapes
    )
    result = base.model_copy(update={"study": base.study.model_copy(update={"shapes": shapes}), "cells": cells})
    assert plots(result)


@pytest.mark.parametrize("median", [0.0, *(pytest.param(each, marks=pytest.mark.thorough) for each in (-1.0, float("inf")))])
def test_an_impossible_time_is_not_drawn_and_raises_no_error(median: float) -> None:
    base = named("shape", "odd")
    broken = base.cells[1].model_copy(
        update={
            "timings": tuple(
                timing.model_copy(update={"microseconds": timing.microseconds.model_copy(update={"median": median})})
                for timing in base.cells[1].timings
            )
        }
    )
    result = base.model_copy(update={"cells": (base.cells[0], broken, *base.cells[2:])})
    assert summarize(result).use[0].rows[0][2] == "three_launch_cublas"
    assert page.render(result)


@functools.cache
def drawn_on_cpu() -> tuple[Plot, ...]:
    """Return the plots of a result with two variants at two lengths T."""
    return plots(results.interrupted_on_cpu())


def joined(plot: Plot) -> bool:
    """Return whether any series of the plot is a line through several shapes."""
    strokes = [each for each in ET.fromstring(plot.svg).iter("path") if "stroke: var(--v" in each.get("style", "")]
    drawn = [each.get("d", "") for each in strokes]
    return any(_is_slanted(line) for line in drawn if "C" not in line and "z" not in line)  # paths of markers are closed


def _is_slanted(line: str) -> bool:
    """Return whether an SVG path has points with different x. The line of an interval is vertical."""
    x = re.findall(r"[ML] ([\d.]+) ", line)
    return len(set(x)) > 1


def test_shapes_of_equal_size_are_points_and_not_a_line() -> None:
    shapes = (results.shape("4x512", B=4, T=512, D=64, V=64), results.shape("1x2048", B=1, T=2048, D=64, V=64))
    base = results.largest()
    cells = tuple(results.ok_cell(of, variant) for of in shapes for variant in ("eager", "chunked"))
    tied = base.model_copy(update={"study": base.study.model_copy(update={"shapes": shapes}), "cells": cells})
    plot = plots(tied)[0]
    assert not joined(plot)
    assert {"4×512", "1×2048"} <= set(labels(plot))
    assert joined(drawn_on_cpu()[0])


def test_labels_of_bytes_are_to_the_right_of_every_tick() -> None:
    """Each bar of DRAM bytes has a tick at the bytes that the variant must move, and its size as a label at the right end."""
    plot = next(plot for plot in of_a_study_with_many_variants()[1] if plot.title.startswith("DRAM bytes"))
    root = ET.fromstring(plot.svg)
    numbers = [
        each for each in root.iter("text") if re.search(r"[KMG]iB$", "".join(each.itertext())) and "end" in each.get("style", "")
    ]
    ticks = [
        float(found)
        for each in root.iter("path")
        if "stroke: var(--ink)" in each.get("style", "") and "stroke-width: 2" in each.get("style", "")
        for found in re.findall(r"[ML] ([\d.]+) ", each.get("d", ""))
    ]
    assert numbers
    assert ticks
    for number in numbers:
        # A character is at most 6 units of the SVG wide, and the label ends at x.
        width = 6.0 * len("".join(number.itertext()))
        assert float(number.get("x", "nan")) - width > max(ticks)


def test_among_many_variants_fastest_baseline_and_peer_are_prominent() -> None:
    result, drawn = of_a_study_with_many_variants()
    series = Series.of(result)
    assert {"three_launch_cublas", "fla", "fused_chunked", "fused_hopper"} <= set(series.prominent)
    assert "eager" not in series.prominent
    assert len(series.prominent) <= MOST_SERIES
    assert len({series.colour(name) for name in series.prominent}) == len(series.prominent)
    plot = drawn[0]
    assert f"{series.others} others" in labels(plot)
    assert "eager" not in labels(plot)
    assert "var(--soft)" in plot.svg


def test_few_variants_are_all_prominent_and_those_without_a_time_are_not_counted() -> None:
    series = Series.of(results.interrupted_on_cpu())
    assert set(series.prominent) == {"eager", "chunked"}
    assert series.others == 0
    assert not [label for plot in drawn_on_cpu() for label in labels(plot) if "others" in label]


def test_plots_do_not_depend_on_a_studys_text_and_decision() -> None:
    """For this reason, tests of pages may share plots among results that differ only in that (``drawn.py``).

    ``unseen_changed`` changes all those fields.
    """
    assert plots(unseen_changed(results.interrupted_on_cpu())) == drawn_on_cpu()
