"""Results of ``projections``'s operators while PyTorch traces them: empty tensors, whose sizes may be symbolic.

``autograd.py`` registers these functions. Their arguments are those of its functions ``run_forward`` and
``run_activation_gradients``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from onelaunch.ops.projections.layout import read_layout


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, code: str, eps: float, keep: bool, variant: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty tensors for the packed result, rstd and the saved pre-activations; all variants make the same ones."""
    layout, (*leading, _) = read_layout(code), x.shape
    rows = math.prod(leading)
    rstd = (rows, layout.norms) if keep and layout.norms else (0,)
    kept = (rows, layout.kept) if keep and layout.kept else (0,)
    return x.new_empty(*leading, layout.pitch), x.new_empty(rstd, dtype=torch.float32), x.new_empty(kept)


def activation_gradients(
    dys: Sequence[torch.Tensor | None], y: torch.Tensor, rstd: torch.Tensor, kept: torch.Tensor, code: str
) -> torch.Tensor:
    """Return an empty tensor for dz."""
    return y.new_empty(math.prod(y.shape[:-1]), read_layout(code).gradient_pitch)
