"""Measure the peaks of a device: bandwidth of copies and of reads, matrix products per dtype, and the cost of a launch.

A peak is a maximum, so other work on the device can only make a sample too slow. Every method of every quantity is timed in
turn, round by round with pauses between, and a peak is the fastest sample. Rounds are added while the fastest samples of a
quantity are further apart than :data:`SPREAD`. If they stay further apart than :data:`_TRUSTED`, the device was busy. Then the
peak is the slowest of the :data:`AGREEING` fastest samples, a warning says so, and the next command measures again. Peaks are
kept in the cache folder, one entry per software stack. A load that lasts through all rounds cannot be detected this way.
Therefore the workbench calls :func:`remeasure` before it marks a time as impossible. ``onelaunch doctor``, the commands ``run``
and ``show`` of studies, and the process that measures a study call :func:`ceilings`. ``tools/measure_peaks.py`` prints what
:func:`survey` returns.
"""

from __future__ import annotations

import functools
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from onelaunch import cuda, folders
from onelaunch.device import quick_look
from onelaunch.device.hardware import Ceilings, current, describe, free_memory, multiplies_float8, room_for
from onelaunch.device.read_rate import checksum, read_kernels
from onelaunch.errors import BusyDeviceNotice, FallbackNotice, OneLaunchError

AGREEING = 3
"""Number of fastest samples from which the spread of a quantity is computed."""

SPREAD = 0.05
"""Relative distance of the fastest samples above which another round is measured."""

_TRUSTED = 0.2
"""Relative distance of the fastest samples above which a peak is not trusted, since other work used the device in most rounds."""

LEAST_ROUNDS, MOST_ROUNDS = 7, 25
"""Smallest and largest number of rounds."""

_CPU_SECONDS = 3.5
"""Time limit on a CPU in seconds. No round begins after it, once :data:`AGREEING` rounds are done."""

PAUSE_SECONDS = 0.02
"""Pause between two rounds in seconds, so that one burst of other work does not slow all samples."""

_SAMPLE_SECONDS = 5e-3
"""Smallest duration of a sample in seconds. A faster method is called several times within one sample."""

_GPU_BUFFER_BYTES = 4 << 30
"""Largest size in bytes of the buffer that is read or copied on a GPU. Its L2 cache keeps 1 to 2 % of it between passes."""

_CPU_BUFFER_BYTES = (64 << 20, 1 << 30)
"""Smallest and largest size in bytes of the buffer that is read or copied on a CPU."""

_CPU_CACHES = 4
"""Size of the buffer on a CPU as a multiple of the last-level cache, within the bounds of :data:`_CPU_BUFFER_BYTES`."""

_MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the multiplied matrices, by device type."""

LAUNCHES = 500
"""Number of minimal kernels in one call of the launch probe."""


@dataclass
class Probe:
    """One method of measuring a quantity, with its samples."""

    quantity: str
    """Name of the quantity: ``copy``, ``read``, ``launch`` or a dtype."""
    method: str
    """Name of the method in listings."""
    amount: float
    """Number of bytes, FLOPs or launches of one call."""
    run: Callable[[], object]
    """Function that enqueues one call."""
    calls: int = 1
    """Number of calls in one sample."""
    rates: list[float] = field(default_factory=list)
    """Amount per second of each sample."""

    @property
    def peak(self) -> float:
        """Rate of the fastest sample, or of the slowest of the :data:`AGREEING` fastest ones if their spread is not trusted.

        A single fast sample may be an error of the clock. A rate that several samples reached is real.
        """
        best = sorted(self.rates)[-AGREEING:]
        return best[-1] if self.spread <= _TRUSTED else best[0]

    @property
    def spread(self) -> float:
        """Relative distance between the fastest and the slowest of the :data:`AGREEING` fastest samples."""
        if len(self.rates) < AGREEING:
            return math.inf
        best = sorted(self.rates)[-AGREEING:]
        return best[-1] / best[0] - 1


def ceilings(device: str, *, refresh: bool = False) -> Ceilings:
    """Return the device's peaks from the cache, or measure and store them if it holds none that :func:`stored` accepts.

    With ``refresh`` they are always measured. Stored peaks that a quick look contradicts are measured again. If the measurement
    contradicts them too, it replaces them, with a warning; otherwise they are kept.
    """
    found = None if refresh else stored(device)
    if found is not None and not (problem := _contradicted(device, found)):
        return found
    # Two processes that measure at once would slow each other down.
    with folders.process_lock(folders.cache_folder() / "locks", "peaks"):
        again = None if refresh else stored(device)
        if again is not None and again != found:
            return again  # another process measured in the meantime
        fresh = measure(device)
        if found is None or quick_look.contradiction(found, quick_look.by_quantity(fresh)):
            if found is not None:
                folders.warn_unusable(cache_path(device), f"holds peaks that this device does not have: {problem}")
            return _looked_at(device, remember(device, fresh))
        return _looked_at(device, found)


_LOOKED_AT: dict[str, list[Ceilings]] = {}
"""Peaks that this process has measured or compared with a quick look, by device."""


def _looked_at(device: str, found: Ceilings) -> Ceilings:
    _LOOKED_AT.setdefault(device, []).append(found)
    return found


def _contradicted(device: str, found: Ceilings) -> str:
    """Return what a quick look contradicts in stored peaks, as a clause, or an empty string. Each process looks once."""
    if found in _LOOKED_AT.get(device, ()):
        return ""
    if not (problem := quick_look.implausible(device, found)):
        _looked_at(device, found)
    return problem


_UNKEPT: dict[tuple[Path, str], Ceilings] = {}
"""Peaks that this process measured but could not write to the cache, by file and software."""


def stored(device: str) -> Ceilings | None:
    """Return the peaks in the cache for this device and software, or ``None`` if it holds none that are complete and trusted.

    If the cache cannot be written, the peaks that this process measured are used instead.
    """
    path, key = cache_path(device), software(device)
    found = _UNKEPT.get((path, key)) or _entries(device).get(key)
    needed = {_name(dtype) for dtype in _multiplied(device)}
    if found is None or unsteady(found) or not needed <= found.matrix_flops_per_second.keys():
        return None
    return found


def unsteady(found: Ceilings) -> list[str]:
    """Return the quantities whose fastest samples are further apart than :data:`_TRUSTED`, since the device was busy."""
    return [quantity for quantity, spread in (found.spread or {}).items() if spread > _TRUSTED]


def remeasure(device: str, believed: Ceilings) -> Ceilings:
    """Measure again, and return ``believed`` with higher peaks where the new ones are higher, else ``believed`` itself.

    :func:`higher` decides which peaks are higher. Raised peaks are written to the cache.
    """
    raised = higher(believed, measure(device))
    return believed if raised is believed else remember(device, raised)


def higher(believed: Ceilings, fresh: Ceilings) -> Ceilings:
    """Return ``believed`` with those peaks of ``fresh`` that exceed it by more than their spread, at most :data:`SPREAD`.

    The spread of ``believed`` is not used: a peak measured on a busy device has a large spread, and must still be corrected.
    """
    spreads = (believed.spread or {}, fresh.spread or {})

    def exceeds(quantity: str, new: float | None, old: float | None) -> bool:
        return new is not None and (old is None or new > old * (1 + min(spreads[1].get(quantity, 0.0), SPREAD)))

    def chosen(quantity: str, new: Any, old: Any) -> Any:
        if not exceeds(quantity, new, old):
            return old
        taken.append(quantity)
        return new

    taken: list[str] = []
    rates = {
        dtype: chosen(dtype, fresh.matrix_flops_per_second.get(dtype), believed.matrix_flops_per_second.get(dtype))
        for dtype in {**believed.matrix_flops_per_second, **fresh.matrix_flops_per_second}
    }
    copy = chosen("copy", fresh.copy_bytes_per_second, believed.copy_bytes_per_second)
    read = chosen("read", fresh.read_bytes_per_second, believed.read_bytes_per_second)
    if not taken:  # The launch cost sets no roofline bound, so it is updated only together with other peaks.
        return believed
    launch = 1 / chosen("launch", 1 / fresh.launch_seconds, 1 / believed.launch_seconds)
    spread = {**spreads[0], **{quantity: spreads[1][quantity] for quantity in taken if quantity in spreads[1]}}
    return replace(
        believed,
        copy_bytes_per_second=copy,
        matrix_flops_per_second=rates,
        launch_seconds=launch,
        measured_at=fresh.measured_at,
        read_bytes_per_second=read,
        spread=spread or None,
    )


def measure(device: str) -> Ceilings:
    """Measure all peaks of a device now, which takes some seconds. Warn once per device if it was busy."""
    best = fastest(survey(device))
    rates = {name: probe.peak for name, probe in best.items() if name not in ("copy", "read", "launch")}
    if torch.device(device).type == "cpu":  # A CPU's float32 rate stands for 16 bits; CPUs with AMX exceed it.
        rates |= {"float16": rates["float32"], "bfloat16": rates["float32"]}
    found = Ceilings(
        copy_bytes_per_second=best["copy"].peak,
        matrix_flops_per_second=rates,
        launch_seconds=1 / best["launch"].peak,
        measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        software=software(device),
        read_bytes_per_second=best["read"].peak,
        spread={name: round(probe.spread, 4) for name, probe in best.items()},
    )
    if unsteady(found):
        _warn_busy(device)
    return found


@functools.cache
def _warn_busy(device: str) -> None:
    warnings.warn(BusyDeviceNotice(device, apart=_TRUSTED), stacklevel=3)


def survey(device: str) -> list[Probe]:
    """Time every method of every quantity on a device, and return the probes with their samples.

    Raises:
        DeviceMemoryError: The device has too little free memory for the buffers.
    """
    where = torch.device(device)
    with torch.no_grad(), room_for("the buffers that peaks are measured with", where), _current(where):
        probes = [*_memory_probes(where), *_product_probes(where), _launch_probe(where)]
        sample(probes, _clock(where), seconds=_CPU_SECONDS if where.type == "cpu" else math.inf)
        for probe in probes:
            probe.run = _released  # Drop the reference to the buffers before _current returns the memory to the device.
    return probes


def _released() -> None:
    """Do nothing, in place of the call of a probe whose samples are complete."""


def sample(probes: Sequence[Probe], clock: Callable[[Callable[[], object], int], float], *, seconds: float = math.inf) -> None:
    """Take samples of all probes in turn, until the fastest of each quantity agree or :data:`MOST_ROUNDS` rounds are done.

    Args:
        probes: Probes, to whose ``rates`` the samples are appended.
        clock: Function that returns the seconds of a given number of consecutive calls of a function.
        seconds: Time limit. No round begins after it, once :data:`AGREEING` rounds are done.
    """
    end = time.perf_counter() + seconds
    for probe in probes:
        clock(probe.run, 1)  # the first call may load kernels, so its duration does not count
        probe.calls = max(1, math.ceil(_SAMPLE_SECONDS / max(clock(probe.run, 1), 1e-7)))
    for index in range(MOST_ROUNDS):
        if index >= LEAST_ROUNDS and all(probe.spread <= SPREAD for probe in fastest(probes).values()):
            return
        if index >= AGREEING and time.perf_counter() > end:
            return
        time.sleep(PAUSE_SECONDS)
        for probe in probes:
            probe.rates.append(probe.calls * probe.amount / clock(probe.run, probe.calls))


def fastest(probes: Iterable[Probe]) -> dict[str, Probe]:
    """Return the probe of the fastest method for each quantity."""
    best: dict[str, Probe] = {}
    for probe in probes:
        if probe.rates and (probe.quantity not in best or probe.peak > best[probe.quantity].peak):
            best[probe.quantity] = probe
    return best


def buffer_bytes(device: torch.device) -> int:
    """Return the bytes of the buffer to read or copy: larger than the caches, and at most a quarter of the free memory."""
    size = _GPU_BUFFER_BYTES
    if device.type == "cpu":
        least, most = _CPU_BUFFER_BYTES
        size = min(max(_CPU_CACHES * describe(str(device)).cache_bytes, least), most)
    return max(min(size, free_memory(device) // 4) >> 20, 1) << 20


def _random(size: int, device: torch.device) -> torch.Tensor:
    """Return ``size`` bytes of random float32 numbers. None is subnormal, since CPUs add subnormal numbers slowly."""
    if device.type == "cpu":  # One mebibyte is repeated, since a CPU generates random numbers slowly.
        return torch.rand(1 << 18).repeat(size >> 20)
    return torch.empty(size // 4, device=device).uniform_()


def _memory_probes(device: torch.device) -> list[Probe]:
    """Return the probes of copies and of reads, over one common buffer."""
    numbers = _random(buffer_bytes(device), device)
    source = numbers.view(torch.int16)
    target = torch.empty_like(source)
    moved, read = 2.0 * source.nbytes, float(source.nbytes)
    ours = _read_kernels_here(source)
    if ours:
        expected = checksum(source)
        ours = {name: run for name, run in ours.items() if _reads_all(name, run, expected)}
    reads: dict[str, Callable[[], object]] = {
        "torch.max of int32": numbers.view(torch.int32).max,
        "torch.sum of float32": numbers.sum,
        "torch.linalg.vector_norm": lambda: torch.linalg.vector_norm(numbers),
        **ours,
    }
    return [
        Probe("copy", "torch.Tensor.copy_", moved, lambda: target.copy_(source)),
        # The driver's copy on an H200 once reached only two thirds of this kernel's rate, so both methods are timed.
        Probe("copy", "torch.neg", moved, lambda: torch.neg(source, out=target)),
        *(Probe("read", name, read, run) for name, run in reads.items()),
    ]


def _reads_all(name: str, run: Callable[[], torch.Tensor], expected: int) -> bool:
    """Return whether a kernel's checksum equals the expected one, and warn if it does not."""
    if (found := checksum(run())) == expected:
        return True
    said = f"{name} returned the checksum {found:#010x} instead of {expected:#010x}, so its rate is not used as a measured peak"
    warnings.warn(
        f"{said}. The other methods are used. Please report this with the output of onelaunch doctor.",
        FallbackNotice,
        stacklevel=2,
    )
    return False


