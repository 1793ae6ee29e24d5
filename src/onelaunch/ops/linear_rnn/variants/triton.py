"""Variants of ``linear_rnn`` in three, two and one launch, which need no Hopper GPU.

The layer is v = x W [B, T, V], a scan of v with decays, and a gate. "PyTorch's matrix product" is cuBLAS on NVIDIA GPUs, the tag
``gemm="cublas"``. Kernels are launched by ``ops/gated_scan`` (scan and gate) and by ``launch.py`` and ``launch_hopper.py``, which
are imported on the first call, since they need Triton.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, and
``separates`` those that have a launch of their own in each pass; ``cost.py`` reads both. ``gemm`` says who makes the product.
Other keywords are capabilities, which the class ``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onelaunch.device.architectures import ARCHITECTURES
from onelaunch.operation import Case, Example, Query
from onelaunch.operation.requirements import cannot_scan
from onelaunch.ops.gated_scan.variants import triton as scan
from onelaunch.ops.linear_rnn.autograd import launches, matmul, one_launch
from onelaunch.ops.linear_rnn.contract import LinearRNNCall, linear_rnn

if TYPE_CHECKING:
    from onelaunch.ops.linear_rnn.launch import Layer
    from onelaunch.ops.linear_rnn.launch import Results as LaunchResults

Results = tuple[torch.Tensor, torch.Tensor]
"""Results of a variant: y, and the final states, which are ignored unless the call asks for them."""


@linear_rnn.variant("three_launch", compiles=True, launches=3, backward_launches=4, fuses=(), separates=("gate",), gemm="triton")
def three_launch(call: LinearRNNCall) -> Results:
    """Run a Triton matrix product, a scan kernel and a gate kernel: the baseline of experiment 040's write-up.

    The write-up is the source of this operation; docs/notebook/linear_rnn.md compares its results with ours.
    """
    v = matmul(call.x.flatten(0, 1), call.weight, grad=call.query().grad).unflatten(0, call.x.shape[:2])
    return scan.separate(call.scan_call(v))


@linear_rnn.variant(
    "three_launch_cublas", compiles=True, launches=3, backward_launches=4, fuses=(), separates=("gate",), gemm="cublas"
)
def three_launch_cublas(call: LinearRNNCall) -> Results:
    """Run PyTorch's matrix product, a scan kernel and a gate kernel: the control that experiment 040's write-up lacked."""
    return scan.separate(call.scan_call(call.project()))


@linear_rnn.variant("semi_fused", compiles=True, launches=2, backward_launches=3, fuses=("scan", "gate"), gemm="cublas")
def semi_fused(call: LinearRNNCall) -> Results:
    """Run PyTorch's matrix product, then scan and gate in one kernel."""
    return scan.fused(call.scan_call(call.project()))


@launches("chunked")
def run_chunked(layer: Layer) -> LaunchResults:
    """Launch the kernel that projects, scans and gates one tile per CTA: the Hopper kernel if it suits, else the portable one.

    ``one_launch(call, "chunked")`` finds this function by the name given to ``@launches``.
    """
    from onelaunch.ops.linear_rnn import launch, launch_hopper

    return launch_hopper.chunked(layer) if launch_hopper.suits(layer) else launch.chunked(layer)


@linear_rnn.variant(
    "fused_chunked", compiles=True, launches=1, backward_launches=3, fuses=("projection", "scan", "gate"), gemm="triton"
)
def fused_chunked(call: LinearRNNCall) -> Results:
    """Run one launch that uses tensor cores: a CTA per tile of time, the carry by decoupled look-back."""
    return one_launch(call, "chunked")


for _variant in (three_launch, three_launch_cublas, semi_fused, fused_chunked):
    _variant.supports(cannot_scan)


_WIDE = 512 * 512
"""Number of weights (D times V) from which PyTorch's matrix product gains more than its own launch costs."""


@linear_rnn.prefers
def library_product_for_wide_layers(query: Query) -> tuple[str, ...]:
    """Prefer PyTorch's matrix product for wide layers; the dispatcher asks if it has no measured times near the query.

    At D = V = 2048 two launches take 515 us on an H200, ``fused_chunked`` 927 us, because its product is slower than
    PyTorch's. The query's sizes are (B, T, D, V).
    """
    return ("semi_fused",) if query.device_type == "cuda" and query.sizes[2] * query.sizes[3] >= _WIDE else ()


def _layer_of(batch: int, width: int, **options: Any) -> Case:
    """Return the layer that kernels are compiled for: T=2048, V=64, float16, no packed sequences, no initial or final states."""
    return linear_rnn.case("float16", B=batch, T=2048, D=width, V=64, **options)


@three_launch.examples
@three_launch_cublas.examples
@semi_fused.examples
def training() -> list[Example]:
    """Return a training call, for which the kernels are compiled and inspected."""
    return [Example(_layer_of(4, 256), "forward_backward")]


@fused_chunked.examples
def every_tile() -> list[Example]:
    """Return training calls that together launch every kernel with its main tile sizes, with and without a gate.

    For Hopper ``launch_hopper.chunked_tiles`` chooses tiles of 32 channels for B=1 and of 64 channels for B=16. With D=1024 the
    k-blocks of a tile outnumber the stages of shared memory, so stages are loaded again. With D=260 a row has 520 bytes, no
    multiple of the 16 bytes that TMA needs, so the portable kernel runs.
    """
    on_hopper = ("sm_90a",)
    others = tuple(name for name in ARCHITECTURES if name not in on_hopper)
    return [
        Example(_layer_of(1, 256), "forward_backward", on_hopper, "32 channels"),
        Example(_layer_of(16, 256), "forward_backward", on_hopper, "64 channels"),
        Example(_layer_of(16, 1024), "forward_backward", on_hopper, "64 channels, D=1024"),
        Example(_layer_of(4, 260), "forward_backward", on_hopper, "D=260"),
        Example(_layer_of(16, 256, gate=False), "forward_backward", on_hopper, "64 channels, no gate"),
        Example(_layer_of(4, 256), "forward_backward", others),
        Example(_layer_of(4, 256, gate=False), "forward_backward", others, "no gate"),
    ]
