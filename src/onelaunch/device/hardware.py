"""Facts about devices, and the record of the rates that a device was measured to reach.

A :class:`Device` holds facts read from the driver. :class:`Ceilings` hold measured peaks, the only rates that a roofline bound
may rest on; :mod:`onelaunch.device.peaks` measures them.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from onelaunch.device.architectures import HOPPER_SMS, architecture_of
from onelaunch.errors import DeviceMemoryError, NoDeviceError

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Folder in which a container sees the limits of its own control group (version 2)."""

INTERPRETED_PROCESSORS = HOPPER_SMS
"""Number of SMs that code which cuts work for a GPU is told where kernels are interpreted: an H200's."""

LEAST_SHARED_BYTES = 64 * 1024
"""Shared memory of a CTA where a device does not say more: AMD's."""

SLUG = re.compile(r"(?!.*\.\.)[a-z0-9][a-z0-9._-]{0,79}")
"""Pattern that the whole name of a device's files and folders must match: no separator of folders, and no two dots in a row."""


@dataclass(frozen=True)
class Device:
    """Facts about one device."""

    type: str
    """``cuda`` (NVIDIA and AMD) or ``cpu``."""
    name: str
    architecture: str
    """``sm_90``, ``gfx942``; for a CPU the machine's name (``x86_64``)."""
    processors: int
    """Streaming multiprocessors, or CPU cores."""
    cache_bytes: int
    """Last-level cache."""
    memory_bytes: int

    @property
    def slug(self) -> str:
        """Name of the folder of this device's results, such as ``nvidia-h200``; ``cpu`` for every CPU. Matches :data:`SLUG`."""
        return "cpu" if self.type == "cpu" else _slug(self.name)

    @property
    def table(self) -> str:
        """Name of the files that hold what was measured on this device, for :func:`table_name`."""
        return table_name(self.slug, self.name)


def table_name(slug: str, device: str) -> str:
    """Return the name of the files that hold what was measured on a device, from its slug and its name.

    The slug itself for a GPU. A CPU's holds its model, such as ``cpu-amd-epyc``, since times of one CPU say nothing of another.
    """
    return _slug(f"cpu {device}") if slug == "cpu" else slug


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80].rstrip("-") or "unnamed"


@dataclass(frozen=True)
class Ceilings:
    """Measured peak rates of a device. Seconds, bytes and operations are plain SI units."""

    copy_bytes_per_second: float
    """Bytes read plus bytes written per second by a large copy."""
    matrix_flops_per_second: dict[str, float]
    """FLOPs per second by dtype of a large square product of random matrices through PyTorch; float8 where the device has units
    for it."""
    launch_seconds: float
    """Duration of an empty kernel: a node of a CUDA graph on a GPU, an addition of one element on a CPU."""
    measured_at: str
    software: str
    read_bytes_per_second: float | None = None
    """Bytes read per second by the fastest kernel that only reads. ``None`` in records from before it was measured."""
    spread: dict[str, float] | None = None
    """Relative distance between the fastest samples of each peak (0.01 is 1 %), keyed ``copy``, ``read``, ``launch`` and dtypes.
    ``None`` in records from before it was kept."""


def present() -> list[str]:
    """Return the names of the devices that PyTorch sees, GPUs first."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] + ["cpu"]


def resolve(name: str = "auto") -> torch.device:
    """Return a device by name; ``auto`` is the first GPU, or the CPU. :class:`NoDeviceError` when it is not here."""
    if name == "auto":
        return torch.device(present()[0])
    wanted = f"{name}:0" if name == "cuda" else name
    if wanted not in present():
        raise NoDeviceError(name, present=present())
    return torch.device(wanted)


def is_hip(device: torch.device) -> bool:
    """Return whether a GPU is AMD's, run through ROCm."""
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
    """Return the generation of an NVIDIA GPU, 9 for Hopper; ``None`` for every other device."""
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
    """Return the number of SMs of a GPU; :data:`INTERPRETED_PROCESSORS` for every other device, and without a GPU.

    Fake tensors may be on a GPU where there is none.
    """
    if (pretended := architecture_of(device)) is not None:
        return pretended.processors
    here = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).multi_processor_count if here else INTERPRETED_PROCESSORS


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a CTA may have on a GPU; else, and without a GPU, :data:`LEAST_SHARED_BYTES`."""
    if (pretended := architecture_of(device)) is not None:
        return pretended.shared_bytes
    if device.type != "cuda" or not torch.cuda.is_available():
        return LEAST_SHARED_BYTES
    return max(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0), LEAST_SHARED_BYTES)


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated: on a GPU the driver's and those that PyTorch's allocator keeps for later."""
    if device.type == "cpu":
        return _cpu_free_bytes()
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@contextmanager
def room_for(what: str, device: torch.device) -> Iterator[None]:
    """Raise :class:`DeviceMemoryError`, which names what is allocated inside, when there is no room for it."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        raise DeviceMemoryError(what, device=device) from problem


@functools.cache
def describe(device: str) -> Device:
    """Return the facts of a device that is here."""
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
    """Return the memory that the system calls available, or less where the control group of the process allows less."""
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        match = None
    free = int(match.group(1)) * 1024 if match else _cpu_memory_bytes()
    try:
        most, used = (int((CONTROL_GROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        facts = dict(line.split() for line in (CONTROL_GROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        used -= int(facts["file"])  # the page cache counts as used, and is given up for what is allocated
    except (OSError, ValueError, KeyError):  # ValueError: the limit is "max"
        return free
    return min(free, max(most - used, 0))
