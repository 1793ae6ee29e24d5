"""Portable variants of ``gla`` in Triton, and the preference among all variants for calls of a few steps.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel. ``hands``
and ``backward_hands`` name the intermediates that the launches of each pass hand on through device memory, and ``chunk`` is the
number of steps per chunk; ``cost.py`` reads these three and explains each name. Other keywords are capabilities, which the class
``Capabilities`` of ``onelaunch.operation`` explains. ``launch.py`` launches the kernels. ``hopper.py`` and the ablations share
:func:`no_value_gate`, the ablations also :data:`BACKWARD` and :func:`training`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import cannot_multiply
from onelaunch.ops.gla.autograd import Results, attend, launches
from onelaunch.ops.gla.contract import FUSED_RECURRENT, GlaCall, gla
from onelaunch.ops.gla.heads import group_of

if TYPE_CHECKING:
    from onelaunch.ops.gla.launch import Attention

BACKWARD: dict[str, Any] = {
    "chunk": 64,
    "backward_launches": 4,
    "backward_hands": ("rounded_states", "rounded_states", "partial_gradients"),
}
"""Tags of a variant with the portable backward pass.

Two passes that leave a state per chunk, and two kernels over all chunks. Where heads of q, k or g are shared, one more launch for
each of these adds up their gradients.
"""


@launches("fused")
def launch_fused(call: Attention, want_final: bool) -> Results:
    """Launch the chunk state pass, then the chunk output."""
    from onelaunch.ops.gla import launch

    return launch.forward(call, want_final=want_final)


@gla.variant("fused", compiles=True, launches=2, fuses=("decay", "scores"), hands=("rounded_states",), **BACKWARD)
def fused(call: GlaCall) -> Results:
    """Compute by a chunk state pass, then the outputs of all chunks at once, for any decay; only the inputs are saved.

    Final states and float32 gradients have float32 accuracy, also in 16-bit calls: about that of PyTorch's form, a thousandth of
    what the operation states for them. Name this variant where a state must not be rounded.

    Float32 inputs are multiplied in TF32 on NVIDIA GPUs if ``torch.backends.cuda.matmul.allow_tf32`` says so, as in PyTorch's own
    products.
    """
    return attend(call, "fused")


@launches("stepwise")
def launch_stepwise(call: Attention, want_final: bool) -> Results:
    """Launch the loop over time."""
    from onelaunch.ops.gla import launch

    return launch.step(call, want_final=want_final)


@gla.variant("stepwise", compiles=True, launches=1, fuses=("decay", "states"), hands=(), **BACKWARD)
def stepwise(call: GlaCall) -> Results:
    """Compute in one launch, a step at a time in float32, for decoding and a few steps.

    Its backward pass is that of ``fused``.
    """
    return attend(call, "stepwise")


_FEW_STEPS_CPU, _SMALL_STATE = 4, 1 << 16
"""Most steps for which a CPU prefers the loop over time where nothing was measured, and the largest size of its states.

The size is the number of elements of the states of all sequences and heads. It does not matter for a single step.
"""

FEW_STEPS = 16
"""Most steps that a loop finishes before two launches over a chunk of 64 have begun."""

_FEW_TRAINED_STEPS = 64
"""Most steps for which four loops take less time than the six launches over a single chunk of the portable kernels."""

_FILLING = 1 << 19
"""Fewest elements of the states of all heads for which a loop over many steps has enough warps to take less time than chunks.

