"""The peers of fla (flash-linear-attention): its own functions, called as its layers and its users call them.

The dispatcher, studies and tests find registered variants by name. Tags: ``chunk`` is the number of steps per chunk, and
``hands`` names the intermediates that go through device memory; ``cost.py`` reads both. ``fuses``, the steps that share a kernel,
is left empty. ``usual`` is false for the one that fla's layers do not call; studies select variants by tags. Other keywords are
capabilities, which the class ``Capabilities`` of ``onelaunch.operation`` explains. The peers of ``gla_layer`` use
:data:`FEW_STEPS` and :func:`chunk_backward` too.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from onelaunch.device.hardware import is_hopper
from onelaunch.operation import Query
from onelaunch.operation.accuracy import FLA_TESTS
from onelaunch.operation.requirements import not_installed
from onelaunch.ops.gla.contract import GlaCall, gla
from onelaunch.ops.gla.heads import expanded

FEW_STEPS = 64
"""Most steps for which fla's layers call ``fused_recurrent_*``; beyond, they call ``chunk_*``."""

_MISCOMPILED = ((3, 4, 0), (3, 7, 1))
"""Range of Triton versions, the last excluded, that miscompile chunk_simple_gla's backward pass: it raises on Hopper."""


Results = tuple[torch.Tensor, torch.Tensor | None]
"""The output ``o`` and the final state, or ``None`` where the call asks for none."""

_HANDS = ("cumulated", "states", "scores", "repeated")
"""Intermediate results of fla's chunk functions that go through memory; cost.py explains them."""


@gla.variant(
    "fla", launches=None, fuses=(), chunk=64, hands=_HANDS, requires="fla", own_tolerance=FLA_TESTS, usual=True, tunes=True
)
def fla(call: GlaCall) -> Results:
    """Compute by ``chunk_gla`` or ``chunk_simple_gla`` of flash-linear-attention, few steps by ``fused_recurrent_*``.

    Few steps, or a gate on values, take its ``fused_recurrent_*`` functions, a loop over time in one kernel, as its layers do.
    """
    from fla.ops import gla as by_channel  # pyrefly: ignore[missing-import]
    from fla.ops import simple_gla as by_head  # pyrefly: ignore[missing-import]

    if call.gv is None and call.q.shape[1] > FEW_STEPS:
        return _run_fla(call, by_head.chunk_simple_gla if call.per_head else by_channel.chunk_gla, "g")
    if call.per_head:
        return _run_fla(call, by_head.fused_recurrent_simple_gla, "g")
    return _run_fla(call, by_channel.fused_recurrent_gla, "gk")


@gla.variant(
    "fla_chunk", launches=None, fuses=(), chunk=64, hands=_HANDS, requires="fla", own_tolerance=FLA_TESTS, usual=True, tunes=True
)
def fla_chunk(call: GlaCall) -> Results:
    """Compute few steps by ``chunk_gla`` or ``chunk_simple_gla``, as people do who call these functions whatever T is.

    Beyond :data:`FEW_STEPS` steps ``fla`` calls them too, so this variant leaves these calls to it.
    """
    from fla.ops import gla as by_channel  # pyrefly: ignore[missing-import]
    from fla.ops import simple_gla as by_head  # pyrefly: ignore[missing-import]

    return _run_fla(call, by_head.chunk_simple_gla if call.per_head else by_channel.chunk_gla, "g")


@gla.variant(
    "fla_fused_chunk",
    launches=None,
    fuses=(),
    chunk=64,
    hands=("repeated",),
    requires="fla",
    own_tolerance=FLA_TESTS,
    usual=False,
    tunes=True,
)
def fla_fused_chunk(call: GlaCall) -> Results:
    """Compute a decay per head by ``fused_chunk_simple_gla``, which keeps states on chip and also trains on Hopper."""
    from fla.ops.simple_gla import fused_chunk_simple_gla  # pyrefly: ignore[missing-import]

    return _run_fla(call, fused_chunk_simple_gla, "g")


def _run_fla(call: GlaCall, function: Callable[..., Results], gate: str) -> Results:
    """Return the results of one of fla's functions; ``gate`` is its name of the log-decays.

    fla's functions want all heads in every tensor. Shared heads are therefore repeated, as its layers do with ``num_kv_heads``;
    the time includes it. If queries share states, initial states are repeated too, and one is returned of final states that are
    equal then.
    """
    heads = call.heads.output
    q, k, v, g = (expanded(each, heads) for each in (call.q, call.k, call.v, call.g))
    gates: dict[str, torch.Tensor | None] = {gate: g}
    if gate == "gk":  # the only function with a gate on values
        gates["gv"] = None if call.gv is None else expanded(call.gv, heads)
    o, final = function(
        q=q,
        k=k,
        v=v,
        **gates,
        scale=call.scale,
        initial_state=None if call.initial_state is None else expanded(call.initial_state, heads, dim=1),
        output_final_state=call.output_final_state,
        cu_seqlens=call.cu_seqlens,
    )
    of_a_state = call.heads.groups.state
    return o, final if of_a_state == 1 or final is None else final[:, ::of_a_state]


def _what_fla_can(query: Query) -> str | None:
    """Return why no function of fla 0.6.0 can run a call, or ``None``."""
    if (reason := not_installed("fla")) is not None:
        return reason
    if query.device_type != "cuda":
        return "needs a CUDA or ROCm device"
    if 0 in query.sizes:
        return "needs at least one element in every dimension"
    if "scalar_decay" in query.flags and "value_gate" in query.flags:
        return "takes no gate on values beside one decay per head (fla 0.6.0)"
    return None


def chunk_backward(query: Query) -> str | None:
    """Return why the backward pass of ``chunk_simple_gla`` of fla 0.6.0 raises, or ``None``."""
    per_head = "scalar_decay" in query.flags and query.grad
    if per_head and is_hopper(torch.device(query.device)) and _miscompiles(_triton_version()):
        return "raises in the backward pass of chunk_simple_gla on Hopper for Triton >= 3.4.0 and < 3.7.1 (fla 0.6.0)"
    return None


for _variant in (fla, fla_chunk, fla_fused_chunk):
    _variant.supports(_what_fla_can)


@fla.supports
def trains(query: Query) -> str | None:
    """Return why the function that many steps take has no backward pass here, or ``None``."""
    return chunk_backward(query) if query.sizes[1] > FEW_STEPS else None


fla_chunk.supports(chunk_backward)


@fla_chunk.supports
def takes_few_steps(query: Query) -> str | None:
    """Return why ``fla`` runs a call instead, or ``None``."""
    if query.sizes[1] > FEW_STEPS:
        return f"is for at most {FEW_STEPS} steps; the variant fla calls the same functions for more"
    return "takes no gate on values (fla 0.6.0)" if "value_gate" in query.flags else None


@fla_fused_chunk.supports
def decays_per_head(query: Query) -> str | None:
    """Return why ``fused_chunk_simple_gla`` cannot run a call, or ``None``."""
    return None if "scalar_decay" in query.flags else "needs one decay per head"


def _triton_version() -> tuple[int, ...]:
    """Return Triton's version as numbers."""
    import triton  # the module itself: nightly builds of PyTorch distribute it under another name

    return tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])


def _miscompiles(version: tuple[int, ...]) -> bool:
    """Return whether a version of Triton is one of :data:`_MISCOMPILED`."""
    return _MISCOMPILED[0] <= version < _MISCOMPILED[1]
