"""Tests of runs that are resumed at another commit of onelaunch, or that measure single shapes of a finished result anew.

``at_commit`` sets the commit of the runs that follow. The helpers are those of ``runs.py``; ``prose`` compares a text with its
entry in tests/snapshots/prose.txt. The tests of ``test_run.py`` resume runs of one commit.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from onelaunch.errors import ResultExists, ResultMismatch, StudyError
from onelaunch.operation import entry_points
from onelaunch.operation import sources as digests
from onelaunch.workbench import probing
from onelaunch.workbench.measure import checks, timing
from onelaunch.workbench.options import RunOptions
from onelaunch.workbench.report import markdown
from onelaunch.workbench.result import ProbeReport, Result, sources
from onelaunch.workbench.supervise.job import Job, State, carry_out
from tests.workbench import toy
from tests.workbench.runs import FASTER, interrupted_at, quick, run, statuses, steps, study

__all__ = ["quick", "toy"]  # an automatic fixture: an empty working directory, short samples, no warm-up

OLD, NEW, NEWEST = ("1" * 12, "2" * 12, "3" * 12)
BOTH = ("forward", "forward_backward")


@pytest.fixture
def at_commit(monkeypatch):
    """Set the commit of the runs that follow."""
    return lambda name: monkeypatch.setenv("ONELAUNCH_COMMIT", name)


def watched(measured):
    """Return steps that note the shapes that are measured."""

    def measure(operation, case, *args, **more):
        measured.append(case.name)
        return timing.measure(operation, case, *args, **more)

    return steps(measure=measure)


def test_a_run_is_resumed_at_another_commit_and_says_what_was_measured_where(at_commit, tmp_path, prose):
    path = tmp_path / "mine.json"
    at_commit(OLD)
    first = run(study(FASTER, directions=BOTH), save_to=path, steps=interrupted_at("begin", "second"))
    at_commit(NEW)
    with prose.raises(ResultMismatch, match="across_commits"):
        run(study(FASTER, directions=BOTH), save_to=path, resume=True)
    measured = []
    result = run(study(FASTER, directions=BOTH), save_to=path, resume=True, across_commits=True, steps=watched(measured))
    assert measured == ["second", "second"]
    assert result.provenance.commit == NEW
    (older,) = result.provenance.earlier
    assert (older.commit, older.date) == (OLD, first.provenance.date)
    assert older.measured == ("first", "first, forward and backward")
    assert result.cell("first", "parallel") == first.cell("first", "parallel")
    assert not result.interrupted
    assert Result.load(path) == result
    prose([note for note in result.notes if OLD in note], mask={re.escape(first.provenance.date): "<date>"})
    report = markdown.render(result)
    assert f"at {NEW}; {OLD} for 2 earlier measurements" in report
    assert "measured first, first, forward and backward" in report


def test_variants_that_are_measured_at_a_new_commit_are_judged_on_probes_there_if_their_code_differs(
    at_commit, tmp_path, monkeypatch
):
    """The third run is of the code of the second. The code of the last one is not known."""
    probed = []

    def probe(judge, operation, name, device, directions):
        probed.append(name)
        return ProbeReport(passed=1, directions=directions)

    monkeypatch.setattr(probing, "has_probes", lambda operation, name: True)
    monkeypatch.setattr("onelaunch.workbench.running.compile_probes", lambda calls, device: None)
    path = tmp_path / "mine.json"
    both = ["eager", "parallel"]
    runs = [
        (OLD, {"eager": "a", "parallel": "b"}, both),
        (NEW, {"eager": "a", "parallel": "c"}, ["parallel"]),
        (NEWEST, {"eager": "a", "parallel": "c"}, []),
        (OLD, {}, both),
        (NEW, {}, both),
        (NEW, {}, []),  # at an equal commit its earlier reports hold
    ]
    for commit, codes, expected in runs:
        at_commit(commit)
        monkeypatch.setattr("onelaunch.workbench.running.code_of", lambda study, codes=codes: codes)
        found = run(study(), save_to=path, resume=path.exists(), across_commits=True, anew=("second",), steps=steps(probe=probe))
        assert sorted(probed) == expected
        assert {label: each.code for label, each in found.probes.items()} == (codes or {"eager": "", "parallel": ""})
        probed.clear()


def test_the_code_of_a_report_is_that_of_the_variant_the_probes_and_the_gate(monkeypatch):
    scan = study().model_copy(update={"operation": "gated_scan", "baseline": "eager", "variants": ("eager", "fused")})
    first = probing.code_of(scan)
    assert sorted(first) == ["eager", "fused"]
    assert len({*first.values()}) == 2
    assert probing.code_of(scan) == first
    for name, changed in (("digest_of", "code"), ("module_digest", "probes"), ("digest_of_files", "gate")):
        with monkeypatch.context() as patch:
            patch.setattr(checks, name, lambda *_, changed=changed: changed)
            assert not {*probing.code_of(scan).values()} & {*first.values()}
    monkeypatch.setattr(checks, "digest_of", lambda variant: "")
    assert probing.code_of(scan) == {}


@pytest.mark.parametrize("changed", ["probes.py", "reference.py", "torch.py"])
def test_the_code_of_a_report_is_another_if_what_judges_the_variant_changes(changed, monkeypatch):
    """These list the probes, compute the reference outputs from inputs that they make, and hold the PyTorch baseline."""
    scan = study().model_copy(update={"operation": "gated_scan", "baseline": "eager", "variants": ("fused",)})
    first, read = probing.code_of(scan), digests._read

    def edited(path):
        return read(path) + b"#" if "gated_scan" in path.parts and path.name == changed else read(path)

    monkeypatch.setattr(digests, "_read", edited)
    digests.forget()
    try:
        assert probing.code_of(scan)["fused"] != first["fused"]
    finally:
        digests.forget()


def test_shapes_of_a_finished_result_are_measured_anew_and_the_others_keep_their_commit(at_commit, tmp_path):
    path = tmp_path / "mine.json"
    seen = []
    for commit, anew in ((OLD, ()), (NEW, ("second",)), (NEWEST, ("first",)), (OLD, ("second",)), (OLD, ("first", "second"))):
        at_commit(commit)
        measured = []
        result = run(study(), save_to=path, resume=path.exists(), across_commits=True, anew=anew, steps=watched(measured))
        assert measured == list(anew or ("first", "second"))
        assert set(statuses(result).values()) | set(statuses(result, "second").values()) == {"ok"}
        seen.append({each.commit: each.measured for each in result.provenance.earlier})
    assert seen == [{}, {OLD: ("first",)}, {NEW: ("second",)}, {NEWEST: ("first",)}, {}]
    with pytest.raises(ResultExists):  # a finished run of which nothing is wanted
        run(study(), save_to=path, resume=True, across_commits=True)


def test_a_finished_result_takes_new_shapes_and_changed_ones_and_keeps_the_others(tmp_path):
    path = tmp_path / "mine.json"
    run(study(), save_to=path)
    first, second = study().shapes
    changed = second.model_copy(update={"sizes": second.sizes | {"T": 32}})
    third = second.model_copy(update={"name": "third"})
    measured = []
    declared = study(FASTER, shapes=(first, changed, third), question="Does it still run?", notes="Once more.")
    result = run(declared, save_to=path, resume=True, steps=watched(measured))
    assert measured == ["second", "third"]
    assert result.study == declared
    assert result.outcomes[0].status != "not_measured"  # it is asked at a shape that was measured before
    assert statuses(result, "third") == {"eager": "ok", "parallel": "ok"}
    assert Result.load(path) == result
    with pytest.raises(ResultExists):
        run(declared, save_to=path, resume=True)


def test_a_shape_that_is_not_declared_is_not_measured_anew(tmp_path, prose):
    with prose.raises(StudyError, match="third"):
        run(study(), save_to=tmp_path / "mine.json", resume=True, anew=("second", "third"))


@pytest.mark.parametrize("commits", [(OLD + "-dirty", NEW), (OLD, NEW + "-dirty")])
def test_a_commit_with_changes_is_not_taken_over_and_takes_over_none(at_commit, tmp_path, commits):
    path = tmp_path / "mine.json"
    at_commit(commits[0])
    run(study(), save_to=path, steps=interrupted_at("begin", "second"))
    at_commit(commits[1])
    with pytest.raises(ResultMismatch, match=f"commit {commits[0]} then, {commits[1]} now.*Restore the earlier state"):
        run(study(), save_to=path, resume=True, across_commits=True)


def test_the_source_of_a_plug_in_must_be_the_same_at_another_commit(at_commit, tmp_path, monkeypatch):
    """A commit of onelaunch does not say which files of another distribution ran."""
    path = tmp_path / "mine.json"
    for distribution, refused in (("onelaunch 0.1.0", False), ("acme-kernels 1.2", True)):
        plugin = entry_points.Plugin("toy_sum", toy.__name__, distribution)
        monkeypatch.setattr(sources, "plugins", lambda plugin=plugin: (plugin,))
        at_commit(OLD)
        earlier = run(study(), save_to=path, force=True, steps=interrupted_at("begin", "second"))
        changed = {name: each.model_copy(update={"source": 64 * "0"}) for name, each in earlier.provenance.variants.items()}
        facts = earlier.provenance.model_copy(update={"variants": changed})
        earlier.model_copy(update={"provenance": facts}).save(path, force=True)
        at_commit(NEW)
        if refused:
            with pytest.raises(ResultMismatch, match="source of the variant eager"):
                run(study(), save_to=path, resume=True, across_commits=True)
        else:
            assert not run(study(), save_to=path, resume=True, across_commits=True).interrupted


def test_the_next_process_of_a_run_keeps_what_was_measured_anew_and_at_which_commits(at_commit, tmp_path):
    """A process that ends early leaves the partial result; in that, shapes that are measured anew may be finished already."""
    path = tmp_path / "mine.json"
    at_commit(OLD)
    earlier = run(study(), save_to=path)
    at_commit(NEW)
    kept = run(study(), save_to=path, resume=True, across_commits=True, anew=("second",))
    options = RunOptions(3, 2.0, across_commits=True, anew=("second",), timing_seed=kept.provenance.timing_seed or 0)
    measured = []
    job = Job(study(), "cpu", "small", options, None, steps=watched(measured), earlier=earlier)
    again = carry_out(job, lambda _: None, state=State(kept=kept))
    assert not measured
    assert again.cells == kept.cells
    assert [each.commit for each in again.provenance.earlier] == [OLD]
    measured.clear()
    carry_out(dataclasses.replace(job, earlier_path=path), lambda _: None)  # the first process, without a partial result
    assert measured == ["second"]
