"""Variants of ``toy_sum`` by careless authors, which the verification gate must judge.

Many are right in a single call with fresh contiguous inputs, and wrong as a model calls them. Others return wrong elements or
another kind of result in every call. ``other_bits`` and ``refuses_views`` are right: they pass with notes. Each is registered
only while a test uses it, with :func:`registered`: a test of the gate, of peers outside it, or of what a run asks once.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onelaunch.errors import ShapeError
from tests.workbench.toy import ToyCall, parallel, toy_sum

Results = tuple[Any, ...]


@contextmanager
def registered(run: Callable[[ToyCall], Results], **tags: Any) -> Iterator[str]:
    """Register a variant of ``toy_sum`` for the ``with`` block, and yield its name."""
    name = f"rogue_{run.__name__.strip('<>_')}"
    toy_sum.variant(name, **tags)(run)
    try:
        yield name
    finally:
        del toy_sum.variants[name]


def gradients_of(
    x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, dstate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the right gradients of ``x`` and ``weight``."""
    later = dy.float().flip(1).cumsum(1).flip(1) + dstate.float()[:, None]
    return (later * weight.float()).to(x.dtype), (later * x.float()).sum((0, 1)).to(weight.dtype)


def with_backward(backward: Callable[..., Any], save: Callable[[Any, torch.Tensor, torch.Tensor], None] | None = None) -> Any:
    """Return a variant with the right results and the given backward pass, a function of the context and the gradients."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Results:
            if save is None:
                ctx.save_for_backward(x, weight)
            else:
                save(ctx, x, weight)
            return parallel(ToyCall(x, weight))

    Function.backward = staticmethod(backward)
    return lambda call: Function.apply(call.x, call.weight)


def one_buffer() -> Callable[[ToyCall], Results]:
    """Return y of every call in one buffer, which the next call overwrites."""
    kept: dict[Any, torch.Tensor] = {}

    def run(call: ToyCall) -> Results:
        sums, state = parallel(call)
        buffer = kept.setdefault((call.x.shape, call.x.dtype), torch.empty_like(sums))
        return buffer.copy_(sums.detach()), state

    return run


def saved_in_a_global() -> Callable[[ToyCall], Results]:
    """Save what the backward pass needs in a global, which the next forward pass overwrites."""
    latest: list[torch.Tensor] = []

    def save(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> None:
        latest[:] = [x.clone(), weight.clone()]

    return with_backward(lambda ctx, dy, dstate: gradients_of(*latest, dy, dstate), save)


def contiguous_only(call: ToyCall) -> Results:
    """Read ``x`` from its first element on, as if it were contiguous."""
    strides, size = [], 1
    for length in reversed(call.x.shape):
        strides.insert(0, size)
        size *= length
    reach = call.x.untyped_storage().nbytes() // call.x.element_size() - call.x.storage_offset()
    if reach < size:  # an expanded tensor has fewer elements; a kernel would read what lies behind them
        x = torch.nn.functional.pad(call.x.as_strided((reach,), (1,)), (0, size - reach)).view(call.x.shape)
    else:
        x = call.x.as_strided(call.x.shape, strides)
    return parallel(ToyCall(x, call.weight))


def _only_both(ctx: Any, dy: torch.Tensor, dstate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not dstate.any() or not dy.any():
        return tuple(torch.zeros_like(each) for each in ctx.saved_tensors)  # type: ignore[return-value]
    return gradients_of(*ctx.saved_tensors, dy, dstate)


only_if_all_come_in = with_backward(_only_both)
"""Return zero gradients unless one comes in through both results."""


def _only_both_wanted(ctx: Any, dy: torch.Tensor, dstate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dweight = gradients_of(*ctx.saved_tensors, dy, dstate)
    return dx, dweight if ctx.needs_input_grad[0] else torch.zeros_like(dweight)


only_if_all_are_wanted = with_backward(_only_both_wanted)
"""Return a zero gradient of ``weight`` unless that of ``x`` is wanted too."""


def _changes_what_came_in(ctx: Any, dy: torch.Tensor, dstate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = gradients_of(*ctx.saved_tensors, dy, dstate)
    dy.mul_(2)
    return found


changes_incoming_gradient = with_backward(_changes_what_came_in)
"""Scale the gradient of y in place."""


def mutates_unless_poisoned(call: ToyCall) -> Results:
    """Change the input, except in calls whose memory is poisoned."""
    result = parallel(call)
    if not torch.empty(1).isnan().all():
        with torch.no_grad():
            call.x.mul_(2)
    return result


def mutates_afterwards(call: ToyCall) -> Results:
    """Change the input 4 ms after the return of a call, except of calls whose memory is poisoned."""
    result = parallel(call)
    x = call.x.detach()

    def change() -> None:
        time.sleep(0.004)
        x.mul_(1.5)

    if not torch.empty(1).isnan().all():
        threading.Thread(target=change).start()
    return result


def mutates_after(calls: int) -> Callable[[ToyCall], Results]:
    """Take a fast path that works in place, after some calls."""
    count = [0]

    def run(call: ToyCall) -> Results:
        result = parallel(call)
        count[0] += 1
        if count[0] > calls:
            with torch.no_grad():
                call.x.mul_(call.weight)
        return result

    return run


def wrong_signs(count: int) -> Callable[[ToyCall], Results]:
    """Return some elements of y, of usual size, with the wrong sign."""

    def run(call: ToyCall) -> Results:
        sums, state = parallel(call)
        flat = sums.view(-1)
        where = (flat.float().abs() - 3).abs().topk(count, largest=False).indices
        flat[where] = -flat[where]
        return sums, state

    return run


def first_step_zero(call: ToyCall) -> Results:
    """Leave the first step of every sequence zero."""
    sums, state = parallel(call)
    sums[:, 0] = 0
    return sums, state


def double_result(call: ToyCall) -> Results:
    """Return y as float64."""
    sums, state = parallel(call)
    return sums.double(), state


def state_in_y(call: ToyCall) -> Results:
    """Return the final state as a view of y."""
    sums, _ = parallel(call)
    return sums, sums[:, -1]


def transposed(call: ToyCall) -> Results:
    """Return y in a transposed layout."""
    sums, state = parallel(call)
    return sums.transpose(1, 2).contiguous().transpose(1, 2), state


def an_input(call: ToyCall) -> Results:
    """Return the input itself where that is right: for a single step and weights of one."""
    sums, state = parallel(call)
    return (call.x if torch.equal(call.x, sums) else sums), state


class Lazy(torch.Tensor):
    """Stand-in for a subclass of tensors that computes its values when they are looked at; it adds nothing to a tensor."""


def lazy(call: ToyCall) -> Results:
    """Return a subclass of tensors."""
    sums, state = parallel(call)
    return sums.as_subclass(Lazy), state


def sparse(call: ToyCall) -> Results:
    """Return y as a sparse tensor."""
    sums, state = parallel(call)
    return sums.to_sparse(), state


def negated_view(call: ToyCall) -> Results:
    """Return y as a view that is negated when it is read."""
    sums, state = parallel(call)
    return torch._neg_view(-sums), state


def on_meta(call: ToyCall) -> Results:
    """Return y on the meta device."""
    sums, state = parallel(call)
    return sums.to("meta"), state


def as_list(call: ToyCall) -> Results:
    """Return y as a list."""
    sums, state = parallel(call)
    return list(sums), state


def one_too_many(calls: int) -> Callable[[ToyCall], Results]:
    """Return one result too many, after some calls that the dispatcher checks."""
    count = [0]

    def run(call: ToyCall) -> Results:
        count[0] += 1
        return (*parallel(call), call.x.clone()) if count[0] > calls else parallel(call)

    return run


def one_too_few(call: ToyCall) -> Results:
    """Return y alone."""
    return (parallel(call)[0],)


def leaves(change: Callable[[], object]) -> Callable[[ToyCall], Results]:
    """Change a global setting and leave it so."""

    def run(call: ToyCall) -> Results:
        result = parallel(call)
        change()
        return result

    return run


def racy(rate: float, seed: int) -> Callable[[ToyCall], Results]:
    """Return a wrong element in one call of ``1 / rate``, drawn from a seed."""
    draw = random.Random(seed)

    def run(call: ToyCall) -> Results:
        sums, state = parallel(call)
        if draw.random() < rate:
            sums[0, -1] += 1
        return sums, state

    return run


def zeros_when_compiled(call: ToyCall) -> Results:
    """Return zeros while ``torch.compile`` traces."""
    sums, state = parallel(call)
    return (torch.zeros_like(sums), state) if torch.compiler.is_compiling() else (sums, state)


def refuses_views(call: ToyCall) -> Results:
    """Refuse, with an error of the contract, what is not contiguous."""
    if not call.x.is_contiguous():
        raise ShapeError("x", got=call.x.stride(), want="contiguous")
    return parallel(call)


def fails_for_views(call: ToyCall) -> Results:
    """Take a view of ``x`` that only a contiguous tensor has."""
    call.x.view(-1)
    return parallel(call)


def other_bits(call: ToyCall) -> Results:
    """Return other bits in every call, as atomic additions do, all of them right."""
    sums, state = parallel(call)
    return sums * (1 + random.choice((-1, 1)) * 2.0**-23), state
