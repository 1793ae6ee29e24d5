"""Custom operators of ``swiglu``'s own kernels, and their gradients.

``onelaunch::swiglu_forward`` runs the launches of a variant by its name. For a backward pass it also stores both products, which
takes no further launch. The backward pass computes the gate's gradients in one launch (``onelaunch::swiglu_gate_backward``) and
leaves the matrix products to PyTorch. ``onelaunch::swiglu_gate`` is the gate alone, for variants that use PyTorch's matrix
products. *Gate* and *up* also name the two products x w_gate^T and x w_up^T. The variants with kernels of their own call
:func:`compute` or :data:`gate`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from onelaunch.launch import recomputed
from onelaunch.launch.by_variant import Launches
from onelaunch.launch.operator import Operator
from onelaunch.ops.swiglu import fakes
from onelaunch.ops.swiglu.contract import SwigluCall
from onelaunch.ops.swiglu.operands import Matrix, all_swizzled, with_scales_alike

# Operator of the gate alone


def run_gate(both: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """Return ``silu(gate) * up``. ``both`` is the gate ``[M, N]``, or without ``up`` both products ``[M, 2 N]``."""
    # The module imports Triton, which is an optional dependency.
    from onelaunch.ops.swiglu import launch

    gate, up = both.chunk(2, 1) if up is None else (both, up)
    return launch.gate(gate, up)


def run_gate_backward(dh: torch.Tensor, both: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """Return the gradients of gate and up side by side, ``[M, 2 N]``. ``both`` and ``up`` are those of :func:`run_gate`."""
    from onelaunch.ops.swiglu import launch

    gate, up = both.chunk(2, 1) if up is None else (both, up)
    return launch.gate_backward(dh, gate, up)


def save_products(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save both products for the backward pass."""
    ctx.save_for_backward(*inputs)


def gate_gradients(ctx: Any, backward: Any, dh: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the two inputs: one matrix ``[M, 2 N]`` and None, or its halves."""
    both, up = ctx.saved_tensors
    found = backward(dh, both, up)
    return (found, None) if up is None else tuple(found.chunk(2, 1))


gate_backward = Operator("swiglu_gate_backward", run_gate_backward, fake=fakes.gate_backward)
gate = Operator("swiglu_gate", run_gate, fake=fakes.gate, save=save_products, gradients=gate_gradients, backward=gate_backward)

# Operator of the kernels that multiply


class Wanted(NamedTuple):
    """Properties of a call that its launches depend on, in addition to the operands."""

    dtype: torch.dtype
    """Dtype of h."""
    swizzled: bool
    """Flag that block scales lie in the swizzled order."""
    keep: bool
    """Flag that both products must be stored as well, for a backward pass."""
    constant_weights: bool
    """Flag that weights may be read before earlier launches have ended."""


Run: TypeAlias = Callable[[Matrix, Matrix, Matrix, Wanted], tuple[torch.Tensor, torch.Tensor | None]]
"""Function that runs the launches of a variant.

It takes x, w_gate, w_up and the wanted properties; it returns ``h [M, N]``, and both products ``[M, 2 N]`` or None.
"""

launches: Launches[Run] = Launches()
"""Functions of type :data:`Run` by the names of variants; ``@launches(name)`` registers one, in the files of ``variants/``."""


def run_forward(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None,
    x_blocks: torch.Tensor | None,
    gate_blocks: torch.Tensor | None,
    up_blocks: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    gate_scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    dtype: torch.dtype,
    swizzled: bool,
    keep: bool,
    constant_weights: bool,
    variant: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return h and both products ``[M, 2 N]`` (no elements unless ``keep``), computed by the named variant.

    ``w_gate`` holds both weights if ``w_up`` is not given. Blocks are the block scales of NVFP4 operands, and scales those of
    rows or whole matrices; a plain operand has neither. ``dtype`` to ``constant_weights`` are the fields of :class:`Wanted`.
    """
    rows, gate = Matrix(x, x_blocks, x_scale), Matrix(w_gate, gate_blocks, gate_scale)
    if w_up is None:
        half = w_gate.shape[0] // 2
        gate, up = gate.rows(0, half, swizzled=swizzled), gate.rows(half, 2 * half, swizzled=swizzled)
    else:
        up = Matrix(w_up, up_blocks, up_scale)
    h, kept = launches[variant](rows, *with_scales_alike(gate, up), Wanted(dtype, swizzled, keep, constant_weights))
    return h, x.new_empty(0, dtype=dtype) if kept is None else kept


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Save x, the weights and both products for the backward pass; for x what makes it again, if it can be."""
    ctx.x_again, sources = recomputed.instead_of(inputs[0])
    ctx.save_for_backward(*inputs[1:3], output[1], *sources)
    ctx.set_materialize_grads(False)  # no zeros are allocated as the gradient of the products, which no caller can use


def gradients(ctx: Any, backward: Any, dh: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x and the weights; the other inputs have none."""
    w_gate, w_up, products, *sources = ctx.saved_tensors
    dproducts = backward(dh, products, None)  # [M, 2 N]
    x = functools.partial(recomputed.once_more, ctx.x_again, tuple(sources))
    found = product_gradients(dproducts, x, w_gate, w_up, ctx.needs_input_grad)
    return *found, *(None,) * 11  # run_forward has 14 inputs


def product_gradients(
    dproducts: torch.Tensor,
    x: Callable[[], torch.Tensor],
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None,
    wants: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x and of both weights that are wanted, from those of both products ``[M, 2 N]``.

    ``x`` returns the rows ``[M, K]``, which the weights' gradients alone need. Without ``w_up``, ``w_gate`` holds both weights.
    """
    dx = dw_gate = dw_up = None
    if wants[0]:
        if w_up is None:
            dx = dproducts @ w_gate
        else:
            dgate, dup = dproducts.chunk(2, 1)
            dx = torch.addmm(dgate @ w_gate, dup, w_up)
    if any(wants[1:3]):
        dw_gate = dproducts.mT @ x()
        dw_gate, dw_up = (dw_gate, None) if w_up is None else dw_gate.chunk(2)
    return dx, dw_gate, dw_up


forward = Operator("swiglu_forward", run_forward, fake=fakes.forward, save=save, gradients=gradients, backward=gate_backward)


def compute(call: SwigluCall, variant: str) -> tuple[torch.Tensor]:
    """Return h computed by the named variant; it is differentiable if the operands are plain tensors."""
    grad = call.query().grad
    stacked = call.stacked if grad else None  # the gradient of stacked weights is one product, one tensor
    operands = (call.x, call.w_gate, call.w_up) if stacked is None else (call.x, stacked)
    swizzled = all_swizzled(operands)
    parts = [Matrix.of(each, swizzled=swizzled) for each in operands] + [(None, None, None)] * (stacked is not None)
    # run_forward takes the values of all operands first, then the block scales of all, then the other scales.
    tensors = [part for kind in zip(*parts, strict=True) for part in kind]
    return (forward(*tensors, call.dtype, swizzled, grad, call.constant_weights, variant, grad=grad)[0],)
