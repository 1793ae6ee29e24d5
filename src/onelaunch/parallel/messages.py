"""Messages that ranks exchange, and the initial and final states of a rank's call; no autograd.

A message describes a slice by a pair: its final state from a zero state, and its cumulative decays. An associative operator
combines pairs, so the states between slices are an exclusive prefix scan over ranks (backward, a suffix scan).

The head is the sequence of a slice's first step, and the tail that of its last step (:class:`LocalSlice`). Either may have steps
on other ranks.

``state_scan.py`` and ``passes.py`` call these functions.
"""

from __future__ import annotations

import torch

from onelaunch.parallel.collectives import Outgoing, Pending
from onelaunch.parallel.contexts import Context
from onelaunch.parallel.rules import Rules, Tensors


def forward_message(
    context: Context, rules: Rules, tensors: Tensors, saved: Tensors, initial: torch.Tensor | None
) -> torch.Tensor:
    """Return the message to later ranks: the final state of the tail in this slice, and the cumulative decays of the slice."""
    local = context.local_slice
    if not local.after:
        return message(context, rules, saved, None)
    state = rules.local_state(tensors, local.tail_start)
    begins = local.begins[local.tail]
    if initial is not None and begins:
        before = initial[global_rows(context, local.tail)]
        state = rules.advance(before, state, rules.cumulative_decays(saved, local.tail_start, local.length), back=False)
    return message(context, rules, saved, state, through=not begins)


def backward_message(
    context: Context, rules: Rules, saved: Tensors, dy: torch.Tensor, dfinal_all: Pending | None
) -> torch.Tensor:
    """Return the message to earlier ranks: the gradient of the head's initial state in this slice, and the cumulative decays."""
    local = context.local_slice
    if not local.before:
        return message(context, rules, saved, None)
    gradient = rules.initial_gradient(saved, dy, local.head_stop)
    ends = local.ends[local.head]
    if dfinal_all is not None and ends:
        after = dfinal_all.result()[global_rows(context, local.head)]
        gradient = rules.advance(after, gradient, rules.cumulative_decays(saved, 0, local.head_stop), back=True)
    return message(context, rules, saved, gradient, through=not ends)


def state_rows(context: Context, rules: Rules) -> int:
    """Return the number of states in a message."""
    return rules.batch if context.offsets is None else 1


def global_rows(context: Context, position: int) -> slice:
    """Return the rows of one of this rank's sequences in a tensor of the states of all sequences."""
    if context.offsets is None:
        return slice(None)
    n = context.local_slice.sequences[position]
    return slice(n, n + 1)


def message(context: Context, rules: Rules, saved: Tensors, state: torch.Tensor | None, *, through: bool = False) -> torch.Tensor:
    """Return a message ``[1, elements]`` float32: a state, then cumulative decays; zeros if no other rank reads it.

    Other ranks read the cumulative decays only where one sequence goes ``through`` the whole slice.
    """
    elements = rules.elements(state_rows(context, rules))
    if state is None:
        return torch.zeros((1, elements), device=next(each.device for each in saved if each is not None))
    parts = [state.reshape(-1)]
    if through:
        parts += [each.reshape(-1) for each in rules.cumulative_decays(saved, 0, context.local_slice.length)]
    else:
        parts.append(state.new_zeros(elements - state.numel()))
    return torch.cat(parts)[None]


def no_message(context: Context, rules: Rules, saved: Tensors) -> Outgoing:
    """Return the message of a rank whose message no other rank reads."""
    elements, like = rules.elements(state_rows(context, rules)), next(each for each in saved if each is not None)
    return Outgoing(elements, like, lambda: message(context, rules, saved, None), None)


def initial_states(
    context: Context, rules: Rules, initial: torch.Tensor | None, incoming: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the initial states of this rank's call, or ``None`` for zeros; ``incoming`` is that of the head."""
    local = context.local_slice
    if context.offsets is None:
        return incoming if incoming is not None else initial if local.begins[0] else None
    if initial is not None:
        initial = initial.index_select(0, context.sequences)
    if incoming is None:
        return initial
    if initial is None:
        initial = incoming.new_zeros((len(local.sequences), *rules.state))
    return torch.cat([initial[: local.head], incoming, initial[local.head + 1 :]])


def all_final_states(context: Context, rules: Rules, final: torch.Tensor) -> torch.Tensor:
    """Return the final states of all sequences on every rank, by one all-reduce."""
    if context.offsets is None:
        all_states = final if context.local_slice.ends[0] else torch.zeros_like(final)
    else:
        all_states = final.new_zeros((len(context.offsets) - 1, *rules.state))
        all_states = all_states.index_copy(0, context.sequences[context.ending], final[context.ending])
    return context.collectives.start_all_reduce(all_states).result()


def final_gradient(
    context: Context, rules: Rules, dfinal_all: torch.Tensor | None, outgoing: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor | None:
    """Return the gradients of this rank's final states, or ``None`` for zeros; ``outgoing`` is that of the tail."""
    local = context.local_slice
    if context.offsets is None:
        return outgoing if outgoing is not None else dfinal_all if local.ends[0] else None
    rows = like.new_zeros((len(local.sequences), *rules.state), dtype=torch.float32)
    if dfinal_all is not None:
        rows = rows.index_copy(0, context.ending, dfinal_all[context.sequences[context.ending]])
    return rows if outgoing is None else torch.cat([rows[: local.tail], outgoing, rows[local.tail + 1 :]])
