"""Variants ``sequential`` and ``pipelined`` of ``gla``: the baseline of experiment 039, and its double buffering by hand.

Importing the package ``ablations`` registers both, and studies run them by name. ``launches`` registers a launch function by
name; ``attend`` runs the one of a name, and makes its results differentiable.

Tags: ``fuses`` names the steps that share a kernel, and ``hands`` the intermediates that go through device memory, here none;
``ops/gla/cost.py`` reads ``hands``. :data:`BACKWARD` holds the tags of the portable backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onelaunch.launch.launch import Launch, Mma
from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import cannot_multiply
from onelaunch.ops.gla.autograd import Results, attend, launches
from onelaunch.ops.gla.contract import GlaCall, gla
from onelaunch.ops.gla.heads import why_grouped
from onelaunch.ops.gla.variants.triton import BACKWARD, no_value_gate, training

if TYPE_CHECKING:
    from onelaunch.ops.gla.launch import Attention, Tiles

LARGEST_KEYS = 64
"""Largest K for which a CTA holds a whole state in registers."""


def _forward_tiles(keys: int, values: int) -> Tiles:
    """Return the tiles of the single launch: all keys, and as many values as registers allow."""
    from onelaunch.ops.gla.launch import Tiles, block

    return Tiles(block(keys, LARGEST_KEYS), block(values, 32), warps=8)


def forward(call: Attention, *, want_final: bool, prefetch: bool) -> Results:
    """Compute o and the final state in one launch.

    With ``prefetch`` it loads the next chunk before it works on one, otherwise after. The kernel's file and
    ops/gla/kernels/chunk.py, which it imports, say what the constants mean.
    """
    from onelaunch.ablations.kernels.gla import forward_kernel
    from onelaunch.kernels.common.layout import cdiv
    from onelaunch.ops.gla.launch import empty_final, strides

    _, _, heads, keys, values = call.sizes
    tiles, rounding = _forward_tiles(keys, values), call.rounding
    out = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    final = empty_final(call, wanted=want_final)
    Launch(
        forward_kernel, (call.sequence_count * heads * cdiv(values, tiles.values),),
        call.q, call.k, call.v, call.g, call.sequences.initial, call.sequences.offsets, out, final, call.scale,
        *call.numbers(), *strides(call.q, call.k, call.v, call.g), mma=Mma.WARP,
        BS=min(tiles.keys, 16), PARTS=rounding.parts, STATE_PARTS=call.parts(want_final),
        LIMIT=rounding.limit, LARGEST=rounding.largest, FIRST=call.sequences.initial is not None, LAST=want_final,
        PREFETCH=prefetch, num_stages=tiles.stages, **call.flags(tiles, exact=want_final),
    ).run()  # fmt: skip
    return out, final


@launches("sequential")
def launch_sequential(call: Attention, want_final: bool) -> Results:
    """Launch the pass along time that loads a chunk after it has worked on the one before."""
    return forward(call, want_final=want_final, prefetch=False)


@gla.variant("sequential", launches=1, fuses=("decay", "scores", "states"), hands=(), by_name_only=True, **BACKWARD)
def sequential(call: GlaCall) -> Results:
    """Compute in one launch along time, load after product after load: the write-up's baseline.

    The write-up is that of experiment 039, whose table studies/039-chunkwise-gla.toml quotes. Its backward pass is that of
    ``fused``.
    """
    return attend(call, "sequential")


@launches("pipelined")
def launch_pipelined(call: Attention, want_final: bool) -> Results:
    """Launch the pass along time that loads a chunk before it works on the one before."""
    return forward(call, want_final=want_final, prefetch=True)


@gla.variant("pipelined", launches=1, fuses=("decay", "scores", "states"), hands=(), by_name_only=True, **BACKWARD)
def pipelined(call: GlaCall) -> Results:
    """Compute as ``sequential``, double-buffered by hand: the next chunk's loads wait in registers.

    It lost in the write-up of experiment 039, and again on an H200: its forward pass takes 1.5 to 2.3 times as long as that of
    ``sequential`` (results/nvidia-h200/039-chunkwise-gla.json). It is kept for that result.
    """
    return attend(call, "pipelined")


# A call that these variants cannot run gets the reason of the first check that it fails, in this order.
for _variant in (sequential, pipelined):
    _variant.supports(no_value_gate)


@sequential.supports
@pipelined.supports
def holds_the_state(query: Query) -> str | None:
    """Return why these variants, whose CTAs hold all keys of a state of one head, cannot run a call, or ``None``."""
    if query.sizes[3] > LARGEST_KEYS:
        return f"needs K of at most {LARGEST_KEYS}: it holds the state in registers"
    return why_grouped(query.flags)


for _variant in (sequential, pipelined):
    _variant.supports(cannot_multiply)


@sequential.examples
@pipelined.examples
def small_heads() -> list[Example]:
    """Return a training call whose heads have the most keys that these variants take, for compiling kernels without a GPU."""
    return training(LARGEST_KEYS, 64, ("channel",))
