"""Command ``onelaunch doctor``: devices, measured peaks, and software that is installed or missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from onelaunch import __version__, cuda
from onelaunch.cli import output
from onelaunch.cli.arguments import DeviceName
from onelaunch.device.hardware import Ceilings, describe, present, resolve
from onelaunch.device.peaks import ceilings, stored, unsteady
from onelaunch.device.tools import find_ncu, package_installed
from onelaunch.operation import plugins
from onelaunch.operation.entry_points import Plugin
from onelaunch.wording import escaped
from onelaunch.workbench import quantities as q
from onelaunch.workbench.report.tables import Table, columns

LONGEST = 300
"""Largest number of characters that are shown of a string from a plug-in."""


@dataclass(frozen=True)
class Need:
    """Software or hardware that a part of onelaunch needs."""

    name: str
    purpose: str
    """Part of onelaunch that needs it."""
    look: Callable[[], str | None]
    """Function that returns the version or path that was found, or ``None``."""
    remedy: str
    """Advice if nothing was found."""


def doctor(
    device: DeviceName = "auto",
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure the device's peaks again.")] = False,
    measure: Annotated[bool, typer.Option(help="Measure the device's peaks if they are not stored yet (takes seconds).")] = True,
) -> None:
    """List the devices and software found here, and what is missing for which purpose.

    Prints the devices, the measured peaks of one device, and one line for each requirement of a part of onelaunch.

    Example: onelaunch doctor --device cpu
    """
    chosen = str(resolve(device))
    console = output.stdout()
    output.table(console, _devices())
    if measure:
        rates = None if refresh else stored(chosen)
        if rates is None:
            with output.busy(f"Measuring the peaks of {chosen} (once, then they are stored)"):
                rates = ceilings(chosen, refresh=True)
        output.table(console, _ceilings(chosen, rates))
    output.entries(console, "Requirements", _needs())
    if announced := plugins():
        output.entries(console, "Plug-ins", _plugins(announced))


def _devices() -> Table:
    heads = columns("device", "name", "architecture", ">SMs or cores", ">cache", ">memory")  # > aligns a column to the right
    facts = ((name, describe(name)) for name in present())
    rows = tuple(
        (name, fact.name, fact.architecture, str(fact.processors), q.size(fact.cache_bytes), q.size(fact.memory_bytes))
        for name, fact in facts
    )
    return Table("Devices", heads, rows)


def _ceilings(device: str, rates: Ceilings) -> Table:
    spread = rates.spread or {}
    read = rates.read_bytes_per_second
    found = (  # name in the table, key of the spread, value
        ("read bandwidth", "read", q.rate(read, "B/s") if read is not None else q.NONE),
        ("copy bandwidth", "copy", q.rate(rates.copy_bytes_per_second, "B/s")),
        *((f"matrix product, {dtype}", dtype, q.rate(rate, "FLOP/s")) for dtype, rate in rates.matrix_flops_per_second.items()),
        ("launch", "launch", q.time(1e6 * rates.launch_seconds)),
    )
    rows = tuple((name, value, f"{spread[key]:.1%}" if key in spread else q.NONE) for name, key, value in found)
    note = (
        f"Measured at {rates.measured_at} with {rates.software}. Roofline bounds are computed from these peaks. "
        "Spread: difference of the fastest samples. If other work ran on the device, the peaks are too low; measure again with "
        "onelaunch doctor --refresh."
    )
    if unsteady(rates):
        note = f"The device was busy, as the spreads show. These peaks may be too low and are measured again next time. {note}"
    return Table(f"Measured peaks of {device}", columns("peak", ">measured", ">spread"), rows, note)


def _needs() -> list[tuple[str, str, str]]:
    """Return name, status and text of every requirement."""
    rows = []
    for need in NEEDS:
        found = need.look()
        rows.append((need.name, "ok" if found else "missing", f"{found or need.remedy} (for {need.purpose})"))
    return rows


def _plugins(announced: Sequence[Plugin]) -> list[tuple[str, str, str]]:
    """Return name, status and text of each installed plug-in, with the reason if it was not loaded."""
    return [
        (
            _bounded(each.name),
            "ok" if each.problem is None else "error",
            f"{_bounded(each.problem or _registered(each))} (of {_bounded(_package(each.distribution))})",
        )
        for each in announced
    ]


def _registered(plugin: Plugin) -> str:
    """Return the module of a plug-in with the operations and variants that it registered."""
    return f"{plugin.module}: {', '.join(plugin.adds)}" if plugin.adds else plugin.module


def _package(distribution: str) -> str:
    """Return a package's name and version, as far as its metadata has them."""
    name, _, version = distribution.partition(" ")
    if name in ("", "None"):
        return "a package without metadata"
    return name if version in ("", "None") else distribution


