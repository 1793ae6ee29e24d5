"""Encode tensor maps: the descriptors with which TMA (Hopper and later) addresses a tensor.

``kernels/tma.py`` calls :func:`tensor_map` for the launch code of the Hopper matrix product. It, ``module.py`` and the replay of
recorded launches (``onelaunch.launch``) take the size of a map from here.
"""

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
"""Size of a tensor map in bytes. Buffers for one are aligned to it."""

_ELEMENTS = {  # values of CUtensorMapDataType in cuda.h
    torch.uint8: 0,
    torch.float8_e4m3fn: 0,  # copied as bytes: the enumeration has no float8
    torch.int32: 3,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}

_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""Values of CUtensorMapSwizzle in cuda.h, by swizzle width in bytes."""

_PROMOTE_256 = 3
"""Value of CU_TENSOR_MAP_L2_PROMOTION_L2_256B."""

_ALIGNMENT = 16
"""Alignment of the address, the strides and the width of a box, in bytes."""

_MOST_BOX = 256
"""Largest number of elements along a side of a box."""


def tensor_map(
    dtype: torch.dtype,
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    swizzle: Literal[0, 32, 64, 128] = 128,
) -> bytes:
    """Return a tensor map with which TMA copies boxes of a tensor of 2 to 5 dimensions. Elements outside the tensor read as zero.

    The map holds the address and does not keep the memory alive. Encoding one takes some microseconds, so keep it while the
    tensor stays at its address.

    Args:
        dtype: Element type: float16, bfloat16, float32, int32, uint8 or float8_e4m3fn.
        address: Address of the first element, such as ``tensor.data_ptr()``.
        sizes: Number of elements along each dimension, innermost first.
        strides: Stride of each dimension in bytes, without the innermost dimension, which is contiguous.
        box: Number of elements along each dimension that one copy moves.
        swizzle: Swizzle width in bytes, over which 16-byte pieces are permuted in shared memory; 0 for none. The box is at most
            this wide.

    Raises:
        ValueError: TMA cannot address this tensor; the message says why.
        DriverError: The driver refused the map for another reason.
    """
    if problem := _unaddressable(dtype, address, sizes, strides, box, swizzle):
        raise ValueError(f"TMA cannot address this tensor: {problem}.")
    make_context_current()
    rank = len(sizes)
    buffer = ctypes.create_string_buffer(2 * MAP_BYTES)
    # Called by ctypes: the driver wants an aligned descriptor, and cuda-bindings stores it wherever Python allocates it.
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
        0,  # no interleaving
        _SWIZZLES[swizzle],
        _PROMOTE_256,
        0,  # fill elements outside with zeros
    )
    if error:
        from cuda.bindings import driver

        about = f"sizes {tuple(sizes)}, strides {tuple(strides)}, box {tuple(box)} of {dtype}"
        raise DriverError("cuTensorMapEncodeTiled", got=driver.CUresult(error).name, about=about)
    return ctypes.string_at(at, MAP_BYTES)


def _unaddressable(
    dtype: torch.dtype, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
) -> str | None:
    """Return why TMA cannot address the tensor, or ``None`` if it can."""
    rank = len(sizes)
    if dtype not in _ELEMENTS:
        return f"dtype is {dtype}; it must be one of {listing(str(known).removeprefix('torch.') for known in _ELEMENTS)}"
    if not 2 <= rank <= 5 or len(strides) != rank - 1 or len(box) != rank:
        return (
            f"it has {rank} sizes, {len(strides)} strides and {len(box)} box sides; there must be 2 to 5 sizes, one stride fewer "
            "than sizes, and as many box sides as sizes"
        )
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
    """Return the driver's ``cuTensorMapEncodeTiled`` with its argument types declared."""
    function = library().cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    return function
