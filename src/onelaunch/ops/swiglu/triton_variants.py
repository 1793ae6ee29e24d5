"""Variants of ``swiglu`` whose matrix products are PyTorch's and whose gate is a kernel of ours: the rivals of one launch.

The backward pass keeps both products and makes one matrix ``[M, 2 N]`` of their gradients. Two matrix products follow it in
``wide``, four and a sum of two in ``three_node``.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.formats import Fp8Tensor
from onelaunch.launch.build import KernelBuild
from onelaunch.launch.operator import Operator
from onelaunch.operation import Query
from onelaunch.operation.requirements import cannot_launch
from onelaunch.ops.swiglu.contract import Operand, SwigluCall, swiglu
from onelaunch.ops.swiglu.torch_variants import Results, trains_plain_tensors

LARGEST_GRID = 2**31 - 1
"""Programs of a launch."""


def run_gate(both: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """``silu(gate) * up``; without ``up``, the gate and up are the halves of ``both [M, 2 N]``."""
    from onelaunch.ops.swiglu import launch

    gate, up = both.chunk(2, 1) if up is None else (both, up)
    return launch.gate(gate, up)


def run_gate_backward(dh: torch.Tensor, both: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """The gradients of gate and up, side by side ``[M, 2 N]``."""
    from onelaunch.ops.swiglu import launch

    gate, up = both.chunk(2, 1) if up is None else (both, up)
    return launch.gate_backward(dh, gate, up)


def fake_gate(both: Any, up: Any) -> torch.Tensor:
    """Room for the result of :func:`run_gate`."""
    rows, columns = both.shape
    return both.new_empty((rows, columns // 2 if up is None else columns))


def fake_gate_backward(dh: Any, both: Any, up: Any) -> torch.Tensor:
    """Room for the result of :func:`run_gate_backward`."""
    return both.new_empty((both.shape[0], 2 * dh.shape[1]))


def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Both products."""
    ctx.save_for_backward(*inputs)


def gradients(ctx: Any, backward: Any, dh: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Of both products: one matrix, or its halves."""
    both, up = ctx.saved_tensors
    found = backward(dh, both, up)
    return (found, None) if up is None else tuple(found.chunk(2, 1))


gate_backward = Operator("swiglu_gate_backward", run_gate_backward, fake=fake_gate_backward)
gate = Operator("swiglu_gate", run_gate, fake=fake_gate, save=save, gradients=gradients, backward=gate_backward)


def multiply(x: Operand, weight: Operand, dtype: torch.dtype) -> torch.Tensor:
    """``x weight^T`` by PyTorch's matrix products, in float8 where both are."""
    if isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor):
        return x @ weight.mT
    assert isinstance(x, Fp8Tensor)  # noqa: S101 - see plain_or_float8
    assert isinstance(weight, Fp8Tensor)  # noqa: S101
    x_scale, scale = x.scale.reshape(-1, 1), weight.scale.reshape(-1, 1)
    if x.per_row or weight.per_row:  # one kind of scales for both
        x_scale, scale = x_scale.expand(x.shape[0], 1).contiguous(), scale.expand(weight.shape[0], 1).contiguous()
    else:
        x_scale, scale = x_scale.reshape(()), scale.reshape(())
    right_scale = scale.mT if scale.dim() else scale
    rows, columns = x.values.contiguous(), weight.values.contiguous()  # as cuBLAS takes them
    return torch._scaled_mm(rows, columns.mT, x_scale, right_scale, out_dtype=dtype)  # noqa: SLF001 - has no other name


@swiglu.variant("three_node", launches=3, backward_launches=6, fuses=(), hands=("gate", "up"), gemm="cublas")
def three_node(call: SwigluCall) -> Results:
    """Two matrix products by PyTorch and one kernel for the gate: the write-up's baseline, which studies replay as a graph."""
    products = (multiply(call.x, weight, call.dtype) for weight in (call.w_gate, call.w_up))
    return (gate(*products, grad=call.query().grad),)


@swiglu.variant("wide", launches=2, backward_launches=3, fuses=("products",), hands=("gate", "up"), gemm="cublas")
def wide(call: SwigluCall) -> Results:
    """One matrix product with stacked weights by PyTorch, and one kernel for the gate."""
    assert call.stacked is not None  # noqa: S101 - see stacked_weights
    return (gate(multiply(call.x, call.stacked, call.dtype), None, grad=call.query().grad),)


@three_node.supports
@wide.supports
def needs_triton(query: Query) -> str | None:
    """The gate is a kernel."""
    if (reason := cannot_launch(query)) is not None:
        return reason
    from onelaunch.ops.swiglu.launch import columns_at_once

    columns = columns_at_once(query.sizes[1])
    if query.sizes[0] * -(-query.sizes[1] // columns) > LARGEST_GRID:
        return f"takes at most {LARGEST_GRID} pieces of rows of {columns} columns: a launch is no wider"
    return None


three_node.supports(trains_plain_tensors)
wide.supports(trains_plain_tensors)


@three_node.supports
@wide.supports
def plain_or_float8(query: Query) -> str | None:
    """What PyTorch multiplies."""
    if "nvfp4" in query.flags or "nvfp4_weights" in query.flags:
        return "takes no NVFP4 operands: PyTorch has no product of them on every GPU"
    if "fp8" in query.flags and query.device_type == "cuda" and torch.cuda.get_device_capability(query.device) < (8, 9):
        return "needs a GPU with float8 matrix units"
    if "fp8" in query.flags and query.dtype is torch.float16:
        return "gives no float16 of float8: a product before the gate may be beyond it"
    if "row_scales" in query.flags and query.dtype is not torch.bfloat16:
        return "gives bfloat16 alone where rows have scales, as PyTorch does"
    return None


@wide.supports
def stacked_weights(query: Query) -> str | None:
    """One product needs one matrix."""
    return None if "stacked" in query.flags else "needs stacked weights: w_gate [2 N, K] and no w_up"


def build(name: str, kernel: Any) -> KernelBuild:
    """A kernel as a call in bfloat16 launches it."""
    from onelaunch.ops.swiglu import launch

    constants = {"BC": launch.columns_at_once(4096)}
    special = {"BC": "constexpr", "columns": "i32:16"}
    signature = {arg: special.get(arg, "i32:16" if "stride" in arg else "*bf16") for arg in kernel.arg_names}
    return KernelBuild(name, kernel, signature, constants, num_warps=4)


@three_node.kernels
@wide.kernels
def _(architecture: str) -> list[KernelBuild]:
    from onelaunch.ops.swiglu import kernels

    return [build("gate", kernels.gate_kernel), build("gate_backward", kernels.gate_backward_kernel)]
