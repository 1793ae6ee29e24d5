"""Operands of ``swiglu`` as its kernels take them: the tensors of a matrix, whatever its format."""

from __future__ import annotations

from typing import NamedTuple

import torch

from onelaunch.formats import ATOM_ROWS, Fp8Tensor, NVFP4Tensor
from onelaunch.ops.swiglu.contract import Operand


class Matrix(NamedTuple):
    """A matrix ``[R, K]`` in plain numbers, float8 or NVFP4, as tensors."""

    values: torch.Tensor
    """``[R, K]``, or codes ``[R, K / 2]`` uint8."""
    blocks: torch.Tensor | None = None
    """Scales of NVFP4, ``[R, K / 16]`` or swizzled."""
    scale: torch.Tensor | None = None
    """float32, of one element or ``[R, 1]``."""

    @classmethod
    def of(cls, operand: Operand, *, swizzled: bool) -> Matrix:
        """Return the tensors of an operand. Swizzled scales of NVFP4 stay so where ``swizzled``, else they are put in order."""
        if isinstance(operand, torch.Tensor):
            return cls(operand)
        if isinstance(operand, Fp8Tensor):
            return cls(operand.values, None, operand.scale)
        plain = operand if swizzled else operand.plain()
        return cls(plain.codes, plain.scales, plain.global_scale)

    def rows(self, start: int, stop: int, *, swizzled: bool) -> Matrix:
        """Return some of the rows, as views."""
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
        """The matrix as PyTorch's products take it; not for NVFP4."""
        return self.values if self.scale is None else Fp8Tensor(self.values, self.scale)

    def flat_scale(self) -> torch.Tensor | None:
        """Return the scale as kernels read it."""
        return None if self.scale is None else self.scale.contiguous()


def with_scales_alike(gate: Matrix, up: Matrix) -> tuple[Matrix, Matrix]:
    """Return both weights with a scale for each row if one of them has such, since kernels read both alike."""
    if gate.per_row == up.per_row:
        return gate, up
    rows = gate.values.shape[0]
    one, other = (each._replace(scale=None if each.scale is None else each.scale.expand(rows, 1)) for each in (gate, up))
    return one, other


def all_swizzled(operands: tuple[Operand, ...]) -> bool:
    """Return whether there are NVFP4 operands and the scales of all of them are swizzled."""
    codes = [each for each in operands if isinstance(each, NVFP4Tensor)]
    return bool(codes) and all(each.swizzled for each in codes)
