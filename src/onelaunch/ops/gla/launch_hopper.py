"""Launches of ``gla``'s Hopper kernels: passes along time, in segments that fill the chip, and gradients of chunks.

The forward pass is one launch of ``chunk_state_kernel``. The backward pass is three: states again (unless the forward pass has
stored them), then dv with the gradients of the states, then dq, dk and dg of all chunks. In float16 it begins with the two
launches of launch_rescale.py. A pass whose heads do not fill the SMs is preceded by ``segment_sum_kernel``, unless it
recomputes the states at the starts of segments (kernels/hopper_recompute.py), and ``sum_heads`` of launch.py adds up the
gradient of each tensor with shared heads. The files of the kernels, kernels/hopper_*.py, say what each computes and what its
constants mean. The variant ``hopper`` calls :func:`forward`, autograd.py :func:`backward`, and the operation ``gla_layer``
both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.kernels.tma import address, described
from onelaunch.launch.launch import Launch, Mma
from onelaunch.ops.gla.boxes import Boxes, boxes, targets
from onelaunch.ops.gla.configure_hopper import (
    NOT_RECOMPUTED,
    Segments,
    chunk_times,
    pass_groups,
    pass_segments,
    pass_tiles,
    recomputed_chunk,
    segment_tiles,
)
from onelaunch.ops.gla.launch import (
    CHUNK,
    Attention,
    Gradients,
    Into,
    empty_final,
    empty_output,
    empty_parts,
    output_like,
    pitch_of,
    ratio,
    sum_heads,
)
from onelaunch.ops.gla.launch_rescale import rescaled
from onelaunch.ops.gla.launch_scaled_copies import Powers
from onelaunch.ops.gla.padding import PANEL, key_panels, padded_keys, padded_values, value_groups

_WHOLE = 1 << 30
"""Steps of a segment where T is not cut: more than any sequence has, and a multiple of CHUNK."""

STOP = -88.0
"""Sum of natural log-decays below which a sum of a segment ends: e^-88 is subnormal in float32."""

LIMITS = {torch.bfloat16: 40.0, torch.float16: 6.0}
"""Largest magnitude of the sum of log-decays over half a chunk for which one matrix product gives all of its scores, by dtype.

That product's factors are decays from the chunk's middle, up to exp of this number, which must fit the dtype. Chunks beyond it
take more products, on sub-chunks: see kernels/hopper_prepare.py.
"""


class PassOperands(NamedTuple):
    """Operands of a pass in one direction of time, see kernels/hopper_prepare.py.

    ``queries`` multiply the state, and the products of ``keys`` with ``values`` are added to it: q, k and v forwards; k, q and do
    with ``reverse``, from the last step to the first. ``queries`` of ``None`` make no outputs.
    """

    queries: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    reverse: bool


def _rows_of_states(states: torch.Tensor) -> torch.Tensor:
    """Return states ``[slots, H, V, K]`` as ``[rows, K]``; a matrix of :func:`aliased_state_buffers` is returned as it is."""
    return states if states.dim() == 2 else states.flatten(0, 2)


def aliased_state_buffers(call: Attention, into: Into | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return two matrices ``[B T, 2 H K]`` that hold states and their gradients until dq, dk and dg overwrite them.

    It saves the memory of both. With V = 128 a state [V, K] is as large as dq and dk [64, K] of its chunk and head together: its
    first 64 rows lie in the memory of dq, the others in that of dk. No CTA reads a part of a state after dq and dk have replaced
    it: the CTA that writes a panel of dq and dk is the only one that reads that panel of the state, and reads it first.
    Gradients of states lie in the same way in a matrix of their own, whose first half dg replaces.

    The result is ``None`` unless dq and dk are neighbours in memory, all chunks are whole, nothing is packed, V is 128 and K 64
    or 128, there is a 16-bit log-decay per channel, and no heads are shared.
    """
    batch, length, heads, keys, values = call.sizes
    if into is None or call.scalar or call.heads.grouped or call.sequences.offsets is not None or length % CHUNK:
        return None
    if _has_wide_decays(call):
        return None
    width, gap = heads * keys, address(into.k) - address(into.q)
    if values != 2 * CHUNK or keys not in (PANEL, 2 * PANEL) or gap != width * into.q.element_size():
        return None
    both = into.q.as_strided((batch * length, 2 * width), (pitch_of(into.q), 1))
    return both, torch.empty_like(both, memory_format=torch.contiguous_format)


