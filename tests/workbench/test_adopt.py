"""Tests of adopting results into the dispatcher's measured tables, one JSON file per device, from which it chooses variants.

The results are of the made-up operation of ``ladder.py`` on "Some GPU": ``ok_cell(variant, microseconds)`` is a correct
measurement at ``MEGA`` (N = V = 1000, float16), ``bad_cell`` one that failed, and ``measured`` the result that holds them.
``prose`` and ``prose.raises`` compare wording with the test's entries in ``tests/snapshots/prose.txt``. A test fails if it does
not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``TINY`` is a shape of small scale. ``study`` declares a study of all variants, with ``three`` as the baseline.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import Field

from onelaunch.device.hardware import Device
from onelaunch.dispatch import measured as tables
from onelaunch.errors import AdoptNotice, OutputUnwritable, ResultMismatch, TableCorrupt, TableFolderError
from onelaunch.operation import Query, find_operation
from onelaunch.workbench.adopt import adopt, flags_of
from onelaunch.workbench.result import Result, Verdict
from onelaunch.workbench.study import Shape, Study
from tests.workbench.ladder import MEGA, TINY, bad_cell, measured, ok_cell, study

GPU = Device("cuda", "Some GPU", "sm_90", 132, 60 << 20, 150 << 30)
"""Device whose table is looked up: the one that ``measured`` names. Its SMs, cache and memory (bytes) do not matter here."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make an empty folder the user's folder of tables, and drop tables that the process has cached."""
    monkeypatch.setenv("ONELAUNCH_TABLES", str(tmp_path))
    tables._rows.cache_clear()
    yield tmp_path
    tables._rows.cache_clear()


def nearest(sizes: Any, direction: str = "forward", dtype: torch.dtype = torch.float16, flags: tuple[str, ...] = ()) -> Any:
    """Return the row that the dispatcher finds for a call of these sizes, or ``None`` if none is near enough."""
    tables._rows.cache_clear()
    return tables.nearest(GPU, "ladder", direction, dtype, sizes, flags)


def test_the_dispatcher_finds_adopted_times(folder):
    path = adopt([measured(study(), ok_cell("three", 10.1234), ok_cell("one", 5.0), ok_cell("product", 2.0))], folder)
    assert path == folder / "some-gpu.json"
    found = nearest({"N": 1100, "V": 1000})
    assert found.microseconds == {"one": 5.0, "three": 10.123}  # controls are never dispatched
    assert found.where() == "N=1000, V=1000 on Some GPU"
    assert nearest(MEGA.sizes, "forward_backward") is None
    assert nearest(MEGA.sizes, dtype=torch.float32) is None


def test_only_accepted_cold_times_of_correct_variants_are_adopted(folder):
    cells = [ok_cell("one", 5.0), bad_cell("two", "incorrect", "off")]
    unverified = ok_cell("three", 1.0).model_copy(update={"verdict": None})
    failed = ok_cell("three_library", 1.0).model_copy(update={"verdict": Verdict(ok=False, problems=("off",))})
    invalid = ok_cell("forward_only", 0.1).model_copy(update={"status": "invalid"})
    adopt([measured(study(), *cells, unverified, failed, invalid)], folder)
    assert nearest(MEGA.sizes).microseconds == {"one": 5.0}


def test_variants_that_refused_the_call_are_adopted_by_name(folder):
    adopt([measured(study(), ok_cell("one", 5.0), bad_cell("two", "unsupported", "needs more"))], folder)
    assert nearest(MEGA.sizes).unsupported == {"two"}


def test_rows_are_merged_by_operation_direction_dtype_flags_and_sizes(folder):
    adopt([measured(study(), ok_cell("three", 10.0), ok_cell("one", 5.0))], folder)
    backward = ok_cell("one", 15.0, direction="forward_backward")
    again = study(directions=("forward", "forward_backward"))
    adopt(
        [measured(again, ok_cell("one", 4.0), ok_cell("two", 6.0), backward), measured(study(), ok_cell("one", 1.0, of=TINY))],
        folder,
    )
    assert nearest(MEGA.sizes).microseconds == {"one": 4.0, "two": 6.0}  # a row is of one run, so the time of ``three`` is gone
    assert nearest(MEGA.sizes, "forward_backward").microseconds == {"one": 15.0}
    assert nearest(TINY.sizes, dtype=torch.float32).microseconds == {"one": 1.0}
    table = json.loads((folder / "some-gpu.json").read_text())
    assert len(table["rows"]) == 3
    assert table["source"] == ["ladder-study of 2026-11-20T12:00:00+00:00, commit abc1234, torch 2.11.0, triton 3.6.0"]


