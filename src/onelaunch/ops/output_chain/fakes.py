"""Results of ``output_chain``'s operators while PyTorch traces them: empty tensors, whose sizes may be symbolic.

``autograd.py`` registers these functions. Their arguments are those of its functions ``run_forward`` and ``run_gradients``.
"""

from __future__ import annotations

import math

import torch


def forward(
    h: torch.Tensor,
    gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    w_out: torch.Tensor,
    bias: torch.Tensor | None,
    activated: bool,
    eps: float,
    keep: bool,
    variant: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors for out and rstd; all variants make the same ones."""
    leading = h.shape[:-2]
    rstd = (math.prod(leading), h.shape[-2]) if keep else (0,)
    return h.new_empty(*leading, w_out.shape[0]), h.new_empty(rstd, dtype=torch.float32)


def gradients(
    da: torch.Tensor | None,
    h: torch.Tensor,
    gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    rstd: torch.Tensor,
    activated: bool,
    want_a: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty tensors for a, dh, dgate and dnorm_weight."""
    *leading, heads, values = h.shape
    undo, nothing = da is not None, (0,)
    return (
        h.new_empty((math.prod(leading), heads * values) if want_a else nothing),
        h.new_empty(h.shape if undo else nothing),
        h.new_empty(h.shape if undo and gate is not None else nothing),
        h.new_empty(nothing) if norm_weight is None else norm_weight.new_empty((values,) if undo else nothing),
    )
