"""Compare stored peaks of a device with a quick measurement, so that peaks of another order of magnitude are not believed.

Peaks are measured once and kept, and every roofline bound rests on them. Peaks that are far too low make honest times look
impossible; peaks that are far too high let impossible times pass. A quick look takes about a tenth of a second. It is rougher
than :func:`onelaunch.device.peaks.measure`, so only large differences count. ``peaks.py`` takes one look before a process first
uses stored peaks. If it contradicts them, ``peaks.py`` measures, and compares the result with them by :func:`contradiction`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from onelaunch.device.hardware import Ceilings, free_memory

_TOO_LOW = 5.0
"""Factor by which a quick look must exceed a stored peak to contradict it. A copy within a large cache accounts for less."""

_TOO_HIGH = 10.0
"""Factor by which a stored peak must exceed a quick look to be contradicted. A machine that other work slows down accounts for
less."""

_COPIED = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Bytes of the buffer that is copied, by device type."""

_SIDE = {"cpu": 512, "cuda": 4096}
"""Rows and columns of the multiplied matrices, by device type."""

_ADDITIONS = 500
"""Number of additions of one element, which stand for launches on a CPU."""

_SAMPLES = 3
"""Number of samples of each rate, of which the fastest counts."""


def implausible(device: str, found: Ceilings) -> str:
    """Return which stored peak of a device a quick look contradicts, as a clause, or an empty string."""
    return contradiction(found, look(torch.device(device)))


def contradiction(found: Ceilings, rates: Mapping[str, float]) -> str:
    """Return which peak is far from a measured rate, as a clause, or an empty string.

    Args:
        found: Peaks of a device.
        rates: Rates per second by quantity, from :func:`look` or :func:`by_quantity`.
    """
    believed = by_quantity(found)
    for quantity, rate in rates.items():
        peak = believed.get(quantity, rate)
        if rate > _TOO_LOW * peak or peak > _TOO_HIGH * rate:
            return f"{quantity} is stored as {peak:.2g} per second, and was seen at {rate:.2g}"
    return ""


def by_quantity(found: Ceilings) -> dict[str, float]:
    """Return peaks per second by the names of :func:`look`, which checks some: ``copy`` in bytes, dtypes in FLOPs, ``launch``."""
    return {"copy": found.copy_bytes_per_second, "launch": 1 / found.launch_seconds, **found.matrix_flops_per_second}


def look(device: torch.device) -> dict[str, float]:
    """Return rough rates per second of a device: ``copy`` in bytes, a dtype in FLOPs, and on a CPU ``launch``.

    Without enough free memory there are none.
    """
    if free_memory(device) < 4 * _COPIED[device.type]:
        return {}
    try:
        with torch.no_grad():
            return {quantity: amount / _seconds(run, device) for quantity, amount, run in _calls(device)}
    except torch.OutOfMemoryError:  # other work took the memory in the meantime
        return {}
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the buffers are not needed again


def _calls(device: torch.device) -> list[tuple[str, float, Callable[[], object]]]:
    """Return quantity, amount and function of each call that is timed."""
    side, dtype = _SIDE[device.type], torch.float32 if device.type == "cpu" else torch.float16
    source = torch.ones(_COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)
    matrix = torch.rand(side, side, device=device).to(dtype)
    product = torch.empty_like(matrix)
    calls: list[tuple[str, float, Callable[[], object]]] = [
        ("copy", 2.0 * source.nbytes, lambda: target.copy_(source)),
        (str(dtype).removeprefix("torch."), 2.0 * side**3, lambda: torch.mm(matrix, matrix, out=product)),
    ]
    if device.type == "cpu":  # a launch on a GPU is a node of a CUDA graph, which takes long to capture
        one = torch.zeros(1)
        calls.append(("launch", float(_ADDITIONS), lambda: [one.add_(1) for _ in range(_ADDITIONS)]))
    return calls


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of a few calls, after one that is not counted."""
    run()
    taken = []
    for _ in range(_SAMPLES):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return max(min(taken), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
