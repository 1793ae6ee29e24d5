"""Emulation of the matrix units of an NVIDIA GPU in Triton's interpreter and in PyTorch's products, for tests of TF32.

In the interpreter TF32 operands lose the bits that such units drop, and bfloat16 is multiplied as such. :class:`RoundedProducts`
rounds the operands of PyTorch's matrix products on a CPU to the nearest TF32.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.kernels.gemm import choice
from onelaunch.ops.gla import launch


class Emulation:
    """Counts of the interpreter's products by the dtype of their operands and the form of float32 ones."""

    def __init__(self) -> None:
        self.products: Counter[tuple[str, str]] = Counter()

    def forms(self) -> set[str]:
        """Return the forms of float32 products since the last call."""
        found = {form for dtype, form in self.products if dtype == "fp32"}
        self.products.clear()
        return found


def emulate_tf32(monkeypatch: pytest.MonkeyPatch) -> Emulation:
    """Interpret kernels as if the CPU were an NVIDIA GPU with matrix units for TF32."""
    import triton.language as tl
    from triton.runtime import interpreter

    emulation = Emulation()

    def numbers(operand: Any, form: str) -> Any:
        if operand.dtype.scalar == tl.bfloat16:  # the interpreter keeps its bits as integers
            return (operand.data.astype(np.uint32) << 16).view(np.float32)
        if operand.dtype.scalar == tl.float32 and form == "TF32":
            return (np.ascontiguousarray(operand.data).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return operand.data

    def create_dot(_: Any, a: Any, b: Any, d: Any, input_precision: Any, __: Any) -> Any:
        form = input_precision.name
        emulation.products[str(a.dtype.scalar), form] += 1
        product = np.matmul(numbers(a, form), numbers(b, form), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def get_bf16(_: Any, value: float) -> Any:
        bits = (np.array([value], np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return interpreter.TensorHandle(bits, tl.bfloat16)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "get_bf16", get_bf16, raising=False)
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(choice, "interpreting", lambda: False)
    monkeypatch.setattr(choice, "compute_capability", lambda _: 9)
    return emulation


class RoundedProducts(TorchDispatchMode):
    """Mode in which PyTorch's matrix products of float32 have operands of TF32, rounded to nearest; others are as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        """Products so far."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if function.overloadpacket in (aten.mm, aten.bmm):
            self.count += 1
            args = tuple(map(nearest_tf32, args))
        assert function.overloadpacket not in (aten.addmm, aten.baddbmm, aten.mv, aten.dot), "a product that is not rounded"
        return function(*args, **(kwargs or {}))


def nearest_tf32(x: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers rounded to the nearest of 11 significant bits, halves to even."""
    assert x.dtype is torch.float32
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)
