"""Results of ``gated_scan``'s operators while PyTorch traces them: empty tensors, whose sizes may be symbolic.

``autograd.py`` registers these functions. Their arguments are those of its functions ``run_forward`` and ``run_backward``.
"""

from __future__ import annotations

import torch


def forward(
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    want_final: bool,
    keep: bool,
    separate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty tensors for y, the final state, the carries and the states."""
    from onelaunch.kernels.scan import launch

    final, carries = launch.empty_states(v, launch.Sequences(initial, offsets), want_final, keep)
    return v.new_empty(v.shape), final, carries, v.new_empty(v.shape if separate and gate is not None else (0,))


def backward(
    dy: torch.Tensor,
    dfinal: torch.Tensor | None,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    carries: torch.Tensor,
    states: torch.Tensor,
    separate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty tensors for the gradients of v, log_decay, gate and the initial state."""
    from onelaunch.kernels.scan import launch

    return launch.empty_gradients(v, log_decay, gate, initial)
