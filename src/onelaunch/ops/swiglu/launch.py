"""Launches of ``swiglu``'s Triton kernels: tile choice, allocation of results, kernel arguments.

Operands are checked before; there are no checks and no autograd here. ``autograd.py`` calls :func:`gate` and
:func:`gate_backward`. The variants in ``variants/fused.py`` and ``variants/blackwell.py`` call the functions for matrix products,
and those in ``variants/triton.py`` ask for :func:`block_columns`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from onelaunch.device.hardware import multiplies_float8, processors, shared_bytes
from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.kernels.gemm.choice import columns_for, mma_of, uses_tf32
from onelaunch.launch.launch import Launch, Mma
from onelaunch.operation import remembered
from onelaunch.ops.swiglu.kernels import block_scaled as block_scaled_kernels
from onelaunch.ops.swiglu.kernels import gate as gate_kernels
from onelaunch.ops.swiglu.kernels import product as kernels
from onelaunch.ops.swiglu.operands import Matrix

# The gate alone

_MAX_BLOCK_COLUMNS = 2048
"""Most columns of a row for one CTA of the gate kernels: 16 elements per thread with four warps. Not measured yet."""


def block_columns(columns: int) -> int:
    """Return BC, the columns of a CTA: the least power of 2 that holds a row, from 32 to :data:`_MAX_BLOCK_COLUMNS`."""
    block = 32
    while block < columns and block < _MAX_BLOCK_COLUMNS:  # comparisons only, since a size may be symbolic
        block *= 2
    return block


def gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, contiguous, for two matrices ``[M, N]``."""
    gate, up = inner_contiguous(gate), inner_contiguous(up)
    rows, columns = gate.shape
    h = torch.empty((rows, columns), dtype=gate.dtype, device=gate.device)
    block = block_columns(columns)
    Launch(
        gate_kernels.gate_kernel, (rows * cdiv(columns, block),),
        gate, up, h, columns, gate.stride(0), up.stride(0), BC=block, num_warps=4,
    ).run()  # fmt: skip
    return h


def gate_backward(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, h: torch.Tensor | None = None) -> torch.Tensor:
    """Return the gradients of gate and up side by side, ``[M, 2 N]``, contiguous; write ``h [M, N]``, contiguous, if given."""
    dh, gate, up = (inner_contiguous(each) for each in (dh, gate, up))
    rows, columns = gate.shape
    both = torch.empty((rows, 2 * columns), dtype=gate.dtype, device=gate.device)
    dgate, dup = both[:, :columns], both[:, columns:]
    block = block_columns(columns)
    Launch(
        gate_kernels.gate_backward_kernel, (rows * cdiv(columns, block),),
        dh, gate, up, dgate, dup, h, columns, dh.stride(0), gate.stride(0), up.stride(0), dgate.stride(0), dup.stride(0),
        BC=block, num_warps=4,
    ).run()  # fmt: skip
    return both


# Tiles of products with the gate in their epilogue


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Tile sizes of a product: ``m`` rows and ``n`` columns of h for a CTA (BM, BN), ``k`` channels per step (BK).

    ``stages`` is the number of steps in Triton's software pipeline, and ``warps`` the number of warps of a CTA. Consecutive CTAs
    go through ``group`` tiles of rows before the next columns, so that they share weights in L2.
    """

    m: int
    n: int
    k: int
    stages: int
    warps: int
    group: int = 8

    def grid(self, rows: int, columns: int) -> tuple[int]:
        """Return the grid for h ``[rows, columns]``: one CTA per tile."""
        return (cdiv(rows, self.m) * cdiv(columns, self.n),)

    def options(self, inner: int) -> dict[str, Any]:
        """Return the kernel constants and launch options for ``inner`` channels."""
        constants = {"BM": self.m, "BN": self.n, "BK": self.k, "GROUP": self.group, "EVEN": inner % self.k == 0}
        return {**constants, "num_warps": self.warps, "num_stages": self.stages}

    def mma(self, mma_dtype: tl.dtype, precision: str = "ieee") -> Mma:
        """Return the matrix instruction that products of this dtype, and of this precision of float32, must compile to.

        The weights are the left operand, so the M dimension of the instruction is ``n``, and not ``m``.
        """
        if mma_dtype is tl.float32:
            return Mma.WARP if precision == "tf32" else Mma.NONE
        return mma_of(self.n)


@remembered
def _product_tiles(
    rows: int, columns: int, mma_dtype: str, element_bytes: float, products: int, count: int, shared: int
) -> ProductTiles:
    """Return the tiles for h ``[rows, columns]``. They are not measured yet.

    Rows: up to 128, so that the weights are read few times. float32 products consist of single multiplications with operands
    in registers, and NVFP4 codes are decoded in registers. Larger tiles spill. So float32 products
    and NVFP4 weights have tiles of up to 64 rows, and float32 products of NVFP4 weights up to 16.

    Columns: 64 of both products or 128 of one; float32 tiles have half as many. With few rows they are halved, down to 32, as
    long as some SMs would have no tile.

    Stages: from 2 to 5 (3 for float32, whose time is that of the multiplications), so that two CTAs share the shared memory of
    an SM.

    Args:
        rows: Number of rows, M.
        columns: Number of columns, N.
        mma_dtype: Dtype that is multiplied, a name of :data:`_MMA_DTYPES`.
        element_bytes: Bytes of an element of the weights in memory: 4, 2, 1, or 0.5 for NVFP4.
        products: Number of products that a CTA computes, 1 or 2.
        count: Number of SMs.
        shared: Bytes of shared memory that a CTA may have.
    """
    fp32, nvfp4 = mma_dtype == "fp32", element_bytes < 1
    most = (16 if nvfp4 else 64) if fp32 else 64 if nvfp4 else 128
    m = next((size for size in (16, 32, 64) if rows <= size or size == most), most)
    n = columns_for(rows, columns, m, (64 if fp32 else 128) // products, count)
    k = 64
    if fp32 and not nvfp4:
        k = 32
    elif mma_dtype == "fp8e4nv" or (nvfp4 and not fp32 and m == 16):
        k = 128
    # float8 that is multiplied as float16 counts as 2 bytes, because the decoded elements take space as well. An
    # element of x beside NVFP4 weights counts as 2 bytes, which it has unless x is in NVFP4 too.
    weight_bytes = 2 if element_bytes == 1 and mma_dtype == "fp16" else element_bytes
    x_bytes = 2 if nvfp4 else weight_bytes
    stage = int((m * x_bytes + products * n * weight_bytes) * k)
    stages = max(2, min(3 if fp32 else 5, shared // (2 * stage)))
    return ProductTiles(m, n, k, stages, warps=8 if m * n >= 64 * 128 else 4)


_MMA_DTYPES = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16, "fp8e4nv": tl.float8e4nv}
"""Dtypes that a product can multiply, by Triton's names."""


