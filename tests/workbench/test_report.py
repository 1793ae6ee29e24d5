"""Tests of reports: every form (Markdown, HTML page, terminal) states everything that a result holds, in the same words.

The results are the made-up ones of ``results.py``: ``proceed_on_gpu`` and ``largest`` ran to the end, and
``interrupted_on_cpu`` was stopped after 8 of 16 measurements. ``wrong_and_invalid`` supports no conclusion, and in
``nothing_ran`` every measurement failed. Only in ``largest`` are all measurements ok. ``prose`` compares a text with its entry
in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it does not compare one of its entries, and
``tests/test_prose.py`` if the test or the parameter of an entry is gone.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import functools
import html.parser
import io
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from onelaunch.errors import OutputUnwritable, ResultExists
from onelaunch.operation import DIRECTIONS
from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.report import docs_table, markdown, page, write_report
from onelaunch.workbench.report.details import details
from onelaunch.workbench.report.headline import headline
from onelaunch.workbench.report.plots import STAND_INS, Plot
from onelaunch.workbench.report.summary import asked, summarize
from onelaunch.workbench.report.tables import Table, columns, to_html, to_markdown, to_rich, words
from onelaunch.workbench.report.terminal import show
from onelaunch.workbench.result import Estimate, Result
from onelaunch.workbench.study import Criterion
from tests.workbench import results

Maker = Callable[[], Result]
"""Function of ``results.py`` that makes a result. Pages and plots are cached by it."""

every_result = pytest.mark.parametrize("make", results.ALL, ids=lambda make: make.__name__)


def terminal(result: Result, width: int = 120, *, full: bool = False, **options: object) -> str:
    """Return the terminal's form of a report, with all sections if ``full``; ``options`` are rich's for its console."""
    buffer = io.StringIO()
    show(result, Console(file=buffer, width=width, **options), full=full)  # type: ignore[arg-type]
    return buffer.getvalue()


class Reader(html.parser.HTMLParser):
    """Parser that collects the text of a page and rejects elements that are not closed in order."""

    VOID = frozenset({"meta", "br", "link", "img", "hr"})
    """Elements that have no end tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(attrs)

    def note(self, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the ids and addresses among the attributes of an element."""
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "action", "data")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes no open element"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if "style" not in self.open else ""


@functools.cache
def page_of(make: Maker) -> str:
    return page.render(make())


@functools.cache
def plots_of(make: Maker) -> tuple[Plot, ...]:
    return page.plots(make())


def read(make: Maker) -> Reader:
    return Reader(page_of(make))


def plain(text: str) -> str:
    """Return the text without line breaks and Markdown's backslash escapes, as a reader perceives it."""
    return " ".join(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text).split())


@every_result
def test_all_forms_agree_on_the_decision_and_its_grounds(make: Maker) -> None:
    result = make()
    head = headline(result)
    decision = words(result.decision.kind) if result.decision else "not decided"
    forms = {
        "markdown": plain(markdown.render(result)),
        "html": plain(read(make).text),
        "terminal": plain(terminal(result, 200)),
    }
    for form, text in forms.items():
        assert f"Decision: {decision}" in text, form
        for other in {"proceed", "debug", "abandon", "measure more", "not decided"} - {decision}:
            assert f"Decision: {other}" not in text, form
        for said in (*head.found, head.sentence, *head.elsewhere, *head.grounds):
            assert plain(said) in text, form


@every_result
def test_every_criterion_is_shown_with_status_and_evidence(make: Maker) -> None:
    result = make()
    text, seen = plain(read(make).text), plain(markdown.render(result))
    for outcome in result.outcomes:
        for form in (text, seen):
            assert outcome.criterion.name in form
            assert plain(outcome.evidence) in form
            assert words(outcome.status) in form


@every_result
def test_the_decision_comes_first_and_the_provenance_last(make: Maker, prose) -> None:
    heads = re.findall(r"^## (.+)$", markdown.render(make()), re.MULTILINE)
    assert heads[0].startswith("Decision")
    prose([*heads[1:4], heads[-1]], name="order of sections")


