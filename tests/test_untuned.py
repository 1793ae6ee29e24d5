"""Tests of autotuners that launch their first configuration: which one that is, what stays cached, and in which processes."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from tests.untuned import interpreter, launch_first, untuned

triton = pytest.importorskip("triton", reason="the autotuners are Triton's")


def tuner_of(fits):
    """Return a stand-in for an autotuner of three configurations, whose kernel fits on the device with some numbers of warps."""
    from triton.runtime.autotuner import OutOfResources

    ran = []

    def run(*args, num_warps, **rest):
        ran.append((*args, num_warps))
        if num_warps not in fits:
            raise OutOfResources(300_000, 230_000, "shared memory")
        return "a kernel"

    configs = [triton.Config({}, num_warps=warps) for warps in (1, 2, 4)]
    return SimpleNamespace(fn=SimpleNamespace(run=run), arg_names=("x",), prune_configs=lambda given: configs, ran=ran)


def test_the_first_configuration_that_fits_is_launched():
    tuner = tuner_of(fits=(2, 4))
    assert launch_first(tuner, "x", grid=(1,), warmup=False) == "a kernel"
    assert tuner.ran == [("x", 1), ("x", 2)]


def test_an_autotuner_none_of_whose_configurations_fits_raises():
    from triton.runtime.autotuner import OutOfResources

    with pytest.raises(OutOfResources):
        launch_first(tuner_of(fits=()), "x", grid=(1,), warmup=False)


def test_autotuners_tune_again_afterwards():
    from triton.runtime.autotuner import Autotuner

    before = Autotuner.run
    with untuned():
        assert Autotuner.run is launch_first
    assert Autotuner.run is before


def test_a_process_runs_a_module_with_its_arguments_and_untuned(tmp_path):
    (tmp_path / "told.py").write_text(
        "import sys\nfrom triton.runtime.autotuner import Autotuner\nprint(__name__, *sys.argv[1:], Autotuner.run.__name__)\n"
    )
    command = [interpreter(tmp_path), "-m", "told", "one", "two words"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "__main__ one two words launch_first\n"
