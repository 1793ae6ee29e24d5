"""Launches of ``swiglu``'s Triton kernels: choose the tiles, allocate the results. No checks, no autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from onelaunch.device.hardware import multiplies_float8, processors, shared_bytes
from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.kernels.gemm.choice import columns_for, mma_of
from onelaunch.launch.launch import Launch, Mma
from onelaunch.operation import remembered
from onelaunch.ops.swiglu.kernels import block_scaled as block_scaled_kernels
from onelaunch.ops.swiglu.kernels import gate as gate_kernels
from onelaunch.ops.swiglu.kernels import product as kernels
from onelaunch.ops.swiglu.operands import Matrix

# The gate alone

MOST_COLUMNS = 2048
"""Most columns of a row that one CTA works on: 16 numbers a thread with four warps; not measured yet."""


def columns_at_once(columns: int) -> int:
    """Return BC: the power of 2 that holds a row, from 32 to :data:`MOST_COLUMNS`."""
    block = 32
    while block < columns and block < MOST_COLUMNS:  # no question is asked of a size but whether it is larger: it may be a symbol
        block *= 2
    return block


def gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` of two ``[M, N]``, contiguous."""
    gate, up = inner_contiguous(gate), inner_contiguous(up)
    rows, columns = gate.shape
    h = torch.empty((rows, columns), dtype=gate.dtype, device=gate.device)
    block = columns_at_once(columns)
    Launch(
        gate_kernels.gate_kernel, (rows * cdiv(columns, block),),
        gate, up, h, columns, gate.stride(0), up.stride(0), BC=block, num_warps=4,
    ).run()  # fmt: skip
    return h


