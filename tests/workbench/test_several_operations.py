"""Tests of studies of several operations: ``auto``, groups of shapes, criteria of several directions, and bounds of noise.

``ladder.py`` makes up results: ``ok_cell(variant, microseconds)`` is a correct measurement, and ``measured`` the result that
holds the measurements. ``RATES`` are made-up peaks of a device.

``MEGA`` is a shape of full scale.
"""

from __future__ import annotations

import pytest

from onelaunch.device.hardware import Ceilings
from onelaunch.dispatch.choice import choose
from onelaunch.errors import StudyError
from onelaunch.operation import find_operation
from onelaunch.workbench.adopt import adopt
from onelaunch.workbench.decide.criteria import evaluate
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.measure import rotation, sampling, timing
from onelaunch.workbench.report import markdown
from onelaunch.workbench.result import ProbeReport, Result
from onelaunch.workbench.run import Steps, run_study
from onelaunch.workbench.study import Criterion, Shape
from onelaunch.workbench.study.plan import plan_study
from onelaunch.workbench.study.read import load_study
from onelaunch.workbench.verify import repeated
from tests.workbench.ladder import MEGA, RATES, measured, ok_cell, study

FILE = """
name = "several"
question = "Is the dispatcher's choice right?"
operation = "gated_scan"
baseline = "eager"
variants = ["auto", "eager"]
directions = ["forward", "forward_backward"]
regimes = ["eager"]
rounds = 3

shapes = [
  { name = "scan", scale = "small", dtype = "float32", groups = ["all"], B = 1, T = 64, V = 32 },
  { name = "layer", scale = "small", dtype = "float32", groups = ["all"], operation = "linear_rnn", B = 1, T = 64, D = 32, V = 32 },
  { name = "step", scale = "small", dtype = "float32", groups = ["all"], operation = "linear_rnn", B = 1, T = 1, D = 32, V = 32, directions = ["forward"] },
]

[[criteria]]
name = "auto is never slower"
measure = "speedup"
of = "auto"
at = "all"
directions = ["forward", "forward_backward"]
regime = "eager"
at_least = 0.001
most_noise = 1000.0
"""  # noqa: E501 - a table on one line

TWIN = Shape(name="twin", dtype="float16", sizes={"N": 1000, "V": 1000}, groups=("big",), directions=("forward",))
GROUPED = MEGA.model_copy(update={"groups": ("big",)})
BOTH = ("forward", "forward_backward")


def both_directions(**more):
    """Return a study of two shapes, one of them forward only, with a criterion that looks at all three cases."""
    facts = {"name": "fast", "measure": "speedup", "of": "one", "at": "big", "directions": BOTH, "at_least": 2.0}
    return study(Criterion(**(facts | more)), shapes=(GROUPED, TWIN), directions=BOTH)


def cells_of(twin: float = 2.5, backward: float = 3.0):
    """Return times by which ``one`` is by default 3, 3 and 2.5 times as fast as ``three`` in the three cases."""
    return (
        ok_cell("three", 30.0, of=GROUPED),
        ok_cell("one", 10.0, of=GROUPED),
        ok_cell("three", 30.0 * backward, of=GROUPED, direction="forward_backward"),
        ok_cell("one", 30.0, of=GROUPED, direction="forward_backward"),
        ok_cell("three", 10.0 * twin, of=GROUPED).model_copy(update={"shape": "twin"}),
        ok_cell("one", 10.0, of=GROUPED).model_copy(update={"shape": "twin"}),
    )


@pytest.fixture
def file(tmp_path):
    def write(text=FILE):
        path = tmp_path / "several.toml"
        path.write_text(text)
        return path

    return write


def test_a_shape_names_its_operation_and_its_groups(file):
    found = load_study(file())
    assert found.operation_names() == ("gated_scan", "linear_rnn")
    assert [found.operation_at(shape).name for shape in found.shapes] == ["gated_scan", "linear_rnn", "linear_rnn"]
    assert found.case(found.shape("layer")).operation == "linear_rnn"
    assert found.shape("layer").sizes == {"B": 1, "T": 64, "D": 32, "V": 32}
    (criterion,) = found.criteria
    assert found.shapes_of(criterion) == found.shapes
    assert [asked.name for asked in found.asked(criterion)] == [
        "scan", "scan, forward and backward", "layer", "layer, forward and backward", "step",
    ]  # fmt: skip


def test_variants_take_part_where_their_operation_has_them(file):
    found = load_study(file(FILE.replace('["auto", "eager"]', '["auto", "eager", "fused", "semi_fused"]')))
    assert found.variants_at(found.shape("scan")) == ("eager", "auto", "fused")
    assert found.variants_at(found.shape("layer")) == ("eager", "auto", "semi_fused")
    assert found.select({"launches": 1}) == ("fused",)
    assert found.select({"launches": 1}, found.shape("layer")) == ()
    assert "auto" not in found.select({})


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ('operation = "linear_rnn", B = 1, T = 64, D', 'operation = "linear_rnn", B = 1, T = 64, E', "unknown key 'E'"),
        ('operation = "linear_rnn"', 'operation = "linear_rmm"', "linear_rnn"),
        ('groups = ["all"], B', 'groups = ["scan"], B', "the name of a shape"),
        ('at = "all"', 'at = "none"', "unknown shape 'none'"),
        ('at = "all"', 'at = "step"', "runs at none of its shapes"),
        ('["auto", "eager"]', '["auto", "eagre"]', "no variant 'eagre'"),
        ("most_noise = 1000.0", "most_noise = 0.9", "at least 1"),
        ("most_noise = 1000.0", 'most_noise = "little"', "a number above 0"),
        (
            'directions = ["forward", "forward_backward"]\nregime =',
            'directions = []\ndirection = "forward"\nregime =',
            "one of them",
        ),
    ],
)
def test_mistakes_are_named(file, wrong, right, message):
    assert wrong in FILE
    with pytest.raises(StudyError, match=message):
        load_study(file(FILE.replace(wrong, right)))


