"""Tests of the report on all results of a folder: what it reads, its marks, its tables, and its three forms.

``prose`` compares a text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from onelaunch.operation.sources import digest_of
from onelaunch.workbench.report.overview import Omitted, Overview, collect, entry_of
from onelaunch.workbench.report.overview_forms import render_html, render_markdown, render_terminal, with_reports
from onelaunch.workbench.report.text import html
from onelaunch.workbench.result import Result
from onelaunch.workbench.result.facts import VariantSource
from onelaunch.workbench.study import Prediction
from tests.workbench import hostile, results

OTHERS = ("older run", "alert")
"""Marks that have tests of their own, or that a made-up result has."""

RESULTS = Path(__file__).parents[2] / "results"


def of(folder: Path, **kept: Result) -> Overview:
    """Return the overview of a folder with these results, by the names of their files."""
    for name, result in kept.items():
        result.save(folder / f"{name}.json")
    return collect(folder)[0]


def changed(result: Result, **facts: object) -> Result:
    """Return a result with other facts in its provenance."""
    return result.model_copy(update={"provenance": result.provenance.model_copy(update=facts)})


def terminal(overview: Overview, width: int = 80) -> str:
    """Return the text that a terminal shows."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render_terminal(overview, width))
    return console.file.getvalue()


def test_every_study_and_device_has_its_decision_figures_and_origin(tmp_path):
    found = of(tmp_path, gpu=results.proceed_on_gpu(), cpu=results.interrupted_on_cpu())
    (cpu, gpu) = sorted(found.entries, key=lambda entry: entry.file)
    assert (gpu.study, gpu.decision, gpu.commit, gpu.file) == ("040-linear-rnn", "proceed", "d1e54a6", "gpu.json")
    assert "torch 2.11.0" in gpu.versions
    assert "driver 580.65" in gpu.versions
    assert "interrupted" in [mark.short for mark in cpu.marks]
    assert [row[:2] for row in found.speeds().rows] == [(gpu.study, gpu.device)] * 2
    for text in (terminal(found), render_markdown(found), render_html(found)):
        for entry in found.entries:
            for said in (entry.study, entry.device, entry.decision, entry.date[:10], entry.commit):
                assert said in text, said


def test_files_that_are_no_results_are_named_with_the_reason(tmp_path, prose):
    whole = results.proceed_on_gpu()
    text = json.dumps(json.loads(whole.stored()) | {"schema_version": 99})
    for name, content in {"newer": text, "damaged": text[:100], "another": '{"name": "package"}'}.items():
        (tmp_path / f"{name}.json").write_text(content)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    found = of(tmp_path, original=whole, second=whole)
    assert [entry.file for entry in found.entries] == ["original.json"]
    assert [omitted.file for omitted in found.omitted] == [
        "another.json",
        "damaged.json",
        "gone.json",
        "newer.json",
        "second.json",
    ]
    prose("\n".join(f"{each.file}: {each.reason}" for each in found.omitted))
    assert "second.json" in terminal(found)
    assert "5 files left out" in terminal(found)


def test_a_folder_without_results_is_said_to_have_none(tmp_path):
    found = collect(tmp_path)[0]
    for text in (terminal(found), render_markdown(found), render_html(found)):
        assert "There is no result here" in text


def test_an_older_run_of_a_study_on_a_device_is_marked(tmp_path):
    new = results.proceed_on_gpu()
    found = of(tmp_path, new=new, old=changed(new, date="2026-11-01T00:00:00+00:00"), cpu=changed(new, device="AMD EPYC"))
    marked = {entry.file: [mark.short for mark in entry.marks] for entry in found.entries}
    assert "older run" in marked.pop("old.json")
    assert not any("older run" in marks for marks in marked.values())
    assert [entry.file for entry in found.entries if entry.device == new.provenance.device] == ["new.json", "old.json"]


def test_a_result_older_than_the_code_it_measured_is_marked(tmp_path, prose):
    """A result of an older version does not hold the digests, and is marked for that."""
    result = results.proceed_on_gpu()  # its decision is made up, which the marks named in OTHERS say
    current = {label: VariantSource(source=digest_of(variant)) for label, variant in result.study.registered()}
    label = next(iter(current))
    found = of(
        tmp_path,
        silent=result,
        fresh=changed(result, variants=current),
        stale=changed(result, variants=current | {label: VariantSource(source="0" * 64)}),
        dirty=changed(result, variants=current, commit="d1e54a6-dirty"),
        unknown=changed(result, variants=current, commit=""),
    )
    marks = {entry.file: [mark for mark in entry.marks if mark.short not in OTHERS] for entry in found.entries}
    assert marks["fresh.json"] == []
    assert {file: [mark.short for mark in here] for file, here in marks.items() if here} == {
        "silent.json": ["code not recorded"],
        "stale.json": ["code changed"],
        "dirty.json": ["uncommitted code"],
        "unknown.json": ["commit unknown"],
    }
    prose("\n".join(mark.sentence for here in marks.values() for mark in here))


