"""Launches of gla's kernels for Hopper GPUs: walks along time, in parts that fill the chip, and gradients of all chunks."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.kernels.hopper import addressable
from onelaunch.kernels.tma import described
from onelaunch.ops.gla.launch import CHUNK, Attention, Gradients, Into, empty_final, pitch_of, room_like

PANEL = 64
"""Channels that are copied at once."""

WHOLE = 1 << 30
"""Steps of a part that holds any sequence; a multiple of CHUNK."""

LIMITS = {torch.bfloat16: 40.0, torch.float16: 6.0}
"""Sums of log-decays from a chunk's middle up to which one product serves all pairs: its factors must fit the dtype."""

PART_COST = 0.5
"""What a walk that only sums costs beside one that reads: it precedes the other where T is in parts."""


@dataclass(frozen=True, slots=True)
class WalkTiles:
    """How a program walks: warpgroups of 64 values each, tiles in flight, places for scores, whether kept states leave through
    shared memory, registers of its groups of warps.
    """

    groups: int
    stages: int = 3
    scores: int = 3
    staged: bool = True
    multiply_registers: int = 160
    decay_registers: int = 184

    def options(self, multiply: str, decay: str) -> dict[str, int]:
        """Constants of a kernel that calls the two kinds of warps so."""
        return {
            "GROUPS": self.groups, "STAGES": self.stages,
            f"{multiply}_REGISTERS": self.multiply_registers, f"{decay}_REGISTERS": self.decay_registers,
        }  # fmt: skip


@functools.cache
def walk_tiles(keys: int, values: int, *, scalar: bool, keep: bool, read: bool) -> WalkTiles:
    """Two groups where values allow it: they share what is prepared. Registers: as many as leave no products waiting.

    Kept states leave through shared memory, for which a walk that reads as well gives up a stage.
    """
    stages = 2 if keep and read else 3
    if keys > 2 * PANEL:
        return WalkTiles(1, stages=2, scores=1, staged=not read, decay_registers=240)
    if values % (2 * PANEL):
        return WalkTiles(1, stages, stages, decay_registers=232)
    if scalar:
        return WalkTiles(2, stages, stages, multiply_registers=184, decay_registers=136)
    return WalkTiles(2, stages, stages)


@functools.cache
def sum_tiles(keys: int, values: int) -> WalkTiles:
    """The same where parts are only summed: nothing is read, so more tiles fit."""
    if keys > 2 * PANEL:
        return WalkTiles(1, stages=2, decay_registers=240)
    return WalkTiles(1, stages=4, decay_registers=232) if values % (2 * PANEL) else WalkTiles(2, stages=4)


