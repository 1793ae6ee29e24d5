"""Tests of predictions: read from study files, kept out of digests where there are none, and reported beside what was measured.

Measurements are made up with ``ladder.py``: in every test the baseline ``three`` takes 10 us, ``one`` 5 us. ``prose`` compares
a text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it does not compare
one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``MEGA`` is a shape of full scale. ``TINY`` is a shape of small scale. ``ok_cell`` makes up a correct measurement. ``bad_cell``
makes up a measurement without times.
"""

from __future__ import annotations

import hashlib
import io

import pytest
from rich.console import Console

from onelaunch.errors import StudyError
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.decide.predictions import compared_predictions
from onelaunch.workbench.report import markdown, page, terminal
from onelaunch.workbench.report.details import details
from onelaunch.workbench.report.predictions import tally
from onelaunch.workbench.result import Result
from onelaunch.workbench.study import Criterion, Prediction
from onelaunch.workbench.study.read import load_study
from tests.workbench.ladder import MEGA, TINY, bad_cell, measured, ok_cell, study

WRITTEN = """
name = "ladder-study"
question = "Is one launch enough?"
operation = "ladder"
baseline = "three"

[[predictions]]
by = "write-up 040"
measure = "speedup"
of = "one"
at = "mega"
value = 1.3
why = "One round trip and two launches are saved."

[[shapes]]
name = "mega"
N = 1000
V = 1000
"""

GAIN = Prediction(by="write-up 040", measure="speedup", of="one", value=1.6, why="Two launches are saved.")
FASTER = Criterion(name="faster", measure="speedup", of="one", at_least=1.3)


@pytest.fixture
def read(tmp_path):
    """Return a function that writes a study file and reads it."""

    def load(text):
        (tmp_path / "mine.toml").write_text(text)
        return load_study(tmp_path / "mine.toml")

    return load


def rows(result):
    """Return the rows of the table of predictions in a report."""
    (section,) = [each for each in details(result) if each.title == "Predictions"]
    (table,) = section.tables
    return table.rows


def printed(result, *, full=False):
    """Return the report as a wide terminal shows it."""
    console = Console(file=io.StringIO(), width=200)
    terminal.show(result, console, full=full)
    text = console.file.getvalue()
    assert text.count("Predictions") == 1
    return text


def test_predictions_are_read_from_the_study_file(read):
    (prediction,) = read(WRITTEN).predictions
    assert (prediction.by, prediction.measure, prediction.of, prediction.at) == ("write-up 040", "speedup", "one", "mega")
    assert (prediction.value, prediction.why) == (1.3, "One round trip and two launches are saved.")
    assert (prediction.over, prediction.direction, prediction.regime) == (None, "forward", "cold")


def test_a_study_without_predictions_keeps_its_digest():
    """The key is left out at its default, in files and in digests, so that those of older studies stay valid."""
    plain = study(FASTER)
    assert "predictions" not in plain.model_dump_json()
    assert plain.digest() == hashlib.sha256(plain.model_dump_json().encode()).hexdigest()
    assert study(FASTER, predictions=()).digest() == plain.digest()
    assert study(FASTER, predictions=(GAIN,)).digest() != plain.digest()


