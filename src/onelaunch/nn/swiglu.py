"""The SwiGLU MLP, which users make through ``onelaunch.nn``."""

from __future__ import annotations

import torch
from torch import nn

from onelaunch import checks
from onelaunch.errors import ArgumentError, ShapeError
from onelaunch.nn import inputs
from onelaunch.nn.packed import PackedModule, parameter
from onelaunch.ops.swiglu.mlp import mlp

_ROUNDED_TO = 256
"""Number of channels that a default ``intermediate_size`` is rounded up to a multiple of."""


class SwiGLU(PackedModule):
    """MLP of most language models, like ``fla.modules.GatedMLP`` and the MLPs of Llama in ``transformers``.

        out = (silu(x W_gate) * (x W_up)) W_down

    One parameter ``gate_up_weight`` holds W_gate and W_up. A state dict holds ``gate_proj.weight``, ``up_proj.weight`` and
    ``down_proj.weight``, as in those modules.

    Args:
        hidden_size: channels of inputs and outputs.
        hidden_ratio: ratio that gives the default ``intermediate_size``: ``hidden_size * hidden_ratio * 2 / 3``, rounded up to
            a multiple of 256. Default: 4.
        intermediate_size: columns of W_gate and of W_up.
        hidden_act: ``swish`` or ``silu``, which are the same.
        fuse_swiglu: accepted as in fla, without effect: variants decide what is fused.

    Raises:
        ArgumentError: an argument is invalid; the message names it, what it was and what it must be.

    Source: Shazeer, GLU Variants Improve Transformer (2020).
    """

    gate_up_weight: nn.Parameter
    row_wise = "down_proj"

    def __init__(
        self,
        hidden_size: int,
        hidden_ratio: float | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        fuse_swiglu: bool = True,
    ) -> None:
        super().__init__()
        if hidden_act not in ("swish", "silu"):
            raise ArgumentError(f"hidden_act is {hidden_act!r}; it must be 'swish' or 'silu': onelaunch.ops.swiglu has no other.")
        self.hidden_size = inputs.count("hidden_size", hidden_size)
        self.hidden_ratio = inputs.number("hidden_ratio", 4 if hidden_ratio is None else hidden_ratio, above=0)
        if intermediate_size is None:
            least = int(self.hidden_size * self.hidden_ratio * 2 / 3)
            intermediate_size = _ROUNDED_TO * max(-(-least // _ROUNDED_TO), 1)
        self.intermediate_size = inputs.count("intermediate_size", intermediate_size)
        self.hidden_act, self.fuse_swiglu = hidden_act, fuse_swiglu
        rows = {"gate_proj.weight": self.intermediate_size, "up_proj.weight": self.intermediate_size}
        self.pack("gate_up_weight", rows, self.hidden_size)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize all weights as in a new module, like :class:`torch.nn.Linear`."""
        self.reset_packed()
        self.down_proj.reset_parameters()

    def sizes_to_divide(self) -> dict[str, int]:
        return {"intermediate_size": self.intermediate_size}

    def take_share(self, ranks: int) -> None:
        self.intermediate_size //= ranks

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, intermediate_size={self.intermediate_size}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the MLP on ``x [..., hidden_size]``, float16, bfloat16 or float32, of at least two dimensions.

        Raises:
            ShapeError, DTypeError, DeviceError: an argument is invalid; the message names it, what it was and what it must be.
        """
        if checks.tensor("x", x).dim() < 2 or x.shape[-1] != self.hidden_size:
            raise ShapeError(
                "x", got=x.shape, want=f"[..., D] of at least 2 dimensions, with D = hidden_size = {self.hidden_size}"
            )
        return mlp(x, parameter(self, "gate_up_weight"), None, self.down_proj)
