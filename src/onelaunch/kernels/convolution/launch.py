"""Launches of the short causal convolution and of its gradients.

``operator.py`` of this folder calls them. The variant ``composed`` of ``gla_layer`` records them for the list of its kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv, inner_contiguous, power_of_2
from onelaunch.kernels.convolution.kernel import (
    convolution_gradients_kernel,
    convolution_kernel,
    state_gradients_kernel,
)
from onelaunch.launch.launch import Launch

_CHANNELS = 64
"""Channels of a tile: rows of 128 bytes in 16 bits."""

_STEPS, _GRADIENT_STEPS = 16, 8
"""Steps of a tile forward and backward, so few that registers do not spill; not measured yet."""

_CTAS_PER_SM = 8
"""CTAs of a backward launch per SM, so many that each has several tiles and few partial sums are written; not measured yet."""


class Operands(NamedTuple):
    """Inputs of a convolution, as the kernels take them."""

    x: torch.Tensor
    """``[B, T, C]``, its channels next to each other."""
    weight: torch.Tensor
    """``[C, W]``, contiguous."""
    bias: torch.Tensor | None
    """``[C]``, contiguous."""
    state: torch.Tensor | None
    """``[N, C, W - 1]``, contiguous: the inputs before the first step of each sequence, the newest last."""
    offsets: torch.Tensor | None
    """``[N + 1]``: first steps of packed sequences."""
    silu: bool
    """Flag to apply SiLU to the results."""

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors, in the order in which the kernels take them."""
        return self[:5]

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor | None,
        offsets: torch.Tensor | None,
        silu: bool,
    ) -> Operands:
        """Return the inputs with copies of those that the kernels cannot read as they are."""
        bias, state, offsets = (None if each is None else each.contiguous() for each in (bias, state, offsets))
        return cls(inner_contiguous(x), weight.contiguous(), bias, state, offsets, silu)

    @property
    def sequences(self) -> int:
        """Number N of sequences."""
        return self.x.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    def constants(self, steps: int) -> dict[str, Any]:
        """Return the constants of a launch whose tiles have so many steps."""
        packed = self.offsets is not None
        return {
            "W": self.weight.shape[1], "SILU": self.silu, "BT": steps, "BC": min(power_of_2(self.x.shape[2]), _CHANNELS),
            "PACKED": packed, "BISECTION_STEPS": self.sequences.bit_length() if packed else 0, "num_warps": 4,
        }  # fmt: skip


def forward(given: Operands) -> torch.Tensor:
    """Return y ``[B, T, C]``, contiguous, in the dtype of x."""
    batch, length, channels = given.x.shape
    y = torch.empty(given.x.shape, dtype=given.x.dtype, device=given.x.device)
    steps = min(_STEPS, power_of_2(length))
    constants = given.constants(steps)
    Launch(
        convolution_kernel, (batch * cdiv(length, steps) * cdiv(channels, constants["BC"]),),
        *given.tensors, y, length, channels, given.sequences, given.x.stride(0), given.x.stride(1), **constants,
    ).run()  # fmt: skip
    return y


class Gradients(NamedTuple):
    """Gradients of the tensors of :class:`Operands`; ``None`` for those that are not wanted."""

    x: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    state: torch.Tensor | None


def backward(given: Operands, dy: torch.Tensor, wants: Gradients | tuple[bool, ...]) -> Gradients:
    """Return the gradients that are wanted: of x, the weight, the bias and the state, in this order.

    Args:
        given: Inputs of the forward pass.
        dy: Gradient of y, ``[B, T, C]``.
        wants: Flag for each gradient.
    """
    wants_x, wants_weight, wants_bias, wants_state = wants
    x, weight, state = given.x, given.weight, given.state
    batch, length, channels = x.shape
    dy = inner_contiguous(dy)
    numbers = (x.stride(0), x.stride(1), dy.stride(0), dy.stride(1))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wants_x else None
    dweight, dbias, dstate = None, None, None
    if wants_x or wants_weight or wants_bias:
        steps = min(_GRADIENT_STEPS, power_of_2(length))
        constants = given.constants(steps)
        blocks, count = cdiv(channels, constants["BC"]), cdiv(length, steps)
        tiles = max(cdiv(batch * count * blocks, _CTAS_PER_SM * processors(x.device)), 1)
        groups, taps = batch * cdiv(count, tiles), weight.shape[1]
        shapes = ((groups, channels, taps) if wants_weight else None, (groups, channels) if wants_bias else None)
        partials, bias_partials = (
            None if shape is None else torch.empty(shape, dtype=torch.float32, device=x.device) for shape in shapes
        )
        Launch(
            convolution_gradients_kernel, (groups * blocks,),
            *given.tensors, dy, dx, partials, bias_partials, length, channels, given.sequences, tiles, *numbers, **constants,
        ).run()  # fmt: skip
        dweight = None if partials is None else partials.sum(0).to(weight.dtype)
        dbias = None if bias_partials is None else bias_partials.sum(0).to(weight.dtype)
    if wants_state and state is not None:
        dstate = torch.empty_like(state)
        constants = given.constants(1)
        del constants["BT"], constants["BISECTION_STEPS"]
        Launch(
            state_gradients_kernel, (given.sequences * cdiv(channels, constants["BC"]),),
            *given.tensors, dy, dstate, length, channels, given.sequences, *numbers,
            BP=power_of_2(max(weight.shape[1] - 1, 1)), **constants,
        ).run()  # fmt: skip
    return Gradients(dx, dweight, dbias, dstate)
