"""Fixtures shared by tests of the command line: a way to call it, made-up peaks and results, and a private folder.

``known_ceilings`` and ``here`` prepare every test of this folder. ``test_study_show.py`` changes the text :data:`STUDY`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onelaunch.cli.application import application
from onelaunch.device import peaks, quick_look
from onelaunch.device.hardware import Ceilings
from onelaunch.workbench import run
from onelaunch.workbench.measure import rotation, sampling, timing
from tests.workbench import results, toy
from tests.workbench.drawn import keep_texts_alone
from tests.workbench.runs import spare_children

# FLOPs per second by dtype.
RATES = {"float16": 1e13, "bfloat16": 1e13, "float32": 1e13}

STUDY = """
name = "toy-study"
question = "Is the parallel sum faster?"
operation = "toy_sum"
baseline = "eager"
variants = ["eager", "parallel"]
rounds = 3
notes = "A write-up reported **9.99x**."

[[shapes]]
name = "first"
scale = "small"
dtype = "float32"
B = 2
T = 24
V = 8

[[criteria]]
name = "faster"
measure = "speedup"
of = "parallel"
at_least = 1.01

[[criteria]]
name = "a thousand times fewer bytes"
measure = "dram_bytes_ratio"
of = "parallel"
at_least = 1000
"""


@pytest.fixture(autouse=True)
def known_ceilings(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Ceilings:
    """Store peaks of the CPU in the cache folder of the tests, as if they had been measured before.

    All tests of the process share the folder, so each test stores them anew. They are made up, so they are not compared with a
    quick measurement of this machine.
    """
    monkeypatch.setattr(quick_look, "implausible", lambda device, found: "")
    rates = Ceilings(1e12, RATES, 1e-6, "2026-11-20T12:00:00+00:00", peaks.software("cpu"), 2e12, {"copy": 0.01, "read": 0.02})
    assert own_cache in peaks.cache_path("cpu").parents  # the user's own measured peaks must not be overwritten
    return peaks.remember("cpu", rates)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run commands in an empty folder with one study, with settings that make them fast.

    The plots of pages hold their texts only, because drawing takes most of a page's time.
    """
    spare_children(monkeypatch)
    assert toy.toy_sum.variants  # the import of toy registers the operation
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(timing.WARM_UP_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(rotation, "CACHES", 0)  # the inputs are so tiny that thousands of sets would be rotated
    monkeypatch.setattr(sampling, "CPU_SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(run, "TIME_CAP_SECONDS", {"small": 2.0, "full": 2.0})
    keep_texts_alone(monkeypatch)
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "toy-study.toml").write_text(STUDY)
    return tmp_path


class Answer:
    """Output and exit code of a command.

    In ``out`` (stdout) and ``err`` (stderr) every run of blanks and line breaks is one blank, because line breaks depend only
    on the terminal's width. ``raw`` and ``raw_err`` are unchanged.
    """

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.raw, self.out, self.err = code, out, " ".join(out.split()), " ".join(err.split())
        self.raw_err = err


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Return a function that runs ``onelaunch`` with arguments in this process, and returns an :class:`Answer`.

    An exception that the command did not turn into an exit code is raised again. ``width`` is the terminal's, in columns.
    """

    def run_command(*arguments: object, width: int = 120) -> Answer:
        monkeypatch.setenv("COLUMNS", str(width))
        answer = CliRunner().invoke(application, [str(argument) for argument in arguments])
        if answer.exception and not isinstance(answer.exception, SystemExit):
            raise answer.exception
        return Answer(answer.exit_code, answer.stdout, answer.stderr)

    return run_command


@pytest.fixture
def stored(tmp_path):
    """Write two made-up results to disk and return their paths: a GPU's that proceeds, and a CPU's that was interrupted."""
    return (
        results.proceed_on_gpu().save(tmp_path / "gpu.json"),
        results.interrupted_on_cpu().save(tmp_path / "cpu.json"),
    )
