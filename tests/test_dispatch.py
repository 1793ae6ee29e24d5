"""Tests of the dispatcher: choice by measured tables or by preference, its explanation, named variants, and import time.

The fixture ``scale`` registers the toy operation ``scale(x, factor=2.0)`` of ``tests/toys.py`` for one test. It has the
variants ``loop``, ``vector`` (preferred, for at most 1000 elements), ``no_backward`` and ``elsewhere``, which no call can use.
``prose``, ``prose.raises`` and ``prose.warns`` compare wording with the test's entries in ``tests/snapshots/prose.txt``. A test
fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
"""

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
    """Return the dispatch key of a call of ``scale`` with ``n`` elements on the CPU."""
    return Query("scale", "cpu", dtype, (n,), grad)


@pytest.fixture
def table(scale, tmp_path, monkeypatch):
    """Return a function that replaces this device's table of measured times: ``table({size: {variant: microseconds}})``."""
    monkeypatch.setattr(measured, "TABLES", tmp_path)

    def write(times, direction="forward", **more):
        rows = [
            {"operation": "scale", "direction": direction, "dtype": "float32", "sizes": {"N": n}, "microseconds": row, **more}
            for n, row in times.items()
        ]
        here = hardware.describe("cpu")
        (tmp_path / f"{here.table}.json").write_text(json.dumps({"device": here.name, "source": [], "rows": rows}))
        measured._rows.cache_clear()
        dispatch.choose.cache_clear()

    yield write
    measured._rows.cache_clear()


def test_without_measurements_the_order_of_preference_decides(table, prose):
    table({})
    assert dispatch.choose(query()).name == "vector"
    prose(dispatch.explain(query()).because)


def test_a_preferred_variant_that_cannot_run_is_skipped(table):
    table({})
    assert dispatch.choose(query(2000)).name == "loop"


def test_the_fastest_measured_variant_is_chosen(table, prose):
    table({8: {"loop": 1.0, "vector": 2.0, "no_backward": 3.0}})
    assert dispatch.choose(query()).name == "loop"
    prose(dispatch.explain(query()).because, mask={re.escape(hardware.describe("cpu").name): "<device>"})


def test_variants_of_other_libraries_run_only_by_name(table, scale, monkeypatch):
    table({8: {"loop": 1.0, "vector": 2.0}})
    loop = scale.get("loop")
    # A variant that requires a package is another library's. This package is always installed, so the variant could run.
    monkeypatch.setattr(loop, "capabilities", replace(loop.capabilities, requires="json"))
    assert dispatch.choose(query()).name == "vector"
    assert [(one.variant, one.times_slower) for one in dispatch.explain(query()).standings if one.chosen] == [("vector", 2.0)]
    assert scale(torch.ones(3), variant="loop") is not None


def test_the_nearest_measured_size_is_used(table):
    table({8: {"loop": 1.0, "vector": 2.0}, 64: {"loop": 9.0, "vector": 2.0}})
    assert dispatch.choose(query(12)).name == "loop"
    assert dispatch.choose(query(50)).name == "vector"


def test_a_measurement_of_a_distant_size_is_not_used(table):
    """A table is used up to a distance of 3, which is a factor of 8 in the only size (``measured.NEAR``)."""
    table({1: {"loop": 1.0, "vector": 2.0}})
    assert dispatch.choose(query(8)).name == "loop"
    assert dispatch.choose(query(9)).name == "vector"


def test_measurements_of_another_dtype_or_direction_are_not_used(table):
    table({8: {"loop": 1.0, "vector": 2.0}})
    assert dispatch.choose(query(dtype=torch.float16)).name == "vector"
    assert dispatch.choose(query(grad=True)).name == "vector"


def test_a_measured_variant_that_cannot_run_this_call_is_not_chosen(table):
    table({8: {"no_backward": 1.0, "loop": 2.0, "vector": 3.0}}, direction="forward_backward")
    assert dispatch.choose(query(grad=True)).name == "loop"


def test_among_similar_times_the_preferred_variant_is_chosen(table):
    """Times within 3 % of the fastest count as equal (``choice.TIE``)."""
    table({8: {"loop": 1.0, "vector": 1.02}})
    assert dispatch.choose(query()).name == "vector"
    table({8: {"loop": 1.0, "vector": 1.04}})
    assert dispatch.choose(query()).name == "loop"