def test_new_keys_at_their_defaults_leave_a_digest_as_it_was():
    plain = study(Criterion(name="a", measure="speedup", of="one", at_least=2.0))
    dumped = plain.model_dump()
    assert not {"operation", "groups"} & set(dumped["shapes"][0])
    assert not {"directions", "most_noise"} & set(dumped["criteria"][0])


def test_a_study_of_several_operations_runs_with_auto(file, tmp_path, monkeypatch):
    monkeypatch.setitem(timing.WARM_UP_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(sampling, "CPU_SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(repeated, "SECONDS", 0.05)
    monkeypatch.setattr(rotation, "CACHES", 0)  # two input sets instead of as many as exceed the caches
    # Other tests judge these variants at the probes, which takes seconds.
    steps = Steps(
        ceilings=lambda _: Ceilings(1e12, {"float32": 1e13}, 1e-6, "2026-11-20T12:00:00+00:00", "made up"),
        probe=lambda *_: ProbeReport(passed=1),
    )
    path = tmp_path / "result.json"
    result = run_study(load_study(file()), device="cpu", save_to=path, count=False, steps=steps)
    assert {cell.status for cell in result.cells} == {"ok"}
    assert len(result.cells) == 10  # two variants, and five cases
    for cell in result.cells:
        shape = result.study.shape(cell.shape)
        operation, case = result.study.operation_at(shape), result.study.case(shape)
        query = operation.query(case, "cpu", grad=cell.direction == "forward_backward")
        assert cell.chosen == (choose(query).name if cell.variant == "auto" else "")
    (outcome,) = result.outcomes
    assert outcome.status == "met", outcome.evidence
    assert len(outcome.values) == 5
    assert set(result.probes) == {"gated_scan.eager", "linear_rnn.eager"}
    assert {"gated_scan.chunked", "linear_rnn.chunked"} <= set(result.provenance.variants)  # auto may choose them
    again = Result.load(path)
    assert again == result
    assert concluded(again).outcomes == result.outcomes
    written = markdown.render(result)
    assert "layer, forward and backward" in written
    assert "auto (chunked)" in written


def test_rows_of_several_operations_are_adopted_without_auto(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELAUNCH_TABLES", str(tmp_path))
    cells = (*cells_of(), ok_cell("one", 1.0, of=GROUPED).model_copy(update={"variant": "auto", "chosen": "one"}))
    declared = both_directions().model_copy(update={"variants": ("three", "one", "auto")})
    with pytest.warns(Warning, match="holds no probes"):
        table = adopt([measured(declared, *cells)])
    assert "auto" not in table.read_text()


def test_auto_is_planned_as_the_variant_that_it_chooses(file):
    found = load_study(file())
    plan = plan_study(found, RATES, "cpu", "small")
    scan = {cell.variant: cell for cell in plan.cells if (cell.shape.name, cell.direction) == ("scan", "forward")}
    operation, case = find_operation("gated_scan"), found.case(found.shape("scan"))
    chosen = choose(operation.query(case, "cpu"))
    assert scan["auto"].plan.bytes == operation.cost(case, chosen).bytes


def test_a_criterion_of_two_directions_counts_each_case_once():
    declared = both_directions()
    (outcome,) = evaluate(measured(declared, *cells_of()), {})
    assert outcome.status == "met"
    assert {name: value.median for name, value in outcome.values.items()} == {
        "mega": 3.0, "mega, forward and backward": 3.0, "twin": 2.5,
    }  # fmt: skip


def test_one_slow_direction_misses_a_criterion_of_both():
    (outcome,) = evaluate(measured(both_directions(), *cells_of(backward=1.5)), {})
    assert outcome.status == "missed"
    assert "mega, forward and backward 1.5 (missed)" in outcome.evidence


def test_the_mean_is_over_shapes_and_directions():
    declared = both_directions(combine="geomean", at_least=2.0)
    (outcome,) = evaluate(measured(declared, *cells_of(twin=1.0)), {})
    assert outcome.overall is not None
    assert outcome.overall.median == pytest.approx((3.0 * 3.0 * 1.0) ** (1 / 3))
    assert outcome.status == "met"


def test_a_case_with_much_noise_counts_as_not_measured():
    noisy = measured(both_directions(most_noise=1.05), *cells_of(), floor=1.2)
    (outcome,) = evaluate(noisy, {})
    assert outcome.status == "not_measured"
    assert outcome.values == {}
    assert "the A/A noise of 1.2 is above 1.05" in outcome.evidence
    quiet = measured(both_directions(most_noise=1.05), *cells_of(), floor=1.04)
    assert evaluate(quiet, {})[0].status == "met"


def test_a_stored_value_of_an_undeclared_case_is_refused(tmp_path):
    result = concluded(measured(both_directions(), *cells_of()))
    path = result.save(tmp_path / "result.json")
    assert Result.load(path) == result
    path.write_text(path.read_text().replace("mega, forward and backward", "mega, forward and sideways"))
    with pytest.raises(Exception, match="mega, forward and sideways"):
        Result.load(path)
