"""The SwiGLU MLPs of fla and transformers, by ``onelaunch.ops.swiglu``.

All compute ``down_proj(silu(gate_proj(x)) * up_proj(x))``. They differ in how they name their activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from onelaunch.integrations.forward import Forward, linear_refusals
from onelaunch.integrations.storage import together
from onelaunch.nn.packed import child, parameter
from onelaunch.ops.swiglu.mlp import mlp

_SILU = ("silu", "swish")
_SILU_CLASSES = ("SiLUActivation", "SiLU")
"""Names of the classes that ``transformers.activations.ACT2FN`` has for ``silu`` and ``swish``, in its releases since 4.51."""


class SwigluMlp(Forward):
    """Forward of an MLP with the submodules ``gate_proj``, ``up_proj`` and ``down_proj``.

    ``down_proj`` may be of any class and have a bias and hooks. In training a plain ``torch.nn.Linear`` without hooks is not
    called, so that its input need not be kept for the backward pass.
    """

    operation = "swiglu"
    projections = ("gate_proj", "up_proj")

    @classmethod
    def refusals(cls, module: nn.Module) -> Iterator[str]:
        """Yield each reason why the forward of a module cannot be replaced."""
        yield from cls.activation_refusals(module)
        for name in cls.projections:
            yield from linear_refusals(name, getattr(module, name, None))
        if not isinstance(getattr(module, "down_proj", None), nn.Module):
            yield "down_proj is missing"

    @classmethod
    def activation_refusals(cls, module: nn.Module) -> Iterator[str]:
        """Yield the reason why the activation is not SiLU, if it is not."""
        config = getattr(module, "config", None)
        name = getattr(config, "hidden_act", None)
        if name not in _SILU:
            yield f"hidden_act is {name!r}; onelaunch.ops.swiglu has 'silu' (or 'swish') alone"
        elif type(activation := getattr(module, "act_fn", None)).__name__ not in _SILU_CLASSES:
            yield f"act_fn is a {type(activation).__name__}; onelaunch.ops.swiglu has SiLU alone"

    def not_called(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the submodules that the original forward calls and this one does not, by name."""
        for name in ("gate_proj", "up_proj", "act_fn", "swiglu_linear"):
            if isinstance(child := getattr(self.module, name, None), nn.Module):
                yield name, child

    def weights(self) -> tuple[torch.Tensor, ...]:
        """Return the weights of the gate and of the up projection."""
        return parameter(child(self.module, "gate_proj"), "weight"), parameter(child(self.module, "up_proj"), "weight")

    def groups(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """Return the weights of the gate and of the up projection, the gate's first."""
        return (self.weights(),)  # pyrefly: ignore[bad-return]

    def separately(self) -> str:
        """Return what a call does with weights that do not lie one behind the other."""
        return "each by itself"

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Run the MLP on ``x [..., hidden_size]``. fla's MLP accepts and ignores any keyword arguments."""
        reason = self.why_not(x)
        if reason is None and x.dim() < 2:
            reason = "the input has fewer than two dimensions"
        if reason is not None:
            return self.original(reason, x, **kwargs)
        gate, up = self.weights()
        whole = together((gate, up))
        return mlp(x, *((gate, up) if whole is None else (whole, None)), child(self.module, "down_proj"))


class FlaMlp(SwigluMlp):
    """Forward of ``fla.modules.GatedMLP``."""

    @classmethod
    def activation_refusals(cls, module: nn.Module) -> Iterator[str]:
        """Yield the reason why the activation is not SiLU, if it is not."""
        name = getattr(module, "hidden_act", None)
        if name not in _SILU:
            yield f"hidden_act is {name!r}; onelaunch.ops.swiglu has 'silu' (or 'swish') alone"
