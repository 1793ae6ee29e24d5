"""Variant ``hopper`` of ``gla``: the state stays in registers along time, and a warpgroup decays keys while others multiply.

cost.py explains the tags ``chunk``, ``hands``, ``backward_hands`` and ``padded``; launch_hopper.py launches the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onelaunch.device.hardware import is_hopper
from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import cannot_scan
from onelaunch.ops.gla.autograd import Results, attend, launches
from onelaunch.ops.gla.contract import GlaCall, gla
from onelaunch.ops.gla.heads import expanded, group_of
from onelaunch.ops.gla.padding import KEYS, STEP
from onelaunch.ops.gla.variants.triton import no_value_gate

if TYPE_CHECKING:
    from onelaunch.ops.gla.launch import Attention

LARGEST_WIDE = 128
"""Largest size K of heads with float32 log-decays per channel, which take twice the shared memory."""


@launches("hopper")
def launch_forward(call: Attention, want_final: bool) -> Results:
    """Launch the pass along time, which stores the final state from its registers if it is wanted."""
    from onelaunch.ops.gla import launch, launch_hopper

    final = launch.empty_final(call, wanted=want_final)
    return launch_hopper.forward(call, final=final if want_final else None), final


@gla.variant(
    "hopper", launches=1, backward_launches=3, fuses=("decay", "scores", "states"), hands=("repeated",), chunk=64,
    backward_hands=("rounded_states", "rounded_states", "repeated"), padded=True, gemm="gluon", architectures=("sm_90a",),
)  # fmt: skip
def hopper(call: GlaCall) -> Results:
    """Compute o in one launch along time, or two where T is cut into segments to fill the chip; states stay in registers.

    The backward pass has three launches: two passes along time and the gradients of all chunks. There is one more for each pass
    in segments, and two of PyTorch's that add up one decay per head over panels of channels.

    Heads of other sizes than tiles of 64, 128 or 256 keys and 64 or 128 values are padded on chip (padding.py): no more bytes
    of the call's tensors move, but products take as long as those of the padded sizes. With K of at most 32 half of each
    product or more is of padding, which costs no time as long as memory decides. Shared heads are repeated in memory first,
    which the cost counts: these kernels take one head of every tensor for each head of the output.
    """
    o, final = attend(with_all_heads(call), "hopper")
    # Of the heads of the output that share a state, the first one's is returned: all of them computed the same.
    shared = call.heads.groups.state
    return o, final[:, ::shared].contiguous() if call.output_final_state and shared > 1 else final


def with_all_heads(call: GlaCall) -> GlaCall:
    """Return the call with a copy of every shared head for each head of the output; the call itself if no heads are shared."""
    if not call.heads.grouped:
        return call
    heads = call.heads.output
    q, k, v, g = (expanded(each, heads) for each in (call.q, call.k, call.v, call.g))
    initial = None if call.initial_state is None else expanded(call.initial_state, heads, dim=1)
    return call._replace(q=q, k=k, v=v, g=g, initial_state=initial)


hopper.supports(cannot_scan)
hopper.supports(no_value_gate)


@hopper.supports
def fits(query: Query) -> str | None:
    """Return why TMA, the registers or the required accuracy exclude a call, or ``None``."""
    if not is_hopper(torch.device(query.device)):
        return "needs a Hopper GPU (compute capability 9.x)"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return "needs float16 or bfloat16"
    batch, length, heads, keys, values = query.sizes
    if keys > KEYS[-1] or keys % STEP or values % STEP:
        return f"needs K of at most {KEYS[-1]}, and K and V that are multiples of {STEP}"
    if not batch * length * heads:
        return "needs at least one step"
    if "float32_decay" in query.flags and "scalar_decay" not in query.flags and keys > LARGEST_WIDE:
        return f"needs K of at most {LARGEST_WIDE} with float32 log-decays per channel: shared memory holds no two wider chunks"
    return why_no_gradients(query) if query.grad else None


def why_no_gradients(query: Query) -> str | None:
    """Return why the backward pass leaves a call to other variants, or ``None``.

    Gradients of q, k and v have 16 bits, and float16 has too narrow a range for products of gradients. The gradients of a shared
    head are rounded before PyTorch adds them. With a decay per channel, that of v is not accurate enough for this: tests of
    such calls failed on an H100. By estimate, errors of 2.9e-3 and 1.7e-3 make 3.3e-3, and twice PyTorch's error is 3.3e-3.
    """
    if query.dtype is torch.float16:
        return "trains in bfloat16 alone: products of gradients leave the range of float16"
    if "scalar_decay" not in query.flags and group_of(query.flags, "v") > 1:
        return "trains no shared heads of v with a decay per channel: it would round their gradients twice"
    return None


@hopper.examples
def training() -> list[Example]:
    """Return training calls to compile and inspect the kernels for: two head sizes, with T whole and cut into segments.

    One more has states and float32 log-decays, whose tiles take twice the shared memory, and two have heads that are padded.
    """
    whole: dict[str, Any] = {"B": 8, "T": 4096, "H": 36}
    parts: dict[str, Any] = {"B": 1, "T": 32768, "H": 12}
    return [
        Example(
            gla.case("bfloat16", K=size, V=size, decay_per=per, **sizes),
            "forward_backward",
            name=f"K = V = {size}, decay per {per}, {said}",
        )
        for size in (128, 256)
        for per in ("channel", "head")
        for said, sizes in (("T whole", whole), ("T in parts", parts))
    ] + [
        Example(
            gla.case("bfloat16", K=128, V=128, initial_state=True, final_state=True, log_decay_dtype="float32", **whole),
            "forward_backward",
            name="K = V = 128, float32 decay per channel, states, T whole",
        ),
        Example(
            gla.case("bfloat16", K=96, V=80, initial_state=True, final_state=True, **whole),
            "forward_backward",
            name="K = 96, V = 80, decay per channel, states, T whole",
        ),
        Example(
            gla.case("bfloat16", K=48, V=144, decay_per="head", **parts),
            "forward_backward",
            name="K = 48, V = 144, decay per head, T in parts",
        ),
    ]