@every_result
def test_every_failed_measurement_is_named_with_its_reason(make: Maker) -> None:
    result = make()
    summary = summarize(result)
    bad = [cell for cell in result.cells if cell.status != "ok"]
    assert (summary.missing is None) == (not bad)
    for cell in bad:
        assert summary.missing
        row = next(row for row in summary.missing.rows if cell.variant in row[0] and words(cell.status) == row[1])
        assert cell.shape in row[2] or "all" in row[2]
        assert cell.reason in row[3]


@every_result
def test_every_accepted_time_is_shown_with_its_interval(make: Maker) -> None:
    result = make()
    text = markdown.render(result)
    for cell in result.cells:
        for timing in cell.timings:
            assert (q.interval(timing.microseconds) in text) or cell.status != "ok"


def test_a_rejected_time_is_never_shown_as_a_time(prose) -> None:
    result = results.wrong_and_invalid()
    fast = result.cell("target", "fused_chunked")
    assert fast
    assert fast.timings
    for text in (markdown.render(result), page.render(result), terminal(result)):
        assert q.interval(fast.timings[0].microseconds) not in text
    assert "fused_chunked" not in {row[2] for table in summarize(result).use for row in table.rows}
    prose([alert for alert in summarize(result).alerts if "fused_chunked, semi_fused" in alert])


def test_the_problem_of_an_incorrect_variant_is_shown() -> None:
    missing = summarize(results.wrong_and_invalid()).missing
    assert missing
    assert any("NaN in 12 %" in row[3] for row in missing.rows)


def test_an_interrupted_result_is_marked_first(prose) -> None:
    make = results.interrupted_on_cpu
    result = make()
    prose(summarize(result).alerts[0])
    for text in (plain(markdown.render(result)), plain(terminal(result)), plain(read(make).text)):
        # The title, in the first 60 characters, may name the decision too.
        assert text.index("Interrupted: 8 of 16") < text.index("measure more", 60)


def test_a_moved_criterion_is_noticed() -> None:
    """The stored declaration was changed after the run, so its digest is no longer the one that was stored."""
    result = results.proceed_on_gpu()
    easier = result.study.model_copy(update={"criteria": result.study.criteria[:1]})
    assert any("digest differs" in alert for alert in summarize(result.model_copy(update={"study": easier})).alerts)
    assert not summarize(concluded(result)).alerts  # the fixture's outcomes are made up, and differ from its measurements


def test_history_is_marked_as_history_and_left_out_if_there_is_none(prose) -> None:
    """History is the author's notes of a study: figures that were reported before it ran."""
    text = markdown.render(results.proceed_on_gpu())
    section = text[text.index("## Reported before (history)") :]
    prose(section.split("\n\n")[1])
    assert "never repeated; its own sweep" in section  # quoted from the study's notes
    assert "never repeated; its own sweep" not in text.removesuffix(section)
    assert "Reported before" not in markdown.render(results.nothing_ran())


def test_the_variant_to_use_is_the_fastest_correct_one() -> None:
    result = results.proceed_on_gpu()
    table = summarize(result).use[0]
    for row in table.rows:
        cells = [cell for cell in result.cells if cell.shape == row[0] and cell.direction == "forward" and not cell.control]
        best = min((cell for cell in cells if cell.timings), key=lambda cell: cell.timings[0].microseconds.median)
        assert row[2] == best.variant
        assert row[3] == q.interval(best.timings[0].microseconds)


def test_a_variant_within_the_noise_is_named_with_the_fastest() -> None:
    """The two times differ by 0.2 %."""
    of = results.shape("target", B=4, T=2048, D=256, V=64)
    one, other = results.ok_cell(of, "fused_chunked"), results.ok_cell(of, "semi_fused")
    same = tuple(results.timing(timing.regime, timing.microseconds.median * 1.002) for timing in one.timings)
    slow = results.ok_cell(of, "three_launch_cublas")
    base = results.wrong_and_invalid()
    result = base.model_copy(update={"cells": (slow, one, other.model_copy(update={"timings": same}))})
    assert summarize(result).use[0].rows[0][2] == "fused_chunked or semi_fused"


def test_bytes_are_marked_as_counted_or_computed(prose) -> None:
    text = markdown.render(results.proceed_on_gpu())
    assert "counted (ncu)" in text
    assert "arithmetic" in text
    assert "cold caches (--cache-control all)" in text
    prose([line for line in summarize(results.proceed_on_gpu()).open if "DRAM" in line])
    prose([line for line in summarize(results.largest()).open if "DRAM" in line])


