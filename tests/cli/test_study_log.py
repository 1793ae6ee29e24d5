"""Tests of the option ``--log`` of ``onelaunch study run`` and ``report``, with a sink that only keeps what it is sent.

``call`` and ``here`` are fixtures of ``conftest.py``: ``call`` runs ``onelaunch`` with arguments in the folder ``here``, which
holds the study toy-study. ``stored`` holds paths of two made-up results.
"""

from __future__ import annotations

import pytest

from onelaunch.cli.study import run as run_module
from onelaunch.workbench.result import Result
from onelaunch.workbench.sinks import delivery


@pytest.fixture
def sink(monkeypatch):
    """Register the sink ``memory``, which fails at its first use, and return the list of the records that it is sent."""
    records = []

    class Memory:
        title = "a memory"

        def __init__(self, where):
            self.where = where

        def send(self, record):
            assert all(file.exists() for file in record.files)  # the result and its report are written first
            records.append(record)
            if len(records) == 1:
                raise ConnectionError("no route to host")
            return f"place {self.where}"

    monkeypatch.setattr(delivery, "_SINKS", {**delivery._SINKS, "memory": (Memory, "")})
    return records


def test_a_sink_that_fails_loses_nothing_and_the_result_can_be_sent_again(call, here, sink):
    run = call(
        "study",
        "run",
        "toy-study",
        "--device",
        "cpu",
        "--in-process",
        "--out",
        "here",
        "--log",
        "memory:x",
        "--price-per-hour",
        2,
    )
    assert run.code == 0
    assert "warning: The result was not sent to a memory, or not completely: no route to host." in run.err
    assert "Result: here/result.json" in run.out
    result = Result.load(here / "here" / "result.json")
    assert result.spent is not None
    assert result.spent.price_per_hour == 2.0
    assert [file.name for file in sink[0].files] == ["result.json", "report.html", "report.md"]
    again = call("study", "report", "here/result.json", "--log", "memory:x")
    assert again.code == 0
    assert "Sent to a memory: place x" in again.out
    assert sink[1].numbers == sink[0].numbers


def test_an_unknown_sink_is_refused_before_anything_is_measured(call, stored, monkeypatch):
    monkeypatch.setattr(run_module, "run_study", lambda *_, **__: pytest.fail("measured although there is no such sink"))
    for arguments in (("run", "toy-study", "--device", "cpu"), ("report", stored[0])):
        answer = call("study", *arguments, "--log", "memori")
        assert answer.code == 2
        assert "There is no sink 'memori'" in answer.err
