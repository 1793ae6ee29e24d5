"""The SwiGLU MLPs of fla and transformers, by ``onelaunch.ops.swiglu``.

All compute ``down_proj(silu(gate_proj(x)) * up_proj(x))``. They differ in how they name their activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.compiler import is_compiling

from onelaunch.integrations.forward import Forward, linear_refusals
from onelaunch.integrations.storage import is_within, joined_in_place, together
from onelaunch.launch.facts import facts_of
from onelaunch.launch.plan import Device
from onelaunch.launch.repeated import Repeated
from onelaunch.nn.packed import child, parameter
from onelaunch.ops.swiglu.contract import swiglu
from onelaunch.ops.swiglu.mlp import mlp
from onelaunch.tracing import sees_operators

_SILU = ("silu", "swish")
_SILU_CLASSES = ("SiLUActivation", "SiLU")
"""Names of the classes that ``transformers.activations.ACT2FN`` has for ``silu`` and ``swish``, in its releases since 4.51."""

GPUS = ("cuda",)
"""Types of devices that wait for the host in a step of decoding."""

BOUND_BY_HOST = "so few rows that the device waits for the host"
"""Reason why the original forward runs a step of decoding."""


class _Latest(NamedTuple):
    """Facts about the latest call for which :meth:`SwigluMlp.why_not` found no reason."""

    repeated: Repeated
    """Comparison with the input and both weights."""
    gate_bytes: int
    up_bytes: int

    @classmethod
    def of(cls, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> _Latest | None:
        """Return the facts about a call, or ``None`` if its tensors cannot be compared with those of later ones.

        With different dtypes it depends on autocast, too, whether the call is taken.
        """
        facts = facts_of((x, gate, up))
        if facts is None or not (gate.is_contiguous() and up.is_contiguous() and x.dtype is gate.dtype is up.dtype):
            return None
        try:
            return cls(Repeated((x, gate, up), {}, facts), gate.nbytes, up.nbytes)
        except (TypeError, RuntimeError):
            return None


class SwigluMlp(Forward):
    """Forward of an MLP with the submodules ``gate_proj``, ``up_proj`` and ``down_proj``.

    ``down_proj`` may be of any class and have a bias and hooks. In training a plain ``torch.nn.Linear`` without hooks is not
    called, so that its input need not be kept for the backward pass.
    """

    operation = "swiglu"
    projections = ("gate_proj", "up_proj")
    host_rows: ClassVar[int] = 16
    """Most rows of a call with gradients disabled on a GPU that the original forward runs, unless a CUDA graph is captured.

    In such a step of decoding the device waits for the host, so that a faster kernel gains nothing. On an H100's host a Llama of
    16 layers decoded 0.94 times as fast with the replaced MLPs.

    A captured call is one of ``onelaunch.ops.swiglu`` if a call like it was made before the capture. The first such call also
    launches the kernels, without need of their results: CUDA loads no kernel while a graph is captured.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._latest: _Latest | None = None
        self._launched: set[tuple[Any, ...]] = set()
        """Facts about the calls of few rows whose kernels have been launched, so that they can be captured."""
        self._gate, self._up = (child(module, name) for name in self.projections)
        """Projections, which are among the submodules that :meth:`why_changed` compares."""
        self._most_of_few = self.host_rows * self._gate.in_features  # not the weight's, which FSDP may have flattened

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy or a pickle, which cannot hold what compares calls, nor loaded kernels."""
        return {**vars(self), "_latest": None, "_launched": set()}

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
        if is_compiling():
            latest = None
        elif self._is_left_to_original(x):
            self.fallbacks[BOUND_BY_HOST] += 1
            return type(self.module).forward(self.module, x, **kwargs)
        else:
            latest = self._as_before(x)
        if latest is None:
            reason = self.why_not(x)
            if reason is None and x.dim() < 2:
                reason = "the input has fewer than two dimensions"
            if reason is not None:
                return self.original(reason, x, **kwargs)
            gate, up = self.weights()
            if not is_compiling():
                self._latest = _Latest.of(x, gate, up)
            latest = _joined(gate, up)
        return mlp(x, *latest, child(self.module, "down_proj"))

    def _is_left_to_original(self, x: torch.Tensor) -> bool:
        """Return whether the original forward runs a call, since the device waits for the host; see ``host_rows``.

        The first call of its kind launches the kernels that a later one may launch while a CUDA graph is captured.
        """
        if type(x) is not torch.Tensor or x.numel() > self._most_of_few or torch.is_grad_enabled():
            return False
        kind = x.device.type
        if kind not in GPUS:
            return False
        call = x.numel(), x.dtype, x.device, torch.is_autocast_enabled(kind)
        if call in self._launched:
            return not Device.is_capturing()
        if not (Device.is_capturing() or x.dim() < 2 or sees_operators() or self.why_not(x) is not None):
            swiglu(x, *_joined(*self.weights()))
            self._launched.add(call)
        return True

    def _as_before(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return the weights for :func:`mlp` if all that :meth:`why_not` asks is as in the latest call, else ``None``."""
        latest = self._latest
        if latest is None or self.why_changed() is not None or sees_operators():  # a traced call must not depend on addresses
            return None
        gate, up = self._gate._parameters.get("weight"), self._up._parameters.get("weight")  # noqa: SLF001
        found = latest.repeated.tensors_of((x, gate, up), {})
        if found is None:
            return None
        _, (_, begin, middle) = found
        if middle - begin != latest.gate_bytes or not is_within(gate, begin, middle + latest.up_bytes):
            return gate, up
        return joined_in_place((gate, up)), None


def _joined(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weights as :func:`mlp` takes them: as one, and ``None``, where they lie one behind the other in memory."""
    whole = together((gate, up))
    return (gate, up) if whole is None else (whole, None)


class FlaMlp(SwigluMlp):
    """Forward of ``fla.modules.GatedMLP``."""

    host_rows = 0  # fla's own forward launches kernels of Triton, which take more of the host than PyTorch's

    @classmethod
    def activation_refusals(cls, module: nn.Module) -> Iterator[str]:
        """Yield the reason why the activation is not SiLU, if it is not."""
        name = getattr(module, "hidden_act", None)
        if name not in _SILU:
            yield f"hidden_act is {name!r}; onelaunch.ops.swiglu has 'silu' (or 'swish') alone"
