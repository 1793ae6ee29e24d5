"""The variant ``fused_few_rows`` of ``linear_rnn``: one launch for steps of decoding, in Triton, and in CUDA for Hopper.

``semi_fused_few_rows`` is its ablation: the same product in a launch of its own.

The kernel for Hopper is for at most 16 rows in bfloat16. On an H100 it is 1.41 to 2.32 times as fast as two launches (study
``040-decoding-step`` at c7cad683). With 64 rows the one in Triton is 1.66 times as fast as two launches at one step, and slower
at several (docs/notebook/linear_rnn.md). All times are of a weight stored by rows. With one by columns, as ``nn.LinearRNN`` has
it, the kernels passed their tests on an H100, and nothing was timed.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, here all
three; ``cost.py`` reads it. ``gemm`` says how the product is made, and ``partial_sums`` that parts of it may be summed through
memory, whose bytes ``cost.py`` counts. Other keywords are capabilities, which the class ``Capabilities`` of
``onelaunch.operation`` explains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import cannot_scan
from onelaunch.ops.gated_scan.variants import triton as scan
from onelaunch.ops.linear_rnn.autograd import launches, one_launch
from onelaunch.ops.linear_rnn.configure_few_rows import MOST_COLUMNS, MOST_ROWS
from onelaunch.ops.linear_rnn.contract import LinearRNNCall, linear_rnn

if TYPE_CHECKING:
    from onelaunch.ops.linear_rnn.launch import Layer, Results


FASTER_ROWS_OF_STEPS = 16
"""Most rows B T with which ``auto`` takes the variant if sequences have several steps.

On an H100 one launch was faster than two with 16 rows, at 16 steps of one sequence and at 4 of four, and took 1.13 to 1.14
times as long with 64, at 64 steps of one sequence and at 16 of four. Nothing between was measured. One step of 64 sequences was
1.66 times as fast.
"""


@launches("few_rows")
def run_few_rows(layer: Layer) -> Results:
    """Project, scan and gate by CTAs that each have all rows, and a slice of the weight."""
    from onelaunch.ops.linear_rnn import launch_few_rows

    return launch_few_rows.few_rows(layer)


@linear_rnn.variant(
    "fused_few_rows", compiles=True, launches=1, fuses=("projection", "scan", "gate"), gemm="triton", partial_sums=True,
    backward=False,
)  # fmt: skip
def fused_few_rows(call: LinearRNNCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one launch for at most 64 rows B T, as in decoding: every CTA has all rows and loads its slice of the weight at once.

    Product, scan and gate of a slice share a CTA, so neither v nor the states of steps go through memory. With more than 16 rows,
    parts of a slice's product do, as float32 sums, and the CTA that ends last finishes the slice. Forward only.
    """
    return one_launch(call, "few_rows")


@linear_rnn.variant(
    "semi_fused_few_rows", launches=2, fuses=("scan", "gate"), gemm="triton", partial_sums=True, backward=False,
    by_name_only=True,
)  # fmt: skip
def semi_fused_few_rows(call: LinearRNNCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the product of ``fused_few_rows`` in a launch of its own, then scan and gate in another: an ablation of the fusion.

    Each row counts as a sequence of one step without a state, for which the kernel stores v, and reads decays for nothing.
    """
    rows = call.x.shape[0] * call.x.shape[1]
    x, log_decay = (each.reshape(rows, 1, each.shape[2]) for each in (call.x, call.log_decay))
    alone = call._replace(x=x, log_decay=log_decay, gate=None, initial_state=None, cu_seqlens=None, output_final_state=False)
    v, _ = one_launch(alone, "few_rows")
    return scan.fused(call.scan_call(v.view(*call.x.shape[:2], -1)))


fused_few_rows.supports(cannot_scan)
semi_fused_few_rows.supports(cannot_scan)


@fused_few_rows.supports
@semi_fused_few_rows.supports
def has_few_rows(query: Query) -> str | None:
    """Return why a call has too many rows for a tile, or rows too long for offsets in it, or ``None``."""
    batch, length, width, _ = query.sizes
    if batch * length > MOST_ROWS:
        return f"takes at most {MOST_ROWS} rows B * T, not {batch * length}"
    return f"takes at most {MOST_COLUMNS} columns of x: offsets in a tile are 32-bit" if width > MOST_COLUMNS else None


@fused_few_rows.by_name_where
def has_more_steps_than_pay(query: Query) -> str | None:
    """Return why ``auto`` leaves the variant out though the kernel can run the call, or ``None``."""
    batch, length, *_ = query.sizes
    if length == 1 or batch * length <= FASTER_ROWS_OF_STEPS:
        return None
    rows = f"{FASTER_ROWS_OF_STEPS} rows B * T of several steps"
    return f"is left out beyond {rows}, up to which it was measured to be faster than semi_fused"


@semi_fused_few_rows.examples
def a_step() -> list[Example]:
    """Return a step of one sequence from a state into a state."""
    return [Example(linear_rnn.case("bfloat16", B=1, T=1, D=2048, V=2048, initial_state=True, final_state=True))]


@fused_few_rows.examples
def steps_of_decoding() -> list[Example]:
    """Return steps of one and more sequences, a few steps of one sequence, most rows, and packed sequences.

    The calls take both ways to multiply, one part and two, and each number of warps. In 16 bits up to 16 rows share a kernel.
    D=260 and V=100 are no multiples of a tile.
    """
    states = {"initial_state": True, "final_state": True}
    wide: dict[str, Any] = {"D": 2048, "V": 2048, **states}
    return [
        Example(linear_rnn.case("bfloat16", B=1, T=1, **wide), name="at most 16 rows"),
        Example(linear_rnn.case("bfloat16", B=1, T=16, **wide), name="16 steps"),
        Example(linear_rnn.case("float16", B=16, T=1, D=2048, V=2048, gate=False), name="no gate, no states"),
        Example(linear_rnn.case("bfloat16", B=32, T=1, **wide), name="32 rows"),
        Example(linear_rnn.case("float16", B=4, T=16, **wide, log_decay_dtype="float32"), name="64 rows, float32 decays"),
        Example(linear_rnn.case("float16", B=1, T=20, D=260, V=100, lengths=(0, 12, 8), **states), name="packed, D=260 V=100"),
        Example(linear_rnn.case("float32", B=1, T=1, **wide), name="1 row, float32"),
        Example(linear_rnn.case("float32", B=16, T=1, **wide), name="16 rows, float32"),
    ]
