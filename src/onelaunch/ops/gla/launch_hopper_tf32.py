"""Launches of ``hopper_tf32``: float32 calls as float16 copies, scaled by powers of 2, through the kernels of ``hopper``.

``launch_scaled_copies.py`` makes the copies, and ``launch_hopper.py`` runs the kernels, which scale their float32 results back.
The variant ``hopper_tf32`` calls :func:`forward`, and autograd.py :func:`backward`.
"""

from __future__ import annotations

import torch

from onelaunch.ops.gla import launch_hopper
from onelaunch.ops.gla.launch import Attention, Gradients
from onelaunch.ops.gla.launch_scaled_copies import scaled_copies


def forward(call: Attention, final: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``o [B, T, H, V]`` in float32; fill the final state ``[N, H, K, V]`` if it is given."""
    copies = scaled_copies(call)
    return launch_hopper.forward(copies.call, final=final, powers=copies.powers)


def backward(call: Attention, do: torch.Tensor, dfinal: torch.Tensor | None) -> Gradients:
    """Compute the float32 gradients of q, k, v, g and the initial state from those of ``o`` and of the final state.

    The copies are made again: only the inputs were saved.
    """
    copies = scaled_copies(call, do, dfinal)
    assert copies.do is not None  # noqa: S101 - do was given
    return launch_hopper.backward(copies.call, copies.do, dfinal=dfinal, powers=copies.powers)
