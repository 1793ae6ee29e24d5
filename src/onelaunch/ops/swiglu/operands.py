"""Operands of ``swiglu`` as its kernels take them: the tensors that a plain or quantized matrix consists of.

``autograd.py`` makes a :class:`Matrix` of each operand of a call, by the functions below, and the launches in ``launch.py`` and
``variants`` read it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from onelaunch.formats import ATOM_ROWS, Fp8Tensor, NVFP4Tensor
from onelaunch.ops.swiglu.contract import Operand


class Matrix(NamedTuple):
    """Tensors of a matrix ``[R, K]`` in a plain dtype, float8 or NVFP4."""

    values: torch.Tensor
    """Elements ``[R, K]``, or NVFP4 codes ``[R, K / 2]`` uint8."""
    blocks: torch.Tensor | None = None
    """Block scales of NVFP4, ``[R, K / 16]`` or swizzled."""
    scale: torch.Tensor | None = None
    """Scale of the whole matrix or of each row: float32, one element or ``[R, 1]``."""

    @classmethod
    def of(cls, operand: Operand, *, swizzled: bool) -> Matrix:
        """Return the tensors of an operand; swizzled block scales are brought to plain order unless ``swizzled`` is set.

        Set it only if :func:`all_swizzled` holds for the operands of the call, because kernels read all scales in one order.
        """
        if isinstance(operand, torch.Tensor):
            return cls(operand)
        if isinstance(operand, Fp8Tensor):
            return cls(operand.values, None, operand.scale)
        plain = operand if swizzled else operand.plain()
        return cls(plain.codes, plain.scales, plain.global_scale)

    def rows(self, start: int, stop: int, *, swizzled: bool) -> Matrix:
        """Return the rows from ``start`` to ``stop`` as views; with swizzled scales, ``start`` must be a multiple of 128."""
        last = -(-stop // ATOM_ROWS) * ATOM_ROWS if swizzled else stop
        blocks = None if self.blocks is None else self.blocks[start:last]
        scale = self.scale[start:stop] if self.scale is not None and self.per_row else self.scale
        return Matrix(self.values[start:stop], blocks, scale)

    @property
    def per_row(self) -> bool:
        """Flag that every row has a scale of its own."""
        return self.scale is not None and self.scale.numel() != 1

    @property
    def kind(self) -> str:
        """Format of the matrix: ``dense``, ``fp8`` or ``nvfp4``."""
        if self.blocks is not None:
            return "nvfp4"
        return "fp8" if self.values.dtype is torch.float8_e4m3fn else "dense"

    @property
    def operand(self) -> torch.Tensor | Fp8Tensor:
        """The matrix as ``multiply`` of variants/torch.py takes it; not for NVFP4."""
        return self.values if self.scale is None else Fp8Tensor(self.values, self.scale)

    def flat_scale(self) -> torch.Tensor | None:
        """Return the scale, contiguous, as kernels read it."""
        return None if self.scale is None else self.scale.contiguous()


def with_scales_alike(gate: Matrix, up: Matrix) -> tuple[Matrix, Matrix]:
    """Return both weights with the same kind of scales, since kernels read both alike: one per row if either has those."""
    if gate.per_row == up.per_row:
        return gate, up
    rows = gate.values.shape[0]
    one, other = (each._replace(scale=None if each.scale is None else each.scale.expand(rows, 1)) for each in (gate, up))
    return one, other


def all_swizzled(operands: tuple[Operand, ...]) -> bool:
    """Return whether there is an NVFP4 operand and all NVFP4 operands have swizzled scales."""
    codes = [each for each in operands if isinstance(each, NVFP4Tensor)]
    return bool(codes) and all(each.swizzled for each in codes)
