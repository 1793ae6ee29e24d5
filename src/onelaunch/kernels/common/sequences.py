"""Packed or batched sequences of a call: their offsets and initial states."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Sequences(NamedTuple):
    """Initial states and offsets of a call's sequences, contiguous as the kernels read them."""

    initial: torch.Tensor | None
    offsets: torch.Tensor | None

    @classmethod
    def of(cls, initial: torch.Tensor | None, offsets: torch.Tensor | None) -> Sequences:
        """Return the sequences of tensors with any strides."""
        return cls(None if initial is None else initial.contiguous(), None if offsets is None else offsets.contiguous())

    def count(self, batch: int) -> int:
        """Return the number of sequences."""
        return batch if self.offsets is None else self.offsets.shape[0] - 1

    def bisection_steps(self) -> int:
        """Return the number of bisection steps that find the sequence of a token among all offsets."""
        return 0 if self.offsets is None else self.count(1).bit_length()
