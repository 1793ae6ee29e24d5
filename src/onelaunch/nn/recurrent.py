"""Base class of the layers with a recurrence between a packed projection and an output projection.

``GatedLayer`` (``gated.py``) and ``ForgetGateLayer`` (``forget.py``) derive from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from onelaunch.errors import ArgumentError
from onelaunch.nn import inputs
from onelaunch.nn.convolution import ShortConvolution
from onelaunch.nn.inputs import Inputs
from onelaunch.nn.packed import PackedModule, child
from onelaunch.parallel import Halo, start_halo, tied
from onelaunch.wording import did_you_mean, listing


class Convolved(NamedTuple):
    """Inputs of a layer's short convolutions, returned by :meth:`RecurrentLayer.before_convolutions`."""

    names: Sequence[str]
    """Names of the convolutions without ``_conv1d``."""
    values: Sequence[torch.Tensor]
    """Projections, ``[B, T, ...]``."""
    halo: Halo | None
    """Exchange of the inputs before a slice, or ``None`` where no other rank has steps."""


class RecurrentLayer(PackedModule):
    """Layer with packed projections, optional short convolutions, a recurrence, a norm and an output projection.

    Each subclass adds its parameters and calls, at last, :meth:`reset_parameters` in its constructor.
    """

    modes: tuple[str, ...]
    """Names of fla's kernels that the argument ``mode`` accepts."""

    in_proj_weight: nn.Parameter
    row_wise = "o_proj"

    def __init__(self, *, mode: str, hidden_size: int, layer_idx: int | None) -> None:
        super().__init__()
        if mode not in self.modes:
            hint = did_you_mean(str(mode), self.modes)
            raise ArgumentError(f"mode is {mode!r}; it must be one of {listing(self.modes)}.{hint}")
        self.mode = mode
        self.hidden_size = inputs.count("hidden_size", hidden_size)
        self.layer_idx = inputs.index("layer_idx", layer_idx)

    def add_convolution(self, name: str, channels: int, conv_size: int, conv_bias: bool, activation: str | None = "silu") -> None:
        """Add the short convolution of a projection, under fla's name for it."""
        size = inputs.count("conv_size", conv_size)
        self.add_module(f"{name}_conv1d", ShortConvolution(channels, size, bool(conv_bias), activation))

    def reset_parameters(self) -> None:
        """Initialize all parameters as in a new layer: projections and convolutions as PyTorch does, norms with 1."""
        self.reset_packed()
        for module in self.children():
            if isinstance(module, (nn.Linear, nn.RMSNorm, nn.Conv1d)):
                module.reset_parameters()

    def before_convolutions(self, given: Inputs, names: Sequence[str], values: Sequence[torch.Tensor]) -> Convolved:
        """Return the inputs of short convolutions; where other ranks have earlier steps, start to exchange the last ones.

        Args:
            given: Inputs of the call.
            names: Names of the convolutions without ``_conv1d``, in the order of their states in a cache.
            values: Projections, ``[B, T, ...]``.

        Raises:
            ArgumentError: Padding would be mixed with tokens.
        """
        inputs.check_convolved_padding(given)
        if given.context is None:
            return Convolved(names, values, None)
        longest = max(child(self, f"{name}_conv1d").weight.shape[2] for name in names) - 1
        flat, halo = start_halo(given.context, [value.flatten(2) for value in values], longest)
        viewed = [each.unflatten(-1, value.shape[2:]) for each, value in zip(flat, values, strict=True)]
        return Convolved(names, viewed, halo)

    def convolve(self, given: Inputs, started: Convolved) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...] | None]:
        """Return projections after their short convolutions, and the convolutions' new states if the call stores any."""
        names, values, halo = started
        old: Sequence[torch.Tensor] | None = None if given.last is None else given.last.conv_state
        if halo is not None:
            old = halo.states()
        convolved: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        for at, (name, value) in enumerate(zip(names, values, strict=True)):
            before = None if old is None else old[at]
            convolution = child(self, f"{name}_conv1d")
            y, state = convolution(value.flatten(2), before, given.cu_seqlens, output_final_state=given.use_cache)
            if halo is not None and before is not None:
                y = tied(y, before)
            convolved.append(y.unflatten(-1, value.shape[2:]))
            states += () if state is None else (state,)
        if halo is not None:
            halo.finish()
        return convolved, tuple(states) if given.use_cache else None
