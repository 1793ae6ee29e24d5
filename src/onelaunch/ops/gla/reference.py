"""Reference of gated linear attention (``gla``), random inputs for its cases, and the dispatch key of a case.

The reference computes, for each sequence and head, from log-decays g (per key channel or head) and gv (per value channel):

    S_t = diag(exp(g_t)) S_{t-1} diag(exp(gv_t)) + k_t^T v_t;  o_t = scale * q_t S_t

Where tensors share heads, k, v and g are repeated to the heads of the states that are computed: those of the initial state, or
without one those of g, since states of heads with the same k, v and g are equal then. Queries that share a state read the same.

The workbench and tests compare the results of every variant with those of the reference (the operation's oracle) in float64.
They and other code that examines an operation's cases call these functions through the operation, and so does the oracle of
``gla_layer``. :func:`recurrence` is also the loop of the PyTorch variant (variants/torch.py), and cost.py asks :func:`heads_of`.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from onelaunch.errors import ArgumentError
from onelaunch.operation import Case, Query, Reading, fixed
from onelaunch.operation.inputs import case_flags, make_log_decay, packed_lengths
from onelaunch.ops.gla.contract import check_head_sizes, gate_flags, gla, tf32_flags
from onelaunch.ops.gla.heads import Heads, expanded

DECAYS = ("model", "weak", "strong", "zero", "forget", "mixed")
"""Kinds of log-decays that the option ``decay`` may name. :func:`make_decay` makes them, and tests go through them.

- ``model``: as models produce them, logsigmoid of a gate over 16;
- ``weak``: near 0, decays near 1;
- ``strong``: uniform from -20 to 0 per step, which sums below -80 within 16 steps;
- ``zero``: exactly 0, nothing is forgotten;
- ``forget``: as ``model``, with a step in four at -inf;
- ``mixed``: a random choice per channel and step among small (-1/16 to 0), weak, strong, 0 and -inf.
"""

_DECAY_PER = ("channel", "head")
"""Values of the option ``decay_per``: ``g`` is ``[B, T, H, K]`` or ``[B, T, H]``."""

_SIDE_BY_SIDE = (1 << 18, 1 << 25)
"""Largest size in bytes of the states of all segments that run side by side: on a CPU, and on other devices.

The states of a CPU should stay in its caches. The index is ``device.type != "cpu"``.
"""

_STATES_TOGETHER = (1 << 20, 1 << 25)
"""Largest size in bytes of the states of steps whose outputs are computed together: on a CPU, and on other devices."""

KEPT_STATES = 1 << 28
"""Largest size in bytes of the states that the loop over time saves for its backward pass.

If all states are larger, it saves some of them and recomputes the others in the backward pass (checkpointing).
"""


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
    """Compute ``gla`` step by step, sequence by sequence, in the dtype of the arguments (float64 when variants are checked).

    A long sequence is cut into equal segments, which start from zero states and run side by side (:func:`_segmented_scan`).
    The contribution of the state that enters each segment is added afterwards. These are sums of the same products in another
    order, in fewer serial steps.
    """
    if state_v_first and initial_state is not None:
        initial_state = initial_state.mT
    scaled = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    o, final = recurrence(scaled, k, v, g, gv, initial_state, cu_seqlens, side_by_side=_SIDE_BY_SIDE[q.device.type != "cpu"])
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
    *,
    side_by_side: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``o [B, T, H, V]`` and the final state ``[N, H, K, V]``, in the dtype of the arguments, by a loop over time.

    ``q`` is already scaled. ``side_by_side`` bounds the bytes of the states of segments that run side by side; with 0 all steps
    run one after another.
    """
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    heads, final_heads = g.shape[2], max(q.shape[2], g.shape[2])
    if initial_state is None:
        initial_state = q.new_zeros(sequences, heads, q.shape[3], v.shape[3])
    else:
        heads = final_heads = initial_state.shape[1]
    # Keys, values and decays for every state, and one query or several
    q, k, v, g = expanded(q, max(q.shape[2], heads)), expanded(k, heads), expanded(v, heads), expanded(g, heads)
    gv = None if gv is None else expanded(gv, heads)
    if q.shape[1] == 0:  # no steps: an empty o [B, 0, H, V] that autograd connects to q and v; the states stay
        return q[..., :1] * expanded(v, q.shape[2]), expanded(initial_state.clone(), final_heads, dim=1)
    queries = q.shape[2] // max(heads, 1)
    if q.shape[1] == 1 and cu_seqlens is None:
        o, final = _single_step(q, k, v, g, gv, initial_state, queries)
        return o, expanded(final, final_heads, dim=1)
    q = q.unsqueeze(3) if queries < 2 else q.unflatten(2, (heads, queries))  # [B, T, Hs, queries of a state, K]
    lengths = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    states = [initial_state] if cu_seqlens is None else initial_state.split(1)
    parts = Part(q, k, v, g if g.dim() == 4 else g[..., None], gv).split(lengths)
    outputs, finals = [], []
    for state, part in zip(states, parts, strict=True):
        # With S segments there are T / S serial steps, then S serial additions of states: fewest for the square root of T.
        most = side_by_side // max(state.numel() * state.itemsize, 1)
        (length,) = fixed(part.q.shape[1])  # a traced loop over steps is unrolled for one number of them
        o, state = _segmented_scan(state, part, max(1, min(most, math.isqrt(length))))
        outputs.append(o)
        finals.append(state)
    return torch.cat(outputs, 1).flatten(2, 3), expanded(torch.cat(finals), final_heads, dim=1)


