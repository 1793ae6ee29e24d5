"""TMA descriptors of the tensors ``[B, T, H, X]`` that ``gla``'s Hopper kernels read and write, for ``launch_hopper.py``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from onelaunch.kernels.tma import address, addressable, described


class Boxes(NamedTuple):
    """Boxes in which TMA copies a head of a ``[B, T, H, X]`` tensor.

    Where boxes cover the X channels of a head exactly, the tensor is described as a matrix ``[B T, H X]``. Elsewhere it is
    described as ``[B T, H, X]``, so that TMA fills the channels beyond a head with zeros when it loads, and drops them when it
    stores.
    """

    steps: int
    channels: int
    """Channels of one box."""
    extent: int
    """Channels of all boxes of a head, X or more."""

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``[B, T, H, X]`` as the matrix or the tensor that is described; a view where its strides allow one."""
        rows = tensor.flatten(0, 1)
        if self.extent == tensor.shape[3]:
            return rows.flatten(1)
        # The stride from head to head of a single head may be any number; TMA's must be a multiple of 16 bytes.
        return rows if rows.shape[1] > 1 else rows.as_strided(rows.shape, (rows.stride(0), rows.shape[2], rows.stride(2)))

    def describe(self, tensor: torch.Tensor) -> Any:
        """Return the TMA descriptor of a ``[B, T, H, X]`` tensor; of a copy where TMA cannot address strides or address."""
        flat = addressable(self.flat(tensor))
        return described(flat, [self.steps, self.channels] if flat.dim() == 2 else [self.steps, 1, self.channels])


def boxes(box: Boxes, *tensors: torch.Tensor) -> list[Any]:
    """Return TMA descriptors of ``[B, T, H, X]`` tensors that are read."""
    return [box.describe(tensor) for tensor in tensors]


def targets(box: Boxes, *tensors: torch.Tensor) -> list[Any]:
    """Return TMA descriptors of ``[B, T, H, X]`` tensors that are written to.

    Raises:
        ValueError: TMA cannot address a tensor where it is; a copy would not reach the caller.
    """
    for tensor in tensors:
        flat = box.flat(tensor)
        if address(flat) != address(tensor) or addressable(flat) is not flat:
            raise ValueError(f"TMA cannot write {list(tensor.shape)} of strides {tensor.stride()}")
    return boxes(box, *tensors)
