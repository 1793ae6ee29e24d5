"""The state of a linear recurrence across the ranks of a group: what a slice adds, one all-gather, a merge, the ordinary call.

    S_out = added + factors * S_in        per rank, for the sequence that goes on behind the slice

A rank computes ``added`` from a zero state (:meth:`Rules.added`) and the product of all decays (:meth:`Rules.factors`). One
all-gather brings those of all ranks to every rank, which folds those of its predecessors into the state that enters its slice.
The ordinary call of the operation starts from there, so its outputs are those of one process up to rounding. Ranks without
predecessors run it while the all-gather is under way.

The backward pass mirrors it. The gradient of the state that leaves a slice is needed before the ordinary backward pass runs, and
it depends on the outputs' gradients of later ranks only: a rank computes the gradient of its entering state from its own outputs
(:meth:`Rules.initial_gradient`), one all-gather brings these to all, and each folds those of its successors. The ordinary
backward pass of the call then returns all gradients. :class:`_Joined` does so in an identity function behind the call's results.
Ranks without successors run it while the all-gather is under way, and :class:`_Awaited`, an identity function before the call's
tensors, waits for it. The sum of the final states' gradients over ranks overlaps with :meth:`Rules.initial_gradient`.

Where an operation has :class:`Passes` of kernels, ``passes.py`` runs these in place of ordinary calls.

Source: the scheme of LASP-2 (Sun et al., 2025), and of fla.ops.cp of flash-linear-attention 0.6.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from onelaunch.parallel.collectives import Pending
from onelaunch.parallel.contexts import Context
from onelaunch.parallel.messages import backward_message, final_gradient, forward_message, on_all_ranks, starting
from onelaunch.parallel.passes import in_passes
from onelaunch.parallel.rules import Rules, Tensors
from onelaunch.parallel.uncompiled import uncompiled


def across(
    context: Context, rules: Rules, tensors: Tensors, initial: torch.Tensor | None, want_final: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run an operation on a slice of its steps, from the state in which the slices of earlier ranks leave it.

    Args:
        context: Slices of all ranks.
        rules: The operation.
        tensors: Its tensors on this rank.
        initial: States before the first step of all sequences, ``[N, *state]``, or ``None``. A rank reads those of the sequences
            that begin on it.
        want_final: Flag that the states behind the last steps of all sequences are wanted, on every rank.

    Returns:
        The outputs of the slice, and the final states ``[N, *state]`` or ``None``.
    """
    return uncompiled(_across, context, rules, tensors, initial, want_final)


def _across(
    context: Context, rules: Rules, tensors: Tensors, initial: torch.Tensor | None, want_final: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the results of :func:`across`, outside of compiled code."""
    passes = rules.passes()
    if passes is not None:
        return in_passes(context, rules, passes, tensors, initial, want_final)
    readers = rules.readers(tensors)
    with torch.no_grad():
        message = forward_message(context, rules, tensors, readers, initial)
        gathered = context.collectives.start_all_gather(message)
        entering = None
        if context.share.before:
            entering = rules.fold(gathered.result(), context.share.before, back=False)
    awaited: list[Pending] = []
    if rules.grad and not context.share.after:
        initial, *viewed = _awaited(awaited, initial, *tensors)
        tensors = tuple(viewed)
    y, final = rules.run(tensors, starting(context, rules, initial, entering), context.cu_seqlens, want_final or rules.grad)
    gathered.result()
    if rules.grad:
        assert final is not None  # noqa: S101 - it was asked for
        readers = rules.readers(tensors)
        results = _Joined.apply(context, rules, want_final, awaited, len(readers), y, final, initial, *readers, *tensors)
        return results if want_final else (results, None)
    return y, None if not want_final or final is None else on_all_ranks(context, rules, final)


def _awaited(pending: list[Pending], *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return the tensors; the backward pass of those that take gradients ends with a wait for what is in ``pending`` by then."""
    taking = [each is not None and each.requires_grad for each in tensors]
    viewed = iter(_Awaited.apply(pending, *(each for each, takes in zip(tensors, taking, strict=True) if takes)))
    return [next(viewed) if takes else each for each, takes in zip(tensors, taking, strict=True)]


class _Awaited(torch.autograd.Function):
    """Identity of the tensors of a rank's call; backward, the last part of the call, it waits for collectives."""

    @staticmethod
    def forward(ctx: Any, pending: list[Pending], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors; ``pending`` is empty now, and filled by the backward pass of :class:`_Joined`."""
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # pyrefly: ignore[bad-override]
        """Return the gradients."""
        while ctx.pending:
            ctx.pending.pop().result()
        return None, *gradients


class _Joined(torch.autograd.Function):
    """Identity of the results of a rank's call; backward, the exchange of the gradients of the states between slices.

    All tensors of the call are inputs, so that the backward pass runs on every rank if any of them takes gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        context: Context,
        rules: Rules,
        want_final: bool,
        awaited: list[Pending],
        count: int,
        y: torch.Tensor,
        final: torch.Tensor,
        initial: torch.Tensor | None,
        *others: torch.Tensor | None,
    ) -> Any:
        """Return y, and the final states of all sequences if they are wanted; save the ``count`` readers, the first others."""
        ctx.context, ctx.rules, ctx.want_final, ctx.awaited = context, rules, want_final, awaited
        unread = initial is not None and context.offsets is None and not context.share.begins[0]
        few = context.share.length <= 1  # one step from a zero state reads no decay
        ties = (initial if unread else None, *(others if few else (None,) * len(others)))
        ctx.ties = [None if each is None else (each.shape, each.dtype) for each in ties]
        ctx.save_for_backward(*others[:count])
        whole = on_all_ranks(context, rules, final) if want_final else None
        return y.view_as(y) if whole is None else (y.view_as(y), whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        """Return the gradients of y and of this rank's final states, and zeros for tensors that this rank's call does not read.

        Those are initial states that another rank reads, and all tensors where the slice has at most one step.
        """
        context, rules, readers = ctx.context, ctx.rules, ctx.saved_tensors
        dy, dwhole = grad_outputs if ctx.want_final else (grad_outputs[0], None)
        summed = None if dwhole is None else context.collectives.start_all_reduce(dwhole)
        message = backward_message(context, rules, readers, dy, summed)
        gathered = context.collectives.start_all_gather(message)
        after, leaving = context.share.after[::-1], None
        if after:
            leaving = rules.fold(gathered.result(), after, back=True)
        else:
            ctx.awaited.append(gathered)
        dfinal = final_gradient(context, rules, None if summed is None else summed.result(), leaving, dy)
        if dfinal is None:
            dfinal = dy.new_zeros((rules.batch, *rules.state), dtype=torch.float32)
        ties = [
            dy.new_zeros(each[0], dtype=each[1]) if each is not None and needed else None
            for each, needed in zip(ctx.ties, ctx.needs_input_grad[7:], strict=True)
        ]
        return None, None, None, None, None, dy, dfinal, *ties
