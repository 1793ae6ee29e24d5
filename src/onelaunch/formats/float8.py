"""Matrices in float8 with one scale for all elements or one for each row."""

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
        values: ``[R, K]`` float8_e4m3fn.
        scale: float32, of one element (``[]`` or ``[1]``) for all, or ``[R, 1]`` for each row.
    """

    values: torch.Tensor
    scale: torch.Tensor

    def __post_init__(self) -> None:
        self.check("values", self.values, "scale", self.scale)

    @staticmethod
    def check(its_name: str, values: torch.Tensor, scale_name: str, scale: torch.Tensor) -> None:
        """Raise unless the two make a matrix; the names are what a caller knows them by."""
        checks.tensor(its_name, values)
        checks.rank(its_name, values, "[R, K]")
        checks.dtype(its_name, values, (torch.float8_e4m3fn, torch.float64))
        check_scale(scale_name, scale, values)
        if tuple(scale.shape) not in ((), (1,), (1, 1), (values.shape[0], 1)):
            want = f"one element, or [R, 1] = [{values.shape[0]}, 1] to match {its_name} {list(values.shape)}"
            raise ShapeError(scale_name, got=scale.shape, want=want)

    @property
    def shape(self) -> torch.Size:
        """``[R, K]``."""
        return self.values.shape

    @property
    def per_row(self) -> bool:
        """Whether rows have scales of their own."""
        return self.scale.numel() != 1

    def rows(self, start: int, stop: int | None) -> Fp8Tensor:
        """Some of the rows, as views; ``start`` and ``stop`` as in a slice."""
        start, stop = bounds(start, stop, self.shape[0])
        scale = self.scale[start:stop] if self.per_row else self.scale
        return Fp8Tensor(self.values[start:stop], scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``[R, K]``, rounded to float32 (float64) and then to ``dtype``."""
        wide = torch.promote_types(self.scale.dtype, dtype)
        return (self.values.to(wide) * self.scale.reshape(-1, 1).to(wide)).to(dtype)


def quantize_fp8(values: torch.Tensor, *, per_row: bool = False) -> Fp8Tensor:
    """The nearest float8_e4m3fn numbers, scaled such that the largest of all, or of each row, becomes 448.

    Args:
        values: ``[R, K]`` of any floating-point dtype, finite or NaN.
        per_row: a scale for each row.

    Raises:
        ShapeError, DTypeError: naming ``values`` and what it has to be.
        ValueRangeError: ``values`` holds infinities.
    """
    wide = matrix(values)
    size = F.pad(wide.nan_to_num(0.0).abs(), (0, 1, 0, int(not per_row)))  # so that there is one, whatever the shape
    largest = size.amax(1, keepdim=True) if per_row else size.amax()
    scale = torch.where(largest > 0, (largest / LARGEST_SCALE).clamp(min=LEAST), torch.ones_like(largest))
    return Fp8Tensor((wide / scale).clamp(-LARGEST_SCALE, LARGEST_SCALE).to(torch.float8_e4m3fn), scale)
