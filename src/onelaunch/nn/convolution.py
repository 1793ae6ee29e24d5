"""Short causal convolutions over time, one filter per channel: one launch on a GPU, PyTorch's own functions elsewhere.

``RecurrentLayer`` (``recurrent.py``) applies them to projections. ``onelaunch.nn`` exports the class for users as well.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from onelaunch.errors import ArgumentError
from onelaunch.kernels.convolution.operator import convolve, why_not


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
        self.past = kernel_size - 1
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

        On a GPU with Triton a kernel of our own does both, forward and backward, unless, for example, W is above 8, autocast
        is on, or x and the weight differ in dtype (``why_not``). PyTorch's functions then do, as on a CPU; there packing costs
        W gathered copies of x.

        Args:
            x: input, ``[B, T, D]``.
            state: the previous W - 1 inputs ``[N, D, W - 1]``, the newest last. Default: zeros.
            cu_seqlens: ``[N + 1]`` offsets of packed sequences; needs ``B = 1``.
            output_final_state: whether to return the new state.

        Returns:
            ``y [B, T, D]`` and the new state, or ``None`` in its place.
        """
        given = (x, self.weight[:, 0], self.bias, state, cu_seqlens)
        if why_not(*given) is None:
            y = convolve(*given, silu=self.silu)
            return y, self._last_inputs(x, state, cu_seqlens) if output_final_state else None
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if state is None:
            state = x.new_zeros(sequences, x.shape[2], self.past)
        if self.weight.dtype != x.dtype and torch.is_autocast_enabled(x.device.type):
            state = state.to(x.dtype)  # a call outside autocast left it in the dtype of the weight
        y, state = self._plain(x, state) if cu_seqlens is None else self._packed(x[0], state, cu_seqlens)
        return F.silu(y) if self.silu else y, state if output_final_state else None

    def _last_inputs(self, x: torch.Tensor, state: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        """Return the last W - 1 inputs of each sequence, the new state."""
        past = self.past
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if state is None:
            state = x.new_zeros(sequences, x.shape[2], past)
        if cu_seqlens is None:
            inputs = torch.cat([state, x[:, max(x.shape[1] - past, 0) :].transpose(1, 2)], -1)
            return inputs[..., inputs.shape[-1] - past :]  # not -past: it may be 0
        return self._rows_before(x[0], state, cu_seqlens.long())

    def _rows_before(self, x: torch.Tensor, state: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return the W - 1 inputs before the end of each packed sequence of ``x [T, D]``, some of them from its state."""
        known = torch.cat([state.transpose(1, 2).flatten(0, 1), x])  # [N (W - 1) + T, D]
        position = offsets.diff()[:, None] + torch.arange(-self.past, 0, device=x.device)  # in its sequence, [N, W - 1]
        sequence = torch.arange(len(state), device=x.device)[:, None]
        in_state = sequence * self.past + self.past + position
        return known[torch.where(position < 0, in_state, len(state) * self.past + offsets[:-1, None] + position)].transpose(1, 2)

    def _plain(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.cat([state, x.transpose(1, 2)], -1)  # [B, D, W - 1 + T]
        if x.shape[1] == 0:  # fewer inputs than taps, which conv1d refuses
            return x * self.weight.sum(), inputs
        y = F.conv1d(inputs, self.weight, self.bias, groups=self.groups)
        return y.transpose(1, 2), inputs[..., inputs.shape[-1] - self.past :]  # not -past: it may be 0

    def _packed(self, x: torch.Tensor, state: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve packed sequences ``x [T, D]``; inputs before a sequence's first step come from its own state."""
        past, offsets = self.past, cu_seqlens.long()
        known = torch.cat([state.transpose(1, 2).flatten(0, 1), x])  # [N (W - 1) + T, D]

        def row(sequence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            """Return the row of an input in ``known``; positions below 0 lie in the sequence's state."""
            in_state = sequence * past + past + position
            return torch.where(position < 0, in_state, len(state) * past + offsets[sequence] + position)

        steps = torch.arange(len(x), device=x.device)
        sequence = torch.searchsorted(offsets, steps, right=True) - 1  # [T]
        window = torch.arange(-past, 1, device=x.device)
        rows = row(sequence[:, None], (steps - offsets[sequence])[:, None] + window)  # [T, W]
        y = torch.einsum("twd,dw->td", known[rows], self.weight[:, 0])
        if self.bias is not None:
            y = y + self.bias
        return y[None], self._rows_before(x, state, offsets)
