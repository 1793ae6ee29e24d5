"""Variants of ``gated_scan`` in Triton, and how PyTorch sees them.

One pair of operators carries both variants: ``onelaunch::gated_scan_forward`` and ``onelaunch::gated_scan_backward``.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.launch.operator import Operator
from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import cannot_launch
from onelaunch.ops.gated_scan.contract import ScanCall, gated_scan

Optional = torch.Tensor | None


def run_forward(
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    want_final: bool,
    keep: bool,
    separate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, the final state, and for the backward pass the carries and (where gate and scan are separate) the states."""
    from onelaunch.kernels.scan import launch

    sequences = launch.Sequences.of(initial, offsets)
    if not separate:
        y, final, carries = launch.forward(v, log_decay, gate, sequences, want_final=want_final, want_carries=keep)
        return y, final, carries, v.new_empty(0)
    s, final, carries = launch.forward(v, log_decay, None, sequences, want_final=want_final, want_carries=keep)
    return launch.gate_states(s, gate), final, carries, s


def run_backward(
    dy: torch.Tensor,
    dfinal: torch.Tensor | None,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    carries: torch.Tensor,
    states: torch.Tensor,
    separate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of v, log_decay, gate and the initial state (no elements where there is none)."""
    from onelaunch.kernels.scan import launch

    sequences = launch.Sequences.of(initial, offsets)
    if separate:
        ds, dgate = launch.gate_states_backward(dy, states, gate)
        dv, dlog_decay, _, dinitial = launch.backward(ds, dfinal, v, log_decay, None, sequences, carries)
    else:
        dv, dlog_decay, dgate, dinitial = launch.backward(dy, dfinal, v, log_decay, gate, sequences, carries)
    return dv, dlog_decay, dgate, dinitial


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """The tensors among the inputs, the carries and the states."""
    v, log_decay, gate, initial, offsets, ctx.want_final, _, ctx.separate = inputs
    ctx.save_for_backward(v, log_decay, gate, initial, offsets, *output[2:])
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, backward: Any, dy: Optional, dfinal: Optional) -> tuple[Optional, ...]:
    """Of every input of :func:`run_forward`."""
    v, log_decay, gate, initial, offsets, carries, states = ctx.saved_tensors
    dy = torch.zeros_like(v) if dy is None else dy
    dfinal = dfinal if ctx.want_final else None
    dv, dlog_decay, dgate, dinitial = backward(dy, dfinal, v, log_decay, gate, initial, offsets, carries, states, ctx.separate)
    return dv, dlog_decay, dgate, None if initial is None else dinitial, None, None, None, None


backward = Operator("gated_scan_backward", run_backward)
forward = Operator("gated_scan_forward", run_forward, save=save, gradients=gradients, backward=backward, outputs=2)


def scan_and_gate(call: ScanCall, *, separate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the final state by the Triton kernels, differentiable; also for operations whose last steps are these."""
    grad = call.query().grad
    y, final, *_ = forward(
        call.v, call.log_decay, call.gate, call.initial_state, call.cu_seqlens, call.output_final_state, grad, separate,
        grad=grad,
    )  # fmt: skip
    return y, final


@gated_scan.variant("separate", launches=2, backward_launches=2, fuses=())
def separate(call: ScanCall) -> tuple[torch.Tensor, torch.Tensor]:
    """A scan kernel, then a gate kernel, with the states between them in memory, in the dtype of ``v`` as the write-up had them.

    Where few numbers are summed, that rounding may cost more than the error gate allows: in one of twenty draws of 200 elements.
    """
    return scan_and_gate(call, separate=True)


@gated_scan.variant("fused", launches=1, backward_launches=1, fuses=("scan", "gate"))
def fused(call: ScanCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan and gate in one launch, parallel over time by decoupled look-back."""
    return scan_and_gate(call, separate=False)


@separate.supports
@fused.supports
def needs_triton(query: Query) -> str | None:
    """What the scans' kernels need: also used by the operations that end with them."""
    if (reason := cannot_launch(query)) is not None:
        return reason
    if query.device_type != "cuda" and query.dtype is torch.bfloat16:
        return "needs a GPU for bfloat16: Triton's interpreter computes wrong bfloat16 products"
    slices = query.sizes[0] * -(-query.sizes[-1] // FEWEST_CHANNELS)
    if slices > LARGEST_GRID:
        return f"takes at most {LARGEST_GRID} pairs of a batch entry and {FEWEST_CHANNELS} channels: a launch is no wider"
    return None


LARGEST_GRID = 65535
"""Programs along a launch's second dimension, on CUDA and ROCm."""

FEWEST_CHANNELS = 16
"""The narrowest tile of :func:`onelaunch.kernels.scan.launch.scan_tiles`."""


EXAMPLE = {"B": 4, "T": 2048, "V": 64}


@fused.examples
@separate.examples
def training() -> list[Example]:
    """Return a training call without packing or initial states."""
    return [Example(gated_scan.case("float16", **EXAMPLE), "forward_backward")]
