"""SwiGLU matrix products in Triton: both products of x with the weights, and the gate in the epilogue (portable).

Computes:  h = silu(x w_gate^T) * (x w_up^T). x and the weights are float32, 16-bit, float8 or NVFP4, or the weights
           alone are NVFP4.
Kernels:   fused_kernel and fused_nvfp4_kernel compute both products and the gate. up_kernel computes the product of w_up, when
           the other product is in memory already.
Grid:      one-dimensional, one CTA per tile [BM, BN] of h, in groups of GROUP tiles of rows, so that CTAs that run at the same
           time share weights and rows of x in L2 (kernels/gemm/tiles.py).
Registers: float32 accumulators [BN, BM] of h^T, one for each product. The weights are the left operand, so few rows of x are the
           N dimension of the matrix instruction, which may be 16, and not its M dimension, which must be 64.
Shared:    the operands of num_stages steps of BK channels, in Triton's software pipeline.
Memory:    reads x once per BN columns of h and the weights once per BM rows, and writes h once. With KEEP, products are also
           written for the backward pass: fused_kernel writes both, [M, 2 N], the gate's first, and up_kernel its own, [M, N].
Numerics:  a float32 result uses float32 products: tensor cores truncate what they add in other formats, which a float32 result
           would show. They are in TF32 if PRECISION is "tf32" (kernels/common/tf32.py), for float32 operands alone. Otherwise
           the dtype of x is multiplied. float8 is multiplied natively for bfloat16 results where tensor cores can, with partial
           sums promoted to float32 every BK channels; else as float16, which holds every float8 number. float16 and bfloat16
           hold every product of an NVFP4 code and the scale of its block exactly.
Edges:     rows beyond the end repeat the last row and are not stored. Channels beyond the end are zeros.
NVFP4:     the order of the channels in a product is free. One tl.dot multiplies the even channels (lower halves of bytes) and
           another the odd ones (upper halves), so nothing is interleaved. A 16-bit x is read as 32-bit words of two channels.
Names:     x_scale, gate_scale and up_scale are the operands' float32 scales: one per tensor or, with X_ROWS or W_ROWS, one per
           row. x_blocks, gate_blocks and up_blocks are NVFP4's float8 scales of blocks of 16 channels, as bytes. A pointer may be
           None: then there are no such scales. Strides are in elements. EVEN: BK divides K, and no load needs a mask.
Callers:   ``fused``, ``fused_nvfp4`` and ``up`` in launch.py launch them, for the variants in variants/fused.py.
Source:    the write-up "dual GEMM with a SiLU-mul epilogue"; swizzled scales: the order of cuBLAS, see formats/swizzle.py.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import silu
from onelaunch.kernels.common.tf32 import to_precision
from onelaunch.kernels.gemm.tiles import load_channels, rows_from, store, tile_of

BLOCK_BYTES = tl.constexpr(8)
"""Number of bytes of codes that share a scale: 16 channels of two codes per byte."""

# Dequantization


@triton.jit
def from_float8(bits):
    """Convert float8_e4m3fn, given as bytes, to float16 with integer operations; not every GPU has the format."""
    wide = bits.to(tl.uint16)
    size = wide & 0x7F
    half = ((wide & 0x80) << 8) | (size << 7) | tl.where(size == 0x7F, 0x7E00, 0).to(tl.uint16)  # 0x7F is NaN
    return half.to(tl.float16, bitcast=True) * 256.0  # 2^(15 - 7): exponent biases


@triton.jit
def to_mma_operand(stored, MMA_DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return a loaded tile as it is multiplied: uint8 tiles are float8, and float32 may be rounded to TF32."""
    if stored.dtype == tl.uint8:
        return from_float8(stored).to(MMA_DTYPE)
    else:  # noqa: RET505 - Triton compiles what follows a return
        return to_precision(stored, PRECISION)


@triton.jit
def decode_low(codes, scales, MMA_DTYPE: tl.constexpr):
    """Decode the codes in the lower halves of bytes and multiply by float16 ``scales`` of the same shape."""
    wide = codes.to(tl.uint16)
    half = ((wide & 0x8) << 12) | ((wide & 0x7) << 9)
    return (half.to(tl.float16, bitcast=True) * 16384.0 * scales).to(MMA_DTYPE)  # 2^(15 - 1): exponent biases


@triton.jit
def decode_high(codes, scales, MMA_DTYPE: tl.constexpr):
    """Decode the codes in the upper halves of bytes and multiply by float16 ``scales`` of the same shape."""
    wide = codes.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x70) << 5)
    return (half.to(tl.float16, bitcast=True) * 16384.0 * scales).to(MMA_DTYPE)


