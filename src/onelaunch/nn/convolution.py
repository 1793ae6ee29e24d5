"""Short causal convolutions over time, one filter per channel: one launch on a GPU, PyTorch's own functions elsewhere.

``RecurrentLayer`` (``recurrent.py``) applies them to projections, and ``onelaunch.integrations`` calls
:func:`short_convolution` with the weights of fla's modules. ``onelaunch.nn`` exports the class for users as well.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from onelaunch.errors import ArgumentError
from onelaunch.kernels.convolution.operator import convolve, why_not
from onelaunch.nn.packed import Shards


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution, with SiLU or without, with the parameters of ``fla.modules.ShortConvolution``.

        y_t = silu(bias + sum_j weight_j * x_{t - W + 1 + j})        per channel, j from 0 to W - 1

    Args:
        channels: number of channels, D.
        kernel_size: W, at least 1.
        bias: whether the convolution has a bias.
        activation: ``silu``, or its other name ``swish``; ``None`` for y without silu.

    Raises:
        ArgumentError: ``activation`` is another one.
    """

    def __init__(self, channels: int, kernel_size: int, bias: bool = False, activation: str | None = "silu") -> None:
        if activation not in ("silu", "swish", None):
            raise ArgumentError(f"activation is {activation!r}; it must be 'silu', 'swish' or None.")
        super().__init__(channels, channels, kernel_size, groups=channels, bias=bias)
        self.shards: Shards | None = None  # set where a layer is sharded, whose ranks each have some of the channels
        self.silu = activation is not None

    def forward(  # pyrefly: ignore[bad-override]  (it also takes and returns a state)
        self,
        x: torch.Tensor,
        state: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        *,
        output_final_state: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Convolve, and apply SiLU unless ``activation`` is ``None``.

        Args:
            x: input, ``[B, T, D]``.
            state: the previous W - 1 inputs ``[N, D, W - 1]``, the newest last. Default: zeros.
            cu_seqlens: ``[N + 1]`` offsets of packed sequences; needs ``B = 1``.
            output_final_state: whether to return the new state.

        Returns:
            ``y [B, T, D]`` and the new state, or ``None`` in its place.
        """
        weight, bias = self.weight, self.bias
        if self.shards is not None:
            weight, bias = self.shards.local(weight), None if bias is None else self.shards.local(bias)
        return short_convolution(x, weight, bias, state, cu_seqlens, silu=self.silu, output_final_state=output_final_state)


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    silu: bool,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convolve, and apply SiLU if asked, with the weight ``[D, 1, W]`` and the bias ``[D]`` of a depthwise ``Conv1d``.

    On a GPU with Triton a kernel of our own does both, forward and backward, unless, for example, W is above 8, autocast is on,
    or x and the weight differ in dtype (``why_not``). PyTorch's functions then do, as on a CPU; there packing costs W gathered
    copies of x.

    The other arguments and the results are those of :meth:`ShortConvolution.forward`.
    """
    given = (x, weight[:, 0], bias, state, cu_seqlens)
    past = weight.shape[2] - 1
    if why_not(*given) is None:
        (y,) = convolve(*given, silu=silu)
        return y, _last_inputs(x, state, cu_seqlens, past) if output_final_state else None
    if state is None:
        state = _zeros(x, cu_seqlens, past)
    if weight.dtype != x.dtype and torch.is_autocast_enabled(x.device.type):
        state = state.to(x.dtype)  # a call outside autocast left it in the dtype of the weight
    y, state = _plain(x, weight, bias, state) if cu_seqlens is None else _packed(x[0], weight, bias, state, cu_seqlens)
    return F.silu(y) if silu else y, state if output_final_state else None


def _zeros(x: torch.Tensor, cu_seqlens: torch.Tensor | None, past: int) -> torch.Tensor:
    """Return the state of sequences that begin."""
    return x.new_zeros(x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, x.shape[2], past)


def _last_inputs(x: torch.Tensor, state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, past: int) -> torch.Tensor:
    """Return the last W - 1 inputs of each sequence, the new state."""
    if state is None:
        state = _zeros(x, cu_seqlens, past)
    if cu_seqlens is None:
        inputs = torch.cat([state, x[:, max(x.shape[1] - past, 0) :].transpose(1, 2)], -1)
        return inputs[..., inputs.shape[-1] - past :]  # not -past: it may be 0
    return _rows_before(x[0], state, cu_seqlens.long())


def _rows_before(x: torch.Tensor, state: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the W - 1 inputs before the end of each packed sequence of ``x [T, D]``, some of them from its state."""
    past = state.shape[2]
    known = torch.cat([state.transpose(1, 2).flatten(0, 1), x])  # [N (W - 1) + T, D]
    position = offsets.diff()[:, None] + torch.arange(-past, 0, device=x.device)  # in its sequence, [N, W - 1]
    sequence = torch.arange(len(state), device=x.device)[:, None]
    in_state = sequence * past + past + position
    return known[torch.where(position < 0, in_state, len(state) * past + offsets[:-1, None] + position)].transpose(1, 2)


def _plain(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve ``x [B, T, D]``, and return the new state."""
    inputs = torch.cat([state, x.transpose(1, 2)], -1)  # [B, D, W - 1 + T]
    if x.shape[1] == 0:  # fewer inputs than taps, which conv1d refuses
        return x * weight.sum(), inputs
    y = F.conv1d(inputs, weight, bias, groups=weight.shape[0])
    return y.transpose(1, 2), inputs[..., inputs.shape[-1] - state.shape[2] :]  # not -past: it may be 0


def _packed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve packed sequences ``x [T, D]``; inputs before a sequence's first step come from its own state."""
    past, offsets = state.shape[2], cu_seqlens.long()
    known = torch.cat([state.transpose(1, 2).flatten(0, 1), x])  # [N (W - 1) + T, D]

    def row(sequence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the row of an input in ``known``; positions below 0 lie in the sequence's state."""
        in_state = sequence * past + past + position
        return torch.where(position < 0, in_state, len(state) * past + offsets[sequence] + position)

    steps = torch.arange(len(x), device=x.device)
    sequence = torch.searchsorted(offsets, steps, right=True) - 1  # [T]
    window = torch.arange(-past, 1, device=x.device)
    rows = row(sequence[:, None], (steps - offsets[sequence])[:, None] + window)  # [T, W]
    y = torch.einsum("twd,dw->td", known[rows], weight[:, 0])
    if bias is not None:
        y = y + bias
    return y[None], _rows_before(x, state, offsets)
