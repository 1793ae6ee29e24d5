"""Variants of ``swiglu`` with PyTorch's matrix products and a Triton kernel for the gate, which one-launch variants must beat.

The forward pass keeps both products. The backward pass writes their gradients into one matrix ``[M, 2 N]`` in one launch. Two
matrix products follow it in ``wide``; four matrix products and a sum of two follow it in ``three_node``.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, and
``hands`` the products that go through device memory; ``cost.py`` reads them. ``gemm`` says who makes the products.
"""

from __future__ import annotations

import torch

from onelaunch.device.hardware import capability
from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import LARGEST_GRID_X, cannot_launch
from onelaunch.ops.swiglu.autograd import gate
from onelaunch.ops.swiglu.contract import SwigluCall, swiglu
from onelaunch.ops.swiglu.variants.torch import multiply, trains_plain_tensors


@swiglu.variant("three_node", launches=3, backward_launches=6, fuses=(), hands=("gate", "up"), gemm="cublas")
def three_node(call: SwigluCall) -> tuple[torch.Tensor]:
    """Run two matrix products by PyTorch and one kernel for the gate: three nodes of a CUDA graph.

    It is the baseline of ``studies/dual-gemm-swiglu.toml``.
    """
    products = (multiply(call.x, weight, call.dtype) for weight in (call.w_gate, call.w_up))
    return (gate(*products, grad=call.query().grad),)


@swiglu.variant("wide", launches=2, backward_launches=3, fuses=("products",), hands=("gate", "up"), gemm="cublas")
def wide(call: SwigluCall) -> tuple[torch.Tensor]:
    """Run one matrix product with stacked weights by PyTorch, and one kernel for the gate."""
    assert call.stacked is not None  # noqa: S101 - see stacked_weights
    return (gate(multiply(call.x, call.stacked, call.dtype), None, grad=call.query().grad),)


# First, since fits_a_grid imports Triton. It is not asked if this has returned a reason.
three_node.supports(cannot_launch)
wide.supports(cannot_launch)


@three_node.supports
@wide.supports
def fits_a_grid(query: Query) -> str | None:
    """Return why one launch cannot have a CTA for every block of columns of every row."""
    from onelaunch.ops.swiglu.launch import block_columns

    columns = block_columns(query.sizes[1])
    if query.sizes[0] * -(-query.sizes[1] // columns) > LARGEST_GRID_X:
        return f"takes at most {LARGEST_GRID_X} blocks of {columns} columns in all rows: a launch has no more CTAs"
    return None


three_node.supports(trains_plain_tensors)
wide.supports(trains_plain_tensors)


@three_node.supports
@wide.supports
def plain_or_float8(query: Query) -> str | None:
    """Return why PyTorch cannot multiply the operands, or None. ``two_node`` in fused.py has this predicate too."""
    if "nvfp4" in query.flags or "nvfp4_weights" in query.flags:
        return "takes no NVFP4 operands: PyTorch has no product of them on every GPU"
    if "fp8" in query.flags and (found := capability(torch.device(query.device))) is not None and found < (8, 9):
        return "needs a GPU with float8 matrix units"
    if "fp8" in query.flags and query.dtype is torch.float16:
        return "gives no float16 of float8: a product before the gate may be beyond it"
    if "row_scales" in query.flags and query.dtype is not torch.bfloat16:
        return "gives bfloat16 alone where rows have scales, as PyTorch does"
    return None


@wide.supports
def stacked_weights(query: Query) -> str | None:
    """Return why one matrix product is impossible: the weights are not stacked."""
    return None if "stacked" in query.flags else "needs stacked weights: w_gate [2 N, K] and no w_up"


@three_node.examples
def separate_training() -> list[Example]:
    """Return a training call with separate weights, for compiling and inspecting its kernels without a GPU."""
    return [Example(swiglu.case("bfloat16", M=8192, N=4096, K=7168), "forward_backward")]


@wide.examples
def stacked_training() -> list[Example]:
    """Return a training call with stacked weights, for compiling and inspecting its kernels without a GPU."""
    return [Example(swiglu.case("bfloat16", M=8192, N=4096, K=7168, stacked=True), "forward_backward")]