def test_times_from_before_the_preferred_variant_could_run_decide_nothing(table, prose):
    """``vector`` is the first in preference. It refused the call when the table was written."""
    table({8: {"loop": 1.0}}, unsupported=["vector"])
    assert dispatch.choose(query()).name == "vector"
    prose(dispatch.explain(query()).because, mask={re.escape(hardware.describe("cpu").name): "<device>"})
    table({8: {"loop": 1.0}}, unsupported=["no_backward"])
    assert dispatch.choose(query()).name == "loop"
    table({8: {"loop": 1.0}})
    assert dispatch.choose(query()).name == "loop"


def test_a_variant_that_no_longer_exists_is_ignored(table, prose):
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


def test_the_explanation_names_a_variant_that_is_known_to_be_faster(table, scale):
    """``vector`` is the default. A table with times of both decides instead, and a predicate that raises says nothing."""
    table({})
    scale.get("vector").slower_than("elsewhere")(lambda query: "it took twice as long" if query.sizes[0] == 8 else None)
    scale.get("vector").slower_than("loop")(lambda query: f"{1 // (query.sizes[0] - 8)}")
    assert dispatch.explain(query()).faster == (dispatch.Faster("elsewhere", "it took twice as long"),)
    assert dispatch.explain(query(9)).faster == (dispatch.Faster("loop", "1"),)
    assert dispatch.explain(query(2000)).faster == ()  # by loop
    table({8: {"vector": 1.0, "elsewhere": 0.5}})
    assert dispatch.explain(query()).faster == ()
    table({8: {"vector": 1.0, "loop": 2.0}})
    assert [each.variant for each in dispatch.explain(query()).faster] == ["elsewhere"]


def test_auto_leaves_a_variant_out_for_calls_that_run_it_only_by_name(table, scale, prose):
    """Near calls were measured at which it is faster."""
    table({8: {"loop": 1.0, "vector": 2.0}})
    scale.get("loop").by_name_where(lambda query: "takes longer with more than 8 numbers" if query.sizes[0] > 8 else None)
    assert [dispatch.choose(query(n)).name for n in (8, 9)] == ["loop", "vector"]
    assert torch.equal(scale(torch.ones(9), variant="loop"), torch.full((9,), 2.0))
    answer = dispatch.explain(query(9))
    assert {each.variant: each.held_back for each in answer.standings}["loop"] == "takes longer with more than 8 numbers"
    prose(answer.because, mask={re.escape(hardware.describe("cpu").name): "<device>"})


