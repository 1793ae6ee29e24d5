"""Launches of ``output_chain``'s portable kernels: how rows are cut, and what a kernel is handed."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch

from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv, inner_contiguous, power_of_2
from onelaunch.launch.launch import Launch
from onelaunch.ops.output_chain.kernels.norm_gate import norm_gate_gradients_kernel, norm_gate_kernel


class Operands(NamedTuple):
    """Operands of a launch, as rows of tokens of any strides."""

    h: torch.Tensor
    """``[M, H * V]``"""
    gate: torch.Tensor | None
    """``[M, H * V]``"""
    norm_weight: torch.Tensor | None
    """``[V]``, contiguous."""
    heads: int
    activated: bool

    @classmethod
    def of(cls, h: torch.Tensor, gate: torch.Tensor | None, norm_weight: torch.Tensor | None, activated: bool) -> Operands:
        """Return them from the operation's arguments."""
        heads, values = h.shape[-2:]
        flat = None if gate is None else gate.reshape(-1, heads * values)
        weight = None if norm_weight is None else norm_weight.contiguous()
        return cls(h.reshape(-1, heads * values), flat, weight, heads, activated)

    @property
    def values(self) -> int:
        """Return V, the channels of a head."""
        return self.h.shape[1] // self.heads


Made: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""``out [M, D]``, and ``rstd [M, H]`` float32 where it is to be kept."""

ELEMENTS, GRADIENT_ELEMENTS = 4096, 2048
"""Elements of a CTA's tile, forward and backward: 32 and 16 a thread with four warps; not measured yet."""

TOKENS = 256
"""Most tokens of a tile: each costs registers for its addresses, whatever the size of heads."""

WARPS = 4

PROGRAMS = 4
"""CTAs of a backward launch for each SM: so many rows of partial sums are added up behind it; not measured yet."""


def tile_of(rows: int, values: int, elements: int) -> dict[str, Any]:
    """Return V, BV and BM: whole heads of as many tokens as a CTA's tile holds, but no more than there are."""
    block = power_of_2(values)
    return {"V": values, "BV": block, "BM": min(max(elements // block, 1), TOKENS, power_of_2(max(rows, 1)))}


def tiles(rows: int, heads: int, values: int, elements: int) -> int:
    """Return the number of tiles of all tokens and heads."""
    return cdiv(rows, tile_of(rows, values, elements)["BM"]) * heads


def steps_of(count: int, device: torch.device) -> int:
    """Return the number of tiles that a CTA of a backward launch takes, one after another."""
    return cdiv(count, PROGRAMS * processors(device))


def norm_gate(given: Operands, eps: float, *, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``a [M, H * V]``, and for ``keep`` rstd ``[M, H]`` float32."""
    h, gate = inner_contiguous(given.h), None if given.gate is None else inner_contiguous(given.gate)
    rows, heads = h.shape[0], given.heads
    a = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    rstd = h.new_empty(rows, heads, dtype=torch.float32) if keep else None
    Launch(
        norm_gate_kernel, (tiles(rows, heads, given.values, ELEMENTS),),
        h, gate, given.norm_weight, a, rstd, rows, heads, h.stride(0), 0 if gate is None else gate.stride(0), eps,
        ACTIVATED=given.activated, **tile_of(rows, given.values, ELEMENTS), num_warps=WARPS,
    ).run()  # fmt: skip
    return a, rstd


class Gradients(NamedTuple):
    """Results of the launch of the backward pass; ``None`` where not asked for."""

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
    """Return ``a`` again, and where there is a ``da [M, H * V]`` the gradients of all tensors that are given.

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
    Launch(
        norm_gate_gradients_kernel, (programs,),
        da, h, gate, given.norm_weight, rstd, a, dh, dgate, partials, rows, heads, steps,
        0 if da is None else da.stride(0), h.stride(0), 0 if gate is None else gate.stride(0),
        0 if dgate is None else dgate.stride(0),
        ACTIVATED=given.activated, **tile_of(rows, values, GRADIENT_ELEMENTS), num_warps=WARPS,
    ).run()  # fmt: skip
    return Gradients(a, dh, dgate, None if partials is None else partials.sum(0))
