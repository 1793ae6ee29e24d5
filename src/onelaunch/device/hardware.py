"""Facts about devices, and the record of a device's measured peaks.

A :class:`Device` holds facts read from the driver. A :class:`Ceilings` holds measured peaks, the only rates from which a roofline
bound may be computed; :mod:`onelaunch.device.peaks` measures them. Launch code, the predicates of variants, the dispatcher,
decoding, the measurement of peaks, the workbench and the commands ask these functions.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onelaunch.device.architectures import HOPPER_SMS, architecture_of
from onelaunch.errors import DeviceMemoryError, NoDeviceError

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Folder in which a container finds the limits of its own control group (cgroup version 2)."""

INTERPRETED_PROCESSORS = HOPPER_SMS
"""Number of SMs that schedules are computed for when kernels are interpreted on a CPU: those of an H200."""

LEAST_SHARED_BYTES = 64 * 1024
"""Shared memory of a CTA in bytes where the device reports no larger limit. It is the size of AMD's LDS."""

SLUG = re.compile(r"(?!.*\.\.)[a-z0-9][a-z0-9._-]{0,79}")
"""Pattern for the names of a device's files and folders. It excludes path separators and two dots in a row."""


@dataclass(frozen=True)
class Device:
    """Facts about one device."""

    type: str
    """``cuda`` (NVIDIA and AMD) or ``cpu``."""
    name: str
    """Name that the driver reports."""
    architecture: str
    """Architecture such as ``sm_90`` or ``gfx942``; for a CPU the machine type, such as ``x86_64``."""
    processors: int
    """Number of SMs (compute units on AMD), or of CPU cores."""
    cache_bytes: int
    """Size of the last-level cache in bytes: L2 on a GPU."""
    memory_bytes: int
    """Size of the device's memory in bytes."""

    @property
    def slug(self) -> str:
        """Folder name for this device's results, such as ``nvidia-h200``; ``cpu`` for every CPU. It matches :data:`SLUG`."""
        return "cpu" if self.type == "cpu" else _slug(self.name)

    @property
    def table(self) -> str:
        """File name, without suffix, of what was measured on this device; see :func:`table_name`."""
        return table_name(self.slug, self.name)


def table_name(slug: str, device: str) -> str:
    """Return the file name, without suffix, of what was measured on a device.

    For a GPU it is the slug. For a CPU it includes the model, such as ``cpu-amd-epyc``, since times measured on one CPU model do
    not hold for another.
    """
    return _slug(f"cpu {device}") if slug == "cpu" else slug


def _slug(name: str) -> str:
    """Return a name in lower case with hyphens in place of other characters, at most 80 characters long."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80].rstrip("-") or "unnamed"


@dataclass(frozen=True)
class Ceilings:
    """Measured peak rates of a device, in bytes per second, FLOPs per second and seconds."""

    copy_bytes_per_second: float
    """Bandwidth of a large copy: bytes read plus bytes written, per second."""
    matrix_flops_per_second: dict[str, float]
    """FLOPs per second of a large square matrix product of random matrices through PyTorch, by dtype. float8 is present where the
    device has matrix units for it."""
    launch_seconds: float
    """Duration of a minimal kernel in seconds: a node of a CUDA graph on a GPU, an addition of one element on a CPU."""
    measured_at: str
    """Date and time of the measurement in ISO 8601, UTC."""
    software: str
    """Versions of PyTorch and of CUDA or ROCm, as :func:`onelaunch.device.peaks.software` returns them."""
    read_bytes_per_second: float | None = None
    """Bandwidth of the fastest kernel that only reads, in bytes per second. ``None`` in records older than this field."""
    spread: dict[str, float] | None = None
    """Relative distance between the fastest samples of each peak (0.01 is 1 %), by ``copy``, ``read``, ``launch`` and dtype.
    ``None`` in records older than this field."""


def present() -> list[str]:
    """Return the names of the devices that PyTorch sees, GPUs first."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] + ["cpu"]


def resolve(name: str = "auto") -> torch.device:
    """Return a device by name; ``auto`` is the first GPU, or the CPU if there is no GPU.

    Raises:
        NoDeviceError: PyTorch sees no device of this name.
    """
    if name == "auto":
        return torch.device(present()[0])
    wanted = f"{name}:0" if name == "cuda" else name
    if wanted not in present():
        raise NoDeviceError(name, present=present())
    return torch.device(wanted)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is PyTorch's current one. Kernels of some libraries run there, wherever their tensors are.

    For a CPU it does nothing.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def is_hip(device: torch.device) -> bool:
    """Return whether a GPU is an AMD GPU, which PyTorch runs through ROCm."""
    pretended = architecture_of(device)
    return bool(torch.version.hip) if pretended is None else pretended.backend == "hip"


