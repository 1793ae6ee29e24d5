"""The peers of ``linear_rnn``: PyTorch's matrix product, then a peer of ``gated_scan``, an HGRN scan of fla.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, here
none; ``cost.py`` reads it. ``gemm`` says who makes the product, and ``usual`` marks functions that fla's own layers call; studies
select variants by tags. Other keywords are capabilities, which the class ``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

from onelaunch.operation.accuracy import FLA_TESTS
from onelaunch.ops.gated_scan.variants import peers as scan
from onelaunch.ops.linear_rnn.contract import LinearRNNCall, linear_rnn


@linear_rnn.variant(
    "fla", launches=None, fuses=(), gemm="cublas", requires="fla", own_tolerance=FLA_TESTS, usual=True, tunes=True
)
def fla(call: LinearRNNCall) -> scan.Results:
    """Run cuBLAS, then ``chunk_hgrn`` of flash-linear-attention, and a SiLU gate in PyTorch where the call has one."""
    return scan.fla(call.scan_call(call.project()))


@linear_rnn.variant(
    "fla_recurrent", launches=None, fuses=(), gemm="cublas", requires="fla", own_tolerance=FLA_TESTS, usual=True, tunes=True
)
def fla_recurrent(call: LinearRNNCall) -> scan.Results:
    """Run cuBLAS, then ``fused_recurrent_hgrn`` of flash-linear-attention, and a SiLU gate in PyTorch where the call has one."""
    return scan.fla_recurrent(call.scan_call(call.project()))


fla.supports(scan.what_fla_can)
fla.supports(scan.why_chunk_hgrn_cannot_run)
fla_recurrent.supports(scan.what_fla_can)
