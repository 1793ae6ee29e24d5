"""Tensors as TMA addresses them in Gluon kernels: descriptors of matrices, and their types in a kernel's signature."""

from __future__ import annotations

import functools
from typing import Any

import torch

from onelaunch import cuda


@functools.cache
def shared_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """Return the layout in shared memory of a box of ``[rows, columns]`` that TMA loads."""
    from onelaunch.kernels.gluon.compat import gl

    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def described(tensor: torch.Tensor, box: list[int]) -> Any:
    """Return a descriptor of ``[rows, columns]`` from which TMA loads boxes into shared memory."""
    from onelaunch.kernels.gluon.compat import TensorDescriptor

    cuda.make_context_current()  # Triton makes the tensor map before it looks for a context
    return TensorDescriptor.from_tensor(tensor, box, shared_layout(*box, tensor.dtype))


def descriptor_type(box: list[int], dtype: torch.dtype) -> str:
    """Return the type of such a descriptor in a kernel's signature."""
    name = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    return f"tensordesc<{name}{box},{shared_layout(*box, dtype)!r}>"