def _mma_dtype_of(x: Matrix, dtype: torch.dtype, *, native: bool) -> str:
    """Return the name of the dtype that is multiplied for a result in ``dtype``; kernels/product.py gives the reasons.

    Args:
        x: Left operand ``[M, K]`` of the call, the rows that are multiplied by both weights.
        dtype: Dtype of h.
        native: Flag that the device multiplies float8.
    """
    if dtype is torch.float32:
        return "fp32"
    if x.kind == "dense":
        return "bf16" if x.values.dtype is torch.bfloat16 else "fp16"
    return "fp8e4nv" if native and x.kind == "fp8" and dtype is torch.bfloat16 else "fp16"


def _tiles_for(x: Matrix, weight: Matrix, columns: int, dtype: torch.dtype, products: int) -> tuple[ProductTiles, tl.dtype]:
    """Return the tiles for a call and the dtype that is multiplied."""
    device = x.values.device
    mma_dtype = _mma_dtype_of(x, dtype, native=multiplies_float8(device))
    size = 0.5 if weight.kind == "nvfp4" else weight.values.element_size()
    tiles = _product_tiles(x.values.shape[0], columns, mma_dtype, size, products, processors(device), shared_bytes(device))
    return tiles, _MMA_DTYPES[mma_dtype]


# Launches of products with the gate in their epilogue


def _precision(*operands: Matrix) -> str:
    """Return the precision of a product of float32 operands; decoded float8 and NVFP4 are not rounded to TF32."""
    return "tf32" if all(uses_tf32(each.values) for each in operands) else "ieee"


def _stored(matrix: Matrix, mma_dtype: tl.dtype) -> torch.Tensor:
    """Return the matrix with contiguous rows; float8 as uint8 unless it is multiplied natively."""
    values = inner_contiguous(matrix.values)
    return values.view(torch.uint8) if matrix.kind == "fp8" and mma_dtype is not tl.float8e4nv else values


def _words(x: torch.Tensor) -> torch.Tensor:
    """Return a 16-bit matrix ``[M, K]`` as int32 words ``[M, K / 2]`` of two channels.

    It is copied if channels are not contiguous or rows not aligned to words.
    """
    if x.stride(1) != 1 or x.stride(0) % 2 or x.storage_offset() % 2:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.int32)


def fused(x: Matrix, w_gate: Matrix, w_up: Matrix, dtype: torch.dtype, products: torch.Tensor | None) -> torch.Tensor:
    """Return ``h [M, N]`` from plain tensors or float8, by one launch that computes both products.

    If ``products [M, 2 N]``, contiguous, is given, both products are stored there for the backward pass.
    """
    (rows, inner), columns = x.values.shape, w_gate.values.shape[0]
    h = torch.empty((rows, columns), dtype=dtype, device=x.values.device)
    tiles, mma_dtype = _tiles_for(x, w_gate, columns, dtype, 2)
    precision = _precision(x, w_gate, w_up)
    left, gate, up = (_stored(each, mma_dtype) for each in (x, w_gate, w_up))
    scales = [each.flat_scale() for each in (x, w_gate, w_up)]
    Launch(
        kernels.fused_kernel, tiles.grid(rows, columns),
        left, gate, up, *scales, h, products, rows, columns, inner, left.stride(0), gate.stride(0), up.stride(0),
        X_ROWS=x.per_row, W_ROWS=w_gate.per_row, KEEP=products is not None, MMA_DTYPE=mma_dtype,
        PRECISION=precision, mma=tiles.mma(mma_dtype, precision),
        **tiles.options(inner),
    ).run()  # fmt: skip
    return h


