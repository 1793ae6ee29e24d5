"""KV cache of one sequence: keys and values of the positions so far, in memory to which each step appends a row.

Users pass one to ``decode_step``; engines, the timing loops of studies and the input maker of cases make their own. The forward
pass and the variants of ``decode_step`` read and append rows, and the decode runtime passes its memory to the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from onelaunch.decode.model.arguments import device_of, instance, integer
from onelaunch.decode.model.config import ModelConfig
from onelaunch.errors import ContextExceeded
from onelaunch.operation import Bundle

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

_CAPACITY_STEP = 256
"""Unit of a cache's capacity, in positions. A capacity is a multiple of it, or the model's context if that is less."""


@dataclass(frozen=True, eq=False)
class KVCache(Bundle):
    """Keys and values of the first ``length`` positions of one sequence. Keys are stored normalised and rotated (RoPE).

    The object is immutable, its memory is not: a step writes the row at ``length``. Rows from ``length`` on hold finite
    numbers, whose values never matter.
    """

    keys: torch.Tensor
    """Keys, ``[L, K, C, D]`` for layers, key heads, capacity and channels of a head; contiguous."""
    values: torch.Tensor
    """Values, in the shape of ``keys``; contiguous."""
    length: int = 0
    """Number of filled positions, which is also the position of the next token."""

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        capacity: int = _CAPACITY_STEP,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return an empty cache with a capacity of at least ``capacity`` positions.

        Raises:
            ArgumentError: an argument is of the wrong type.
            ContextExceeded: the model's context is shorter than ``capacity``.
        """
        instance("config", config, ModelConfig)
        capacity, device = integer("capacity", capacity, 0), device_of("device", device)
        if dtype is not None:
            instance("dtype", dtype, torch.dtype)
        shape = (config.num_hidden_layers, config.num_key_value_heads, rounded(capacity, config), config.head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype or config.dtype, device=device) for _ in range(2))
        return cls(keys, values)

    @property
    def capacity(self) -> int:
        """Number of positions for which there is memory."""
        return self.keys.shape[2]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the filled rows, which a step must not change. Later rows are not inputs, so they are left out."""
        return {name: getattr(self, name)[:, :, : self.length] for name in ("keys", "values")}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return this cache with ``function``, which must keep shapes, applied to all of its memory."""
        return replace(self, keys=function(self.keys), values=function(self.values))

    def with_length(self, length: int) -> Self:
        """Return a cache with the same memory and ``length`` filled positions."""
        return replace(self, length=integer("length", length, 0))

    def grown(self, config: ModelConfig, positions: int) -> Self:
        """Return a cache with the same contents and a capacity of at least ``positions``.

        It is this cache if that is large enough. Otherwise the contents are copied to one of at least twice the capacity, so
        that a growing sequence is copied seldom.

        Raises:
            ArgumentError: an argument is of the wrong type.
            ContextExceeded: the model's context is shorter.
        """
        instance("config", config, ModelConfig)
        if integer("positions", positions, 0) <= self.capacity:
            return self
        rounded(positions, config)  # raises beyond the context, to which the next line would silently cut
        wanted = min(max(positions, 2 * self.capacity), config.max_position_embeddings)
        larger = KVCache.empty(config, wanted, self.keys.device, self.keys.dtype)
        larger.keys[:, :, : self.length] = self.keys[:, :, : self.length]
        larger.values[:, :, : self.length] = self.values[:, :, : self.length]
        return replace(self, keys=larger.keys, values=larger.values)


def rounded(positions: int, config: ModelConfig) -> int:
    """Return the capacity of a cache for ``positions`` positions: a multiple of ``_CAPACITY_STEP``, or the model's context."""
    if positions > config.max_position_embeddings:
        raise ContextExceeded(positions, context=config.max_position_embeddings)
    return min(-(-max(positions, 1) // _CAPACITY_STEP) * _CAPACITY_STEP, config.max_position_embeddings)
