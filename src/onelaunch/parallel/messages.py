"""Messages of a rank about its slice, and the states with which its call starts and ends; no autograd.

``carry.py`` and ``passes.py`` call these functions.
"""

from __future__ import annotations

import torch

from onelaunch.parallel.collectives import Pending
from onelaunch.parallel.contexts import Context
from onelaunch.parallel.rules import Rules, Tensors


def forward_message(
    context: Context, rules: Rules, tensors: Tensors, readers: Tensors, initial: torch.Tensor | None
) -> torch.Tensor:
    """Return what the ranks behind this one need: the state that its last sequence leaves, and the factors of its slice."""
    share = context.share
    if not share.after:
        return message(context, rules, readers, None)
    state = rules.added(tensors, share.tail_start)
    begins = share.begins[share.tail]
    if initial is not None and begins:
        before = initial[global_rows(context, share.tail)]
        state = rules.advance(before, state, rules.factors(readers, share.tail_start, share.length), back=False)
    return message(context, rules, readers, state, through=not begins)


def backward_message(context: Context, rules: Rules, readers: Tensors, dy: torch.Tensor, dwhole: Pending | None) -> torch.Tensor:
    """Return what the ranks before this one need: the gradient of the state that its first sequence comes with, and factors."""
    share = context.share
    if not share.before:
        return message(context, rules, readers, None)
    gradient = rules.initial_gradient(readers, dy, share.head_stop)
    ends = share.ends[share.head]
    if dwhole is not None and ends:
        behind = dwhole.result()[global_rows(context, share.head)]
        gradient = rules.advance(behind, gradient, rules.factors(readers, 0, share.head_stop), back=True)
    return message(context, rules, readers, gradient, through=not ends)


def state_rows(context: Context, rules: Rules) -> int:
    """Return the number of states that go from rank to rank."""
    return rules.batch if context.offsets is None else 1


def global_rows(context: Context, position: int) -> slice:
    """Return the rows of a sequence of this rank among the states of all."""
    if context.offsets is None:
        return slice(None)
    n = context.share.sequences[position]
    return slice(n, n + 1)


def message(
    context: Context, rules: Rules, readers: Tensors, state: torch.Tensor | None, *, through: bool = False
) -> torch.Tensor:
    """Return a message ``[1, elements]`` float32: a state, then factors. Zeros stand for what no rank reads.

    The factors are read only where one sequence goes ``through`` the whole slice.
    """
    elements = rules.elements(state_rows(context, rules))
    if state is None:
        return torch.zeros((1, elements), device=next(each.device for each in readers if each is not None))
    parts = [state.reshape(-1)]
    if through:
        parts += [each.reshape(-1) for each in rules.factors(readers, 0, context.share.length)]
    else:
        parts.append(state.new_zeros(elements - state.numel()))
    return torch.cat(parts)[None]


def starting(context: Context, rules: Rules, initial: torch.Tensor | None, entering: torch.Tensor | None) -> torch.Tensor | None:
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


def on_all_ranks(context: Context, rules: Rules, final: torch.Tensor) -> torch.Tensor:
    """Return the final states of all sequences, each from the rank on which its sequence ends."""
    if context.offsets is None:
        whole = final if context.share.ends[0] else torch.zeros_like(final)
    else:
        whole = final.new_zeros((len(context.offsets) - 1, *rules.state))
        whole = whole.index_copy(0, context.sequences[context.ending], final[context.ending])
    return context.collectives.start_all_reduce(whole).result()


def final_gradient(
    context: Context, rules: Rules, dwhole: torch.Tensor | None, leaving: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor | None:
    """Return the gradients of the final states of this rank's sequences, or ``None`` for zeros."""
    share = context.share
    if context.offsets is None:
        return leaving if leaving is not None else dwhole if share.ends[0] else None
    rows = like.new_zeros((len(share.sequences), *rules.state), dtype=torch.float32)
    if dwhole is not None:
        rows = rows.index_copy(0, context.ending, dwhole[context.sequences[context.ending]])
    return rows if leaving is None else torch.cat([rows[: share.tail], leaving, rows[share.tail + 1 :]])