def test_shapes_with_options_of_their_own_are_special_cases(folder):
    """The option ``kind`` changes no flag of a query, so the dispatcher could not tell its times from those of plain calls."""
    odd = Shape(name="odd", dtype="float16", sizes=MEGA.sizes, options={"kind": "odd"})
    adopt([measured(study(shapes=(MEGA, odd)), ok_cell("one", 5.0), ok_cell("one", 50.0, of=odd))], folder)
    assert nearest(MEGA.sizes).microseconds == {"one": 5.0}


def test_results_of_several_devices_are_refused(folder, prose):
    one = measured(study(), ok_cell("one", 5.0))
    other = one.model_copy(update={"provenance": one.provenance.model_copy(update={"slug": "other-gpu"})})
    with pytest.raises(ResultMismatch, match="other-gpu, some-gpu"):
        adopt([one, other], folder)
    with prose.raises(ResultMismatch):
        adopt([], folder)


def test_a_result_without_times_is_refused_and_writes_nothing(folder, prose):
    with prose.raises(ResultMismatch):
        adopt([measured(study(), bad_cell("one", "error", "fell"))], folder)
    assert list(folder.iterdir()) == []


def of_device(slug, name="Some GPU"):
    """Return a result of a device. Its ``slug`` names the table's file."""
    result = measured(study(), ok_cell("one", 5.0))
    return result.model_copy(update={"provenance": result.provenance.model_copy(update={"slug": slug, "device": name})})


@pytest.mark.parametrize(
    "slug", ["../../up", "/tmp/abs", "a/b", "a..b", "..", "", "A", "x" * 81, "a\n", "a\\b", "~root", "\x1b[2J"]
)
def test_a_slug_that_could_leave_the_folder_is_refused_and_writes_nothing(folder, slug, prose):
    with prose.raises(ResultMismatch):
        adopt([of_device(slug)], folder / "here")
    assert list(folder.iterdir()) == []


def test_the_users_folder_is_the_default_and_the_package_is_never_written(folder, prose):
    assert adopt([of_device("some-gpu")]) == folder / "some-gpu.json"
    before = sorted(tables.TABLES.iterdir())
    for into in (tables.TABLES, tables.TABLES.parent, tables.TABLES / "below"):
        with prose.raises(TableFolderError):
            adopt([of_device("some-gpu")], into)
    assert sorted(tables.TABLES.iterdir()) == before


def test_a_folder_that_cannot_be_written_is_named(folder, prose):
    (folder / "file").write_text("")
    with prose.raises(OutputUnwritable):
        adopt([of_device("some-gpu")], folder / "file")


@pytest.mark.parametrize(("named", "error"), [("a file", OutputUnwritable), ("the package", TableFolderError)])
def test_errors_about_a_folder_name_the_environment_variable(folder, monkeypatch, named, error):
    """``$ONELAUNCH_TABLES`` names a file in place of a folder, or the package's own folder."""
    (folder / "file").write_text("")
    monkeypatch.setenv("ONELAUNCH_TABLES", str(folder / "file" if named == "a file" else tables.TABLES))
    with pytest.raises(error, match="ONELAUNCH_TABLES") as told:
        adopt([of_device("some-gpu")])
    assert "Leave out --into" not in str(told.value)
    assert told.value.exit_code == (1 if named == "a file" else 2)


def test_the_table_of_a_cpu_holds_its_model(folder, prose):
    assert adopt([of_device("cpu", "Some(R) CPU")]).name == "cpu-some-r-cpu.json"
    with pytest.raises(ResultMismatch, match="cpu-another, cpu-some-r-cpu"):
        adopt([of_device("cpu", "Some(R) CPU"), of_device("cpu", "Another")])
    with prose.raises(ResultMismatch, match="CPU"):
        adopt([of_device("cpu", "Some R CPU")])  # another name, the same file


