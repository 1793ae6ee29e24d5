"""Variants of ``swiglu`` in plain PyTorch: they run everywhere.

Quantized operands are multiplied in float32, which holds their products exactly; scales of rows and of whole tensors come after.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from onelaunch.dispatch.capture import compile_static, compiler_missing
from onelaunch.formats import Fp8Tensor
from onelaunch.operation import Query
from onelaunch.ops.swiglu.contract import FORMATS, Operand, SwigluCall, swiglu

Results = tuple[torch.Tensor]


def factors(operand: Operand) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A matrix in float32 that holds codes and block scales exactly, and what its rows are still to be multiplied with
    (``[R, 1]``, ``[1, 1]`` or nothing).
    """
    if isinstance(operand, torch.Tensor):
        return operand.float(), None
    if isinstance(operand, Fp8Tensor):
        return operand.values.float(), operand.scale.reshape(-1, 1)
    shared = operand.global_scale
    return operand.decode(torch.float32), None if shared is None else shared.reshape(1, 1)


def product(x: Operand, weight: Operand, dtype: torch.dtype) -> torch.Tensor:
    """``x weight^T`` ``[M, N]`` in ``dtype``; of quantized operands in float32 where float16 might not hold it."""
    if isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor):
        return x @ weight.mT
    (rows, row_scale), (columns, column_scale) = factors(x), factors(weight)
    found = rows @ columns.mT
    found = found if row_scale is None else found * row_scale
    found = found if column_scale is None else found * column_scale.mT
    return found if dtype is torch.float16 else found.to(dtype)


@swiglu.variant("eager", launches=None, fuses=(), hands=("gate", "up"), maker="pytorch", yardstick=True)
def eager(call: SwigluCall) -> Results:
    """Two products, SiLU and a product of elements, one after another: what the other variants are measured against."""
    return _gated(call.x, call.w_gate, call.w_up, call.dtype)


@swiglu.variant("compiled", launches=None, fuses=("gate",), hands=("gate", "up"), maker="pytorch")
def compiled(call: SwigluCall) -> Results:
    """torch.compile of the same."""
    return compile_static(_gated)(call.x, call.w_gate, call.w_up, call.dtype)


compiled.supports(compiler_missing)


@eager.supports
@compiled.supports
def trains_plain_tensors(query: Query) -> str | None:
    """Quantized operands take no gradients."""
    return "has no backward pass for quantized operands" if query.grad and set(query.flags) & set(FORMATS.values()) else None


def _gated(x: Operand, w_gate: Operand, w_up: Operand, dtype: torch.dtype) -> Results:
    return ((F.silu(product(x, w_gate, dtype)) * product(x, w_up, dtype)).to(dtype),)