def test_a_result_of_an_operation_that_is_not_installed_is_shown(tmp_path, prose):
    result = results.proceed_on_gpu()
    study = result.study.model_copy(update={"operation": "elsewhere"})
    facts = result.provenance.model_copy(update={"variants": {"fused": VariantSource(source="0" * 64)}})
    found = result.model_copy(update={"study": study, "study_digest": study.digest(), "provenance": facts})
    (entry,) = of(tmp_path, gpu=found).entries
    (mark,) = (mark for mark in entry.marks if mark.short == "code not compared")
    prose(mark.sentence)
    assert entry.decision == "proceed"


def test_committed_results_of_every_schema_are_read_and_marked(tmp_path):
    names = {"schema 1": "nvidia-h200/040-linear-rnn", "schema 2": "nvidia-h200/058-gla-layer", "": "nvidia-h100/host-times"}
    for name in names.values():
        (tmp_path / f"{Path(name).name}.json").symlink_to(RESULTS / f"{name}.json")
    found = collect(tmp_path)[0]
    schemas = {entry.file: [mark.short for mark in entry.marks if mark.short.startswith("schema")] for entry in found.entries}
    assert schemas == {f"{Path(name).name}.json": [schema] if schema else [] for schema, name in names.items()}
    page = render_html(found)
    assert all(html(entry.found) in page for entry in found.entries)


def test_errors_of_predictions_are_counted_by_result(tmp_path):
    result = results.proceed_on_gpu()
    best = next(cell for cell in result.cells if cell.variant == "fused_chunked" and cell.direction == "forward")
    expected = [
        Prediction(by="us", measure="speedup", of=best.variant, at=best.shape, value=value, why="A guess.")
        for value in (0.01, 1000)
    ]
    study = result.study.model_copy(update={"predictions": tuple(expected)})
    found = of(tmp_path, gpu=result.model_copy(update={"study": study, "study_digest": study.digest()}))
    ((_, _, count, expected_ones, better, worse, missing, middle, largest),) = found.predictions().rows
    assert (count, expected_ones, better, worse, missing) == ("2", "0", "1", "1", "0")
    assert float(largest[:-1]) > float(middle[:-1]) > 10
    assert largest in render_html(found)
    assert "No study of these results declares predictions." in render_markdown(of(tmp_path / "none", gpu=result))


def test_links_lead_to_the_reports_that_were_written(tmp_path):
    found = of(tmp_path, **{"a b#c": results.proceed_on_gpu()})
    assert "report.md" not in render_markdown(found)
    linked = with_reports(found, {"a b#c.json": "a b#c"})
    assert "(a%20b%23c/report.md)" in render_markdown(linked)
    assert 'href="a%20b%23c/report.html"' in render_html(linked)


class Elements(HTMLParser):
    """Names of a page's elements, and the attributes that could run a script or fetch a file."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.active: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.active += [f"{name}={value}" for name, value in attrs if name.startswith("on") or name in ("src", "srcset")]
        self.active += [value for name, value in attrs if name == "href" and not value.startswith("#")]


def test_no_string_of_a_result_becomes_markup_or_a_command(tmp_path):
    found = of(tmp_path, gpu=results.proceed_on_gpu())
    honest = Elements(render_html(found))
    attacked = replace(
        found, entries=(entry_of(hostile.hostile(), "bad.json"),), omitted=(Omitted(hostile.ATTACK, hostile.ATTACK),)
    )
    page = Elements(render_html(attacked))
    assert page.names <= honest.names
    assert page.active == []
    assert "\x1b" not in terminal(attacked)
    assert "<script>" not in render_markdown(attacked).replace("\\<script", "")


@pytest.mark.parametrize("width", [60, 120])
def test_the_terminal_form_fits_its_width(tmp_path, width):
    text = terminal(of(tmp_path, gpu=results.proceed_on_gpu()), width)
    assert max(map(len, text.splitlines())) <= width
