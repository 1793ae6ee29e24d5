"""The oracle of ``gla``, and the inputs it is judged on."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from onelaunch.errors import ArgumentError
from onelaunch.operation import Case, Query, Reading
from onelaunch.ops.gated_scan.reference import case_flags, make_log_decay
from onelaunch.ops.gla.contract import check_head_sizes, gate_flags, gla

DECAYS = ("model", "weak", "strong", "zero", "forget", "mixed")
"""What ``decay`` may be: as models produce it (logsigmoid of a gate over 16), near 1, steps down to -20 that sum below -80 within
16 steps, exactly 0 (nothing is forgotten), model-like with a step in four at -inf, or all of these by channel and step."""

DECAY_PER = ("channel", "head")
"""What ``decay_per`` may be: ``g`` is ``[B, T, H, K]`` or ``[B, T, H]``."""

KEPT_STATES = 1 << 28
"""Bytes of states that the loop may keep for its backward pass; beyond, it keeps some and computes the others again."""


@gla.oracle
def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    *,
    gv: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Step by step, sequence by sequence, in the dtype of the arguments (float64 when judging)."""
    if state_v_first and initial_state is not None:
        initial_state = initial_state.mT
    o, final = recurrence(q * (q.shape[-1] ** -0.5 if scale is None else scale), k, v, g, gv, initial_state, cu_seqlens)
    if not output_final_state:
        return o, None
    return o, final.mT if state_v_first else final


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    gv: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loop over time: ``o [B, T, H, V]`` and the final state ``[N, H, K, V]`` in the dtype of the arguments, scaled ``q``."""
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        initial_state = q.new_zeros(sequences, q.shape[2], q.shape[3], v.shape[3])
    if q.shape[1] == 0:  # nothing happens, and nothing has to be read
        return q[..., :1] * v, initial_state.clone()
    lengths = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    states = [initial_state] if cu_seqlens is None else initial_state.split(1)
    runs = [_runs(states[0], length) for length in lengths]
    sizes = [size for each in runs for size in each]
    decay = (g if g.dim() == 4 else g[..., None]).exp()
    value_decays = itertools.repeat(None) if gv is None else gv.exp().split(sizes, 1)
    parts = zip(*(x.split(sizes, 1) for x in (q, k, v, decay)), value_decays, strict=False)
    outputs, finals = [], []
    for state, run in zip(states, runs, strict=True):
        for part in itertools.islice(parts, len(run)):
            if len(run) > 1:
                o, state = checkpoint(_steps, state, *part, use_reentrant=False, preserve_rng_state=False)
            else:
                o, state = _steps(state, *part)
            outputs.append(o)
        finals.append(state)
    return torch.cat(outputs, 1), torch.cat(finals)


def _runs(state: torch.Tensor, steps: int) -> list[int]:
    """How many steps to keep the states of at once: all, or the root of their number where they are too large."""
    if state.numel() * state.itemsize * steps <= KEPT_STATES or not torch.is_grad_enabled():
        return [steps] if steps else []
    most = math.isqrt(steps)
    return [min(most, steps - first) for first in range(0, steps, most)]


def _steps(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    value_decay: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A run of steps, unbound at once: the gradient of ``x[:, t]`` would be as large as x for every t."""
    outputs = []
    value_decays = itertools.repeat(None) if value_decay is None else value_decay.unbind(1)
    for qt, kt, vt, at, bt in zip(*(x.unbind(1) for x in (q, k, v, decay)), value_decays, strict=False):
        state = at[..., None] * state
        if bt is not None:
            state = state * bt[..., None, :]
        state = state + kt[..., None] * vt[..., None, :]
        outputs.append((qt[..., None, :] @ state).squeeze(-2))
    return torch.stack(outputs, dim=1), state


@gla.inputs
def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Reading:
    """Random q, k, v, and log-decays of the kind that the case asks for."""
    options = {**gla.options, **case.options}
    batch, length, heads, keys, values = (case.sizes[name] for name in gla.dimensions)
    if options["decay_per"] not in DECAY_PER:
        raise ArgumentError(f"decay_per is {options['decay_per']!r}; it must be one of {', '.join(DECAY_PER)}.")

    def draw(*extent: int) -> torch.Tensor:
        return torch.randn(extent, device=device, generator=generator)

    decay_dtype = torch.float32 if options["log_decay_dtype"] == "float32" else case.dtype
    per = (keys,) if options["decay_per"] == "channel" else ()
    arguments: dict[str, Any] = {
        "q": draw(batch, length, heads, keys).to(case.dtype),
        "k": draw(batch, length, heads, keys).to(case.dtype),
        "v": draw(batch, length, heads, values).to(case.dtype),
        "g": make_decay(options["decay"], (batch, length, heads, *per), device, generator).to(decay_dtype),
        "scale": options["scale"],
        "output_final_state": bool(options["final_state"]),
        "state_v_first": bool(options["state_v_first"]),
    }
    if options["value_gate"]:
        gv = make_decay(options["decay"], (batch, length, heads, values), device, generator)
        arguments["gv"] = gv.to(decay_dtype)
    sequences = batch
    if options["lengths"] is not None:
        lengths = list(options["lengths"])
        if sum(lengths) != length or batch != 1:
            raise ArgumentError(f"lengths add up to {sum(lengths)}; they must add up to T = {length}, with B = 1.")
        arguments["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        sequences = len(lengths)
    if options["initial_state"]:
        ends = (values, keys) if options["state_v_first"] else (keys, values)
        arguments["initial_state"] = draw(sequences, heads, *ends)
    return Reading(arguments, tuple(name for name in ("q", "k", "v", "g", "gv", "initial_state") if name in arguments))


def make_decay(kind: str, extent: tuple[int, ...], device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """A float32 log-decay of one of :data:`DECAYS`, ``[B, T, H, ...]``."""
    batch, length, *rest = extent
    if kind != "forget":
        return make_log_decay(kind, (batch, length, math.prod(rest)), device, generator).view(extent)
    forgotten = torch.rand(extent[:3], device=device, generator=generator) < 0.25  # all channels of a head at once
    model = make_decay("model", extent, device, generator)
    return torch.where(forgotten.view(*extent[:3], *(1,) * len(rest[1:])), -math.inf, model)


@gla.queries
def make_query(case: Case, device: str, grad: bool) -> Query:
    """The dispatch key of a case, if heads may have its sizes."""
    sizes = tuple(case.sizes[name] for name in gla.dimensions)
    batch, length, heads, keys, values = sizes
    check_head_sizes((batch, length, heads, keys), (batch, length, heads, values))
    per_head, value_gate = gla.option(case, "decay_per") == "head", bool(gla.option(case, "value_gate"))
    wide = gla.option(case, "log_decay_dtype") == "float32" and case.dtype is not torch.float32
    flags = case_flags(case, gla.options) + gate_flags(per_head, value_gate, wide)
    return Query("gla", device, case.dtype, sizes, grad, flags)
