"""The state of a text being decoded: keys and values of the positions so far, in memory that a step appends to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from onelaunch.decode.config import ModelConfig
from onelaunch.errors import ContextExceeded
from onelaunch.operation import Bundle

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

ROOM = 256
"""Positions that a cache has room for at least; capacities are multiples of it, but for the model's context."""


@dataclass(frozen=True, eq=False)
class KVCache(Bundle):
    """Keys (normalised and turned to their positions) and values of the first ``length`` positions.

    The object does not change, its memory does: a step writes the row at ``length``, which a cache of that length has as room.
    Room holds finite numbers, whose values never matter.
    """

    keys: torch.Tensor
    """``[L, K, C, D]``: layers, key heads, capacity, channels of a head; contiguous."""
    values: torch.Tensor
    """As ``keys``."""
    length: int = 0
    """Filled positions, and the position of the token that comes next."""

    @classmethod
    def empty(
        cls, config: ModelConfig, capacity: int = ROOM, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Self:
        """Without any position, with room for at least ``capacity``.

        Raises:
            ContextExceeded: the model's context is shorter.
        """
        shape = (config.num_hidden_layers, config.num_key_value_heads, rounded(capacity, config), config.head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype or config.dtype, device=device) for _ in range(2))
        return cls(keys, values)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is filled, which a step must not change; its room is no input."""
        return {name: getattr(self, name)[:, :, : self.length] for name in ("keys", "values")}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same with a function that keeps shapes applied to all memory, room included."""
        return replace(self, keys=function(self.keys), values=function(self.values))

    def with_length(self, length: int) -> Self:
        """The same memory, with this many positions filled."""
        return replace(self, length=length)

    def grown(self, config: ModelConfig, positions: int) -> Self:
        """The same contents with room for so many positions in all: this cache, or one of at least twice its capacity.

        Raises:
            ContextExceeded: the model's context is shorter.
        """
        if positions <= self.capacity:
            return self
        rounded(positions, config)  # raises beyond the context, where twice the capacity is cut to it
        wanted = min(max(positions, 2 * self.capacity), config.max_position_embeddings)
        larger = KVCache.empty(config, wanted, self.keys.device, self.keys.dtype)
        larger.keys[:, :, : self.length] = self.keys[:, :, : self.length]
        larger.values[:, :, : self.length] = self.values[:, :, : self.length]
        return replace(self, keys=larger.keys, values=larger.values)


def rounded(positions: int, config: ModelConfig) -> int:
    """The capacity of a cache for so many positions."""
    if positions > config.max_position_embeddings:
        raise ContextExceeded(positions, context=config.max_position_embeddings)
    return min(-(-max(positions, 1) // ROOM) * ROOM, config.max_position_embeddings)
