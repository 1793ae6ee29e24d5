"""Chip families that kernels are compiled for, and devices that stand for them on machines without one.

:func:`pretended` gives a PyTorch device whose index no machine has. Fake tensors on it carry a call through the library as if
such a chip were here, so that what a call would launch can be compiled and inspected anywhere. The questions of
:mod:`onelaunch.device.hardware` are answered for it from the table below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from onelaunch.errors import UnknownArchitecture

HOPPER_SHARED_BYTES = 227 * 1024
"""Shared memory that a CTA may have on Hopper, and on Blackwell's data centre chips."""

HOPPER_SMS = 132
"""SMs of an H200 and of an H100 SXM. Constants that were fitted to one of them are given for one SM."""

_NVIDIA_SMALL = 99 * 1024
_MMA = ("HMMA", "IMMA", "DMMA")


@dataclass(frozen=True)
class Architecture:
    """A chip family that kernels are compiled for."""

    name: str
    backend: str
    """Triton's name of the compiler: ``cuda`` or ``hip``."""
    target: int | str
    """Triton's name of the chip: the compute capability as a number, or a name such as ``gfx942``."""
    warp: int
    """Threads of a warp."""
    matrix: tuple[str, ...]
    """Beginnings of the names of its matrix instructions, those meant for large tiles."""
    shared_bytes: int
    """Shared memory that one CTA may use."""
    processors: int
    """SMs (compute units) of its usual chip."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of an NVIDIA chip, such as ``(9, 0)``; ``None`` for others."""
        return divmod(self.target, 10) if isinstance(self.target, int) else None


ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture("sm_80", "cuda", 80, 32, _MMA, 163 * 1024, 108),
        Architecture("sm_86", "cuda", 86, 32, _MMA, _NVIDIA_SMALL, 84),
        Architecture("sm_89", "cuda", 89, 32, (*_MMA, "QMMA"), _NVIDIA_SMALL, 128),
        Architecture("sm_90a", "cuda", 90, 32, ("HGMMA", "IGMMA", "QGMMA"), HOPPER_SHARED_BYTES, HOPPER_SMS),
        Architecture("sm_100a", "cuda", 100, 32, ("UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA"), HOPPER_SHARED_BYTES, 148),
        Architecture("sm_120a", "cuda", 120, 32, ("HMMA", "IMMA", "QMMA", "OMMA"), _NVIDIA_SMALL, 170),
        Architecture("gfx90a", "hip", "gfx90a", 64, ("v_mfma",), 64 * 1024, 104),
        Architecture("gfx942", "hip", "gfx942", 64, ("v_mfma", "v_smfmac"), 64 * 1024, 304),
        Architecture("gfx950", "hip", "gfx950", 64, ("v_mfma", "v_smfmac"), 160 * 1024, 256),
    )
}
"""Architectures that kernels can be compiled for and inspected on, by name."""

CHECKED = ("sm_80", "sm_90a", "sm_100a", "gfx942")
"""Architectures that the test-suite compiles every kernel for."""

FIRST_INDEX = 100
"""Index of the first pretended device: more GPUs than a machine has."""


def find_architecture(name: str) -> Architecture:
    """Return the architecture of that name; ``sm_90`` means ``sm_90a``.

    Raises:
        UnknownArchitecture: There is none.
    """
    for candidate in (name, f"{name}a"):
        if candidate in ARCHITECTURES:
            return ARCHITECTURES[candidate]
    raise UnknownArchitecture(name, ARCHITECTURES)


def pretended(architecture: str) -> torch.device:
    """Return the device that stands for a chip of this architecture; only fake tensors can be on it."""
    return torch.device("cuda", FIRST_INDEX + list(ARCHITECTURES).index(find_architecture(architecture).name))


def architecture_of(device: torch.device) -> Architecture | None:
    """Return the architecture that a pretended device stands for; ``None`` for every real one."""
    if device.index is None or device.index < FIRST_INDEX or device.type != "cuda":
        return None
    return list(ARCHITECTURES.values())[device.index - FIRST_INDEX]
