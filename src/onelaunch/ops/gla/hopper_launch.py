"""Launches of gla's kernels for Hopper GPUs: walks along time, in parts that fill the chip, and gradients of all chunks."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from onelaunch.hardware import processors
from onelaunch.ops.copy_engine import addressable, described
from onelaunch.ops.gated_scan.launch import cdiv
from onelaunch.ops.gla.launch import CHUNK, Attention, Gradients, empty_final, inner_contiguous

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
    """How a program walks: warpgroups of 64 values each, tiles in flight, places for scores, registers of its groups of warps."""

    groups: int
    stages: int = 3
    scores: int = 3
    attend_registers: int = 152
    prepare_registers: int = 200

    def options(self) -> dict[str, int]:
        """Constants of the kernel."""
        return {
            "GROUPS": self.groups, "STAGES": self.stages, "SCORES": self.scores,
            "ATTEND_REGISTERS": self.attend_registers, "PREPARE_REGISTERS": self.prepare_registers,
        }  # fmt: skip


@functools.cache
def walk_tiles(keys: int, values: int, *, scalar: bool, keep: bool, read: bool) -> WalkTiles:
    """Two groups where values allow it: they share what is prepared. Registers: as many as leave no products waiting."""
    if keys > 2 * PANEL:
        return WalkTiles(1, stages=2, scores=1, prepare_registers=240)
    if values % (2 * PANEL):
        return WalkTiles(1, prepare_registers=232)
    tiles = WalkTiles(2)
    if scalar:
        return replace(tiles, attend_registers=184, prepare_registers=136)
    return replace(tiles, attend_registers=168, prepare_registers=168) if keep or not read else tiles


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


def walk(call: Attention, way: Walk, out: torch.Tensor | None, states: torch.Tensor | None) -> None:
    """Fill ``out`` (what readers see) and ``states`` (what enters each chunk, ``[slots, H, V, K]``), whichever is given."""
    from onelaunch.ops.gla.hopper_walk_kernels import walk_kernel

    _, length, heads, keys, values = call.sizes
    sequences, offsets = call.sequence_count, call.sequences.offsets
    first = None if way.reverse else call.sequences.initial
    tiles = walk_tiles(keys, values, scalar=call.scalar, keep=states is not None, read=out is not None)
    slices = values // (PANEL * tiles.groups)
    mean_length = length if offsets is None else cdiv(length, sequences)
    parts = parts_of(sequences * heads * slices, cdiv(mean_length, CHUNK), processors(way.adders.device))
    sources = (*boxes([CHUNK, keys], way.adders), *boxes([CHUNK, PANEL], way.values))
    decays = (None, call.g.contiguous()) if call.scalar else (*boxes([CHUNK, keys], call.g), None)
    sums: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    flags: dict[str, Any] = {
        "SLICES": slices, "SEGMENT_STEPS": cdiv(cdiv(length, CHUNK), parts) * CHUNK if parts > 1 else WHOLE,
        "LIMIT": LIMITS[call.q.dtype], "PACKED": offsets is not None, "REVERSE": way.reverse,
        "EXACT": not call.scalar or states is not None, "num_warps": 4,
    }  # fmt: skip

    def launch(tiles: WalkTiles, initial: torch.Tensor | None, out: torch.Tensor | None, states: torch.Tensor | None) -> None:
        readers = None if out is None or way.readers is None else boxes([CHUNK, keys], way.readers)[0]
        target = None if out is None else boxes([CHUNK, PANEL], out)[0]
        walk_kernel[(sequences * heads * slices * parts,)](
            readers, *sources, *decays, out, target, initial, states, *sums, offsets, length, heads, parts, call.scale, values,
            READ=out is not None, KEEP=states is not None, INITIAL=initial is not None,
            PARTS=parts > 1 and (out is not None or states is not None), **tiles.options(), **flags,
        )  # fmt: skip

    if parts > 1:
        sums = (
            torch.empty((sequences, heads, parts, values, keys), device=way.adders.device),
            torch.empty((sequences, heads, parts, keys), device=way.adders.device),
        )
        launch(walk_tiles(keys, values, scalar=call.scalar, keep=False, read=False), None, None, None)
    launch(tiles, first, out, states)


def forward(call: Attention) -> torch.Tensor:
    """``o [B, T, H, V]``."""
    out = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    walk(call, Walk(call.q, call.k, call.v, reverse=False), out, None)
    return out


GRADIENT_WARPS = 4
"""Of a program that computes gradients of a chunk: one warpgroup, so that a processor holds two programs."""


def backward(call: Attention, do: torch.Tensor) -> Gradients:
    """Gradients of q, k, v and g from that of ``o``; nothing was kept but the inputs."""
    from onelaunch.ops.gla.hopper_gradient_kernels import gradients_kernel

    batch, length, heads, keys, values = call.sizes
    q, k, v, do = call.q, call.k, call.v, inner_contiguous(do)
    device, dtype = q.device, q.dtype
    states, dstates = (torch.empty((call.slots, heads, values, keys), dtype=dtype, device=device) for _ in range(2))
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=device) for x in (q, k, v))
    walk(call, Walk(None, k, v, reverse=False), None, states)
    walk(call, Walk(k, q, do, reverse=True), dv, dstates)
    panels, block = keys // PANEL, PANEL if values % (2 * PANEL) else 2 * PANEL
    square, wide, tall = [CHUNK, PANEL], [CHUNK, block], [block, PANEL]
    if call.scalar:  # a part for each panel
        dg = torch.empty((panels, batch, length, heads), device=device)
        log_decay, decays, targets = call.g.contiguous(), None, (*boxes(square, dq, dk), None)
    else:
        dg = torch.empty(call.g.shape, dtype=dtype, device=device)
        log_decay, decays, targets = None, boxes(square, call.g)[0], boxes(square, dq, dk, dg)
    held = (described(x.flatten(0, 2), tall) for x in (states, dstates))
    offsets = call.sequences.offsets
    gradients_kernel[(call.slots * heads * panels,)](
        *boxes(square, q, k), decays, *boxes(wide, v, do), *held, log_decay, dq, dk, dg, *targets, offsets,
        length, heads, call.sequence_count, batch * length, call.scale, values,
        PANELS=panels, STEPS=call.sequences.bisection_steps(), LIMIT=LIMITS[dtype], PACKED=offsets is not None,
        num_warps=GRADIENT_WARPS,
    )  # fmt: skip
    if call.scalar:
        dg = dg.sum(0).to(call.g.dtype)
    return Gradients(dq, dk, dv, dg, empty_final(call, wanted=False))
