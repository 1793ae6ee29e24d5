"""Kernels that multiply tokens by a matrix of the weight stream in place, without a plain copy of the matrix.

Computes   out [T, N] = x [T, K] W^T + bias for a matrix W [N, K] in the stream, or silu(x G^T) * (x U^T) for gate and up.
Grid       (blocks of BT tokens, blocks of BR rows, splits of K). CTAs next to each other read the same weights, so that a
           second block of tokens has them from L2.
Stream     8 rows by 32 columns, a *part*, are 512 contiguous bytes, row after row. The parts of a tile of 8 rows follow each
           other at regular distances within a *run* of columns, and ``starts`` says where each run begins. So a CTA addresses
           its tile [BR, BK] by one number for each row, and cp.async copies it in lines of 128 bytes to where WGMMA reads it.
Channels   of each eight columns, the stream has the second and the third pair swapped (``as_operands``). A product does not
           change if the channels of both operands are permuted alike. So x has its channels in that order too, and the kernel
           that makes x stores them so: ``sources`` says for each row of a result which row of the stream it is.
Gate, up   the rows of a block are 8 of the gate and 8 of the up projection in turn. They are rows 0 to 7 and 8 to 15 of a
           WGMMA fragment, which lie in the same thread.
On chip    num_stages tiles [BR, BK] of W and [BT, BK] of x in shared memory; sums [BR, BT] in registers. The weights are the
           left operand, so that few tokens are the N dimension of WGMMA, which may be as small as 8.
Numerics   products in 16 bits, float32 sums. With splits, each CTA stores float32 sums, and ``sum_kernel`` adds them in their
           order, so that results do not depend on the order of CTAs. SwiGLU is computed in float32 and rounded once.
Protocol   CTAs do not exchange anything within a launch.
Caller     ``decode/runtime/products.py``.
Source     docs/notebook/decode.md.
"""

import triton
import triton.language as tl


@triton.jit
def _swiglu(gate, up):
    """Return silu(gate) * up, of float32 tiles."""
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["offset", "tokens", "eighths", "runs", "run_columns"])
def product_kernel(
    stream, x, out, sources, starts, bias, offset, tokens, rows, eighths, runs, run_columns,
    STEPS: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr,
    BR: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply BT tokens by BR rows of a layer's matrix over a split of the columns.

    ``x`` is ``[tokens, K]``, with ``K = 8 * eighths``. ``sources [rows]`` are rows of the stream: 8 times the tile plus the row
    in it. ``starts [tiles, runs]``, from element ``offset`` on, is in parts, and a run has ``run_columns`` columns. ``out`` is
    ``[tokens, rows]``, or ``[tokens, rows / 2]`` if GATED, or float32 sums ``[splits, tokens, rows rounded up to BR]`` if SPLIT.
    ``bias [rows]`` or ``None`` is added unless SPLIT.

    Constants: STEPS: 0; or part i of a run lies at i / STEPS + i % STEPS * 8 (tiles side by side). EVEN: BK divides K. BK divides
    ``run_columns``, unless there is one run.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    row = tl.program_id(1) * BR + tl.arange(0, BR)
    K = eighths * 8
    first, end = 0, tl.cdiv(K, BK)
    if SPLIT:
        split, splits, blocks = tl.program_id(2), tl.num_programs(2), tl.cdiv(K, BK)
        first, end = split * blocks // splits, (split + 1) * blocks // splits
    there = row < rows
    source = tl.load(sources + row, mask=there, other=0)
    starts += offset + source // 8 * runs
    row_offset = source % 8 * 32
    column = tl.arange(0, BK)
    # The run of the next block of columns to load, and the first of the block's columns in it.
    run = first * BK // run_columns
    k_in_run = first * BK % run_columns
    start = tl.load(starts + run, mask=there, other=0)
    # Where the next run starts is loaded while the one before is multiplied.
    following = tl.load(starts + run + 1, mask=there & (run + 1 < runs), other=0)
    x_rows = x + tl.minimum(t, tokens - 1).to(tl.int64)[:, None] * K
    sums = tl.zeros((BR, BT), tl.float32)
    for block in range(first, end):
        k = block * BK
        part = k_in_run // 32 + column // 32
        if STEPS:
            part = part // STEPS + part % STEPS * 8
        weights = stream + (start.to(tl.int64) * 256 + row_offset)[:, None] + (part * 256 + column % 32)[None, :]
        if EVEN:
            w = tl.load(weights)
            values = tl.load(x_rows + (k + column)[None, :])
        else:
            inside = (k // 8 + column // 8 < eighths)[None, :]
            w = tl.load(weights, mask=inside, other=0.0)
            values = tl.load(x_rows + (k + column)[None, :], mask=inside, other=0.0)
        sums = tl.dot(w, tl.trans(values), sums)
        k_in_run += BK
        ends = k_in_run == run_columns
        run += ends.to(tl.int32)
        start = tl.where(ends, following, start)
        k_in_run = tl.where(ends, 0, k_in_run)
        following = tl.load(starts + run + 1, mask=there & ends & (run + 1 < runs), other=following)
    if SPLIT:
        at = (tl.program_id(2) * tokens + t).to(tl.int64)[:, None] * (tl.num_programs(1) * BR) + row[None, :]
        tl.store(out + at, tl.trans(sums), mask=(t < tokens)[:, None])
    elif GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (BR // 16, 2, 8, BT)), (0, 2, 3, 1)))
        result = tl.trans(tl.reshape(_swiglu(gate, up), (BR // 2, BT)).to(out.dtype.element_ty))
        channel = tl.program_id(1) * (BR // 2) + tl.arange(0, BR // 2)
        at = t.to(tl.int64)[:, None] * (rows // 2) + channel[None, :]
        tl.store(out + at, result, mask=(t < tokens)[:, None] & (channel < rows // 2)[None, :])
    else:
        if bias is not None:
            sums += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)[:, None]
        at = t.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(out + at, tl.trans(sums.to(out.dtype.element_ty)), mask=(t < tokens)[:, None] & there[None, :])


@triton.jit(do_not_specialize=["tokens"])
def sum_kernel(
    sums, out, bias, tokens, rows, padded,
    GATED: tl.constexpr, SPLITS: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Add the ``sums [SPLITS, tokens, padded]`` of all splits for BR rows of BT tokens, and finish as ``product_kernel`` does."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    row = tl.program_id(1) * BR + tl.arange(0, BR)
    there = (t < tokens)[:, None] & (row < padded)[None, :]
    total = tl.zeros((BT, BR), tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * tokens + t).to(tl.int64)[:, None] * padded + row[None, :]
        total += tl.load(sums + at, mask=there, other=0.0)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, (BT, BR // 16, 2, 8)), (0, 1, 3, 2)))
        result = tl.reshape(_swiglu(gate, up), (BT, BR // 2))
        channel = tl.program_id(1) * (BR // 2) + tl.arange(0, BR // 2)
        at = t.to(tl.int64)[:, None] * (rows // 2) + channel[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (channel < rows // 2)[None, :])
    else:
        if bias is not None:
            total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
        at = t.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (row < rows)[None, :])
