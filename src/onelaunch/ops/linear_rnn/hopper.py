"""The variant ``fused_hopper`` of ``linear_rnn``: one launch for wide layers on Hopper GPUs."""

from __future__ import annotations

import torch

from onelaunch.operation import KernelBuild, Query
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
    here = query.device_type == "cuda" and not torch.version.hip and torch.cuda.is_available()
    if not here or torch.cuda.get_device_capability(query.device)[0] != 9:
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


@fused_hopper.kernels
def _(architecture: str) -> list[KernelBuild]:
    if architecture not in fused_hopper.tags["architectures"]:
        return []
    from onelaunch.ops.gluon_compat import gl
    from onelaunch.ops.linear_rnn.hopper_kernels import project_scan_gate_hopper_kernel as kernel
    from onelaunch.ops.linear_rnn.hopper_launch import TILES

    boxes = TILES.boxes(2)
    layouts = {name: gl.NVMMASharedLayout.get_default_for(box, gl.float16) for name, box in boxes.items()}
    constants = {**TILES.options(), "EVEN": True, "INITIAL": False, "FINAL": False, "KEEP": True, "initial": None}
    special = {name: f"tensordesc<fp16{boxes[name]},{layouts[name]!r}>" for name in boxes}
    special |= {"y": "*fp16", "v": "*fp16", "words": "*i64", "counter": "*i64", "final": "*fp32", "carries": "*fp32"}
    special |= dict.fromkeys(("T", "tiles", "pairs"), "i32")
    signature = {name: "constexpr" if name in constants else special.get(name, "i32:16") for name in kernel.arg_names}
    build = KernelBuild("project_scan_gate_hopper", kernel, signature, constants, num_warps=4, matrix=True)
    return [build, *scan.fused.builds(architecture)[1:]]