@pytest.mark.parametrize("answer", [lambda: 1 // 0, lambda: 3, lambda: ""], ids=["raises", "number", "empty"])
def test_a_predicate_of_what_runs_only_by_name_that_fails_leaves_the_variant_out(answer, table, scale, prose):
    table({8: {"loop": 1.0, "vector": 2.0}})
    scale.get("loop").by_name_where(lambda query: answer())
    assert dispatch.choose(query()).name == "vector"
    prose(scale.get("loop").why_by_name(query()))


def test_a_named_variant_runs(scale):
    assert torch.equal(scale(torch.ones(3), variant="no_backward"), torch.full((3,), 2.0))


def test_a_named_variant_that_cannot_run_raises_the_reason_and_alternatives(scale, prose):
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


def test_shipped_tables_have_known_operations_variants_and_valid_times():
    from onelaunch.operation import find_operation

    for path in measured.TABLES.glob("*.json"):
        for key, row in measured.read(path)[2].items():
            known = find_operation(key.operation)
            assert set(row.sizes) == set(known.dimensions), path
            assert set(row.microseconds) <= set(known.variants), path
            assert all(time > 0 for time in row.microseconds.values()), path


# Variants of other packages


@pytest.fixture
def acme(scale):
    """Register a variant ``acme`` of ``scale`` as a plug-in of the package ``acme_kernels`` would, and return it."""

    def run(call):
        return (call.x * call.factor,)

    run.__module__ = "acme_kernels.scale"
    return scale.variant("acme", launches=1)(run)


def test_a_plug_in_that_passed_no_probes_is_chosen_only_where_it_was_measured(table, acme, prose):
    table({128: {"vector": 2.0, "loop": 9.0, "acme": 1.0}, 256: {"vector": 2.0, "acme": 1.0}})
    assert [dispatch.choose(query(n)).name for n in (128, 256)] == ["acme", "acme"]
    assert {dispatch.choose(query(n)).name for n in (1, 100, 127, 129, 255, 257, 1000)} == {"vector"}
    here = {re.escape(hardware.describe("cpu").name): "<device>"}
    prose(dispatch.explain(query(128)).because, mask=here)
    prose(dispatch.explain(query(255)).because, mask=here)
    standing = next(each for each in dispatch.explain(query(255)).standings if each.variant == "acme")
    assert (standing.chosen, standing.reason_against) == (False, None)
    assert "probes" in standing.held_back


def test_a_plug_in_that_passed_the_probes_is_chosen_near_its_measurements(table, acme, prose):
    table({128: {"vector": 2.0, "acme": 1.0}}, probes=["acme"])
    assert dispatch.choose(query(255)).name == "acme"
    assert all(each.held_back is None for each in dispatch.explain(query(255)).standings)
    prose(dispatch.explain(query(255)).because, mask={re.escape(hardware.describe("cpu").name): "<device>"})


def test_a_plug_in_that_was_measured_with_other_flags_is_not_chosen(table, acme):
    table({128: {"vector": 2.0, "acme": 1.0}}, flags=["packed"])
    assert dispatch.choose(query(128)).name == "vector"
    assert dispatch.choose(query(128)._replace(flags=("packed",))).name == "acme"


def test_a_size_of_zero_is_not_taken_for_one(table, acme):
    table({1: {"vector": 2.0, "acme": 1.0}})
    assert dispatch.choose(query(1)).name == "acme"
    assert dispatch.choose(query(0)).name == "vector"


def test_a_plug_in_that_alone_can_run_a_call_runs_by_name(table, acme, scale, prose):
    table({})
    for name in ("loop", "vector", "no_backward"):
        scale.get(name).supports(lambda query: "is tired")
    dispatch.choose.cache_clear()
    with prose.raises(VariantUnsupported):
        scale(torch.ones(3))
    assert scale(torch.ones(3), variant="acme").tolist() == [2.0, 2.0, 2.0]


def test_a_plug_in_that_the_operation_itself_prefers_is_chosen(table, acme, scale):
    table({})
    scale.prefers(lambda query: ("acme",))
    assert dispatch.choose(query()).name == "acme"


def test_a_variant_whose_function_another_package_replaced_is_held_back(table, scale, acme):
    table({8: {"loop": 1.0, "vector": 2.0}})
    scale.get("loop").run = acme.run
    assert dispatch.choose(query(8)).name == "loop"
    assert dispatch.choose(query(9)).name == "vector"
    assert "acme_kernels" in next(each for each in dispatch.explain(query(9)).standings if each.variant == "loop").held_back


def test_a_variant_whose_predicate_raises_does_not_stop_a_call(scale, acme):
    """The reason is the error that the predicate raised."""

    def raising(query):
        raise RuntimeError("no such chip")

    acme.supports(raising)
    assert scale(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    standing = next(each for each in dispatch.explain(query()).standings if each.variant == "acme")
    assert "no such chip" in standing.reason_against


def test_all_variants_of_this_package_count_as_tested_on_the_probes():
    from onelaunch.operation import operations

    ours = [each for each in operations() if each.__module__.startswith("onelaunch.")]
    assert len(ours) == 9
    assert [variant for each in ours for variant in each.variants.values() if not variant.is_own] == []


def test_a_table_with_other_probes_than_names_is_ignored(table, prose):
    table({8: {"loop": 1.0, "vector": 2.0}}, probes="acme")
    with prose.warns(TableNotice):
        assert dispatch.choose(query()).name == "vector"


# Import time


def test_the_choice_is_marked_as_pytorch_marks_constants():
    """The dispatcher sets the mark itself, because PyTorch's decorator would import the compiler, which takes a second."""
    marked = torch.compiler.assume_constant_result(lambda: "a name")
    assert vars(marked).items() <= vars(choice._constant_name).items()


def test_importing_the_package_does_not_import_the_compiler():
    said = "import sys, onelaunch.decode; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said], check=False).returncode == 0