def test_peak_memory_is_a_size_or_marked_as_not_measured() -> None:
    of = results.shape("target", B=4, T=2048, D=256, V=64)
    known = results.ok_cell(of, "semi_fused").model_copy(update={"peak_bytes": 96 * 2**20})
    unknown = results.ok_cell(of, "fused_chunked").model_copy(update={"peak_bytes": None})
    cells = (known, unknown, results.bad_cell(of, "fla", "error", "fell"))
    result = results.wrong_and_invalid().model_copy(update={"cells": cells})
    table = next(section for section in details(result) if section.title.startswith("Bytes and launches")).tables[0]
    column = [each.title for each in table.columns].index("peak memory")
    assert [row[column] for row in table.rows] == [
        "96.0 MiB",
        "not measured",
    ]  # variants that did not run have no plan here, so no row


def test_a_criterions_requirement_is_stated_in_words(prose) -> None:
    of, long = results.shape("target", B=8, T=2048, D=64, V=64), results.shape("long", B=1, T=16384, D=64, V=64)
    declared = results.study((of, long), ())

    def said(**facts: Any) -> str:
        return asked(Criterion(**({"name": "c", "of": "semi_fused", "over": "fla"} | facts)), declared)

    prose(said(measure="speedup", combine="geomean", at_least=3))
    prose(said(measure="time_ratio", over="semi_fused", at="long", over_at="target", per=("B", "T"), at_most=1.3))
    prose(said(measure="peak_memory_ratio", at="target", direction="forward_backward", at_most=0.6, decides=False))
    prose(said(measure="time_over_floor", over=None, at="target", at_most=1.5))
    prose(said(measure="time", over=None, at="target", regime="running", at_most=363.6))
    prose(said(measure="time_ratio", over="semi_fused", at="target", regime="served", over_regime="running", at_most=1.05))
    prose(said(measure="barriers", over=None, at="target", equals=0))
    prose(said(measure="launches", over=None, at="target", at_most=6))
    prose(said(measure="dram_bytes_over_least", over=None, at="target", at_most=1.6))


def test_missing_traffic_and_plan_are_no_error() -> None:
    result = results.proceed_on_gpu()
    bare = tuple(cell.model_copy(update={"traffic": None, "plan": None}) for cell in result.cells)
    stripped = result.model_copy(update={"cells": bare, "outcomes": (), "decision": None, "noise": ()})
    assert "not decided" in markdown.render(stripped)
    assert not [plot for plot in page.plots(stripped) if "bytes" in plot.title]
    Reader(page.render(stripped))


@every_result
def test_the_page_is_well_formed_and_fetches_nothing(make: Maker) -> None:
    text, reader = page_of(make), read(make)
    assert not reader.open
    assert len(reader.ids) == len(set(reader.ids))
    assert all(address.startswith("#") and address[1:] in reader.ids for address in reader.addresses)
    for outside in ("http:", "https:", "//cdn", "@import", "<script", "<link", "<img", "url(http"):
        assert outside not in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_the_page_escapes_the_studys_text() -> None:
    result = results.nothing_ran()
    rude = result.study.model_copy(update={"question": "<script>alert(1)</script> & more", "name": '"quoted" <b>'})
    text = page.render(result.model_copy(update={"study": rude}))
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text


@every_result
def test_plots_take_their_colours_from_the_page(make: Maker) -> None:
    result = make()
    drawn = plots_of(make)
    assert bool(drawn) == any(cell.status == "ok" for cell in result.cells)
    for plot in drawn:
        assert plot.svg.startswith("<svg")
        assert plot.svg.endswith("</svg>")
        assert not any(stand_in in plot.svg for stand_in in STAND_INS)  # placeholders that CSS variables have replaced
        assert not set(re.findall(r"#[0-9a-f]{6}\b", plot.svg)) - {"#ffffff"}


