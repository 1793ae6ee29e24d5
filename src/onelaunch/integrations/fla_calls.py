"""Functions of fla that ``accelerate()`` hooks, and which of their calls our functions run.

:class:`Hook` decides each call. ``fla_hooks.py`` puts hooks into fla. A decision is made once for calls with equal shapes,
dtypes, devices and other arguments, and costs a few microseconds from then on.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from onelaunch import dispatch
from onelaunch.errors import OneLaunchError
from onelaunch.launch.facts import facts_of
from onelaunch.launch.repeated import Repeated
from onelaunch.operation import Query
from onelaunch.operation.autocast import low_dtype
from onelaunch.operation.states import float32_state
from onelaunch.ops.gated_scan import functions as scans
from onelaunch.ops.gla import functions as gla
from onelaunch.ops.gla.contract import PER_CHANNEL, PER_HEAD
from onelaunch.tracing import is_transformed

Results = tuple[torch.Tensor, torch.Tensor | None]
Named = Mapping[str, Any]
"""Arguments of a call by name, with their default values."""

_DECAYS = ("scalar_decay", "value_gate")
"""Flags of ``gla`` with which its variants call another of the functions with ``gla`` and ``simple_gla``."""

_GATES = ("no_gate",)
"""Flags of ``gated_scan`` without which its variants multiply by the gate after the function of fla."""

_FEW_STEPS = 64
"""Most steps for which the variant ``fla`` of ``gla`` was measured by ``fused_recurrent_*``. Beyond, it calls ``chunk_*``."""

_MOST = 4096
"""Largest number of kinds of calls that a hook remembers, and of reasons that it counts."""


class Measured(NamedTuple):
    """Dispatch key of a call, and which measured times are those of fla's function."""

    query: Query
    peer: str
    """Variant of the operation that is fla's function."""
    changes_beyond: int | None
    """Number of steps beyond which this variant calls another function of fla."""
    changes_with: tuple[str, ...]
    """Flags of the key with which this variant calls another function of fla, or operations beside it."""


class Target(NamedTuple):
    """Function of fla that is hooked."""

    name: str
    package: str
    """Package that exports the function."""
    file: str
    """Module of that package that defines it."""
    ours: Callable[..., Results]
    """Our function with its arguments and results."""
    measured: Callable[[Named], Measured | str]
    """Function from arguments to the measurement that decides, or to the reason why there is none."""
    dispatched: bool = False
    """Flag that fla 0.6 looks for registered backends when this function is called."""


def _gla(named: Named, gate: str, layout: str) -> Query | str:
    """Return the dispatch key of a call of ``gla``, or the reason why no measured time of fla's function is one of such calls."""
    gv, g_gamma = named.get("gv"), named.get("g_gamma")
    if named.get("reverse"):
        return "reverse is set, which no study measures"
    if g_gamma is not None:
        return "g_gamma is given; fla was measured with a decay for every step"
    if named[gate] is None and gv is None:
        return "no decay is given; fla was measured with one"
    first = named["q"]
    call = gla.bound(
        first, named["k"], named["v"], named[gate], gv, None, named["scale"], float32_state(named["initial_state"], first),
        named["output_final_state"], named.get("state_v_first", False), named["cu_seqlens"], gate, layout,
    )  # fmt: skip
    if len({call.q.shape[2], call.k.shape[2], call.v.shape[2], call.g.shape[2]}) > 1:
        return "the tensors have different numbers of heads, which fla does not take"
    return call.query()


def _chunked(gate: str, layout: str) -> Callable[[Named], Measured | str]:
    """Return the function ``measured`` of one of ``chunk_gla`` and ``chunk_simple_gla``."""

    def measured(named: Named) -> Measured | str:
        query = _gla(named, gate, layout)
        if isinstance(query, str):
            return query
        return Measured(query, "fla" if query.sizes[1] > _FEW_STEPS else "fla_chunk", _FEW_STEPS, _DECAYS)

    return measured


def _recurrent(gate: str, layout: str) -> Callable[[Named], Measured | str]:
    """Return the function ``measured`` of one of ``fused_recurrent_gla`` and ``fused_recurrent_simple_gla``."""

    def measured(named: Named) -> Measured | str:
        query = _gla(named, gate, layout)
        if isinstance(query, str):
            return query
        if named.get("gv") is not None:
            return Measured(query, "fla", None, _DECAYS)
        if query.sizes[1] > _FEW_STEPS:
            return f"fla's function is measured for at most {_FEW_STEPS} steps"
        return Measured(query, "fla", _FEW_STEPS, _DECAYS)

    return measured


def _fused_chunk(named: Named) -> Measured | str:
    """Return the measurement of ``fused_chunk_simple_gla``."""
    query = _gla(named, "g", PER_HEAD)
    return query if isinstance(query, str) else Measured(query, "fla_fused_chunk", None, _DECAYS)


def _scan(named: Named) -> Measured | str:
    """Return the measurement of ``fused_recurrent_hgrn``."""
    arguments = (named["x"], named["g"], named["initial_state"], named["output_final_state"], named.get("cu_seqlens"))
    return Measured(scans.bound(*arguments).query(), "fla_recurrent", None, _GATES)


def _chunked_scan(named: Named) -> Measured | str:
    """Return the measurement of ``chunk_hgrn``."""
    query = scans.bound(named["x"], named["g"], named["initial_state"], named["output_final_state"], None).query()
    if query.grad and {"initial_state", "final_state"} & set(query.flags):
        return "fla's function drops the gradients of states, so it was not measured with them"
    return Measured(query, "fla", None, _GATES)


