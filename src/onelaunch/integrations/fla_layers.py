"""Parts that the replaced forward passes of fla's layers share: submodules, masks, caches and short convolutions.

``gla_layers.py`` and ``hgrn_layers.py`` derive their classes from :class:`FlaLayer`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from onelaunch.integrations.forward import Forward, parameter_refusals
from onelaunch.ops.gla.contract import LARGEST_HEAD, SMALLEST_HEAD
from onelaunch.tracing import is_traced

SWISH = ("silu", "swish", "SwishFunction")
"""Names of SiLU in fla: of an activation, and of the autograd function that ``ACT2FN`` holds."""


class FlaLayer(Forward):
    """Forward of a layer of fla with projections, optional short convolutions, a recurrence, a norm and ``o_proj``."""

    convolutions: ClassVar[tuple[str, ...]]
    """Short convolutions of a layer with ``use_short_conv``."""
    norm_name: str
    """Submodule of the norm."""

    def __init__(self, module: nn.Module) -> None:
        self.convolved = bool(getattr(module, "use_short_conv", False))
        super().__init__(module)

    def separately(self) -> str:
        """Return what a call does with weights that do not lie one behind the other."""
        return "packed in each call"

    def why_not_call(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, past_key_values: Any, use_cache: bool | None
    ) -> str | None:
        """Return why the arguments of this call need the original forward, or ``None``."""
        if hidden_states.dim() != 3:
            return "hidden_states does not have three dimensions"
        if past_key_values is not None:
            if self.convolved:
                return "past_key_values is given, and the layer has short convolutions"
            if not use_cache or self.module.layer_idx is None:
                return "past_key_values is given without use_cache or layer_idx"
        norm = getattr(self.module, self.norm_name).weight
        if norm is not None:
            if type(norm) is not nn.Parameter and type(norm) is not torch.Tensor:
                return f"a weight is a {type(norm).__name__}"
            low = norm.dtype not in (hidden_states.dtype, torch.float32)
            if low and not torch.is_autocast_enabled(hidden_states.device.type):
                return "the input and the weights differ in dtype"
        return None if attention_mask is None else _why_not_mask(attention_mask, hidden_states.shape[1])

    def cached(self, past_key_values: Any) -> Any:
        """Return what a cache of fla holds for this layer, or ``None`` before its first call."""
        index: Any = self.module.layer_idx
        return past_key_values[index] if past_key_values is not None and len(past_key_values) > index else None

    def store(self, past_key_values: Any, state: torch.Tensor | None, length: int) -> None:
        """Store the state after ``length`` more steps in a cache of fla, in the layout of fla's layer."""
        if past_key_values is not None and state is not None:
            past_key_values.update(
                layer_idx=self.module.layer_idx, recurrent_state=state.contiguous(), conv_state=None, offset=length
            )


def head_refusals(said: str, size: int, operation: str) -> Iterator[str]:
    """Yield the reason why an operation does not take heads of ``size`` channels; ``said`` are their arguments and a verb."""
    if not SMALLEST_HEAD <= size <= LARGEST_HEAD:
        yield f"{said} heads of {size} channels; {operation} takes {SMALLEST_HEAD} to {LARGEST_HEAD}"


def norm_refusals(norm: nn.Module) -> Iterator[str]:
    """Yield each reason why a norm is not an RMS norm without a bias that an operation can read."""
    if not isinstance(getattr(norm, "eps", None), float):
        yield "the norm has no attribute eps"
    if getattr(norm, "bias", None) is not None:
        yield "the norm has a bias"
    if getattr(norm, "weight", None) is not None:
        yield from parameter_refusals("the norm's weight", norm.weight)


def convolution_refusals(module: nn.Module, name: str, activations: tuple[str | None, ...]) -> Iterator[str]:
    """Yield each reason why a short convolution is not a depthwise one with one of these activations."""
    convolution = getattr(module, name, None)
    if not isinstance(convolution, nn.Conv1d):
        yield f"{name} is not a torch.nn.Conv1d"
        return
    if (found := getattr(convolution, "activation", None)) not in activations:
        yield f"the activation of {name} is {found}; it must be {activations[0]}"
    yield from parameter_refusals(f"{name}.weight", convolution.weight)
    if convolution.bias is not None:
        yield from parameter_refusals(f"{name}.bias", convolution.bias)


class _SeenMask:
    """Mask of the previous call and whether it has padding, so that the layers of a model wait for the device once a step."""

    mask: weakref.ref[torch.Tensor] | None = None
    key: tuple[int, int] = (0, 0)
    """Length of the call and version of the mask's values."""
    padded = False


def _why_not_mask(mask: torch.Tensor, length: int) -> str | None:
    """Return why a mask needs the original forward, or ``None`` if it marks no padding in the last ``length`` steps."""
    if is_traced(mask):
        return "attention_mask is given under torch.compile, which cannot look at its values"
    if mask.dim() != 2 or mask.is_inference():
        return "attention_mask is not [B, T], or was made in inference mode"
    if mask.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "attention_mask is given while a CUDA graph is captured"
    key = (length, mask._version)  # noqa: SLF001 - PyTorch has no public name
    if _SeenMask.mask is None or _SeenMask.mask() is not mask or _SeenMask.key != key:
        _SeenMask.padded = not bool(mask[:, -length:].all())
        _SeenMask.mask, _SeenMask.key = weakref.ref(mask), key
    return "attention_mask has padding" if _SeenMask.padded else None
