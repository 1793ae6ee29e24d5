"""Tests of ``onelaunch study run`` with variants that end or stop the process that measures them.

The fixtures are those of ``conftest.py``. ``call`` runs ``onelaunch`` with arguments in this process; the study toy-study lies in
the working directory. On a CPU the child is a fork, which knows the variants that a test registers.

``here`` is the working directory, a folder with one study. ``at_count`` makes a variant that acts in a chosen call, such as by
ending the process. ``registered`` registers variants for a test. A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onelaunch.cli.study import run as run_module
from onelaunch.workbench.result import Result
from tests.workbench import results
from tests.workbench.rogues_timing import at_count, registered

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the child is forked on Linux alone")


def add_rogue(here):
    path = here / "studies" / "toy-study.toml"
    path.write_text(path.read_text().replace('"parallel"]', '"parallel", "rogue"]'))


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda: os._exit(0), id="os._exit"),
        pytest.param(lambda: sys.exit(0), id="sys.exit", marks=pytest.mark.thorough),
    ],
)
def test_a_variant_that_ends_the_process_does_not_end_the_study(end, call, here):
    add_rogue(here)
    with registered(rogue=at_count(1, end)):
        answer = call("study", "run", "toy-study", "--device", "cpu", "--out", "r")
    assert answer.code == 0
    result = Result.load(here / "r" / "result.json")
    assert {cell.variant: cell.status for cell in result.cells} == {"eager": "ok", "parallel": "ok", "rogue": "crashed"}
    assert result.decision is not None
    assert (here / "r" / "report.html").exists()


def test_a_call_longer_than_the_limit_is_ended(call, here):
    add_rogue(here)
    with registered(rogue=at_count(1, lambda: time.sleep(1000))):
        answer = call("study", "run", "toy-study", "--device", "cpu", "--out", "r", "--call-limit", "2")
    assert answer.code == 0
    result = Result.load(here / "r" / "result.json")
    assert result.cell("first", "rogue").status == "timed_out"
    assert result.cell("first", "parallel").status == "ok"


def test_the_command_line_supervises_unless_told_otherwise(call, monkeypatch):
    asked = []

    def run_study(study, **options):
        asked.append((options["in_process"], options["call_limit"]))
        return results.proceed_on_gpu()

    monkeypatch.setattr(run_module, "run_study", run_study)
    call("study", "run", "toy-study", "--device", "cpu")
    call("study", "run", "toy-study", "--device", "cpu", "--in-process", "--call-limit", "7", "--force")
    assert asked == [(False, run_module.CALL_LIMIT_SECONDS), (True, 7.0)]


# The partial result is saved in the forked child, which interrupts its parent once the first shape is finished.
CTRL_C = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in its background with SIGINT ignored
sys.path.insert(0, {root!r})
from tests.workbench import toy
from onelaunch.device import quick_look
from onelaunch.workbench import running
from onelaunch.workbench.measure import rotation, sampling, timing
from onelaunch.workbench.report import page
from onelaunch.cli.main import app
page.plots = lambda result: ()
quick_look.implausible = lambda device, found: ""  # the peaks are made up; measuring them takes seconds
timing.WARM_UP_SECONDS["cpu"] = 0.0
rotation.CACHES, sampling.CPU_SAMPLE_SECONDS = 0, 1e-4
parent = os.getpid()
keep = running.Run.save_partial
def keep_and_be_interrupted(self):
    keep(self)
    if len(self.finished) == 1:
        os.kill(parent, signal.SIGINT)
        for _ in range(6000):  # the interruption comes between two of the pauses; on a busy machine only after seconds
            time.sleep(0.01)
running.Run.save_partial = keep_and_be_interrupted
sys.argv = ["onelaunch", "study", "run", "toy-study", "--device", "cpu"]
app()
"""


@pytest.mark.thorough
def test_ctrl_c_keeps_the_finished_shapes_and_resume_continues(here, call):
    text = (here / "studies" / "toy-study.toml").read_text()
    second = text[text.index("[[shapes]]") : text.index("[[criteria]]")].replace('"first"', '"second"')
    (here / "studies" / "toy-study.toml").write_text(text.replace("[[criteria]]", f"{second}\n[[criteria]]", 1))
    code = CTRL_C.format(root=str(Path(__file__).parents[2]))
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=here, capture_output=True, encoding="utf-8", timeout=120, check=False
    )
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    result = Result.load(here / "results" / "cpu" / "toy-study.json")
    assert result.interrupted
    assert {cell.status for cell in result.cells if cell.shape == "first"} == {"ok"}
    assert {cell.status for cell in result.cells if cell.shape == "second"} == {"interrupted"}
    assert call("study", "run", "toy-study", "--device", "cpu", "--resume").code == 0
    assert not Result.load(here / "results" / "cpu" / "toy-study.json").interrupted


@pytest.mark.gpu
def test_the_parent_of_a_study_on_a_gpu_does_not_initialise_cuda(here):
    """The study of an installed operation is measured at its small shapes in a new interpreter."""
    code = """
import sys, torch
from onelaunch.cli.main import app
sys.argv = ["onelaunch", "study", "run", "040-linear-rnn", "--scale", "small", "--quick", "--no-count", "--out", "r"]
try:
    app()
except SystemExit as end:
    print("code", end.code)
print("initialised", torch.cuda.is_initialized())
"""
    # The child is spawned, and a spawned child imports main.py again.
    (here / "main.py").write_text(f'if __name__ == "__main__":\n{"".join("    " + line + chr(10) for line in code.splitlines())}')
    ended = subprocess.run(
        [sys.executable, "main.py"],
        cwd=here,
        capture_output=True,
        encoding="utf-8",
        timeout=500,
        check=False,
        env=os.environ | {"ONELAUNCH_STUDIES": str(Path(__file__).parents[2] / "studies")},
    )
    assert "initialised False" in ended.stdout, ended.stderr
    assert Result.load(here / "r" / "result.json").provenance.slug != "cpu"
