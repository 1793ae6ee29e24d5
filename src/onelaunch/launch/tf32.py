"""Setting of PyTorch that lets float32 matrix products on NVIDIA GPUs round their operands to TF32.

TF32 keeps the exponent of a float32 and 11 of its 24 significant bits. ``facts.py`` makes the setting a part of the keys of
plans, and ``kernels/gemm/choice.py`` chooses the form of float32 products of portable kernels by it. An operator in compiled
code reads it when it runs, and Dynamo guards it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def _public_reader() -> str:
    return str(torch.backends.cuda.matmul.fp32_precision)


_getter = getattr(torch._C, "_get_fp32_precision_getter", None)  # noqa: SLF001 - the public attribute takes eight times as long
float32_precision: Callable[[], str] = _public_reader if _getter is None else functools.partial(_getter, "cuda", "matmul")
"""Function that returns ``torch.backends.cuda.matmul.fp32_precision``: ``"tf32"``, ``"ieee"``, or ``"none"``, which is as ieee.

PyTorch's own products on NVIDIA GPUs decide by this value. ``torch.set_float32_matmul_precision`` ("high" and "medium" give tf32)
and ``torch.backends.cuda.matmul.allow_tf32`` set it too, and it takes the value of ``torch.backends.fp32_precision`` while it has
none of its own. The older ``torch.get_float32_matmul_precision`` and ``allow_tf32`` raise if they are read after
``fp32_precision`` was set.
"""


def allows_tf32() -> bool:
    """Return whether PyTorch's settings let float32 products on NVIDIA GPUs use TF32."""
    return float32_precision() == "tf32"
