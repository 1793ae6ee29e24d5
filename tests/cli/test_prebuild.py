"""Tests of ``onelaunch prebuild``. What is compiled, and into which caches, is tested in tests/launch/test_ahead.py.

The fixtures are those of ``conftest.py``. ``call`` runs ``onelaunch`` with arguments in this process and returns its exit
``code``, its stdout (``out`` with single blanks, ``raw`` unchanged) and its stderr (``err``, ``raw_err``). ``prose`` compares a
text with its entry in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and
``tests/test_prose.py`` if the test or the parameter of an entry is gone.
"""

from __future__ import annotations

import pytest

from onelaunch.cli import prebuild
from onelaunch.launch.ahead import Compilation

pytest.importorskip("triton")

SHAPE = "B=1,T=64,H=2,K=64,V=64"


@pytest.fixture
def compiled(monkeypatch):
    """Replace the compilers: every kernel compiles in a second, and ``step`` is in the cache. Return what was asked for."""
    asked = []

    def compile_all(builds, architecture, processes, report):
        asked.append((architecture, processes, [build.name for build in builds]))
        done = [Compilation(build, 1.0, cached=build.name.endswith(": step")) for build in builds]
        for index, each in enumerate(done, 1):
            report(each, index, len(done))
        return done

    monkeypatch.setattr(prebuild, "compile_all", compile_all)
    return asked


def test_kernels_of_a_call_are_compiled_for_each_architecture(call, compiled):
    answer = call("prebuild", "gla", "--shape", SHAPE, "--variant", "stepwise", "--arch", "sm_90", "--arch", "sm_80", "--jobs", 3)
    assert answer.code == 0
    assert [(architecture, processes) for architecture, processes, _ in compiled] == [("sm_90a", 3), ("sm_80", 3)]
    names = compiled[0][2]
    assert all(name.startswith("stepwise: ") for name in names)
    assert f"sm_90a: compiled {len(names) - 1} kernels" in answer.out  # all but step, which both directions share
    assert "in the cache already: 1." in answer.out
    assert "cache: " in answer.out
    assert f"[{len(names)}/{len(names)}]" in answer.err


def test_all_takes_every_operation(call, compiled, monkeypatch):
    seen = []
    monkeypatch.setattr(prebuild, "builds_of_examples", lambda operation, *rest: seen.append(operation.name) or ["build"])
    monkeypatch.setattr(prebuild, "compile_all", lambda builds, *rest: [])
    assert call("prebuild", "--all").code == 0
    assert {"gla", "linear_rnn", "swiglu", "projections", "decode_step"} <= set(seen)
    assert not compiled


def test_a_kernel_that_fails_gives_exit_code_1_and_its_message(call, monkeypatch):
    monkeypatch.setattr(
        prebuild, "compile_all", lambda builds, *rest: [Compilation(builds[0], 1.0, cached=False, problem="ptxas [refused] it.")]
    )
    answer = call("prebuild", "gla", "--shape", SHAPE, "--variant", "stepwise")
    assert answer.code == 1
    assert "ptxas [refused] it." in answer.out


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("gla", "--all"),
        ("--all", "--shape", SHAPE),
        ("--all", "--variant", "fused"),
        ("glaa",),
        ("gla", "--variant", "fussed"),
        ("gla", "--shape", "B=1"),
        ("gla", "--arch", "sm_13"),
        ("gla", "--variant", "chunked"),
        ("gla", "--shape", SHAPE, "--variant", "hopper", "--arch", "sm_80"),
    ],
    ids=" ".join,
)
def test_a_wrong_request_names_what_would_be_right(call, compiled, arguments, prose):
    answer = call("prebuild", *arguments)
    assert answer.code != 0
    assert not compiled
    prose(answer.err.partition("error: ")[2])
