"""Tensors as the TMA unit of Hopper and later GPUs addresses them."""

from __future__ import annotations

import functools
from typing import Any, Final, Literal

import torch

from onelaunch import cuda
from onelaunch.cuda.tensor_maps import MAP_BYTES
from onelaunch.launch.imitation import imitated, recorded

ALIGNMENT = 16
"""Bytes of which TMA wants addresses and strides to be multiples."""

ROW_BYTES: Final = 128
"""Bytes of a row of an operand in shared memory: the width of the swizzle, and what WGMMA reads."""

_tensor_map = functools.lru_cache(maxsize=4096)(cuda.tensor_map)


def tensor_map(
    dtype: torch.dtype,
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzle: Literal[0, 32, 64, 128] = 128,
) -> bytes:
    """Return a tensor map, as :func:`onelaunch.cuda.tensor_map` makes it. They are cached, since the same tensors come again.

    While launches are imitated there is no driver to make one, and it is empty.
    """
    return bytes(MAP_BYTES) if imitated() else _tensor_map(dtype, address, sizes, strides, box, swizzle=swizzle)


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element; for a fake tensor its place in its storage, which begins at 0."""
    return int(tensor.storage_offset()) * tensor.element_size() if imitated() else tensor.data_ptr()


def addressable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a matrix ``[rows, columns]``, copied where TMA cannot address its strides or its beginning."""
    apart = tensor.stride(0) >= tensor.shape[1]  # rows that are one and the same are not
    aligned = apart and tensor.stride(1) == 1 and tensor.stride(0) * tensor.element_size() % ALIGNMENT == 0
    return tensor if aligned and address(tensor) % ALIGNMENT == 0 else tensor.clone(memory_format=torch.contiguous_format)


@functools.cache
def shared_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """Return the layout in which TMA writes a box of ``[rows, columns]`` to shared memory."""
    from onelaunch.kernels.gluon.compat import gl

    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def described(tensor: torch.Tensor, box: list[int]) -> Any:
    """Return a descriptor of a matrix ``[rows, columns]``, from which TMA moves boxes into shared memory."""
    from onelaunch.kernels.gluon.compat import TensorDescriptor

    if imitated():
        return TensorDescriptor.from_tensor(tensor, box, shared_layout(*box, tensor.dtype)) if recorded() else tensor
    cuda.make_context_current()  # Triton makes the tensor map before it looks for a context
    return TensorDescriptor.from_tensor(tensor, box, shared_layout(*box, tensor.dtype))
