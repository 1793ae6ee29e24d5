"""Tests of what limits a decision: criteria that cannot fail, slow baselines, and launches that are declared but not counted.

Measurements are made up by ``ladder.py``, as in ``test_decision.py``: the baseline is ``three`` (three launches), ``one`` and
``two`` have one and two, ``peer`` is another project's variant and ``product`` a control. ``prose`` compares a text with its
entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it does not compare one of its
entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``MEGA`` is a shape of full scale. ``study`` declares a study of all variants, with ``three`` as the baseline. ``ok_cell`` makes
up a correct measurement. ``bad_cell`` makes up a measurement without times. ``measured`` makes up a result of measurements.
"""

from __future__ import annotations

import html
import io
from dataclasses import replace

import pytest
from rich.console import Console

from onelaunch.workbench import stats
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.measure import timing
from onelaunch.workbench.report import markdown, page
from onelaunch.workbench.report.summary import summarize
from onelaunch.workbench.report.terminal import show
from onelaunch.workbench.result import Noise, Timing
from onelaunch.workbench.study import Criterion
from onelaunch.workbench.study.plan import LEFT_OUT
from tests.workbench import runs, toy
from tests.workbench.ladder import MEGA, bad_cell, measured, ok_cell, study
from tests.workbench.runs import quick  # noqa: F401 - a fixture that applies to every test here

FASTER = Criterion(name="faster", measure="speedup", of="one", at_least=1.3)
BY_LAUNCHES = Criterion(name="one launch is faster", measure="speedup", of={"launches": 1}, at_least=1.3)


def decided(declared, *cells, **more):
    """Return a result of these measurements, judged and decided."""
    return concluded(measured(declared, *cells, **more))


def forms(result):
    """Return the report on a result in each form, in one line each."""
    console = Console(file=io.StringIO(), width=200)
    show(result, console)
    made = {"terminal": console.file.getvalue(), "markdown": markdown.render(result), "page": page.render(result)}
    return {form: " ".join(html.unescape(text.replace("\\", "")).split()) for form, text in made.items()}


# Criteria that cannot fail

VACUOUS = {
    "a variant over itself": Criterion(name="vacuous", measure="time_ratio", of="one", over="one", at_most=1.1),
    "the only variant with a tag over itself": Criterion(
        name="vacuous", measure="speedup", of={"gemm": "library", "launches": 2}, over="two", at_least=0.9
    ),
    "a worse variant beats another": Criterion(name="vacuous", measure="speedup", of="one", over="two", at_least=0.1),
    "at most three times as slow": Criterion(name="vacuous", measure="time_ratio", of="one", at_most=3),
    "the fastest of all over one of them": Criterion(name="vacuous", measure="speedup", of={}, over="three", at_least=1.0),
    "bytes over the least": Criterion(name="vacuous", measure="dram_bytes_over_least", of="one", at_least=1.0),
    "memory over itself": Criterion(name="vacuous", measure="peak_memory_ratio", of="one", over="one", at_most=1),
}
CELLS = (
    ok_cell("three", 10.0, counted=8e6, peak=10),
    ok_cell("one", 5.0, counted=4e6, peak=10),
    ok_cell("two", 7.0, counted=6e6, peak=10),
)


@pytest.mark.parametrize("kind", VACUOUS)
def test_a_criterion_that_cannot_fail_decides_nothing(kind, prose):
    """Each of them once gave *proceed* alone."""
    result = decided(study(VACUOUS[kind]), *CELLS)
    assert result.outcomes[0].status in ("met", "inconclusive")
    assert result.decision.kind == "measure_more"
    prose(result.decision.because[-1])
    (row,) = summarize(result).criteria.rows
    assert row[1].endswith("(excluded)")
    assert "acuous" in row[3]


@pytest.mark.parametrize("kind", VACUOUS)
def test_a_vacuous_criterion_beside_an_honest_one_is_named(kind):
    result = decided(study(FASTER, VACUOUS[kind]), *CELLS)
    assert result.decision.kind == "proceed"
    assert result.decision.because[0] == "Every criterion is met: 'faster'."
    for form, text in forms(result).items():
        assert "acuous and never counts as met" in text, form


