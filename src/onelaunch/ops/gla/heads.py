"""Numbers of heads of a call of ``gla``: which tensors share heads, the checks of it, and what the dispatch key says of it.

Tensors may have fewer heads than the output, so that several heads of the output share one of theirs. Heads that share one are
neighbours: head h of the output reads head ``h // group`` of a tensor, as after ``tensor.repeat_interleave(group, dim=2)``.

The contract checks by these functions; the reference, the cost, the launches and the form in PyTorch read :class:`Heads`, and the
preference among variants asks :func:`group_of`, the ablations :func:`why_grouped`. Those that need all heads in every tensor
(the reference, the form in PyTorch and the peers) repeat them by :func:`expanded`, and autograd.py does so with final states.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from onelaunch.checks import Facts
from onelaunch.errors import ShapeError
from onelaunch.operation import fixed


class Heads(NamedTuple):
    """Numbers of heads of the tensors of a call. Of any two of them, one is a multiple of the other."""

    q: int
    """Heads of the queries."""
    k: int
    """Heads of the keys."""
    v: int
    """Heads of the values."""
    g: int
    """Heads of the log-decays, ``g`` and ``gv``: the larger number of those of k and of v, or those of the output."""
    state: int
    """Heads of the states: those of the output, or those of g where queries share a state."""

    @property
    def output(self) -> int:
        """Number of heads of the output: the largest of those of q, k, v and g."""
        return max(self[:4])

    @property
    def groups(self) -> Heads:
        """Numbers of neighbouring heads of the output that share a head of q, k, v, g and the state."""
        return Heads(*(self.output // max(count, 1) or 1 for count in self))

    @property
    def grouped(self) -> bool:
        """Flag that some tensor has fewer heads than the output."""
        return len(set(self)) > 1

    def flags(self) -> tuple[str, ...]:
        """Return the dispatch key's flags about groups, such as ``q_group=4``; none where every tensor has all heads."""
        return tuple(f"{name}_group={size}" for name, size in zip(self._fields, self.groups, strict=True) if size > 1)


def group_of(flags: Iterable[str], name: str) -> int:
    """Return the number of heads of the output that share one of a tensor of :class:`Heads`, from a dispatch key's flags."""
    return next((int(flag.partition("=")[2]) for flag in flags if flag.startswith(f"{name}_group=")), 1)


def why_grouped(flags: Iterable[str]) -> str | None:
    """Return why a variant that cannot share heads cannot run a call with these flags, or ``None`` if none are shared."""
    shared = [f"{name} ({group})" for name in Heads._fields if (group := group_of(flags, name)) > 1]
    if not shared:
        return None
    return f"needs as many heads of q, k, v and g as of the output; here several share one: {', '.join(shared)}"


def expanded(tensor: torch.Tensor, heads: int, dim: int = 2) -> torch.Tensor:
    """Return a tensor with each of its heads repeated so that there are ``heads``; itself where it has as many."""
    return tensor if tensor.shape[dim] == heads else tensor.repeat_interleave(heads // tensor.shape[dim], dim)


def check_heads(q: Facts, k: Facts, v: Facts, gates: dict[str, Facts | None], initial_state: Facts | None) -> Heads:
    """Return the numbers of heads of checked tensors ``[B, T, heads, ...]``; ``gates`` are those of g and gv by name.

    The initial state ``[N, heads, ...]`` decides whether queries share states; its shape is not checked here.

    Raises:
        ShapeError: The heads of two tensors cannot be shared evenly. Or a gate has neither the larger number of those of k and
            of v, nor that of the largest of q, k and v; or g and gv have different numbers.
    """
    known: dict[str, int] = {}
    for name, value in (("q", q), ("k", k), ("v", v)):
        (count,) = fixed(value.shape[2])
        for other, heads in known.items():
            if not one_divides(count, heads):
                said = f"[B, T, heads, {'V' if name == 'v' else 'K'}] with a number of heads that divides the {heads} of {other}"
                raise ShapeError(name, got=value.shape, want=f"{said} or is a multiple of it")
        known[name] = count
    least, most = max(known["k"], known["v"]), max(known.values())
    decays = None
    for name, gate in gates.items():
        if gate is None:
            continue
        (count,) = fixed(gate.shape[2])
        if count not in (least, most) or count != (decays or count):
            counts = ", ".join(f"{tensor} has {heads}" for tensor, heads in known.items())
            wanted = f"{least}" if least == most else f"{least} or {most}"
            if decays is not None:
                wanted, counts = f"{decays}", f"{counts}, {next(iter(gates))} has {decays}"
            layout = ", ".join(("[B", "T", "heads") + ("channels",) * (len(gate.shape) == 4))
            raise ShapeError(name, got=gate.shape, want=f"{layout}] with {wanted} heads ({counts})")
        decays = count
    decays = least if decays is None else decays
    shares = initial_state is not None and len(initial_state.shape) == 4 and initial_state.shape[1] == decays
    return Heads(known["q"], known["k"], known["v"], decays, decays if shares else most)


def one_divides(one: int, other: int) -> bool:
    """Return whether one of two numbers of heads is a multiple of the other; no heads go with no heads alone."""
    small, large = sorted((one, other))
    return small == large or (small > 0 and large % small == 0)
