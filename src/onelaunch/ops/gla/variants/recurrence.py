"""Variant ``fused_recurrent`` of ``gla``: one step after another, with decays of keys and of values, in both passes.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel. ``hands``
and ``backward_hands`` name the intermediates that the launches of each pass hand on through device memory; ``cost.py`` reads them
and explains each name. Other keywords are capabilities, which the class ``Capabilities`` of ``onelaunch.operation`` explains.
``launch_recurrence.py`` launches the kernel. ``functions.py`` names this variant where it can reverse time without copies.
"""

from __future__ import annotations

from typing import Any

from onelaunch.operation import Example
from onelaunch.operation.requirements import cannot_launch
from onelaunch.ops.gla.autograd_recurrence import attend
from onelaunch.ops.gla.contract import FUSED_RECURRENT, GlaCall, gla


@gla.variant(
    FUSED_RECURRENT, compiles=True, launches=1, backward_launches=3, fuses=("decay", "states"), hands=(),
    backward_hands=("bare_results", "kept_states", "partial_gradients", "partial_value_gradients"),
)  # fmt: skip
def fused_recurrent(call: GlaCall) -> tuple[Any, Any]:
    """Compute a step at a time in float32, forward and backward, also where value channels decay or time is reversed.

    A warp holds a block of the state's columns with all of its rows, so results are whole sums. The backward pass is three
    more loops over time, for dq, for dk and dg, and for dv and dgv. Without gradients up to 16 steps per sequence run in the
    kernel of ``stepwise``. Results are float32 before they are rounded, TF32 or not: with TF32 allowed, fla's chunks took
    0.58 ms where the first form of this variant took 1.34 (4x2048x16x128 forward on an H100). The gradients of log-decays are
    sums in which terms cancel: in float32 their error is up to four times that of PyTorch's loop.
    """
    return attend(call)


fused_recurrent.supports(cannot_launch)


@fused_recurrent.examples
def gated_values() -> list[Example]:
    """Return calls with decays of values: training, shared heads, and a step of decoding."""
    sizes: dict[str, Any] = {"B": 4, "T": 2048, "H": 16, "K": 128, "V": 128}
    states = {"initial_state": True, "final_state": True}
    shared: dict[str, Any] = dict.fromkeys(("k_heads", "v_heads", "g_heads"), 4)
    return [
        Example(gla.case("bfloat16", **sizes, value_gate=True), "forward_backward", name="decays of keys and values"),
        Example(
            gla.case("bfloat16", **sizes, value_gate=True, decay_per="head", **shared),
            "forward_backward",
            name="4 heads of k, v, g and gv, a decay per head",
        ),
        Example(gla.case("float32", **(sizes | {"T": 64}), **states), "forward_backward", name="float32, states"),
        Example(
            gla.case("bfloat16", B=16, T=1, H=32, K=128, V=128, value_gate=True, **states),
            name="a step, from a state into a state",
        ),
    ]
