"""The Hopper kernel of ``linear_rnn`` for few rows, compiled for the CPU and linked with the emulated GPU.

The emulated GPU is that of ``tests/decode/host``. :func:`use_host` lets the launches that ``launch_few_rows_hopper.py`` makes run
so.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onelaunch.ops.linear_rnn import configure_few_rows_hopper, launch_few_rows_hopper
from tests.decode.host_machine import found_races, library_of, spans_of


def build(
    config: configure_few_rows_hopper.HopperConfig, folder: Path, *, watched: bool = False, change: tuple[str, str] | None = None
) -> Path:
    """Compile the kernel of a configuration into a shared library, once per content, and return the library's path.

    ``change`` is a string that occurs exactly once in the source files, and its replacement.
    """
    code = configure_few_rows_hopper.source_of(config)
    files = {**dict(code.headers), "few_rows.cu": code.text, "run.cpp": Path(__file__).with_suffix(".cpp").read_text()}
    return library_of("linear-rnn-few-rows", files, folder, watched=watched, change=change)


class HostLaunch:
    """Stand-in for ``CudaLaunch`` that runs the kernel on the CPU.

    Attributes:
        options: Arguments of :func:`build`.
        seed: Seed of the delays of CTAs and warps.
        launched: Configurations of the launches.
        races: Races that watched launches have found.
        strict: Flag that a launch must end.
        sweeps: Sweeps of the emulated scheduler over all threads after which a launch counts as hanging.
    """

    folder: Path
    options: dict[str, Any]
    seed, strict, sweeps = 1, True, 1_000_000
    launched: list[configure_few_rows_hopper.HopperConfig]
    races: list[str]

    def __init__(
        self,
        config: configure_few_rows_hopper.HopperConfig,
        device: torch.device,
        grid: tuple[int, int, int],
        *arguments: Any,
    ):
        assert device.type == "cpu"
        self.config, self.ctas, self.arguments = config, grid[0], arguments

    def run(self) -> None:
        """Launch, and require that the launch ended, if ``strict``."""
        host, binary = type(self), build(self.config, self.folder, **self.options)
        kernel = ctypes.CDLL(str(binary))
        tensors, sizes, pitches = self.arguments[:7], self.arguments[7:10], self.arguments[10:]
        pointers = (ctypes.c_void_p * len(tensors))(*(None if each is None else each.data_ptr() for each in tensors))
        ended = kernel.run(
            pointers, spans_of(tensors), *sizes, (ctypes.c_longlong * len(pitches))(*pitches), self.ctas,
            self.config.shared_bytes, host.seed, ctypes.c_longlong(host.sweeps),
        )  # fmt: skip
        assert ended or not host.strict, "the launch did not end"
        host.launched.append(self.config)
        if self.options.get("watched"):
            host.races += found_races(kernel, binary)


def use_host(monkeypatch: Any, folder: Path, sms: int, division: dict[str, Any], **options: Any) -> type[HostLaunch]:
    """Let ``launch_few_rows_hopper`` run its launches on the CPU, for a device with ``sms`` SMs; return the class of them.

    ``division`` replaces fields of their configurations.
    """
    host = type("Launches", (HostLaunch,), {"folder": folder, "options": options, "launched": [], "races": []})
    config_of = configure_few_rows_hopper.config_of

    def divided_so(*sizes: Any, **flags: Any) -> Any:
        config = config_of(*sizes, **flags)
        return config and replace(config, **division)

    for name, value in {
        "CudaLaunch": host,
        "kernel_of": lambda config: config,
        "config_of": divided_so,
        "processors": lambda device: sms,
        "is_hopper": lambda device: True,
    }.items():
        monkeypatch.setattr(launch_few_rows_hopper, name, value)
    monkeypatch.setattr(launch_few_rows_hopper.cuda, "missing", lambda: None)
    return host
