"""The Hopper kernel of ``linear_rnn`` for few rows, compiled for the CPU and linked with the emulated GPU.

The emulated GPU is that of ``tests/decode/host``. :func:`use_host` lets the launches that ``launch_few_rows_hopper.py`` makes run
so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onelaunch.ops.linear_rnn import configure_few_rows_hopper, launch_few_rows_hopper
from tests.decode.host_machine import HostLaunch, spans_of


class Launch(HostLaunch):
    """Stand-in for the launches of ``linear_rnn``."""

    name, program = "linear-rnn-few-rows", Path(__file__).with_suffix(".cpp")
    source_of = staticmethod(configure_few_rows_hopper.source_of)

    def call(self, run: Any, pointers: Any, tensors: Sequence[torch.Tensor | None], numbers: Sequence[Any]) -> bool:
        sizes, pitches = numbers[:3], numbers[3:]
        return bool(
            run(
                pointers, spans_of(tensors), *sizes, (ctypes.c_longlong * len(pitches))(*pitches), self.ctas,
                self.config.shared_bytes, self.seed, ctypes.c_longlong(self.sweeps),
            )
        )  # fmt: skip


def use_host(monkeypatch: Any, folder: Path, sms: int, division: dict[str, Any], **options: Any) -> type[Launch]:
    """Let ``launch_few_rows_hopper`` run its launches on the CPU, for a device with ``sms`` SMs; return the class of them.

    ``division`` replaces fields of their configurations.
    """
    host = Launch.fresh(folder, **options)
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