By arithmetic: 32 heads of 128 by 128 are 256 warps, half of what an H100 runs at full speed.
"""

_WIDE, _WIDEST = 128, 256
"""Most key channels of the heads that ``hopper`` takes, with float32 and with 16-bit log-decays per channel."""


@gla.prefers
def by_length(query: Query) -> tuple[str, ...]:
    """Return the variants to prefer for a few steps, as in decoding: chunks of 64 steps would be mostly padding.

    On GPUs, calls with a gate on values take ``fused_recurrent``, the only kernel that has it. It comes before ``fused`` also
    where that multiplies float32 and for heads whose keys are too wide for ``hopper``, if there are many heads, and for few
    steps with gradients. Measured is only float32 forward with TF32 allowed, 4x2048x16x128 on an H100: the first form of the
    kernel 1.34 ms, ``fused`` 2.54, and fla, which runs only by name, 0.58. There ``hopper_tf32`` comes first; the notebook's
    prediction for it is 0.36. The rest is by the arithmetic in the operation's notebook.

    Other calls get none, and keep the order of the operation's ``defaults``. On a CPU (AMD EPYC, one thread, float32, forward
    with states, medians of 40 interleaved rounds) one step takes ``recurrent`` 0.12 ms and ``chunked`` 0.33 at one head of 16
    channels, 0.45 and 2.4 ms at 16 heads of 128, and 3.2 and 7.7 ms at eight times that. The loop copies the states once a
    step: four steps take 0.39 and 0.65 ms at 4 heads of 64 channels, but 34 and 8.5 ms at 128 heads of 128.
    """
    batch, steps, heads, keys, values = query.sizes
    if query.device_type == "cuda" and (query.grad or steps > FEW_STEPS or "value_gate" in query.flags):
        most = _WIDE if "float32_decay" in query.flags else _WIDEST
        wide = keys > most and "scalar_decay" not in query.flags
        fills = batch * heads * keys * values >= _FILLING
        many = fills and (query.dtype is torch.float32 or wide)
        one_by_one = many or "value_gate" in query.flags or steps <= _FEW_TRAINED_STEPS
        # Beside few steps the launches that copy float32 tensors for ``hopper_tf32`` take longer than a loop.
        in_chunks = ("hopper",) if steps <= _FEW_TRAINED_STEPS else ("hopper", "hopper_tf32")
        return (*in_chunks, FUSED_RECURRENT) if one_by_one else ()
    if query.grad:
        return ()
    heads //= group_of(query.flags, "state")
    if query.device_type == "cpu":
        few = steps == 1 or (steps <= _FEW_STEPS_CPU and batch * heads * keys * values <= _SMALL_STATE)
        return ("recurrent",) if few and "packed" not in query.flags else ()
    return ("stepwise",) if query.device_type == "cuda" and steps <= FEW_STEPS else ()


@fused.supports
@stepwise.supports
def no_value_gate(query: Query) -> str | None:
    """Return why the kernels, in which states decay along keys only, cannot run a call, or ``None``."""
    return "takes no gate on values" if "value_gate" in query.flags else None


fused.supports(cannot_multiply)
stepwise.supports(cannot_multiply)


def training(keys: int, values: int, layouts: tuple[str, ...] = ("channel", "head")) -> list[Example]:
    """Return training calls to compile and inspect the kernels for, with one decay per each of ``layouts``."""
    return [
        Example(
            gla.case("bfloat16", B=4, T=2048, H=4, K=keys, V=values, decay_per=per), "forward_backward", name=f"decay per {per}"
        )
        for per in layouts
    ]


@fused.examples
def usual_heads() -> list[Example]:
    """Return training calls with heads of usual sizes, one head for each output and shared ones."""
    sizes: dict[str, Any] = {"B": 4, "T": 2048, "H": 16, "K": 128, "V": 128}
    shared: dict[str, dict[str, Any]] = {
        "4 heads of q and k": {"q_heads": 4, "k_heads": 4, "decay_per": "head"},
        "4 heads of k, v and g": {"k_heads": 4, "v_heads": 4, "g_heads": 4},
    }
    grouped = [
        Example(gla.case("bfloat16", **sizes, **options), "forward_backward", name=name) for name, options in shared.items()
    ]
    return [*training(128, 128), *grouped]


@stepwise.examples
def decoding() -> list[Example]:
    """Return steps of decoding with heads of usual and of the largest size and with shared heads, and training calls."""
    states = {"initial_state": True, "final_state": True}
    steps = [
        Example(gla.case("bfloat16", B=64, T=1, H=4, K=keys, V=keys, **states), name=f"K = {keys}, from a state into a state")
        for keys in (128, 512)
    ]
    heads: dict[str, Any] = dict.fromkeys(("k_heads", "v_heads", "g_heads", "state_heads"), 4)
    shared = gla.case("bfloat16", B=64, T=1, H=16, K=128, V=128, **heads, **states)
    return [*steps, Example(shared, name="4 heads of all but q, from a state into a state"), *training(128, 128)]
