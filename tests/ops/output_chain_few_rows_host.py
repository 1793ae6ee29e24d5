"""The kernel of ``output_chain`` for few rows, compiled for the CPU and linked with the emulated GPU.

The emulated GPU is that of ``tests/decode/host``. :func:`use_host` lets the launches that ``launch_few_rows.py`` makes run so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from onelaunch.device.architectures import HOPPER_SHARED_BYTES
from onelaunch.ops.output_chain import configure_few_rows, launch_few_rows
from tests.decode.host_machine import HostLaunch


class Launch(HostLaunch):
    """Stand-in for the launches of ``output_chain``."""

    name, program = "few-rows", Path(__file__).with_suffix(".cpp")
    source_of = staticmethod(configure_few_rows.source_of)

    def call(self, run: Any, pointers: Any, tensors: Sequence[torch.Tensor | None], numbers: Sequence[Any]) -> bool:
        (rows, columns, *pitches, eps), long = numbers, ctypes.c_longlong
        return bool(
            run(
                pointers, rows, columns, *map(long, pitches), ctypes.c_float(eps), self.ctas, self.config.shared_bytes, self.seed,
                long(self.sweeps),
            )
        )  # fmt: skip


def use_host(monkeypatch: Any, folder: Path, sms: int, **options: Any) -> type[Launch]:
    """Let ``launch_few_rows`` run its launches on the CPU, for a device with ``sms`` SMs; return the class of its launches."""
    host = Launch.fresh(folder, **options)
    for name, value in {
        "CudaLaunch": host,
        "kernel_of": lambda config: config,
        "processors": lambda device: sms,
        "shared_bytes": lambda device: HOPPER_SHARED_BYTES,
        "is_hopper": lambda device: True,
    }.items():
        monkeypatch.setattr(launch_few_rows, name, value)
    monkeypatch.setattr(launch_few_rows.cuda, "missing", lambda: None)
    return host
