"""Results of ``rms_norm``'s operators while PyTorch traces them: empty tensors, whose sizes may be symbolic.

``autograd.py`` registers these functions. Their arguments are those of its functions ``run_forward`` and ``run_backward``.
"""

from __future__ import annotations

import math

import torch


def forward(
    x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, eps: float, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty tensors for y, the sum and rstd."""
    total = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    return x.new_empty(x.shape), total, x.new_empty((math.prod(x.shape[:-1]),) if keep else (0,), dtype=torch.float32)


def gradients(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    want_x: bool,
    want_residual: bool,
    want_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty tensors for dx, dresidual and dweight."""
    nothing = (0,)
    return (
        dy.new_empty(total.shape if want_x else nothing),
        total.new_empty(total.shape if want_residual else nothing),
        dy.new_empty(nothing) if weight is None else weight.new_empty(weight.shape if want_weight else nothing),
    )
