"""Tests of the Markdown that documents take from results: fastest variants and rivals, all other times, and escaping.

The figures are those of the results that are committed in ``results/``. A peer is a variant of another project. ``prose``
compares a text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it does not
compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``lines_with`` returns the lines of an output that hold some words.
"""

from __future__ import annotations

import functools
import html
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from onelaunch.workbench.report import docs_overview, docs_section
from onelaunch.workbench.report.documents import SIDE_BY_SIDE, code
from onelaunch.workbench.report.text import markdown as escape
from onelaunch.workbench.result import Result
from tests.prose import lines_with
from tests.workbench import results

STORED = sorted((Path(__file__).parents[2] / "results").glob("*/*.json"))
# Names that would be markup in HTML, Markdown or MyST if they were not escaped.
EVIL = ["<script>alert(1)</script>", "a|b", "`x`", "**b**", "[t](javascript:1)", "{ref}`x`", "$x_{$", "&lt;b&gt;", "~~s~~", "#h"]


def tables(text: str) -> list[list[list[str]]]:
    """Return the cells of every table, headers first."""
    found = re.findall(r"(?:^\|.*\|\n)+", text + "\n", re.MULTILINE)
    return [[line.strip("| ").split(" | ") for i, line in enumerate(table.splitlines()) if i != 1] for table in found]


load = functools.cache(Result.load)
"""Cached reader of stored results, which no test changes."""


def stored(operation: str) -> Result:
    """Return the committed result of an operation on an H200, of which there is one."""
    here = [path for path in STORED if path.parent.name == "nvidia-h200"]
    (found,) = (each for path in here if (each := load(path)).study.operation == operation)
    return found


def test_the_fastest_variant_comes_first_with_its_rivals():
    text = docs_section(stored("gla"), "results/x.json")  # the path is the link to the result
    heads, *rows = tables(text)[0]
    assert heads == ["shape", "fastest of onelaunch", "µs", "roofline", "`fla`", "`compiled`"]
    row = next(row for row in rows if row[0] == "1x8192x96x128")  # the shape B x T x H x K
    # A rival's cell holds its microseconds, and in brackets its time over that of onelaunch's fastest. A dash is no time.
    assert row == ["1x8192x96x128", "`hopper`", "**462.3**", "51 %", "2,087.5 (4.52x)", "–"]


def test_the_smallest_time_is_bold_even_if_it_is_a_peers():
    heads, *rows = tables(docs_section(stored("gla"), "results/x.json"))[1]
    row = next(row for row in rows if row[0] == "1x1x32x128-decode")
    assert not row[2].startswith("**")
    assert row[heads.index("`fla`")].startswith("**26.7** (0.53x)")
    assert all(sum(cell.startswith("**") for cell in row) >= 1 for row in rows)


def test_of_several_peers_the_fastest_is_named():
    heads, *rows = tables(docs_section(stored("swiglu"), "results/x.json"))[0]
    assert heads[4] == "fastest peer"
    assert {row[4].split()[0] for row in rows} == {"`liger`", "`liger_fused`", "–"}


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_every_time_is_in_a_table_of_all_variants(path):
    result = load(path)
    text = docs_section(result, "results/x.json")
    wide = [table for table in tables(text) if table[0][0] == "variant" and "status" not in table[0]]
    assert wide
    assert all(len(table[0]) <= SIDE_BY_SIDE + 1 for table in wide)
    written = {cell.strip("*") for table in wide for row in table[1:] for cell in row[1:]}
    for cell in result.cells:
        if cell.status == "ok" and (timing := cell.timing("cold") or cell.timing("eager")):
            assert f"{timing.microseconds.median:,.1f}" in written, (cell.shape, cell.variant)
    assert "Without a time" in text or all(cell.status == "ok" for cell in result.cells)


def test_the_legend_explains_the_numbers_in_a_name(prose):
    for operation, dimensions in (
        ("gla", "B x T x H x K"),
        ("swiglu", "M x N x K"),
        ("gla_layer", "B x T x D"),
        ("decode_step", "layers"),
    ):
        legend = lines_with(docs_section(stored(operation), "results/x.json"), dimensions)
        assert legend
        prose(legend[0])


def test_a_result_without_times_or_decision_has_a_section():
    text = docs_section(results.nothing_ran(), "results/x.json")
    assert "Without a time" in text
    assert docs_section(results.interrupted_on_cpu(), "results/x.json").count("interrupted") >= 1


@pytest.mark.parametrize("evil", EVIL)
def test_names_and_texts_of_a_result_are_not_markup(evil):
    render = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render
    shown = render(f"| h |\n| --- |\n| {escape(evil)} {code(evil)} |\n").partition("<tbody>")[2]
    assert "<script>" not in shown
    assert not re.search(r"<(b|strong|a|s|h1|em)\b", shown)
    assert html.unescape(re.sub(r"<[^>]+>", "", shown)).split() == [*evil.split(), *evil.split()]


def test_an_untrusted_result_inserts_nothing_into_a_page():
    result = results.proceed_on_gpu()
    name = EVIL[0]
    first = result.study.shapes[0]
    result = result.model_copy(
        update={
            "study": result.study.model_copy(
                update={"criteria": (), "shapes": (first.model_copy(update={"name": name}), *result.study.shapes[1:])}
            ),
            "cells": tuple(
                cell.model_copy(update={"shape": name, "reason": name}) if cell.shape == first.name else cell
                for cell in result.cells
            ),
            "provenance": result.provenance.model_copy(update={"device": name, "commit": "<b>"}),
            "decision": result.decision.model_copy(update={"because": (name, name)}),
        }
    )
    text = docs_section(result, "results/x.json")
    assert "alert" in text
    shown = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert "<script" not in shown
    assert "<b>" not in shown


def test_the_overview_holds_the_mean_and_the_range_over_peers(prose):
    heads, *rows = tables(docs_overview([stored("gla"), stored("projections")], lambda name: f"{name}.md"))[0]
    prose(heads[3:])
    assert rows[0][0] == "[`gla`](gla.md)"
    # Speed of onelaunch's fastest variant over the fastest peer: geometric mean and range over shapes.
    assert rows[0][3] == "2.82x (1.09x to 7.27x, 18 shapes)"
    assert rows[2][3] == "–"  # no peer


def test_torch_compile_is_no_variant_of_ours_in_the_overview():
    result = stored("gla")
    without = result.model_copy(update={"cells": tuple(cell for cell in result.cells if cell.variant != "compiled")})
    (*_, found), (*_, wanted) = (tables(docs_overview([each], str))[0][1:] for each in (result, without))
    assert found[3] == wanted[3]
    assert found[3].startswith("1.85x (0.19x to ")  # at one shape torch.compile was the fastest, and fla far ahead of our kernels
