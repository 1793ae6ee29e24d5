"""The scheme of ``carry.py`` by an operation's own :class:`Passes`: a rank's forward and backward pass as one autograd function.

What a local pass computes is kept for the pass behind the all-gather. While gradients of states are gathered, a rank computes
what its backward pass needs of the inputs alone. ``carry.py`` calls :func:`in_passes`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from onelaunch.parallel.contexts import Context
from onelaunch.parallel.messages import final_gradient, global_rows, message, on_all_ranks, starting
from onelaunch.parallel.rules import Kept, Passes, Rules, Tensors


def in_passes(
    context: Context, rules: Rules, passes: Passes, tensors: Tensors, initial: torch.Tensor | None, want_final: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the outputs of a slice, and the final states of all sequences or ``None``."""
    results = _Passes.apply(context, rules, passes, want_final, initial, *tensors)
    return results if want_final else (results, None)


class _Passes(torch.autograd.Function):
    """Call of an operation on a slice."""

    @staticmethod
    def forward(
        ctx: Any, context: Context, rules: Rules, passes: Passes, want_final: bool, initial: torch.Tensor | None, *tensors: Any
    ) -> Any:
        """Return the outputs, and the final states of all sequences if they are wanted."""
        share, kept, offsets = context.share, (), context.cu_seqlens
        if share.after:
            before = None if initial is None or not share.begins[share.tail] else initial[global_rows(context, share.tail)]
            sent, kept = passes.added(tensors, share.tail_start, before)
        else:
            sent = message(context, rules, tensors, None)
        gathered = context.collectives.start_all_gather(sent)
        entering = rules.fold(gathered.result(), share.before, back=False) if share.before else None
        first = starting(context, rules, initial, entering)
        y, final = passes.forward(tensors, first, offsets, kept, want_final=want_final)
        gathered.result()
        ctx.context, ctx.rules, ctx.passes, ctx.want_final, ctx.count = context, rules, passes, want_final, len(tensors)
        ctx.rows = None if initial is None else len(initial)
        ctx.save_for_backward(first, *tensors, *kept)
        return (y, on_all_ranks(context, rules, final)) if want_final and final is not None else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        """Return the gradients of the initial states of all sequences, as far as they begin here, and of the tensors."""
        context, rules, passes, share = ctx.context, ctx.rules, ctx.passes, ctx.context.share
        first, *saved = ctx.saved_tensors
        tensors, kept = tuple(saved[: ctx.count]), tuple(saved[ctx.count :])
        dy = grad_outputs[0]
        summed = context.collectives.start_all_reduce(grad_outputs[1]) if ctx.want_final else None
        sums: Kept = ()
        if share.before:
            behind = None if summed is None or not share.ends[share.head] else summed.result()[global_rows(context, share.head)]
            sent, sums = passes.initial_gradient(tensors, dy, share.head_stop, behind)
        else:
            sent = message(context, rules, tensors, None)
        gathered = context.collectives.start_all_gather(sent)
        states = passes.states(tensors, first, context.cu_seqlens, kept)
        leaving = rules.fold(gathered.result(), share.after[::-1], back=True) if share.after else None
        dfinal = final_gradient(context, rules, None if summed is None else summed.result(), leaving, dy)
        gradients, dfirst = passes.gradients(tensors, first, context.cu_seqlens, dy, dfinal, states, sums)
        gathered.result()
        return None, None, None, None, _of_all(context, rules, ctx.rows, dfirst, dy), *gradients


def _of_all(
    context: Context, rules: Rules, rows: int | None, dfirst: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor | None:
    """Return the gradient of the initial states of all sequences from those of this rank's.

    Args:
        context: Slices of all ranks.
        rules: The operation.
        rows: Number of initial states; ``None`` if the caller gave none.
        dfirst: Gradients of the states from which this rank's sequences start; another rank passes on that of a sequence which
            has begun before.
        like: Tensor on the device.
    """
    if rows is None:
        return None
    whole = like.new_zeros((rows, *rules.state), dtype=torch.float32)
    share = context.share
    if dfirst is None or not any(share.begins):
        return whole
    if context.offsets is None:
        return dfirst
    begins = torch.tensor(share.begins, device=like.device)
    return whole.index_copy(0, context.sequences, dfirst * begins.view(-1, *(1,) * len(rules.state)))
