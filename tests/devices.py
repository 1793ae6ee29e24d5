"""Hopper GPUs that tests pretend: the dispatcher and launch code answer as on them, on any machine.

:func:`pretend` gives the pretended device of Hopper (:mod:`onelaunch.device.architectures`) another GPU's SMs, and lets the
dispatcher look up tables for it as for a real GPU. ``HOPPERS`` are GPUs by their usual names, most of them without a table.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch import dispatch
from onelaunch.device import architectures, hardware
from onelaunch.device.architectures import HOPPER_SHARED_BYTES
from onelaunch.device.hardware import Device
from onelaunch.dispatch import choice, measured

# Type, name, architecture, SMs, bytes of L2 and bytes of memory.
HOPPERS = {
    "H20": Device("cuda", "NVIDIA H20", "sm_90", 78, 60 << 20, 96 << 30),
    "H100 PCIe": Device("cuda", "NVIDIA H100 PCIe", "sm_90", 114, 50 << 20, 80 << 30),
    "H100": Device("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 50 << 20, 80 << 30),
    "H200": Device("cuda", "NVIDIA H200", "sm_90", 132, 60 << 20, 141 << 30),
    "GH200": Device("cuda", "NVIDIA GH200 480GB", "sm_90", 132, 60 << 20, 96 << 30),
    "all SMs": Device("cuda", "A Hopper GPU with all SMs of the chip", "sm_90", 144, 60 << 20, 141 << 30),
}
"""Hopper GPUs by name. NVIDIA sells no GPU with all 144 SMs, but plans may be asked for any number."""


def pretend(device: Device, monkeypatch: pytest.MonkeyPatch, shared_bytes: int = HOPPER_SHARED_BYTES) -> str:
    """Make the pretended Hopper GPU answer as ``device``, also to the dispatcher, and return its name for queries.

    The fixture that calls it calls :func:`forget` afterwards, since sizes and choices are cached. ``shared_bytes`` is the shared
    memory that a CTA may use.
    """
    name = f"{device.architecture}a"
    chip = replace(architectures.find_architecture(name), processors=device.processors, shared_bytes=shared_bytes)
    monkeypatch.setattr(architectures, "ARCHITECTURES", {**architectures.ARCHITECTURES, name: chip})
    # To the dispatcher the device is a real one, with tables of measured times.
    monkeypatch.setattr(choice, "architecture_of", lambda _: None)
    monkeypatch.setattr(choice, "describe", lambda _: device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    forget()
    return str(architectures.pretended(name))


def forget() -> None:
    """Clear the caches that depend on the pretended device."""
    hardware.processors.cache_clear()
    hardware.shared_bytes.cache_clear()
    measured._rows.cache_clear()
    dispatch.forget()