def _single_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    gv: torch.Tensor | None,
    state: torch.Tensor,
    queries: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the state after a single step of every sequence, in few operations, since decoding takes this path.

    The tensors have T = 1; ``q`` is ``[N, 1, H, K]``, of whose heads ``queries`` read one of ``state``, ``[N, Hs, K, V]``.
    """
    # Permuted, the dimension of the single step is the one that the other operand has in its place.
    decay = g.exp()
    state = state * (decay.permute(0, 2, 3, 1) if g.dim() == 4 else decay.permute(0, 2, 1)[..., None])  # [N, Hs, K, V]
    if gv is not None:
        state = state * gv.exp().transpose(1, 2)
    state = torch.addcmul(state, k.permute(0, 2, 3, 1), v.transpose(1, 2))
    if queries < 2:
        return torch.matmul(q.transpose(1, 2), state).transpose(1, 2), state  # [N, 1, H, V]
    grouped = q.squeeze(1).unflatten(1, (-1, queries))  # [N, Hs, queries, K]
    return torch.matmul(grouped, state).flatten(1, 2).unsqueeze(1), state


class Part(NamedTuple):
    """Inputs of consecutive steps of one sequence, or of a batch of sequences, ``[N, T, H, ...]`` with the heads of the state.

    The log-decay ``g`` is ``[N, T, H, K]`` or ``[N, T, H, 1]``. Queries are ``[N, T, H, queries, K]``: several may read a state.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    gv: torch.Tensor | None

    def split(self, sizes: list[int]) -> list[Part]:
        """Return consecutive pieces of these numbers of steps."""
        q, k, v, g = (x.split(sizes, 1) for x in self[:4])
        gv = itertools.repeat(None, len(sizes)) if self.gv is None else self.gv.split(sizes, 1)
        return list(itertools.starmap(Part, zip(q, k, v, g, gv, strict=True)))

    def folded(self, segments: int) -> Part:
        """Return the segments of every sequence as sequences of their own, side by side."""
        q, k, v, g = (_fold(x, segments) for x in self[:4])
        return Part(q, k, v, g, None if self.gv is None else _fold(self.gv, segments))


def _fold(x: torch.Tensor, segments: int) -> torch.Tensor:
    """Return ``[N, T, ...]`` as ``[segments N, T / segments, ...]``."""
    return x.unflatten(1, (segments, -1)).transpose(0, 1).flatten(0, 1)


