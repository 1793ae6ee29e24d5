"""Variants of ``gla`` in Triton, and how PyTorch sees them.

One pair of operators carries them all: ``onelaunch::gla_forward`` and ``onelaunch::gla_backward``. What is kept between them are
the inputs alone.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.operation import Query
from onelaunch.ops.autograd import Operator
from onelaunch.ops.gated_scan.triton_variants import needs_triton
from onelaunch.ops.gla.contract import GlaCall, gla

Results = tuple[torch.Tensor, torch.Tensor]
Optional = torch.Tensor | None


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    scale: float,
    want_final: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o, and the final state (no elements if it is not wanted)."""
    from onelaunch.ops.gla import launch

    return launch.forward(launch.Attention.of(q, k, v, g, initial, offsets, scale), want_final=want_final)


def run_backward(
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, g and the initial state (no elements where there is none)."""
    from onelaunch.ops.gla import launch

    return launch.backward(launch.Attention.of(q, k, v, g, initial, offsets, scale), do, dfinal)


def fake_forward(
    q: Any, k: Any, v: Any, g: Any, initial: Any, offsets: Any, scale: Any, want_final: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the results of :func:`run_forward`."""
    sequences = q.shape[0] if offsets is None else offsets.shape[0] - 1
    final = (sequences, q.shape[2], q.shape[3], v.shape[3]) if want_final else (0,)
    return torch.empty(v.shape, dtype=v.dtype, device=v.device), q.new_empty(final, dtype=torch.float32)


def fake_backward(
    do: Any, dfinal: Any, q: Any, k: Any, v: Any, g: Any, initial: Any, offsets: Any, scale: Any
) -> tuple[torch.Tensor, ...]:
    """Room for the results of :func:`run_backward`."""
    gradients = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v, g)]
    dinitial = q.new_empty(0 if initial is None else initial.shape, dtype=torch.float32)
    return *gradients, dinitial


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """The tensors among the inputs."""
    *tensors, ctx.scale, ctx.want_final = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, backward: Any, do: Optional, dfinal: Optional) -> tuple[Optional, ...]:
    """Of every input of :func:`run_forward`."""
    q, k, v, g, initial, offsets = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    dfinal = dfinal if ctx.want_final else None
    *found, dinitial = backward(do, dfinal, q, k, v, g, initial, offsets, ctx.scale)
    return *found, None if initial is None else dinitial, None, None, None


backward = Operator("gla_backward", run_backward, fake=fake_backward)
forward = Operator("gla_forward", run_forward, fake=fake_forward, save=save, gradients=gradients, backward=backward, outputs=2)


@gla.variant(
    "fused", launches=2, backward_launches=4, fuses=("decay", "scores"), chunk=64, hands=("states",),
    backward_hands=("states", "states"),
)  # fmt: skip
def fused(call: GlaCall) -> Results:
    """A walk that leaves a state per chunk, then all chunks at once; the backward pass is the same mirrored, and keeps inputs alone."""
    return forward(
        call.q, call.k, call.v, call.g, call.initial_state, call.cu_seqlens, call.scale, call.output_final_state,
        grad=call.query().grad,
    )  # fmt: skip


@fused.supports
def no_value_gate(query: Query) -> str | None:
    """The kernels let the state decay along keys alone."""
    return "takes no gate on values" if "value_gate" in query.flags else None


fused.supports(needs_triton)
