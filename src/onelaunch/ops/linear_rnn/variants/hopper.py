"""The variant ``fused_hopper`` of ``linear_rnn``: one launch for wide layers on Hopper GPUs.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, here all
three; ``cost.py`` reads it. ``gemm`` says how the product is made, here in a kernel in Gluon. Other keywords are capabilities,
which the class ``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onelaunch.device.hardware import is_hopper
from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import cannot_scan, lacks_shared_memory
from onelaunch.ops.linear_rnn.autograd import launches, one_launch
from onelaunch.ops.linear_rnn.contract import LinearRNNCall, linear_rnn

if TYPE_CHECKING:
    from onelaunch.ops.linear_rnn.launch import Layer, Results


@launches("persistent")
def run_persistent(layer: Layer) -> Results:
    """Project, scan and gate by one persistent CTA per SM."""
    from onelaunch.ops.linear_rnn import launch_hopper

    return launch_hopper.persistent(layer)


@linear_rnn.variant(
    "fused_hopper", launches=1, backward_launches=3, fuses=("projection", "scan", "gate"), gemm="gluon",
    architectures=("sm_90a",),
)  # fmt: skip
def fused_hopper(call: LinearRNNCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one launch for wide layers on Hopper: a tile is scanned while the next one is multiplied."""
    return one_launch(call, "persistent")


fused_hopper.supports(cannot_scan)


@fused_hopper.supports
def fits(query: Query) -> str | None:
    """Return why the call does not suit TMA and WGMMA, or ``None``."""
    if not is_hopper(torch.device(query.device)):
        return "needs a Hopper GPU (compute capability 9.x)"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return "needs float16 or bfloat16"
    if "packed" in query.flags:
        return "takes no packed sequences"
    _, length, width, channels = query.sizes
    if length < 64:  # the kernel stores a state every 64 steps; for short sequences the backward pass reads one more often
        return "needs at least 64 time steps"
    if width % 8 or channels % 8:
        return "needs D and V that are multiples of 8: TMA needs rows of whole 16 bytes"
    return None


fused_hopper.supports(lacks_shared_memory)


@fused_hopper.examples
def training() -> list[Example]:
    """Return training calls of whole tiles, without packing or states, for which the kernels are compiled and inspected."""
    sizes = {"B": 4, "T": 2048, "D": 2048, "V": 2048}
    return [
        Example(linear_rnn.case("float16", **sizes), "forward_backward"),
        Example(linear_rnn.case("float16", **sizes, gate=False), "forward_backward", name="no gate"),
    ]
