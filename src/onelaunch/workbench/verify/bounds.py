"""Errors of a result against the oracle, and the bounds that they may have: of the norm, the largest element, and along time.

The norm over all elements hides few wrong ones among millions, and a few wrong steps of a long sequence. The largest error and
the error of each part of the sequence therefore have bounds of their own. ``reference.py`` judges outputs by these functions;
other checks of ``verify`` use single ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from onelaunch.workbench.result import ComponentError

SLACK = 2.0**-21
"""Slack added to twice the error of the PyTorch baseline: four times the machine epsilon of float32, 2^-23.

Without it a case in which the baseline rounds nothing (one step, one channel, no decay) would ask for exact outputs. Only such
float32 cases need it; the largest slack that one of them needs is 3.2e-7.
"""

LARGEST = 8.0
"""Largest absolute error of an element, in that of the PyTorch baseline or, if larger, the stated error of a root mean square.

Among the correct results measured on an H200, the largest ratio was 5.2: ``y`` of fla's linear RNN, whose product is in bfloat16.
"""

PART = 4.0
"""Largest norm-wise error of a part along time, in the largest of the PyTorch baseline's for the part, for the whole, and the
stated error.

Among the correct results measured on an H200, the largest ratio was 1.7.
"""

PARTS = 8
"""Number of successive parts of the sequence for which an error is reported separately."""


@dataclass(frozen=True)
class Bound:
    """Bounds of one result or gradient besides its norm-wise error."""

    largest: float
    """Largest absolute error of an element."""
    parts: tuple[float, ...] = ()
    """Largest norm-wise error of each part along time; empty without a time dimension."""
    root_mean_square: float = 0.0
    """Root mean square of the expected values."""
    greatest: float = 0.0
    """Largest magnitude of the expected values."""
    stated: float = 0.0
    """Norm-wise error on which a bound rests where it is larger than that of the PyTorch baseline; 0 if no error is stated."""

    def times(self, factor: float) -> Bound:
        """Return the bounds multiplied by a factor."""
        return replace(self, largest=factor * self.largest, parts=tuple(factor * part for part in self.parts))

    def raised(self, stated: float) -> Bound:
        """Return the bounds that rest on a stated norm-wise error wherever it is larger than that of the PyTorch baseline."""
        largest = max(self.largest, LARGEST * stated * self.root_mean_square)
        return replace(
            self, largest=largest, parts=tuple(max(part, PART * stated) for part in self.parts), stated=max(self.stated, stated)
        )

    def of_a_peer(self, tolerance: float) -> Bound:
        """Return the bounds for a peer whose own project's tests allow this norm-wise error, and look at no single elements.

        An element may be off by this fraction of the largest one, as where a result is rounded to fewer bits than its dtype has.
        """
        raised = self.raised(tolerance)
        return replace(raised, largest=max(raised.largest, tolerance * self.greatest))

    def problems(self, error: ComponentError) -> list[str]:
        """Return in sentences which bounds an error exceeds: that of an element, and that of the first such part along time."""
        found = []
        plain = "of plain PyTorch in the same dtype"
        stated = f" or, if larger, the stated error {self.stated:g}" if self.stated else ""
        if not error.max_error <= self.largest:
            per_element = f"{stated} times the root mean square of the expected values" if stated else ""
            found.append(
                f"{error.name} has an element that is off by {error.max_error:.2e}; {self.largest:.2e} is allowed "
                f"({LARGEST:g} times the largest error {plain}{per_element})."
            )
        for index, (part, allowed) in enumerate(zip(error.error_by_position, self.parts, strict=False), start=1):
            if not part <= allowed:
                found.append(
                    f"{error.name} is off by {part:.2e} in part {index} of {len(self.parts)} along time; {allowed:.2e} is "
                    f"allowed ({PART:g} times the error {plain}{stated})."
                )
                break
        return found


def bound_of(plain: torch.Tensor, expected: torch.Tensor, length: int) -> Bound:
    """Return the bounds that follow from the error of the PyTorch baseline.

    Args:
        plain: What the baseline returned.
        expected: What the oracle returned, in float64.
        length: Number of steps of the sequence.
    """
    if not expected.numel():
        return Bound(0.0)
    exact = plain.to(device=expected.device, dtype=torch.float64)
    overall = norm_error(exact, expected, plain.dtype)
    root_mean_square = float(torch.linalg.vector_norm(expected)) / math.sqrt(expected.numel())
    # Slack as in the norm-wise bound, because a baseline that rounds nothing would ask for exact outputs.
    greatest = float(expected.abs().max())
    scale = greatest if root_mean_square >= _negligible(plain.dtype) else 1.0
    largest = LARGEST * largest_error(exact, expected) + PART * SLACK * scale
    parts = errors_by_position(exact, expected, plain.dtype, length)
    return Bound(largest, tuple(PART * (max(part, overall) + SLACK) for part in parts), root_mean_square, greatest)


def largest_error(given: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference of float64 tensors, or infinity if an element is not finite."""
    largest = float((given - expected).abs().max()) if given.numel() else 0.0
    return largest if math.isfinite(largest) else math.inf


def errors_by_position(given: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, length: int) -> tuple[float, ...]:
    """Return the errors of successive parts of the sequence, or nothing for an output without a time dimension."""
    along = time_axis(given, length)
    if along is None or not given.numel():
        return ()
    parts = zip(given.tensor_split(min(PARTS, length), along), expected.tensor_split(min(PARTS, length), along), strict=True)
    return tuple(norm_error(part, true, dtype) for part, true in parts)


def time_axis(tensor: torch.Tensor, length: int) -> int | None:
    """Return the dimension of the sequence's steps, or ``None`` if a tensor has none or the sequence has fewer than two."""
    if length < 2 or not tensor.dim():
        return None
    # The first dimension of onelaunch's own outputs is the batch, whose size may equal the length by chance. It is therefore
    # tried last, for operations whose outputs have no batch.
    return next((axis for axis in (*range(1, tensor.dim()), 0) if tensor.shape[axis] == length), None)


def norm_error(given: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Return ``||given - expected|| / ||expected||`` of float64 tensors, or infinity if an element is not finite.

    If all expected values are zero, or too small for ``dtype`` to represent, the root mean square of the difference is returned
    instead. That is meaningful because inputs are of unit scale.
    """
    if not expected.numel():
        return 0.0
    error = difference(given, expected) / scale_of(expected, dtype)
    return error if math.isfinite(error) else math.inf


def difference(given: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ``||given - expected||`` of float64 tensors, or infinity if an element is not finite."""
    norm = float(torch.linalg.vector_norm(given - expected))
    return norm if math.isfinite(norm) else math.inf


def scale_of(expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the norm of a float64 tensor that has elements, in which :func:`norm_error` gives errors.

    It is the square root of the number of elements if all are zero, or too small for ``dtype`` to represent.
    """
    root = math.sqrt(expected.numel())
    norm = float(torch.linalg.vector_norm(expected))
    return root if norm / root < _negligible(dtype) else norm


def _negligible(dtype: torch.dtype) -> float:
    """Return the root mean square below which expected values count as zeros: what the dtype cannot represent, at least 1e-12."""
    finfo = torch.finfo(dtype) if dtype.is_floating_point else torch.finfo(torch.float64)
    return max(1e-12, finfo.tiny * finfo.eps)  # their product is the smallest subnormal number
