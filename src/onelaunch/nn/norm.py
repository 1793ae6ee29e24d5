"""RMSNorm with the addition of a residual, which users make through ``onelaunch.nn``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onelaunch import checks
from onelaunch.errors import ArgumentError, ShapeError
from onelaunch.nn import inputs
from onelaunch.nn.packed import Shards
from onelaunch.ops import rms_norm


class RMSNorm(nn.Module):
    """RMSNorm of the last dimension, with the addition of a residual before it, like ``fla.modules.RMSNorm``.

        s = x + residual;  y = s / sqrt(mean(s^2) + eps) * weight

    A state dict holds ``weight``, as in that module and in :class:`torch.nn.RMSNorm`.

    Args:
        hidden_size: channels of inputs and outputs.
        elementwise_affine: whether there is a weight.
        bias: accepted as in fla; must be false, since an RMSNorm has none.
        eps: constant that is added to the mean of squares; at least 0.
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ArgumentError: an argument is invalid; the message names it, what it was and what it must be.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if bias:
            raise ArgumentError(f"bias is {bias!r}; it must be False: onelaunch.ops.rms_norm has none.")
        self.hidden_size = inputs.count("hidden_size", hidden_size)
        self.eps = inputs.number("eps", eps, least=0)
        self.elementwise_affine = bool(elementwise_affine)
        weight = nn.Parameter(torch.ones(self.hidden_size, device=device, dtype=dtype)) if self.elementwise_affine else None
        self.register_parameter("weight", weight)
        self.shards: Shards | None = None  # set by onelaunch.nn.parallel, where ranks have parts of the tokens

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        affine = "" if self.elementwise_affine else ", elementwise_affine=False"
        return f"{self.hidden_size}, eps={self.eps}{affine}"

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """Run the norm.

        Args:
            x: ``[..., hidden_size]``, float16, bfloat16 or float32; the weight has its dtype or float32.
            residual: tensor that is added to ``x`` first, shape of ``x``, dtype of ``x`` or float32.
            prenorm: whether to return the sum too, as the residual of the next layer.
            residual_in_fp32: whether a call without ``residual`` returns its sum, which is ``x``, in float32. With
                ``residual``, the sum has the dtype of that.

        Returns:
            ``y``, shape and dtype of ``x``; with ``prenorm``, ``(y, sum)``.

        Raises:
            ShapeError, DTypeError, DeviceError: an argument is invalid; the message names it, what it was and what it must be.
        """
        if checks.tensor("x", x).dim() < 1 or x.shape[-1] != self.hidden_size:
            raise ShapeError(
                "x", got=x.shape, want=f"[..., D] of at least 1 dimension, with D = hidden_size = {self.hidden_size}"
            )
        weight = self.weight if self.weight is None or self.shards is None else self.shards.local(self.weight)
        y, total = rms_norm(x, weight, residual, eps=self.eps)
        if not prenorm:
            return y
        if total is None:
            total = x.float() if residual_in_fp32 else x
        return y, total