def up(x: Matrix, w_up: Matrix, gate: torch.Tensor, dtype: torch.dtype, kept: torch.Tensor | None) -> torch.Tensor:
    """Return ``h [M, N]``, which is ``silu(gate) * (x w_up^T)``, by one product with the gate in its epilogue.

    ``gate [M, N]`` is the product of x with the gate's weight, before SiLU, which an earlier launch has computed.
    If ``kept [M, N]`` is given, the product with ``w_up`` is stored there for the backward pass; its rows may have any stride.
    NVFP4 operands are not supported.
    """
    (rows, inner), columns = x.values.shape, w_up.values.shape[0]
    h = torch.empty((rows, columns), dtype=dtype, device=x.values.device)
    tiles, mma_dtype = _tiles_for(x, w_up, columns, dtype, 1)
    precision = _precision(x, w_up)
    left, right, gate = _stored(x, mma_dtype), _stored(w_up, mma_dtype), inner_contiguous(gate)
    Launch(
        kernels.up_kernel, tiles.grid(rows, columns),
        left, right, gate, x.flat_scale(), w_up.flat_scale(), h, kept, rows, columns, inner,
        left.stride(0), right.stride(0), gate.stride(0), 0 if kept is None else kept.stride(0),
        X_ROWS=x.per_row, W_ROWS=w_up.per_row, KEEP=kept is not None, MMA_DTYPE=mma_dtype,
        PRECISION=precision, mma=tiles.mma(mma_dtype, precision),
        **tiles.options(inner),
    ).run()  # fmt: skip
    return h


def fused_nvfp4(x: Matrix, w_gate: Matrix, w_up: Matrix, dtype: torch.dtype, *, swizzled: bool) -> torch.Tensor:
    """Return ``h [M, N]`` from NVFP4 weights and an ``x`` in NVFP4 or 16 bits; either all scales are swizzled or none."""
    rows, (columns, pairs) = x.values.shape[0], w_gate.values.shape
    h = torch.empty((rows, columns), dtype=dtype, device=x.values.device)
    tiles, mma_dtype = _tiles_for(x, w_gate, columns, dtype, 2)
    left = inner_contiguous(x.values) if x.kind == "nvfp4" else _words(x.values)
    gate, up = inner_contiguous(w_gate.values), inner_contiguous(w_up.values)
    blocks = [None if each.blocks is None else inner_contiguous(each.blocks) for each in (x, w_gate, w_up)]
    if swizzled:  # the kernel computes the offset of an atom of 128 rows from the sizes, not from a stride
        blocks = [None if each is None else each.contiguous() for each in blocks]
    Launch(
        kernels.fused_nvfp4_kernel, tiles.grid(rows, columns),
        left, gate, up, *(None if each is None else each.view(torch.uint8) for each in blocks),
        *(each.flat_scale() for each in (x, w_gate, w_up)), h, rows, columns, 2 * pairs,
        left.stride(0), gate.stride(0), up.stride(0), *(0 if each is None else each.stride(0) for each in blocks),
        SWIZZLED=swizzled, MMA_DTYPE=mma_dtype, mma=tiles.mma(mma_dtype), **tiles.options(2 * pairs),
    ).run()  # fmt: skip
    return h


_BLOCK_SCALED = {"BM": 128, "BN": 64, "BK": 256}
"""Tile of the block-scaled kernel: rows and columns of h for a CTA, and channels per step. Not measured."""

_BLOCK_SCALED_WARPS = 8
"""Warps of a CTA of the block-scaled kernel. With four, the addresses of a step's codes take more registers than there are."""


def block_scaled(x: Matrix, w_gate: Matrix, w_up: Matrix, dtype: torch.dtype, *, swizzled: bool) -> torch.Tensor:
    """Return ``h [M, N]`` from three NVFP4 matrices, by block-scaled matrix instructions."""
    (rows, half), columns = x.values.shape, w_gate.values.shape[0]
    operands = (x, w_gate, w_up)
    codes = [each.values.contiguous() for each in operands]
    blocks = [None if each.blocks is None else each.blocks.contiguous() for each in operands]
    one = torch.ones((), dtype=torch.float32, device=x.values.device)  # the kernel reads a scale of each matrix
    scales = [one if each.scale is None else each.scale for each in operands]
    h = torch.empty((rows, columns), dtype=dtype, device=x.values.device)
    Launch(
        block_scaled_kernels.block_scaled_kernel, (cdiv(rows, _BLOCK_SCALED["BM"]) * cdiv(columns, _BLOCK_SCALED["BN"]),),
        *codes, *blocks, *scales, h, rows, columns, 2 * half, half, half, half,  # the last three are the strides of the codes
        SWIZZLED=swizzled, mma=Mma.WIDEST, num_warps=_BLOCK_SCALED_WARPS, **_BLOCK_SCALED,
    ).run()  # fmt: skip
    return h