MISTAKES = {
    "no source": ('by = "write-up 040"\n', ""),
    "no reason": ('why = "One round trip and two launches are saved."\n', ""),
    "no value": ("value = 1.3\n", ""),
    "an unknown key": ("value = 1.3", "value = 1.3\nat_least = 1"),
    "a value that is no number": ("value = 1.3", 'value = "much"'),
    "a value of zero": ("value = 1.3", "value = 0"),
    "a value that is true": ("value = 1.3", "value = true"),
    "a value that is not finite": ("value = 1.3", "value = nan"),
    "an unknown measure": ('measure = "speedup"', 'measure = "speed"'),
    "an unknown variant": ('of = "one"', 'of = "onne"'),
    "an unknown shape": ('at = "mega"', 'at = "maga"'),
    "no table": ("[[predictions]]", "[predictions]"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_every_mistake_in_a_prediction_is_named(read, kind, prose):
    before, after = MISTAKES[kind]
    assert before in WRITTEN
    with prose.raises(StudyError):
        read(WRITTEN.replace(before, after))


def test_predictions_are_reported_beside_what_was_measured(tmp_path, prose):
    half = MEGA.model_copy(update={"name": "half"})
    expected = (
        GAIN,
        Prediction(by="a cost model", measure="time", of={"launches": 1}, at="mega", value=4.0, why="The bytes take that long."),
        Prediction(by="a doubter", measure="speedup", of="two", at="half", value=1.1, why="Launches cost little."),
    )
    cells = [ok_cell(name, time, of=of) for of in (MEGA, half) for name, time in (("three", 10.0), ("one", 5.0))]
    declared = study(FASTER, shapes=(MEGA, half), predictions=expected)
    result = concluded(measured(declared, *cells, bad_cell("two", "error", "it fell", of=half)))
    assert Result.load(result.save(tmp_path / "result.json")).study.predictions == expected
    prose([" | ".join(row) for row in rows(result)])
    (section,) = [each for each in details(result) if each.title == "Predictions"]
    prose(section.text[-1])
    for text in (markdown.render(result), page.render(result), printed(result), printed(result, full=True)):
        assert "Predictions" in text
        assert "a doubter" in text
    assert not [each for each in details(concluded(measured(study(FASTER), *cells[:2]))) if each.title == "Predictions"]


@pytest.mark.parametrize(
    ("value", "one", "came", "turned"),
    [(2.01, 5.0, "as predicted", False), (1.6, 5.0, "better", False), (3.0, 5.0, "worse", False), (1.6, 20.0, "worse", True)],
)
def test_a_comparison_states_factor_and_direction(value, one, came, turned):
    expected = GAIN.model_copy(update={"value": value})
    cells = ok_cell("three", 10.0), ok_cell("one", one)
    (found,) = compared_predictions(concluded(measured(study(FASTER, predictions=(expected,)), *cells)))
    assert (found.came, found.reversed) == (came, turned)
    assert found.ratio == pytest.approx(10.0 / one / value, rel=1e-3)
    assert found.factor == pytest.approx(max(found.ratio, 1 / found.ratio))


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("mega", "Of 1 predicted value, 1 came out better. The measured one is off by a factor of 1.25x."),
        ("tiny", "Of 1 predicted value, 1 was not measured."),
    ],
)
def test_a_single_prediction_is_told_without_a_median(at, said):
    result = concluded(
        measured(study(FASTER, predictions=(GAIN.model_copy(update={"at": at}),)), ok_cell("three", 10.0), ok_cell("one", 5.0))
    )
    assert tally(compared_predictions(result)) == said


def test_less_time_than_predicted_is_better():
    quick = Prediction(by="a cost model", measure="time", of="one", value=6.0, why="The bytes take that long.")
    cells = ok_cell("three", 10.0), ok_cell("one", 5.0)
    (found,) = compared_predictions(concluded(measured(study(FASTER, predictions=(quick,)), *cells)))
    assert (found.came, found.reversed) == ("better", False)


def test_a_prediction_decides_nothing():
    """It comes true or not; the criteria alone decide."""
    cells = ok_cell("three", 10.0), ok_cell("one", 5.0)
    wrong = GAIN.model_copy(update={"value": 100.0})
    with_it, without = (concluded(measured(study(FASTER, predictions=each), *cells)) for each in ((wrong,), ()))
    assert with_it.decision == without.decision
    assert with_it.outcomes == without.outcomes


def test_a_prediction_of_another_scale_says_so(prose):
    tiny = GAIN.model_copy(update={"at": "tiny"})
    result = concluded(measured(study(FASTER, predictions=(tiny,)), ok_cell("three", 10.0), ok_cell("one", 5.0)))
    assert TINY.scale == "small"
    prose([" | ".join(row) for row in rows(result)])


def test_predictions_are_shown_without_the_operation():
    result = concluded(measured(study(FASTER, predictions=(GAIN,)), ok_cell("three", 10.0), ok_cell("one", 5.0)))
    elsewhere = result.model_copy(update={"study": result.study.model_copy(update={"operation": "not_installed"})})
    assert rows(elsewhere)[0][1] == "write-up 040"
