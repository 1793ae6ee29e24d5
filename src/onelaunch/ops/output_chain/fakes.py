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
    keep_a: bool,
    variant: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty tensors for out, rstd and a; ``keep_a`` is set for variants alone that write a."""
    *leading, heads, values = h.shape
    rows = math.prod(leading)
    return (
        h.new_empty(*leading, w_out.shape[0]),
        h.new_empty((rows, heads) if keep else (0,), dtype=torch.float32),
        h.new_empty((rows, heads * values) if keep_a else (0,)),
    )


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
