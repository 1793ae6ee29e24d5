"""Inputs of earlier ranks that short convolutions read: the last W - 1 steps before a slice, which may lie on several ranks.

The layers of ``onelaunch.nn`` call :func:`previous_inputs` and :func:`tied`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from onelaunch.parallel import collectives
from onelaunch.parallel.contexts import Context
from onelaunch.parallel.uncompiled import uncompiled


def previous_inputs(context: Context, values: Sequence[torch.Tensor], past: int) -> list[torch.Tensor]:
    """Return the states from which short convolutions of a slice start, after one all-gather for all of them.

    Args:
        context: Slices of all ranks.
        values: Inputs ``[B, T, C]`` of each convolution, of one dtype.
        past: Steps that the longest of the convolutions reads before its own, W - 1.

    Returns:
        For each, the inputs before the first step of this rank's sequences, ``[N, C, past]``, the newest last; zeros before a
        sequence begins. Differentiable: the gradients go to the ranks that hold the inputs.
    """
    first = values[0]
    if past == 0:
        sequences = first.shape[0] if context.offsets is None else len(context.share.sequences)
        return [each.new_zeros(sequences, each.shape[2], 0) for each in values]
    kept = min(past, context.share.length)
    last = torch.cat([each[:, context.share.length - kept :] for each in values], dim=2)
    states = uncompiled(_Halo.apply, context, past, F.pad(last, (0, 0, past - kept, 0)))
    return list(states.split([each.shape[2] for each in values], dim=1))


def tied(y: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return ``y``, whose backward pass also reaches ``others``, with gradients of zero.

    So the backward pass of a collective runs on ranks whose outputs do not read its result, such as those without steps.
    """
    return _Tied.apply(y, *others)


class _Halo(torch.autograd.Function):
    """Gather the last inputs ``[B, past, C]`` of all ranks, and return those before this rank's slice, ``[N, C, past]``."""

    @staticmethod
    def forward(ctx: Any, context: Context, past: int, last: torch.Tensor) -> torch.Tensor:
        """Return the states; the message of a rank has ``past`` steps, of which a short slice fills the last ones."""
        ctx.context, ctx.past, ctx.extent = context, past, last.shape
        gathered = collectives.wait(collectives.start_all_gather(last[None], context.size, context.group))
        steps = [
            torch.zeros_like(last[:, 0]) if source is None else gathered[source[0], :, past - source[1]]
            for source in context.share.sources(past, context.starts)
        ]
        halo = torch.stack(steps, dim=2)  # [B, C, past]
        if context.offsets is None:
            return halo
        states = halo.new_zeros((len(context.share.sequences), *halo.shape[1:]))
        states[context.share.head] = halo[0]
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstates: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        """Return the gradient of this rank's last inputs, the sum of those from all ranks."""
        context, past = ctx.context, ctx.past
        dhalo = dstates if context.offsets is None else dstates[context.share.head][None]
        sent = dhalo.new_zeros((context.size, *ctx.extent), dtype=torch.float32)
        for step, source in enumerate(context.share.sources(past, context.starts)):
            if source is not None:
                sent[source[0], :, past - source[1]] = dhalo[..., step]
        return None, None, collectives.all_reduce(sent, context.group)[context.rank].to(dstates.dtype)


class _Tied(torch.autograd.Function):
    """Identity of the first input, with gradients of zero for the others."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Return y."""
        ctx.others = [(each.shape, each.dtype) for each in others]
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        """Return its gradient, and zeros."""
        return dy, *(dy.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.others)