def test_criteria_that_can_fail_are_not_vacuous():
    half = MEGA.model_copy(update={"name": "half"})
    for criterion in (
        FASTER,
        Criterion(name="near a control", measure="time_ratio", of="one", over="product", at_most=3),
        Criterion(name="another shape", measure="time_ratio", of="one", over="one", at="mega", over_at="half", at_most=2),
        Criterion(name="never slower", measure="speedup", of="one", over="two", at_least=1.0),
        Criterion(name="a third more", measure="time_ratio", of="one", over="two", at_most=1.33),
        Criterion(name="the fastest gains", measure="speedup", of={}, at_least=1.3),
        Criterion(name="itself, asked for too much", measure="speedup", of="one", over="one", at_least=1.3),
    ):
        result = decided(study(criterion, shapes=(MEGA, half)), *CELLS, ok_cell("product", 4.2), ok_cell("one", 5.0, of=half))
        assert not [line for line in result.decision.because if "vacuous" in line], criterion.name


# Faster variants of other makers


def test_a_baseline_that_another_makers_variant_beats_is_named_with_the_ratio_to_it(prose):
    """The decision stays *proceed*, and says what ``one`` is over ``peer``, which is faster than the baseline."""
    result = decided(study(FASTER), ok_cell("three", 20.0), ok_cell("one", 5.0), ok_cell("peer", 4.5))
    assert result.decision.kind == "proceed"
    prose(result.decision.notes)
    for form, text in forms(result).items():
        assert "peer (by a_package_that_nobody_has) is faster than the baseline three" in text, form
        assert "one is 0.900x" in text, form


@pytest.mark.parametrize(
    ("peer", "more"),
    [(21.0, {}), (19.9, {"floor": 1.05}), (4.5, {"floor": None})],
    ids=["slower than the baseline", "within the noise", "noise unknown"],
)
def test_a_peer_that_is_not_faster_than_the_baseline_is_not_named(peer, more):
    result = decided(study(FASTER), ok_cell("three", 20.0), ok_cell("one", 5.0), ok_cell("peer", peer), **more)
    assert result.decision.notes == ()


def test_a_variant_of_the_same_maker_is_no_peer():
    """Studies of several own variants always have one that is faster than the baseline."""
    result = decided(study(FASTER), ok_cell("three", 20.0), ok_cell("one", 5.0), ok_cell("two", 4.5))
    assert result.decision.notes == ()


def test_a_peer_that_is_faster_at_several_shapes_is_named_once_with_the_worst(prose):
    half = MEGA.model_copy(update={"name": "half"})
    cells = [ok_cell(name, time, of=of) for of in (MEGA, half) for name, time in (("three", 20.0), ("one", 5.0))]
    cells += [ok_cell("peer", 9.0), ok_cell("peer", 6.0, of=half)]
    prose(decided(study(FASTER, shapes=(MEGA, half)), *cells).decision.notes)


def test_a_loop_as_the_baseline_while_a_fast_variant_runs_in_the_same_study(monkeypatch):
    """The author's ``mine`` does honest work twice. It is 4 times as fast as the loop, and slower than ``parallel``.

    The calls are made and judged; their times are replaced, because those of a busy machine vary too much.
    """
    times = {"eager": 1000.0, "parallel": 125.0, "mine": 250.0}

    def twice(call):
        toy.parallel.run(call)
        return toy.parallel.run(call)

    def measure(*arguments, **options):
        found = timing.measure(*arguments, **options)
        for name, candidate in found.candidates.items():
            assert candidate.status == "ok"
            samples = (times[name],) * 5
            candidate.timings = (Timing(regime="cold", microseconds=stats.estimate(samples), rounds=samples),)
        quiet = Noise(shape="first", direction="forward", regime="cold", ratio=stats.estimate([1.0] * 5), floor=1.01)
        return replace(found, noise=(quiet,))

    monkeypatch.setattr(toy.toy_sum, "variants", dict(toy.toy_sum.variants))
    toy.toy_sum.variant("mine", maker="the author")(twice)
    criterion = Criterion(name="mine is faster", measure="speedup", of="mine", at="first", at_least=3)
    declared = runs.study(criterion, variants=("eager", "parallel", "mine"), shapes=runs.study().shapes[:1])
    result = runs.run(declared, steps=runs.steps(measure=measure))
    assert result.outcomes[0].status == "met"
    (note,) = [note for note in result.decision.notes if note.startswith("parallel")]
    assert "faster than the baseline eager" in note
    assert "8.00x" in note
    assert "mine is 0.500x" in note


