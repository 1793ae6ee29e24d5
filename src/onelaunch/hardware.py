"""What the device is, and what it was measured to do.

A :class:`Device` holds facts read from the driver; :class:`Ceilings` hold measured rates, the only ones that a floor may rest on.
Ceilings are measured once per device and software stack (a few seconds) and kept in the user's cache folder.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from onelaunch.errors import DeviceMemoryError, NoDeviceError

HOPPER_SHARED_BYTES = 227 * 1024
"""Of shared memory that a block may have, on Hopper and on Blackwell's data centre chips."""


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
        """The name as files and folders use it: ``nvidia-h200``. One name for all CPUs: their times are never shared."""
        return "cpu" if self.type == "cpu" else re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of a device. Seconds, bytes and operations are plain SI units."""

    copy_bytes_per_second: float
    """Bytes read plus bytes written by a large copy."""
    matrix_flops_per_second: dict[str, float]
    """Per dtype, of a large square product of random matrices through PyTorch; of float8 where the device has units for it."""
    launch_seconds: float
    """An empty kernel: as a node of a CUDA graph on a GPU, a one-element addition on a CPU."""
    measured_at: str
    software: str


def present() -> list[str]:
    """Names of the devices that PyTorch sees, GPUs first."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] + ["cpu"]


def resolve(name: str = "auto") -> torch.device:
    """A device by name; ``auto`` is the first GPU, or the CPU. :class:`NoDeviceError` when it is not here."""
    if name == "auto":
        return torch.device(present()[0])
    wanted = f"{name}:0" if name == "cuda" else name
    if wanted not in present():
        raise NoDeviceError(name, present=present())
    return torch.device(wanted)


@functools.cache
def compute_capability(device: torch.device) -> int | None:
    """The generation of an NVIDIA GPU, 9 for Hopper; ``None`` elsewhere."""
    here = device.type == "cuda" and not torch.version.hip and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device)[0] if here else None


def multiplies_float8(device: torch.device) -> bool:
    """Whether a device is an NVIDIA GPU with matrix units for float8_e4m3fn."""
    here = compute_capability(device) is not None
    return here and torch.cuda.get_device_capability(device) >= (8, 9)


def is_hopper(device: torch.device) -> bool:
    """Whether a device is an NVIDIA GPU of compute capability 9.x."""
    return compute_capability(device) == 9


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a GPU: the driver's, and those that PyTorch's allocator keeps for later."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@contextmanager
def room_for(what: str, device: torch.device) -> Iterator[None]:
    """Where something is allocated: :class:`DeviceMemoryError`, which names it, when there is no room."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        raise DeviceMemoryError(what, device=device) from problem


@functools.cache
def describe(device: str) -> Device:
    """The facts of a device that is here."""
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


def ceilings(device: str, *, refresh: bool = False) -> Ceilings:
    """The device's ceilings: from the cache when this device and software were measured before, else measured now."""
    path = cache_folder() / f"ceilings-{describe(device).slug}.json"
    if not refresh and path.exists():
        try:
            stored = Ceilings(**json.loads(path.read_text()))
            known = {_name(dtype) for dtype in _multiplied(device)} <= set(stored.matrix_flops_per_second)
            if stored.software == _software(device) and known:
                return stored
        except (ValueError, TypeError):
            pass  # written by another version: measure again
    found = measure(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found), indent=1))
    return found


def cache_folder() -> Path:
    """Where onelaunch keeps what it can make again: ``$ONELAUNCH_CACHE``, else the user's cache folder."""
    if own := os.environ.get("ONELAUNCH_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "onelaunch"


def measure(device: str) -> Ceilings:
    """Measure the ceilings now: a large copy, a large matrix product per dtype, an empty launch."""
    cpu = torch.device(device).type == "cpu"
    elements, side = (32 << 20, 1024) if cpu else (1 << 30, 8192)
    copy = _copy_bytes_per_second(device, elements)
    rates = {}
    for dtype in _multiplied(device):
        rates[_name(dtype)] = 2 * side**3 / _seconds(device, _product(device, dtype, side))
    if cpu:  # 16-bit products run at most at the float32 rate there
        rates |= {"float16": rates["float32"], "bfloat16": rates["float32"]}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Ceilings(copy, rates, _launch_seconds(device), now, _software(device))


def _multiplied(device: str) -> tuple[torch.dtype, ...]:
    """The dtypes whose products are measured."""
    here = torch.device(device)
    if here.type == "cpu":
        return (torch.float32,)
    return (torch.float16, torch.bfloat16, torch.float32, *([torch.float8_e4m3fn] if multiplies_float8(here) else []))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _product(device: str, dtype: torch.dtype, side: int) -> Callable[[], object]:
    """A product of two random square matrices."""
    if dtype is not torch.float8_e4m3fn:
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        return lambda: a @ b
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    one = torch.ones((), dtype=torch.float32, device=device)
    return lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16)  # noqa: SLF001 - has no other name


def _copy_bytes_per_second(device: str, elements: int) -> float:
    """The faster of PyTorch's copy and an elementwise kernel: an H200's driver copies at two thirds of the kernel's rate."""
    source = torch.empty(elements, device=device, dtype=torch.int16).random_(-100, 100)
    target = torch.empty_like(source)
    copied = _seconds(device, lambda: target.copy_(source))
    negated = _seconds(device, lambda: torch.neg(source, out=target))
    return 2 * source.nbytes / min(copied, negated)


def _seconds(device: str, run: Callable[[], object], samples: int = 7) -> float:
    """Median time of a long operation; host clock round a synchronised call is exact enough for milliseconds."""
    synchronise = (lambda: None) if torch.device(device).type == "cpu" else (lambda: torch.cuda.synchronize(device))
    times = []
    for _ in range(samples + 3):
        synchronise()
        start = time.perf_counter()
        run()
        synchronise()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def _launch_seconds(device: str, launches: int = 500) -> float:
    one = torch.zeros(1, device=device)
    if torch.device(device).type == "cpu":
        return _seconds(device, lambda: [one.add_(1) for _ in range(launches)]) / launches
    with torch.cuda.device(device):
        one.add_(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(launches):
                one.add_(1)
        return _seconds(device, graph.replay) / launches


def _software(device: str) -> str:
    stack = "CPU" if torch.device(device).type == "cpu" else torch.version.cuda or torch.version.hip
    return f"torch {torch.__version__}, {stack}"


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