@functools.lru_cache(maxsize=1024)
def parts_of(programs: int, chunks: int, multiprocessors: int) -> int:
    """Into how many parts T is cut: one, unless processors would idle for longer than it costs to sum the parts up first."""

    def duration(parts: int) -> float:
        rounds = cdiv(programs * parts, multiprocessors)
        return rounds * cdiv(chunks, parts) * (1.0 if parts == 1 else 1.0 + PART_COST)

    return min((parts for parts in (1, 2, 3, 4, 6, 8, 12, 16) if parts <= max(chunks // 4, 1)), key=duration)


class Walk(NamedTuple):
    """A direction of time: who reads and who adds."""

    readers: torch.Tensor | None
    adders: torch.Tensor
    values: torch.Tensor
    reverse: bool


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """``[B, T, H, X]`` as ``[B T, H X]`` for the copy engine: copied where strides or address do not allow it."""
    return addressable(tensor.flatten(0, 1).flatten(1))


def boxes(box: list[int], *tensors: torch.Tensor) -> list[Any]:
    """Descriptors of ``[B, T, H, X]`` tensors, each moved in boxes of this size."""
    return [described(matrix(tensor), box) for tensor in tensors]


def targets(box: list[int], *tensors: torch.Tensor) -> list[Any]:
    """The same of tensors that are written to: none of them may be a copy."""
    for tensor in tensors:
        flat = tensor.flatten(0, 1).flatten(1)
        if flat.data_ptr() != tensor.data_ptr() or addressable(flat) is not flat:
            raise ValueError(f"the copy engine cannot write {list(tensor.shape)} of strides {tensor.stride()}")
    return boxes(box, *tensors)


def rows_of_states(states: torch.Tensor) -> torch.Tensor:
    """``[rows, K]``, or the matrix that states are spread in."""
    return states if states.dim() == 2 else states.flatten(0, 2)


def lend_room(call: Attention, into: Into | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Matrices ``[B T, 2 H K]`` in which states and their gradients can lie until dq, dk and dg are written there.

    For V of two chunks a state is as large as dq and dk of its chunk and head: its first 64 rows lie in the place of dq, the
    others in that of dk. The program that writes those has read them before, and no other one reads them. Gradients of states
    lie so in a matrix of their own, of which dg takes the first half. ``None`` unless dq and dk lie beside each other, all
    chunks are whole, and states leave through shared memory.
    """
    batch, length, heads, keys, values = call.sizes
    if into is None or call.scalar or call.sequences.offsets is not None or length % CHUNK:
        return None
    width, gap = heads * keys, into.k.data_ptr() - into.q.data_ptr()
    if values != 2 * CHUNK or keys > 2 * PANEL or gap != width * into.q.element_size():
        return None
    both = into.q.as_strided((batch * length, 2 * width), (pitch_of(into.q), 1))
    return both, torch.empty_like(both, memory_format=torch.contiguous_format)


def walk(call: Attention, way: Walk, out: torch.Tensor | None, states: list[torch.Tensor]) -> None:
    """Fill ``out`` (what readers see) and ``states`` (what enters each chunk, ``[slots, H, V, K]``), whichever is given.

    A second tensor of states takes what rounding took of the first. A matrix takes them spread, see :func:`lend_room`.
    """
    from onelaunch.ops.gla.hopper_sum_kernels import sum_kernel
    from onelaunch.ops.gla.hopper_walk_kernels import walk_kernel

    _, length, heads, keys, values = call.sizes
    sequences, offsets = call.sequence_count, call.sequences.offsets
    first = None if way.reverse else call.sequences.initial
    tiles = walk_tiles(keys, values, scalar=call.scalar, keep=bool(states), read=out is not None)
    slices = values // (PANEL * tiles.groups)
    mean_length = length if offsets is None else cdiv(length, sequences)
    parts = parts_of(sequences * heads * slices, cdiv(mean_length, CHUNK), processors(way.adders.device))
    sources = (*boxes([CHUNK, keys], way.adders), *boxes([CHUNK, PANEL], way.values))
    decays = (None, call.g.contiguous()) if call.scalar else (*boxes([CHUNK, keys], call.g), None)
    part_steps = cdiv(cdiv(length, CHUNK), parts) * CHUNK if parts > 1 else WHOLE
    shared: dict[str, Any] = {
        "SLICES": slices, "PACKED": offsets is not None, "REVERSE": way.reverse,
        "EXACT": not call.scalar or bool(states), "num_warps": 4,
    }  # fmt: skip
    grid = (sequences * heads * slices * parts,)
    sums: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if parts > 1:
        device = way.adders.device
        sums = (
            torch.empty((sequences, heads, parts, values, keys), dtype=torch.float32, device=device),
            torch.empty((sequences, heads, parts, keys), dtype=torch.float32, device=device),
        )
        sum_kernel[grid](
            *sources, *decays, *sums, offsets, length, heads, parts, part_steps, call.scale, values,
            **sum_tiles(keys, values).options("ADD", "FADE"), **shared,
        )  # fmt: skip
    readers = None if out is None or way.readers is None else boxes([CHUNK, keys], way.readers)[0]
    target = None if out is None else targets([CHUNK, PANEL], out)[0]
    spread = bool(states) and states[0].dim() == 2
    kept = [described(rows_of_states(each), [PANEL, keys]) for each in states] if tiles.staged else states
    walk_kernel[grid](
        readers, *sources, *decays, out, target, first, *(*kept, None, None)[:2], *sums, offsets, length, heads, parts,
        part_steps, call.scale, values, 0 if out is None else pitch_of(out),
        LIMIT=LIMITS[call.q.dtype], READ=out is not None, KEEP=bool(states), STAGED=bool(states) and tiles.staged,
        SPREAD=spread, INITIAL=first is not None, PARTS=parts > 1, SCORES=tiles.scores, **tiles.options("ATTEND", "PREPARE"),
        **shared,
    )  # fmt: skip


def empty_states(call: Attention, count: int) -> list[torch.Tensor]:
    """Room for so many tensors of a state per chunk, ``[slots, H, V, K]``."""
    _, _, heads, keys, values = call.sizes
    shape = (call.slots, heads, values, keys)
    return [torch.empty(shape, dtype=call.q.dtype, device=call.q.device) for _ in range(count)]


def forward(call: Attention, states: list[torch.Tensor] | None = None) -> torch.Tensor:
    """``o [B, T, H, V]``; fills ``states``, where given, for :func:`backward`."""
    out = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    walk(call, Walk(call.q, call.k, call.v, reverse=False), out, states or [])
    return out


GRADIENT_WARPS = 4
"""Of a program that computes gradients of a chunk: one warpgroup, so that a processor holds two programs."""


def backward(
    call: Attention,
    do: torch.Tensor,
    into: Into | None = None,
    normalizer: float | None = None,
    states: list[torch.Tensor] | None = None,
) -> Gradients:
    """Gradients of q, k, v and g from that of ``o``.

    Those of q, k and v go where ``into`` says. With a ``normalizer`` log-decays, one for each channel, were made by ``g =
    logsigmoid(z) / normalizer``, and the gradient of z takes the place of that of g. ``states`` are those that
    :func:`forward` filled; without them a walk makes them again, from nothing but the inputs.
    """
    from onelaunch.ops.gla.hopper_gradient_kernels import gradients_kernel

    batch, length, heads, keys, values = call.sizes
    q, k, v, do = call.q, call.k, call.v, inner_contiguous(do)
    to_q, to_k, to_v = into or (None, None, None)
    lent = lend_room(call, into) if states is None else None
    if states is None:
        # one decay of a head sums over all of a state: its rounding would show, see hopper_gradient_kernels.py
        states = empty_states(call, 2 if call.scalar else 1) if lent is None else [lent[0]]
        walk(call, Walk(None, k, v, reverse=False), None, states)
    dstates = empty_states(call, 1)[0] if lent is None else lent[1]
    dq, dk, dv = room_like(q, to_q), room_like(k, to_k), room_like(v, to_v)
    walk(call, Walk(k, q, do, reverse=True), dv, [dstates])
    panels, block = keys // PANEL, PANEL if values % (2 * PANEL) else 2 * PANEL
    square, wide, tall = [CHUNK, PANEL], [CHUNK, block], [block if lent is None else PANEL, PANEL]
    if call.scalar:  # a part for each panel
        dg = torch.empty((panels, batch, length, heads), dtype=torch.float32, device=q.device)
        log_decay, described_decays, written = call.g.contiguous(), None, (*targets(square, dq, dk), None)
    else:
        dg = room_like(call.g, None if lent is None else dstates[:, : heads * keys].view(call.g.shape))
        log_decay, described_decays, written = None, boxes(square, call.g)[0], targets(square, dq, dk, dg)
    held = [described(rows_of_states(x), tall) for x in (*states[:1], dstates, *states[1:])]
    offsets = call.sequences.offsets
    gradients_kernel[(call.slots * heads * panels,)](
        *boxes(square, q, k), described_decays, *boxes(wide, v, do), *(*held, None)[:3], log_decay, dq, dk, dg, *written,
        offsets,
        length, heads, call.sequence_count, batch * length, call.scale, values, pitch_of(dq),
        PANELS=panels, STEPS=call.sequences.bisection_steps(), LIMIT=LIMITS[q.dtype],
        NORMALIZER=normalizer, SPREAD=lent is not None, PACKED=offsets is not None,
        num_warps=GRADIENT_WARPS,
    )  # fmt: skip
    if call.scalar:
        dg = dg.sum(0).to(call.g.dtype)
    return Gradients(dq, dk, dv, dg, empty_final(call, wanted=False))
