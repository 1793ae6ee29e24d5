"""Tensor maps: descriptors by which the TMA unit of Hopper and later GPUs addresses a tensor."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch

from onelaunch.cuda.driver import library, make_context_current
from onelaunch.errors import DriverError
from onelaunch.wording import listing

MAP_BYTES = 128
"""Size of a tensor map."""


_ELEMENTS = {  # as cuda.h numbers them
    torch.uint8: 0,
    torch.float8_e4m3fn: 0,
    torch.int32: 3,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}


_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


_PROMOTE_256 = 3


_ALIGNMENT = 16


_MOST_BOX = 256


def tensor_map(
    dtype: torch.dtype,
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    swizzle: Literal[0, 32, 64, 128] = 128,
) -> bytes:
    """Return a descriptor by which TMA moves boxes of a tensor of 2 to 5 dimensions; elements outside read as zero.

    It holds the address and keeps nothing alive. Making one costs some microseconds: keep it as long as the tensor stays.

    Args:
        dtype: float16, bfloat16, float32, int32, uint8 or float8_e4m3fn.
        address: of the first element, such as ``tensor.data_ptr()``.
        sizes: elements of each dimension, innermost first.
        strides: bytes from one index to the next of each dimension but the innermost, whose elements lie side by side.
        box: elements of each dimension that one copy moves.
        swizzle: bytes over which 16-byte pieces are permuted in shared memory; a box is at most as wide. 0 for none.

    Raises:
        ValueError: something that TMA cannot address; says what.
        DriverError: the driver refused the rest.
    """
    if problem := _unaddressable(dtype, address, sizes, strides, box, swizzle):
        raise ValueError(f"The copy engine cannot address this tensor: {problem}.")
    make_context_current()
    rank = len(sizes)
    buffer = ctypes.create_string_buffer(2 * MAP_BYTES)
    # by ctypes: cuda-bindings keeps the descriptor where Python puts objects, and the driver wants it aligned
    at = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % MAP_BYTES
    error = _encode()(
        at,
        _ELEMENTS[dtype],
        rank,
        address,
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        _SWIZZLES[swizzle],
        _PROMOTE_256,
        0,  # zeros outside
    )
    if error:
        from cuda.bindings import driver

        about = f"sizes {tuple(sizes)}, strides {tuple(strides)}, box {tuple(box)} of {dtype}"
        raise DriverError("cuTensorMapEncodeTiled", got=driver.CUresult(error).name, about=about)
    return ctypes.string_at(at, MAP_BYTES)


def _unaddressable(
    dtype: torch.dtype, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
) -> str | None:
    """Return what TMA does not take, or ``None``."""
    rank = len(sizes)
    if dtype not in _ELEMENTS:
        return f"dtype is {dtype}; it must be one of {listing(str(known).removeprefix('torch.') for known in _ELEMENTS)}"
    if not 2 <= rank <= 5 or len(strides) != rank - 1 or len(box) != rank:
        return f"it has {rank} sizes, {len(strides)} strides and {len(box)} sides of a box; 2 to 5, one fewer, as many are wanted"
    if address % _ALIGNMENT:
        return f"its address {address:#x} must be a multiple of {_ALIGNMENT}"
    if any(stride % _ALIGNMENT or not 0 < stride < 1 << 40 for stride in strides):
        return f"strides are {tuple(strides)} bytes; each must be a positive multiple of {_ALIGNMENT} below 2^40"
    if not all(0 < size <= 1 << 32 for size in sizes):
        return f"sizes are {tuple(sizes)}; each must be 1 to 2^32"
    if not all(0 < side <= _MOST_BOX for side in box):
        return f"the box is {tuple(box)}; each side must be 1 to {_MOST_BOX}"
    if swizzle not in _SWIZZLES:
        return f"the swizzle is {swizzle}; it must be one of {listing(map(str, _SWIZZLES))}"
    width = box[0] * dtype.itemsize
    if width % _ALIGNMENT or 0 < swizzle < width:
        most = f", at most the swizzle's {swizzle}" if swizzle else ""
        return f"the box is {width} bytes wide; it must be a multiple of {_ALIGNMENT}{most}"
    return None


@functools.cache
def _encode() -> Any:
    function = library().cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    return function
