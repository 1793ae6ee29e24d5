"""Launches of ``swiglu``'s kernels."""

from __future__ import annotations

import torch

from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.ops.swiglu import kernels

MOST_COLUMNS = 2048
"""Of a row that one program works on: 16 numbers a thread with four warps; not measured yet."""


def columns_at_once(columns: int) -> int:
    """BC: a power of 2."""
    return min(MOST_COLUMNS, 1 << max(columns - 1, 31).bit_length())


def gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of two ``[M, N]``, contiguous."""
    gate, up = inner_contiguous(gate), inner_contiguous(up)
    rows, columns = gate.shape
    h = torch.empty((rows, columns), dtype=gate.dtype, device=gate.device)
    block = columns_at_once(columns)
    grid = (rows * cdiv(columns, block),)
    kernels.gate_kernel[grid](gate, up, h, columns, gate.stride(0), up.stride(0), BC=block, num_warps=4)
    return h


def gate_backward(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gradients of both side by side: ``[M, 2 N]``, contiguous."""
    dh, gate, up = (inner_contiguous(each) for each in (dh, gate, up))
    rows, columns = gate.shape
    both = torch.empty((rows, 2 * columns), dtype=gate.dtype, device=gate.device)
    dgate, dup = both[:, :columns], both[:, columns:]
    block = columns_at_once(columns)
    grid = (rows * cdiv(columns, block),)
    kernels.gate_backward_kernel[grid](
        dh, gate, up, dgate, dup, columns, dh.stride(0), gate.stride(0), up.stride(0), dgate.stride(0), dup.stride(0),
        BC=block, num_warps=4,
    )  # fmt: skip
    return both
