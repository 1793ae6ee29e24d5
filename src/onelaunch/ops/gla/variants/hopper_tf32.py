"""Variant ``hopper_tf32`` of ``gla``: float32 calls in the kernels of ``hopper``, where PyTorch's settings allow TF32.

The dispatcher, studies and tests find registered variants by name. The tags are explained in hopper.py; ``hands`` and
``backward_hands`` name copies besides. ``launch_hopper_tf32.py`` launches the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onelaunch.device.hardware import is_hopper
from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import cannot_multiply, lacks_shared_memory
from onelaunch.ops.gla.autograd import TF32, Results, launches
from onelaunch.ops.gla.contract import GlaCall, gla
from onelaunch.ops.gla.padding import KEYS
from onelaunch.ops.gla.variants.hopper import LARGEST_WIDE, attend_aligned
from onelaunch.ops.gla.variants.triton import no_value_gate

if TYPE_CHECKING:
    from onelaunch.ops.gla.launch import Attention

_LONGEST = 1 << 20
"""Most steps of a call: with more, copies would be so small, to keep sums over all steps in range, that they lose bits."""


@launches(TF32)
def launch_forward(call: Attention, want_final: bool) -> Results:
    """Launch the copies and the pass along time, which stores the final state from its registers if it is wanted."""
    from onelaunch.ops.gla import launch, launch_hopper_tf32

    final = launch.empty_final(call, wanted=want_final)
    return launch_hopper_tf32.forward(call, final=final if want_final else None), final


@gla.variant(
    TF32, launches=3, backward_launches=5, fuses=("decay", "scores", "states"), hands=("aligned", "float16_copies"), chunk=64,
    backward_hands=(
        "aligned", "float16_copies", "float16_gradient", "float16_states", "partial_gradients", "partial_value_gradients",
    ),
    padded=True, gemm="gluon", architectures=("sm_90a",),
)  # fmt: skip
def hopper_tf32(call: GlaCall) -> Results:
    """Compute float32 calls where TF32 is allowed: q, k and v become float16 times powers of 2, then ``hopper``'s kernels run.

    float16 has the 11 significant bits of TF32. Two launches find the largest magnitude of each head of each sequence and write
    the copies; powers of 2 make them as large as bounds of all sums allow, so that nothing overflows on the way. Results are
    float32, of which the powers are taken off exactly. States stay float32 in registers. The backward pass makes the copies
    again, with one of the gradient of o.

    What float16 lacks is TF32's range: an element below about 2^-15 of the largest of its head and sequence has fewer bits, and
    one below 2^-26 is 0. Errors are small beside the largest results of a head, but not beside results of steps at which all
    elements of q, k or v are that small. inf may come out as NaN.
    """
    return attend_aligned(call, TF32)


# A call that the variant cannot run gets the reason of the first check that it fails, in this order.
for _check in (cannot_multiply, lacks_shared_memory, no_value_gate):
    hopper_tf32.supports(_check)


@hopper_tf32.supports
def fits(query: Query) -> str | None:
    """Return why the device, the dtype, PyTorch's settings, the registers or the range exclude a call, or ``None``."""
    if not is_hopper(torch.device(query.device)):
        return "needs a Hopper GPU (compute capability 9.x)"
    if query.dtype is not torch.float32:
        return "needs float32"
    if "tf32" not in query.flags:
        return 'needs TF32 to be allowed: torch.backends.cuda.matmul.fp32_precision = "tf32"'
    keys, most = query.sizes[3], KEYS[-1] if "scalar_decay" in query.flags else LARGEST_WIDE
    if keys > most:
        return f"needs K of at most {most}, or {KEYS[-1]} with log-decays per head: shared memory holds no two wider chunks"
    return None if query.sizes[1] <= _LONGEST else f"needs at most {_LONGEST} steps: its copies would be too small"


@hopper_tf32.examples
def training() -> list[Example]:
    """Return training calls to compile and inspect the kernels for: decays per channel and per head, with and without states.

    Heads are whole, padded or shared, and T is whole or cut into segments.
    """
    sizes: dict[str, Any] = {"B": 4, "T": 2048, "H": 16, "K": 128, "V": 128}
    states: dict[str, Any] = {"initial_state": True, "final_state": True}
    calls: dict[str, dict[str, Any]] = {
        "K = V = 128, decay per channel": sizes,
        "K = V = 128, decay per head": {**sizes, "decay_per": "head"},
        "K = V = 128, decay per channel, states, T whole": {**sizes, "B": 8, "H": 36, **states},
        "K = V = 256, decay per head, states, T in parts": {**sizes, "B": 1, "K": 256, "V": 256, "decay_per": "head", **states},
        "K = 48, V = 80, decay per channel, packed": {**sizes, "B": 1, "K": 48, "V": 80, "lengths": (1000, 0, 1048), **states},
        "K = V = 64, decay per channel, 4 heads of k, v and g": {
            **sizes, "K": 64, "V": 64, "k_heads": 4, "v_heads": 4, "g_heads": 4,
        },
    }  # fmt: skip
    return [Example(gla.case("float32", **options), "forward_backward", name=name) for name, options in calls.items()]