def gate_backward(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the gradients of both side by side: ``[M, 2 N]``, contiguous."""
    dh, gate, up = (inner_contiguous(each) for each in (dh, gate, up))
    rows, columns = gate.shape
    both = torch.empty((rows, 2 * columns), dtype=gate.dtype, device=gate.device)
    dgate, dup = both[:, :columns], both[:, columns:]
    block = columns_at_once(columns)
    Launch(
        gate_kernels.gate_backward_kernel, (rows * cdiv(columns, block),),
        dh, gate, up, dgate, dup, columns, dh.stride(0), gate.stride(0), up.stride(0), dgate.stride(0), dup.stride(0),
        BC=block, num_warps=4,
    ).run()  # fmt: skip
    return both


# Products that end with the gate: tiles


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Tiles of a product: BM rows by BN columns of h a CTA, BK channels at once.

    Neighbouring CTAs share columns, ``group`` tiles of rows.
    """

    m: int
    n: int
    k: int
    stages: int
    warps: int
    group: int = 8

    def grid(self, rows: int, columns: int) -> tuple[int]:
        return (cdiv(rows, self.m) * cdiv(columns, self.n),)

    def options(self, inner: int) -> dict[str, Any]:
        """Return constants and launch options for K channels."""
        constants = {"BM": self.m, "BN": self.n, "BK": self.k, "GROUP": self.group, "EVEN": inner % self.k == 0}
        return {**constants, "num_warps": self.warps, "num_stages": self.stages}

    def mma(self, factor: tl.dtype) -> Mma:
        """Return the matrix instructions that products of these factors become; the weights' BN rows are the left operand."""
        if factor is tl.float32:
            return Mma.NONE
        return mma_of(self.n)


@remembered
def product_tiles(rows: int, columns: int, factor: str, stored: float, products: int, count: int, shared: int) -> ProductTiles:
    """Return the tiles for so many rows and columns of h. Not measured yet.

    Up to 128 rows, so that the weights are seldom read. 64 columns of both products or 128 of one; 32 where rows are few and
    SMs would have no tile. Products of float32 are made of single multiplications, whose operands lie in registers, and
    codes of NVFP4 are decoded there: larger tiles than these spill. So many stages, from 2 to 5 (3 for float32, which waits for
    its multiplications), that two CTAs share an SM.

    Args:
        rows: M.
        columns: N.
        factor: What is multiplied, a name of :data:`FACTORS`.
        stored: Bytes of a number in memory: 4, 2, 1, or 0.5 where weights are NVFP4.
        products: Number of products that a CTA makes, 1 or 2.
        count: Number of SMs.
        shared: Bytes of shared memory that a CTA may have.
    """
    wide, codes = factor == "fp32", stored < 1
    most = (16 if codes else 64) if wide else 64 if codes else 128
    m = next((size for size in (16, 32, 64) if rows <= size or size == most), most)
    n = columns_for(rows, columns, m, (64 if wide else 128) // products, count)
    k = 64
    if wide and not codes:
        k = 32
    elif factor == "fp8e4nv" or (codes and not wide and m == 16):
        k = 128
    held = 2 if stored == 1 and factor == "fp16" else stored  # float8 takes room decoded as well
    stage = int((m * (2 if codes else held) + products * n * held) * k)
    stages = max(2, min(3 if wide else 5, shared // (2 * stage)))
    return ProductTiles(m, n, k, stages, warps=8 if m * n >= 64 * 128 else 4)


FACTORS = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16, "fp8e4nv": tl.float8e4nv}
"""Types of what a product multiplies, by Triton's names."""


def factor_of(x: Matrix, dtype: torch.dtype, *, native: bool) -> str:
    """Return what the products of a result in ``dtype`` multiply; see the top of kernels/product.py."""
    if dtype is torch.float32:
        return "fp32"
    if x.kind == "dense":
        return "bf16" if x.values.dtype is torch.bfloat16 else "fp16"
    return "fp8e4nv" if native and x.kind == "fp8" and dtype is torch.bfloat16 else "fp16"


def tiles_for(x: Matrix, weight: Matrix, columns: int, dtype: torch.dtype, products: int) -> tuple[ProductTiles, tl.dtype]:
    """Return the tiles, and what is multiplied."""
    device = x.values.device
    factor = factor_of(x, dtype, native=multiplies_float8(device))
    size = 0.5 if weight.kind == "nvfp4" else weight.values.element_size()
    tiles = product_tiles(x.values.shape[0], columns, factor, size, products, processors(device), shared_bytes(device))
    return tiles, FACTORS[factor]


# Products that end with the gate: launches


def stored(matrix: Matrix, factor: tl.dtype) -> torch.Tensor:
    """Return rows of neighbouring channels; float8 as bytes unless it is multiplied as it is."""
    values = inner_contiguous(matrix.values)
    return values.view(torch.uint8) if matrix.kind == "fp8" and factor is not tl.float8e4nv else values


def words(x: torch.Tensor) -> torch.Tensor:
    """Return ``[M, K / 2]`` of two 16-bit channels each."""
    if x.stride(1) != 1 or x.stride(0) % 2 or x.storage_offset() % 2:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.int32)


def fused(x: Matrix, w_gate: Matrix, w_up: Matrix, dtype: torch.dtype, products: torch.Tensor | None) -> torch.Tensor:
    """Return ``h [M, N]`` of plain tensors or float8; both products go to ``products [M, 2 N]``, contiguous, as well."""
    (rows, inner), columns = x.values.shape, w_gate.values.shape[0]
    h = torch.empty((rows, columns), dtype=dtype, device=x.values.device)
    tiles, factor = tiles_for(x, w_gate, columns, dtype, 2)
    left, gate, up = (stored(each, factor) for each in (x, w_gate, w_up))
    scales = [each.flat_scale() for each in (x, w_gate, w_up)]
    Launch(
        kernels.fused_kernel, tiles.grid(rows, columns),
        left, gate, up, *scales, h, products, rows, columns, inner, left.stride(0), gate.stride(0), up.stride(0),
        X_ROWS=x.per_row, W_ROWS=w_gate.per_row, KEEP=products is not None, FACTOR=factor, mma=tiles.mma(factor),
        **tiles.options(inner),
    ).run()  # fmt: skip
    return h


def up(x: Matrix, w_up: Matrix, gate: torch.Tensor, dtype: torch.dtype, kept: torch.Tensor | None) -> torch.Tensor:
    """Return ``h [M, N]`` of ``gate [M, N]`` and the product of up, which goes to ``kept`` as well; not of NVFP4."""
    (rows, inner), columns = x.values.shape, w_up.values.shape[0]
    h = torch.empty((rows, columns), dtype=dtype, device=x.values.device)
    tiles, factor = tiles_for(x, w_up, columns, dtype, 1)
    left, right, gate = stored(x, factor), stored(w_up, factor), inner_contiguous(gate)
    Launch(
        kernels.up_kernel, tiles.grid(rows, columns),
        left, right, gate, x.flat_scale(), w_up.flat_scale(), h, kept, rows, columns, inner,
        left.stride(0), right.stride(0), gate.stride(0), 0 if kept is None else kept.stride(0),
        X_ROWS=x.per_row, W_ROWS=w_up.per_row, KEEP=kept is not None, FACTOR=factor, mma=tiles.mma(factor),
        **tiles.options(inner),
    ).run()  # fmt: skip
    return h


def fused_nvfp4(x: Matrix, w_gate: Matrix, w_up: Matrix, dtype: torch.dtype, *, swizzled: bool) -> torch.Tensor:
    """Return ``h [M, N]`` of NVFP4 weights, and ``x`` in 16 bits or of the kind; scales swizzled in all of them or in none."""
    rows, (columns, pairs) = x.values.shape[0], w_gate.values.shape
    h = torch.empty((rows, columns), dtype=dtype, device=x.values.device)
    tiles, factor = tiles_for(x, w_gate, columns, dtype, 2)
    left = inner_contiguous(x.values) if x.kind == "nvfp4" else words(x.values)
    gate, up = inner_contiguous(w_gate.values), inner_contiguous(w_up.values)
    blocks = [None if each.blocks is None else inner_contiguous(each.blocks) for each in (x, w_gate, w_up)]
    if swizzled:
        blocks = [None if each is None else each.contiguous() for each in blocks]
    Launch(
        kernels.fused_nvfp4_kernel, tiles.grid(rows, columns),
        left, gate, up, *(None if each is None else each.view(torch.uint8) for each in blocks),
        *(each.flat_scale() for each in (x, w_gate, w_up)), h, rows, columns, 2 * pairs,
        left.stride(0), gate.stride(0), up.stride(0), *(0 if each is None else each.stride(0) for each in blocks),
        SWIZZLED=swizzled, FACTOR=factor, mma=tiles.mma(factor), **tiles.options(2 * pairs),
    ).run()  # fmt: skip
    return h


BLOCK_SCALED = {"BM": 128, "BN": 64, "BK": 256}
"""Rows and columns of h, and channels at once, of a CTA of the block-scaled kernel; not measured."""

BLOCK_SCALED_WARPS = 8
"""Warps of such a CTA. With four, addresses of a step's codes take more registers than there are."""


def block_scaled(x: Matrix, w_gate: Matrix, w_up: Matrix, dtype: torch.dtype, *, swizzled: bool) -> torch.Tensor:
    """Return ``h [M, N]`` of three matrices in NVFP4, by matrix instructions that know block scales."""
    (rows, half), columns = x.values.shape, w_gate.values.shape[0]
    operands = (x, w_gate, w_up)
    codes = [each.values.contiguous() for each in operands]
    blocks = [None if each.blocks is None else each.blocks.contiguous() for each in operands]
    one = torch.ones((), dtype=torch.float32, device=x.values.device)
    scales = [one if each.scale is None else each.scale for each in operands]
    h = torch.empty((rows, columns), dtype=dtype, device=x.values.device)
    Launch(
        block_scaled_kernels.block_scaled_kernel, (cdiv(rows, BLOCK_SCALED["BM"]) * cdiv(columns, BLOCK_SCALED["BN"]),),
        *codes, *blocks, *scales, h, rows, columns, 2 * half, half, half, half,
        SWIZZLED=swizzled, mma=Mma.WIDEST, num_warps=BLOCK_SCALED_WARPS, **BLOCK_SCALED,
    ).run()  # fmt: skip
    return h