def _segmented_scan(state: torch.Tensor, part: Part, segments: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``o [N, T, H, queries, V]`` of a part and the state after it, with ``segments`` equal segments run side by side.

    Steps that are left over, fewer than ``segments``, run one after another at the end.
    """
    if segments < 2:
        return _loop(state, part)
    steps = part.q.shape[1]
    most, rest = part.split([steps - steps % segments, steps % segments])
    side_by_side = most.folded(segments)
    zeros = state.new_zeros(segments * state.shape[0], *state.shape[1:])
    o, added = _loop(zeros, side_by_side)
    # Decay from the start of a segment to each of its steps: the factor of the segment's initial state at that step.
    decay = side_by_side.g.cumsum(1).exp()
    value_decay = None if side_by_side.gv is None else side_by_side.gv.cumsum(1).exp()
    value_ends = itertools.repeat(None, segments) if value_decay is None else value_decay[:, -1].chunk(segments)
    entering = []
    for added_here, end, value_end in zip(added.chunk(segments), decay[:, -1].chunk(segments), value_ends, strict=True):
        entering.append(state)
        state = _decayed(state, end, value_end) + added_here
    from_entering = torch.einsum("nthqk,nhkv->nthqv", side_by_side.q * decay.unsqueeze(3), torch.cat(entering))
    o = o + (from_entering if value_decay is None else from_entering * value_decay.unsqueeze(3))
    last, state = _loop(state, rest)
    return torch.cat([o.unflatten(0, (segments, -1)).transpose(0, 1).flatten(1, 2), last], 1), state


def _loop(state: torch.Tensor, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``o`` and the last state, computed step by step; the backward pass recomputes states that are not checkpoints."""
    lengths = _checkpoints(state, part.q.shape[1])
    outputs = [part.q[:, :0, ..., :1] * part.v[:, :0].unsqueeze(3)]  # the result for a part without steps
    for piece in part._replace(g=part.g.exp(), gv=None if part.gv is None else part.gv.exp()).split(lengths):
        if len(lengths) > 1:
            o, state = checkpoint(_steps, state, *piece, use_reentrant=False, preserve_rng_state=False)
        else:
            o, state = _steps(state, *piece)
        outputs.append(o)
    return torch.cat(outputs, 1), state


def _decayed(state: torch.Tensor, decay: torch.Tensor, value_decay: torch.Tensor | None) -> torch.Tensor:
    """Return a state ``[N, H, K, V]`` after decays per key ``[N, H, K]`` or head ``[N, H, 1]``, and per value ``[N, H, V]``."""
    state = decay[..., None] * state
    return state if value_decay is None else state * value_decay[..., None, :]


def _checkpoints(state: torch.Tensor, steps: int) -> list[int]:
    """Return the lengths, in steps, of the pieces between saved states (checkpoints).

    It is one piece if no gradient is needed or if all states fit into KEPT_STATES bytes. Otherwise pieces have about the square
    root of ``steps``, so that few states are saved, and few are recomputed at a time.
    """
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
    """Return the outputs and the last state of consecutive steps; ``decay`` and ``value_decay`` are factors, not logarithms.

    Where several states take little memory, what these steps add to the state is computed at once, and so are the outputs from
    the states: a step is two operations, then. All is unbound before the loop, since the gradient of ``x[:, t]`` would be as
    large as x for every t.
    """
    outputs = []
    keys, values, factors = k[..., None], v[..., None, :], decay[..., None]
    value_factors = itertools.repeat(None) if value_decay is None else value_decay[..., None, :].unbind(1)
    together = _STATES_TOGETHER[state.device.type != "cpu"] // max(state.numel() * state.itemsize, 1)
    if together < 2:
        every_step = zip(*(x.unbind(1) for x in (q, keys, values, factors)), value_factors, strict=False)
        for qt, kt, vt, factor, value_factor in every_step:
            state = _step(state, factor, value_factor, kt * vt)
            outputs.append(qt @ state)
        return torch.stack(outputs, dim=1), state
    every_step = zip(factors.unbind(1), value_factors, strict=False)
    for queries, *added in zip(*(x.split(together, 1) for x in (q, keys, values)), strict=True):
        states = []
        for addend, (factor, value_factor) in zip(torch.mul(*added).unbind(1), every_step, strict=False):
            state = _step(state, factor, value_factor, addend)
            states.append(state)
        outputs.append(queries @ torch.stack(states, 1))
    return torch.cat(outputs, 1), state


def _step(state: torch.Tensor, factor: torch.Tensor, value_factor: torch.Tensor | None, addend: torch.Tensor) -> torch.Tensor:
    """Return a state after one step, given factors that broadcast to it and what the step adds to it."""
    state = factor * state
    return (state if value_factor is None else state * value_factor) + addend


@gla.inputs
def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Reading:
    """Return random q, k and v, log-decays of the kind that the case names, and the names of the differentiable arguments.

    Without the option ``state_gradients`` the initial state takes no gradient, and none comes in through the final one.
    """
    options = {**gla.options, **case.options}
    batch, length, most, keys, values = (case.sizes[name] for name in gla.dimensions)
    heads = heads_of(case)
    if heads.output != most:
        said = ", ".join(f"{name}_heads = {count}" for name, count in heads._asdict().items())
        raise ArgumentError(f"{said}; the largest must be H = {most}, the number of heads of the output.")
    if heads.state != most and not options["initial_state"]:
        raise ArgumentError(f"state_heads = {heads.state}; without initial_state it must be H = {most}, or be left out.")
    if options["decay_per"] not in _DECAY_PER:
        raise ArgumentError(f"decay_per is {options['decay_per']!r}; it must be one of {', '.join(_DECAY_PER)}.")

    def draw(*extent: int) -> torch.Tensor:
        return torch.randn(extent, device=device, generator=generator)

    decay_dtype = torch.float32 if options["log_decay_dtype"] == "float32" else case.dtype
    per = (keys,) if options["decay_per"] == "channel" else ()
    arguments: dict[str, Any] = {
        "q": draw(batch, length, heads.q, keys).to(case.dtype),
        "k": draw(batch, length, heads.k, keys).to(case.dtype),
        "v": draw(batch, length, heads.v, values).to(case.dtype),
        "g": make_decay(options["decay"], (batch, length, heads.g, *per), device, generator).to(decay_dtype),
        "scale": options["scale"],
        "output_final_state": bool(options["final_state"]),
        "state_v_first": bool(options["state_v_first"]),
    }
    if options["value_gate"]:
        gv = make_decay(options["decay"], (batch, length, heads.g, values), device, generator)
        arguments["gv"] = gv.to(decay_dtype)
    sequences = batch
    if options["lengths"] is not None:
        lengths = packed_lengths(case, options["lengths"])
        arguments["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        sequences = len(lengths)
    if options["initial_state"]:
        ends = (values, keys) if options["state_v_first"] else (keys, values)
        arguments["initial_state"] = draw(sequences, heads.state, *ends)
    taking = ("q", "k", "v", "g", "gv", *(("initial_state",) if options["state_gradients"] else ()))
    through = None if options["state_gradients"] else ("o",)
    return Reading(arguments, tuple(name for name in taking if name in arguments), through)


def heads_of(case: Case) -> Heads:
    """Return the numbers of heads of a case: those of the options ``q_heads`` to ``state_heads``, or H."""
    given = (gla.option(case, f"{name}_heads") for name in Heads._fields)
    return Heads(*(case.sizes["H"] if count is None else int(count) for count in given))


def make_decay(kind: str, extent: tuple[int, ...], device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Return a float32 log-decay of one of :data:`DECAYS`, ``[B, T, H, ...]``."""
    batch, length, *rest = extent
    if kind != "forget":
        return make_log_decay(kind, (batch, length, math.prod(rest)), device, generator).view(extent)
    forgotten = torch.rand(extent[:3], device=device, generator=generator) < 0.25  # all channels of a head together
    model = make_decay("model", extent, device, generator)
    return torch.where(forgotten.view(*extent[:3], *(1,) * len(rest[1:])), -math.inf, model)


@gla.queries
def make_query(case: Case, device: str, grad: bool) -> Query:
    """Return the dispatch key of a case.

    Raises:
        ShapeError: K or V is outside the range of head sizes that ``gla`` supports.
    """
    sizes = tuple(case.sizes[name] for name in gla.dimensions)
    batch, length, heads, keys, values = sizes
    check_head_sizes((batch, length, heads, keys), (batch, length, heads, values))
    per_head, value_gate = gla.option(case, "decay_per") == "head", bool(gla.option(case, "value_gate"))
    wide = gla.option(case, "log_decay_dtype") == "float32" and case.dtype is not torch.float32
    flags = case_flags(case, gla.options) + gate_flags(per_head, value_gate, wide) + heads_of(case).flags()
    flags += tf32_flags(case.dtype, torch.device(device))
    return Query("gla", device, case.dtype, sizes, grad, flags)
