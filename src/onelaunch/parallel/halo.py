"""Halo exchange of short convolutions: the W - 1 inputs before a slice, which may lie on several earlier ranks.

The layers of ``onelaunch.nn`` call :func:`start_halo` when they have the inputs of their convolutions, and :meth:`Halo.states`
when they need the states. Projections that they compute in between overlap with the all-gather. The backward pass starts the
all-reduce of the states' gradients where :meth:`Halo.states` was called, and waits for it where :func:`start_halo` was called. So
the backward pass of these projections overlaps with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from onelaunch.parallel.collectives import Pending
from onelaunch.parallel.contexts import Context
from onelaunch.parallel.uncompiled import uncompiled


class Halo:
    """Halo exchange that :func:`start_halo` has started."""

    def __init__(self, context: Context, past: int, values: Sequence[torch.Tensor]) -> None:
        self.context, self.past = context, past
        self.batch, self.sizes = values[0].shape[0], [each.shape[2] for each in values]
        self.like = values[0].new_empty(0)  # for dtype and device; the inputs themselves may be freed
        self.gathered: Pending | None = None
        self.summed: Pending | None = None
        """All-reduce of the gradients of all ranks' last inputs, once the backward pass has started it."""
        self.token: torch.Tensor | None = None
        """Tensor without elements that connects both ends of the exchange for autograd."""

    def states(self) -> list[torch.Tensor]:
        """Return the states from which short convolutions of the slice start.

        Returns:
            For each, the inputs before the first step of this rank's sequences, ``[N, C, past]``, the newest last; zeros before a
            sequence begins. Differentiable: the gradients go to the ranks that hold the inputs. A rank on which all of its
            sequences begin does not wait for the others: it calls :meth:`finish`.
        """
        return uncompiled(self._states)

    def _states(self) -> list[torch.Tensor]:
        """Return the result of :meth:`states`, outside of compiled code."""
        if self.past == 0:
            rows = self.batch if self.context.offsets is None else len(self.context.local_slice.sequences)
            return [self.like.new_zeros(rows, size, 0) for size in self.sizes]
        token, self.token = self.token, None  # kept, it would close a reference cycle with the autograd graph
        return list(_ReceiveHalo.apply(self, token).split(self.sizes, dim=1))

    def finish(self) -> None:
        """Wait for the exchange if :meth:`states` did not."""
        if self.gathered is not None:
            uncompiled(self.gathered.result)


def start_halo(context: Context, values: Sequence[torch.Tensor], past: int) -> tuple[list[torch.Tensor], Halo]:
    """Start one all-gather of the last inputs of all short convolutions of a layer.

    Args:
        context: Slices of all ranks.
        values: Inputs ``[B, T, C]`` of each convolution, of one dtype.
        past: Steps that the longest of the convolutions reads before its own, W - 1.

    Returns:
        The inputs, to be used in place of ``values``, and the exchange.
    """
    return uncompiled(_started, context, values, past)


def _started(context: Context, values: Sequence[torch.Tensor], past: int) -> tuple[list[torch.Tensor], Halo]:
    """Return the results of :func:`start_halo`, outside of compiled code."""
    halo = Halo(context, past, values)
    if past == 0:
        return list(values), halo
    halo.token, *viewed = _SendHalo.apply(halo, *values)
    return viewed, halo


def tied(y: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return ``y``, whose backward pass also reaches ``others``, with gradients of zero.

    So the backward pass of a collective runs also on ranks whose outputs do not read its result, such as those without steps.
    """
    return _Tied.apply(y, *others)


class _SendHalo(torch.autograd.Function):
    """Identity function of the convolutions' inputs, with a token as one more output; starts to gather all ranks' last inputs."""

    @staticmethod
    def forward(ctx: Any, halo: Halo, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the token and the inputs; a message has ``past`` steps, of which a short slice fills the last ones."""
        context = halo.context
        kept = min(halo.past, context.local_slice.length)
        last = torch.cat([each[:, context.local_slice.length - kept :] for each in values], dim=2)
        message = F.pad(last, (0, 0, halo.past - kept, 0))
        halo.gathered = context.collectives.start_all_gather(message[None])
        ctx.halo, ctx.kept = halo, kept
        return values[0].new_zeros(0), *(each.view_as(each) for each in values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, *gradients: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        """Return the gradients of the inputs; later ranks, which read this rank's last inputs, add to those of its last steps."""
        halo, kept = ctx.halo, ctx.kept
        assert halo.summed is not None  # noqa: S101 - the backward pass of the states has come before
        length = halo.context.local_slice.length
        added = halo.summed.result()[halo.context.rank, :, halo.past - kept :].split(halo.sizes, dim=2)
        halo.summed = None
        parts = [each.split([length - kept, kept], dim=1) for each in gradients]
        return None, *(torch.cat([one, end + more.to(end.dtype)], 1) for (one, end), more in zip(parts, added, strict=True))


class _ReceiveHalo(torch.autograd.Function):
    """Function from the last inputs ``[B, past, C]`` of all ranks to the inputs before this rank's slice, ``[N, C, past]``."""

    @staticmethod
    def forward(ctx: Any, halo: Halo, _: torch.Tensor) -> torch.Tensor:
        """Return the states. A rank on which all of its sequences begin returns zeros and does not wait."""
        ctx.halo = halo
        context, past, like = halo.context, halo.past, halo.like
        channels = sum(halo.sizes)
        sources = context.local_slice.sources(past, context.starts)
        begun = like.new_zeros((halo.batch, channels, past))
        if any(source is not None for source in sources):
            assert halo.gathered is not None  # noqa: S101 - started before
            gathered = halo.gathered.result()
            steps = [begun[..., 0] if source is None else gathered[source[0], :, past - source[1]] for source in sources]
            begun = torch.stack(steps, dim=2)
        if context.offsets is None:
            return begun
        states = like.new_zeros((len(context.local_slice.sequences), channels, past))
        states[context.local_slice.head] = begun[0]
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstates: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        """Start the sum of the gradients of all ranks' last inputs, and return a gradient without elements for the token."""
        halo = ctx.halo
        context, past = halo.context, halo.past
        dhalo = dstates if context.offsets is None else dstates[context.local_slice.head][None]
        sent = dhalo.new_zeros((context.size, dhalo.shape[0], past, dhalo.shape[1]), dtype=torch.float32)
        for step, source in enumerate(context.local_slice.sources(past, context.starts)):
            if source is not None:
                sent[source[0], :, past - source[1]] = dhalo[..., step]
        halo.summed = context.collectives.start_all_reduce(sent)
        return None, dstates.new_zeros(0)


class _Tied(torch.autograd.Function):
    """Identity function of the first input, with gradients of zero for the others."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Return y."""
        ctx.others = [(each.shape, each.dtype) for each in others]
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        """Return the gradient of y, and zeros for the others."""
        return dy, *(dy.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.others)
