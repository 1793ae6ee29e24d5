"""Cache of layers' states between the calls of a generation.

Users pass a :class:`Cache` to a layer's call. ``inputs.py`` makes one where it is missing, looks up the layer's
:class:`LayerState` and stores the new one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from onelaunch.errors import ArgumentError


@dataclass
class LayerState:
    """State of one layer."""

    recurrent_state: torch.Tensor
    """Recurrent state of N sequences, float32.

    It is ``[N, H, K, V]`` of gated linear attention and HGRN2, ``[N, V]`` of a linear RNN and HGRN.
    """
    conv_state: tuple[torch.Tensor, ...] | None = None
    """Last inputs of each short convolution, ``[N, channels, conv_size - 1]``."""
    offset: int = 0
    """Number of steps taken so far, padding included."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the recurrent state and the convolutions' states."""
        return (self.recurrent_state, *(self.conv_state or ()))


class Cache:
    """States of all layers of a model; pass it as ``past_key_values`` to each layer, at every call.

    A layer finds its state by its ``layer_idx``. States do not grow with the sequence, and cannot be cropped.

    Args:
        in_place: whether to write new states into the tensors of the old ones, as a captured CUDA graph needs; only without
            gradients. Python counts the steps in ``offset``, so the replay of a graph does not count them.
    """

    def __init__(self, *, in_place: bool = False) -> None:
        self.in_place = in_place
        self.states: dict[int, LayerState] = {}

    def __len__(self) -> int:
        return len(self.states)

    def __contains__(self, layer_idx: int) -> bool:
        return layer_idx in self.states

    def __getitem__(self, layer_idx: int) -> LayerState:
        """Return the state of a layer; raise :class:`KeyError` if the layer has not run."""
        return self.states[layer_idx]

    def get(self, layer_idx: int) -> LayerState | None:
        """Return the state of a layer, or ``None`` before its first call."""
        return self.states.get(layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of steps that a layer has taken, padding included; 0 before its first call."""
        state = self.states.get(layer_idx)
        return 0 if state is None else state.offset

    def update(
        self, layer_idx: int, recurrent_state: torch.Tensor, conv_state: tuple[torch.Tensor, ...] | None, offset: int
    ) -> None:
        """Store a layer's state after ``offset`` more steps.

        Raises:
            ArgumentError: ``in_place`` is set, and a state that replaces another has another shape or needs gradients. A layer's
                first state is stored without a check.
        """
        new = LayerState(recurrent_state, conv_state, self.get_seq_length(layer_idx) + offset)
        old = self.states.get(layer_idx)
        if not self.in_place or old is None:
            self.states[layer_idx] = new
            return
        self._overwrite(old, new.tensors())
        old.offset = new.offset

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence ``i`` continue from the state of sequence ``beam_idx[i]``; ``beam_idx`` has N integers.

        A caller's beam search calls it; no layer does.

        Raises:
            ArgumentError: ``in_place`` is set, and ``beam_idx`` has another number of sequences, or the states need gradients.
        """

        def reordered(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(0, beam_idx.to(tensor.device))

        if not self.in_place:
            self._replace(reordered)
            return
        for state in self.states.values():
            self._overwrite(state, tuple(map(reordered, state.tensors())))

    def detach_(self) -> Cache:
        """Detach the states from the autograd graph, for truncated backpropagation through time; return the cache.

        A caller's training loop calls it; no layer does.
        """
        self._replace(torch.Tensor.detach)
        return self

    def reset(self) -> None:
        """Remove the states of all layers. A caller that begins other sequences calls it; no layer does."""
        self.states.clear()

    @staticmethod
    def _overwrite(state: LayerState, values: tuple[torch.Tensor, ...]) -> None:
        """Copy new values into the tensors of a layer's state."""
        for stored, value in zip(state.tensors(), values, strict=True):
            if value.requires_grad:
                raise ArgumentError("past_key_values is a Cache(in_place=True); call the layer under torch.no_grad().")
            if stored.shape != value.shape:
                said = f"past_key_values is a Cache(in_place=True) of a state of shape {tuple(stored.shape)}"
                raise ArgumentError(f"{said}, and the new one has {tuple(value.shape)}; take a new Cache.")
            stored.copy_(value)

    def _replace(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for state in self.states.values():
            new = [function(tensor) for tensor in state.tensors()]
            state.recurrent_state = new[0]
            state.conv_state = None if state.conv_state is None else tuple(new[1:])
