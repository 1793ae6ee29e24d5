"""Launches of ``output_chain``'s portable kernels: cut rows into tiles, allocate results, pass pointers.

The variant ``norm_gate`` calls :func:`norm_gate`. :func:`norm_gate_gradients` serves the backward pass of both Triton variants,
and that of ``gla_layer``. Both callers, and the launch in ``launch_prologue.py``, take :class:`Operands`. A predicate in
``variants/triton.py`` asks :func:`tiles`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from onelaunch.device.hardware import is_hopper, processors
from onelaunch.kernels.common.layout import cdiv, inner_contiguous, power_of_2
from onelaunch.launch.launch import Launch
from onelaunch.launch.workspace import counters
from onelaunch.ops.output_chain.kernels.norm_gate import norm_gate_gradients_kernel, norm_gate_kernel


class Operands(NamedTuple):
    """Operands of a launch, flattened to one row per token, with any row pitch."""

    h: torch.Tensor
    """Heads before the norm, ``[M, H * V]``."""
    gate: torch.Tensor | None
    """Gate, ``[M, H * V]``."""
    norm_weight: torch.Tensor | None
    """Weight of the norm, ``[V]``, contiguous."""
    heads: int
    activated: bool
    """Flag that the gate is activated already; otherwise the kernels apply SiLU."""

    @classmethod
    def of(cls, h: torch.Tensor, gate: torch.Tensor | None, norm_weight: torch.Tensor | None, activated: bool) -> Operands:
        """Return the operands of a call with these arguments."""
        heads, values = h.shape[-2:]
        flat = None if gate is None else gate.reshape(-1, heads * values)
        weight = None if norm_weight is None else norm_weight.contiguous()
        return cls(h.reshape(-1, heads * values), flat, weight, heads, activated)

    @property
    def values(self) -> int:
        """Return V, the channels of a head."""
        return self.h.shape[1] // self.heads


class Made(NamedTuple):
    """Results of a forward pass."""

    out: torch.Tensor
    """Result, ``[M, D]``."""
    rstd: torch.Tensor | None
    """Reciprocal root mean square of every head, ``[M, H]`` float32; ``None`` if it is not saved."""
    a: torch.Tensor | None = None
    """Operand of the output projection, ``[M, H * V]``; ``None`` if it was not written."""


_ELEMENTS, GRADIENT_ELEMENTS = 2048, 2048
"""Number of elements of a CTA's tile, forward and backward: 8 per thread with eight warps.

Measured at ten shapes on one H100, CUDA graphs, cold, in us with the product, against 4096 elements and 4 warps forward, and 2048
and 4 backward: forward 10.4 and 11.1 at 8x128x1024, 479.0 and 480.6 at 8x4096x2048; in training 66.8 and 72.6 at 8x128x2048,
546 and 617 at 8x4096x1024.
"""

_ELEMENTS_OF_FEW, _FEW_TILES = 1024, 32
"""Number of elements of a tile of a forward launch with few tiles, and what few is: that many of this size per SM at most."""

_TOKENS = 256
"""Limit on the tokens of a tile: each takes registers for its addresses, whatever the size of heads."""

_WARPS = 8
"""Warps of a CTA of either kernel."""

_SM_REGISTERS = 65_536
"""Registers of an SM of a Hopper GPU."""

_MANY_TILES = 16
"""Number of tiles per SM of a backward launch beyond which it has three CTAs per SM, and up to which it has two.

Each CTA stores a row of partial sums of the norm weight's gradient. Measured on one H100 in training, in us, three against two:
528.9 and 547.4 at 8x4096x1024, 202.8 and 206.7 at 4x1024x2048 (31 tiles per SM), 113.0 and 112.6 at 4x512x2048 (15.5), 66.9 and
65.5 at 8x128x2048 (8).
"""

_NARROW_VALUES = 128
"""Largest number of channels of a head with which three CTAs fit: with the registers that are then left, larger heads spill."""

MOST_STEPS_WITH_SUM = 32
"""Largest number of tiles of a CTA with which the last CTA of a backward launch adds up the rows of partial sums.

