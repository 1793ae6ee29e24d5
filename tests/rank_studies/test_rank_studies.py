"""Tests of studies of ranks: the declared study, its judgements, and its command. ``tests/parallel/ranks.py`` measures one."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from onelaunch.cli.study.application import study
from onelaunch.errors import ArgumentError, ResultMismatch, StudyError, UnknownStudy
from onelaunch.model_studies.run import provenance
from onelaunch.rank_studies.declare import find_rank_study
from onelaunch.rank_studies.judge import lines
from onelaunch.rank_studies.ranks import joined, run_rank_study
from onelaunch.rank_studies.report import overview_entry
from onelaunch.rank_studies.result import Measured, RankResult
from onelaunch.workbench.study.read import find_study

STUDY = find_rank_study("context-parallel")


def measured(ranks: int, one: float, sliced: float, difference: float = 1e-3, missing: str = "", exchange: str = "") -> Measured:
    """Return a measurement of the study's first shape in training."""
    times = {} if missing else {"one": (one,) * 12, "sliced": (sliced,) * 12, "differences": {"o": difference, "q": 1e-4}}
    run = provenance(STUDY.rounds, torch.device("cpu"), "full", "command")
    return Measured(
        shape=STUDY.shapes[0].name,
        direction="forward_backward",
        regime="graph",
        ranks=ranks,
        missing=missing,
        exchange=exchange,
        provenance=run,
        **times,
    )


def test_the_study_keeps_the_predictions_that_were_made_before_it_ran():
    """Speedups by an earlier form of onelaunch.parallel.cost: an H200's times, assumed latencies, one all-gather of two hidden.

    The study's notes say that a test compares them with the model. It did until the study had run: the model has been fitted to
    the measured times since (tests/parallel/test_cost.py), and a declared prediction does not change behind its result.
    """
    assert {(each.shape, each.ranks, each.direction): (each.by, each.value) for each in STUDY.predictions} == {
        (STUDY.shapes[0].name, ranks, direction): ("onelaunch.parallel.cost", value)
        for ranks, direction, value in (
            (2, "forward", 1.75), (4, "forward", 2.88), (2, "forward_backward", 1.89), (4, "forward_backward", 3.44)
        )
    }  # fmt: skip
    for each in STUDY.predictions:
        assert each.why.startswith("The slice takes ")


def test_runs_on_other_numbers_of_ranks_are_added_and_judged(tmp_path):
    path = tmp_path / "result.json"
    joined(STUDY, path, [measured(2, 5730.0, 3000.0)]).save(path)
    result = joined(STUDY, path, [measured(4, 5730.0, 1900.0, difference=5e-3, exchange="stores to peers")])
    result.save(path, force=True)
    assert RankResult.load(path) == result
    statuses = {outcome.criterion.name: outcome.status for outcome in result.outcomes}
    assert statuses == {
        "two GPUs train 1.8 times as fast": "met",
        "four GPUs train 3.4 times as fast": "missed",
        "two GPUs compute what one does": "met",
        "four GPUs compute what one does": "missed",
        "four GPUs compute what one does, with a decay per head": "not_measured",
    }
    said = list(lines(result))
    assert said[0].endswith("1.91x (predicted 1.89x), difference 1.0e-03")
    assert said[1].endswith("difference 5.0e-03, exchange: stores to peers")
    again = joined(STUDY, path, [measured(4, 0, 0, missing="rank 1: it broke")])
    assert [each.ranks for each in again.measurements] == [2, 4]
    assert "rank 1: it broke" in list(lines(again))[1]
    with pytest.raises(ResultMismatch):
        joined(STUDY.model_copy(update={"rounds": 3}), path, [])


def test_a_study_of_ranks_is_found_and_checked(tmp_path):
    with pytest.raises(UnknownStudy):
        find_rank_study("no-such-study")
    path = tmp_path / "odd.toml"
    path.write_text('name = "odd"\nquestion = "?"\nranks = [2]\nshapes = [{ name = "a", T = 3, H = 1, K = 16, V = 16 }]\n')
    with pytest.raises(StudyError, match="multiple of every number of ranks"):
        find_rank_study(str(path))


def test_torchrun_starts_a_study(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ArgumentError, match="torchrun --nproc-per-node N -m onelaunch study ranks context-parallel"):
        run_rank_study(STUDY, "cpu", None, None)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match="2 or 4 ranks, not on 3"):
        run_rank_study(STUDY, "cpu", None, None)


def test_the_command_shows_a_stored_result(tmp_path):
    path = tmp_path / "result.json"
    joined(STUDY, path, [measured(2, 5730.0, 3000.0)]).save(path)
    said = CliRunner().invoke(study, ["ranks", str(path)])
    assert said.exit_code == 0, said.output
    assert "1.91x (predicted 1.89x)" in said.output


def test_results_of_ranks_are_in_the_overview_of_all_results(tmp_path):
    measurements = [measured(2, 5730.0, 3000.0), measured(4, 0, 0, missing="rank 1: it broke")]
    joined(STUDY, tmp_path / "x.json", measurements).save(tmp_path / "x.json")
    said = CliRunner().invoke(study, ["report", "--all", str(tmp_path)])
    assert said.exit_code == 0, said.output
    assert "1 result" in said.output
    assert "0 files left out" in said.output or "left out" not in said.output
    entry = overview_entry(joined(STUDY, tmp_path / "x.json", measurements), "x.json")
    assert entry.found == "2 criteria met, 3 criteria not measured."
    assert [row[4:] for row in entry.tables[0].rows] == [
        ("5.73 ms", "3.00 ms", "1.91x", "1.0e-03"), ("rank 1: it broke", "", "", "")
    ]  # fmt: skip
    assert overview_entry(joined(STUDY, tmp_path / "none.json", []), "none.json").found == "5 criteria not measured."


def test_a_study_of_ranks_is_no_study_of_variants():
    with pytest.raises(StudyError, match="several GPUs, not of variants") as caught:
        find_study("context-parallel")
    assert "onelaunch study ranks context-parallel" in str(caught.value)


def test_committed_results_name_no_folder_of_the_machine_that_measured_them(pytestconfig):
    paths = sorted((pytestconfig.rootpath / "results").glob("*/ranks/*.json"))
    commands = [each.provenance.command for path in paths for each in RankResult.load(path).measurements]
    assert commands
    assert [command for command in commands if "/" in command] == []
