"""Clocks and power of the GPU while something is timed, sampled through nvidia-ml-py where it is installed."""

from __future__ import annotations

import statistics
from typing import Any

import torch


class Clocks:
    """Samples clocks and power; silent where there is no driver to ask.

    Args:
        device: whose clocks; a CPU's are not sampled.
    """

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._samples: dict[str, list[float]] = {}
        if device.type != "cuda" or torch.version.hip:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._nvml = pynvml
        except Exception:  # noqa: BLE001 - clocks are a courtesy: no failure of the library may stop a measurement
            self._nvml = None

    def sample(self) -> None:
        """Take one sample."""
        if (nvml := self._nvml) is None:
            return
        try:
            self._add("sm_mhz", nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))
            self._add("memory_mhz", nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_MEM))
            self._add("power_w", nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000)
        except Exception:  # noqa: BLE001 - see above
            self._nvml = None

    def medians(self) -> dict[str, float]:
        """Medians over the samples, and the lowest SM clock; empty where nothing was sampled."""
        found = {name: float(statistics.median(values)) for name, values in self._samples.items()}
        if "sm_mhz" in self._samples:
            found["sm_mhz_lowest"] = min(self._samples["sm_mhz"])
        return found

    def _add(self, name: str, value: float) -> None:
        self._samples.setdefault(name, []).append(float(value))
