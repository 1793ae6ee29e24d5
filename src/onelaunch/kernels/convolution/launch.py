"""Launches of the short causal convolution and of its gradients.

``operator.py`` of this folder calls them. The variant ``composed`` of ``gla_layer`` records them for the list of its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv, inner_contiguous, power_of_2
from onelaunch.kernels.convolution.kernel import (
    convolution_gradients_kernel,
    convolution_kernel,
    state_gradients_kernel,
    sums_kernel,
)
from onelaunch.launch.launch import Launch


class Shape(NamedTuple):
    """Sizes of a pass's CTAs; not measured yet."""

    elements: int
    """Largest number of channels that a thread has of a step: with 4, loads of 8 bytes in 16 bits."""
    warps: int
    """Warps of a CTA, each at one stretch of steps or at several."""
    unrolled: int
    """Steps whose loads are issued together, while as many steps before are computed."""
    per_sm: int
    """CTAs that an SM holds at once, by their registers. Stretches are so long that all are resident, up to ``most`` steps."""
    most: int
    """Largest number of steps of a stretch."""


FORWARD = Shape(elements=4, warps=4, unrolled=4, per_sm=6, most=64)
BACKWARD = Shape(elements=4, warps=4, unrolled=4, per_sm=3, most=64)
_FEWEST = 8
"""Least number of steps of a stretch, where a sequence has more: W - 1 steps around each are read again."""

_SUMMED_ROWS, _SUMMED_CHANNELS = 32, 32
"""Tile of the kernel that adds partial sums up."""

_STATE_CHANNELS = 64
"""Channels of a CTA that computes gradients of a state."""


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

    def of_channels(self, channels: slice) -> Operands:
        """Return the inputs of a range of the channels: views, and a copy of the state unless the range is whole."""
        if channels == slice(0, self.x.shape[2]):
            return self
        bias = None if self.bias is None else self.bias[channels]
        state = None if self.state is None else self.state[:, channels].contiguous()
        return Operands(self.x[..., channels], self.weight[channels], bias, state, self.offsets, self.silu)

    @property
    def sequences(self) -> int:
        """Number N of sequences."""
        return self.x.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of every launch."""
        return {"W": self.weight.shape[1], "SILU": self.silu, "PACKED": self.offsets is not None}

    def tiling(self, shape: Shape) -> tuple[int, int, dict[str, Any]]:
        """Return the number of CTAs along time, the steps L of a stretch, and the constants of a pass's launch."""
        batch, length, channels = self.x.shape
        elements = shape.elements
        width = min(power_of_2(channels), 32 * elements)
        parallel = min(shape.warps * 32 * elements // width, power_of_2(cdiv(length, _FEWEST)))
        resident = shape.per_sm if self.weight.shape[1] <= 4 else max(2 * shape.per_sm // 3, 1)  # they take more registers
        room = max(resident * processors(self.x.device) // (batch * cdiv(channels, width)), 1)
        steps = min(max(cdiv(length, room * parallel), min(_FEWEST, length)), shape.most)
        bisection = 0 if self.offsets is None else self.sequences.bit_length()
        return cdiv(length, steps * parallel), steps, self.constants | {
            "G": parallel, "U": min(shape.unrolled, power_of_2(steps)), "BC": width, "FULL": channels % width == 0,
            "BISECTION_STEPS": bisection, "num_warps": max(parallel * width // (32 * elements), 1),
        }  # fmt: skip


def forward(given: Operands) -> torch.Tensor:
    """Return y ``[B, T, C]``, contiguous, in the dtype of x."""
    batch, length, channels = given.x.shape
    y = torch.empty(given.x.shape, dtype=given.x.dtype, device=given.x.device)
    groups, steps, constants = given.tiling(FORWARD)
    Launch(
        convolution_kernel, (batch * groups * cdiv(channels, constants["BC"]),),
        *given.tensors, y, length, channels, given.sequences, steps, given.x.stride(0), given.x.stride(1), **constants,
    ).run()  # fmt: skip
    return y


class Gradients(NamedTuple):
    """Gradients of the tensors of :class:`Operands`; ``None`` for those that are not wanted."""

    x: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    state: torch.Tensor | None


def backward(given: Operands, dys: Sequence[torch.Tensor], wants: Sequence[bool]) -> Gradients:
    """Return the gradients that are wanted: of x, the weight, the bias and the state, in this order.

    Args:
        given: Inputs of the forward pass.
        dys: Gradients of y, ``[B, T, channels]`` each, of the channels of the first, of the channels behind them, and so on.
        wants: Flag for each gradient.
    """
    wants_x, wants_weight, wants_bias, wants_state = wants
    x, weight, state = given.x, given.weight, given.state
    found = Gradients(
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if wants_x else None,
        torch.empty(weight.shape, dtype=weight.dtype, device=x.device) if wants_weight else None,
        torch.empty(weight.shape[:1], dtype=weight.dtype, device=x.device) if wants_bias else None,
        None if state is None or not wants_state else torch.empty_like(state),
    )
    first = 0
    for dy in dys:
        channels = slice(first, first + dy.shape[2])
        first = channels.stop
        _backward_of_channels(given.of_channels(channels), inner_contiguous(dy), found, channels)
    return found


def _backward_of_channels(given: Operands, dy: torch.Tensor, found: Gradients, channels: slice) -> None:
    """Launch the gradients of a range of the channels, of which ``given`` are the inputs, and write them into ``found``."""
    x, width = given.x, given.weight.shape[1]
    batch, length, count = x.shape
    numbers = (x.stride(0), x.stride(1), dy.stride(0), dy.stride(1))
    dx = None if found.x is None else found.x[..., channels]
    dweight, dbias = (None if each is None else each[channels] for each in (found.weight, found.bias))
    if dx is not None or dweight is not None or dbias is not None:
        groups, steps, constants = given.tiling(BACKWARD)
        sums = {"WEIGHT": dweight is not None, "BIAS": dbias is not None}
        partials, places = None, width * sums["WEIGHT"] + sums["BIAS"]
        if places:
            partials = torch.empty(batch * groups, places, count, dtype=torch.float32, device=x.device)
        Launch(
            convolution_gradients_kernel, (batch * groups * cdiv(count, constants["BC"]),),
            *given.tensors, dy, dx, partials, length, count, given.sequences, steps, *numbers,
            0 if dx is None else dx.stride(1), **sums, **constants,
        ).run()  # fmt: skip
        if partials is not None:
            block = min(power_of_2(count), _SUMMED_CHANNELS)
            Launch(
                sums_kernel, (places * cdiv(count, block),), partials, dweight, dbias, batch * groups, count,
                W=width, BR=min(power_of_2(batch * groups), _SUMMED_ROWS), BC=block, num_warps=4,
            ).run()  # fmt: skip
    if found.state is not None:
        dstate = torch.empty(given.sequences, count, width - 1, dtype=x.dtype, device=x.device)
        block = min(power_of_2(count), _STATE_CHANNELS)
        Launch(
            state_gradients_kernel, (given.sequences * cdiv(count, block),),
            *given.tensors, dy, dstate, length, count, given.sequences, *numbers,
            BP=power_of_2(max(width - 1, 1)), BC=block, num_warps=4, **given.constants,
        ).run()  # fmt: skip
        found.state[:, channels] = dstate
