"""Clocks and power of the GPU during a measurement, sampled through nvidia-ml-py where it is installed.

``timing.py`` makes a sampler for each case.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch


class Clocks:
    """Sampler of clocks and power. Without nvidia-ml-py or a driver, and on a CPU or an AMD GPU, it takes no samples.

    Args:
        device: Device to sample.
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
            # By UUID, since NVML counts all GPUs of the machine, and PyTorch only those of CUDA_VISIBLE_DEVICES.
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._nvml = pynvml
        except Exception:  # noqa: BLE001 - a measurement is valid without clocks, so no error of the library may stop it
            self._nvml = None

    def sample(self) -> None:
        """Take one sample of clocks and power."""
        if (nvml := self._nvml) is None:
            return
        try:
            self._add("sm_mhz", nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))
            self._add("memory_mhz", nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_MEM))
            self._add("power_w", nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000)
        except Exception:  # noqa: BLE001 - a measurement is valid without clocks
            self._nvml = None

    def medians(self) -> dict[str, float]:
        """Return the medians over the samples and the lowest SM clock, or an empty dictionary without samples."""
        found = {name: float(statistics.median(values)) for name, values in self._samples.items()}
        if "sm_mhz" in self._samples:
            found["sm_mhz_lowest"] = min(self._samples["sm_mhz"])
        return found

    def _add(self, name: str, value: float) -> None:
        self._samples.setdefault(name, []).append(float(value))