def _read_kernels_here(source: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Return :func:`read_kernels`, or no kernels if the compiler or the driver refuses one. PyTorch's reductions remain."""
    try:
        return read_kernels(source)
    except OneLaunchError:
        return {}


def _product_probes(device: torch.device) -> Iterator[Probe]:
    """Yield one probe for each dtype whose matrix product is measured."""
    side = _MATRIX_SIDE[device.type]
    for dtype in _multiplied(str(device)):
        yield Probe(_name(dtype), f"product of {side} x {side}", 2.0 * side**3, _product(device, dtype, side))


def _product(device: torch.device, dtype: torch.dtype, side: int) -> Callable[[], object]:
    """Return a function that multiplies two random square matrices."""
    if dtype is not torch.float8_e4m3fn:
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    one = torch.ones((), dtype=torch.float32, device=device)
    return lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16)  # noqa: SLF001 - PyTorch has no public name for it


def _launch_probe(device: torch.device) -> Probe:
    """Return the probe of the cost of a launch: :data:`LAUNCHES` minimal kernels in one CUDA graph, or additions on a CPU."""
    one = torch.zeros(1, device=device)
    if device.type == "cpu":
        return Probe("launch", "addition of one element", LAUNCHES, lambda: [one.add_(1) for _ in range(LAUNCHES)])
    one.add_(1)  # loads the kernel before the capture
    graph = torch.cuda.CUDAGraph()
    cuda.capture(lambda: [one.add_(1) for _ in range(LAUNCHES)], graph, torch.cuda.Stream(device))
    return Probe("launch", "node of a CUDA graph", LAUNCHES, graph.replay)


