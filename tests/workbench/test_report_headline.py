"""Tests of the first lines of a report: the decision and its strongest evidence, with each piece of evidence given once.

``headline`` returns the parts: ``sentence`` (why the decision is what it is), ``grounds`` (reasons that the criteria do not
state) and, if this machine could not answer the study's question, ``found`` (what it measured) and ``elsewhere`` (committed
results of other devices). ``prose`` compares a text with its entry in tests/snapshots/prose.txt, whose key is the node id of
the test. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an
entry is gone.

``keep_texts_alone`` leaves the texts of plots only. A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import functools
import html.parser
import json
from pathlib import Path

import pytest

from onelaunch.workbench.report import committed, markdown, page
from onelaunch.workbench.report.headline import counts, headline
from onelaunch.workbench.report.summary import first_tables, summarize
from onelaunch.workbench.result import Decision, Outcome, ProbeReport, Result
from onelaunch.workbench.study import Criterion
from tests.workbench import results
from tests.workbench.drawn import keep_texts_alone
from tools.summarize_results import summarized


@pytest.fixture(autouse=True)
def texts_alone(monkeypatch, plots_drawn_once) -> None:
    """Let the plots of pages hold their texts only, instead of what ``plots_drawn_once`` has put in place before."""
    keep_texts_alone(monkeypatch)


ROOT = Path(__file__).parents[2]
H200 = ROOT / "results" / "nvidia-h200"


@functools.cache
def stored(name: str = "040-linear-rnn") -> Result:
    """Return the result of a study on an H200 that is committed in the repository."""
    return Result.load(H200 / f"{name}.json")


def text_of(page_text: str) -> str:
    """Return the text of a page as a reader perceives it."""

    class Text(html.parser.HTMLParser):
        found = ""

        def handle_data(self, data: str) -> None:
            self.found += data

    reader = Text()
    reader.feed(page_text)
    return " ".join(reader.found.split())


def outcome(name: str, status: str, **more) -> Outcome:
    """Return a judged criterion on a speedup; ``more`` holds ``median`` (the measured value) and fields of the criterion."""
    criterion = Criterion(name=name, measure="speedup", of="chunked", over="eager", at="small-128", at_least=2.0)
    value = {"small-128": results.estimate(more.pop("median"))} if "median" in more else {}
    return Outcome(criterion=criterion.model_copy(update=more), status=status, evidence=f"evidence of {name}.", values=value)


def decided(kind: str, *outcomes: Outcome, because: tuple[str, ...] = ()) -> Result:
    """Return a made-up result with these criteria and a decision of this kind for these reasons."""
    base = results.interrupted_on_cpu()
    study = base.study.model_copy(update={"criteria": tuple(one.criterion for one in outcomes)})
    decision = Decision(kind=kind, because=because)
    return base.model_copy(update={"study": study, "outcomes": outcomes, "decision": decision, "interrupted": False})


def test_met_and_excluded_criteria_are_counted_separately(prose) -> None:
    prose(counts(stored()))
    # The first reason of a decision counts the criteria too.
    assert stored().decision.because[0] not in text_of(page.render(stored())), "the first screen counts the criteria"
    lesson = outcome("lesson", "met", median=3.0, decides=False)
    prose(counts(decided("proceed", outcome("a", "met"), lesson)))
    prose(counts(decided("proceed", outcome("a", "met"), outcome("b", "met"))))


@pytest.mark.parametrize(
    "name", ["040-linear-rnn", "058-gla-layer", pytest.param("dual-gemm-swiglu", marks=pytest.mark.thorough)]
)
def test_the_evidence_of_a_criterion_is_on_a_page_once(name: str) -> None:
    result = stored(name)
    text, written = text_of(page.render(result)), " ".join(markdown.render(result).replace("\\", "").split())
    for one in result.outcomes:
        evidence = " ".join(one.evidence.replace(" us", " µs").split())
        assert text.count(evidence) == sum(other.evidence == one.evidence for other in result.outcomes)
        assert written.count(evidence) == text.count(evidence)
    assert "best of 4), at least 1.3 was asked. Best of" not in text  # the evidence names the 4 already


def test_the_decision_to_proceed_quotes_a_met_speedup_with_its_numbers(prose) -> None:
    better, closer = outcome("a", "met", median=5.0), outcome("b", "met", median=2.5)
    error = outcome("exact", "met", measure="error", at_least=None, at_most=1.0, median=0.001)
    sentence = headline(decided("proceed", closer, error, better)).sentence
    prose(sentence)


def test_a_missed_criterion_is_named_with_its_requirement(prose) -> None:
    sentence = headline(decided("debug", outcome("a", "met", median=5.0), outcome("fast", "missed", median=0.5))).sentence
    prose(sentence)


def test_a_wrong_variant_is_named_first(prose) -> None:
    head = headline(results.wrong_and_invalid())
    prose(head.sentence)
    assert not head.grounds  # the headline names it already


def test_grounds_omit_what_the_criteria_state() -> None:
    """The count of met criteria, the evidence of each, and the excluded criteria are shown with the criteria."""
    missed = outcome("fast", "missed", median=0.5)
    because = (
        "0 of 1 criteria are met: none.",
        "'fast' is missed: evidence of fast. At small-128 chunked is 3x above the floor; most likely launches.",
        "Set aside: 'other' is infeasible and never counts as met: evidence.",
        "A sentence of its own.",
    )
    grounds = headline(decided("debug", missed, because=because)).grounds
    assert grounds == (
        "'fast': At small-128 chunked is 3x above the floor; most likely launches.",
        "A sentence of its own.",
    )


def on_cpu(digest: str | None = None) -> Result:
    """Return a made-up run of study 040 on a CPU, also for ``test_report_browser.py``.

    Its criteria are about shapes of full scale, which did not run.
    ``digest`` is that of its declaration, by default that of the committed result on the H200.
    """
    gpu = stored()
    shapes = (*gpu.study.shapes, results.shape("small", "small", "float32", B=2, T=64, D=64, V=64))
    study = gpu.study.model_copy(update={"shapes": shapes, "criteria": gpu.study.criteria[:2]})
    of = shapes[-1]
    cells = tuple(
        results.ok_cell(of, variant, ceilings=results.CPU_CEILINGS, direction=direction)
        for direction in ("forward", "forward_backward")
        for variant in ("eager", "chunked", "compiled")
    )
    unmeasured = {"status": "not_measured", "values": {}, "evidence": "Needs full scale: run on a GPU, or with --scale full."}
    return gpu.model_copy(
        update={
            "study": study,
            "study_digest": digest or gpu.study_digest,
            "provenance": results.provenance("AMD EPYC", "cpu", "x86_64", scale="small", driver=""),
            "cells": cells,
            "noise": (),
            "outcomes": tuple(one.model_copy(update=unmeasured) for one in gpu.outcomes[: len(study.criteria)]),
            "decision": Decision(kind="measure_more", because=("'fused is faster' is not measured.",)),
        }
    )


def test_a_cpus_headline_is_its_own_result_then_another_devices(prose) -> None:
    head = headline(on_cpu())
    prose(head.found[0])
    assert "forward + backward" in head.found[0]
    prose(head.sentence)
    entry = committed.committed("040-linear-rnn")[0]
    for part in ("NVIDIA H200", "2026-11-21", entry.commit[:12], entry.study_digest[:8], "proceed", entry.sentence):
        assert part in head.elsewhere[0]
    assert "declared differently" not in head.elsewhere[0]
    for form in (text_of(page.render(on_cpu())), markdown.render(on_cpu())):
        assert form.index(head.found[0][:20]) < form.index("2 of 2 criteria") < form.index("NVIDIA H200")


def test_a_committed_result_of_another_declaration_is_marked() -> None:
    assert "declared differently" in headline(on_cpu(digest="0" * 64)).elsewhere[0]
    assert not headline(stored()).elsewhere  # it ran all shapes that its criteria ask for


def test_no_gain_is_claimed_within_the_noise(prose) -> None:
    base = on_cpu()
    loud = tuple(
        results.Noise(shape="small", direction=way, regime="cold", ratio=results.estimate(1.0), floor=1e6)
        for way in ("forward", "forward_backward")
    )
    prose(headline(base.model_copy(update={"noise": loud})).found[0])


def with_cells(keep, **changes) -> Result:
    """Return the run on a CPU with only the measurements that ``keep`` accepts, and these fields of them changed."""
    base = on_cpu()
    return base.model_copy(update={"cells": tuple(cell.model_copy(update=changes) for cell in base.cells if keep(cell))})


def test_a_rejected_time_does_not_count_as_missing() -> None:
    (said,) = headline(with_cells(lambda cell: cell.variant == "compiled" and cell.timings, status="invalid")).found
    assert "compiled" in said
    assert "not valid" in said
    assert headline(with_cells(lambda cell: True, status="error", timings=())).found == ("Nothing was timed.",)


def test_a_single_variant_is_not_compared_with_itself(prose) -> None:
    (said,) = headline(with_cells(lambda cell: cell.variant == "eager")).found
    assert "eager" in said
    prose(said)
    (said,) = headline(with_cells(lambda cell: cell.variant != "eager")).found
    prose(said, mask={r"\d+(\.\d+)?": "<number>"})


def test_the_best_of_several_gains_is_an_upper_bound() -> None:
    assert " is up to " in headline(on_cpu()).found[0]
    (said,) = headline(with_cells(lambda cell: cell.variant in ("eager", "compiled") and cell.direction == "forward")).found
    assert "compiled is " in said
    assert "up to" not in said


def test_the_worst_miss_of_an_exact_bound_is_named() -> None:
    """Exactly 3 launches were asked: 30 is worse than 4, and 0 is worse than 30. 1.9 for 2.0 is the smallest miss."""
    counted = {"at_least": None, "measure": "launches", "of": "chunked"}
    near = outcome("near", "missed", median=4.0, equals=3, **counted)
    far = outcome("far", "missed", median=30.0, equals=3, **counted)
    below = outcome("below", "missed", median=0.0, equals=3, **counted)
    slow = outcome("slow", "missed", median=1.9)
    for outcomes, worst in (((near, far, slow), "far"), ((slow, near), "near"), ((far, below), "below")):
        assert headline(decided("debug", *outcomes)).sentence.startswith(f"'{worst}'")


def test_only_short_tables_are_on_the_first_screen() -> None:
    # ``use`` are the tables of the fastest variants, one for each direction.
    first, later = first_tables(summarize(on_cpu()).use)
    assert (len(first), len(later)) == (2, 0)
    assert [bool(table.note) for table in first] == [False, True]
    first, later = first_tables(summarize(stored()).use)
    assert (len(first), len(later)) == (1, 1)
    assert first[0].note
    assert later[0].note


def test_committed_headlines_match_the_results_in_the_repository() -> None:
    path = Path(committed.__file__).with_name(committed.FILE)
    assert path.read_text(encoding="utf-8") == summarized(ROOT / "results"), "run: python -m tools.summarize_results"
    for entry in json.loads(path.read_text(encoding="utf-8")):
        assert all(entry[key] for key in ("study", "study_digest", "device", "date", "commit", "decision", "sentence"))


def test_failed_probes_are_open_questions() -> None:
    failed = ProbeReport(passed=3, failed=("odd_columns, forward: y is not finite everywhere.", "one_step, forward: TypeError"))
    result = results.proceed_on_gpu().model_copy(update={"probes": {"semi_fused": failed, "fla": ProbeReport(passed=5)}})
    text = " ".join(markdown.render(result).replace("\\", "").split())
    assert "semi_fused failed 2 probes (edge cases), so it cannot be adopted: odd_columns, one_step." in text
    assert text.count("(edge cases)") == 1
