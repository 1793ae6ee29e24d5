"""Variant ``hopper_in_turns`` of ``gla``: the control of ``hopper`` in which nothing overlaps.

Importing the package ``ablations`` registers it, and studies run it by name: the study ``039-overlap`` compares both variants.
They run the same kernels with the same tiles, stages, products and registers. Here the constant TURNS of
ops/gla/kernels/hopper_chunk_state.py makes loads, the warpgroup that prepares chunks and those that multiply take turns.
``launches`` registers a launch function by name; ``attend_aligned`` runs the one of a name, and makes its results differentiable.

Tags: those of ``hopper``, and ``overlap``. So the two variants differ in one factor, and the workbench takes this one as the
control that explains what ``hopper`` saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onelaunch.operation import Example
from onelaunch.operation.requirements import cannot_multiply, lacks_shared_memory
from onelaunch.ops.gla.autograd import IN_TURNS, Results, launches
from onelaunch.ops.gla.contract import GlaCall, gla
from onelaunch.ops.gla.variants.hopper import TAGS, attend_aligned, fits
from onelaunch.ops.gla.variants.triton import no_value_gate

if TYPE_CHECKING:
    from onelaunch.ops.gla.launch import Attention


@launches(IN_TURNS)
def launch_in_turns(call: Attention, want_final: bool) -> Results:
    """Launch the pass along time, in which loads, preparing and multiplying take turns."""
    from onelaunch.ops.gla import launch, launch_hopper

    final = launch.empty_final(call, wanted=want_final)
    return launch_hopper.forward(call, final=final if want_final else None, turns=True), final


@gla.variant(IN_TURNS, overlap=False, by_name_only=True, **TAGS)
def hopper_in_turns(call: GlaCall) -> Results:
    """Compute as ``hopper``, without overlap: a chunk is loaded, prepared and multiplied before the next one is loaded.

    It shows how much of the speed of ``hopper`` comes from overlap. In the backward pass both passes along time take turns; the
    kernel of dq, dk and dg has a single role, so it is the same in both variants.
    """
    return attend_aligned(call, IN_TURNS)


# A call that the variant cannot run gets the reason of the first check that it fails, in this order.
for _check in (cannot_multiply, no_value_gate, fits, lacks_shared_memory):
    hopper_in_turns.supports(_check)


@hopper_in_turns.examples
def training() -> list[Example]:
    """Return training calls for compiling kernels without a GPU: a decay per channel and per head, T whole and in segments."""
    sizes = {"K": 128, "V": 128}
    return [
        Example(
            gla.case("bfloat16", B=batch, T=32768 // batch, H=heads, decay_per=per, **sizes),
            "forward_backward",
            name=f"K = V = 128, decay per {per}, {said}",
        )
        for per in ("channel", "head")
        for said, batch, heads in (("T whole", 8, 36), ("T in parts", 1, 12))
    ]
