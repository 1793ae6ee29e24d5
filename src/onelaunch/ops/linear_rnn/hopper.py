"""The variant ``fused_hopper`` of ``linear_rnn``: one launch for wide layers on Hopper GPUs."""

from __future__ import annotations

import torch

from onelaunch.device.hardware import is_hopper
from onelaunch.operation import Query
from onelaunch.ops.gated_scan import triton_variants as scan
from onelaunch.ops.linear_rnn import triton_variants as layer
from onelaunch.ops.linear_rnn.contract import LinearRNNCall, linear_rnn


@linear_rnn.variant(
    "fused_hopper", launches=1, backward_launches=3, fuses=("projection", "scan", "gate"), gemm="gluon",
    architectures=("sm_90a",),
)  # fmt: skip
def fused_hopper(call: LinearRNNCall) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch for wide layers on Hopper: the scan of a tile runs under the matrix product of the next."""
    return layer.one_launch(call, "persistent")


fused_hopper.supports(scan.needs_triton)


@fused_hopper.supports
def fits(query: Query) -> str | None:
    """What the copy engine and the matrix units ask for."""
    if not is_hopper(torch.device(query.device)):
        return "needs a Hopper GPU (compute capability 9.x)"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return "needs float16 or bfloat16"
    if "packed" in query.flags:
        return "takes no packed sequences"
    _, length, width, channels = query.sizes
    if length < 64:
        return "needs at least 64 time steps"
    if width % 8 or channels % 8:
        return "needs D and V that are multiples of 8: the copy engine moves 16 bytes at once"
    return None
