"""Launch of the output projection that normalizes and gates its operand as it loads it: choose tiles, allocate results.

The variant ``prologue`` calls :func:`prologue`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from onelaunch.device.hardware import processors, shared_bytes
from onelaunch.kernels.common.layout import cdiv, inner_contiguous, power_of_2
from onelaunch.kernels.gemm.choice import LEAST_COLUMNS, columns_for, mma_of, mma_with, precision_of
from onelaunch.launch.launch import Launch
from onelaunch.ops.output_chain.kernels.prologue import prologue_kernel
from onelaunch.ops.output_chain.launch import Made, Operands
from onelaunch.ops.output_chain.launch_few_rows import config_for, few_rows

_HEAD = 4096
"""Number of elements of a head's tile, for h and for the gate each: 32 per thread with four warps."""

_FEWEST = 16
"""Least number of channels, rows and columns of an operand of a matrix product."""


@dataclass(frozen=True, slots=True)
class PrologueTiles:
    """Tiles of ``m`` (BM) rows by ``n`` (BN) columns of out.

    ``head`` (BV) is V rounded up to a power of 2. A step multiplies ``k`` (BK) channels of a head. ``group`` tiles of rows form a
    swath: their CTAs run at about the same time and share weights in the L2 cache. ``stages`` are those of Triton's pipeline.
    """

    m: int
    n: int
    head: int
    k: int
    stages: int
    warps: int
    group: int = 8

    def grid(self, rows: int, columns: int) -> tuple[int]:
        """Return the grid: one CTA per tile."""
        return (cdiv(rows, self.m) * cdiv(columns, self.n),)

    def options(self) -> dict[str, int]:
        """Return the kernel's constants and launch options."""
        constants = {"BV": self.head, "BK": self.k, "BM": self.m, "BN": self.n, "GROUP": self.group}
        return {**constants, "num_warps": self.warps, "num_stages": self.stages}


@functools.lru_cache(maxsize=4096)
def _prologue_tiles(rows: int, columns: int, values: int, size: int, count: int, shared: int) -> PrologueTiles:
    """Return the tiles for a call. They are not tuned by measurement yet.

    Every tile normalizes and gates its rows anew, so tiles have many columns: 128, or down to 32 where rows are few and SMs
    would be left without a tile. Tiles have as many rows as leave a head of h and of the gate in registers, 32 to 64, or 16
    if out has so few. They have eight warps if heads are long; twice as many rows spill on sm_80 or sm_100a. Operands of
    float32 lie in registers as well: 16 rows by 32 columns without prefetching spill a few words at most, and only with long
    heads. In 16 bits there are as many stages, up to 4, as fit into shared memory in addition to a.

    Args:
        rows: number of rows of out, M.
        columns: number of columns of out, D.
        values: channels of a head, V.
        size: bytes per element.
        count: number of SMs.
        shared: bytes of shared memory that a CTA may use.
    """
    head = max(power_of_2(values), _FEWEST)
    if size == 4:
        return PrologueTiles(_FEWEST, LEAST_COLUMNS, head, k=min(head, 32), stages=1, warps=4)
    m = max(min(max(_HEAD // head, 32), 64, power_of_2(max(rows, 1))), _FEWEST)
    n = columns_for(rows, columns, m, 128, count)
    stage = (2 * m + n) * head * size
    stages = max(1, min(4, (shared - m * head * size) // stage))
    return PrologueTiles(m, n, head, head, stages, warps=8 if m * head > _HEAD else 4)


def prologue(given: Operands, w_out: torch.Tensor, bias: torch.Tensor | None, eps: float, *, keep: bool) -> Made:
    """Launch the projection; return ``out [M, D]`` and, with ``keep``, rstd ``[M, H]`` float32.

    Few rows in bfloat16 take a kernel of their own on Hopper (``launch_few_rows.py``).
    """
    few = config_for(given, w_out, eps)
    if few is not None:
        return few_rows(few, given, w_out, bias, eps, keep=keep)
    h, w_out = inner_contiguous(given.h), inner_contiguous(w_out)
    gate = None if given.gate is None else inner_contiguous(given.gate)
    rows, columns = h.shape[0], w_out.shape[0]
    sizes = int(rows), int(columns), int(given.values)  # as integers: a tracer's sizes cannot be hashed
    tiles = _prologue_tiles(*sizes, h.element_size(), processors(h.device), shared_bytes(h.device))
    out = h.new_empty(rows, columns)
    rstd = h.new_empty(rows, given.heads, dtype=torch.float32) if keep else None
    flags: dict[str, Any] = {"V": given.values, "ACTIVATED": given.activated}
    Launch(
        prologue_kernel, tiles.grid(rows, columns),
        h, gate, given.norm_weight, w_out, None if bias is None else bias.contiguous(), out, rstd, rows, columns, given.heads,
        h.stride(0), 0 if gate is None else gate.stride(0), w_out.stride(0), eps,
        mma=mma_with(h, mma_of(tiles.n)), PRECISION=precision_of(h), **flags, **tiles.options(),
    ).run()  # fmt: skip
    return Made(out, rstd)
