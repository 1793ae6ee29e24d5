"""Interface between context parallelism and an operation with a linear recurrence: :class:`Rules` and kernels (:class:`Passes`).

A slice of the steps changes the state by ``S_out = local_state + cumulative_decay * S_in``. These classes compute that pair for a
slice and combine pairs. The operations derive from them; ``state_scan.py`` and ``passes.py`` call them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from onelaunch.parallel.collectives import Outgoing, Pending

Tensors = tuple[torch.Tensor | None, ...]
"""Tensors of a call in an order that the operation's :class:`Rules` know."""

Kept = tuple[torch.Tensor, ...]
"""Tensors that one pass leaves for another one."""


class Rules(ABC):
    """Functions of an operation with a linear recurrence, on one rank's slice.

    They keep no tensors. ``tensors`` are the call's, ``saved`` those that are saved for the backward pass. States are float32
    ``[N, *state]``; N is the batch size, or 1 where sequences are packed, except in :meth:`run`.

    Args:
        batch: Batch size.
        state: Shape of a state without N.
        cumulative_decays: Shapes of the cumulative decays without N, each of which broadcasts to the state.
        grad: Flag that gradients are wanted, the same on all ranks.
    """

    def __init__(self, batch: int, state: tuple[int, ...], cumulative_decays: tuple[tuple[int, ...], ...], *, grad: bool) -> None:
        self.batch, self.state, self.decay_shapes, self.grad = batch, state, cumulative_decays, grad

    @abstractmethod
    def run(
        self, tensors: Tensors, initial: torch.Tensor | None, offsets: torch.Tensor | None, want_final: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs and final states ``[N, *state]`` of the ordinary call; with offsets N is the number of sequences."""

    @abstractmethod
    def saved(self, tensors: Tensors) -> Tensors:
        """Return the tensors to save for the backward pass: those that the decays and :meth:`initial_gradient` read."""

    @abstractmethod
    def local_state(self, tensors: Tensors, start: int) -> torch.Tensor:
        """Return the state after the slice's last step, from a zero state before step ``start``."""

    @abstractmethod
    def cumulative_decays(self, saved: Tensors, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Return the products of the decays of steps ``[start, stop)``, ``[N, *shape]`` for each of ``decay_shapes``."""

    @abstractmethod
    def initial_gradient(self, saved: Tensors, dy: torch.Tensor, stop: int) -> torch.Tensor:
        """Return the gradient of the state before the slice that comes from the outputs of steps ``[0, stop)`` alone."""

    def passes(self) -> Passes | None:
        """Return the passes of kernels that run this rank's call, or ``None`` where it is an ordinary call of the operation."""
        return None

    def fold(self, gathered: torch.Tensor, ranks: Sequence[int], *, back: bool) -> torch.Tensor:
        """Combine the messages of ``ranks`` in order, and return the state after the last slice, ``[N, *state]``.

        The sequence begins on the first of them; with ``back``, it ends there. Messages of other ranks are not read.

        Args:
            gathered: Messages of all ranks, ``[ranks, elements]``: a state, then cumulative decays.
            ranks: At least one rank.
            back: Flag that states are gradients.
        """
        extents = [(gathered.shape[1] // self._elements, *shape) for shape in (self.state, *self.decay_shapes)]
        sizes = [math.prod(extent) for extent in extents]

        def parts(rank: int) -> list[torch.Tensor]:
            return [part.view(extent) for part, extent in zip(gathered[rank].split(sizes), extents, strict=True)]

        state = parts(ranks[0])[0]
        for rank in ranks[1:]:
            local_state, *cumulative_decays = parts(rank)
            state = self.advance(state, local_state, cumulative_decays, back=back)
        return state

    def scan(self, exchange: Pending, ranks: Sequence[int], *, back: bool) -> torch.Tensor:
        """Return the state that :meth:`fold` returns, from the messages of an exchange, for which the current stream waits.

        An operation with :class:`Passes` can read them where they arrive (:meth:`Pending.in_place`).
        """
        return self.fold(exchange.result(), ranks, back=back)

    @property
    def _elements(self) -> int:
        """Number of elements of a state with its cumulative decays."""
        return sum(math.prod(shape) for shape in (self.state, *self.decay_shapes))

    def elements(self, rows: int) -> int:
        """Return the number of elements of a message with ``rows`` states."""
        return rows * self._elements

    def advance(
        self, state: torch.Tensor, local_state: torch.Tensor, cumulative_decays: Sequence[torch.Tensor], *, back: bool
    ) -> torch.Tensor:
        """Return the state after a slice from the one before it; with ``back``, the gradient before it from the one after it.

        Decays are elementwise, so that ``back`` changes nothing. An operation whose slices multiply the state by a matrix, as
        delta rules do, sends the matrix in place of a decay and overrides this method.
        """
        for decay in cumulative_decays:
            state = state * decay
        return local_state + state


class Passes(ABC):
    """Kernels of an operation for one rank's slice, without autograd, where the passes of a call can share work.

    The pass that computes outputs or gradients reuses results of the local pass. The backward pass recomputes states while the
    messages with state gradients arrive. States, cumulative decays and ``tensors`` are those of :class:`Rules`; messages are
    float32 ``[1, elements]``, a state, then cumulative decays, which a kernel may compute and send at once.
    """

    @abstractmethod
    def local_state(self, tensors: Tensors, start: int, before: torch.Tensor | None) -> tuple[Outgoing, Kept]:
        """Return the message with the state after the slice, from ``before`` or zeros as the state before step ``start``.

        The tensors kept, if any, are for :meth:`forward` and :meth:`states`.
        """

    def sums(self, tensors: Tensors, offsets: torch.Tensor | None) -> Kept:
        """Return the tensors that :meth:`local_state` would keep, or none, on a rank that sends no state in the forward pass.

        They depend on no other rank, so a rank computes them before it waits for messages.
        """
        return ()

    @abstractmethod
    def forward(
        self, tensors: Tensors, initial: torch.Tensor | None, offsets: torch.Tensor | None, kept: Kept, *, want_final: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs, and the final states if they are wanted, as :meth:`Rules.run` does."""

    @abstractmethod
    def initial_gradient(
        self, tensors: Tensors, dy: torch.Tensor, stop: int, behind: torch.Tensor | None
    ) -> tuple[Outgoing, Kept]:
        """Return the message with the gradient of the state before the slice.

        It comes from the gradients of the outputs of steps ``[0, stop)``, and from ``behind``, the gradient of the state after
        these steps, ``None`` for zeros. The tensors kept, if any, are for :meth:`gradients`.
        """

    @abstractmethod
    def states(self, tensors: Tensors, initial: torch.Tensor | None, offsets: torch.Tensor | None, kept: Kept) -> Kept:
        """Return the states that :meth:`gradients` needs, which depend on the inputs and not on gradients."""

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
        *,
        want_initial: bool,
    ) -> tuple[Tensors, torch.Tensor | None]:
        """Return the gradients of ``tensors``, and that of ``initial`` if it is given and its gradient wanted."""


def shifted(log_decay: torch.Tensor) -> torch.Tensor:
    """Return log-decays ``[B, T, ...]`` in the order of a recurrence backwards in time, for :meth:`Rules.initial_gradient`.

    Backward, the state's gradient receives the term of a step first, and is then multiplied by the decay of that step. So the
    flipped log-decays are delayed by one step: the first is zero, and the caller multiplies the final state by the decay of
    step 0.
    """
    return torch.cat([torch.zeros_like(log_decay[:, :1]), log_decay[:, 1:].flip(1)], dim=1)
