"""Tests of measures as registered objects: a new one is one file, and is used from the declaration to the report.

A measure is a quantity that a study's criterion can ask for, such as ``speedup``. The new one, ``operators``, is that of
``toy_measure.py``: the number of PyTorch operators in one call of the operation ``toy_sum``. ``prose`` compares a text with its
entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it does not compare one of its
entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

from onelaunch.device.hardware import Ceilings
from onelaunch.errors import StudyError
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.decide.judging import Finding
from onelaunch.workbench.decide.measured import JudgedMeasure, judged
from onelaunch.workbench.measure import rotation, sampling, timing
from onelaunch.workbench.report import markdown
from onelaunch.workbench.report.headline import headline
from onelaunch.workbench.result import Result
from onelaunch.workbench.run import Steps, run_study
from onelaunch.workbench.study import Alone, Criterion, Measure, find_measure, measure, measure_names, measures, register
from onelaunch.workbench.study.plan import plan_study
from onelaunch.workbench.study.read import load_study
from tests.workbench import toy

# Made-up peaks: 1 TB/s, 10 TFLOP/s, 1 us a launch.
RATES = Ceilings(1e12, {"float32": 1e13}, 1e-6, "2026-11-20T12:00:00+00:00", "made up")
FILE = Path(__file__).with_name("toy_measure.py")
STUDY = """
name = "few-operators"
question = "Does it run few operators?"
operation = "toy_sum"
baseline = "eager"
variants = ["eager", "parallel"]
regimes = ["cold"]
rounds = 3
directions = ["forward", "forward_backward"]

[[shapes]]
name = "first"
dtype = "float32"
scale = "small"
B = 2
T = 24
V = 8

[[criteria]]
name = "few operators"
measure = "operators"
of = "parallel"
at = "first"
at_most = 60
"""

assert toy.toy_sum.name == "toy_sum"  # registered by its import


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Replace the registry by a copy, so that no other test sees the measures registered here."""
    monkeypatch.setattr(measure, "_MEASURES", dict(measure._MEASURES))


@pytest.fixture
def operators():
    """Register the measure ``operators`` by running its file, and return it."""
    spec = importlib.util.spec_from_file_location("toy_measure_of_one_file", FILE)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return find_measure("operators")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that writes ``STUDY``, with some texts replaced, and returns its path. Runs are made short as well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(timing.WARM_UP_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(rotation, "CACHES", 0)  # two input sets instead of as many as exceed the caches
    monkeypatch.setattr(sampling, "CPU_SAMPLE_SECONDS", 1e-4)

    def write(*changes: tuple[str, str]) -> Path:
        text = STUDY
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        path = tmp_path / "few-operators.toml"
        path.write_text(text)
        return path

    return write


def test_a_measure_in_one_file_works_from_declaration_to_report(operators, written, prose):
    study = load_study(written())
    assert study.criteria[0].quantity is operators
    assert plan_study(study, RATES, "cpu", "small").infeasible == {}
    result = run_study(study, device="cpu", steps=Steps(ceilings=lambda _: RATES), save_to=Path("result.json"))
    cell = result.cell("first", "parallel")
    assert 0 < cell.count("operators") <= 60
    assert cell.counts == {"operators": cell.count("operators")}
    unasked = result.cell("first", "eager")  # no criterion names it
    assert unasked.count("operators") is None
    assert "counts" not in unasked.model_dump(), "results without the measure are stored unchanged"
    (outcome,) = result.outcomes
    assert outcome.status == "met"
    assert outcome.values["first"].median == cell.count("operators")
    assert result.decision.kind == "proceed"
    assert Result.load(Path("result.json")) == result
    assert concluded(result).outcomes == result.outcomes
    assert "parallel runs" in headline(result).sentence
    prose(headline(result).sentence, mask={r"[\d.]+ operators": "<number> operators"})
    report = markdown.render(result)
    prose(outcome.evidence, mask={r"[\d.]+ operators": "<number> operators"})
    assert outcome.evidence in report
    assert f"{cell.count('operators')} operators" in report.partition("Bytes and launches")[2]


def test_a_missed_criterion_is_reported(operators, written):
    study = load_study(written(("at_most = 60", "equals = 1")))
    result = run_study(study, device="cpu", steps=Steps(ceilings=lambda _: RATES), save_to=Path("result.json"))
    assert result.outcomes[0].status == "missed"
    assert result.decision.kind == "debug"


def test_a_bound_that_arithmetic_refutes_is_infeasible(operators, written):
    """The measure's own rule: no call runs without an operator."""
    plan = plan_study(load_study(written(("at_most = 60", "equals = 0"))), RATES, "cpu", "small")
    assert "few operators" in plan.infeasible


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ([("at_most", "at_least")], ""),
        ([('of = "parallel"', 'of = "parallel"\nover = "eager"')], ""),
        ([("at_most = 60", 'at_most = 60\ndirection = "forward_backward"')], ""),
        ([("at_most = 60", "equals = -1")], ""),
        ([('"operators"', '"operator"')], "'operators'"),
    ],
    ids=["bound", "over", "its own rule", "count", "misspelt"],
)
def test_a_declaration_is_checked_by_the_rules_of_its_measure(operators, written, changes, problem, prose):
    with prose.raises(StudyError, match=problem):
        load_study(written(*changes))