class SegmentSums(NamedTuple):
    """Results of ``segment_sum_kernel``: what each segment of T adds to the state, or to the state's gradient, and its decay."""

    states: torch.Tensor
    """``[N, heads, segments, V, K]`` float32, with V and K as padding.py pads them."""
    decays: torch.Tensor
    """``[N, heads, segments, K]`` float32."""

    @property
    def segments(self) -> int:
        """Number of segments."""
        return self.states.shape[2]


class Pass(NamedTuple):
    """Configuration of a pass along time."""

    heads: int
    """Heads of its grid: those of the output, or of the states where it makes no outputs."""
    summed: int
    """Heads of the sums of segments."""
    slices: int
    """CTAs of a head and segment, each for 64 values in each of its groups."""
    groups: int
    """Warpgroups of a CTA that multiply."""
    cut: Segments
    options: dict[str, Any]
    """Constants that its kernel and that of the sums share."""

    def segment_steps(self, length: int) -> int:
        """Return the steps of a segment, where no sequences are packed."""
        return cdiv(cdiv(length, CHUNK), self.cut.count) * CHUNK if self.cut.count > 1 else _WHOLE


def configured(
    call: Attention, operands: PassOperands, *, output: bool, store_states: bool, split: bool, sums: SegmentSums | None = None,
    recompute: bool = True,
) -> Pass:  # fmt: skip
    """Return the configuration of a pass, whose segments are those of ``sums`` where these are known already.

    Args:
        call: Tensors of the call.
        operands: Queries, keys and values of this direction of time.
        output: Flag that the pass makes outputs.
        store_states: Flag that it stores the state that enters each chunk.
        split: Flag that with a decay per head values have two 16-bit terms, as keys always have with one per channel.
        sums: Sums of the segments.
        recompute: Flag that CTAs may recompute the states at the starts of segments.
    """
    _, length, most, keys, values = call.sizes
    states_heads = call.heads.state
    # States alone are computed once for all heads of the output that share them. With outputs a CTA works for one head of these.
    heads = most if output else states_heads
    sequences, offsets = call.sequence_count, call.sequences.offsets
    padded, rows = padded_keys(keys), padded_values(keys, values)
    chunks = cdiv(length if offsets is None else cdiv(length, sequences), CHUNK)
    multiprocessors, pairs, groups = processors(operands.keys.device), sequences * heads, value_groups(keys, values)
    wide = _has_wide_decays(call)
    times = chunk_times(padded, scalar=call.scalar, wide=wide, store_states=store_states)
    can_recompute = recompute and sums is None and output and not store_states and not operands.reverse
    recomputed = recomputed_chunk(padded, scalar=call.scalar, wide=wide) if can_recompute else NOT_RECOMPUTED
    if groups == 2:
        groups = pass_groups(pairs * rows // (2 * PANEL), chunks, multiprocessors, times, recomputed)
    slices = rows // (PANEL * groups)
    if sums is None:
        cut = pass_segments(pairs * slices, chunks, multiprocessors, times[groups - 1], recomputed[groups - 1])
    else:
        cut = Segments(sums.segments)
    options: dict[str, Any] = {
        "SLICES": slices, "PACKED": offsets is not None, "REVERSE": operands.reverse, "SPLIT_KEYS": not call.scalar or split,
        "KEYS": keys, "K": padded, "num_warps": 4,
    }  # fmt: skip
    return Pass(heads, heads if operands.reverse else states_heads, slices, groups, cut, options)


def _sources(call: Attention, operands: PassOperands) -> tuple[Any, ...]:
    """Return keys, values and log-decays as both kernels of a pass take them.

    Log-decays are a descriptor and ``None`` with one per channel, ``None`` and a tensor with one per head.
    """
    *_, keys, values = call.sizes
    padded = padded_keys(keys)
    key_boxes, value_boxes = Boxes(CHUNK, padded, padded), Boxes(CHUNK, PANEL, padded_values(keys, values))
    decays = (None, call.g.contiguous()) if call.scalar else (*boxes(key_boxes, call.g), None)
    return *boxes(key_boxes, operands.keys), *boxes(value_boxes, operands.values), *decays


def sum_segments(
    call: Attention, operands: PassOperands, configuration: Pass, sources: tuple[Any, ...] | None = None, *, turns: bool = False,
    last: bool = False,
) -> SegmentSums:  # fmt: skip
    """Sum up what each segment adds; with ``last`` also that at which the recurrence ends, from which no other one starts."""
    from onelaunch.ops.gla.kernels.hopper_segment_sum import segment_sum_kernel

    _, length, _, keys, values = call.sizes
    sequences, heads, segments = call.sequence_count, configuration.summed, configuration.cut.count
    shape = (sequences, heads, segments, padded_values(keys, values), padded_keys(keys))
    sums = SegmentSums(*(operands.keys.new_empty(each, dtype=torch.float32) for each in (shape, (*shape[:3], shape[4]))))
    tiles = segment_tiles(keys, configuration.groups, scalar=call.scalar, wide=_has_wide_decays(call))
    Launch(
        segment_sum_kernel, (sequences * heads * configuration.slices * segments,),
        *(sources or _sources(call, operands)), *sums, call.sequences.offsets, length, heads, segments,
        configuration.segment_steps(length), call.scale, values, mma=Mma.WIDEST, SHARED=_sharing(call, operands, heads),
        ALL=last, TURNS=turns, STOP=STOP, **tiles.options(), **configuration.options,
    ).run()  # fmt: skip
    return sums


def _state_pass(
    call: Attention,
    operands: PassOperands,
    out: torch.Tensor | None,
    states: list[torch.Tensor],
    *,
    initial: torch.Tensor | None,
    final: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    sums: SegmentSums | None = None,
    turns: bool = False,
) -> None:
    """Run a pass along time: fill ``out`` if given, and ``states``, if not empty, with the state that enters each chunk.

    Args:
        call: Tensors of the call; log-decays, sequences and scale are taken from it.
        operands: Queries, keys and values of this direction of time.
        out: ``[B, T, H, V]`` with the heads of the output: o, or with ``reverse`` dv, or float32 parts of dv where heads share
            values, or either in float32 with :class:`Powers`; ``None`` for states alone.
        states: Empty; one tensor of :func:`empty_states`, forwards with the heads of the states and with ``reverse`` with those
            of the output; two of them, the second for the rounding errors of the first as second 16-bit terms;
            or one matrix of :func:`aliased_state_buffers`.
        initial: State from which each sequence starts, ``[N, heads of states, K, V]`` float32: the initial state, or with
            ``reverse`` the gradient of the final one. ``None`` for zeros.
        final: Memory for the state at the end of the pass, float32: the final state ``[N, heads of states, K, V]``, or with
            ``reverse`` what every head of the output gives to the gradient of the initial one, ``[N, H, K, V]``. ``None`` where
            it is not wanted.
        factors: Factors of :class:`Rescaled` if the values are a scaled gradient: ``initial`` is scaled by the first, and
            ``out`` and ``final`` by the second. Or a table of :class:`Powers`. ``None`` if nothing was scaled.
        sums: Sums of the segments of T, if they are known. By default the pass chooses segments, and sums them first.
        turns: Flag that loads, preparing and multiplying take turns, for a control (TURNS in kernels/hopper_chunk_state.py).
    """
    from onelaunch.ops.gla.kernels.hopper_chunk_state import chunk_state_kernel

    _, length, most, keys, values = call.sizes
    output, store_states = out is not None, bool(states)
    configuration = configured(
        call, operands, output=output, store_states=store_states, split=store_states or final is not None, sums=sums
    )
    heads, cut = configuration.heads, configuration.cut
    padded, rows = padded_keys(keys), padded_values(keys, values)
    key_boxes, value_boxes = Boxes(CHUNK, padded, padded), Boxes(CHUNK, PANEL, rows)
    tiles = pass_tiles(
        keys, configuration.groups, scalar=call.scalar, wide=_has_wide_decays(call), store_states=store_states, output=output
    )
    sources = _sources(call, operands)
    summed = cut.count > 1 and not cut.recompute
    if summed and sums is None:
        sums = sum_segments(call, operands, configuration, sources, turns=turns)
    queries = None if out is None or operands.queries is None else boxes(key_boxes, operands.queries)[0]
    # Float32 parts of a gradient are always stored from registers.
    leave = "registers" if out is not None and out.dtype is torch.float32 else tiles.leave
    target = None if out is None or leave == "registers" else targets(value_boxes, out)[0]
    in_aliased_buffer = store_states and states[0].dim() == 2
    stored = [described(_rows_of_states(each), [PANEL, padded]) for each in states] if tiles.staged else states
    Launch(
        chunk_state_kernel, (call.sequence_count * heads * configuration.slices * cut.count,),
        queries, *sources, out, target, initial, final, *(*stored, None, None)[:2],
        *(sums if summed and sums is not None else (None, None)), factors, call.sequences.offsets, length, heads, cut.count,
        cut.share if cut.recompute else configuration.segment_steps(length), call.scale, values,
        0 if out is None else pitch_of(out), mma=Mma.WIDEST, LIMIT=LIMITS[call.q.dtype], OUTPUT=output,
        STORE_STATES=store_states, STAGED=store_states and tiles.staged, ALIASED=in_aliased_buffer, SEGMENTED=summed,
        RECOMPUTE=cut.recompute, SCORES=tiles.scores, LEAVE=leave, SHARED=_sharing(call, operands, heads),
        FACTORS=_factor_pitch(factors, ratio(most, heads)), TURNS=turns, **tiles.options(), **configuration.options,
    ).run()  # fmt: skip


def _factor_pitch(factors: torch.Tensor | None, group: int) -> int:
    """Return the constant FACTORS of kernels with a CTA for every ``group`` heads of the output; see ``scaled_back``."""
    return 0 if factors is None or factors.dim() == 1 else factors.shape[-1] * group


def _has_wide_decays(call: Attention) -> bool:
    """Return whether log-decays are float32 and one per channel."""
    return not call.scalar and call.g.dtype is torch.float32


def _sharing(call: Attention, operands: PassOperands, heads: int) -> tuple[int, ...]:
    """Return how many of ``heads`` heads of a grid share a head of queries, keys, values, log-decays and states.

    It is the constant SHARED of the kernels, see ``head_of`` in kernels/hopper_tiles.py. Without queries their number is 1.
    """
    tensors = (operands.queries, operands.keys, operands.values, call.g)
    return *(1 if each is None else ratio(heads, each.shape[2]) for each in tensors), ratio(heads, call.heads.state)


def empty_states(call: Attention, count: int, heads: int | None = None) -> list[torch.Tensor]:
    """Allocate ``count`` tensors of a state per chunk, ``[slots, H, V, K]`` with V and K as padding.py pads them.

    H is ``heads``, by default the number of heads of the states.
    """
    *_, keys, values = call.sizes
    shape = (call.slots, call.heads.state if heads is None else heads, padded_values(keys, values), padded_keys(keys))
    return [torch.empty(shape, dtype=call.q.dtype, device=call.q.device) for _ in range(count)]


def forward(
    call: Attention,
    states: list[torch.Tensor] | None = None,
    final: torch.Tensor | None = None,
    *,
    sums: SegmentSums | None = None,
    turns: bool = False,
    powers: Powers | None = None,
) -> torch.Tensor:
    """Compute ``o [B, T, H, V]``; fill ``states`` for :func:`backward` and the final state ``[N, H, K, V]``, where given.

    ``sums`` are those of :func:`sum_segments` if they are known. With ``turns`` loads, preparing and multiplying take turns (the
    ablation ``hopper_in_turns``). ``o`` is float32 with ``powers``, by which results are multiplied.
    """
    out = empty_output(call) if powers is None else empty_parts(call.v, call.heads.output)
    operands = PassOperands(call.q, call.k, call.v, reverse=False)
    factors = None if powers is None else powers.forward
    _state_pass(
        call, operands, out, states or [], initial=call.sequences.initial, final=final, factors=factors, sums=sums, turns=turns
    )  # fmt: skip
    return out


def computed_states(
    call: Attention, into: list[torch.Tensor] | None = None, *, sums: SegmentSums | None = None, factors: Any = None,
    turns: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the state that enters each chunk, for :func:`backward`, from the inputs alone.

    One dg per head is a sum over a whole state, in which the state's rounding would show, as it would in a float32 dg of strong
    decay (kernels/hopper_gradients.py): there are two tensors of 16-bit terms then.

    Args:
        call: Tensors of the forward pass.
        into: Matrix of :func:`aliased_state_buffers`; new memory by default.
        sums: Sums of the segments, if they are known.
        factors: Table of :class:`Powers`.
        turns: See :func:`forward`.
    """
    states = empty_states(call, 2 if call.scalar or _has_wide_decays(call) else 1) if into is None else into
    by_keys = PassOperands(None, call.k, call.v, reverse=False)
    _state_pass(call, by_keys, None, states, initial=call.sequences.initial, factors=factors, sums=sums, turns=turns)
    return states


def _parts_of(call: Attention, gradient: torch.Tensor) -> torch.Tensor:
    """Return the tensor that kernels write for a gradient ``[B, T, heads, X]``: itself, or float32 parts from every head.

    Parts ``[B, T, H, X]`` are written where several of the H heads of the output share a head; see :func:`_add_parts`.
    """
    return gradient if gradient.shape[2] == call.heads.output else empty_parts(gradient, call.heads.output)


def _add_parts(*pairs: tuple[torch.Tensor | None, torch.Tensor | None]) -> None:
    """Fill each gradient with the sums of its parts, rounded once. A gradient that was written itself is left as it is."""
    for parts, gradient in pairs:
        if parts is not None and gradient is not None and parts is not gradient:
            sum_heads(parts, gradient)


_GRADIENT_WARPS = 4
"""Warps of a CTA that computes gradients of a chunk: one warpgroup, so that an SM holds two CTAs."""


def backward(
    call: Attention,
    do: torch.Tensor,
    into: Into | None = None,
    normalizer: float | None = None,
    states: list[torch.Tensor] | None = None,
    dfinal: torch.Tensor | None = None,
    *,
    sums: SegmentSums | None = None,
    turns: bool = False,
    powers: Powers | None = None,
    want_initial: bool = True,
) -> Gradients:
    """Compute the gradients of q, k, v, g and the initial state from those of ``o`` and of the final state.

    A float16 ``do`` is scaled first, and the kernels scale the gradients back before they round them (kernels/rescale.py), so
    that no product of gradients leaves the range of float16.

    The pass back in time starts from the gradient of the final state, and ends with that of the initial state. In between it
    leaves the gradient of each chunk's final state, with which the gradients of log-decays are complete: they need no term of
    their own for the final state.

    Gradients are linear in the gradient of a head of ``o``. Of a head that several heads of the output share, the kernels
    store what each of these gives to it, in float32, and the sum is rounded once.

    Args:
        call: Tensors of the forward pass.
        do: Gradient of ``o``, ``[B, T, H, V]``.
        into: Destinations of the gradients of q, k and v; new memory by default.
        normalizer: Number by which the log-decays were divided when they were made, ``g = logsigmoid(z) / normalizer``, one
            per channel. The gradient of z then takes the place of that of g.
        states: States that :func:`forward` filled. A state pass computes them again from the inputs if there are none, or only
            one tensor of them where log-decays are float32 and one per channel, which take two terms.
        dfinal: Gradient of the final state, ``[N, H, K, V]`` float32; ``None`` for zeros.
        sums: Sums of the segments of the pass back in time, if they are known; not of a float16 ``do``, which is scaled.
        turns: Flag that in both passes loads, preparing and multiplying take turns. The kernel of dq, dk and dg has one role.
        powers: Powers by which the gradients are multiplied, where all tensors are scaled copies, ``do`` among them. They are
            float32 then, and there is neither ``into`` nor ``states``.
        want_initial: Flag that the gradient of the initial state is wanted, if there is one.
    """
    from onelaunch.ops.gla.kernels.hopper_gradients import gradients_kernel

    batch, length, heads, keys, values = call.sizes
    q, k, v, do = call.q, call.k, call.v, inner_contiguous(do)
    factors = None if powers is None else powers.backward
    if q.dtype is torch.float16 and powers is None:
        do, factors = rescaled(call, do, dfinal)
    to_q, to_k, to_v = into or (None, None, None)
    aliased = aliased_state_buffers(call, into) if states is None else None
    wide_decays = _has_wide_decays(call)
    if states is None or (wide_decays and len(states) == 1):
        of_states = None if powers is None else powers.forward
        states = computed_states(call, None if aliased is None else [aliased[0]], factors=of_states, turns=turns)
    dstates = empty_states(call, 2 if wide_decays else 1, heads) if aliased is None else [aliased[1]]
    if powers is None:
        dq, dk, dv = output_like(q, to_q), output_like(k, to_k), output_like(v, to_v)
    else:
        dq, dk, dv = (empty_parts(each, each.shape[2]) for each in (q, k, v))
    dinitial = empty_final(call, wanted=want_initial and call.sequences.initial is not None)
    by_rows = dinitial.flatten(2).unsqueeze(1) if dinitial.numel() else None  # [N, 1, heads of states, K V]
    v_parts, initial_parts = _parts_of(call, dv), None if by_rows is None else _parts_of(call, by_rows)
    _state_pass(
        call, PassOperands(k, q, do, reverse=True), v_parts, dstates,
        initial=None if dfinal is None else dfinal.contiguous(), final=initial_parts, factors=factors, sums=sums,
        turns=turns,
    )  # fmt: skip
    _add_parts((v_parts, dv), (initial_parts, by_rows))
    del v_parts, initial_parts
    panels, rows, held = key_panels(keys), padded_values(keys, values), PANEL * value_groups(keys, values)
    # Two terms of S and dS in blocks of 64 values let two CTAs fit on an SM, as one term in blocks of 128 does.
    block = PANEL if rows % (2 * PANEL) or wide_decays else 2 * PANEL
    square, wide = Boxes(CHUNK, PANEL, panels * PANEL), Boxes(CHUNK, block, rows)
    tall = [block if aliased is None else PANEL, PANEL]
    if call.scalar:  # one part for each panel of channels, added up below
        dg = torch.empty((panels, batch, length, heads), dtype=torch.float32, device=q.device)
        dg_parts, log_decay, described_decays = dg, call.g.contiguous(), None
    else:
        dg = output_like(call.g, None if aliased is None else dstates[0][:, : heads * keys].view(call.g.shape))
        dg_parts, log_decay, described_decays = _parts_of(call, dg), None, boxes(square, call.g)[0]
    parts = (_parts_of(call, dq), _parts_of(call, dk), dg_parts)
    # TMA writes gradients in the dtype of the tiles from which they leave: not float32 ones of 16-bit copies.
    whole = (parts[0] is dq and powers is None, parts[1] is dk and powers is None, parts[2] is dg and not call.scalar)
    written = (targets(square, each)[0] if is_whole else None for each, is_whole in zip(parts, whole, strict=True))
    # S, dS, and the second terms of S and of dS, if there are any
    terms = (*states[:1], *dstates[:1], *states[1:], *dstates[1:])
    described_states = [described(_rows_of_states(each), tall) for each in terms]
    offsets = call.sequences.offsets
    Launch(
        gradients_kernel, (call.slots * heads * panels,),
        *boxes(square, q, k), described_decays, *boxes(wide, v, do), *(*described_states, None, None)[:4],
        log_decay, *parts, *written, factors, offsets,
        length, heads, call.sequence_count, batch * length, call.scale, values, pitch_of(dq if whole[0] else dk),
        mma=Mma.WIDEST, SHARED=_sharing(call, PassOperands(q, k, v, reverse=False), heads),
        KEYS=keys, BV=block, HELD=held if wide_decays else block, BISECTION_STEPS=call.sequences.bisection_steps(),
        LIMIT=LIMITS[q.dtype], NORMALIZER=normalizer, ALIASED=aliased is not None, PACKED=offsets is not None,
        FACTORS=_factor_pitch(factors, 1),
        num_warps=_GRADIENT_WARPS,
    ).run()  # fmt: skip
    _add_parts((parts[0], dq), (parts[1], dk))
    if call.scalar:
        dg = dg.sum(0) if call.heads.groups.g == 1 else dg.unflatten(3, (-1, call.heads.groups.g)).sum((0, 4))
        return Gradients(dq, dk, dv, dg.to(call.g.dtype), dinitial)
    _add_parts((dg_parts, dg))
    return Gradients(dq, dk, dv, dg, dinitial)
