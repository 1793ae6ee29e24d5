"""Variants of ``swiglu`` in plain PyTorch, which run on every device.

Quantized operands are multiplied in float32, which holds codes and block scales exactly. Scales of rows and of whole tensors are
applied to the product. :func:`multiply`, which multiplies float8 natively, is for variants in other files and for the control in
reference.py. Those with kernels of their own take :func:`trains_plain_tensors` as a predicate.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, and
``hands`` the products that go through device memory; ``cost.py`` reads them. ``yardstick`` marks the PyTorch baseline, whose
error sets the tolerance, and ``maker`` says who made the code. Other keywords are capabilities, which the class ``Capabilities``
of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from onelaunch.dispatch.capture import compile_static, compiler_missing
from onelaunch.formats import Fp8Tensor
from onelaunch.operation import Query
from onelaunch.ops.swiglu.contract import FORMATS, Operand, SwigluCall, swiglu


def _factors(operand: Operand) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return an operand in float32, exactly, without the scale of its rows or of the whole; and that scale, or None.

    The scale has the shape ``[R, 1]`` or ``[1, 1]``. Block scales of NVFP4 are in the first result.
    """
    if isinstance(operand, torch.Tensor):
        return operand.float(), None
    if isinstance(operand, Fp8Tensor):
        return operand.values.float(), operand.scale.reshape(-1, 1)
    shared = operand.global_scale
    return operand.decode(torch.float32), None if shared is None else shared.reshape(1, 1)


def _product(x: Operand, weight: Operand, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x weight^T``, ``[M, N]``, in ``dtype``; but in float32 for quantized operands if ``dtype`` is float16.

    A product of quantized operands may be beyond float16.
    """
    if isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor):
        return x @ weight.mT
    (rows, row_scale), (columns, column_scale) = _factors(x), _factors(weight)
    found = rows @ columns.mT
    found = found if row_scale is None else found * row_scale
    found = found if column_scale is None else found * column_scale.mT
    return found if dtype is torch.float16 else found.to(dtype)


def multiply(x: Operand, weight: Operand, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x weight^T`` by PyTorch's matrix products, natively in float8 if both operands are. NVFP4 is not supported."""
    if isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor):
        return x @ weight.mT
    assert isinstance(x, Fp8Tensor)  # noqa: S101 - see plain_or_float8 in triton.py
    assert isinstance(weight, Fp8Tensor)  # noqa: S101
    x_scale, scale = x.scale.reshape(-1, 1), weight.scale.reshape(-1, 1)
    if x.per_row or weight.per_row:  # PyTorch needs the same kind of scales for both
        x_scale, scale = x_scale.expand(x.shape[0], 1).contiguous(), scale.expand(weight.shape[0], 1).contiguous()
    else:
        x_scale, scale = x_scale.reshape(()), scale.reshape(())
    right_scale = scale.mT if scale.dim() else scale
    rows, columns = x.values.contiguous(), weight.values.contiguous()  # cuBLAS needs both contiguous
    return torch._scaled_mm(rows, columns.mT, x_scale, right_scale, out_dtype=dtype)  # noqa: SLF001 - has no other name


@swiglu.variant("eager", launches=None, fuses=(), hands=("gate", "up"), maker="pytorch", yardstick=True)
def eager(call: SwigluCall) -> tuple[torch.Tensor]:
    """Run two matrix products, SiLU and an elementwise product in eager PyTorch: the baseline that sets the tolerance."""
    return _gated(call.x, call.w_gate, call.w_up, call.dtype)


@swiglu.variant("compiled", launches=None, recompiles=True, fuses=("gate",), hands=("gate", "up"), maker="pytorch")
def compiled(call: SwigluCall) -> tuple[torch.Tensor]:
    """Run ``eager`` compiled by ``torch.compile``."""
    return compile_static(_gated)(call.x, call.w_gate, call.w_up, call.dtype)


compiled.supports(compiler_missing)


@eager.supports
@compiled.supports
def trains_plain_tensors(query: Query) -> str | None:
    """Return why a variant cannot run: the call needs gradients, and its operands are quantized."""
    return "has no backward pass for quantized operands" if query.grad and set(query.flags) & set(FORMATS.values()) else None


def _gated(x: Operand, w_gate: Operand, w_up: Operand, dtype: torch.dtype) -> tuple[torch.Tensor]:
    """Compute h in plain PyTorch."""
    return ((F.silu(_product(x, w_gate, dtype)) * _product(x, w_up, dtype)).to(dtype),)
