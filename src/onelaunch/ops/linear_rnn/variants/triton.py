"""Variants of ``linear_rnn`` in three, two and one launch, portable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onelaunch.device.architectures import ARCHITECTURES
from onelaunch.operation import Case, Example, Query
from onelaunch.operation.requirements import cannot_scan
from onelaunch.ops.gated_scan.variants import triton as scan
from onelaunch.ops.linear_rnn.autograd import launches, matmul, one_launch
from onelaunch.ops.linear_rnn.contract import LinearRNNCall, linear_rnn

if TYPE_CHECKING:
    from onelaunch.ops.linear_rnn.launch import Layer
    from onelaunch.ops.linear_rnn.launch import Results as Made

Results = tuple[torch.Tensor, torch.Tensor]


@linear_rnn.variant("three_launch", launches=3, backward_launches=4, fuses=(), gemm="triton")
def three_launch(call: LinearRNNCall) -> Results:
    """Run a Triton matrix product, a scan kernel and a gate kernel: the write-up's baseline."""
    v = matmul(call.x.flatten(0, 1), call.weight, grad=call.query().grad).unflatten(0, call.x.shape[:2])
    return scan.separate(call.scan_call(v))


@linear_rnn.variant("three_launch_cublas", launches=3, backward_launches=4, fuses=(), gemm="cublas")
def three_launch_cublas(call: LinearRNNCall) -> Results:
    """Run the library's matrix product, a scan kernel and a gate kernel: the control that the write-up lacked."""
    return scan.separate(call.scan_call(call.project()))


@linear_rnn.variant("semi_fused", launches=2, backward_launches=3, fuses=("scan", "gate"), gemm="cublas")
def semi_fused(call: LinearRNNCall) -> Results:
    """Run the library's matrix product, then scan and gate in one kernel."""
    return scan.fused(call.scan_call(call.project()))


@launches("chunked")
def run_chunked(layer: Layer) -> Made:
    """Project, scan and gate each tile; by the Hopper kernel if it can run the layer, else by the portable one."""
    from onelaunch.ops.linear_rnn import launch, launch_hopper

    return launch_hopper.chunked(layer) if launch_hopper.suits(layer) else launch.chunked(layer)


@linear_rnn.variant("fused_chunked", launches=1, backward_launches=3, fuses=("projection", "scan", "gate"), gemm="triton")
def fused_chunked(call: LinearRNNCall) -> Results:
    """Run one launch that uses tensor cores: a CTA per tile of time, the carry by decoupled look-back."""
    return one_launch(call, "chunked")


for _variant in (three_launch, three_launch_cublas, semi_fused, fused_chunked):
    _variant.supports(cannot_scan)


WIDE = 512 * 512
"""Number of weights beyond which the library's matrix product gains more than its own launch costs."""


@linear_rnn.prefers
def library_product_for_wide_layers(query: Query) -> tuple[str, ...]:
    """Prefer the library's product for wide layers.

    At D = V = 2048 two launches take 515 us on an H200, ``fused_chunked`` 927 us, because its product is slower than the
    library's.
    """
    return ("semi_fused",) if query.device_type == "cuda" and query.sizes[2] * query.sizes[3] >= WIDE else ()


def layer_of(batch: int, width: int) -> Case:
    """Return the layer that kernels are compiled for: 2048 steps of 64 channels in float16, without packing or states."""
    return linear_rnn.case("float16", B=batch, T=2048, D=width, V=64)


@three_launch.examples
@three_launch_cublas.examples
@semi_fused.examples
def training() -> list[Example]:
    """Return a training call without packing or states."""
    return [Example(layer_of(4, 256), "forward_backward")]


@fused_chunked.examples
def every_tile() -> list[Example]:
    """Return training calls that compile every kernel: portable, and on Hopper narrow and wide tiles and a D beyond the stages.

    On Hopper the portable kernel runs layers that TMA cannot address, such as rows of 260 elements.
    """
    on_hopper = ("sm_90a",)
    others = tuple(name for name in ARCHITECTURES if name not in on_hopper)
    return [
        Example(layer_of(1, 256), "forward_backward", on_hopper, "32 channels"),
        Example(layer_of(16, 256), "forward_backward", on_hopper, "64 channels"),
        Example(layer_of(16, 1024), "forward_backward", on_hopper, "64 channels, D=1024"),
        Example(layer_of(4, 260), "forward_backward", on_hopper, "D=260"),
        Example(layer_of(4, 256), "forward_backward", others),
    ]