@functools.cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU, ``(9, 0)`` for Hopper; ``None`` for every other device."""
    if (pretended := architecture_of(device)) is not None:
        return pretended.capability
    here = device.type == "cuda" and not torch.version.hip and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if here else None


def compute_capability(device: torch.device) -> int | None:
    """Return the major compute capability of an NVIDIA GPU, such as 9 for Hopper; ``None`` for every other device."""
    found = capability(device)
    return None if found is None else found[0]


def multiplies_float8(device: torch.device) -> bool:
    """Return whether a device is an NVIDIA GPU with matrix units for float8_e4m3fn."""
    found = capability(device)
    return found is not None and found >= (8, 9)


def is_hopper(device: torch.device) -> bool:
    """Return whether a device is an NVIDIA GPU of compute capability 9.x."""
    return compute_capability(device) == 9


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of SMs of a GPU, or :data:`INTERPRETED_PROCESSORS` for a CPU and on a machine without a GPU.

    A CUDA device may be asked for on a machine without a GPU, since fake tensors can be on it.
    """
    if (pretended := architecture_of(device)) is not None:
        return pretended.processors
    here = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).multi_processor_count if here else INTERPRETED_PROCESSORS


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory that a CTA may use on a GPU in bytes; on a machine without a GPU, :data:`LEAST_SHARED_BYTES`."""
    if (pretended := architecture_of(device)) is not None:
        return pretended.shared_bytes
    if device.type != "cuda" or not torch.cuda.is_available():
        return LEAST_SHARED_BYTES
    return max(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0), LEAST_SHARED_BYTES)


def memory_bytes_per_cycle(device: torch.device) -> float | None:
    """Return the bytes that a GPU's memory transfers in one cycle of its SMs, by their highest clock rates.

    ``None`` if PyTorch does not tell the rates. An NVIDIA H200 has 2480 bytes per cycle, an H100 SXM 1690.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(device)
    names = ("memory_clock_rate", "memory_bus_width", "clock_rate")
    memory_clock, bits, clock = (getattr(facts, name, 0) for name in names)
    return 2 * memory_clock * bits / 8 / clock if memory_clock and bits and clock else None  # two transfers per cycle


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated. On a GPU they include free memory that PyTorch's allocator has cached."""
    if device.type == "cpu":
        return _cpu_free_bytes()
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@contextmanager
def room_for(what: str, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error of PyTorch inside into a :class:`DeviceMemoryError` that names what was allocated."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        raise DeviceMemoryError(what, device=device) from problem


@functools.cache
def describe(device: str) -> Device:
    """Return the facts of a device of this machine."""
    if torch.device(device).type == "cpu":
        return Device("cpu", _cpu_name(), platform.machine(), os.cpu_count() or 1, _cpu_cache_bytes(), _cpu_memory_bytes())
    facts = torch.cuda.get_device_properties(device)
    gcn = getattr(facts, "gcnArchName", "")
    return Device(
        type="cuda",
        name=facts.name,
        architecture=gcn.partition(":")[0] if torch.version.hip else f"sm_{facts.major}{facts.minor}",
        processors=facts.multi_processor_count,
        cache_bytes=facts.L2_cache_size,
        memory_bytes=facts.total_memory,
    )


def _cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _cpu_cache_bytes() -> int:
    """Return the size of core 0's largest cache in bytes as Linux reports it, or 32 MiB where it reports none."""
    caches = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [path.read_text(encoding="utf-8").strip() for path in caches.glob("index*/size")]
    kib = [int(size[:-1]) * (1024 if size.endswith("M") else 1) for size in sizes if size[:-1].isdigit()]
    return max(kib, default=32 * 1024) * 1024


def _cpu_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _cpu_free_bytes() -> int:
    """Return the memory in bytes that the system reports as available, or less if the process's control group allows less."""
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        match = None
    free = int(match.group(1)) * 1024 if match else _cpu_memory_bytes()
    try:
        most, used = (int((CONTROL_GROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        facts = dict(line.split() for line in (CONTROL_GROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        used -= int(facts["file"])  # The page cache counts as used, but the kernel reclaims it for allocations.
    except (OSError, ValueError, KeyError):  # ValueError: the limit is the word "max"
        return free
    return min(free, max(most - used, 0))
