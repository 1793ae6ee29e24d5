"""Tests of sinks: what of a result is sent, how a sink is named, what becomes of its errors, and the real packages if installed.

Most tests use :class:`Remembered`, a sink that keeps what it is sent. The tests of Weights & Biases, TensorBoard and MLflow write
to a folder or a database of their own, and are skipped without the package.
"""

from __future__ import annotations

import math
import warnings

import pytest

from onelaunch.errors import ArgumentError, ExtraMissing
from onelaunch.workbench.sinks import SinkNotice, deliver, delivery, make_sink, record_of, register_sink
from onelaunch.workbench.sinks.mlflow_sink import allowed_name
from onelaunch.workbench.sinks.wandb_sink import WandbSink
from tests.workbench import results


class Remembered:
    """Sink that keeps the records that it is sent, or raises ``problem``."""

    title = "a memory"

    def __init__(self, where="", problem=None):
        self.where, self.problem, self.records = where, problem, []

    def send(self, record):
        self.records.append(record)
        if self.problem is not None:
            raise self.problem
        return f"place {self.where}"


@pytest.fixture(scope="module")
def record():
    """Return the record of a small made-up result."""
    return record_of(results.wrong_and_invalid())


def test_a_record_holds_facts_numbers_and_rounds(record):
    assert (record.study, record.run) == ("040-linear-rnn", "nvidia-h200 2026-11-20T12:10:00+00:00")
    assert record.facts["device"] == "NVIDIA H200"
    assert record.facts["version.torch"] == "2.11.0"
    assert record.tags == ("debug", "nvidia-h200", "full")
    times = record.series["rounds_us/forward/cold/target/three_launch_cublas"]
    assert len(times) == 20
    assert min(times) <= record.numbers["time_us/forward/cold/target/three_launch_cublas"] <= max(times)
    assert (record.numbers["criteria_met"], record.numbers["criteria_declared"]) == (0.0, 1.0)
    assert all(math.isfinite(value) for value in record.numbers.values())
    assert record.report.startswith("# 040-linear-rnn")


def test_times_that_are_not_believed_are_not_sent(record):
    assert not [name for name in (*record.numbers, *record.series) if "fused_chunked" in name or "semi_fused" in name]


def test_a_sink_is_sent_the_result_and_its_files(tmp_path):
    sink = Remembered("here")
    assert deliver(results.wrong_and_invalid(), [sink], [tmp_path / "result.json"]) == ["a memory: place here"]
    assert sink.records[0].files == (tmp_path / "result.json",)


@pytest.mark.parametrize(
    "problem", [ConnectionError("no route to host"), KeyboardInterrupt(), SystemExit(1)], ids=lambda each: type(each).__name__
)
def test_a_sink_that_fails_is_a_notice_and_the_next_one_is_tried(problem):
    last = Remembered("there")
    with pytest.warns(SinkNotice, match="a memory") as caught:
        assert deliver(results.wrong_and_invalid(), [Remembered(problem=problem), last]) == ["a memory: place there"]
    assert len(caught) == 1
    assert "It is stored" in str(caught[0].message)


def test_sinks_of_users_are_made_by_name(monkeypatch):
    monkeypatch.setattr(delivery, "_SINKS", dict(delivery._SINKS))
    register_sink("memory", Remembered)
    sink = make_sink("memory:a:b")
    assert isinstance(sink, Remembered)
    assert sink.where == "a:b"
    for name in ("memory", "", "a:b"):
        with pytest.raises(ValueError, match="cannot be called"):
            register_sink(name, Remembered)


def test_a_sink_whose_package_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr(delivery, "package_installed", lambda name: False)
    with pytest.raises(ExtraMissing, match=r"onelaunch\[mlflow\]"):
        make_sink("mlflow:sqlite:///mlflow.db")


@pytest.mark.parametrize(
    "spec", ["wandbb", "", "mlflow:https://me:secret@host", "wandb:a/b/c", "wandb:/b", "wandb:a/", "wandb:onlin:x"]
)
def test_a_sink_that_cannot_be_right_is_refused(spec, monkeypatch, prose):
    monkeypatch.setattr(delivery, "package_installed", lambda name: True)
    with prose.raises(ArgumentError):
        make_sink(spec)


def test_places_of_wandb():
    assert [(each.entity, each.project, each.offline) for each in map(WandbSink, ("", "p", "e/p", "offline", "offline:f:g"))] == [
        (None, "onelaunch", False), (None, "p", False), ("e", "p", False), (None, "onelaunch", True), (None, "onelaunch", True)
    ]  # fmt: skip
    assert str(WandbSink("offline:f:g").folder) == "f:g"


def test_names_are_such_as_mlflow_allows():
    assert allowed_name("time_us/forward/16x512 (a+b)") == "time_us/forward/16x512 _28_a_2b_b_29_"


# The real packages


def sent(spec, tmp_path):
    """Send a result and a file to the sink of this name, and return the line that says where it is."""
    file = tmp_path / "result.json"
    file.write_text("{}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SinkNotice)
        (line,) = deliver(results.wrong_and_invalid(), [make_sink(spec)], [file])
    return line


def test_tensorboard_reads_what_was_written(tmp_path, record):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed; doubles of sinks are tested above")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sent(f"tensorboard:{tmp_path / 'runs'}", tmp_path)
    (folder,) = (tmp_path / "runs" / "040-linear-rnn").iterdir()
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) == {*record.numbers, *record.series}
    (name, values), *_ = record.series.items()
    assert [event.value for event in events.Scalars(name)] == pytest.approx(values)
    assert [event.step for event in events.Scalars(name)] == list(range(20))
    assert "report/text_summary" in events.Tags()["tensors"]


def test_wandb_keeps_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb is not installed; doubles of sinks are tested above")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sent(f"wandb:offline:{tmp_path / 'kept'}", tmp_path)
    (run,) = (tmp_path / "kept" / "wandb").glob("offline-run-*")
    (data,) = run.glob("run-*.wandb")
    content = data.read_bytes()
    assert b"NVIDIA H200" in content
    assert b"rounds_us/forward/cold/target/three_launch_cublas" in content
    copy = run / "files" / "result.json"
    assert copy.read_text() == "{}"
    assert not copy.is_symlink()


def test_mlflow_reads_what_was_written(tmp_path, record, monkeypatch):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed; doubles of sinks are tested above")
    pytest.importorskip("sqlalchemy")  # which mlflow-skinny does not install
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    sent(f"mlflow:{uri}", tmp_path)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("040-linear-rnn")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["device"] == "NVIDIA H200"
    (name, values), *_ = record.series.items()
    history = sorted(client.get_metric_history(run.info.run_id, name), key=lambda each: each.step)
    assert [each.value for each in history] == pytest.approx(values)
    assert run.data.metrics["criteria_declared"] == 1.0
    assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["result.json"]


def test_an_mlflow_server_that_does_not_answer_is_a_notice(monkeypatch):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed; doubles of sinks are tested above")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.warns(SinkNotice, match="MLflow"):
        assert deliver(results.wrong_and_invalid(), [make_sink("mlflow:http://127.0.0.1:9")]) == []