def _bounded(text: str) -> str:
    """Return a foreign string as one line of at most :data:`LONGEST` characters, with control characters escaped."""
    text = escaped(" ".join(text.split()))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _installed(package: str, distribution: str = "") -> str | None:
    """Return the version of an importable package, whose distribution may have another name, or ``None``."""
    if not package_installed(package):
        return None
    try:
        return importlib.metadata.version(distribution or package)
    except importlib.metadata.PackageNotFoundError:
        return "installed"


def _gpu() -> str | None:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _driver() -> str | None:
    if not package_installed("pynvml"):
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def _nvrtc() -> str | None:
    return None if cuda.missing() else ".".join(map(str, cuda.version()))


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return next((path for name in filter(None, (named, "g++", "c++", "clang++")) if (path := shutil.which(name))), None)


def _bytecode() -> str | None:
    """Return ``compiled`` if PyTorch's modules have bytecode files. Pip writes them, but container images often lack them."""
    return "compiled" if Path(importlib.util.cache_from_source(torch.__file__)).exists() else None


def _counters() -> str | None:
    """Return which users may read the GPU's hardware counters, if this user may and there is a driver, else ``None``."""
    if os.geteuid() == 0:
        return "root" if Path("/proc/driver/nvidia/params").exists() else None
    try:
        facts = Path("/proc/driver/nvidia/params").read_text(encoding="ascii")
    except OSError:
        return None
    return "for every user" if "RmProfilingAdminOnly: 0" in facts else None


NEEDS: tuple[Need, ...] = (
    Need("onelaunch", "everything", lambda: __version__, ""),
    Need("python", "everything", platform.python_version, ""),
    Need("torch", "everything", lambda: str(torch.__version__), "pip install torch"),
    Need(
        "bytecode",
        "starting a second or two faster",
        _bytecode,
        f"python -m compileall -q {Path(torch.__file__).parent}",
    ),
    Need("a GPU", "running kernels in Triton or CUDA C++, full-scale studies", _gpu, "everything else works without one"),
    Need("triton", "Triton kernels, onelaunch inspect", lambda: _installed("triton"), 'pip install "onelaunch[triton]"'),
    Need("NVRTC", "kernels in CUDA C++", _nvrtc, 'pip install "onelaunch[cuda]"'),
    Need("C++ compiler", "torch.compile on a CPU: variant compiled", _compiler, "install g++, or name one in $CXX"),
    Need(
        "tokenizers",
        "text input and output of onelaunch generate",
        lambda: _installed("tokenizers"),
        'pip install "onelaunch[decode]"',
    ),
    Need("transformers", "chat templates", lambda: _installed("transformers"), 'pip install "onelaunch[decode]"'),
    Need("nvidia-ml-py", "clocks and power in results", lambda: _installed("pynvml", "nvidia-ml-py"), "pip install nvidia-ml-py"),
    Need("NVIDIA driver", "clocks and power in results", _driver, "install the driver; it is not needed without a GPU"),
    Need("ncu", "counting DRAM bytes, which are computed by arithmetic otherwise", find_ncu, "install NVIDIA Nsight Compute"),
    Need("hardware counters", "counting DRAM bytes", _counters, "run as root, or set NVreg_RestrictProfilingToAdminUsers=0"),
    Need("fla", "variant fla, the peer in studies", lambda: _installed("fla", "fla-core"), 'pip install "onelaunch[peers]"'),
)
"""Requirements, the most important first."""
