"""Variants of ``linear_rnn`` in plain PyTorch: its matrix product, then the scan of ``gated_scan``'s variant of that name.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel
(``projection``, ``scan``, ``gate``); ``cost.py`` reads it. ``yardstick`` marks the PyTorch baseline, whose error sets the
tolerance. Other keywords are capabilities, which the class ``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

import torch

from onelaunch.ops.gated_scan.variants import torch as scan
from onelaunch.ops.linear_rnn.contract import LinearRNNCall, linear_rnn


@linear_rnn.variant("eager", launches=None, fuses=(), yardstick=True)
def eager(call: LinearRNNCall) -> scan.Results:
    """Multiply, then loop over time: the PyTorch baseline that sets the tolerance of the other variants."""
    return scan.eager(call.scan_call(call.project()))


@linear_rnn.variant("chunked", launches=None, fuses=())
def chunked(call: LinearRNNCall) -> scan.Results:
    """Multiply, then scan chunks in parallel, in pure PyTorch: the default on a CPU."""
    return scan.chunked(call.scan_call(call.project()))


@linear_rnn.variant("compiled", launches=None, recompiles=True, fuses=("scan", "gate"))
def compiled(call: LinearRNNCall) -> scan.Results:
    """Run the projection and the chunked scan, compiled together by torch.compile."""
    function = scan.compile_static(_project_scan_and_gate)
    return function(call.x, call.weight, call.log_decay, call.gate, call.initial_state, call.cu_seqlens)


def _project_scan_and_gate(
    x: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> scan.Results:
    return scan.chunked_scan_and_gate(x @ weight, log_decay, gate, initial_state, cu_seqlens)


compiled.supports(scan.compiler_missing)
compiled.supports(scan.no_steps)
compiled.supports(scan.one_channel)
chunked.supports(scan.no_steps)
