"""Matrices in float8 (e4m3fn) with one scale for all elements or one for each row.

``swiglu`` takes :class:`Fp8Tensor`, and users quantize with :func:`quantize_fp8`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from onelaunch import checks
from onelaunch.errors import ShapeError
from onelaunch.formats.scales import LARGEST_SCALE, LEAST, bounds, check_scale, matrix
from onelaunch.operation import Bundle


@dataclass(frozen=True, eq=False)
class Fp8Tensor(Bundle):
    """A matrix ``values * scale`` in float8.

    Attributes:
        values: Elements, shape ``[R, K]``, float8_e4m3fn.
        scale: Scale, float32; one element (shape ``[]``, ``[1]`` or ``[1, 1]``) for the matrix, or ``[R, 1]``, one for each row.
    """

    values: torch.Tensor
    scale: torch.Tensor

    def __post_init__(self) -> None:
        self.check("values", self.values, "scale", self.scale)

    @staticmethod
    def check(its_name: str, values: torch.Tensor, scale_name: str, scale: torch.Tensor) -> None:
        """Raise unless the two tensors form a matrix. Messages use the caller's names of the tensors."""
        checks.tensor(its_name, values)
        checks.rank(its_name, values, "[R, K]")
        checks.dtype(its_name, values, (torch.float8_e4m3fn, torch.float64))  # float64: upcast for an oracle
        check_scale(scale_name, scale, values)
        if tuple(scale.shape) not in ((), (1,), (1, 1), (values.shape[0], 1)):
            want = f"one element, or [R, 1] = [{values.shape[0]}, 1] to match {its_name} {list(values.shape)}"
            raise ShapeError(scale_name, got=scale.shape, want=want)

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, ``[R, K]``."""
        return self.values.shape

    @property
    def per_row(self) -> bool:
        """Flag that each row has its own scale; False for a matrix of one row."""
        return self.scale.numel() != 1

    def rows(self, start: int, stop: int | None) -> Fp8Tensor:
        """Return rows ``start`` to ``stop`` as views; both are bounds of a Python slice."""
        start, stop = bounds(start, stop, self.shape[0])
        scale = self.scale[start:stop] if self.per_row else self.scale
        return Fp8Tensor(self.values[start:stop], scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the matrix ``[R, K]``, rounded to float32 (or float64, if ``dtype`` or the scale's is) and then to ``dtype``."""
        wide = torch.promote_types(self.scale.dtype, dtype)
        return (self.values.to(wide) * self.scale.reshape(-1, 1).to(wide)).to(dtype)


def quantize_fp8(values: torch.Tensor, *, per_row: bool = False) -> Fp8Tensor:
    """Return the nearest float8_e4m3fn matrix, scaled so that the largest magnitude of all, or of each row, becomes 448.

    A matrix or row of zeros has the scale 1. No scale is below the least normal float32 number, so magnitudes below
    5e-36 do not reach 448.

    Args:
        values: Matrix, shape ``[R, K]``, any floating-point dtype, finite or NaN. It is quantized from float32.
        per_row: Flag that each row gets its own scale.

    Raises:
        ShapeError, DTypeError: ``values`` is no floating-point matrix. The message gives the requirement.
        ValueRangeError: ``values`` holds infinities. On a GPU this is checked only with ``ONELAUNCH_CHECK_VALUES=1``.
    """
    wide = matrix(values)
    size = F.pad(wide.nan_to_num(0.0).abs(), (0, 1, 0, int(not per_row)))  # a zero is added so that amax works on empty shapes
    largest = size.amax(1, keepdim=True) if per_row else size.amax()
    scale = torch.where(largest > 0, (largest / LARGEST_SCALE).clamp(min=LEAST), torch.ones_like(largest))
    # The clamp is for infinities that were not checked: some releases of PyTorch cast numbers beyond 448 to NaN.
    return Fp8Tensor((wide / scale).clamp(-LARGEST_SCALE, LARGEST_SCALE).to(torch.float8_e4m3fn), scale)
