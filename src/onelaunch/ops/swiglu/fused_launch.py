"""Launches of the kernels whose products end with the gate: choose the tiles, allocate the results. No checks, no autograd."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from onelaunch.device.hardware import multiplies_float8, processors
from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.ops.swiglu import product_kernels as kernels
from onelaunch.ops.swiglu.forward import Matrix

# Tiles


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """BM rows by BN columns of h a program, BK channels at once; neighbouring programs share columns, ``group`` tiles of rows."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    group: int = 8

    def grid(self, rows: int, columns: int) -> tuple[int]:
        return (cdiv(rows, self.m) * cdiv(columns, self.n),)

    def options(self, inner: int) -> dict[str, Any]:
        """Constants and launch options for K channels."""
        constants = {"BM": self.m, "BN": self.n, "BK": self.k, "GROUP": self.group, "EVEN": inner % self.k == 0}
        return {**constants, "num_warps": self.warps, "num_stages": self.stages}


FEW_ROWS = 32
"""Up to so many, loading the weights takes the time."""

LEAST_COLUMNS = 32
"""Fewer would leave warps without a part of a product."""

LEAST_SHARED = 64 * 1024
"""Bytes of shared memory of a block, where the device does not say more: AMD's."""

PROCESSORS = 132
"""Where there is no GPU: an H200's."""


@functools.lru_cache(maxsize=4096)
def product_tiles(rows: int, columns: int, factor: str, stored: float, products: int, count: int, shared: int) -> ProductTiles:
    """Tiles for so many rows and columns of h. Not measured yet.

    Up to 128 rows, so that the weights are seldom read. 64 columns of both products or 128 of one; 32 where rows are few and
    processors would have no tile. Products of float32 are made of single multiplications, whose operands lie in registers, and
    codes of NVFP4 are decoded there: larger tiles than these spill. So many stages, from 2 to 5 (3 for float32, which waits for
    its multiplications), that two programs share a processor.

    Args:
        rows: M.
        columns: N.
        factor: what is multiplied, a name of :data:`FACTORS`.
        stored: bytes of a number in memory: 4, 2, 1, or 0.5 where weights are NVFP4.
        products: that a program makes, 1 or 2.
        count: processors.
        shared: bytes of shared memory that a block may have.
    """
    wide, codes = factor == "fp32", stored < 1
    most = (16 if codes else 64) if wide else 64 if codes else 128
    m = next((size for size in (16, 32, 64) if rows <= size or size == most), most)
    n = (64 if wide else 128) // products
    while m <= FEW_ROWS and n > LEAST_COLUMNS and cdiv(rows, m) * cdiv(columns, n) < count:
        n //= 2
    k = 64
    if wide and not codes:
        k = 32
    elif factor == "fp8e4nv" or (codes and not wide and m == 16):
        k = 128
    held = 2 if stored == 1 and factor == "fp16" else stored  # float8 takes room decoded as well
    stage = int((m * (2 if codes else held) + products * n * held) * k)
    stages = max(2, min(3 if wide else 5, shared // (2 * stage)))
    return ProductTiles(m, n, k, stages, warps=8 if m * n >= 64 * 128 else 4)


@functools.cache
def device_facts(device: torch.device) -> tuple[int, int, bool]:
    """Processors, bytes of shared memory of a block, and whether there are matrix units for float8_e4m3fn."""
    if device.type != "cuda":
        return PROCESSORS, LEAST_SHARED, False
    facts = torch.cuda.get_device_properties(device)
    shared = max(getattr(facts, "shared_memory_per_block_optin", 0), LEAST_SHARED)
    return processors(device), shared, multiplies_float8(device)


FACTORS = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16, "fp8e4nv": tl.float8e4nv}
"""What a product multiplies, by Triton's names."""


def factor_of(x: Matrix, dtype: torch.dtype, *, native: bool) -> str:
    """What the products of a result in ``dtype`` multiply; see the top of product_kernels.py."""
    if dtype is torch.float32:
        return "fp32"
    if x.kind == "dense":
        return "bf16" if x.values.dtype is torch.bfloat16 else "fp16"
    return "fp8e4nv" if native and x.kind == "fp8" and dtype is torch.bfloat16 else "fp16"


def tiles_for(x: Matrix, weight: Matrix, columns: int, dtype: torch.dtype, products: int) -> tuple[ProductTiles, tl.dtype]:
    """Tiles, and what is multiplied."""
    count, shared, native = device_facts(x.values.device)
    factor = factor_of(x, dtype, native=native)
    size = 0.5 if weight.kind == "nvfp4" else weight.values.element_size()
    return product_tiles(x.values.shape[0], columns, factor, size, products, count, shared), FACTORS[factor]


# Launches


def stored(matrix: Matrix, factor: tl.dtype) -> torch.Tensor:
    """Rows of neighbouring channels; float8 as bytes unless it is multiplied as it is."""
    values = inner_contiguous(matrix.values)
    return values.view(torch.uint8) if matrix.kind == "fp8" and factor is not tl.float8e4nv else values


def words(x: torch.Tensor) -> torch.Tensor:
    """``[M, K / 2]`` of two 16-bit channels each."""
    if x.stride(1) != 1 or x.stride(0) % 2 or x.storage_offset() % 2:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.int32)


