"""The kernel of gla_layer's variant ``one_launch``, compiled for the CPU and linked with the emulated GPU.

The emulated GPU is that of ``tests/decode/host``.

CUDA threads are fibers, TMA copies land late, and CTAs progress unevenly, so that missing synchronization gives wrong results. A
*watched* library also looks for accesses to shared memory that no barrier orders. :func:`use_host` lets the launches that
``launch_step.py`` makes run so.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from onelaunch.ops.gla_layer import configure_step, launch_step
from tests.decode.host_machine import found_races, library_of, spans_of

SWEEPS = 1_000_000
"""Sweeps of the emulated scheduler over all threads after which a launch counts as hanging."""


def build(
    config: configure_step.StepConfig, folder: Path, *, watched: bool, change: tuple[str, str] | None, **options: int
) -> Path:
    """Compile the kernel of a configuration into a shared library, once per content, and return the library's path.

    ``change`` is a string that occurs exactly once in the kernel's source, and its replacement. ``options`` are those of
    ``configure_step.header``.
    """
    code = configure_step.source_of(config, **options)
    files = {**dict(code.headers), "step.cu": code.text, "run.cpp": Path(__file__).with_suffix(".cpp").read_text()}
    return library_of("step", files, folder, watched=watched, change=change)


class HostLaunch:
    """Stand-in for ``CudaLaunch`` that runs the kernel on the CPU.

    Attributes:
        options: Arguments of :func:`build`.
        seed: Seed of the delays of CTAs, warps and copies.
        lost: Number of CTAs that are not launched.
        trapped: Result of ``run`` in ``gla_layer_step_host.cpp`` for the latest launch.
        strict: Flag that a launch must leave its counters and tagged words zero.
        races: Races that watched launches have found, see ``HostKernel.races``.
    """

    folder: Path
    options: dict[str, Any]
    seed, lost, trapped, strict = 1, 0, 0, True
    races: list[str]

    def __init__(
        self, config: configure_step.StepConfig, device: torch.device, grid: tuple[int, int, int], *arguments: Any, owners: Any
    ):
        assert device.type == "cpu"
        self.config, self.ctas, self.arguments, self.owners = config, grid[0], arguments, owners

    def run(self) -> None:
        """Launch, and require that the launch ended or trapped and that its counters are zero again if it ended."""
        host, binary = type(self), build(self.config, self.folder, **self.options)
        kernel = ctypes.CDLL(str(binary))
        tensors, (batch, length, inverse_normalizer, eps), boxes = self.arguments[:12], self.arguments[12:16], self.arguments[16:]
        assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
        pointers = (ctypes.c_void_p * len(tensors))(*(None if each is None else each.data_ptr() for each in tensors))
        maps = (ctypes.c_ulonglong * 54)(*(number for box in boxes for number in box))
        floats = ctypes.c_float(inverse_normalizer), ctypes.c_float(eps)
        unwatched, barriers = configure_step.unwatched_of(self.config)
        shared = configure_step.shared_bytes_of(self.config)
        host.trapped = kernel.run(
            pointers, spans_of(tensors), batch, length, *floats, maps, self.ctas - host.lost, shared, unwatched, barriers,
            host.seed, ctypes.c_longlong(SWEEPS),
        )  # fmt: skip
        assert host.trapped >= 0, "the launch did not end"
        assert host.trapped or not host.strict or not tensors[10].any(), "counters are zero after a launch"
        tensors[10].zero_()  # a trap leaves them as they are, and on a GPU ends their context
        if self.options.get("watched"):
            host.races += found_races(kernel, binary)


def host_map(
    dtype: torch.dtype,
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzle: int = 128,
) -> tuple[int, ...]:
    """Return the arguments of a tensor map as ``gla_layer_step_host.cpp`` reads them."""
    assert dtype is torch.bfloat16
    assert (box[0], swizzle) == (64, 128)
    return (address, *strides, *sizes, *box)


def use_host(monkeypatch: Any, folder: Path, sms: int, **options: Any) -> type[HostLaunch]:
    """Let ``launch_step`` run its launches on the CPU, for a device with ``sms`` SMs; return the class of its launches."""
    given = {"watched": False, "change": None, **options}
    host = type("Launches", (HostLaunch,), {"folder": folder, "options": given, "races": []})
    monkeypatch.setattr(launch_step, "CudaLaunch", host)
    monkeypatch.setattr(launch_step, "kernel_of", lambda config: config)
    monkeypatch.setattr(launch_step, "tensor_map", host_map)
    monkeypatch.setattr(launch_step, "processors", lambda device: sms)
    return host
