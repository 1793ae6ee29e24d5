"""Results of ``projections``'s operators while PyTorch traces them: empty tensors, whose sizes may be symbolic.

``autograd.py`` registers these functions. Their arguments are those of its functions ``run_forward`` and ``run_backward``.
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


def backward(
    dys: Sequence[torch.Tensor | None],
    y: torch.Tensor,
    rstd: torch.Tensor,
    kept: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    code: str,
    wants: Sequence[bool],
) -> list[torch.Tensor]:
    """Return empty tensors for dz and the biases' sums, or with x and the weight for their gradients and those of all columns."""
    layout, rows = read_layout(code), math.prod(y.shape[:-1])
    if x is None or weight is None:
        sums = y.new_empty(layout.biases if wants[2] else 0, dtype=torch.float32)
        return [y.new_empty(rows, layout.gradient_pitch), sums]
    shapes = ((rows, x.shape[-1]), tuple(weight.shape), (layout.rows,))
    return [y.new_empty(shape if wanted else (0,)) for shape, wanted in zip(shapes, wants, strict=True)]
