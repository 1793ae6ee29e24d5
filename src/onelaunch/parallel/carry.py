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

Source: the scheme of LASP-2 (Sun et al., 2025), and of fla.ops.cp of flash-linear-attention 0.6.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from onelaunch.parallel import collectives
from onelaunch.parallel.collectives import Pending
from onelaunch.parallel.contexts import Context
from onelaunch.parallel.uncompiled import uncompiled

Tensors = tuple[torch.Tensor | None, ...]
"""Tensors of a call in an order that the operation's :class:`Rules` know."""


class Rules(ABC):
    """Functions of an operation with a linear recurrence, on one rank's slice.

    They keep no tensors. ``tensors`` are the call's, ``readers`` those that the backward pass reads. States are float32
    ``[N, *state]``; N is the batch size, or 1 where sequences are packed, except in :meth:`run`.

    Args:
        batch: Batch size.
        state: Shape of a state without N.
        factors: Shapes of the factors without N, each of which broadcasts to the state.
        grad: Flag that gradients are wanted, the same on all ranks.
    """

    def __init__(self, batch: int, state: tuple[int, ...], factors: tuple[tuple[int, ...], ...], *, grad: bool) -> None:
        self.batch, self.state, self.factor_shapes, self.grad = batch, state, factors, grad

    @abstractmethod
    def run(
        self, tensors: Tensors, initial: torch.Tensor | None, offsets: torch.Tensor | None, want_final: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs and the final states ``[N, *state]`` of the ordinary call, N as its offsets say."""

    @abstractmethod
    def readers(self, tensors: Tensors) -> Tensors:
        """Return the tensors that :meth:`factors` and :meth:`initial_gradient` read."""

    @abstractmethod
    def added(self, tensors: Tensors, start: int) -> torch.Tensor:
        """Return the state behind the slice from a zero state before step ``start``."""

    @abstractmethod
    def factors(self, readers: Tensors, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Return the products of the decays of steps ``start`` to ``stop``, ``[N, *shape]`` for each shape of a factor."""

    @abstractmethod
    def initial_gradient(self, readers: Tensors, dy: torch.Tensor, stop: int) -> torch.Tensor:
        """Return the gradient of the state before the slice from those of the outputs of steps 0 to ``stop``."""

    def advance(self, state: torch.Tensor, added: torch.Tensor, factors: Sequence[torch.Tensor], *, back: bool) -> torch.Tensor:
        """Return the state behind a slice from the one before it; with ``back``, of gradients, the other way round.

        Factors are multiplied, so that ``back`` changes nothing. An operation whose slices multiply the state by a matrix, as
        delta rules do, sends the matrix as a factor and overrides this method.
        """
        for factor in factors:
            state = state * factor
        return added + state


def shifted(log_decay: torch.Tensor) -> torch.Tensor:
    """Return log-decays ``[B, T, ...]`` in the order of a recurrence backwards in time, for :meth:`Rules.initial_gradient`.

    There a state decays after its step's input was added, by the decay of the step before which it stands. So each comes one step
    later, the first is not read, and the caller multiplies by the last one.
    """
    return torch.cat([torch.zeros_like(log_decay[:, :1]), log_decay[:, 1:].flip(1)], dim=1)


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
    readers = rules.readers(tensors)
    with torch.no_grad():
        message = _forward_message(context, rules, tensors, readers, initial)
        gathered = collectives.start_all_gather(message, context.size, context.group)
        entering = None
        if context.share.before:
            entering = _folded(context, rules, gathered.result(), context.share.before, back=False)
    awaited: list[Pending] = []
    if rules.grad and not context.share.after:
        initial, *viewed = _awaited(awaited, initial, *tensors)
        tensors = tuple(viewed)
    y, final = rules.run(tensors, _starting(context, rules, initial, entering), context.cu_seqlens, want_final or rules.grad)
    gathered.result()
    if rules.grad:
        assert final is not None  # noqa: S101 - it was asked for
        readers = rules.readers(tensors)
        results = _Joined.apply(context, rules, want_final, awaited, len(readers), y, final, initial, *readers, *tensors)
        return results if want_final else (results, None)
    return y, None if not want_final or final is None else _on_all_ranks(context, rules, final)


def _forward_message(
    context: Context, rules: Rules, tensors: Tensors, readers: Tensors, initial: torch.Tensor | None
) -> torch.Tensor:
    """Return what the ranks behind this one need: the state that its last sequence leaves, and the factors of its slice."""
    share = context.share
    if not share.after:
        return _message(context, rules, readers, None)
    state = rules.added(tensors, share.tail_start)
    begins = share.begins[share.tail]
    if initial is not None and begins:
        before = initial[_global_rows(context, share.tail)]
        state = rules.advance(before, state, rules.factors(readers, share.tail_start, share.length), back=False)
    return _message(context, rules, readers, state, through=not begins)


def _backward_message(context: Context, rules: Rules, readers: Tensors, dy: torch.Tensor, dwhole: Pending | None) -> torch.Tensor:
    """Return what the ranks before this one need: the gradient of the state that its first sequence comes with, and factors."""
    share = context.share
    if not share.before:
        return _message(context, rules, readers, None)
    gradient = rules.initial_gradient(readers, dy, share.head_stop)
    ends = share.ends[share.head]
    if dwhole is not None and ends:
        behind = dwhole.result()[_global_rows(context, share.head)]
        gradient = rules.advance(behind, gradient, rules.factors(readers, 0, share.head_stop), back=True)
    return _message(context, rules, readers, gradient, through=not ends)


def _rows(context: Context, rules: Rules) -> int:
    """Return the number of states that go from rank to rank."""
    return rules.batch if context.offsets is None else 1


def _global_rows(context: Context, position: int) -> slice:
    """Return the rows of a sequence of this rank among the states of all."""
    if context.offsets is None:
        return slice(None)
    n = context.share.sequences[position]
    return slice(n, n + 1)


def _message(
    context: Context, rules: Rules, readers: Tensors, state: torch.Tensor | None, *, through: bool = False
) -> torch.Tensor:
    """Return a message ``[1, elements]`` float32: a state, then factors. Zeros stand for what no rank reads.

    The factors are read only where one sequence goes ``through`` the whole slice.
    """
    rows, device = _rows(context, rules), next(each.device for each in readers if each is not None)
    elements = sum(rows * math.prod(shape) for shape in (rules.state, *rules.factor_shapes))
    if state is None:
        return torch.zeros((1, elements), device=device)
    parts = [state.reshape(-1)]
    if through:
        parts += [each.reshape(-1) for each in rules.factors(readers, 0, context.share.length)]
    else:
        parts.append(torch.zeros(elements - state.numel(), device=device))
    return torch.cat(parts)[None]


def _folded(context: Context, rules: Rules, gathered: torch.Tensor, ranks: Sequence[int], *, back: bool) -> torch.Tensor:
    """Return the state that passes through the slices of ``ranks`` in order, ``[N, *state]``.

    The sequence begins on the first of them; with ``back``, it ends there. Messages of other ranks are not read.
    """
    rows = _rows(context, rules)
    extents = [(rows, *shape) for shape in (rules.state, *rules.factor_shapes)]
    sizes = [math.prod(extent) for extent in extents]

    def parts(rank: int) -> list[torch.Tensor]:
        return [part.view(extent) for part, extent in zip(gathered[rank].split(sizes), extents, strict=True)]

    state = parts(ranks[0])[0]
    for rank in ranks[1:]:
        added, *factors = parts(rank)
        state = rules.advance(state, added, factors, back=back)
    return state


def _starting(context: Context, rules: Rules, initial: torch.Tensor | None, entering: torch.Tensor | None) -> torch.Tensor | None:
    """Return the initial states of this rank's sequences, or ``None`` for zeros."""
    share = context.share
    if context.offsets is None:
        return entering if entering is not None else initial if share.begins[0] else None
    if initial is not None:
        initial = initial.index_select(0, context.sequences)
    if entering is None:
        return initial
    if initial is None:
        initial = entering.new_zeros((len(share.sequences), *rules.state))
    return torch.cat([initial[: share.head], entering, initial[share.head + 1 :]])


def _on_all_ranks(context: Context, rules: Rules, final: torch.Tensor) -> torch.Tensor:
    """Return the final states of all sequences, each from the rank on which its sequence ends."""
    if context.offsets is None:
        whole = final if context.share.ends[0] else torch.zeros_like(final)
    else:
        whole = final.new_zeros((len(context.offsets) - 1, *rules.state))
        whole = whole.index_copy(0, context.sequences[context.ending], final[context.ending])
    return collectives.all_reduce(whole, context.group)


def _final_gradient(
    context: Context, rules: Rules, dwhole: torch.Tensor | None, leaving: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    """Return the gradients of the final states of this rank's sequences."""
    share = context.share
    if context.offsets is None:
        found = leaving if leaving is not None else dwhole if share.ends[0] else None
        return like.new_zeros((rules.batch, *rules.state), dtype=torch.float32) if found is None else found
    rows = like.new_zeros((len(share.sequences), *rules.state), dtype=torch.float32)
    if dwhole is not None:
        rows = rows.index_copy(0, context.ending, dwhole[context.sequences[context.ending]])
    return rows if leaving is None else torch.cat([rows[: share.tail], leaving, rows[share.tail + 1 :]])


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
        whole = _on_all_ranks(context, rules, final) if want_final else None
        return y.view_as(y) if whole is None else (y.view_as(y), whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        """Return the gradients of y and of this rank's final states, and zeros for tensors that this rank's call does not read.

        Those are initial states that another rank reads, and all tensors where the slice has at most one step.
        """
        context, rules, readers = ctx.context, ctx.rules, ctx.saved_tensors
        dy, dwhole = grad_outputs if ctx.want_final else (grad_outputs[0], None)
        summed = None if dwhole is None else collectives.start_all_reduce(dwhole, context.group)
        message = _backward_message(context, rules, readers, dy, summed)
        gathered = collectives.start_all_gather(message, context.size, context.group)
        after, leaving = context.share.after[::-1], None
        if after:
            leaving = _folded(context, rules, gathered.result(), after, back=True)
        else:
            ctx.awaited.append(gathered)
        dfinal = _final_gradient(context, rules, None if summed is None else summed.result(), leaving, dy)
        ties = [
            dy.new_zeros(each[0], dtype=each[1]) if each is not None and needed else None
            for each, needed in zip(ctx.ties, ctx.needs_input_grad[7:], strict=True)
        ]
        return None, None, None, None, None, dy, dfinal, *ties
