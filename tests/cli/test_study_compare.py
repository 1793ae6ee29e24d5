"""Tests of ``onelaunch study compare`` and ``adopt``: their output and files, and the calls they refuse.

The fixtures are those of ``conftest.py``. ``call`` runs ``onelaunch`` with arguments in this process and returns its exit
``code``, its stdout (``out`` with single blanks, ``raw`` unchanged) and its stderr (``err``, ``raw_err``). The working
directory ``here`` is an empty folder with the study studies/toy-study.toml. ``stored`` are paths of two made-up results: [0] is
``results.proceed_on_gpu()``, [1] one of another study on a CPU. ``prose`` compares a text with its entry in
tests/snapshots/prose.txt, and ``lines_with`` returns the lines of an output that hold some words. A test fails if it does not
compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from onelaunch import dispatch
from onelaunch.dispatch import measured
from onelaunch.workbench.decide.compare import compare
from tests.prose import lines_with
from tests.workbench import results


def later(result, days, *, commit="", slower=1.0):
    """Return another run of a made-up result, in which the times of ``fused_chunked`` at the shape ``target`` differ.

    Args:
        result: The first run.
        days: Day of December on which the second run took place. Each day also adds 0.1 % to the times.
        commit: Commit of the second run, by default that of the first.
        slower: Factor of the times.
    """
    cells = tuple(
        cell.model_copy(
            update={
                "timings": tuple(
                    results.timing(timing.regime, slower * (1 + days / 1000) * timing.microseconds.median)
                    if (cell.variant, cell.shape) == ("fused_chunked", "target")
                    else timing
                    for timing in cell.timings
                )
            }
        )
        for cell in result.cells
    )
    facts = {"date": f"2026-12-{days:02}T12:00:00+00:00", "commit": commit or result.provenance.commit}
    return result.model_copy(update={"cells": cells, "provenance": result.provenance.model_copy(update=facts)})


def test_compare_reports_changes(call, here, stored, prose):
    before = results.proceed_on_gpu()
    slow = later(before, 2, commit="e0f1a2b", slower=2.0)
    cells = tuple(
        cell.model_copy(
            update={
                "status": "error" if (cell.variant, cell.shape) == ("fla", "wide") else cell.status,
                "reason": "broke" if (cell.variant, cell.shape) == ("fla", "wide") else cell.reason,
                "peak_bytes": 3 * 2**30 if (cell.variant, cell.shape) == ("semi_fused", "wide") else cell.peak_bytes,
            }
        )
        for cell in slow.cells
    )
    outcomes = (before.outcomes[0].model_copy(update={"status": "missed"}), *before.outcomes[1:])
    assert before.decision
    decision = before.decision.model_copy(update={"kind": "debug"})
    versions = before.provenance.versions | {"torch": "2.13.0"}
    after = slow.model_copy(
        update={
            "cells": cells,
            "outcomes": outcomes,
            "decision": decision,
            "provenance": slow.provenance.model_copy(update={"versions": versions}),
        }
    )
    again = later(after, 4)
    repeated = later(before, 3)
    # Two runs on each side, so that changes can be claimed.
    more = ("--first", repeated.save(here / "before-2.json"), "--second", again.save(here / "after-2.json"))
    second = after.save(here / "after.json")
    answer = call("study", "compare", stored[0], second, *more)
    found = compare([before, repeated], [after, again])
    assert answer.code == 0
    prose(lines_with(answer.raw, "proceed", "debug"))
    assert f"{found.count('SLOWER')} slower" in answer.out
    assert found.count("SLOWER") > 0
    assert found.count("UNREPEATED") == 0
    prose(lines_with(answer.raw, "2 runs"))
    assert "fused_chunked target forward cold slower" in answer.out
    assert "2.11.0 2.13.0" in answer.out
    assert "fla wide forward ok error broke" in answer.out
    assert re.search(r"semi_fused wide forward [\d.]+ MiB 3\.00 GiB [\d.]+x", answer.out)
    assert "fused is faster met missed" in answer.out
    alone = call("study", "compare", stored[0], second)  # one run on each side: differences are listed, not claimed
    prose(lines_with(alone.raw, "one run each"))
    assert "fused_chunked target forward cold differs" in alone.out
    assert "--first" in alone.out
    assert alone.code == 0


def test_compare_of_two_runs_of_the_same_code_claims_nothing(call, here, stored, prose):
    second = later(results.proceed_on_gpu(), 2, slower=1.85).save(here / "again.json")
    answer = call("study", "compare", stored[0], second)
    assert answer.code == 0
    prose(lines_with(answer.raw, "same code"))
    assert "0 faster, 0 slower" in answer.out
    assert "differ" not in answer.out.split("Times: ")[1]


def test_compare_refuses_a_repeat_of_other_code_and_names_the_file(call, here, stored, prose):
    other = later(results.proceed_on_gpu(), 2, commit="e0f1a2b").save(here / "other.json")
    answer = call("study", "compare", stored[0], stored[0], "--first", other)
    assert answer.code == 1
    prose(answer.err)
    assert "e0f1a2b" in answer.err
    twice = call("study", "compare", stored[0], other, "--second", other)  # one run given twice is no repeat
    assert twice.code == 1
    prose(twice.err)


def test_compare_skips_a_name_used_for_two_sizes(call, here, stored, prose):
    """Once, a longer sequence under the name of a shorter one was reported as a slowdown."""
    before = results.proceed_on_gpu()
    shapes = tuple(
        shape.model_copy(update={"sizes": shape.sizes | {"T": 4096}}) if shape.name == "target" else shape
        for shape in before.study.shapes
    )
    study = before.study.model_copy(update={"shapes": shapes})
    after = later(before, 2, slower=2.89).model_copy(update={"study": study, "study_digest": study.digest()})
    answer = call("study", "compare", stored[0], after.save(here / "longer.json"))
    assert "not comparable" in answer.out
    prose(lines_with(answer.raw, "T=2048"))
    assert "0 faster, 0 slower" in answer.out
    assert "fused_chunked target" not in answer.out


def test_compare_prints_text_that_looks_like_markup_unchanged(call, here, stored):
    before = results.proceed_on_gpu()
    facts = before.provenance.model_copy(update={"driver": "[/red]"})
    answer = call("study", "compare", stored[0], before.model_copy(update={"provenance": facts}).save(here / "odd.json"))
    assert answer.code == 0
    assert "[/red]" in answer.out


def test_compare_refuses_one_run_on_both_sides(call, here, stored, prose):
    answer = call("study", "compare", stored[0], stored[0])
    assert answer.code == 1
    prose(answer.err)
    copied = shutil.copy(stored[0], here / "copy.json")
    answer = call("study", "compare", stored[0], copied)
    assert answer.code == 1
    prose(answer.err)


def test_compare_reports_different_studies(call, stored, prose):
    answer = call("study", "compare", *stored)
    assert answer.code == 0
    prose(lines_with(answer.raw, "eclarations"))
    prose(lines_with(answer.raw, "Only in"))


def test_adopt_writes_the_dispatcher_s_table(call, here, stored):
    answer = call("study", "adopt", stored[0], "--into", "tables")
    assert answer.code == 0
    assert "tables/nvidia-h200.json" in answer.out
    table = json.loads((here / "tables" / "nvidia-h200.json").read_text())
    assert table["rows"]


def test_adopt_into_another_folder_explains_how_to_use_it(call, here, stored, own_tables):
    """``own_tables`` is the folder that the dispatcher reads."""
    answer = call("study", "adopt", stored[0], "--into", "tables")
    assert f"ONELAUNCH_TABLES={here / 'tables'}" in answer.out
    assert not own_tables.exists()


def test_adopt_writes_into_the_users_folder(call, here, stored, monkeypatch):
    monkeypatch.setenv("ONELAUNCH_TABLES", str(here / "mine"))
    answer = call("study", "adopt", stored[0])
    assert answer.code == 0
    assert answer.out == f"Written: {here / 'mine' / 'nvidia-h200.json'}"


def test_adopt_names_the_variable_that_named_a_file(call, here, stored, monkeypatch):
    (here / "file").write_text("")
    monkeypatch.setenv("ONELAUNCH_TABLES", str(here / "file"))
    answer = call("study", "adopt", stored[0])
    assert answer.code == 1
    assert "ONELAUNCH_TABLES" in answer.err


def test_adopt_never_writes_into_the_package(call, stored):
    package = Path(measured.__file__).parent
    before = {path: path.read_bytes() for path in package.glob("*.json")}
    answer = call("study", "adopt", stored[0], "--into", package)
    assert answer.code == 2
    assert "package" in answer.err
    assert {path: path.read_bytes() for path in package.glob("*.json")} == before


def test_adopted_times_are_used_and_explained(call, here, monkeypatch):
    monkeypatch.setenv("ONELAUNCH_TABLES", str(here / "mine"))
    monkeypatch.setenv("ONELAUNCH_COMMIT", "abc1234")  # times of a checkout with changes are not adopted
    assert call("study", "run", "toy-study", "--device", "cpu").code == 0
    assert call("study", "adopt", "results/cpu/toy-study.json").code == 0
    (path,) = (here / "mine").glob("cpu-*.json")
    dispatch.choose.cache_clear()  # clear caches, as in a new process
    found = call("explain", "toy_sum", "--shape", "B=2,T=24,V=8", "--dtype", "float32", "--device", "cpu").out
    dispatch.choose.cache_clear()
    assert "fastest" in found
    assert str(path) in found.replace(" ", "")


def test_adopt_of_two_devices_is_refused(call, stored, prose):
    answer = call("study", "adopt", *stored, "--into", "tables")
    assert answer.code == 1
    prose(answer.err)