def fused_chunk_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> Results:
    """Run :func:`onelaunch.ops.gla.functions.chunk_simple_gla` with the arguments of fla's ``fused_chunk_simple_gla``."""
    return gla.chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_hgrn(
    x: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> Results:
    """Run our function of this name, and return the final state in the dtype of ``x``, as fla does."""
    o, final_state = scans.fused_recurrent_hgrn(x, g, initial_state, output_final_state, cu_seqlens)
    return o, None if final_state is None else final_state.to(x.dtype)


TARGETS = (
    Target("chunk_gla", "fla.ops.gla", "chunk", gla.chunk_gla, _chunked("g", PER_CHANNEL)),
    Target("fused_recurrent_gla", "fla.ops.gla", "fused_recurrent", gla.fused_recurrent_gla, _recurrent("gk", PER_CHANNEL)),
    Target("chunk_simple_gla", "fla.ops.simple_gla", "chunk", gla.chunk_simple_gla, _chunked("g", PER_HEAD)),
    Target(
        "fused_recurrent_simple_gla", "fla.ops.simple_gla", "fused_recurrent", gla.fused_recurrent_simple_gla,
        _recurrent("g", PER_HEAD), dispatched=True,
    ),
    Target("fused_chunk_simple_gla", "fla.ops.simple_gla", "fused_chunk", fused_chunk_simple_gla, _fused_chunk, dispatched=True),
    Target("chunk_hgrn", "fla.ops.hgrn", "chunk", scans.chunk_hgrn, _chunked_scan),
    Target("fused_recurrent_hgrn", "fla.ops.hgrn", "fused_recurrent", fused_recurrent_hgrn, _scan),
)  # fmt: skip
"""Functions of fla 0.6 that have one of ours with the same arguments."""


class _Decided:
    """Decision about calls with certain facts, and how to recognize another such call quickly."""

    __slots__ = ("_low", "_repeated", "reason")

    def __init__(self, reason: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.reason = reason
        """Reason why fla's function runs the calls, or ``None``."""
        self._repeated: Repeated | None = None
        self._low: torch.dtype | None = None
        facts = facts_of((*args, *kwargs.values()))
        if facts is not None and facts.tensors:
            self._low = low_dtype(facts.tensors[0])
            with contextlib.suppress(TypeError):  # such arguments cannot be compared so
                self._repeated = Repeated(args, kwargs, facts)

    def is_repeated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call has the facts of the one that was decided; false also where that is not clear."""
        found = None if self._repeated is None else self._repeated.tensors_of(args, kwargs)
        return found is not None and low_dtype(found[0][0]) is self._low


class Hook:
    """Decisions about the calls of one function of fla, and counts of them.

    Attributes:
        target: The function.
        active: False after ``undo``: every call goes to fla's function, also those through references that still hold the hook.
        calls: Number of calls that our function ran.
        fallbacks: Number of calls that fla's function ran, by reason.
    """

    def __init__(self, target: Target) -> None:
        self.target, self.active, self.calls = target, True, 0
        self.fallbacks: Counter[str] = Counter()
        self._signature = inspect.signature(target.ours)
        self._era = dispatch.era()
        self._decisions: dict[tuple[Any, ...], _Decided] = {}
        self._latest: _Decided | None = None

    def why_not(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return why fla's function runs a call, or ``None`` if ours does, and count the call."""
        reason = "the call is inside a transform of torch.func" if is_transformed() else self._decide(args, kwargs)
        if reason is None:
            self.calls += 1
        else:
            if len(self.fallbacks) >= _MOST and reason not in self.fallbacks:
                reason = "other reasons"
            self.fallbacks[reason] += 1
        return reason

    def _decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return why fla's function runs a call, or ``None``, from what was decided for such calls if possible."""
        if self._era is not dispatch.era():
            self._era, self._latest = dispatch.era(), None
            self._decisions.clear()
        latest = self._latest
        if latest is not None and latest.is_repeated(args, kwargs):
            return latest.reason
        facts: list[Any] = [torch.is_grad_enabled(), *kwargs]
        first = True
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is torch.Tensor or kind is nn.Parameter:
                if first:
                    first = False
                    facts += (value.device, low_dtype(value))
                facts += (value.shape, value.dtype, value.get_device(), value.requires_grad)
            elif value is None or kind is bool or kind is int or kind is float:
                facts += (kind, value)
            else:
                return f"an argument is of the class {kind.__name__}"
        key = tuple(facts)
        decided = self._decisions.get(key)
        if decided is None:
            if len(self._decisions) >= _MOST:
                self._decisions.clear()
            found = self._measured(args, kwargs)
            decided = _Decided(found if isinstance(found, str) else dispatch.why_not_faster(*found), args, kwargs)
            self._decisions[key] = decided
        self._latest = decided
        return decided.reason

    def _measured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Measured | str:
        """Return which measured times decide about a call, or why there are none."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            return f"the arguments do not fit: {error}"
        more = [name for name, value in bound.arguments.get("kwargs", {}).items() if value is not None]
        more += ["variant"] if "variant" in bound.arguments else []
        if more:
            return f"the keyword {more[0]} is given"
        bound.apply_defaults()
        named = bound.arguments
        if named.get("cu_seqlens_cpu") is not None and named.get("cu_seqlens") is None:
            return "cu_seqlens_cpu is given without cu_seqlens"
        for name in ("q", "k", "v", "x"):
            value = named.get(name)
            if isinstance(value, torch.Tensor) and (low := low_dtype(value)) is not None and value.dtype is not low:
                return f"{name} is not in the dtype of autocast, to which our function would cast it and fla's does not"
        try:
            return self.target.measured(named)
        except OneLaunchError as error:
            return f"our function does not take the arguments: {error}"
