"""Which variant runs, and why: choice by measured tables, by preference, and the explanation of both."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from onelaunch import dispatch
from onelaunch.device import hardware
from onelaunch.dispatch import choice, measured
from onelaunch.errors import TableNotice, UnknownVariant, VariantUnsupported
from onelaunch.operation import Query


def query(n: int = 8, *, grad: bool = False, dtype: torch.dtype = torch.float32) -> Query:
    return Query("scale", "cpu", dtype, (n,), grad)


@pytest.fixture
def table(scale, tmp_path, monkeypatch):
    """Write a table of measured times for this device: ``table({size: {variant: microseconds}})``."""
    monkeypatch.setattr(measured, "TABLES", tmp_path)

    def write(times, direction="forward"):
        rows = [
            {"operation": "scale", "direction": direction, "dtype": "float32", "sizes": {"N": n}, "microseconds": row}
            for n, row in times.items()
        ]
        here = hardware.describe("cpu")
        (tmp_path / f"{here.table}.json").write_text(json.dumps({"device": here.name, "source": [], "rows": rows}))
        measured._rows.cache_clear()
        dispatch.choose.cache_clear()

    yield write
    measured._rows.cache_clear()


def test_where_nothing_was_measured_the_order_of_preference_decides(table, prose):
    table({})
    assert dispatch.choose(query()).name == "vector"
    prose(dispatch.explain(query()).because)


def test_a_preferred_variant_that_cannot_run_is_passed_over(table):
    table({})
    assert dispatch.choose(query(2000)).name == "loop"


def test_the_fastest_measured_one_is_chosen(table, prose):
    table({8: {"loop": 1.0, "vector": 2.0, "no_backward": 3.0}})
    assert dispatch.choose(query()).name == "loop"
    prose(dispatch.explain(query()).because, mask={re.escape(hardware.describe("cpu").name): "<device>"})


def test_other_libraries_run_by_name_alone(table, scale, monkeypatch):
    table({8: {"loop": 1.0, "vector": 2.0}})
    loop = scale.get("loop")
    monkeypatch.setattr(loop, "capabilities", replace(loop.capabilities, requires="json"))
    assert dispatch.choose(query()).name == "vector"
    assert [(one.variant, one.times_slower) for one in dispatch.explain(query()).standings if one.chosen] == [("vector", 2.0)]
    assert scale(torch.ones(3), variant="loop") is not None


def test_the_nearest_measured_size_is_believed(table):
    table({8: {"loop": 1.0, "vector": 2.0}, 64: {"loop": 9.0, "vector": 2.0}})
    assert dispatch.choose(query(12)).name == "loop"
    assert dispatch.choose(query(50)).name == "vector"


def test_a_measurement_too_far_away_is_not_believed(table):
    table({1: {"loop": 1.0, "vector": 2.0}})
    assert dispatch.choose(query(8)).name == "loop"
    assert dispatch.choose(query(9)).name == "vector"


def test_another_dtype_or_direction_is_not_believed(table):
    table({8: {"loop": 1.0, "vector": 2.0}})
    assert dispatch.choose(query(dtype=torch.float16)).name == "vector"
    assert dispatch.choose(query(grad=True)).name == "vector"


def test_a_measured_variant_that_cannot_run_this_call_is_not_chosen(table):
    table({8: {"no_backward": 1.0, "loop": 2.0, "vector": 3.0}}, direction="forward_backward")
    assert dispatch.choose(query(grad=True)).name == "loop"


def test_within_the_tie_the_preferred_one_is_chosen(table):
    table({8: {"loop": 1.0, "vector": 1.02}})
    assert dispatch.choose(query()).name == "vector"
    table({8: {"loop": 1.0, "vector": 1.04}})
    assert dispatch.choose(query()).name == "loop"


def test_a_variant_that_was_removed_since_is_ignored(table, prose):
    table({8: {"gone": 0.1, "loop": 1.0}})
    with prose.warns(TableNotice):
        assert dispatch.choose(query()).name == "loop"


def test_the_explanation_has_a_line_for_every_variant(table):
    table({8: {"loop": 4.0, "vector": 2.0}})
    lines = {standing.variant: standing for standing in dispatch.explain(query(grad=False)).standings}
    assert list(lines) == ["loop", "vector", "no_backward", "elsewhere"]
    assert [name for name, line in lines.items() if line.chosen] == ["vector"]
    assert (lines["loop"].microseconds, lines["loop"].times_slower) == (4.0, 2.0)
    assert lines["vector"].times_slower == 1.0
    assert lines["elsewhere"].reason_against == "needs a quantum computer"
    assert (lines["no_backward"].reason_against, lines["no_backward"].microseconds) == (None, None)


def test_a_named_variant_runs(scale):
    assert torch.equal(scale(torch.ones(3), variant="no_backward"), torch.full((3,), 2.0))


def test_a_named_variant_that_cannot_run_says_why_and_which_can(scale, prose):
    with prose.raises(VariantUnsupported, match="'elsewhere'"):
        scale(torch.ones(3), variant="elsewhere")


def test_the_call_decides_whether_a_backward_pass_is_needed(scale, prose):
    with prose.raises(VariantUnsupported):
        scale(torch.ones(3, requires_grad=True), variant="no_backward")
    with torch.no_grad():
        scale(torch.ones(3, requires_grad=True), variant="no_backward")


def test_a_misspelt_variant_is_named(scale, prose):
    with prose.raises(UnknownVariant, match="'vector'"):
        scale(torch.ones(3), variant="vectr")


def test_when_nothing_can_run_every_reason_is_given(scale):
    for name in ("loop", "vector", "no_backward"):
        scale.get(name).supports(lambda query, name=name: f"{name} is tired")
    dispatch.choose.cache_clear()
    with pytest.raises(VariantUnsupported) as caught:
        dispatch.choose(query())
    for reason in ("loop is tired", "vector is tired", "needs a quantum computer"):
        assert reason in str(caught.value)


def test_the_choice_is_a_constant_under_torch_compile(scale):
    compiled = torch.compile(lambda x: scale(x, 3.0), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.arange(4.0)), 3 * torch.arange(4.0))


def test_the_tables_that_ship_name_operations_variants_and_times_that_exist():
    from onelaunch.operation import find_operation

    for path in measured.TABLES.glob("*.json"):
        for key, row in measured.read(path)[2].items():
            known = find_operation(key.operation)
            assert set(row.sizes) == set(known.dimensions), path
            assert set(row.microseconds) <= set(known.variants), path
            assert all(time > 0 for time in row.microseconds.values()), path


# What a start costs


def test_the_choice_is_marked_as_pytorch_marks_constants():
    marked = torch.compiler.assume_constant_result(lambda: "a name")
    assert vars(marked).items() <= vars(choice._constant_name).items()


def test_to_import_the_package_is_not_to_import_the_compiler():
    said = "import sys, onelaunch.decode; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said], check=False).returncode == 0
