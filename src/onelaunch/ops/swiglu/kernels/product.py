"""Products of the same rows with the weights of gate and up, and the gate on their sums while those are in registers.

Computes   h = silu(x w_gate^T) * (x w_up^T); x and the weights in 32 or 16 bits, in float8, in NVFP4, or weights alone in NVFP4
Launches   fused_kernel and fused_nvfp4_kernel: both products and the gate. up_kernel: the product of up, where that of the gate
           is in memory already.
Grid       tiles of h, one a program, in swaths: programs that run at the same time share weights, and rows of x.
On chip    [BN, BM] of h^T as sums in float32, two for both products. Weights are the left operand: few rows of x are then the
           narrow side of a matrix instruction, which may have 16 columns but needs 64 rows.
Memory     reads x once per BN columns of h and the weights once per BM rows, writes h once; with KEEP both products as well, as
           the backward pass reads them: [M, 2 N], the gate's first.
Numerics   a float32 result is of float32 products without tf32: matrix units cut off what they add of other formats, and float32
           would show it. Others are of the dtype of x. float8 is multiplied as it is for bfloat16 results, where there are units
           for it, and joins float32 sums every BK channels; else in float16, which holds every float8 number. float16 and
           bfloat16 hold every code of NVFP4 times the scale of its block.
Edges      rows beyond the end are the last one again, and are not stored; channels beyond the end are zeros.
NVFP4      which channels a product takes together is free: one multiplies channels 2 i, the lower halves of bytes, another those
           behind them. Nothing is interleaved; x in 16 bits comes as words of two channels.
Source     the write-up "dual GEMM with a SiLU-mul epilogue"; swizzled scales: cuBLAS's order, see formats/swizzle.py.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import silu
from onelaunch.kernels.gemm.tiles import load_channels, rows_from, store, tile_of

BYTES = tl.constexpr(8)
"""Of codes that share a scale."""

# Few bits


@triton.jit
def from_float8(bits):
    """float8_e4m3fn, as bytes, in float16; without the format itself, which not every GPU has."""
    wide = bits.to(tl.uint16)
    size = wide & 0x7F
    half = ((wide & 0x80) << 8) | (size << 7) | tl.where(size == 0x7F, 0x7E00, 0).to(tl.uint16)  # 0x7F is NaN
    return half.to(tl.float16, bitcast=True) * 256.0  # the exponents' biases are 7 and 15


@triton.jit
def factor(stored, FACTOR: tl.constexpr):
    """A tile as the matrix product takes it; bytes are float8."""
    if stored.dtype == tl.uint8:
        return from_float8(stored).to(FACTOR)
    else:  # noqa: RET505 - Triton compiles what follows a return
        return stored


@triton.jit
def lower_codes(codes, scales, FACTOR: tl.constexpr):
    """code * scale of the lower halves of bytes; ``scales`` are of the same shape, in float16."""
    wide = codes.to(tl.uint16)
    half = ((wide & 0x8) << 12) | ((wide & 0x7) << 9)
    return (half.to(tl.float16, bitcast=True) * 16384.0 * scales).to(FACTOR)  # the exponents' biases are 1 and 15


@triton.jit
def upper_codes(codes, scales, FACTOR: tl.constexpr):
    """The same of the upper halves."""
    wide = codes.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x70) << 5)
    return (half.to(tl.float16, bitcast=True) * 16384.0 * scales).to(FACTOR)


@triton.jit
def along(bits, AXIS: tl.constexpr):
    """Scales in float16, from bytes, each BYTES times along AXIS."""
    scales = tl.expand_dims(from_float8(bits), AXIS + 1)
    if AXIS == 0:
        spread = tl.broadcast_to(scales, [bits.shape[0], BYTES, bits.shape[1]])
        return tl.reshape(spread, [bits.shape[0] * BYTES, bits.shape[1]])
    else:  # noqa: RET505 - Triton compiles what follows a return
        spread = tl.broadcast_to(scales, [bits.shape[0], bits.shape[1], BYTES])
        return tl.reshape(spread, [bits.shape[0], bits.shape[1] * BYTES])


@triton.jit
def scale_rows(blocks, rows, stride, blocks_inner, SWIZZLED: tl.constexpr):
    """Pointers to the first scale of each row."""
    if SWIZZLED:
        # atoms of 128 x 4 scales, which follow each other along the channels
        atom = rows // 128 * (tl.cdiv(blocks_inner, 4) * 512)
        return blocks + atom + rows % 32 * 16 + rows % 128 // 32 * 4
    return blocks + rows * stride


@triton.jit
def scale_offsets(s, SWIZZLED: tl.constexpr):
    """Of scales ``s`` from the first of their row."""
    if SWIZZLED:
        return s // 4 * 512 + s % 4
    return s


# After the last product


@triton.jit
def scaled(total, scale, rows, AXIS: tl.constexpr, PER_ROW: tl.constexpr):
    """Sums [BN, BM] times the scale of an operand, one for all or one for each of ``rows``, which lie along AXIS."""
    if scale is not None:
        if PER_ROW:
            total *= tl.expand_dims(tl.load(scale + rows), 1 - AXIS)
        else:
            total *= tl.load(scale)
    return total


@triton.jit
def finish(gate, up, h, products, m, n, M, N, KEEP: tl.constexpr):
    """h [M, N] of both sums [BN, BM]; with KEEP, the sums as well."""
    if KEEP:
        store(products, gate, m, n, 2 * N, M, N)
        store(products + N, up, m, n, 2 * N, M, N)
    store(h, silu(gate) * up, m, n, N, M, N)


# Kernels


@triton.jit
def fused_kernel(
    x, w_gate, w_up, x_scale, gate_scale, up_scale, h, products, M, N, K, x_stride, gate_stride, up_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    X_ROWS: tl.constexpr, W_ROWS: tl.constexpr, KEEP: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Both products and the gate, of plain tensors and of float8, which may come as bytes."""
    LIMIT: tl.constexpr = BK if x.dtype.element_ty.is_fp8() else 0
    m_start, n_start = tile_of(M, N, BM, BN, GROUP)
    m, n = rows_from(m_start, M, BM), rows_from(n_start, N, BN)
    k = tl.arange(0, BK)
    p_x = x + m[None, :] * x_stride + k[:, None]  # [BK, BM]
    p_gate = w_gate + n[:, None] * gate_stride + k[None, :]  # [BN, BK]
    p_up = w_up + n[:, None] * up_stride + k[None, :]
    gate, up = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
    for start in range(0, K, BK):
        b_x = factor(load_channels(p_x, K - start, k[:, None], EVEN), FACTOR)
        b_gate = factor(load_channels(p_gate, K - start, k[None, :], EVEN), FACTOR)
        b_up = factor(load_channels(p_up, K - start, k[None, :], EVEN), FACTOR)
        gate = tl.dot(b_gate, b_x, gate, input_precision="ieee", max_num_imprecise_acc=LIMIT)
        up = tl.dot(b_up, b_x, up, input_precision="ieee", max_num_imprecise_acc=LIMIT)
        p_x += BK
        p_gate += BK
        p_up += BK
    gate = scaled(scaled(gate, x_scale, m, 1, X_ROWS), gate_scale, n, 0, W_ROWS)
    up = scaled(scaled(up, x_scale, m, 1, X_ROWS), up_scale, n, 0, W_ROWS)
    finish(gate, up, h, products, m_start + tl.arange(0, BM), n_start + tl.arange(0, BN), M, N, KEEP)


