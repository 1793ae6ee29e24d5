"""Short causal convolutions over time, one filter per channel, built on PyTorch's own functions.

``GatedLayer`` (``gated.py``) applies them to queries, keys and values. ``onelaunch.nn`` exports the class for users as well.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution and SiLU, with the parameters of ``fla.modules.ShortConvolution``.

        y_t = silu(bias + sum_j weight_j * x_{t - W + 1 + j})        per channel, j from 0 to W - 1

    Args:
        channels: number of channels, D.
        kernel_size: W, at least 1.
        bias: whether the convolution has a bias.
    """

    def __init__(self, channels: int, kernel_size: int, bias: bool = False) -> None:
        super().__init__(channels, channels, kernel_size, groups=channels, bias=bias)
        self.past = kernel_size - 1

    def forward(  # pyrefly: ignore[bad-override]  (it also takes and returns a state)
        self, x: torch.Tensor, state: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve and apply SiLU.

        Args:
            x: input, ``[B, T, D]``.
            state: the previous W - 1 inputs ``[N, D, W - 1]``, the newest last. Default: zeros.
            cu_seqlens: ``[N + 1]`` offsets of packed sequences; needs ``B = 1``. Packing costs W gathered copies of x.

        Returns:
            ``y [B, T, D]`` and the new state.
        """
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if state is None:
            state = x.new_zeros(sequences, x.shape[2], self.past)
        if self.weight.dtype != x.dtype and torch.is_autocast_enabled(x.device.type):
            state = state.to(x.dtype)  # a call outside autocast left it in the dtype of the weight
        y, state = self._plain(x, state) if cu_seqlens is None else self._packed(x[0], state, cu_seqlens)
        return F.silu(y), state

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
        every = torch.arange(len(state), device=x.device)
        last = row(every[:, None], offsets.diff()[:, None] + window[:-1])  # [N, W - 1]
        return y[None], known[last].transpose(1, 2)
