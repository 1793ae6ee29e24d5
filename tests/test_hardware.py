"""Devices by name, their facts, and the cache of what they were measured to do."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from onelaunch import hardware
from onelaunch.errors import NoDeviceError
from onelaunch.hardware import Ceilings, Device

FOUND = Ceilings(1e11, {"float32": 1e12, "float16": 1e12, "bfloat16": 1e12}, 1e-6, "2026-01-01T00:00:00+00:00", "any")
H200 = Device("cuda", "NVIDIA H200", "sm_90", 132, 60 << 20, 150 << 30)


@pytest.fixture
def measurements(monkeypatch):
    """Count the measurements instead of making them."""
    made = []

    def measure(device):
        made.append(device)
        return replace(FOUND, software=hardware._software(device))

    monkeypatch.setattr(hardware, "measure", measure)
    return made


@pytest.mark.parametrize(
    ("device", "slug"),
    [
        (H200, "nvidia-h200"),
        (replace(H200, name="NVIDIA RTX 6000 Ada Generation"), "nvidia-rtx-6000-ada-generation"),
        (replace(H200, name="AMD Instinct MI300X (OAM)"), "amd-instinct-mi300x-oam"),
        (Device("cpu", "Some(R) CPU @ 2.0GHz", "x86_64", 2, 1 << 20, 1 << 30), "cpu"),
    ],
)
def test_a_slug_is_good_for_file_names(device, slug):
    assert device.slug == slug


def test_the_cpu_is_described():
    cpu = hardware.describe("cpu")
    assert cpu.type == "cpu"
    assert cpu.name
    assert cpu.processors >= 1
    assert 32 << 10 <= cpu.cache_bytes <= 4 << 30
    assert cpu.memory_bytes > 100 << 20


def test_the_cpu_is_always_present_and_gpus_come_first(monkeypatch):
    assert hardware.present()[-1] == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert hardware.present() == ["cuda:0", "cuda:1", "cpu"]
    assert hardware.resolve("auto") == torch.device("cuda:0")
    assert hardware.resolve("cuda") == torch.device("cuda:0")
    assert hardware.resolve("cuda:1") == torch.device("cuda:1")


def test_a_device_that_is_not_here_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert hardware.resolve("auto") == hardware.resolve("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:3", "tpu", "not a device"):
        with pytest.raises(NoDeviceError, match=rf"no device {name!r} here\. Present: cpu\. Name one of these"):
            hardware.resolve(name)


def test_ceilings_are_measured_once(measurements, tmp_path, monkeypatch):
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path / "new"))
    first = hardware.ceilings("cpu")
    assert hardware.ceilings("cpu") == first
    assert measurements == ["cpu"]
    assert (tmp_path / "new" / "ceilings-cpu.json").exists()


def test_ceilings_are_measured_again_when_asked(measurements, tmp_path, monkeypatch):
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))
    hardware.ceilings("cpu")
    hardware.ceilings("cpu", refresh=True)
    assert len(measurements) == 2


@pytest.mark.parametrize(
    "stored",
    [
        "",
        "{",
        "[]",
        "7",
        '{"copy_bytes_per_second": 1}',
        json.dumps({**FOUND.__dict__, "software": "torch 0.4"}),
        json.dumps({**FOUND.__dict__, "matrix_flops_per_second": {"float16": 1e12}}),
    ],
    ids=["empty", "cut off", "a list", "a number", "fields missing", "another torch", "a dtype missing"],
)
def test_a_cache_that_cannot_be_believed_is_measured_again(stored, measurements, tmp_path, monkeypatch):
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))
    (tmp_path / "ceilings-cpu.json").write_text(stored)
    assert hardware.ceilings("cpu").copy_bytes_per_second == FOUND.copy_bytes_per_second
    assert measurements == ["cpu"]
    assert hardware.ceilings("cpu").copy_bytes_per_second == FOUND.copy_bytes_per_second
    assert measurements == ["cpu"]


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path / "own"))
    assert hardware.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("ONELAUNCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hardware.cache_folder() == tmp_path / "onelaunch"


def test_a_measurement_of_the_cpu_gives_plausible_rates():
    found = hardware.measure("cpu")
    assert 1e8 < found.copy_bytes_per_second < 1e13
    assert set(found.matrix_flops_per_second) == {"float16", "bfloat16", "float32"}
    assert all(1e8 < rate < 1e15 for rate in found.matrix_flops_per_second.values())
    assert 1e-8 < found.launch_seconds < 1e-3
    assert torch.__version__ in found.software


@pytest.mark.gpu
def test_a_gpu_is_described_and_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))
    facts = hardware.describe("cuda:0")
    assert facts.architecture.startswith(("sm_", "gfx"))
    assert facts.processors > 8
    found = hardware.ceilings("cuda:0")
    assert 1e11 < found.copy_bytes_per_second < 1e14
    assert 1e-7 < found.launch_seconds < 1e-4
    assert found.matrix_flops_per_second["float16"] > found.matrix_flops_per_second["float32"]
    assert ("float8_e4m3fn" in found.matrix_flops_per_second) == hardware.multiplies_float8(torch.device("cuda:0"))
