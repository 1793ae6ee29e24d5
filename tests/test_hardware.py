"""Tests of devices: their names, their facts, and the file names derived from them.

``prose.raises`` compares the message of an error with the test's entry in ``tests/snapshots/prose.txt``. A test fails if it
does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch.device import hardware
from onelaunch.device.architectures import pretended
from onelaunch.device.hardware import SLUG, Device, table_name
from onelaunch.errors import NoDeviceError

# Type, name, architecture, SMs, bytes of the L2 cache, and bytes of memory.
H200 = Device("cuda", "NVIDIA H200", "sm_90", 132, 60 << 20, 150 << 30)


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
    assert SLUG.fullmatch(device.table)


def test_tables_of_cpus_hold_the_model_and_those_of_gpus_the_slug():
    assert table_name("cpu", "Some(R) CPU @ 2.0GHz") == "cpu-some-r-cpu-2-0ghz"
    assert table_name("nvidia-h200", "NVIDIA H200") == H200.table == "nvidia-h200"
    assert Device("cpu", "AMD EPYC", "x86_64", 2, 1 << 20, 1 << 30).table == "cpu-amd-epyc"


@pytest.mark.parametrize("name", ["", "../up", "a..b", "/abs", "a/b", "A", ".hidden", "-x", "a\n", "a\\b"])
def test_names_that_could_leave_a_folder_are_not_slugs(name):
    assert not SLUG.fullmatch(name)


@pytest.mark.parametrize("name", ["", "***", "x" * 300])
def test_any_name_of_a_gpu_gives_a_slug(name):
    device = replace(H200, name=name)
    assert SLUG.fullmatch(device.slug)
    assert len(device.slug) <= 80


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


def test_a_missing_device_is_refused(monkeypatch, prose):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert hardware.resolve("auto") == hardware.resolve("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:3", "tpu", "not a device"):
        with prose.raises(NoDeviceError, match=f"{name!r}"):
            hardware.resolve(name)


@pytest.mark.gpu
def test_a_gpu_is_described():
    facts = hardware.describe("cuda:0")
    assert facts.architecture.startswith(("sm_", "gfx"))
    assert facts.processors > 8


def test_devices_without_a_gpu_report_the_facts_of_the_interpreter():
    """Kernels on a CPU run in Triton's interpreter: with the SMs of an H200, and the least shared memory of any GPU."""
    for device in (torch.device("cpu"), torch.device("meta")):
        assert hardware.processors(device) == hardware.INTERPRETED_PROCESSORS
        assert hardware.shared_bytes(device) == hardware.LEAST_SHARED_BYTES
        assert not hardware.multiplies_float8(device)


@pytest.mark.parametrize(
    # Name, SMs, bytes of shared memory of a CTA, and whether it is an NVIDIA GPU with matrix units for float8_e4m3fn
    ("architecture", "processors", "shared", "float8"),
    [
        ("sm_80", 108, 163 << 10, False),
        ("sm_89", 128, 99 << 10, True),
        ("sm_90a", 132, 227 << 10, True),
        ("sm_100a", 148, 227 << 10, True),
        ("gfx942", 304, 64 << 10, False),
    ],
)
def test_pretended_devices_report_facts_of_their_architecture(architecture, processors, shared, float8):
    """A pretended device stands for a chip that is not there, so that its kernels can be compiled and inspected."""
    device = pretended(architecture)
    assert hardware.processors(device) == processors
    assert hardware.shared_bytes(device) == shared
    assert hardware.multiplies_float8(device) == float8