def fused(x: Matrix, w_gate: Matrix, w_up: Matrix, dtype: torch.dtype, products: torch.Tensor | None) -> torch.Tensor:
    """``h [M, N]`` of plain tensors or float8; both products go to ``products [M, 2 N]``, contiguous, as well."""
    (rows, inner), columns = x.values.shape, w_gate.values.shape[0]
    h = torch.empty((rows, columns), dtype=dtype, device=x.values.device)
    tiles, factor = tiles_for(x, w_gate, columns, dtype, 2)
    left, gate, up = (stored(each, factor) for each in (x, w_gate, w_up))
    scales = [each.flat_scale() for each in (x, w_gate, w_up)]
    kernels.fused_kernel[tiles.grid(rows, columns)](
        left, gate, up, *scales, h, products, rows, columns, inner, left.stride(0), gate.stride(0), up.stride(0),
        X_ROWS=x.per_row, W_ROWS=w_gate.per_row, KEEP=products is not None, FACTOR=factor, **tiles.options(inner),
    )  # fmt: skip
    return h


def up(x: Matrix, w_up: Matrix, gate: torch.Tensor, dtype: torch.dtype, kept: torch.Tensor | None) -> torch.Tensor:
    """``h [M, N]`` by the product of up, of plain tensors or float8, and ``gate [M, N]``; that of up goes to ``kept`` as well."""
    (rows, inner), columns = x.values.shape, w_up.values.shape[0]
    h = torch.empty((rows, columns), dtype=dtype, device=x.values.device)
    tiles, factor = tiles_for(x, w_up, columns, dtype, 1)
    left, right, gate = stored(x, factor), stored(w_up, factor), inner_contiguous(gate)
    kernels.up_kernel[tiles.grid(rows, columns)](
        left, right, gate, x.flat_scale(), w_up.flat_scale(), h, kept, rows, columns, inner,
        left.stride(0), right.stride(0), gate.stride(0), 0 if kept is None else kept.stride(0),
        X_ROWS=x.per_row, W_ROWS=w_up.per_row, KEEP=kept is not None, FACTOR=factor, **tiles.options(inner),
    )  # fmt: skip
    return h


def fused_nvfp4(x: Matrix, w_gate: Matrix, w_up: Matrix, dtype: torch.dtype, *, swizzled: bool) -> torch.Tensor:
    """``h [M, N]`` of NVFP4 weights, and ``x`` in 16 bits or of the kind; scales swizzled in all of them or in none."""
    rows, (columns, pairs) = x.values.shape[0], w_gate.values.shape
    h = torch.empty((rows, columns), dtype=dtype, device=x.values.device)
    tiles, factor = tiles_for(x, w_gate, columns, dtype, 2)
    left = inner_contiguous(x.values) if x.kind == "nvfp4" else words(x.values)
    gate, up = inner_contiguous(w_gate.values), inner_contiguous(w_up.values)
    blocks = [None if each.blocks is None else inner_contiguous(each.blocks) for each in (x, w_gate, w_up)]
    if swizzled:
        blocks = [None if each is None else each.contiguous() for each in blocks]
    kernels.fused_nvfp4_kernel[tiles.grid(rows, columns)](
        left, gate, up, *(None if each is None else each.view(torch.uint8) for each in blocks),
        *(each.flat_scale() for each in (x, w_gate, w_up)), h, rows, columns, 2 * pairs,
        left.stride(0), gate.stride(0), up.stride(0), *(0 if each is None else each.stride(0) for each in blocks),
        SWIZZLED=swizzled, FACTOR=factor, **tiles.options(2 * pairs),
    )  # fmt: skip
    return h
