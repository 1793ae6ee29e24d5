"""Tensor maps, alignment and descriptors for TMA, the bulk-copy unit of Hopper and later GPUs.

CUDA C++ kernels get a tensor map (``CUtensorMap``) as bytes, and Gluon kernels get Triton's descriptor, which contains one.
While launches are imitated (``launch/imitation.py``), tensors are fake: they have shapes and strides, but no address, and no
kernel runs. If such launches are recorded too, the inspector compiles kernels from their arguments, so these must have the right
types. ``launch_hopper.py`` of the operations and ``gemm_sm90/kernel.py`` call it. The configurations of the Hopper matrix product
(``gemm_sm90/config.py``, ``ops/projections/configure_hopper.py``) take :data:`ROW_BYTES`.
"""

from __future__ import annotations

import functools
from typing import Any, Final, Literal

import torch

from onelaunch import cuda
from onelaunch.cuda.tensor_maps import MAP_BYTES
from onelaunch.launch.imitation import imitated, recorded
from onelaunch.launch.recording import recorder

ALIGNMENT = 16
"""Bytes of which TMA requires addresses and strides to be multiples."""

ROW_BYTES: Final = 128
"""Bytes of a row of a WGMMA operand in shared memory, which is the width of the 128-byte swizzle."""

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
    """Return a tensor map made by :func:`onelaunch.cuda.tensor_map`, cached because calls often repeat the same tensors.

    While launches are imitated, the map is all zeros: there may be no driver that makes one, and no kernel reads it. A recorder
    also gets a function that encodes the map for another address, since a replay has other tensors.
    """
    if imitated():
        return bytes(MAP_BYTES)
    found = _tensor_map(dtype, address, sizes, strides, box, swizzle=swizzle)
    if (active := recorder()) is not None:
        active.encoded(found, lambda other: _tensor_map(dtype, other, sizes, strides, box, swizzle=swizzle))
    return found


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element in bytes; while launches are imitated, its offset in its storage.

    The offset decides alignment as the address does, since PyTorch aligns the storage itself to more than :data:`ALIGNMENT`.
    """
    return int(tensor.storage_offset()) * tensor.element_size() if imitated() else tensor.data_ptr()


def distance(first: torch.Tensor, second: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to that of a second one. They may decide what is launched."""
    if (active := recorder()) is not None:
        active.depends_on_distance(first, second)
    return address(second) - address(first)


def addressable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a matrix or a tensor of more dimensions, copied if TMA cannot address its strides or its first element.

    Elements may not share memory, as expanded ones do: each dimension must step over the next one.
    """
    outer = range(tensor.dim() - 1)
    disjoint = all(tensor.stride(i) >= tensor.stride(i + 1) * tensor.shape[i + 1] for i in outer)
    aligned = all(tensor.stride(i) * tensor.element_size() % ALIGNMENT == 0 for i in outer) and address(tensor) % ALIGNMENT == 0
    usable = disjoint and aligned and tensor.stride(-1) == 1
    # A copy by contiguous() would leave a contiguous tensor at its misaligned address.
    return tensor if usable else tensor.clone(memory_format=torch.contiguous_format)


@functools.cache
def shared_layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return the Gluon layout in which TMA writes a box to shared memory."""
    from onelaunch.kernels.gluon.compat import gl

    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(box), element)


def described(tensor: torch.Tensor, box: list[int]) -> Any:
    """Return a Gluon tensor descriptor for TMA copies of boxes of this size, which has one number per dimension.

    While launches are imitated but not recorded, nobody reads the argument, and the tensor itself is returned.
    """
    from onelaunch.kernels.gluon.compat import TensorDescriptor

    if imitated():
        return TensorDescriptor.from_tensor(tensor, box, shared_layout(tuple(box), tensor.dtype)) if recorded() else tensor
    cuda.make_context_current()  # Triton encodes the tensor map before it looks for a current context
    return TensorDescriptor.from_tensor(tensor, box, shared_layout(tuple(box), tensor.dtype))