@triton.jit
def broadcast_scales(bits, AXIS: tl.constexpr):
    """Convert float8 scales, given as bytes, to float16 and repeat each BLOCK_BYTES times along AXIS."""
    scales = tl.expand_dims(from_float8(bits), AXIS + 1)
    if AXIS == 0:
        expanded = tl.broadcast_to(scales, [bits.shape[0], BLOCK_BYTES, bits.shape[1]])
        return tl.reshape(expanded, [bits.shape[0] * BLOCK_BYTES, bits.shape[1]])
    else:  # noqa: RET505 - Triton compiles what follows a return
        expanded = tl.broadcast_to(scales, [bits.shape[0], bits.shape[1], BLOCK_BYTES])
        return tl.reshape(expanded, [bits.shape[0], bits.shape[1] * BLOCK_BYTES])


@triton.jit
def scale_pointers(blocks, rows, stride, blocks_inner, SWIZZLED: tl.constexpr):
    """Return pointers to the first scale of each row; ``blocks_inner`` is the number of scales of a row."""
    if SWIZZLED:
        # atoms of 128 x 4 scales, which follow each other along the channels
        atom = rows // 128 * (tl.cdiv(blocks_inner, 4) * 512)
        return blocks + atom + rows % 32 * 16 + rows % 128 // 32 * 4
    return blocks + rows * stride


@triton.jit
def scale_offsets(s, SWIZZLED: tl.constexpr):
    """Return the offsets of the scales ``s`` from the first scale of their row."""
    if SWIZZLED:
        return s // 4 * 512 + s % 4
    return s


# Epilogue


@triton.jit
def apply_scale(total, scale, rows, AXIS: tl.constexpr, PER_ROW: tl.constexpr):
    """Multiply sums [BN, BM] by an operand's scale; with PER_ROW, one for each of ``rows``, which lie along AXIS."""
    if scale is not None:
        if PER_ROW:
            total *= tl.expand_dims(tl.load(scale + rows), 1 - AXIS)
        else:
            total *= tl.load(scale)
    return total


@triton.jit
def epilogue(gate, up, h, products, m, n, M, N, KEEP: tl.constexpr):
    """Store silu(gate) * up from both sums [BN, BM]; with KEEP, store the sums as well."""
    if KEEP:
        store(products, gate, m, n, 2 * N, M, N)
        store(products + N, up, m, n, 2 * N, M, N)
    store(h, silu(gate) * up, m, n, N, M, N)


# Kernels


