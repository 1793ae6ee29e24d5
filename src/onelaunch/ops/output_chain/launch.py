"""Launches of ``output_chain``'s portable kernels: how rows are cut, and what a kernel is handed."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.ops.output_chain import kernels
from onelaunch.ops.output_chain.forward import Operands

ELEMENTS, GRADIENT_ELEMENTS = 4096, 2048
"""Of a program's tile, forward and backward: 32 and 16 a thread with four warps; not measured yet."""

TOKENS = 256
"""Most of a tile: each costs registers for its addresses, whatever the size of heads."""

WARPS = 4

PROGRAMS = 4
"""Of a backward launch, for each processor: so many rows of partial sums are added up behind it; not measured yet."""

PROCESSORS = 132
"""Where there is no GPU: an H200's."""


def tile_of(rows: int, values: int, elements: int) -> dict[str, int]:
    """V, BV and BM: whole heads of as many tokens as a program's tile holds, but no more than there are."""
    block = triton.next_power_of_2(values)
    return {"V": values, "BV": block, "BM": min(max(elements // block, 1), TOKENS, triton.next_power_of_2(max(rows, 1)))}


def tiles(rows: int, heads: int, values: int, elements: int) -> int:
    """Of all tokens and heads."""
    return cdiv(rows, tile_of(rows, values, elements)["BM"]) * heads


@functools.lru_cache(maxsize=256)
def device_processors(device: torch.device) -> int:
    """Of a GPU, or an H200's."""
    return processors(device) if device.type == "cuda" else PROCESSORS


def steps_of(count: int, device: torch.device) -> int:
    """Tiles of a program of a backward launch."""
    return cdiv(count, PROGRAMS * device_processors(device))


def norm_gate(given: Operands, eps: float, *, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``a [M, H * V]``, and for ``keep`` rstd ``[M, H]`` float32."""
    h, gate = inner_contiguous(given.h), None if given.gate is None else inner_contiguous(given.gate)
    rows, heads = h.shape[0], given.heads
    a = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    rstd = h.new_empty(rows, heads, dtype=torch.float32) if keep else None
    kernels.norm_gate_kernel[(tiles(rows, heads, given.values, ELEMENTS),)](
        h, gate, given.norm_weight, a, rstd, rows, heads, h.stride(0), 0 if gate is None else gate.stride(0), eps,
        ACTIVATED=given.activated, **tile_of(rows, given.values, ELEMENTS), num_warps=WARPS,
    )  # fmt: skip
    return a, rstd


class Gradients(NamedTuple):
    """What the launch of the backward pass makes; ``None`` where not asked for."""

    a: torch.Tensor | None
    """``[M, H * V]``"""
    dh: torch.Tensor | None
    """``[M, H * V]``"""
    dgate: torch.Tensor | None
    """``[M, H * V]``"""
    dnorm_weight: torch.Tensor | None
    """``[V]`` float32."""


def norm_gate_gradients(
    da: torch.Tensor | None, given: Operands, rstd: torch.Tensor, *, want_a: bool, into: torch.Tensor | None = None
) -> Gradients:
    """``a`` again, and gradients where there is a ``da [M, H * V]``: those of what is given.

    That of the gate goes ``into`` columns of another matrix, ``[M, H * V]`` with rows a pitch apart, or to new memory.
    """
    h, gate = inner_contiguous(given.h), None if given.gate is None else inner_contiguous(given.gate)
    da = None if da is None else inner_contiguous(da)
    (rows, inner), heads, values = h.shape, given.heads, given.values
    count = tiles(rows, heads, values, GRADIENT_ELEMENTS)
    steps = steps_of(count, h.device)
    programs = cdiv(count, steps)

    def room(wanted: bool) -> Any:
        return torch.empty((rows, inner), dtype=h.dtype, device=h.device) if wanted else None

    a, dh = room(want_a), room(da is not None)
    dgate = room(da is not None and gate is not None) if into is None else into
    partials = None
    if da is not None and given.norm_weight is not None:
        partials = h.new_empty(programs, values, dtype=torch.float32)
    kernels.norm_gate_gradients_kernel[(programs,)](
        da, h, gate, given.norm_weight, rstd, a, dh, dgate, partials, rows, heads, steps,
        0 if da is None else da.stride(0), h.stride(0), 0 if gate is None else gate.stride(0),
        0 if dgate is None else dgate.stride(0),
        ACTIVATED=given.activated, **tile_of(rows, values, GRADIENT_ELEMENTS), num_warps=WARPS,
    )  # fmt: skip
    return Gradients(a, dh, dgate, None if partials is None else partials.sum(0))
