"""The peers of ``gated_scan``: the HGRN scans of fla (flash-linear-attention), and a SiLU gate in PyTorch where there is one.

The peers of ``linear_rnn`` run them too, after a product, and take their predicates.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, here
none, and ``usual`` marks functions that fla's own layers call; studies select variants by tags. Other keywords are capabilities,
which the class ``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from onelaunch.operation import Query
from onelaunch.operation.accuracy import FLA_TESTS
from onelaunch.operation.requirements import not_installed
from onelaunch.ops.gated_scan.contract import ScanCall, gated_scan

Results = tuple[torch.Tensor, torch.Tensor | None]
"""The output ``y`` and the final states, or ``None`` where the call asks for none."""


@gated_scan.variant("fla", launches=None, fuses=(), requires="fla", own_tolerance=FLA_TESTS, usual=True, tunes=True)
def fla(call: ScanCall) -> Results:
    """Run ``chunk_hgrn`` of flash-linear-attention, and a SiLU gate in PyTorch where the call has one."""
    from fla.ops.hgrn import chunk_hgrn  # pyrefly: ignore[missing-import]

    s, final = chunk_hgrn(call.v, call.log_decay, call.initial_state, call.output_final_state)
    return _gated(call, s), None if final is None else final.float()


@gated_scan.variant("fla_recurrent", launches=None, fuses=(), requires="fla", own_tolerance=FLA_TESTS, usual=True, tunes=True)
def fla_recurrent(call: ScanCall) -> Results:
    """Run ``fused_recurrent_hgrn`` of flash-linear-attention, and a SiLU gate in PyTorch where the call has one.

    It takes packed sequences and has the gradients of states, which ``chunk_hgrn`` has not. Its final states have the dtype of v.
    """
    from fla.ops.hgrn import fused_recurrent_hgrn  # pyrefly: ignore[missing-import]

    s, final = fused_recurrent_hgrn(
        call.v, call.log_decay, call.initial_state, call.output_final_state, cu_seqlens=call.cu_seqlens
    )
    return _gated(call, s), None if final is None else final.float()


def _gated(call: ScanCall, s: torch.Tensor) -> torch.Tensor:
    """Return the states times SiLU of the gate, or the states if the call has no gate."""
    return s if call.gate is None else F.silu(call.gate) * s


@fla.supports
@fla_recurrent.supports
def what_fla_can(query: Query) -> str | None:
    """Return why no scan of fla 0.6.0 can run a call, or ``None``."""
    if (reason := not_installed("fla")) is not None:
        return reason
    if query.device_type != "cuda":
        return "needs a CUDA or ROCm device"
    return "needs at least one element in every dimension" if 0 in query.sizes else None


@fla.supports
def why_chunk_hgrn_cannot_run(query: Query) -> str | None:
    """Return why ``chunk_hgrn`` of fla 0.6.0 cannot run a call, or ``None``.

    It silently drops the gradients of the initial and final states, so such calls are refused.
    """
    if "packed" in query.flags:
        return "takes no packed sequences (fla 0.6.0)"
    if query.grad and {"initial_state", "final_state"} & set(query.flags):
        return "drops the gradients of the initial and final state (fla 0.6.0)"
    return None
