"""Packed or batched sequences of a call of a recurrence: their offsets and initial states.

The launch code of ``kernels/scan``, ``ops/gla``, ``ops/linear_rnn`` and the ablations reads :class:`Sequences`. ``launch.py`` of
``ops/gla`` makes them, and so do ``autograd.py`` and ``fakes.py`` of ``ops/gated_scan`` and ``ops/linear_rnn``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Sequences(NamedTuple):
    """Initial states and offsets of a call's sequences.

    :meth:`of` makes them contiguous, as most kernels read them; ``gla`` can keep an initial state whose keys are contiguous.
    """

    initial: torch.Tensor | None
    """State before the first token of each sequence, one entry per sequence; ``None`` for zeros."""
    offsets: torch.Tensor | None
    """First token of each packed sequence, and last the number of tokens, as ``cu_seqlens`` of FlashAttention; integers.

    ``None`` if sequences are not packed. Then each row of the batch is one sequence.
    """

    @classmethod
    def of(cls, initial: torch.Tensor | None, offsets: torch.Tensor | None) -> Sequences:
        """Return the sequences of a call, with copies of tensors that are not contiguous."""
        return cls(None if initial is None else initial.contiguous(), None if offsets is None else offsets.contiguous())

    def count(self, batch: int) -> int:
        """Return the number of sequences: of the packed ones if there are offsets, and else the batch size ``batch``."""
        return batch if self.offsets is None else self.offsets.shape[0] - 1

    def bisection_steps(self) -> int:
        """Return the number of bisection steps that find the sequence of a token among all offsets."""
        return 0 if self.offsets is None else self.count(1).bit_length()  # with offsets, count ignores the batch size
