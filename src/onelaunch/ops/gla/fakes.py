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
