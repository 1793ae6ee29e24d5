"""What layers keep between the calls of a generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from onelaunch.errors import ArgumentError


@dataclass
class LayerState:
    """What one layer keeps."""

    recurrent_state: torch.Tensor
    """float32: ``[N, H, K, V]`` of gated linear attention, ``[N, V]`` of a linear RNN; N sequences."""
    conv_state: tuple[torch.Tensor, ...] | None = None
    """The last inputs of each short convolution, ``[N, channels, conv_size - 1]``."""
    offset: int = 0
    """Steps taken so far, padding included."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.recurrent_state, *(self.conv_state or ()))


class Cache:
    """The states of all layers of a model: pass it as ``past_key_values`` to each of them, at every call.

    A layer finds its own by its ``layer_idx``. States do not grow with the sequence, and cannot be cropped.

    Args:
        in_place: write new states where the last ones lie, as a captured CUDA graph needs; without gradients only. Steps
            counted in ``offset`` are counted by Python, so not by a graph that is replayed.
    """

    def __init__(self, *, in_place: bool = False) -> None:
        self.in_place = in_place
        self.states: dict[int, LayerState] = {}

    def __len__(self) -> int:
        return len(self.states)

    def __contains__(self, layer_idx: int) -> bool:
        return layer_idx in self.states

    def __getitem__(self, layer_idx: int) -> LayerState:
        """Raises :class:`KeyError` for a layer that has not run."""
        return self.states[layer_idx]

    def get(self, layer_idx: int) -> LayerState | None:
        """The state of a layer, or ``None`` before its first call."""
        return self.states.get(layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Steps that a layer has taken, padding included; 0 before its first call."""
        state = self.states.get(layer_idx)
        return 0 if state is None else state.offset

    def update(
        self, layer_idx: int, recurrent_state: torch.Tensor, conv_state: tuple[torch.Tensor, ...] | None, offset: int
    ) -> None:
        """Keep what a layer has come to after ``offset`` more steps.

        Raises:
            ArgumentError: ``in_place``, and a state differs in shape from the one it replaces, or has gradients.
        """
        new = LayerState(recurrent_state, conv_state, self.get_seq_length(layer_idx) + offset)
        old = self.states.get(layer_idx)
        if not self.in_place or old is None:
            self.states[layer_idx] = new
            return
        for there, value in zip(old.tensors(), new.tensors(), strict=True):
            if value.requires_grad:
                raise ArgumentError("past_key_values is a Cache(in_place=True); call the layer under torch.no_grad().")
            if there.shape != value.shape:
                said = f"past_key_values is a Cache(in_place=True) of a state of shape {tuple(there.shape)}"
                raise ArgumentError(f"{said}, and the new one has {tuple(value.shape)}; take a new Cache.")
            there.copy_(value)
        old.offset = new.offset

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let sequence ``i`` go on from the state of sequence ``beam_idx[i]``; ``[N]`` integers."""
        self._replace(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def detach_(self) -> Cache:
        """Cut the states off the graph that made them, for backpropagation through parts of a sequence; returns itself."""
        self._replace(torch.Tensor.detach)
        return self

    def reset(self) -> None:
        """Forget everything."""
        self.states.clear()

    def _replace(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for state in self.states.values():
            new = [function(tensor) for tensor in state.tensors()]
            state.recurrent_state = new[0]
            state.conv_state = None if state.conv_state is None else tuple(new[1:])
