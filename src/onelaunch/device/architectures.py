"""Table of the chip architectures that kernels are compiled for, and pretended devices for machines without such a chip.

:func:`pretended` returns a PyTorch device whose index no machine has. Calls on fake tensors of that device choose the same
launches as on a real chip, so that these can be compiled and inspected anywhere. The functions of
:mod:`onelaunch.device.hardware` answer for it from the table below. The builds of kernels, the dispatcher, the workbench,
``onelaunch prebuild`` and the example calls of variants look architectures up here. The code that makes random inputs
(``operation/definition.py``, ``ops/swiglu/reference.py``) asks :func:`architecture_of`, since a pretended device computes
nothing. Launch code and decode plans take the sizes of Hopper GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from onelaunch.errors import UnknownArchitecture

HOPPER_SHARED_BYTES = 227 * 1024
"""Shared memory that one CTA may use on Hopper and on data-centre Blackwell, in bytes."""

HOPPER_SMS = 132
"""Number of SMs of an H200 and of an H100 SXM. Constants that were fitted on one of these chips are stated per SM."""

_NVIDIA_SMALL = 99 * 1024
"""Shared memory that one CTA may use on sm_86, sm_89 and sm_120, in bytes."""

_MMA = ("HMMA", "IMMA", "DMMA")
"""Mnemonics of warp-level matrix instructions (``mma.sync``) in SASS: for floats up to 32 bits, for integers and for float64."""


@dataclass(frozen=True)
class Architecture:
    """Chip architecture that kernels are compiled for."""

    name: str
    backend: str
    """Name of Triton's compiler backend: ``cuda`` or ``hip``."""
    target: int | str
    """Triton's target: the compute capability as a number (90), or a name such as ``gfx942``."""
    warp: int
    """Threads per warp (wavefront)."""
    matrix: tuple[str, ...]
    """Prefixes of the mnemonics of its matrix instructions for large tiles."""
    shared_bytes: int
    """Shared memory that one CTA may use, in bytes."""
    processors: int
    """Number of SMs (compute units) of its usual chip."""

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
"""Architectures that kernels can be compiled and inspected for, by name."""

CHECKED = ("sm_80", "sm_90a", "sm_100a", "gfx942")
"""Names of the architectures that tests compile kernels for. Most tests take fewer, unless ``--architectures=all`` is given."""

_FIRST_INDEX = 100
"""Device index of the first pretended device. No machine has that many GPUs."""


def find_architecture(name: str) -> Architecture:
    """Return the architecture of a name; ``sm_90`` means ``sm_90a``.

    Raises:
        UnknownArchitecture: The table has no architecture of this name.
    """
    for candidate in (name, f"{name}a"):
        if candidate in ARCHITECTURES:
            return ARCHITECTURES[candidate]
    raise UnknownArchitecture(name, ARCHITECTURES)


def pretended(architecture: str) -> torch.device:
    """Return the pretended device of an architecture. Only fake tensors can be on it."""
    return torch.device("cuda", _FIRST_INDEX + list(ARCHITECTURES).index(find_architecture(architecture).name))


def architecture_of(device: torch.device) -> Architecture | None:
    """Return the architecture of a pretended device, or ``None`` for a real device."""
    if device.index is None or device.index < _FIRST_INDEX or device.type != "cuda":
        return None
    return list(ARCHITECTURES.values())[device.index - _FIRST_INDEX]