@triton.jit
def fused_kernel(
    x, w_gate, w_up, x_scale, gate_scale, up_scale, h, products, M, N, K, x_stride, gate_stride, up_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    X_ROWS: tl.constexpr, W_ROWS: tl.constexpr, KEEP: tl.constexpr, MMA_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute h from plain tensors or float8; float8 comes as uint8 unless it is multiplied natively."""
    # Hopper accumulates float8 products in fewer bits than float32 has, so they are promoted.
    PROMOTE_EVERY: tl.constexpr = BK if x.dtype.element_ty.is_fp8() else 0
    m_start, n_start = tile_of(M, N, BM, BN, GROUP)
    m, n = rows_from(m_start, M, BM), rows_from(n_start, N, BN)
    k = tl.arange(0, BK)
    p_x = x + m[None, :] * x_stride + k[:, None]  # [BK, BM]
    p_gate = w_gate + n[:, None] * gate_stride + k[None, :]  # [BN, BK]
    p_up = w_up + n[:, None] * up_stride + k[None, :]
    gate, up = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
    for start in range(0, K, BK):
        b_x = to_mma_operand(load_channels(p_x, K - start, k[:, None], EVEN), MMA_DTYPE, PRECISION)
        b_gate = to_mma_operand(load_channels(p_gate, K - start, k[None, :], EVEN), MMA_DTYPE, PRECISION)
        b_up = to_mma_operand(load_channels(p_up, K - start, k[None, :], EVEN), MMA_DTYPE, PRECISION)
        gate = tl.dot(b_gate, b_x, gate, input_precision=PRECISION, max_num_imprecise_acc=PROMOTE_EVERY)
        up = tl.dot(b_up, b_x, up, input_precision=PRECISION, max_num_imprecise_acc=PROMOTE_EVERY)
        p_x += BK
        p_gate += BK
        p_up += BK
    gate = apply_scale(apply_scale(gate, x_scale, m, 1, X_ROWS), gate_scale, n, 0, W_ROWS)
    up = apply_scale(apply_scale(up, x_scale, m, 1, X_ROWS), up_scale, n, 0, W_ROWS)
    epilogue(gate, up, h, products, m_start + tl.arange(0, BM), n_start + tl.arange(0, BN), M, N, KEEP)


@triton.jit
def up_kernel(
    x, w_up, gate, x_scale, up_scale, h, kept, M, N, K, x_stride, up_stride, gate_stride, kept_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    X_ROWS: tl.constexpr, W_ROWS: tl.constexpr, KEEP: tl.constexpr, MMA_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the product of ``w_up``, and h from it and ``gate [M, N]``, the product of w_gate that an earlier launch stored.

    With KEEP, store the product of ``w_up`` to ``kept [M, N]``.
    """
    PROMOTE_EVERY: tl.constexpr = BK if x.dtype.element_ty.is_fp8() else 0
    m_start, n_start = tile_of(M, N, BM, BN, GROUP)
    m, n = rows_from(m_start, M, BM), rows_from(n_start, N, BN)
    k = tl.arange(0, BK)
    p_x = x + m[None, :] * x_stride + k[:, None]  # [BK, BM]
    p_up = w_up + n[:, None] * up_stride + k[None, :]  # [BN, BK]
    up = tl.zeros([BN, BM], tl.float32)
    for start in range(0, K, BK):
        b_x = to_mma_operand(load_channels(p_x, K - start, k[:, None], EVEN), MMA_DTYPE, PRECISION)
        b_up = to_mma_operand(load_channels(p_up, K - start, k[None, :], EVEN), MMA_DTYPE, PRECISION)
        up = tl.dot(b_up, b_x, up, input_precision=PRECISION, max_num_imprecise_acc=PROMOTE_EVERY)
        p_x += BK
        p_up += BK
    up = apply_scale(apply_scale(up, x_scale, m, 1, X_ROWS), up_scale, n, 0, W_ROWS)
    # m and n repeat the last row and column beyond the end, so this load needs no mask. The stores need the real indices.
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
    SWIZZLED: tl.constexpr, MMA_DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute h from NVFP4 weights and an ``x`` in NVFP4 (uint8) or in 16 bits (int32 words of two channels)."""
    # Scales from one step to the next. Swizzled scales advance by an atom, 128 rows x 4 scales or 512 bytes, per 64 channels.
    STEP: tl.constexpr = BK // 64 * 512 if SWIZZLED else BK // 16
    m_start, n_start = tile_of(M, N, BM, BN, GROUP)
    m, n = rows_from(m_start, M, BM), rows_from(n_start, N, BN)
    pairs, blocks = K // 2, K // 16
    k, s = tl.arange(0, BK // 2), tl.arange(0, BK // 16)
    offsets = scale_offsets(s, SWIZZLED)
    p_x = x + m[None, :] * x_stride + k[:, None]  # [BK / 2, BM]
    p_gate = w_gate + n[:, None] * gate_stride + k[None, :]  # [BN, BK / 2]
    p_up = w_up + n[:, None] * up_stride + k[None, :]
    p_gate_blocks = (
        scale_pointers(gate_blocks, n, gate_blocks_stride, blocks, SWIZZLED)[:, None] + offsets[None, :]
    )  # [BN, BK / 16]
    p_up_blocks = scale_pointers(up_blocks, n, up_blocks_stride, blocks, SWIZZLED)[:, None] + offsets[None, :]
    p_x_blocks = x_blocks
    if x_blocks is not None:
        p_x_blocks = scale_pointers(x_blocks, m, x_blocks_stride, blocks, SWIZZLED)[None, :] + offsets[:, None]  # [BK / 16, BM]
    gate, up = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
    for step in range(tl.cdiv(K, BK)):
        left, scales_left = pairs - step * (BK // 2), blocks - step * (BK // 16)
        b_x = load_channels(p_x, left, k[:, None], EVEN)
        b_gate = load_channels(p_gate, left, k[None, :], EVEN)
        b_up = load_channels(p_up, left, k[None, :], EVEN)
        gate_scales = broadcast_scales(load_channels(p_gate_blocks, scales_left, s[None, :], EVEN), 1)
        up_scales = broadcast_scales(load_channels(p_up_blocks, scales_left, s[None, :], EVEN), 1)
        if x_blocks is not None:
            x_scales = broadcast_scales(load_channels(p_x_blocks, scales_left, s[:, None], EVEN), 0)
            lower, upper = decode_low(b_x, x_scales, MMA_DTYPE), decode_high(b_x, x_scales, MMA_DTYPE)
            p_x_blocks += STEP
        else:
            lower = (b_x & 0xFFFF).to(tl.uint16).to(MMA_DTYPE, bitcast=True)
            upper = ((b_x >> 16) & 0xFFFF).to(tl.uint16).to(MMA_DTYPE, bitcast=True)
        gate = tl.dot(decode_low(b_gate, gate_scales, MMA_DTYPE), lower, gate, input_precision="ieee")
        up = tl.dot(decode_low(b_up, up_scales, MMA_DTYPE), lower, up, input_precision="ieee")
        gate = tl.dot(decode_high(b_gate, gate_scales, MMA_DTYPE), upper, gate, input_precision="ieee")
        up = tl.dot(decode_high(b_up, up_scales, MMA_DTYPE), upper, up, input_precision="ieee")
        p_x += BK // 2
        p_gate += BK // 2
        p_up += BK // 2
        p_gate_blocks += STEP
        p_up_blocks += STEP
    gate = apply_scale(apply_scale(gate, x_scale, m, 1, False), gate_scale, n, 0, False)
    up = apply_scale(apply_scale(up, x_scale, m, 1, False), up_scale, n, 0, False)
    epilogue(gate, up, h, None, m_start + tl.arange(0, BM), n_start + tl.arange(0, BN), M, N, False)
