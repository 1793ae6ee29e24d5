"""Sink for MLflow: a run in the experiment of the study, on a server or in a local database."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from onelaunch.workbench.sinks.record import Record

T = TypeVar("T")

_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""Environment variables of MLflow that limit the wait for a server, which by default takes minutes. The user's own come first."""

_METRICS, _OTHERS = 1000, 100
"""Most metrics, and most parameters or tags, of one request to MLflow."""

_MOST_CHARACTERS = 6000
"""Length limit of a parameter's value."""


class MlflowSink:
    """Tracking server or database of MLflow.

    Args:
        where: Tracking URI, such as ``http://localhost:5000`` or ``sqlite:///mlflow.db``. If it is empty, MLflow's own setting
            applies (``MLFLOW_TRACKING_URI``), by default a database in the working directory.
    """

    title = "MLflow"

    def __init__(self, where: str = "") -> None:
        self.uri = where or None

    def send(self, record: Record) -> str:
        with _limited_patience():
            from mlflow.tracking import MlflowClient  # takes several seconds

            client = MlflowClient(tracking_uri=self.uri)
            experiment = client.get_experiment_by_name(record.study)
            identifier = client.create_experiment(record.study) if experiment is None else experiment.experiment_id
            tags = {"decision": record.facts["decision"], "tags": ", ".join(record.tags), "mlflow.note.content": record.question}
            run = client.create_run(identifier, run_name=record.run, tags=tags).info.run_id
            try:
                _fill(client, run, record)
            except BaseException:
                with suppress(Exception):
                    client.set_terminated(run, status="FAILED")
                raise
            client.set_terminated(run, status="KILLED" if record.interrupted else "FINISHED")
        return f"run {run} of the experiment {record.study}"


def _fill(client: Any, run: str, record: Record) -> None:
    """Log the facts, numbers, series and files of a record to a run."""
    from mlflow.entities import Metric, Param

    now = int(1000 * time.time())
    steps = [(name, value, 0) for name, value in record.numbers.items()]
    steps += [(name, value, step) for name, values in record.series.items() for step, value in enumerate(values)]
    for part in _parts([Param(name, value[:_MOST_CHARACTERS]) for name, value in record.facts.items()], _OTHERS):
        client.log_batch(run, params=part)
    for part in _parts([Metric(allowed_name(name), value, now, step) for name, value, step in steps], _METRICS):
        client.log_batch(run, metrics=part)
    for file in record.files:
        client.log_artifact(run, str(file))


def allowed_name(name: str) -> str:
    """Return a name in which characters that MLflow refuses are replaced by their codes, such as ``_2b_`` for ``+``."""
    return re.sub(r"[^A-Za-z0-9_\-. :/]", lambda found: f"_{ord(found[0]):02x}_", name)


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the items in parts of at most a size."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


@contextmanager
def _limited_patience() -> Iterator[None]:
    """Set :data:`_PATIENCE` where the user has not, for the time of a block."""
    added = {name: value for name, value in _PATIENCE.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
