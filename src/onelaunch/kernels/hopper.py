"""Common host code of kernels for Hopper GPUs: the question whether they can run, and tensors as TMA addresses them."""

from __future__ import annotations

import functools
from typing import Final

import torch

from onelaunch import cuda
from onelaunch.device.hardware import is_hopper
from onelaunch.operation import Query

ARCHITECTURES = ("sm_90a",)
"""Architectures that kernels of WGMMA are compiled for."""

ALIGNMENT = 16
"""Bytes of which TMA wants addresses and strides to be multiples."""

ROW_BYTES: Final = 128
"""Bytes of a row of an operand in shared memory: the width of the swizzle, and what WGMMA reads."""

tensor_map = functools.lru_cache(maxsize=4096)(cuda.tensor_map)
"""Cached :func:`onelaunch.cuda.tensor_map`: the same tensors come again."""


def needs_hopper(query: Query) -> str | None:
    """Return why kernels of WGMMA cannot run a query, or ``None``."""
    if query.device_type != "cuda" or not is_hopper(torch.device(query.device)):
        return "needs an NVIDIA GPU of compute capability 9.0"
    return cuda.missing()


def addressable(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, columns]`` itself, or a copy where TMA cannot address its strides or its address."""
    apart = tensor.stride(0) >= tensor.shape[1]  # rows that are one and the same are not
    aligned = apart and tensor.stride(1) == 1 and tensor.stride(0) * tensor.element_size() % ALIGNMENT == 0
    return tensor if aligned and tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone(memory_format=torch.contiguous_format)
