"""Matrices in NVFP4, 4-bit numbers with a scale for each block of 16: quantization, dequantization and checkpoint files.

Source: NVFP4 as in NVIDIA's Transformer Engine and Model Optimizer; the swizzled order of scales is cuBLAS's for block scaling.

``swiglu`` takes :class:`NVFP4Tensor` and reads :data:`BLOCK`, and its ``reference.py`` also quantizes inputs of cases. Users
quantize, load and save with the functions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from onelaunch import checks
from onelaunch.errors import ArgumentError, CheckpointError, ShapeError, ValueRangeError
from onelaunch.formats.scales import LARGEST_SCALE, LEAST, bounds, check_scale, matrix
from onelaunch.formats.swizzle import ATOM_ROWS, ATOM_SCALES, padded, round_up, swizzle, unswizzle
from onelaunch.operation import Bundle
from onelaunch.wording import listing

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the lower three bits of an e2m1 code; the fourth bit is the sign."""


BLOCK = 16
"""Number of neighbouring channels that share a scale."""


_SCALES = (torch.float8_e4m3fn, torch.float64)
"""Dtypes that block scales may have: as stored, and upcast for an oracle."""


@dataclass(frozen=True, eq=False)
class NVFP4Tensor(Bundle):
    """A matrix of 4-bit numbers: ``code * scale of its block * global scale``; 4.5 bits per element.

    A code times its scale has at most 6 significant bits, so bfloat16, float16 and float32 hold every such product exactly.

    Attributes:
        codes: e2m1 codes, shape ``[R, K / 2]``, uint8; channel 2 i is in the lower half of byte i.
        scales: Block scales, shape ``[R, K / 16]``, float8_e4m3fn. If ``swizzled``, R is rounded up to a multiple of 128 and
            K / 16 to a multiple of 4.
        global_scale: Scale of the matrix, float32, one element; ``None`` stands for 1.
        swizzled: Flag that the scales are in the order of cuBLAS and tcgen05: atoms of 128 rows x 4, in which rows r, r + 32,
            r + 64 and r + 96 are neighbours.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None = None
    swizzled: bool = False

    def __post_init__(self) -> None:
        self.check("codes", self.codes, "scales", self.scales, "global_scale", self.global_scale, swizzled=self.swizzled)

    @staticmethod
    def check(
        its_name: str,
        codes: torch.Tensor,
        scales_name: str,
        scales: torch.Tensor,
        global_name: str,
        global_scale: torch.Tensor | None,
        *,
        swizzled: bool,
    ) -> None:
        """Raise unless the tensors form a matrix. Messages use the caller's names of the tensors."""
        checks.tensor(its_name, codes)
        checks.tensor(scales_name, scales)
        checks.rank(its_name, codes, "[R, K / 2]")
        checks.dtype(its_name, codes, (torch.uint8,), ": two codes a byte")
        checks.dtype(scales_name, scales, _SCALES)
        checks.device(scales_name, scales, codes.device)
        rows, channels = codes.shape[0], 2 * codes.shape[1]
        if channels % BLOCK:
            want = f"[R, K / 2] with K a multiple of {BLOCK}: a payload that was cut off, or blocks of another size"
            raise ShapeError(its_name, got=codes.shape, want=want)
        want, said = (rows, channels // BLOCK), f"[R, K / {BLOCK}]"
        if swizzled:
            want, said = padded(*want), f"[R, K / {BLOCK}], each rounded up to whole atoms of {ATOM_ROWS} x {ATOM_SCALES},"
        checks.shape(scales_name, scales, want, said, f"{its_name} {list(codes.shape)}")
        if global_scale is not None:
            check_scale(global_name, global_scale, codes)
            if global_scale.numel() != 1:
                raise ShapeError(global_name, got=global_scale.shape, want="of one element")

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, ``[R, K]``."""
        return torch.Size((self.codes.shape[0], 2 * self.codes.shape[1]))

    def rows(self, start: int, stop: int | None) -> NVFP4Tensor:
        """Return rows ``start`` to ``stop`` as views; both are bounds of a Python slice.

        Swizzled scales can be cut only between atoms of 128 rows.
        """
        start, stop = bounds(start, stop, self.shape[0])
        if not self.swizzled:
            return dataclasses.replace(self, codes=self.codes[start:stop], scales=self.scales[start:stop])
        if start % ATOM_ROWS or (stop % ATOM_ROWS and stop != self.shape[0]):
            raise ArgumentError(
                f"Rows {start} to {stop} of an NVFP4Tensor with swizzled scales cut through an atom of {ATOM_ROWS} rows; "
                "take plain() of it first."
            )
        end = round_up(stop, ATOM_ROWS)
        return dataclasses.replace(self, codes=self.codes[start:stop], scales=self.scales[start:end])

    def plain(self) -> NVFP4Tensor:
        """Return the matrix with scales in plain order, ``[R, K / 16]``."""
        if not self.swizzled:
            return self
        rows, channels = self.shape
        return dataclasses.replace(self, scales=unswizzle(self.scales, rows, channels // BLOCK), swizzled=False)

    def swizzle(self) -> NVFP4Tensor:
        """Return the matrix with scales in the swizzled order, padded with zeros."""
        return self if self.swizzled else dataclasses.replace(self, scales=swizzle(self.scales), swizzled=True)

    def decode(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return ``code * scale``, ``[R, K]``, without the global scale; exact in any floating-point dtype of 16 bits or more."""
        wide = torch.promote_types(torch.float32, dtype)
        scales = self.plain().scales.to(wide)
        return (_values_of(self.codes, wide).unflatten(1, (-1, BLOCK)) * scales[:, :, None]).flatten(1).to(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the matrix ``[R, K]`` with the global scale, rounded to float32 (or float64) and then to ``dtype``."""
        exact = self.decode(torch.promote_types(torch.float32, dtype))
        return (exact if self.global_scale is None else exact * self.global_scale.reshape(())).to(dtype)

    def state_dict(self, layer: str) -> dict[str, torch.Tensor]:
        """Return the tensors under the names of Model Optimizer: ``LAYER.weight``, ``.weight_scale`` and ``.weight_scale_2``."""
        plain = self.plain()
        held = {f"{layer}.weight": plain.codes.contiguous(), f"{layer}.weight_scale": plain.scales.contiguous()}
        shared = plain.scales.new_ones((), dtype=torch.float32) if plain.global_scale is None else plain.global_scale
        held[f"{layer}.weight_scale_2"] = shared.reshape(()).clone()
        return held

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, torch.Tensor], layer: str) -> NVFP4Tensor:
        """Return a layer's weight from the tensors of a checkpoint.

        Two formats are known: Model Optimizer (``weight``, ``weight_scale``, ``weight_scale_2``) and compressed-tensors
        (``weight_packed``, ``weight_scale``, and ``weight_global_scale``, by which it divides instead of multiplying).

        Raises:
            CheckpointError: A tensor is missing. The message names it.
            ShapeError, DTypeError: The payload was cut off, or has another format.
        """
        packed = f"{layer}.weight_packed"
        codes = _found(tensors, packed if packed in tensors else f"{layer}.weight", layer)
        scales = _found(tensors, f"{layer}.weight_scale", layer)
        inverse = tensors.get(f"{layer}.weight_global_scale")
        shared = _found(tensors, f"{layer}.weight_scale_2", layer) if inverse is None else inverse.reciprocal()
        return cls(codes, scales, shared.reshape(()) if shared.numel() == 1 else shared)


def _found(tensors: Mapping[str, torch.Tensor], name: str, layer: str) -> torch.Tensor:
    """Return a tensor of a checkpoint; raise and list the layer's tensors if it is missing."""
    if name not in tensors:
        beside = sorted(key for key in tensors if key.startswith(f"{layer}."))
        raise CheckpointError(f"there is no {name!r}, which an NVFP4 weight needs; of this layer there are: {listing(beside)}")
    return tensors[name]


def save_nvfp4(path: Path | str, weights: Mapping[str, NVFP4Tensor]) -> None:
    """Write weights, by the names of their layers, to a safetensors file."""
    held: dict[str, torch.Tensor] = {}
    for layer, weight in weights.items():
        held |= weight.state_dict(layer)
    seen: set[int] = set()
    # Of tensors in one storage, all but the first are copied: safetensors refuses tensors that overlap, such as those of one
    # weight under two names. Tensors that do not overlap, such as different rows of a weight, are copied without need.
    for name, tensor in held.items():
        held[name] = tensor.clone() if tensor.untyped_storage().data_ptr() in seen else tensor
        seen.add(tensor.untyped_storage().data_ptr())
    writer = _safetensors()
    try:
        writer.save_file(held, str(path))
    except (OSError, writer.SafetensorError) as problem:
        raise CheckpointError(f"{path} cannot be written: {problem}") from problem


def load_nvfp4(path: Path | str, layer: str, device: torch.device | str = "cpu") -> NVFP4Tensor:
    """Return one layer's weight from a safetensors file, without reading the other layers.

    Raises:
        CheckpointError: The file is missing or damaged, or lacks a tensor.
        ShapeError, DTypeError: The tensors do not form an :class:`NVFP4Tensor`.
    """
    reader = _safetensors()
    try:
        with reader.safe_open(str(path), framework="pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys() if name.startswith(f"{layer}.")}  # noqa: SIM118
    except (OSError, reader.SafetensorError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from problem
    return NVFP4Tensor.from_state_dict(tensors, layer)


def _safetensors() -> Any:
    """Return the file functions and the error class of safetensors; raise if it is not installed."""
    try:
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import save_file
    except ImportError:
        raise CheckpointError(
            "files are read and written by safetensors, which is not installed: pip install 'onelaunch[checkpoints]'"
        ) from None
    return SimpleNamespace(safe_open=safe_open, save_file=save_file, SafetensorError=SafetensorError)


def quantize_nvfp4(
    values: torch.Tensor, *, global_scale: torch.Tensor | float | None = None, swizzled: bool = False
) -> NVFP4Tensor:
    """Return the NVFP4 matrix nearest to ``values``, with the scale of each block chosen by its squared error.

    The candidates are the scales that map the largest magnitude of a block to one of the codes. So a matrix that NVFP4 holds with
    this global scale comes back exactly, and no block has a larger error than by the usual rule, which maps the largest magnitude
    to 6. Magnitudes beyond 6 * 448 times the global scale are clamped. NaN makes its whole block NaN.

    Args:
        values: Matrix, shape ``[R, K]``, any floating-point dtype, finite or NaN; K is a multiple of 16. It is quantized from
            float32.
        global_scale: Positive scale of the matrix. Defaults to the one that maps the largest magnitude to 6 * 448, as in Model
            Optimizer.
        swizzled: Flag that the scales are returned in the swizzled order.

    Raises:
        ShapeError, DTypeError: ``values`` is no floating-point matrix of this shape. The message gives the requirement.
        ValueRangeError: ``global_scale`` is not a positive number, or ``values`` holds infinities. For tensors on a GPU this is
            checked only with ``ONELAUNCH_CHECK_VALUES=1``.
    """
    wide = matrix(values)
    channels = wide.shape[1]
    if channels % BLOCK:
        raise ShapeError("values", got=values.shape, want=f"[R, K] with K a multiple of {BLOCK}; pad it with zeros")
    shared = _global_scale(global_scale, wide)
    end = E2M1[-1] * LARGEST_SCALE
    blocks = (wide / shared).clamp(-end, end).unflatten(1, (-1, BLOCK))  # [R, K / 16, 16]
    largest = blocks.abs().amax(2)  # NaN if any element of the block is
    best_error = torch.full_like(largest, torch.inf)
    best_scale, best_codes = torch.zeros_like(largest), torch.zeros(blocks.shape, dtype=torch.uint8, device=wide.device)
    for code in reversed(E2M1[1:]):
        scale = (largest / code).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn).float()
        codes = _nearest_codes(torch.where(scale[..., None] == 0, 0.0, blocks / scale[..., None]))
        error = ((_value(codes, torch.float32) * scale[..., None] - blocks) ** 2).sum(2)
        better = (error < best_error) | error.isnan()  # a block with NaN gets its scale, NaN, from any candidate
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_codes = torch.where(better[..., None], codes, best_codes)
    low, high = best_codes.flatten(1).unflatten(1, (-1, 2)).unbind(2)
    made = NVFP4Tensor(low | (high << 4), best_scale.to(torch.float8_e4m3fn), shared)
    return made.swizzle() if swizzled else made


def dequantize_nvfp4(tensor: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the matrix ``[R, K]`` in ``dtype``; see :meth:`NVFP4Tensor.dequantize`."""
    return tensor.dequantize(dtype)


def _global_scale(given: torch.Tensor | float | None, values: torch.Tensor) -> torch.Tensor:
    """Return the given global scale, checked, or the one that maps the largest magnitude to 6 * 448; a float32 scalar."""
    if given is None:
        largest = values.nan_to_num(0.0).abs().amax() if values.numel() else values.new_zeros(())
        return torch.where(largest > 0, (largest / (E2M1[-1] * LARGEST_SCALE)).clamp(min=LEAST), torch.ones_like(largest))
    scale = torch.as_tensor(given, dtype=torch.float32, device=values.device).reshape(())
    if checks.values_are_checked(scale) and not bool((scale > 0) & scale.isfinite()):
        raise ValueRangeError("global_scale", got=f"is {float(scale):g}", want="it is a positive number that divides all values")
    return scale


def _nearest_codes(values: torch.Tensor) -> torch.Tensor:
    """Return the codes of the nearest numbers of :data:`E2M1`, ties to the even code; magnitudes beyond 6 become 6."""
    size = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for code, (below, above) in enumerate(itertools.pairwise(E2M1)):
        middle = (below + above) / 2
        codes += (size >= middle) if code % 2 else (size > middle)
    return codes | (values.signbit().to(torch.uint8) << 3)


def _value(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the number that each code stands for, -0 included.

    The bits are computed, because a table would be copied from the host, which CUDA graphs do not allow.
    """
    whole = codes.to(torch.int32)
    exponent, half = whole >> 1 & 3, whole & 1
    size = torch.where(exponent > 0, exponent + 126 << 23 | half << 22, half * (126 << 23))  # the bits of a float32
    return (size | whole >> 3 << 31).view(torch.float32).to(dtype)


def _values_of(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers ``[R, K]`` of packed codes ``[R, K / 2]``."""
    return _value(torch.stack((packed & 15, packed >> 4), 2).flatten(1), dtype)
