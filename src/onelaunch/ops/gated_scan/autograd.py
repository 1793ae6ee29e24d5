"""PyTorch operators of ``gated_scan``'s Triton kernels, and their gradients.

One pair of operators serves all Triton variants: ``onelaunch::gated_scan_forward`` and ``onelaunch::gated_scan_backward``. Their
argument ``separate`` tells the variants apart: scan and gate in two launches, or in one. ``variants/triton.py`` calls
:func:`scan_and_gate`.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.launch.operator import Operator
from onelaunch.ops.gated_scan import fakes
from onelaunch.ops.gated_scan.batches import in_parts
from onelaunch.ops.gated_scan.contract import ScanCall


def run_forward(
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    want_final: bool,
    keep: bool,
    separate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, the final state, and for the backward pass the carries and the states s.

    The carries are the states that enter each tile of time; they have elements only with ``keep``. The states have elements only
    if gate and scan are separate launches: the gate's backward pass reads them. Without a gate y are the states, in one launch.
    """
    from onelaunch.kernels.scan import launch

    sequences = launch.Sequences.of(initial, offsets)
    if not separate or gate is None:
        y, final, carries = launch.forward(v, log_decay, gate, sequences, want_final=want_final, want_carries=keep)
        return y, final, carries, v.new_empty(0)
    s, final, carries = launch.forward(v, log_decay, None, sequences, want_final=want_final, want_carries=keep)
    return launch.gate_states(s, gate), final, carries, s


def run_backward(
    dy: torch.Tensor,
    dfinal: torch.Tensor | None,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    carries: torch.Tensor,
    states: torch.Tensor,
    separate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of v, log_decay, the gate and the initial state (no elements where one of these is missing)."""
    from onelaunch.kernels.scan import launch

    sequences = launch.Sequences.of(initial, offsets)
    if separate and gate is not None:
        ds, dgate = launch.gate_states_backward(dy, states, gate)
        dv, dlog_decay, _, dinitial = launch.backward(ds, dfinal, v, log_decay, None, sequences, carries)
    else:
        dv, dlog_decay, dgate, dinitial = launch.backward(dy, dfinal, v, log_decay, gate, sequences, carries)
    return dv, dlog_decay, dgate, dinitial


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Save the tensors among the inputs, the carries and the states."""
    v, log_decay, gate, initial, offsets, ctx.want_final, _, ctx.separate = inputs
    ctx.save_for_backward(v, log_decay, gate, initial, offsets, *output[2:])
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, backward: Any, dy: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of every input of :func:`run_forward`."""
    v, log_decay, gate, initial, offsets, carries, states = ctx.saved_tensors
    dy = torch.zeros_like(v) if dy is None else dy
    dfinal = dfinal if ctx.want_final else None  # an unwanted final state has no elements, nor has its gradient
    dv, dlog_decay, dgate, dinitial = backward(dy, dfinal, v, log_decay, gate, initial, offsets, carries, states, ctx.separate)
    dgate, dinitial = None if gate is None else dgate, None if initial is None else dinitial
    return dv, dlog_decay, dgate, dinitial, None, None, None, None  # offsets and the flags have no gradients


backward = Operator("gated_scan_backward", run_backward, fake=fakes.backward)
forward = Operator(
    "gated_scan_forward", run_forward, fake=fakes.forward, save=save, gradients=gradients, backward=backward, outputs=2
)


def scan_and_gate(call: ScanCall, *, separate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and the final state by the Triton kernels, differentiable."""
    grad = call.query().grad

    def run(part: ScanCall) -> tuple[torch.Tensor, torch.Tensor]:
        y, final, *_ = forward(
            part.v, part.log_decay, part.gate, part.initial_state, part.cu_seqlens, part.output_final_state, grad, separate,
            grad=grad,
        )  # fmt: skip
        return y, final

    return in_parts(call, ("v", "log_decay", "gate", "initial_state"), run)
