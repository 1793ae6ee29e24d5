"""The peer variant of ``linear_rnn``: cuBLAS, the chunkwise HGRN scan of fla (flash-linear-attention), and a SiLU gate."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from onelaunch.operation import Query
from onelaunch.operation.accuracy import FLA_TESTS
from onelaunch.operation.requirements import not_installed
from onelaunch.ops.linear_rnn.contract import LinearRNNCall, linear_rnn


@linear_rnn.variant("fla", launches=None, fuses=(), gemm="cublas", requires="fla", own_tolerance=FLA_TESTS)
def fla(call: LinearRNNCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run cuBLAS, then ``chunk_hgrn`` of flash-linear-attention, and a SiLU gate in PyTorch."""
    from fla.ops.hgrn import chunk_hgrn  # pyrefly: ignore[missing-import]

    s, final = chunk_hgrn(call.project(), call.log_decay, call.initial_state, call.output_final_state)
    return F.silu(call.gate) * s, None if final is None else final.float()


@fla.supports
def why_chunk_hgrn_cannot_run(query: Query) -> str | None:
    """Return why fla 0.6.0 cannot run a call, or ``None``.

    Its ``chunk_hgrn`` silently drops the gradients of the initial and final states, so such calls are refused.
    """
    if (reason := not_installed("fla")) is not None:
        return reason
    if query.device_type != "cuda":
        return "needs a CUDA or ROCm device"
    if "packed" in query.flags:
        return "takes no packed sequences (fla 0.6.0)"
    if query.grad and {"initial_state", "final_state"} & set(query.flags):
        return "drops the gradients of the initial and final state (fla 0.6.0)"
    if 0 in query.sizes:
        return "needs at least one element in every dimension"
    return None
