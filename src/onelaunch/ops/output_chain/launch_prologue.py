"""Launches of the output projection that normalizes and gates what it loads: choose the tiles, allocate the results."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from onelaunch.device.hardware import processors, shared_bytes
from onelaunch.kernels.common.layout import cdiv, inner_contiguous, power_of_2
from onelaunch.kernels.gemm.choice import LEAST_COLUMNS, columns_for, mma_of
from onelaunch.launch.launch import Launch, Mma
from onelaunch.ops.output_chain.kernels.prologue import prologue_kernel
from onelaunch.ops.output_chain.launch import Made, Operands

HEAD = 4096
"""Elements of a head's tile, of h and of the gate each: 32 a thread with four warps."""

FEWEST = 16
"""Channels, rows and columns of an operand of a product."""


@dataclass(frozen=True, slots=True)
class PrologueTiles:
    """Tiles of BM rows by BN columns of out, BK channels of a head at once; ``group`` tiles of rows share columns."""

    m: int
    n: int
    head: int
    k: int
    stages: int
    warps: int
    group: int = 8

    def grid(self, rows: int, columns: int) -> tuple[int]:
        return (cdiv(rows, self.m) * cdiv(columns, self.n),)

    def mma(self, dtype: torch.dtype) -> Mma:
        """Return the matrix instructions of its product; float32 is multiplied without any."""
        if dtype is torch.float32:
            return Mma.NONE
        return mma_of(self.n)

    def options(self) -> dict[str, int]:
        """Return constants and launch options."""
        constants = {"BV": self.head, "BK": self.k, "BM": self.m, "BN": self.n, "GROUP": self.group}
        return {**constants, "num_warps": self.warps, "num_stages": self.stages}


@functools.lru_cache(maxsize=4096)
def prologue_tiles(rows: int, columns: int, values: int, size: int, count: int, shared: int) -> PrologueTiles:
    """Return the tiles for so many rows and columns of out. Not measured yet.

    Every tile normalizes and gates its rows anew, so columns are many: 128; 32 where rows are few and processors would have no
    tile. Rows are as many as leave a head of h and of the gate in registers, 32 to 64, by eight warps where heads are long: twice
    as many spill on sm_80 or sm_100a. Operands of float32 lie in registers as well: 16 rows by 32 columns, without loads ahead,
    spill a few words at most, and only with long heads. Others have so many stages, up to 4, that they fit into shared memory
    beside a.

    Args:
        rows: M.
        columns: D.
        values: V.
        size: bytes of a number.
        count: processors.
        shared: bytes of shared memory that a block may have.
    """
    head = max(power_of_2(values), FEWEST)
    if size == 4:
        return PrologueTiles(FEWEST, LEAST_COLUMNS, head, k=min(head, 32), stages=1, warps=4)
    m = max(min(max(HEAD // head, 32), 64, power_of_2(max(rows, 1))), FEWEST)
    n = columns_for(rows, columns, m, 128, count)
    stage = (2 * m + n) * head * size
    stages = max(1, min(4, (shared - m * head * size) // stage))
    return PrologueTiles(m, n, head, head, stages, warps=8 if m * head > HEAD else 4)


def prologue(given: Operands, w_out: torch.Tensor, bias: torch.Tensor | None, eps: float, *, keep: bool) -> Made:
    """Return ``out [M, D]``, and for ``keep`` rstd ``[M, H]`` float32."""
    h, w_out = inner_contiguous(given.h), inner_contiguous(w_out)
    gate = None if given.gate is None else inner_contiguous(given.gate)
    rows, columns = h.shape[0], w_out.shape[0]
    sizes = int(rows), int(columns), int(given.values)  # a tracer's sizes cannot be hashed
    tiles = prologue_tiles(*sizes, h.element_size(), processors(h.device), shared_bytes(h.device))
    out = h.new_empty(rows, columns)
    rstd = h.new_empty(rows, given.heads, dtype=torch.float32) if keep else None
    flags: dict[str, Any] = {"V": given.values, "ACTIVATED": given.activated}
    Launch(
        prologue_kernel, tiles.grid(rows, columns),
        h, gate, given.norm_weight, w_out, None if bias is None else bias.contiguous(), out, rstd, rows, columns, given.heads,
        h.stride(0), 0 if gate is None else gate.stride(0), w_out.stride(0), eps,
        mma=tiles.mma(h.dtype), **flags, **tiles.options(),
    ).run()  # fmt: skip
    return out, rstd
