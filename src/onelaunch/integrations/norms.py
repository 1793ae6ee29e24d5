"""The RMSNorm of fla, by ``onelaunch.ops.rms_norm`` where measured times say that this is faster.

fla's module runs one kernel of its own already. So each call is decided as those of fla's functions are (``fla_calls.py``), by
the row of measured times that ``auto`` reads: without one, fla's kernel runs it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_compiling

from onelaunch import checks, dispatch
from onelaunch.errors import OneLaunchError
from onelaunch.integrations.forward import Forward, parameter_refusals
from onelaunch.launch.facts import facts_of
from onelaunch.launch.repeated import Repeated
from onelaunch.ops import rms_norm
from onelaunch.ops.rms_norm.contract import key_of
from onelaunch.tracing import is_transformed

_PEER = "fla"
"""Variant of ``rms_norm`` that is the function which fla's module calls."""

_MOST = 4096
"""Largest number of kinds of calls whose decisions are remembered."""

_PLAIN = (torch.Tensor, nn.Parameter)


class _Decisions(NamedTuple):
    """Reasons why fla's forward runs calls, ``None`` where ours does, by facts about the tensors."""

    era: object
    """Era of the dispatcher in which they were found; tables may have changed since."""
    reasons: dict[Any, str | None]


class _Latest(NamedTuple):
    """Decision about the latest call of a norm, by which a call that repeats its facts is decided in less time."""

    era: object
    repeated: Repeated
    reason: str | None


class FlaNorm(Forward):
    """Forward of ``fla.modules.RMSNorm``, with its arguments ``residual``, ``prenorm`` and ``residual_in_fp32``."""

    operation = "rms_norm"
    projections = ()
    decisions = _Decisions(None, {})
    """Decisions that all norms share, since many of a model have calls with the same facts."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._latest: _Latest | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy or a pickle, which cannot hold what compares calls."""
        return {**vars(self), "_latest": None}

    @classmethod
    def refusals(cls, module: nn.Module) -> Iterator[str]:
        """Yield each reason why the forward of a module cannot be replaced."""
        eps = getattr(module, "eps", None)
        if not isinstance(eps, (int, float)) or not (math.isfinite(eps) and eps >= 0):
            yield f"eps is {eps!r}; it must be a number of at least 0"
        if getattr(module, "bias", None) is not None:
            yield "the norm has a bias; onelaunch.ops.rms_norm has none"
        if (weight := getattr(module, "weight", None)) is not None:
            yield from parameter_refusals("weight", weight)

    def not_called(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield nothing: the module has no submodules."""
        return iter(())

    def groups(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """Return nothing: no two weights are multiplied with the same input."""
        return ()

    def weights(self) -> tuple[torch.Tensor, ...]:
        """Return nothing: the weight may have another dtype than the input, which the contract checks."""
        return ()

    def separately(self) -> str:
        """Return nothing, since there are no projections."""
        return ""

    def layout(self) -> str:
        """Return nothing, since there are no projections."""
        return ""

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """Run the norm; the arguments and results are those of fla's forward."""
        module: Any = self.module
        weight = module.weight
        reason = self._why_not_call(x, weight, residual)
        if reason is not None:
            return self.original(reason, x, residual=residual, prenorm=prenorm, residual_in_fp32=residual_in_fp32)
        y, total = rms_norm(x, weight, residual, eps=module.eps)
        if not prenorm:
            return y
        if total is None:
            total = x.float() if residual_in_fp32 else x
        return y, total

    def _why_not_call(self, x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None) -> str | None:
        """Return why fla's forward runs this call, or ``None``."""
        if is_compiling():
            return "torch.compile traces the call"
        if is_transformed():
            return "the call is inside a transform of torch.func"
        latest = self._latest
        if latest is not None and latest.era is dispatch.era() and latest.repeated.tensors_of((x, weight, residual), {}):
            return latest.reason
        reason = self.why_not(x) or _no_plain_tensor(weight=weight, residual=residual) or _decided(x, weight, residual)
        self._latest = None
        if (facts := facts_of((x, weight, residual))) is not None:
            with contextlib.suppress(TypeError):  # such tensors cannot be compared so
                self._latest = _Latest(dispatch.era(), Repeated((x, weight, residual), {}, facts), reason)
        return reason


def _no_plain_tensor(**given: object) -> str | None:
    """Return which of the given tensors is of another class, or ``None``."""
    for name, value in given.items():
        if value is not None and type(value) not in _PLAIN:
            return f"the {name} is a {type(value).__name__}"
    return None


def _decided(x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None) -> str | None:
    """Return why measured times leave a call to fla, or ``None``, from what was decided for such calls if possible."""
    if FlaNorm.decisions.era is not dispatch.era():
        FlaNorm.decisions = _Decisions(dispatch.era(), {})
    reasons = FlaNorm.decisions.reasons
    try:
        facts = (
            checks.facts("x", x),
            checks.optional_facts("weight", weight),
            checks.optional_facts("residual", residual),
            torch.is_grad_enabled(),
        )
        if facts not in reasons:
            if len(reasons) >= _MOST:
                reasons.clear()
            reasons[facts] = dispatch.why_not_faster(key_of(*facts), _PEER)
    except OneLaunchError as error:
        return f"onelaunch.ops.rms_norm does not take the arguments: {error}"
    return reasons[facts]