Beyond it two launches of PyTorch do. Measured on one H100 in training, CUDA graphs, cold, with the sum against without it: 34.1
and 38.9 us at 8x128x1024, 202.8 and 210.1 at 4x1024x2048 (11 tiles), 400.8 and 409.9 at 4x2048x2048 (21). Larger numbers were
not measured.
"""


def _tile_of(rows: int, values: int, elements: int) -> dict[str, Any]:
    """Return the constants V, BV and BM: a tile holds one head, of as many tokens as fit into ``elements``.

    BV is V rounded up to a power of 2, and BM the number of tokens, of which there are ``rows`` in all.
    """
    block = power_of_2(values)
    return {"V": values, "BV": block, "BM": min(max(elements // block, 1), _TOKENS, power_of_2(max(rows, 1)))}


def tiles(rows: int, heads: int, values: int, elements: int) -> int:
    """Return the number of tiles of all tokens and heads."""
    return cdiv(rows, _tile_of(rows, values, elements)["BM"]) * heads


def _ctas_per_sm(count: int, values: int, device: torch.device) -> int:
    """Return the limit on the CTAs per SM of a backward launch of ``count`` tiles with heads of ``values`` channels."""
    return 3 if count > _MANY_TILES * processors(device) and values <= _NARROW_VALUES else 2


def _steps_of(count: int, values: int, device: torch.device) -> int:
    """Return the number of tiles that a CTA of a backward launch takes, one after another.

    There is at least one tile, since the variants refuse calls without elements.
    """
    return cdiv(count, _ctas_per_sm(count, values, device) * processors(device))


def _registers(h: torch.Tensor, count: int, values: int) -> dict[str, Any]:
    """Return the limit of registers with which all CTAs of a backward launch fit on the SMs of a Hopper GPU.

    Nothing spills with it in 16-bit dtypes. On Blackwell some would.
    """
    if not is_hopper(h.device) or h.dtype == torch.float32:
        return {}
    return {"maxnreg": _SM_REGISTERS // (32 * _WARPS * _ctas_per_sm(count, values, h.device)) // 8 * 8}


def norm_gate(given: Operands, eps: float, *, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch norm and gate; return ``a [M, H * V]`` and, with ``keep``, rstd ``[M, H]`` float32."""
    h, gate = inner_contiguous(given.h), None if given.gate is None else inner_contiguous(given.gate)
    rows, heads = h.shape[0], given.heads
    a = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    rstd = h.new_empty(rows, heads, dtype=torch.float32) if keep else None
    few = tiles(rows, heads, given.values, _ELEMENTS_OF_FEW) <= _FEW_TILES * processors(h.device)
    elements = _ELEMENTS_OF_FEW if few else _ELEMENTS
    Launch(
        norm_gate_kernel, (tiles(rows, heads, given.values, elements),),
        h, gate, given.norm_weight, a, rstd, rows, heads, h.stride(0), 0 if gate is None else gate.stride(0), eps,
        ACTIVATED=given.activated, **_tile_of(rows, given.values, elements), num_warps=_WARPS,
    ).run()  # fmt: skip
    return a, rstd


class Gradients(NamedTuple):
    """Results of the launch of the backward pass; ``None`` if not requested."""

    a: torch.Tensor | None
    """Recomputed operand of the output projection, ``[M, H * V]``."""
    dh: torch.Tensor | None
    """Gradient of h, ``[M, H * V]``."""
    dgate: torch.Tensor | None
    """Gradient of the gate, ``[M, H * V]``."""
    dnorm_weight: torch.Tensor | None
    """Gradient of the norm's weight, ``[V]``, of its dtype."""


def norm_gate_gradients(
    da: torch.Tensor | None, given: Operands, rstd: torch.Tensor, *, want_a: bool, into: torch.Tensor | None = None
) -> Gradients:
    """Compute the gradients of all given tensors if there is a ``da [M, H * V]``, and with ``want_a`` recompute ``a``.

    The gate's gradient is written to ``into``, ``[M, H * V]`` with any row pitch (such as columns of another matrix), or to a
    new tensor.
    """
    h, gate = inner_contiguous(given.h), None if given.gate is None else inner_contiguous(given.gate)
    da = None if da is None else inner_contiguous(da)
    (rows, inner), heads, values = h.shape, given.heads, given.values
    count = tiles(rows, heads, values, GRADIENT_ELEMENTS)
    steps = _steps_of(count, values, h.device)
    ctas = cdiv(count, steps)

    def empty(wanted: bool) -> Any:
        return torch.empty((rows, inner), dtype=h.dtype, device=h.device) if wanted else None

    a, dh = empty(want_a), empty(da is not None)
    dgate = empty(da is not None and gate is not None) if into is None else into
    partials = dnorm_weight = counter = None
    weight = None if da is None else given.norm_weight
    if weight is not None:
        partials = h.new_empty(ctas, values, dtype=torch.float32)
        if steps <= MOST_STEPS_WITH_SUM:
            dnorm_weight, counter = torch.empty_like(weight), counters(h.device, 1)
    Launch(
        norm_gate_gradients_kernel, (ctas,),
        da, h, gate, given.norm_weight, rstd, a, dh, dgate, partials, dnorm_weight, counter, rows, heads, steps,
        0 if da is None else da.stride(0), h.stride(0), 0 if gate is None else gate.stride(0),
        0 if dgate is None else dgate.stride(0),
        ACTIVATED=given.activated, **_tile_of(rows, values, GRADIENT_ELEMENTS), num_warps=_WARPS, **_registers(h, count, values),
    ).run()  # fmt: skip
    if weight is not None and partials is not None and dnorm_weight is None:
        dnorm_weight = partials.sum(0).to(weight.dtype)
    return Gradients(a, dh, dgate, dnorm_weight)
