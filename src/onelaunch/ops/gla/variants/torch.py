"""Variants of ``gla`` in plain PyTorch, for every device. ``recurrent`` runs every call; ``chunked`` is the CPU's default.

The dispatcher, studies and tests find registered variants by name. Tags: ``chunk`` is the number of steps per chunk, and
``hands`` names the intermediates that go through device memory; ``cost.py`` reads both and explains each name. ``fuses``, the
steps that share a kernel, is left empty. ``yardstick`` marks the PyTorch baseline, whose error sets the tolerance. Other keywords
are capabilities, which the class ``Capabilities`` of ``onelaunch.operation`` explains. On a CPU the variant ``compiled`` of
``gla_layer`` asks :func:`short_enough` too.
"""

from __future__ import annotations

import torch

from onelaunch.dispatch.capture import compile_static, compiler_missing
from onelaunch.operation import Query
from onelaunch.operation.requirements import no_steps
from onelaunch.ops.gla import chunkwise
from onelaunch.ops.gla.contract import GlaCall, gla
from onelaunch.ops.gla.reference import recurrence

Results = tuple[torch.Tensor, torch.Tensor]
"""Output and final state."""

_UNROLLED = 128
"""Most chunks of a compiled call: its loop over them is unrolled, and compiling takes seconds per hundred."""


@gla.variant("recurrent", launches=None, fuses=(), chunk=1, hands=("states", "repeated"), yardstick=True)
def recurrent(call: GlaCall) -> Results:
    """Compute by a loop over time, one step after another: the PyTorch baseline that sets the tolerance."""
    q, k, v, g = (x.float() for x in (call.q, call.k, call.v, call.g))
    gv = None if call.gv is None else call.gv.float()
    o, final = recurrence(q * call.scale, k, v, g, gv, call.initial_state, call.cu_seqlens)
    return o.to(call.v.dtype), final


@gla.variant("chunked", launches=None, fuses=(), chunk=chunkwise.CHUNK, hands=("states", "scores", "repeated"))
def chunked(call: GlaCall) -> Results:
    """Compute in pure PyTorch, chunk by chunk with matrix products: the default on a CPU."""
    return chunkwise.gla(call.q, call.k, call.v, call.g, call.gv, call.initial_state, call.cu_seqlens, call.scale)


@gla.variant("compiled", launches=None, recompiles=True, fuses=(), chunk=chunkwise.CHUNK, hands=("states", "scores", "repeated"))
def compiled(call: GlaCall) -> Results:
    """Compute by ``torch.compile`` of the chunked form."""
    function = compile_static(chunkwise.attend)
    return function(call.q, call.k, call.v, call.g, call.gv, call.initial_state, call.cu_seqlens, call.scale)


@compiled.supports
def short_enough(query: Query) -> str | None:
    """Return why a call has too many chunks to unroll, or ``None``."""
    most = _UNROLLED * chunkwise.CHUNK
    return f"takes at most {most} steps: each chunk of them is code of its own" if query.sizes[1] > most else None


compiled.supports(compiler_missing)
compiled.supports(no_steps)
chunked.supports(no_steps)
