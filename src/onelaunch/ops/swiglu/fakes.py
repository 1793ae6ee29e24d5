"""Results of ``swiglu``'s operators while PyTorch traces them: empty tensors, whose sizes may be symbolic.

``autograd.py`` registers these functions. Their arguments are those of its functions ``run_gate``, ``run_gate_backward`` and
``run_forward``.
"""

from __future__ import annotations

import torch


def gate(both: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """Return an empty tensor for ``silu(gate) * up``."""
    return both.new_empty(both.shape[0], both.shape[1] // 2 if up is None else up.shape[1])


def gate_backward(dh: torch.Tensor, both: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """Return an empty tensor for the gradients of gate and up side by side."""
    return both.new_empty(both.shape[0], both.shape[1] if up is None else 2 * up.shape[1])


def forward(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None,
    x_blocks: torch.Tensor | None,
    gate_blocks: torch.Tensor | None,
    up_blocks: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    gate_scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    dtype: torch.dtype,
    swizzled: bool,
    keep: bool,
    constant_weights: bool,
    variant: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors for h and both products; all variants make the same ones."""
    rows, columns = x.shape[0], w_gate.shape[0] if w_up is not None else w_gate.shape[0] // 2
    return x.new_empty(rows, columns, dtype=dtype), x.new_empty((rows, 2 * columns) if keep else (0,), dtype=dtype)
