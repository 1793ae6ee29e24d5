"""Context parallelism of a linear recurrence: a prefix scan of states over the ranks of a group, by one exchange.

    S_out = local_state + cumulative_decay * S_in        over the slice of a rank, for the sequence that continues on later ranks

Forward:
    1. Local pass: the state after the slice from a zero state (:meth:`Rules.local_state`), and the product of the decays of all
       steps (:meth:`Rules.cumulative_decays`).
    2. One exchange, an all-gather of these pairs. Each rank combines those of earlier ranks (:meth:`Rules.fold`), an exclusive
       prefix scan, to the state before its slice.
    3. The ordinary call of the operation from that state. Its outputs are those of one process up to rounding. A rank with no
       earlier ranks in its sequence runs it during the all-gather.

Backward, with gradients of states and from later ranks to earlier ones:
    1. The gradient of the state before the slice from the rank's own outputs (:meth:`Rules.initial_gradient`). The all-reduce of
       the final states' gradients overlaps with it.
    2. One all-gather, and a suffix scan to the gradient of the state after the slice.
    3. The ordinary backward pass of the call with that gradient, which returns all gradients.

:class:`_GatherStateGradients` runs steps 1 and 2. It is an identity function of the call's results, so autograd calls it before
the backward pass of the call. A rank with no later ranks in its sequence does not wait for the all-gather there, but in
:class:`_WaitForCollectives`, an identity function of the call's tensors, which autograd calls last.

Where an operation has :class:`Passes` of kernels, ``passes.py`` runs these in place of ordinary calls. By stores to the memory of
peers, a rank then sends its pair only to the ranks that read it, in place of the all-gather.

Source: the scheme of LASP-2 (Sun et al., 2025), and of fla.ops.cp of flash-linear-attention 0.6.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from onelaunch.parallel.collectives import Pending
from onelaunch.parallel.contexts import Context
from onelaunch.parallel.messages import all_final_states, backward_message, final_gradient, forward_message, initial_states
from onelaunch.parallel.passes import run_passes
from onelaunch.parallel.rules import Rules, Tensors
from onelaunch.parallel.uncompiled import uncompiled


def run_across_ranks(
    context: Context, rules: Rules, tensors: Tensors, initial: torch.Tensor | None, want_final: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run an operation on this rank's slice of the steps, from the state after the slices of earlier ranks.

    Args:
        context: Slices of all ranks.
        rules: Rules of the operation.
        tensors: Tensors of the operation on this rank.
        initial: Initial states of all sequences, ``[N, *state]``, or ``None``. A rank reads those of sequences that begin on it.
        want_final: Flag that the final states of all sequences are wanted, on every rank.

    Returns:
        The outputs of the slice, and the final states ``[N, *state]`` or ``None``.
    """
    return uncompiled(_run_across_ranks, context, rules, tensors, initial, want_final)


def _run_across_ranks(
    context: Context, rules: Rules, tensors: Tensors, initial: torch.Tensor | None, want_final: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the results of :func:`run_across_ranks`, outside of compiled code."""
    passes = rules.passes()
    if passes is not None:
        return run_passes(context, rules, passes, tensors, initial, want_final)
    saved = rules.saved(tensors)
    with torch.no_grad():
        message = forward_message(context, rules, tensors, saved, initial)
        gathered = context.collectives.start_all_gather(message)
        incoming = None
        if context.local_slice.before:
            incoming = rules.fold(gathered.result(), context.local_slice.before, back=False)
    unfinished: list[Pending] = []
    if rules.grad and not context.local_slice.after:
        initial, *viewed = _wait_in_backward(unfinished, initial, *tensors)
        tensors = tuple(viewed)
    y, final = rules.run(tensors, initial_states(context, rules, initial, incoming), context.cu_seqlens, want_final or rules.grad)
    gathered.result()
    if rules.grad:
        assert final is not None  # noqa: S101 - it was asked for
        saved = rules.saved(tensors)
        results = _GatherStateGradients.apply(
            context, rules, want_final, unfinished, len(saved), y, final, initial, *saved, *tensors
        )
        return results if want_final else (results, None)
    return y, None if not want_final or final is None else all_final_states(context, rules, final)


def _wait_in_backward(pending: list[Pending], *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return the tensors; their backward pass, which comes last, waits for the collectives that are in ``pending`` by then."""
    taking = [each is not None and each.requires_grad for each in tensors]
    viewed = iter(_WaitForCollectives.apply(pending, *(each for each, takes in zip(tensors, taking, strict=True) if takes)))
    return [next(viewed) if takes else each for each, takes in zip(tensors, taking, strict=True)]


class _WaitForCollectives(torch.autograd.Function):
    """Identity function of a call's tensors, whose backward pass waits for collectives."""

    @staticmethod
    def forward(ctx: Any, pending: list[Pending], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors. The backward pass of :class:`_GatherStateGradients` fills ``pending``, which is empty now."""
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


class _GatherStateGradients(torch.autograd.Function):
    """Identity function of a call's results, whose backward pass all-gathers and scans the gradients of states.

    All tensors of the call are inputs. So its backward pass, which contains collectives, runs on every rank if any tensor
    requires gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        context: Context,
        rules: Rules,
        want_final: bool,
        unfinished: list[Pending],
        count: int,
        y: torch.Tensor,
        final: torch.Tensor,
        initial: torch.Tensor | None,
        *others: torch.Tensor | None,
    ) -> Any:
        """Return y, and the final states of all sequences if they are wanted. The first ``count`` of ``others`` are saved."""
        ctx.context, ctx.rules, ctx.want_final, ctx.unfinished = context, rules, want_final, unfinished
        unread = initial is not None and context.offsets is None and not context.local_slice.begins[0]
        few = context.local_slice.length <= 1  # from a zero state, one step reads no decay
        untouched = (initial if unread else None, *(others if few else (None,) * len(others)))
        ctx.zeros = [None if each is None else (each.shape, each.dtype) for each in untouched]
        ctx.save_for_backward(*others[:count])
        final_all = all_final_states(context, rules, final) if want_final else None
        return y.view_as(y) if final_all is None else (y.view_as(y), final_all)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        """Return the gradients of y and of this rank's final states, and zeros for tensors that may get none from the call.

        These are initial states that only another rank reads, and all tensors where the slice has at most one step.
        """
        context, rules, saved = ctx.context, ctx.rules, ctx.saved_tensors
        dy, dfinal_all = grad_outputs if ctx.want_final else (grad_outputs[0], None)
        summed = None if dfinal_all is None else context.collectives.start_all_reduce(dfinal_all)
        message = backward_message(context, rules, saved, dy, summed)
        gathered = context.collectives.start_all_gather(message)
        dfinal_all = None if summed is None else summed.result()  # before kernels that wait for messages, see passes.py
        after, outgoing = context.local_slice.after[::-1], None
        if after:
            outgoing = rules.fold(gathered.result(), after, back=True)
        else:
            ctx.unfinished.append(gathered)
        dfinal = final_gradient(context, rules, dfinal_all, outgoing, dy)
        if dfinal is None:
            dfinal = dy.new_zeros((rules.batch, *rules.state), dtype=torch.float32)
        zeros = [
            dy.new_zeros(each[0], dtype=each[1]) if each is not None and needed else None
            for each, needed in zip(ctx.zeros, ctx.needs_input_grad[7:], strict=True)
        ]
        return None, None, None, None, None, dy, dfinal, *zeros