def test_the_plots_show_time_distance_and_bytes_of_each_direction(prose) -> None:
    titles = [plot.title for plot in plots_of(results.proceed_on_gpu)]
    for direction in ("forward", "forward + backward"):
        assert f"Time, {direction}, D=256 V=64 float16" in titles
        assert f"Time, {direction}, D=2048 V=2048 float16" in titles
        prose(titles)
        assert f"DRAM bytes, {direction}, target" in titles


def test_the_size_axis_shows_the_varying_dimension() -> None:
    along_time = next(plot.svg for plot in plots_of(results.interrupted_on_cpu) if plot.title.startswith("Time"))
    assert all(f">{label}<" in along_time for label in ("128", "512", "T (B=2)"))
    sweep = next(plot.svg for plot in plots_of(results.proceed_on_gpu) if plot.title == "Time, forward, D=256 V=64 float16")
    order = [sweep.index(f">{label}<") for label in ("1×512", "4×512", "16×512", "4×2048", "16×1024", "8×2048", "16×2048")]
    assert order == sorted(order)


def test_notes_of_the_author_are_rendered_as_markdown_and_fetch_nothing() -> None:
    result = results.nothing_ran()
    notes = "| a | b |\n|---|---|\n| **1** | 2 |\n\n<script>x</script> ![p](https://example.org/p.png)"
    text = page.render(result.model_copy(update={"study": result.study.model_copy(update={"notes": notes})}))
    assert "<strong>1</strong>" in text
    assert "<script>" not in text
    assert "<img" not in text


def test_the_notes_of_a_run_are_kept_and_missed_criteria_come_first() -> None:
    notes = (
        "T64, forward: 33 input sets rotated.",
        "T64, forward: No A/A run: it failed.",
        "No DRAM bytes were counted at T64: refused",
    )
    result = results.largest().model_copy(update={"notes": notes})
    assert set(notes[1:]) <= set(summarize(result).open)
    assert notes[0] not in summarize(result).open
    assert next(section for section in details(result) if section.title == "Notes of the run").text == notes


def test_without_the_baseline_speedups_use_another_that_is_named(prose) -> None:
    result = results.proceed_on_gpu()
    cells = tuple(cell for cell in result.cells if cell.variant != "three_launch_cublas")
    table = summarize(result.model_copy(update={"cells": cells})).use[-1]
    prose(table.note)


def test_a_plot_of_times_draws_the_roofline_bound() -> None:
    for make in (results.proceed_on_gpu, results.largest, results.wrong_and_invalid):
        times = [plot.svg for plot in plots_of(make) if plot.title.startswith("Time")]
        assert times
        assert all("roofline bound" in svg and "var(--floor)" in svg for svg in times)


@every_result
@pytest.mark.parametrize("width", [80, pytest.param(120, marks=pytest.mark.thorough)])
def test_terminal_lines_fit_and_a_pipe_gets_no_escape_codes(make: Maker, width: int) -> None:
    for full in (False, True):
        text = terminal(make(), width, full=full)
        assert max(map(len, text.splitlines())) <= width
        assert "\x1b" not in text


def test_a_terminal_gets_colours() -> None:
    assert "\x1b[" in terminal(results.proceed_on_gpu(), force_terminal=True, color_system="standard")


def test_the_full_terminal_has_every_section() -> None:
    result = results.proceed_on_gpu()
    text = plain(terminal(result, 160, full=True))
    for section in details(result):
        assert section.title in text


