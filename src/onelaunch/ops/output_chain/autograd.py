"""PyTorch operators of ``output_chain``'s own kernels, one forward operator for all of them, and their gradients.

``onelaunch::output_chain_forward`` runs the launches of the variant that its argument names. For a backward pass it saves rstd,
the reciprocal root mean square of every head, and if the output weight takes a gradient ``a``, the normalized and gated heads,
with H * V elements per token: that gradient is a product of ``a``. A variant that does not write ``a`` cannot save it. In the
backward pass one operator, ``onelaunch::output_chain_gradients``, then recomputes it. From the gradient of ``a``, da = dout W,
its launch computes the gradients of h and of the gate, and partial sums of the gradient of the norm's weight. It adds these up as
well, unless there are so many tokens that PyTorch does so in further launches. The variants in ``variants/triton.py`` call
:func:`compute`. ``gla_layer``, which has an operator of its own and recomputes ``a``, calls the functions in :data:`launches`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from onelaunch.launch.by_variant import Launches
from onelaunch.launch.operator import Operator
from onelaunch.ops.output_chain import fakes
from onelaunch.ops.output_chain.contract import OutputChainCall

if TYPE_CHECKING:
    from onelaunch.ops.output_chain.launch import Made, Operands  # it needs Triton

Results = tuple[torch.Tensor]
"""Result ``out``, as a tuple, which variants return."""

Run: TypeAlias = "Callable[[Operands, torch.Tensor, torch.Tensor | None, float, bool], Made]"
"""Type of a function that runs a variant's launches, from operands, output weight, bias, eps, and whether rstd is saved.

It returns ``a`` too if it was written.
"""

launches: Launches[Run] = Launches()
"""Functions that run a variant's launches, by the variant's name. ``gla_layer`` calls them too."""


def run_forward(
    h: torch.Tensor,
    gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    w_out: torch.Tensor,
    bias: torch.Tensor | None,
    activated: bool,
    eps: float,
    keep: bool,
    keep_a: bool,
    variant: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the variant of this name; return ``out [..., D]``, ``rstd [M, H]`` and ``a [M, H * V]``.

    What is not kept has no elements: rstd unless ``keep``, and ``a`` unless ``keep_a``, which needs a variant that writes it.
    """
    from onelaunch.ops.output_chain.launch import Operands

    out, rstd, a = launches[variant](Operands.of(h, gate, norm_weight, activated), w_out, bias, eps, keep)
    return (
        out.view(*h.shape[:-2], w_out.shape[0]),
        h.new_empty(0, dtype=torch.float32) if rstd is None else rstd,
        a if keep_a and a is not None else h.new_empty(0),
    )


def run_gradients(
    da: torch.Tensor | None,
    h: torch.Tensor,
    gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    rstd: torch.Tensor,
    activated: bool,
    want_a: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a ``[M, H * V]``, dh and dgate ``[..., H, V]``, and dnorm_weight ``[V]``.

    ``da`` is ``[M, H * V]`` with any strides. If it is ``None``, only ``a`` is computed. Results that are not requested have no
    elements.
    """
    from onelaunch.ops.output_chain import launch

    given = launch.Operands.of(h, gate, norm_weight, activated)
    a, dh, dgate, dweight = launch.norm_gate_gradients(da, given, rstd, want_a=want_a)
    empty = h.new_empty
    return (
        empty(0) if a is None else a,
        empty(0) if dh is None else dh.view(h.shape),
        empty(0) if dgate is None else dgate.view(h.shape),
        (h if norm_weight is None else norm_weight).new_empty(0) if dweight is None else dweight,
    )


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Save rstd, ``a`` if it was kept, and all input tensors except the bias."""
    h, gate, norm_weight, w_out, _, ctx.activated, _, _, ctx.kept_a, _ = inputs
    ctx.save_for_backward(h, gate, norm_weight, w_out, *output[1:])


def gradients(ctx: Any, backward: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of h, the gate, the norm's weight, the output weight and the bias."""
    h, gate, norm_weight, w_out, rstd, a = ctx.saved_tensors
    wants_h, wants_gate, wants_norm, wants_w, wants_bias = ctx.needs_input_grad[:5]  # needs_input_grad[5:] are no tensors
    dout = dout.reshape(-1, w_out.shape[0])
    dh = dgate = dnorm = dw = None
    undo = wants_h or wants_gate or wants_norm
    recompute = wants_w and not ctx.kept_a
    if undo or recompute:
        da = dout @ w_out if undo else None
        recomputed, dh, dgate, dnorm = backward(da, h, gate, norm_weight, rstd, ctx.activated, recompute)
        a = recomputed if recompute else a
        dnorm = dnorm if wants_norm else None
    if wants_w:
        dw = dout.mT @ a
    dbias = dout.sum(0) if wants_bias else None
    return dh if wants_h else None, dgate if wants_gate else None, dnorm, dw, dbias, None, None, None, None, None


norm_gate_gradients = Operator("output_chain_gradients", run_gradients, fake=fakes.gradients)
forward = Operator(
    "output_chain_forward", run_forward, fake=fakes.forward, save=save, gradients=gradients, backward=norm_gate_gradients
)


def compute(call: OutputChainCall, variant: str, *, writes_a: bool) -> Results:
    """Return the result, computed by the variant of this name; differentiable.

    ``writes_a`` says whether the variant writes ``a``. Then the backward pass of the output weight finds it saved.
    """
    grad = call.query().grad
    keep_a = grad and writes_a and call.w_out.requires_grad
    flags = (call.activated, call.eps, grad, keep_a, variant)
    out, *_ = forward(call.h, call.gate, call.norm_weight, call.w_out, call.bias, *flags, grad=grad)
    return (out,)