def test_a_measure_that_is_not_registered_is_refused(written, prose):
    with prose.raises(StudyError, match="'launches'"):  # the message lists the known measures
        load_study(written())
    with pytest.raises(ValueError, match="literal_error"):  # pydantic's name for a value that is none of the allowed ones
        Criterion(name="c", measure="operators", of="parallel", at_most=1)


def test_a_measures_name_must_be_new_and_valid(operators, prose):
    with prose.raises(ValueError):

        @register
        class Again(Measure):
            name = "operators"
            alone = Alone("", "")

    with prose.raises(ValueError):

        @register
        class Loud(Measure):
            name = "OPERATORS"

    with prose.raises(ValueError):  # a counted measure is of one variant, so it needs ``alone``

        @register
        class Compared(Measure):
            name = "compared"
            counted = True

    assert measure_names()[-1] == "operators"  # none of the three was registered


def test_a_measure_that_is_better_when_higher_needs_a_lower_bound(written, prose):
    @register
    class Reuse(JudgedMeasure):
        name = "reuse"
        better = "higher"
        alone = Alone("reuse is one variant's", "a reuse is")
        evidence, demand, told = "the reuse of {of} is", "{of} has a reuse of {bound}", "{of} has a reuse of {amount}"

        def judge(self, result, criterion, cells, among):
            return Finding(cells[0].shape, "not_measured", "nothing", "nothing")

    with prose.raises(StudyError, match="at_least"):
        load_study(written(('"operators"', '"reuse"')))
    assert load_study(written(('"operators"', '"reuse"'), ("at_most", "at_least"))).criteria[0].quantity.name == "reuse"


def test_a_measure_without_a_judge_method_is_named():
    @register
    class Mute(Measure):
        name = "mute"

    with pytest.raises(TypeError, match="JudgedMeasure"):
        judged(Criterion(name="c", measure="mute", of="parallel", at_least=1.0))


@pytest.mark.parametrize("each", measures(), ids=lambda each: each.name)
def test_every_measure_has_a_description(each):
    assert isinstance(each, JudgedMeasure)
    assert each.meaning
    assert inspect.getdoc(type(each))
    sides = {"of": "ONE", "over": "OTHER"}
    texts = (each.evidence.format(**sides), each.demand.format(**sides, bound="B"), each.told.format(**sides, amount="A"))
    for text in texts:
        assert "ONE" in text
        assert ("OTHER" in text) == (each.alone is None)  # ``alone`` is set for measures of one variant
    # The rank orders measures in a headline, so no two have the same.
    assert len({other.rank for other in measures()}) == len(measures())