# A table stores nanoseconds, in which 1e-9 us would be 0.
@pytest.mark.parametrize("time", [float("nan"), float("inf"), -1.0, 0.0, 1e-9])
@pytest.mark.parametrize("where", ["median", "a round"])
def test_impossible_times_are_refused(folder, time, where, prose):
    cell = ok_cell("one", 5.0)
    timing = cell.timing("cold")
    median = timing.microseconds.model_copy(update={"median": time})
    update = {"microseconds": median} if where == "median" else {"rounds": (5.0, time)}
    broken = cell.model_copy(update={"timings": (timing.model_copy(update=update),)})
    with prose.raises(ResultMismatch):
        adopt([measured(study(), broken, ok_cell("two", 6.0))], folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 3, "source": []}', '{"rows": [{"operation": "ladder"}], "source": []}'])
def test_a_broken_table_is_not_replaced(folder, text):
    (folder / "some-gpu.json").write_text(text)
    with pytest.raises(TableCorrupt, match=r"some-gpu\.json"):
        adopt([measured(study(), ok_cell("one", 5.0))], folder)
    assert (folder / "some-gpu.json").read_text() == text


def test_options_that_are_flags_are_matched_by_the_dispatcher(folder, monkeypatch):
    """A query's flags are part of its key. Here the option ``kind`` sets the flag ``odd``."""

    def flagged(case, device, grad):
        flags = ("odd",) if case.options.get("kind") == "odd" else ()
        return Query("ladder", device, case.dtype, tuple(case.sizes.values()), grad, flags)

    monkeypatch.setattr(find_operation("ladder"), "_query", flagged)
    odd = Shape(name="odd", dtype="float16", sizes=MEGA.sizes, options={"kind": "odd"})
    adopt([measured(study(shapes=(MEGA, odd)), ok_cell("one", 5.0), ok_cell("two", 50.0, of=odd))], folder)
    assert nearest(MEGA.sizes).microseconds == {"one": 5.0}
    assert nearest(MEGA.sizes, flags=("odd",)).microseconds == {"two": 50.0}
    assert nearest(MEGA.sizes, flags=("odd",)).where() == "N=1000, V=1000, odd on Some GPU"
    # A differing flag counts like a doubled size, which is near enough.
    assert nearest(MEGA.sizes, flags=("strange",)).microseconds == {"one": 5.0}
    assert nearest(MEGA.sizes, flags=("a", "b", "c", "d")) is None


# Rows of one run each


def run_of(date, *cells, commit="abc1234", **more):
    """Return a result of these measurements with the date at which its run ended; ``more`` replaces its other fields."""
    result = measured(study(), *cells, **more)
    return result.model_copy(update={"provenance": result.provenance.model_copy(update={"date": date, "commit": commit})})


OLD, NEW = "2026-11-20T12:00:00+00:00", "2026-11-24T09:00:00+01:00"


def test_a_fast_run_and_a_slow_run_never_share_a_row(folder):
    """The clock of the first run was slower by half. The row once held ``three`` of one run and ``one`` of the other."""
    slow = run_of(OLD, ok_cell("three", 15.0), ok_cell("one", 9.0))
    fast = run_of(NEW, ok_cell("three", 10.0))
    adopt([slow], folder)
    assert nearest(MEGA.sizes).microseconds == {"one": 9.0, "three": 15.0}
    with pytest.warns(AdoptNotice, match="loses its times of one"):
        adopt([fast], folder)
    assert nearest(MEGA.sizes).microseconds == {"three": 10.0}


@pytest.mark.parametrize("together", [True, False], ids=["in one call", "in two calls"])
@pytest.mark.parametrize("newer_first", [True, False])
def test_the_newer_run_counts_whatever_the_order(folder, together, newer_first):
    old, new = run_of(OLD, ok_cell("one", 9.0)), run_of(NEW, ok_cell("one", 5.0))
    order = [new, old] if newer_first else [old, new]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for results in [order] if together else [[each] for each in order]:
            adopt(results, folder)
    assert nearest(MEGA.sizes).microseconds == {"one": 5.0}
    kept = [each for each in said if "is not adopted" in str(each.message)]
    assert bool(kept) == (newer_first and not together)
    assert json.loads((folder / "some-gpu.json").read_text())["rows"][0]["run"] == NEW


