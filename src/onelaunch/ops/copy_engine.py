"""Tensors as the copy engine of Hopper and later GPUs addresses them."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

from onelaunch import nvrtc
from onelaunch.hardware import HOPPER_SHARED_BYTES

ALIGNMENT = 16
"""Bytes: what the copy engine asks of addresses and strides."""

ROW_BYTES: Final = 128
"""Of a row of a tile in shared memory: what it swizzles over, and a product of warpgroups reads."""

SHARED_BYTES = HOPPER_SHARED_BYTES - 1024
"""Of a program on Hopper, less what it may cost that stages begin at multiples of 1024."""

COPIED_BYTES = 96e3
FLOPS = 8e8 / 132
"""In a microsecond by a processor of an H200, all at work: brought to shared memory, and products of 16-bit numbers. Fitted to
single runs of swiglu's kernel."""

tensor_map = functools.lru_cache(maxsize=4096)(nvrtc.tensor_map)
"""Kept: the same tensors come again."""


def addressable(tensor: torch.Tensor) -> torch.Tensor:
    """``[rows, columns]`` itself, or a copy where its strides or address do not suit the copy engine."""
    apart = tensor.stride(0) >= tensor.shape[1]  # rows that are one and the same are not
    aligned = apart and tensor.stride(1) == 1 and tensor.stride(0) * tensor.element_size() % ALIGNMENT == 0
    return tensor if aligned and tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone(memory_format=torch.contiguous_format)


@functools.cache
def shared_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """How the copy engine lays a box of ``[rows, columns]`` into shared memory."""
    from onelaunch.ops.gluon_compat import gl

    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def described(tensor: torch.Tensor, box: list[int]) -> Any:
    """A descriptor of ``[rows, columns]`` from which the copy engine moves boxes into shared memory."""
    from onelaunch.ops.gluon_compat import TensorDescriptor

    nvrtc.make_context_current()  # Triton makes the tensor map before it looks for a context
    return TensorDescriptor.from_tensor(tensor, box, shared_layout(*box, tensor.dtype))


def descriptor_type(box: list[int], dtype: torch.dtype) -> str:
    """The type of such a descriptor in a kernel's signature."""
    name = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    return f"tensordesc<{name}{box},{shared_layout(*box, dtype)!r}>"