@triton.jit
def up_kernel(
    x, w_up, gate, x_scale, up_scale, h, kept, M, N, K, x_stride, up_stride, gate_stride, kept_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    X_ROWS: tl.constexpr, W_ROWS: tl.constexpr, KEEP: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """The product of up, and the gate; ``gate [M, N]`` is the other product. With KEEP, up goes to ``kept`` as well."""
    LIMIT: tl.constexpr = BK if x.dtype.element_ty.is_fp8() else 0
    m_start, n_start = tile_of(M, N, BM, BN, GROUP)
    m, n = rows_from(m_start, M, BM), rows_from(n_start, N, BN)
    k = tl.arange(0, BK)
    p_x = x + m[None, :] * x_stride + k[:, None]  # [BK, BM]
    p_up = w_up + n[:, None] * up_stride + k[None, :]  # [BN, BK]
    up = tl.zeros([BN, BM], tl.float32)
    for start in range(0, K, BK):
        b_x = factor(load_channels(p_x, K - start, k[:, None], EVEN), FACTOR)
        b_up = factor(load_channels(p_up, K - start, k[None, :], EVEN), FACTOR)
        up = tl.dot(b_up, b_x, up, input_precision="ieee", max_num_imprecise_acc=LIMIT)
        p_x += BK
        p_up += BK
    up = scaled(scaled(up, x_scale, m, 1, X_ROWS), up_scale, n, 0, W_ROWS)
    b_gate = tl.load(gate + m[None, :] * gate_stride + n[:, None])  # [BN, BM]
    m, n = m_start + tl.arange(0, BM), n_start + tl.arange(0, BN)
    if KEEP:
        store(kept, up, m, n, kept_stride, M, N)
    store(h, silu(b_gate) * up, m, n, N, M, N)


@triton.jit
def fused_nvfp4_kernel(
    x, w_gate, w_up, x_blocks, gate_blocks, up_blocks, x_scale, gate_scale, up_scale, h, M, N, K,
    x_stride, gate_stride, up_stride, x_blocks_stride, gate_blocks_stride, up_blocks_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    SWIZZLED: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Both products and the gate, of NVFP4 weights and an ``x`` of the kind (uint8), or in 16 bits (words of two channels)."""
    STEP: tl.constexpr = BK // 64 * 512 if SWIZZLED else BK // 16
    m_start, n_start = tile_of(M, N, BM, BN, GROUP)
    m, n = rows_from(m_start, M, BM), rows_from(n_start, N, BN)
    pairs, blocks = K // 2, K // 16
    k, s = tl.arange(0, BK // 2), tl.arange(0, BK // 16)
    steps = scale_offsets(s, SWIZZLED)
    p_x = x + m[None, :] * x_stride + k[:, None]  # [BK / 2, BM]
    p_gate = w_gate + n[:, None] * gate_stride + k[None, :]  # [BN, BK / 2]
    p_up = w_up + n[:, None] * up_stride + k[None, :]
    p_gate_blocks = scale_rows(gate_blocks, n, gate_blocks_stride, blocks, SWIZZLED)[:, None] + steps[None, :]  # [BN, BK / 16]
    p_up_blocks = scale_rows(up_blocks, n, up_blocks_stride, blocks, SWIZZLED)[:, None] + steps[None, :]
    p_x_blocks = x_blocks
    if x_blocks is not None:
        p_x_blocks = scale_rows(x_blocks, m, x_blocks_stride, blocks, SWIZZLED)[None, :] + steps[:, None]  # [BK / 16, BM]
    gate, up = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
    for turn in range(tl.cdiv(K, BK)):
        left, scales_left = pairs - turn * (BK // 2), blocks - turn * (BK // 16)
        b_x = load_channels(p_x, left, k[:, None], EVEN)
        b_gate = load_channels(p_gate, left, k[None, :], EVEN)
        b_up = load_channels(p_up, left, k[None, :], EVEN)
        gate_scales = along(load_channels(p_gate_blocks, scales_left, s[None, :], EVEN), 1)
        up_scales = along(load_channels(p_up_blocks, scales_left, s[None, :], EVEN), 1)
        if x_blocks is not None:
            x_scales = along(load_channels(p_x_blocks, scales_left, s[:, None], EVEN), 0)
            lower, upper = lower_codes(b_x, x_scales, FACTOR), upper_codes(b_x, x_scales, FACTOR)
            p_x_blocks += STEP
        else:
            lower = (b_x & 0xFFFF).to(tl.uint16).to(FACTOR, bitcast=True)
            upper = ((b_x >> 16) & 0xFFFF).to(tl.uint16).to(FACTOR, bitcast=True)
        gate = tl.dot(lower_codes(b_gate, gate_scales, FACTOR), lower, gate, input_precision="ieee")
        up = tl.dot(lower_codes(b_up, up_scales, FACTOR), lower, up, input_precision="ieee")
        gate = tl.dot(upper_codes(b_gate, gate_scales, FACTOR), upper, gate, input_precision="ieee")
        up = tl.dot(upper_codes(b_up, up_scales, FACTOR), upper, up, input_precision="ieee")
        p_x += BK // 2
        p_gate += BK // 2
        p_up += BK // 2
        p_gate_blocks += STEP
        p_up_blocks += STEP
    gate = scaled(scaled(gate, x_scale, m, 1, False), gate_scale, n, 0, False)
    up = scaled(scaled(up, x_scale, m, 1, False), up_scale, n, 0, False)
    finish(gate, up, h, None, m_start + tl.arange(0, BM), n_start + tl.arange(0, BN), M, N, False)
