"""The variant ``fused_stepwise`` of ``linear_rnn``: one launch, with a vector-matrix product per time step.

Importing the package ``ablations`` registers it, and studies run it by name. ``launches`` registers a launch function by name;
``one_launch`` runs the one of a name, and makes its results differentiable.

Tags: ``fuses`` names the steps that share a kernel, here all three; ``ops/linear_rnn/cost.py`` reads it. ``gemm`` says how the
product is made. ``by_name_only`` keeps ``auto`` from choosing the variant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onelaunch.kernels.common.layout import cdiv, power_of_2
from onelaunch.launch.launch import Launch, Mma
from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import cannot_scan
from onelaunch.ops.linear_rnn.autograd import launches, one_launch
from onelaunch.ops.linear_rnn.contract import LinearRNNCall, linear_rnn

if TYPE_CHECKING:
    from onelaunch.ops.linear_rnn.launch import Layer, Results

WIDEST = 2048
"""Largest number of columns of x for which the kernel holds the weights in registers."""

CHANNELS = 16
"""Output channels of a CTA: its weights [D, 16] stay in registers."""


def _warps_for(width: int) -> int:
    """Return the number of warps, 4 to 16, with which each thread holds at most 64 weights of ``width`` columns of x."""
    return min(16, max(4, power_of_2(width) * CHANNELS // (32 * 64)))


@launches("stepwise")
def run_stepwise(layer: Layer) -> Results:
    """Project, scan and gate step by step, by a CTA for each sequence and :data:`CHANNELS` channels.

    For a backward pass the kernel stores the state before every ``BT``-th step: the shared backward kernel reads one per tile.
    """
    from onelaunch.ablations.kernels.linear_rnn import stepwise_kernel
    from onelaunch.kernels.scan.launch import scan_tiles

    layer, results, sequences = layer.in_rows(), layer.results(), layer.sequences
    batch, length, width, channels = layer.sizes
    count = sequences.count(batch)  # B, or the number of packed sequences
    Launch(
        stepwise_kernel, (count, cdiv(channels, CHANNELS)),
        *layer[:4],  # x, weight, log_decay, gate
        *sequences, results.y, results.v, results.final, results.carries,
        length, width, channels, count, *layer.strides(),
        BT=scan_tiles(length, channels).steps, BV=CHANNELS, BD=power_of_2(width),
        PACKED=sequences.offsets is not None, num_warps=_warps_for(width), mma=Mma.NONE, **layer.flags(),
    ).run()  # fmt: skip
    return results


@linear_rnn.variant(
    "fused_stepwise", launches=1, backward_launches=3, fuses=("projection", "scan", "gate"), gemm="vector", by_name_only=True
)
def fused_stepwise(call: LinearRNNCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute in one launch, with a vector-matrix product per time step.

    It lost in the write-up of experiment 040, and is kept for that result.
    """
    return one_launch(call, "stepwise")


fused_stepwise.supports(cannot_scan)


@fused_stepwise.supports
def fits_registers(query: Query) -> str | None:
    """Return why the weights do not fit into registers, or ``None``."""
    if query.sizes[2] > WIDEST:
        return f"needs D of at most {WIDEST}: it holds the weights of 16 channels in registers"
    return None


@fused_stepwise.examples
def training() -> list[Example]:
    """Return a training call without packing or states, for compiling its kernels without a GPU."""
    return [Example(linear_rnn.case("float16", B=4, T=2048, D=256, V=64), "forward_backward")]
