"""Results of ``gla``'s operators while PyTorch traces them: empty tensors, whose sizes may be symbolic.

``autograd.py`` registers these functions. Their arguments are those of its functions ``run_forward`` and ``run_backward``.
"""

from __future__ import annotations

import torch


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    scale: float,
    want_final: bool,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors for o and the final state."""
    from onelaunch.ops.gla import launch

    call = launch.Attention.of(q, k, v, g, initial, offsets, scale, either_order=kernel == launch.EITHER_ORDER)
    final = launch.empty_final(call, wanted=want_final)
    if kernel == launch.EITHER_ORDER:
        final = launch.final_like(call.sequences.initial, final)
    return launch.empty_output(call), final


def backward(
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    scale: float,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty tensors for the gradients of q, k, v, g and the initial state; all kernels make the same ones."""
    from onelaunch.ops.gla import launch

    call = launch.Attention.of(q, k, v, g, initial, offsets, scale)
    dinitial = launch.empty_final(call, wanted=initial is not None)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), g.new_empty(g.shape), dinitial


def recurrence_forward(
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
    """Return empty tensors for o, the final state and the bare output of ``autograd_recurrence.run_forward``."""
    from onelaunch.ops.gla import launch

    call = launch.Attention.of(q, k, v, g, initial, offsets, scale, either_order=True)
    o, final = launch.empty_output(call), launch.empty_final(call, wanted=want_final)
    bare = o.new_empty(o.shape if want_bare else (0,), dtype=torch.float32)
    return o, launch.final_like(call.sequences.initial, final), bare


def recurrence_backward(
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
    """Return empty tensors for the gradients of q, k, v, g, gv and the initial state."""
    *gradients, dinitial = backward(do, dfinal, q, k, v, g, initial, offsets, scale, "")
    dq, dk, dv, dg = gradients
    return dq, dk, dv, dg, g.new_empty(0) if gv is None else gv.new_empty(gv.shape), dinitial