def _clock(device: torch.device) -> Callable[[Callable[[], object], int], float]:
    """Return a function that measures the seconds of a number of consecutive calls; on a GPU it uses CUDA events."""

    def by_host(run: Callable[[], object], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - start

    def by_events(run: Callable[[], object], calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return by_host if device.type == "cpu" else by_events


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Make a GPU PyTorch's current device, and return the cached memory to it at the end."""
    with current(device):
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _multiplied(device: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes whose matrix products are measured on a device."""
    here = torch.device(device)
    if here.type == "cpu":
        return (torch.float32,)
    return (torch.float16, torch.bfloat16, torch.float32, *([torch.float8_e4m3fn] if multiplies_float8(here) else []))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def software(device: str) -> str:
    """Return the versions of PyTorch and CUDA or ROCm, on which peaks depend. They are the key of an entry in the cache."""
    stack = "CPU" if torch.device(device).type == "cpu" else torch.version.cuda or torch.version.hip
    return f"torch {torch.__version__}, {stack}"


# The cache: one file per device, with one entry per software stack


def cache_path(device: str) -> Path:
    """Return the path of the cache file with a device's peaks. CPUs of different models have different files."""
    return folders.cache_folder() / f"ceilings-{describe(device).table}.json"


def remember(device: str, found: Ceilings) -> Ceilings:
    """Write peaks to the device's cache file, keep the entries of other software, and return the peaks."""
    entries = {**_entries(device), found.software: found}
    table = {"entries": [asdict(entry) for entry in entries.values()]}
    path = cache_path(device)
    if folders.keep(path, json.dumps(table, indent=1).encode()):
        _UNKEPT.pop((path, found.software), None)
    else:
        _UNKEPT[path, found.software] = found
    return found


def _entries(device: str) -> dict[str, Ceilings]:
    """Return the valid entries of the device's cache file, by software. Invalid ones are ignored with a warning."""
    path = cache_path(device)
    if (data := folders.kept(path)) is None:
        return {}
    try:
        listed = list(json.loads(data)["entries"])
    except (ValueError, TypeError, KeyError, RecursionError):
        folders.warn_unusable(path, "holds no table of peaks in the format of this version")
        return {}
    found = [_entry(each) for each in listed]
    if None in found:
        folders.warn_unusable(path, "has an entry that is not valid in this version")
    return {entry.software: entry for entry in found if entry is not None}


def _entry(value: Any) -> Ceilings | None:
    """Return one entry of a cache file, or ``None`` if it is invalid.

    Then a field is unknown, a required one is missing, a rate is not a positive finite number, a spread is negative, or the
    software or the time is no text.
    """
    if not isinstance(value, Mapping) or not value.keys() <= {each.name for each in fields(Ceilings)}:
        return None
    try:
        entry = Ceilings(**value)
        rates = [entry.copy_bytes_per_second, entry.launch_seconds, *entry.matrix_flops_per_second.values()]
        rates += [] if entry.read_bytes_per_second is None else [entry.read_bytes_per_second]
        spreads = entry.spread or {}
        good = all(0 < rate < math.inf for rate in rates) and all(each >= 0 for each in spreads.values())
    except (TypeError, AttributeError):
        return None
    return entry if good and isinstance(entry.software, str) and isinstance(entry.measured_at, str) else None
