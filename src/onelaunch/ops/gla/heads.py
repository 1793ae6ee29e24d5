"""Numbers of heads of a call of ``gla``: which tensors share heads, the checks of it, and what the dispatch key says of it.

Tensors may have fewer heads than the output, so that several heads of the output share one of theirs. Heads that share one are
neighbours: head h of the output reads head ``h // group`` of a tensor, as after ``tensor.repeat_interleave(group, dim=2)``.
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
    state: int
    """Heads of the state, of ``g`` and of ``gv``: at least as many as those of k and of v."""

    @property
    def output(self) -> int:
        """Number of heads of the output, the largest of all."""
        return max(self)

    @property
    def groups(self) -> Heads:
        """Numbers of neighbouring heads of the output that share a head of q, k, v and the state."""
        return Heads(*(self.output // max(count, 1) or 1 for count in self))

    @property
    def grouped(self) -> bool:
        """Flag that some tensor has fewer heads than the output."""
        return len(set(self)) > 1

    def flags(self) -> tuple[str, ...]:
        """Return the dispatch key's flags about groups, such as ``q_group=4``; none where every tensor has all heads."""
        return tuple(f"{name}_group={size}" for name, size in zip(self._fields, self.groups, strict=True) if size > 1)


def group_of(flags: Iterable[str], name: str) -> int:
    """Return the number of heads of the output that share one of ``q``, ``k``, ``v`` or ``state``, from a dispatch key's flags."""
    return next((int(flag.partition("=")[2]) for flag in flags if flag.startswith(f"{name}_group=")), 1)


def why_grouped(flags: Iterable[str]) -> str | None:
    """Return why a variant that cannot share heads cannot run a call with these flags, or ``None`` if none are shared."""
    shared = [f"{name} ({group})" for name in Heads._fields if (group := group_of(flags, name)) > 1]
    if not shared:
        return None
    return f"needs as many heads of q, k, v and g as of the output; here heads of the output share those of {', '.join(shared)}"


def expanded(tensor: torch.Tensor, heads: int, dim: int = 2) -> torch.Tensor:
    """Return a tensor with each of its heads repeated so that there are ``heads``; itself where it has as many."""
    return tensor if tensor.shape[dim] == heads else tensor.repeat_interleave(heads // tensor.shape[dim], dim)


def check_heads(q: Facts, k: Facts, v: Facts, gates: dict[str, Facts | None]) -> Heads:
    """Return the numbers of heads of checked tensors ``[B, T, heads, ...]``; ``gates`` are those of g and gv by name.

    Raises:
        ShapeError: The heads of two tensors cannot be shared evenly, or a gate has not those of the state.
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
    state = None
    for name, gate in gates.items():
        if gate is None:
            continue
        (count,) = fixed(gate.shape[2])
        if count not in (least, most) or count != (state or count):
            counts = ", ".join(f"{tensor} has {heads}" for tensor, heads in known.items())
            wanted = f"{least}" if least == most else f"{least}, or {most} for a state per query head"
            if state is not None:
                wanted, counts = f"{state}", f"{counts}, {next(iter(gates))} has {state}"
            layout = ", ".join(("[B", "T", "heads") + ("channels",) * (len(gate.shape) == 4))
            raise ShapeError(name, got=gate.shape, want=f"{layout}] with the heads of the state: {wanted} ({counts})")
        state = count
    return Heads(known["q"], known["k"], known["v"], least if state is None else state)


def one_divides(one: int, other: int) -> bool:
    """Return whether one of two numbers of heads is a multiple of the other; no heads go with no heads alone."""
    small, large = sorted((one, other))
    return small == large or (small > 0 and large % small == 0)
