"""PyTorch operators of ``rms_norm``'s own kernels, and their gradients.

``onelaunch::rms_norm_forward`` computes both results in one launch. For a backward pass it saves rstd, the reciprocal root mean
square of every row, beside the sum, which is a result (without residual the input). ``onelaunch::rms_norm_backward`` computes
the gradient of the sum in one launch, with the gradient that comes in through the sum, and adds up the gradient of the weight in
another. The gradients of the input and of the residual are this one tensor if both have the same dtype. An operator of ours that
multiplies y need not save it: its backward pass computes y from the sum again. The variant in ``variants/triton.py`` calls
:func:`compute`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from onelaunch.launch import recomputed
from onelaunch.launch.operator import Operator
from onelaunch.ops.rms_norm import fakes
from onelaunch.ops.rms_norm.contract import RMSNormCall

Results = tuple[torch.Tensor, torch.Tensor | None]
"""Results ``y`` and the sum, which is ``None`` without residual."""


def run_forward(
    x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, eps: float, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, the sum and rstd ``[M]``, without elements if there is no residual or if rstd is not saved."""
    from onelaunch.ops.rms_norm import launch

    y, total, rstd = launch.rms_norm(x, weight, residual, eps, keep=keep)
    return (
        y,
        x.new_empty(0) if total is None else total,
        x.new_empty(0, dtype=torch.float32) if rstd is None else rstd,
    )


def run_backward(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    want_x: bool,
    want_residual: bool,
    want_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx in the dtype of ``dy``, dresidual in that of ``total``, and dweight. Those not requested have no elements.

    ``dtotal`` is the gradient of the sum as a result, ``None`` if nothing comes in through it.
    """
    from onelaunch.ops.rms_norm import launch

    found = launch.gradients(dy, dtotal, total, weight, rstd, want_x=want_x, want_residual=want_residual, want_weight=want_weight)
    dx, dresidual, dweight = found
    return (
        dy.new_empty(0) if dx is None else dx,
        total.new_empty(0) if dresidual is None else dresidual,
        (dy if weight is None else weight).new_empty(0) if dweight is None else dweight,
    )


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Save the sum (the input without residual), the weight and rstd. A result that is not used gets no gradient of zeros."""
    x, weight, residual, eps, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.x_dtype, ctx.added = x.dtype, residual is not None
    total = x if residual is None else output[1]
    ctx.save_for_backward(total, weight, output[2])
    if total.dtype is x.dtype:  # from float32 sums, y would be float32 too
        recomputed.attach(output[0], partial(_normalized, eps), (total,), () if weight is None else (weight,))


_KEEP = True
"""Flag of a launch that stores rstd. Recomputing y does not need it, but has the same kernel as a forward pass then."""


def _normalized(eps: float, total: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Return y for a saved sum. It is that of the forward pass, but for the rounding of the sum to its dtype."""
    return forward.planned(total, weight, None, eps, _KEEP)[0]


def gradients(ctx: Any, backward: Any, dy: torch.Tensor | None, dtotal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the input, the weight and the residual."""
    total, weight, rstd = ctx.saved_tensors
    wants_x, wants_weight, wants_residual = ctx.needs_input_grad[:3]  # the inputs behind these are no tensors
    if not ctx.added:
        dtotal = None  # the gradient of an empty tensor
    if dy is None:
        dx = None if dtotal is None or not wants_x else dtotal.to(ctx.x_dtype)
        return dx, None, dtotal if wants_residual else None, None, None
    one = total.dtype is ctx.x_dtype  # one tensor is the gradient of both
    dx, dresidual, dweight = backward(
        dy, dtotal, total, weight, rstd, wants_x or (wants_residual and one), wants_residual and not one, wants_weight
    )
    if one:
        dresidual = dx
    return dx if wants_x else None, dweight if wants_weight else None, dresidual if wants_residual else None, None, None


backward = Operator("rms_norm_backward", run_backward, fake=fakes.gradients)
forward = Operator(
    "rms_norm_forward", run_forward, fake=fakes.forward, save=save, gradients=gradients, backward=backward, outputs=2
)


def compute(call: RMSNormCall) -> Results:
    """Return the results of the kernels; differentiable."""
    grad = call.query().grad
    y, total, *_ = forward(call.x, call.weight, call.residual, call.eps, grad, grad=grad)
    return y, None if call.residual is None else total
