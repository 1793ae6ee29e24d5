"""Tests of the comparison of stored peaks with a quick measurement: a file of peaks that is wrong by far is not believed.

A quick look returns rough rates per second: ``copy`` in bytes, a dtype in FLOPs, ``launch``. Here it sees ``SEEN``
unless a test says otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch.device import peaks, quick_look
from onelaunch.device.hardware import Ceilings
from onelaunch.errors import CacheNotice

SEEN = {"copy": 1.5e10, "float32": 8e10, "launch": 8e5}
HONEST = Ceilings(
    copy_bytes_per_second=2e10,
    matrix_flops_per_second={"float32": 1e11, "float16": 1e11, "bfloat16": 1e11},
    launch_seconds=1e-6,
    measured_at="2026-11-20T12:00:00+00:00",
    software=peaks.software("cpu"),
    read_bytes_per_second=2e10,
)


def scaled(found, factor):
    """Return peaks of which all that a quick look checks are ``factor`` times as high."""
    return replace(
        found,
        copy_bytes_per_second=factor * found.copy_bytes_per_second,
        matrix_flops_per_second={dtype: factor * rate for dtype, rate in found.matrix_flops_per_second.items()},
        launch_seconds=found.launch_seconds / factor,
    )


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Give the test an empty cache folder and a machine with the peaks ``HONEST``; return the devices that were measured."""
    measured = []

    def measure(device):
        measured.append(device)
        return replace(HONEST, measured_at="2026-11-21T12:00:00+00:00")

    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(quick_look, "look", lambda device: dict(SEEN))
    monkeypatch.setattr(peaks, "measure", measure)
    monkeypatch.setattr(peaks, "_LOOKED_AT", {})
    return measured


@pytest.mark.parametrize("factor", [1 / 1000, 1 / 20, 20, 1000])
def test_a_file_of_peaks_that_is_wrong_by_20_or_1000_is_measured_again_with_a_notice(machine, factor):
    peaks.remember("cpu", scaled(HONEST, factor))
    with pytest.warns(CacheNotice, match="does not have"):
        found = peaks.ceilings("cpu")
    assert found.copy_bytes_per_second == HONEST.copy_bytes_per_second
    assert peaks.stored("cpu") == found
    assert peaks.ceilings("cpu") == found
    assert machine == ["cpu"]


@pytest.mark.parametrize("quantity", ["copy", "float32", "launch"])
def test_one_wrong_peak_among_right_ones_is_found(quantity):
    wrong = {
        "copy": {"copy_bytes_per_second": 20e10},
        "float32": {"matrix_flops_per_second": {"float32": 1e11 / 20}},
        "launch": {"launch_seconds": 20e-6},
    }[quantity]
    said = quick_look.implausible("cpu", replace(HONEST, **wrong))
    assert said.startswith(f"{quantity} ")
    assert not quick_look.implausible("cpu", HONEST)


def test_honest_peaks_are_believed_and_looked_at_once(machine, monkeypatch, recwarn):
    looks = []
    monkeypatch.setattr(quick_look, "look", lambda device: looks.append(device) or dict(SEEN))
    peaks.remember("cpu", HONEST)
    assert peaks.ceilings("cpu") == peaks.ceilings("cpu") == HONEST
    assert (machine, len(looks)) == ([], 1)
    assert not recwarn.list


def test_a_slow_quick_look_on_a_busy_machine_does_not_replace_honest_peaks(machine, monkeypatch, recwarn):
    """Other work can slow a quick look down by any factor. The full measurement then agrees with the stored peaks."""
    monkeypatch.setattr(quick_look, "look", lambda device: {name: rate / 50 for name, rate in SEEN.items()})
    peaks.remember("cpu", HONEST)
    assert peaks.ceilings("cpu") == HONEST == peaks.stored("cpu")
    assert peaks.ceilings("cpu") == HONEST
    assert machine == ["cpu"]
    assert not recwarn.list


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_look_gives_rates_of_this_machine(monkeypatch, device):
    monkeypatch.undo()  # for the real ``look``; conftest.py's patches of this test, such as its cache folder, end here too
    rates = quick_look.look(torch.device(device))
    assert {"copy", "float32" if device == "cpu" else "float16"} <= rates.keys()
    assert all(rate > 1e3 for rate in rates.values())
    monkeypatch.setattr(quick_look, "free_memory", lambda device: 0)
    assert quick_look.look(torch.device(device)) == {}
