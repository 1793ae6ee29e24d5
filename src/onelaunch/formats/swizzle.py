"""Swizzled memory order of NVFP4 block scales, which cuBLAS and tcgen05 read.

``nvfp4.py`` checks, cuts, swizzles and unswizzles scales with it. Of its names ``swiglu`` uses ``ATOM_ROWS`` alone, to check that
stacked weights are not cut inside an atom, and to cut swizzled scales at whole atoms.
"""

from __future__ import annotations

import torch

ATOM_ROWS, ATOM_SCALES = 128, 4
"""Rows and scales of an atom, the 512 bytes that the swizzled order keeps contiguous."""


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple


def padded(rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of a matrix of scales, rounded up to whole atoms."""
    return round_up(rows, ATOM_ROWS), round_up(columns, ATOM_SCALES)


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Return scales ``[R, S]`` in the order of cuBLAS and tcgen05, padded with zeros to whole atoms of 128 x 4.

    Within an atom, scale (r, s) is at offset ``(r % 32) * 16 + r // 32 * 4 + s``. Atoms follow each other along S first.
    """
    rows, columns = scales.shape
    height, width = padded(rows, columns)
    whole = torch.zeros(height, width, dtype=torch.uint8, device=scales.device)
    whole[:rows, :columns] = scales.view(torch.uint8)
    atoms = whole.reshape(height // ATOM_ROWS, 4, 32, width // ATOM_SCALES, ATOM_SCALES).permute(0, 3, 2, 1, 4)
    return atoms.reshape(height, width).view(scales.dtype)


def unswizzle(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return swizzled scales in plain order ``[rows, columns]`` without the padding: the inverse of :func:`swizzle`."""
    height, width = scales.shape
    atoms = scales.contiguous().reshape(height // ATOM_ROWS, width // ATOM_SCALES, 32, 4, ATOM_SCALES).permute(0, 3, 2, 1, 4)
    return atoms.reshape(height, width)[:rows, :columns].contiguous()