def test_a_full_disk_leaves_no_empty_report(tmp_path, monkeypatch, prose) -> None:
    """The third of the three files (result.json, report.md, report.html) cannot be written."""
    synced: list[int] = []

    def sync(handle: int) -> None:
        synced.append(handle)
        if len(synced) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("onelaunch.files.os.fsync", sync)
    with prose.raises(OutputUnwritable, match=r"report\.html"):
        write_report(results.proceed_on_gpu(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.md", "result.json"]


def test_a_pipe_in_the_folder_of_a_report_is_another_result(tmp_path) -> None:
    """A named pipe is refused like the file of another result. Reading it would wait for a writer."""
    os.mkfifo(tmp_path / "result.json")
    with pytest.raises(ResultExists):
        write_report(results.proceed_on_gpu(), tmp_path)


def test_write_report_writes_three_files_and_keeps_another_result(tmp_path) -> None:
    result = results.wrong_and_invalid()
    paths = write_report(result, tmp_path / "new" / "report")
    assert {kind: path.name for kind, path in paths.items()} == {
        "markdown": "report.md",
        "html": "report.html",
        "json": "result.json",
    }
    assert Result.load(paths["json"]) == result
    assert write_report(result, tmp_path / "new" / "report") == paths  # the same result again is no conflict
    other = results.nothing_ran()
    with pytest.raises(ResultExists, match=re.escape("result.json")):
        write_report(other, tmp_path / "new" / "report")
    assert Result.load(paths["json"]) == result
    write_report(other, tmp_path / "new" / "report", force=True)
    assert Result.load(paths["json"]) == other


@pytest.mark.parametrize("which", ["use", "times", "criteria", "missing", "provenance"])
def test_tables_for_documents_are_markdown_with_their_source(which) -> None:
    """The last line names the device and the commit."""
    text = docs_table(results.proceed_on_gpu(), which)
    assert text.count("\n| -") + text.count("\n|:-") >= 1
    assert "NVIDIA H200" in text.splitlines()[-1]
    assert "d1e54a6" in text.splitlines()[-1]


def test_tables_for_documents_can_be_filtered() -> None:
    result = results.proceed_on_gpu()
    one = docs_table(result, "times", direction="forward", shape="target")
    assert one.count("**target") == 1
    assert "8x2048" not in one
    assert docs_table(result, "use", direction=DIRECTIONS[0]).count("**Forward") == 1


def test_the_table_writer_preserves_unusual_text() -> None:
    table = Table("t", columns("a", ">b"), (("x | y <z>", "1"), ("`c` *d*", "22")), "note")
    lines = to_markdown(table).splitlines()
    assert lines[2] == "| a           |   b |"
    assert lines[3] == "| ----------- | --: |"
    assert lines[4] == r"| x \| y \<z> |   1 |"
    assert "x | y &lt;z&gt;" in to_html(table)
    buffer = io.StringIO()
    Console(file=buffer, width=60).print(to_rich(table, 60))
    assert "x | y <z>" in buffer.getvalue()
    assert "`c` *d*" in buffer.getvalue()


@pytest.mark.parametrize("width", [64, 73, 80, 97, 120])
def test_a_terminal_cuts_no_table_off(width: int) -> None:
    """rich alone makes this table wider than the terminal, since one column has a long word and the others have sentences."""
    heads = columns("study", "device", "measured", "over the fastest peer", ">ratio")
    said = "3.27x (1.37x to 22.0x, 59 shapes; the peer is outside the gate at 33)"
    note = "Speed of the fastest variant: geometric mean over the shapes at which both were timed, with the smallest value."
    table = Table("", heads, (("058-projection-chain", "NVIDIA H100 80GB HBM3", said, said, "1.25x"),), note)
    buffer = io.StringIO()
    console = Console(file=buffer, width=width)
    console.print(to_rich(table, width))
    text = buffer.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert note in " ".join(text.split())
    assert {"058-projection-chain", "1.25x"} <= set(text.split())


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (q.time(7.9234), "7.92 µs"),
        (q.time(90130.0), "90.1 ms"),
        (q.time(2.5e6), "2.50 s"),
        (q.time(-2.03), "-2.03 µs"),
        (q.time(999.96), "1000 µs"),
        (q.time(0.0), "0 µs"),
        (q.interval(Estimate(median=1234.5, low=1200.0, high=1300.0, samples=9)), "1.23 ms [1.20, 1.30]"),
        (q.ratio(1.5714), "1.57x"),
        (q.size(7 * 2**20), "7.00 MiB"),
        (q.size(12), "12 B"),
        (q.size(0), "0 B"),
        (q.rate(4.02e12, "B/s"), "4.02 TB/s"),
        (q.work(2.68e8), "268 MFLOP"),
        (q.percent(1.014), "1.4 %"),
        (q.scientific(3.1e-4), "3.1e-04"),
        (q.scientific(float("inf")), "not finite"),
        (q.span([7, 20, 20]), "7 to 20"),
        (q.plural(1, "round"), "1 round"),
        (q.plural(2, "study", "studies"), "2 studies"),
    ],
)
def test_numbers_have_one_spelling(text: str, want: str) -> None:
    assert text == want
