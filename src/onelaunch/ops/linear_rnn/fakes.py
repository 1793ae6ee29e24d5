"""Results of ``linear_rnn``'s operators while PyTorch traces them: empty tensors, whose sizes may be symbolic.

``autograd.py`` registers these functions. Their arguments are those of its functions ``run_matmul``, ``run_forward`` and
``run_backward``.
"""

from __future__ import annotations

import torch


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor for the product."""
    return a.new_empty(a.shape[0], b.shape[1])


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    want_final: bool,
    keep: bool,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty tensors for y, the final state, v and the carries; all kernels make the same ones."""
    from onelaunch.ops.linear_rnn.launch import Layer, Sequences

    return Layer(x, weight, log_decay, gate, Sequences(initial, offsets), want_final, keep).results()


def backward(
    dy: torch.Tensor,
    dfinal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    v: torch.Tensor,
    carries: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty tensors for the gradients of x, weight, log_decay, gate and the initial state."""
    from onelaunch.kernels.scan import launch

    _, dlog_decay, dgate, dinitial = launch.empty_gradients(v, log_decay, gate, initial)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dlog_decay, dgate, dinitial
