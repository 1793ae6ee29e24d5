"""Passes of ``gla``'s portable kernels that compute states alone, without outputs: the chunk state pass, in both directions.

``slices.py`` calls them where the variant ``fused`` runs, for sequences whose steps are spread over several ranks.
"""

from __future__ import annotations

import torch

from onelaunch.kernels.common.layout import inner_contiguous
from onelaunch.ops.gla.launch import Attention, chunk_state_gradients, chunk_states, exact_gradients


def final_state(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return the state ``[B, heads of g, K, V]`` behind all steps from a zero state; of q only the shape matters."""
    call = Attention.of(q, k, v, g, None, None, 1.0)
    return chunk_states(call, want_final=True)[1]


def initial_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, do: torch.Tensor, scale: float, heads: int
) -> torch.Tensor:
    """Return the gradient of an initial state of ``heads`` heads, ``[B, heads, K, V]``, from that of o alone.

    Of k and v only the shapes matter.
    """
    zeros = q.new_zeros((q.shape[0], heads, q.shape[3], v.shape[3]), dtype=torch.float32)
    call = Attention.of(q, k, v, g, zeros, None, scale)
    exact = exact_gradients(call) or call.scalar
    return chunk_state_gradients(call, inner_contiguous(do), None, exact=exact)[1]
