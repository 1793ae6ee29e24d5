"""Description of an operation with a linear recurrence on a slice of its steps: :class:`Rules`, and :class:`Passes` of kernels.

The operations derive from these classes; ``carry.py`` and ``passes.py`` call them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

Tensors = tuple[torch.Tensor | None, ...]
"""Tensors of a call in an order that the operation's :class:`Rules` know."""

Kept = tuple[torch.Tensor, ...]
"""Tensors that one pass leaves for another one."""


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

    def passes(self) -> Passes | None:
        """Return the passes of kernels that run this rank's call, or ``None`` where it is an ordinary call of the operation."""
        return None

    def fold(self, gathered: torch.Tensor, ranks: Sequence[int], *, back: bool) -> torch.Tensor:
        """Return the state that passes through the slices of ``ranks`` in order, ``[N, *state]``.

        The sequence begins on the first of them; with ``back``, it ends there. Messages of other ranks are not read.

        Args:
            gathered: Messages of all ranks, ``[ranks, elements]``: a state, then factors.
            ranks: At least one rank.
            back: Flag that states are gradients.
        """
        extents = [(gathered.shape[1] // self._elements, *shape) for shape in (self.state, *self.factor_shapes)]
        sizes = [math.prod(extent) for extent in extents]

        def parts(rank: int) -> list[torch.Tensor]:
            return [part.view(extent) for part, extent in zip(gathered[rank].split(sizes), extents, strict=True)]

        state = parts(ranks[0])[0]
        for rank in ranks[1:]:
            added, *factors = parts(rank)
            state = self.advance(state, added, factors, back=back)
        return state

    @property
    def _elements(self) -> int:
        """Number of elements of a state with its factors."""
        return sum(math.prod(shape) for shape in (self.state, *self.factor_shapes))

    def elements(self, rows: int) -> int:
        """Return the number of elements of a message with ``rows`` states."""
        return rows * self._elements

    def advance(self, state: torch.Tensor, added: torch.Tensor, factors: Sequence[torch.Tensor], *, back: bool) -> torch.Tensor:
        """Return the state behind a slice from the one before it; with ``back``, of gradients, the other way round.

        Factors are multiplied, so that ``back`` changes nothing. An operation whose slices multiply the state by a matrix, as
        delta rules do, sends the matrix as a factor and overrides this method.
        """
        for factor in factors:
            state = state * factor
        return added + state


class Passes(ABC):
    """Passes of an operation's kernels over one rank's slice, without autograd, where these can share work.

    An ordinary call starts from nothing. These keep what a local pass has computed for the pass that makes outputs or gradients,
    and compute what the backward pass needs of the inputs alone while gradients of states are under way. States, factors and
    ``tensors`` are those of :class:`Rules`; messages are float32 ``[1, elements]``, a state, then factors.
    """

    @abstractmethod
    def added(self, tensors: Tensors, start: int, before: torch.Tensor | None) -> tuple[torch.Tensor, Kept]:
        """Return the message with the state behind the slice from ``before``, or zeros, in front of step ``start``.

        What is kept is for :meth:`forward` and :meth:`states`, or empty.
        """

    @abstractmethod
    def forward(
        self, tensors: Tensors, initial: torch.Tensor | None, offsets: torch.Tensor | None, kept: Kept, *, want_final: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs, and the final states if they are wanted, as :meth:`Rules.run` does."""

    @abstractmethod
    def initial_gradient(
        self, tensors: Tensors, dy: torch.Tensor, stop: int, behind: torch.Tensor | None
    ) -> tuple[torch.Tensor, Kept]:
        """Return the message with the gradient of the state before the slice.

        It comes from the outputs of steps 0 to ``stop`` and from ``behind``, the gradient of the state behind them, or zeros.
        What is kept is for :meth:`gradients`, or empty.
        """

    @abstractmethod
    def states(self, tensors: Tensors, initial: torch.Tensor | None, offsets: torch.Tensor | None, kept: Kept) -> Kept:
        """Return what :meth:`gradients` needs of the inputs alone."""

    @abstractmethod
    def gradients(
        self,
        tensors: Tensors,
        initial: torch.Tensor | None,
        offsets: torch.Tensor | None,
        dy: torch.Tensor,
        dfinal: torch.Tensor | None,
        states: Kept,
        kept: Kept,
    ) -> tuple[Tensors, torch.Tensor | None]:
        """Return the gradients of ``tensors``, and that of ``initial`` if it is given."""


def shifted(log_decay: torch.Tensor) -> torch.Tensor:
    """Return log-decays ``[B, T, ...]`` in the order of a recurrence backwards in time, for :meth:`Rules.initial_gradient`.

    There a state decays after its step's input was added, by the decay of the step before which it stands. So each comes one step
    later, the first is not read, and the caller multiplies by the last one.
    """
    return torch.cat([torch.zeros_like(log_decay[:, :1]), log_decay[:, 1:].flip(1)], dim=1)