def test_an_older_run_after_a_newer_one_is_named(folder, prose):
    adopt([run_of(NEW, ok_cell("one", 5.0))], folder)
    with pytest.warns(AdoptNotice, match="is not adopted") as said:
        adopt([run_of("2020-01-01T00:00:00+00:00", ok_cell("one", 4.0))], folder)
    prose([str(each.message) for each in said if "is not adopted" in str(each.message)])
    assert len(json.loads((folder / "some-gpu.json").read_text())["source"]) == 1


def test_a_row_without_a_date_is_as_old_as_the_sources_of_its_study(folder):
    """Tables of older versions have no date in their rows."""
    path = adopt([run_of(NEW, ok_cell("one", 5.0))], folder)
    table = json.loads(path.read_text())
    del table["rows"][0]["run"]
    path.write_text(json.dumps(table))
    adopt([run_of(OLD, ok_cell("one", 9.0))], folder)
    assert nearest(MEGA.sizes).microseconds == {"one": 5.0}
    adopt([run_of("2026-12-01T00:00:00+00:00", ok_cell("one", 6.0))], folder)
    assert nearest(MEGA.sizes).microseconds == {"one": 6.0}
    path.write_text(json.dumps({**table, "source": ["written by hand"]}))
    adopt([run_of(OLD, ok_cell("one", 9.0))], folder)
    assert nearest(MEGA.sizes).microseconds == {"one": 9.0}


