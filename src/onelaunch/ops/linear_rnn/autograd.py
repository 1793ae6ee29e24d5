"""PyTorch operators of ``linear_rnn``'s kernels, and their gradients.

``onelaunch::linear_rnn_forward`` computes the whole layer in one launch, by the kernel that its argument names.
``onelaunch::linear_rnn_backward`` is the backward pass of all these kernels. ``onelaunch::matmul`` is the matrix product of the
three-launch variant. The variants in ``variants/triton.py``, ``variants/hopper.py`` and ``onelaunch/ablations`` call them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from onelaunch.launch.by_variant import Launches
from onelaunch.launch.operator import Operator
from onelaunch.ops.gated_scan.batches import in_parts
from onelaunch.ops.linear_rnn import fakes
from onelaunch.ops.linear_rnn.contract import LinearRNNCall

if TYPE_CHECKING:
    from onelaunch.ops.linear_rnn.launch import Layer, Results  # it needs Triton

Run: TypeAlias = "Callable[[Layer], Results]"
"""Type of a function that launches the whole layer."""

launches: Launches[Run] = Launches()
"""Functions that launch the whole layer, by the name of their kernel."""


def run_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a [M, K] @ b [K, N]`` by the Triton kernel."""
    from onelaunch.ops.linear_rnn import launch

    return launch.matmul(a, b)


def _matmul_gradients(ctx: Any, product: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    a, b = ctx.saved_tensors
    # ``product`` is this operator, so that the gradients are products by the same kernel.
    da = product(dout, b.t()) if ctx.needs_input_grad[0] else None
    db = product(a.t(), dout) if ctx.needs_input_grad[1] else None
    return da, db


matmul = Operator(
    "matmul",
    run_matmul,
    fake=fakes.matmul,
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    gradients=_matmul_gradients,
)


def run_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    want_final: bool,
    keep: bool,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the kernel of this name; return y, the final state, and for the backward pass (``keep``) v and the carries.

    The carries are the states that enter each tile of time. A result that is not wanted has no elements.
    """
    from onelaunch.ops.linear_rnn.launch import Layer, Sequences

    return launches[kernel](Layer(x, weight, log_decay, gate, Sequences.of(initial, offsets), want_final, keep))


def run_backward(
    dy: torch.Tensor,
    dfinal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    v: torch.Tensor,
    carries: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, weight, log_decay, the gate and the initial state.

    Those of a missing gate or initial state have no elements.
    """
    from onelaunch.kernels.scan import launch

    sequences = launch.Sequences.of(initial, offsets)
    dv, dlog_decay, dgate, dinitial = launch.backward(dy, dfinal, v, log_decay, gate, sequences, carries)
    dx = dv @ weight.t()
    dweight = x.flatten(0, 1).t() @ dv.flatten(0, 1)
    return dx, dweight, dlog_decay, dgate, dinitial


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Save the tensors among the inputs, v and the carries."""
    *tensors, ctx.want_final, _, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, backward: Any, dy: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of every input of :func:`run_forward`."""
    x, weight, log_decay, gate, initial, offsets, v, carries = ctx.saved_tensors
    dy = torch.zeros_like(v) if dy is None else dy
    dfinal = dfinal if ctx.want_final else None  # an unwanted final state has no elements, nor has its gradient
    *found, dgate, dinitial = backward(dy, dfinal, x, weight, log_decay, gate, initial, offsets, v, carries)
    dgate, dinitial = None if gate is None else dgate, None if initial is None else dinitial
    return *found, dgate, dinitial, None, None, None, None  # offsets, want_final, keep and kernel have no gradients


backward = Operator("linear_rnn_backward", run_backward, fake=fakes.backward)
forward = Operator(
    "linear_rnn_forward", run_forward, fake=fakes.forward, save=save, gradients=gradients, backward=backward, outputs=2
)


def one_launch(call: LinearRNNCall, kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and the final state, computed by the kernel of this name; differentiable."""
    grad = call.query().grad

    def run(part: LinearRNNCall) -> tuple[torch.Tensor, torch.Tensor]:
        y, final, *_ = forward(
            part.x, part.weight, part.log_decay, part.gate, part.initial_state, part.cu_seqlens,
            part.output_final_state, grad, kernel, grad=grad,
        )  # fmt: skip
        return y, final

    return in_parts(call, ("x", "log_decay", "gate", "initial_state"), run)