# Launches that are declared


def test_launches_that_were_not_counted_are_called_declared(prose):
    result = decided(study(BY_LAUNCHES), ok_cell("three", 10.0), ok_cell("one", 5.0))
    prose(result.decision.notes)
    for form, text in forms(result).items():
        assert "the launches of a call were not counted" in text, form
    counted = decided(study(BY_LAUNCHES), ok_cell("three", 10.0), ok_cell("one", 5.0, launches=1))
    assert counted.decision.notes == ()
    assert counted.decision.kind == "proceed"
    assert decided(study(FASTER), ok_cell("three", 10.0), ok_cell("one", 5.0)).decision.notes == ()


def test_a_variant_that_declares_one_launch_and_makes_two_is_not_believed(prose):
    """A criterion that asks for the fastest variant with one launch once took the tag's word for it."""
    wrong = decided(study(BY_LAUNCHES), ok_cell("three", 10.0), ok_cell("one", 5.0, launches=2))
    assert wrong.outcomes[0].status == "not_measured"
    assert wrong.decision.kind == "measure_more"
    prose(wrong.outcomes[0].evidence)
    prose(wrong.decision.notes)
    other = decided(study(BY_LAUNCHES), ok_cell("three", 10.0), ok_cell("one", 5.0, launches=2), ok_cell("forward_only", 6.0))
    assert other.outcomes[0].evidence.startswith("forward_only is 1.67x")


# Edited decisions


def test_an_edited_decision_is_contradicted_in_every_form_of_the_report():
    missed = Criterion(name="much faster", measure="speedup", of="one", at_least=2.4)
    result = decided(study(missed), ok_cell("three", 10.0), ok_cell("one", 5.0))
    edited = result.model_copy(update={"decision": result.decision.model_copy(update={"kind": "proceed"})})
    said = "The stored decision is 'proceed', but the criteria and measurements of this result give 'debug'."
    for form, text in forms(edited).items():
        assert said in text, form
    for form, text in forms(result).items():
        assert "stored decision" not in text, form


def test_injected_text_becomes_markup_in_no_form_of_the_report():
    """The page escaped such text, and the Markdown report did not."""
    hostile = "<script>alert(1)</script> [here](javascript:alert(1)) ![x](https://example.org/x.png) | a | b"
    result = decided(study(FASTER), ok_cell("three", 10.0), ok_cell("one", 5.0))
    notes = (hostile, f"No byte was counted at mega: {hostile}")
    result = result.model_copy(
        update={"notes": notes, "decision": result.decision.model_copy(update={"kind": "debug", "unexplained": (hostile,)})}
    )
    text = markdown.render(result)
    assert r"\<script>" in text
    assert "<script>" not in text.replace(r"\<script>", "")
    assert "[here](" not in text.replace(r"[here\](", "")
    assert "<script>alert" not in page.render(result)


def test_a_picked_shape_a_skipped_rival_and_an_undecided_failure_are_all_reported():
    """The decision is *proceed* by the author's choice. The first screen says of each choice what it is."""
    shapes = tuple(MEGA.model_copy(update={"name": f"mega-{index}"}) for index in range(4))
    picked = Criterion(name="picked", measure="speedup", of="one", at_least=1.3, in_at_least=1)
    failure = Criterion(name="failure", measure="speedup", of="two", at_least=1.3, at="mega-0", decides=False)
    cells = [ok_cell("three", 10.0, of=shape) for shape in shapes] + [ok_cell("one", 5.0, of=shapes[0])]
    cells += [ok_cell("one", 20.0, of=shape) for shape in shapes[1:]] + [ok_cell("two", 20.0, of=shape) for shape in shapes]
    cells += [bad_cell("peer", "unsupported", LEFT_OUT, of=shapes[0]), *(ok_cell("peer", 5.0, of=shape) for shape in shapes[1:])]
    result = decided(study(picked, failure, shapes=shapes), *cells)
    assert result.decision.kind == "proceed"
    for form, text in forms(result).items():
        for said in ("at 1 of 4 shapes, 1 needed", LEFT_OUT, "missed (excluded)", "eclared not to decide"):
            assert said in text, (form, said)
        assert "peer (by a_package_that_nobody_has) is faster than the baseline three at 3 shapes" in text, form