REFUSED = {
    "an interrupted run": {"interrupted": True},
    "code that no commit holds": {"commit": "abc1234-dirty"},
    "no date": {"date": ""},
    "a date that is none": {"date": "yesterday"},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_run_that_proves_nothing_is_refused_and_writes_nothing(folder, kind, prose):
    more = {"date": OLD} | REFUSED[kind]
    with prose.raises(ResultMismatch):
        adopt([run_of(NEW, ok_cell("one", 5.0)), run_of(more.pop("date"), ok_cell("one", 5.0), **more)], folder)
    assert list(folder.iterdir()) == []


def test_a_case_that_was_not_measured_to_its_end_gives_no_row(folder):
    """Its fastest variant may be among those that were not reached."""
    whole = ok_cell("one", 0.1, of=TINY)
    adopt([run_of(OLD, ok_cell("three", 10.0), bad_cell("one", "interrupted", "stopped by hand"), whole)], folder)
    assert nearest(MEGA.sizes) is None
    assert nearest(TINY.sizes, dtype=torch.float32).microseconds == {"one": 0.1}


def test_a_time_below_its_roofline_bound_is_refused(folder, prose):
    """0.01 us was once adopted beside a stored bound of 4 us."""
    with prose.raises(ResultMismatch):
        adopt([run_of(OLD, ok_cell("one", 0.01))], folder)
    assert list(folder.iterdir()) == []


def test_times_of_another_gpu_of_the_same_file_name_are_refused(folder):
    adopt([run_of(OLD, ok_cell("one", 5.0))], folder)
    with pytest.raises(ResultMismatch, match="Some-GPU"):
        adopt([of_device("some-gpu", "Some-GPU")], folder)


# Probes


class Probed(Result):
    """A result whose outcomes of probes may be any objects, where those of :class:`Result` are reports."""

    probes: dict[str, Any] = Field(default_factory=dict)


def probed(**probes):
    """Return a result in which ``one`` takes 5 us and ``two`` 6 us, with these outcomes of their probes."""
    result = run_of(OLD, ok_cell("one", 5.0), ok_cell("two", 6.0))
    return Probed.model_construct(**{name: getattr(result, name) for name in Result.model_fields} | {"probes": probes})


def report(passed=3, *failed):
    """Return the outcome of the probes of one variant: calls that were correct, and sentences on those that were not."""
    return SimpleNamespace(passed=passed, refused=0, failed=failed)


@pytest.mark.parametrize(
    ("wrong", "why"), [(report(2, "T=255: y is off by 0.5."), "T=255"), (report(0), "no probe"), (None, "no probe")]
)
def test_a_variant_that_failed_its_probes_or_met_none_is_left_out(folder, wrong, why):
    """A plug-in that was right at the two measured lengths was once chosen for others, where it was wrong."""
    probes = {"two": report()} | ({} if wrong is None else {"one": wrong})
    with pytest.warns(AdoptNotice, match=f"one of ladder-study is not adopted.*{why}"):
        adopt([probed(**probes)], folder)
    assert nearest(MEGA.sizes).microseconds == {"two": 6.0}


def test_variants_that_met_their_probes_are_adopted_without_a_notice(folder, recwarn):
    adopt([probed(one=report(), two=report())], folder)
    assert nearest(MEGA.sizes).microseconds == {"one": 5.0, "two": 6.0}
    assert not [each for each in recwarn if issubclass(each.category, AdoptNotice)]


def test_a_result_older_than_probes_is_adopted_with_a_notice(folder, prose):
    with pytest.warns(AdoptNotice) as said:
        adopt([run_of(OLD, ok_cell("one", 5.0))], folder)
    prose([str(each.message) for each in said])
    assert nearest(MEGA.sizes).microseconds == {"one": 5.0}


@pytest.mark.parametrize("device", ["nvidia-h200"])
def test_the_committed_results_give_the_same_table_in_every_order(pytestconfig, folder, device):
    found = [Result.load(path) for path in sorted((pytestconfig.rootpath / "results" / device).glob("*.json"))]
    with pytest.warns(AdoptNotice):
        path = adopt(found, folder)
    rows = json.loads(path.read_text())["rows"]
    assert {row["run"] for row in rows} <= {result.provenance.date for result in found}
    with pytest.warns(AdoptNotice):
        adopt(found[::-1], folder)
    assert json.loads(path.read_text())["rows"] == rows


# The time of auto


def auto_cell(chosen, microseconds, **more):
    """Return a correct measurement of ``auto``, which chose a variant."""
    return ok_cell("one", microseconds, **more).model_copy(update={"variant": "auto", "chosen": chosen})


def of_auto(*cells, **more):
    """Return a result of a study whose first variant is ``auto``."""
    return measured(study(variants=("auto", "one", "two", "three", "peer"), **more), *cells)


@pytest.mark.filterwarnings("ignore::onelaunch.errors.AdoptNotice")
@pytest.mark.parametrize(
    ("cells", "times", "auto"),
    [
        ([auto_cell("one", 5.0), ok_cell("peer", 9.0)], {"one": 5.0, "peer": 9.0}, "one"),
        ([auto_cell("one", 5.0), ok_cell("two", 8.0), ok_cell("peer", 9.0)], {"one": 5.0, "two": 8.0, "peer": 9.0}, ""),
        ([auto_cell("one", 5.0), ok_cell("one", 6.0), ok_cell("peer", 9.0)], {"one": 6.0, "peer": 9.0}, ""),
        ([auto_cell("one", 5.0), bad_cell("one", "incorrect"), ok_cell("peer", 9.0)], {"peer": 9.0}, ""),
        ([auto_cell("", 5.0), ok_cell("peer", 9.0)], {"peer": 9.0}, ""),
    ],
    ids=["beside a peer", "beside two", "beside itself", "wrong by its name", "of an older result"],
)
def test_the_time_of_auto_is_that_of_its_choice(folder, cells, times, auto):
    """``peer`` needs another library, so that ``auto`` may not choose it."""
    adopt([of_auto(*cells)], folder)
    found = nearest(MEGA.sizes)
    assert (found.microseconds, found.auto) == (times, auto)


@pytest.mark.filterwarnings("ignore::onelaunch.errors.AdoptNotice")
@pytest.mark.parametrize("together", [True, False], ids=["in one call", "in two calls"])
def test_a_row_of_auto_alone_replaces_no_row_that_compares(folder, together, prose):
    comparing = run_of(OLD, ok_cell("one", 9.0), ok_cell("two", 8.0))
    alone = of_auto(auto_cell("one", 5.0), ok_cell("peer", 9.0))
    alone = alone.model_copy(update={"provenance": alone.provenance.model_copy(update={"date": NEW})})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for results in [[comparing, alone]] if together else [[comparing], [alone]]:
            adopt(results, folder)
    prose([str(each.message) for each in said if "compares several" in str(each.message)], name="notice")
    assert nearest(MEGA.sizes).microseconds == {"one": 9.0, "two": 8.0}
    (folder / "some-gpu.json").unlink()
    adopt([alone], folder)
    with pytest.warns(AdoptNotice, match="loses its times of peer"):
        adopt([comparing], folder)
    assert nearest(MEGA.sizes).microseconds == {"one": 9.0, "two": 8.0}, "though its run is older"


def test_a_row_of_one_variant_and_its_ablations_replaces_no_row_with_peers(folder, monkeypatch, prose):
    ablation = find_operation("ladder").variants["two"]
    monkeypatch.setattr(ablation, "capabilities", replace(ablation.capabilities, by_name_only=True))
    adopt([run_of(OLD, ok_cell("one", 9.0), ok_cell("peer", 8.0))], folder)
    with pytest.warns(AdoptNotice, match="is not adopted") as said:
        adopt([run_of(NEW, ok_cell("one", 5.0), ok_cell("two", 7.0))], folder)
    prose([str(each.message) for each in said if "no variant that a caller" in str(each.message)], name="notice")
    assert nearest(MEGA.sizes).microseconds == {"one": 9.0, "peer": 8.0}


@pytest.mark.filterwarnings("ignore::onelaunch.errors.AdoptNotice")
def test_a_row_of_auto_and_a_peer_replaces_one_of_a_variant_and_its_ablations(folder, monkeypatch):
    """In whatever order: callers are to know how their call compares with the peer."""
    ablation = find_operation("ladder").variants["two"]
    monkeypatch.setattr(ablation, "capabilities", replace(ablation.capabilities, by_name_only=True))
    causes = run_of(OLD, ok_cell("one", 9.0), ok_cell("two", 7.0))
    calls = of_auto(auto_cell("one", 5.0), ok_cell("peer", 8.0))
    calls = calls.model_copy(update={"provenance": calls.provenance.model_copy(update={"date": NEW})})
    for results in ([causes, calls], [calls, causes]):
        adopt(results, folder)
        assert nearest(MEGA.sizes).microseconds == {"one": 5.0, "peer": 8.0}
        (folder / "some-gpu.json").unlink()


def test_neither_the_choice_of_auto_nor_a_peer_is_asked_for_probes(folder, monkeypatch):
    """``two`` has passed its probes, so that the result holds some. A variant of another package needs its own."""
    result = of_auto(auto_cell("one", 5.0), ok_cell("two", 6.0), ok_cell("peer", 9.0))
    result = Probed.model_construct(
        **{name: getattr(result, name) for name in Result.model_fields} | {"probes": {"two": report()}}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adopt([result], folder)
    assert nearest(MEGA.sizes).microseconds == {"one": 5.0, "two": 6.0, "peer": 9.0}
    monkeypatch.setattr(find_operation("ladder").variants["one"], "run", json.dumps)
    with pytest.warns(AdoptNotice, match="one of ladder-study is not adopted, because no probe"):
        adopt([result], folder)
    assert nearest(MEGA.sizes).microseconds == {"two": 6.0, "peer": 9.0}


def test_what_takes_gradients_changes_no_forward_call():
    """Forward the option has no effect. Backward it makes another call of the same dispatch key."""
    options = {"final_state": True, "state_gradients": False}
    shape = Shape(name="states", dtype="float16", sizes={"B": 1, "T": 64, "H": 1, "K": 16, "V": 16}, options=options)
    declared = Study(name="states", question="?", operation="gla", baseline="chunked", shapes=(shape,))
    assert flags_of(declared, shape, "forward") == ["final_state"]
    assert flags_of(declared, shape, "forward_backward") is None
    assert flags_of(declared, shape) is None


@pytest.mark.filterwarnings("ignore::onelaunch.errors.AdoptNotice")
def test_the_packages_table_of_the_h100_is_that_of_the_committed_results(pytestconfig, folder):
    results = sorted((pytestconfig.rootpath / "results" / "nvidia-h100").glob("*.json"))
    path = adopt([Result.load(each) for each in results], folder)
    assert path.read_text() == (tables.TABLES / path.name).read_text()
