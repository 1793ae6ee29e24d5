"""The peer ``fla``: flash-linear-attention's own functions, called as its layers call them."""

from __future__ import annotations

import re

import torch

from onelaunch.device.hardware import is_hopper
from onelaunch.operation import Query
from onelaunch.operation.accuracy import FLA_TESTS
from onelaunch.operation.requirements import not_installed
from onelaunch.ops.gla.contract import GlaCall, gla
from onelaunch.ops.gla.heads import expanded

FEW_STEPS = 64
"""Most steps for which fla's layers call ``fused_recurrent_*``; beyond, they call ``chunk_*``."""

MISCOMPILED = ((3, 4, 0), (3, 7, 1))
"""Range of Triton versions, the last excluded, that miscompile chunk_simple_gla's backward pass: it raises on Hopper."""


@gla.variant(
    "fla", launches=None, fuses=(), chunk=64, hands=("cumulated", "states", "scores", "repeated"), requires="fla",
    own_tolerance=FLA_TESTS, tunes=True,
)  # fmt: skip
def fla(call: GlaCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute by ``chunk_gla`` or ``chunk_simple_gla`` of flash-linear-attention.

    Few steps, or a gate on values, take its ``fused_recurrent_*`` functions, a loop over time in one kernel. fla's functions want
    all heads in every tensor. Shared heads are therefore repeated, as its layers do with ``num_kv_heads``; the time includes it.
    If queries share states, initial states are repeated too, and one is returned of final states that are equal then.
    """
    from fla.ops import gla as by_channel  # pyrefly: ignore[missing-import]
    from fla.ops import simple_gla as by_head  # pyrefly: ignore[missing-import]

    heads = call.heads.output
    q, k, v, g = (expanded(each, heads) for each in (call.q, call.k, call.v, call.g))
    gv = None if call.gv is None else expanded(call.gv, heads)
    initial = None if call.initial_state is None else expanded(call.initial_state, heads, dim=1)
    steps = "fused_recurrent" if gv is not None or q.shape[1] <= FEW_STEPS else "chunk"
    if call.per_head:
        function, gates = getattr(by_head, f"{steps}_simple_gla"), {"g": g}
    elif steps == "chunk":
        function, gates = by_channel.chunk_gla, {"g": g}
    else:
        function, gates = by_channel.fused_recurrent_gla, {"gk": g, "gv": gv}
    o, final = function(
        q=q,
        k=k,
        v=v,
        **gates,
        scale=call.scale,
        initial_state=initial,
        output_final_state=call.output_final_state,
        cu_seqlens=call.cu_seqlens,
    )
    of_a_state = call.heads.groups.state
    return o, final if of_a_state == 1 or final is None else final[:, ::of_a_state]


@fla.supports
def what_fla_can(query: Query) -> str | None:
    """Return why fla 0.6.0 cannot run a call, or ``None``."""
    if (reason := not_installed("fla")) is not None:
        return reason
    if query.device_type != "cuda":
        return "needs a CUDA or ROCm device"
    if 0 in query.sizes:
        return "needs at least one element in every dimension"
    if "scalar_decay" not in query.flags:
        return None
    if "value_gate" in query.flags:
        return "takes no gate on values beside one decay per head (fla 0.6.0)"
    if query.grad and query.sizes[1] > FEW_STEPS and is_hopper(torch.device(query.device)) and _miscompiles(_triton_version()):
        return "raises in the backward pass of chunk_simple_gla on Hopper for Triton >= 3.4.0 and < 3.7.1 (fla 0.6.0)"
    return None


def _triton_version() -> tuple[int, ...]:
    """Return Triton's version as numbers."""
    import triton  # the module itself: nightly builds of PyTorch distribute it under another name

    return tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])


def _miscompiles(version: tuple[int, ...]) -> bool:
    """Return whether a version of Triton is one of :data:`MISCOMPILED`."""
    return MISCOMPILED[0] <= version < MISCOMPILED[1]
