"""PyTorch operators for the variant ``fused_recurrent`` of ``gla``: decays of values, and time from the end to the start.

``onelaunch::gla_recurrence`` saves the inputs and, where values decay, one float32 tensor as large as o: the output without the
term of each step itself, from which the gradient of gv is computed. ``variants/recurrence.py`` calls :func:`attend`.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.launch.operator import Operator
from onelaunch.ops.gla import fakes
from onelaunch.ops.gla.autograd import Results
from onelaunch.ops.gla.contract import GlaCall
from onelaunch.ops.gla.heads import expanded


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    gv: torch.Tensor | None,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    scale: float,
    reverse: bool,
    want_final: bool,
    want_bare: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute o, the final state and the bare output (no elements if they are not wanted)."""
    from onelaunch.ops.gla import launch_recurrence

    call = launch_recurrence.Recurrence.of(q, k, v, g, gv, initial, offsets, scale, reverse)
    return launch_recurrence.forward(call, want_final=want_final, want_bare=want_bare)


def run_backward(
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    gv: torch.Tensor | None,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    bare: torch.Tensor,
    scale: float,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of q, k, v, g, gv and the initial state (no elements where there is none)."""
    from onelaunch.ops.gla import launch_recurrence

    call = launch_recurrence.Recurrence.of(q, k, v, g, gv, initial, offsets, scale, reverse)
    return launch_recurrence.backward(call, do, dfinal, bare)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Save the inputs and the bare output, and leave gradients of unused outputs ``None`` instead of zeros."""
    *tensors, ctx.scale, ctx.reverse, ctx.want_final, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, backward: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of every input of :func:`run_forward`."""
    q, k, v, g, gv, initial, offsets, bare = ctx.saved_tensors
    if do is None:
        do = v.new_zeros((*v.shape[:2], max(x.shape[2] for x in (q, k, v, g)), v.shape[3]))
    dfinal = dfinal if ctx.want_final else None  # an unwanted final state has no elements, nor has its gradient
    *dqkvg, dgv, dinitial = backward(do, dfinal, q, k, v, g, gv, initial, offsets, bare, ctx.scale, ctx.reverse)
    of_gv, of_initial = None if gv is None else dgv, None if initial is None else dinitial
    return *dqkvg, of_gv, of_initial, None, None, None, None, None  # offsets, scale, reverse, want_final, want_bare


backward = Operator("gla_recurrence_backward", run_backward, fake=fakes.recurrence_backward)
forward = Operator(
    "gla_recurrence", run_forward, fake=fakes.recurrence_forward, save=save, gradients=gradients, backward=backward, outputs=2
)


def attend(call: GlaCall) -> Results:
    """Compute o and the final state, with gradients if the call wants them; see :func:`onelaunch.ops.gla.autograd.attend`."""
    grad = call.query().grad
    o, final, *_ = forward(
        call.q, call.k, call.v, call.g, call.gv, call.initial_state, call.cu_seqlens, call.scale, call.reverse,
        call.output_final_state, grad and call.gv is not None, grad=grad,
    )  # fmt: skip
    return o, expanded(final, call.heads.state, dim=1) if call.output_final_state else final
