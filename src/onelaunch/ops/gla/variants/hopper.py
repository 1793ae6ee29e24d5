"""Variant ``hopper`` of ``gla``: the state stays in registers along time, and a warpgroup decays keys while others multiply.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel. ``hands``
and ``backward_hands`` name the intermediates that the launches of each pass hand on through device memory, ``chunk`` is the
number of steps per chunk, and ``padded`` says that stored states have padded sizes; ``cost.py`` reads these four and explains
each name. ``gemm`` says how products are made. Other keywords are capabilities, which the class ``Capabilities`` of
``onelaunch.operation`` explains. ``launch_hopper.py`` launches the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onelaunch.device.hardware import is_hopper
from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import cannot_multiply, lacks_shared_memory
from onelaunch.ops.gla.autograd import Results, attend, launches
from onelaunch.ops.gla.contract import GlaCall, gla
from onelaunch.ops.gla.padding import KEYS, STEP, aligned
from onelaunch.ops.gla.variants.triton import no_value_gate

if TYPE_CHECKING:
    from onelaunch.ops.gla.launch import Attention

LARGEST_WIDE = 128
"""Largest size K of heads with float32 log-decays per channel, which take twice the shared memory."""


TAGS: dict[str, Any] = {
    "launches": 1, "backward_launches": 3, "fuses": ("decay", "scores", "states"), "hands": ("aligned",), "chunk": 64,
    "backward_hands": (
        "aligned", "rounded_states", "rounded_state_gradients", "second_terms", "partial_gradients", "partial_value_gradients",
    ),
    "padded": True, "gemm": "gluon", "architectures": ("sm_90a",),
}  # fmt: skip
"""Tags and capabilities of ``hopper``, which its control in ablations/gla_in_turns.py shares."""


@launches("hopper")
def launch_forward(call: Attention, want_final: bool) -> Results:
    """Launch the pass along time, which stores the final state from its registers if it is wanted."""
    from onelaunch.ops.gla import launch, launch_hopper

    final = launch.empty_final(call, wanted=want_final)
    return launch_hopper.forward(call, final=final if want_final else None), final


@gla.variant("hopper", **TAGS)
def hopper(call: GlaCall) -> Results:
    """Compute o in one launch along time, or two where T is cut into segments to fill the chip; states stay in registers.

    Where sequences are short, segments need no second launch: each CTA of the forward pass recomputes the state at the start of
    its segment. The backward pass has three launches: two passes along time and the gradients of all chunks. There is one
    more for each pass in segments, two of PyTorch's that add up one decay per head over panels of channels, and one for each
    tensor with shared heads. The kernels read shared heads where they are. What each head of the output gives to the gradient
    of a shared head is stored in float32, and the sum of these parts is rounded once.

    Heads of other sizes than tiles of 64, 128 or 256 keys and 64 or 128 values are padded on chip (padding.py): no more bytes
    of the call's tensors move, but products take as long as those of the padded sizes. With K of at most 32 half of each
    product or more is of padding, which costs no time as long as memory decides. Heads whose sizes are no multiples of 8, which
    TMA cannot address, are copied into the next larger multiple, and so are their gradients on the way back.
    """
    return attend_aligned(call, "hopper")


def attend_aligned(call: GlaCall, kernel: str) -> Results:
    """Run the variant named ``kernel``, of these kernels; heads whose sizes TMA cannot address are copied into larger ones."""
    *_, keys, values = call.query().sizes
    if keys % STEP == 0 and values % STEP == 0:
        return attend(call, kernel)
    # Padding keeps results as they are: its queries, keys and values are 0, and its log-decays of 0 decay nothing.
    initial = None if call.initial_state is None else aligned(call.initial_state, states=True)
    g = call.g if call.per_head else aligned(call.g)
    padded = call._replace(q=aligned(call.q), k=aligned(call.k), v=aligned(call.v), g=g, initial_state=initial)
    o, final = attend(padded, kernel)
    if call.output_final_state:
        final = _row_major(final[..., :keys, :values])
    return _row_major(o[..., :values]), final


def _row_major(part: torch.Tensor) -> torch.Tensor:
    """Return a copy in row-major order. Unlike ``contiguous``, ``clone`` also works on a pretended device (``prebuild``)."""
    return part.clone(memory_format=torch.contiguous_format)


hopper.supports(cannot_multiply)
hopper.supports(no_value_gate)


@hopper.supports
def fits(query: Query) -> str | None:
    """Return why TMA, the registers or the required accuracy exclude a call, or ``None``."""
    if not is_hopper(torch.device(query.device)):
        return "needs a Hopper GPU (compute capability 9.x)"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return "needs float16 or bfloat16"
    keys = query.sizes[3]
    if keys > KEYS[-1]:
        return f"needs K of at most {KEYS[-1]}"
    if "float32_decay" in query.flags and "scalar_decay" not in query.flags and keys > LARGEST_WIDE:
        return f"needs K of at most {LARGEST_WIDE} with float32 log-decays per channel: shared memory holds no two wider chunks"
    return None


hopper.supports(lacks_shared_memory)

_GROUPED: dict[str, dict[str, Any]] = {
    "4 heads of q and k": {"q_heads": 4, "k_heads": 4},
    "4 heads of k, v and g": {"k_heads": 4, "v_heads": 4, "g_heads": 4},
}
"""Options of the examples with shared heads, of 16 heads of the output."""


@hopper.examples
def training() -> list[Example]:
    """Return training calls to compile and inspect the kernels for: two head sizes, with T whole and cut into segments.

    One more has states and float32 log-decays, whose tiles take twice the shared memory, two have heads that are padded, and
    others have shared heads.
    """
    whole: dict[str, Any] = {"B": 8, "T": 4096, "H": 36}
    parts: dict[str, Any] = {"B": 1, "T": 32768, "H": 12}
    usual = [
        Example(
            gla.case("bfloat16", K=size, V=size, decay_per=per, **sizes),
            "forward_backward",
            name=f"K = V = {size}, decay per {per}, {said}",
        )
        for size in (128, 256)
        for per in ("channel", "head")
        for said, sizes in (("T whole", whole), ("T in parts", parts))
    ]
    others = [
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
    grouped = [
        Example(
            gla.case("bfloat16", B=4, T=2048, H=16, K=128, V=128, decay_per=per, **shared),
            "forward_backward",
            name=f"K = V = 128, decay per {per}, {said}",
        )
        for per in ("channel", "head")
        for said, shared in _GROUPED.items()
    ]
    return [*usual, *others, *grouped]
