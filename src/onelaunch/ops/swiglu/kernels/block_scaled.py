"""Both products of NVFP4 operands and the gate, in one launch, by matrix instructions that know block scales.

Computes   h = silu(g) * u,  g = a_global b1_global a b1^T,  u = a_global b2_global a b2^T;  a, b1, b2 as codes and block scales
Grid       a program per tile [BM, BN] of h.
Memory     each K step reads BM rows of a and BN of each weight with their scales; h is written once.
On chip    one accumulator holds both products side by side: two in one loop are miscompiled or refused by Triton on these chips.
Numerics   products and sums in float32 as tcgen05 has them; the gate in float32.
Source     NVFP4 and its swizzled scales: cuBLAS 12.9, block scaling.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import silu


@triton.jit
def scale_offset(row, block, blocks, SWIZZLED: tl.constexpr):
    """Where the scale of a block of a row lies; ``blocks`` is how many a row has. Offsets of rows and of blocks add up."""
    if SWIZZLED:
        atoms = tl.cdiv(blocks, 4)
        return (row // 128) * (atoms * 512) + (row % 32) * 16 + ((row % 128) // 32) * 4 + (block // 4) * 512 + block % 4
    return row * blocks + block


@triton.jit
def block_scaled_kernel(
    a, b1, b2, sfa, sfb1, sfb2, a_global, b1_global, b2_global, h, M, N, K, a_stride, b1_stride, b2_stride,
    SWIZZLED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    columns_of_tiles = tl.cdiv(N, BN)
    row = (tl.program_id(0) // columns_of_tiles * BM + tl.arange(0, BM)).to(tl.int64)
    first = tl.program_id(0) % columns_of_tiles * BN
    side = tl.arange(0, 2 * BN)  # the gate's columns, then those of up
    column = (first + side % BN).to(tl.int64)
    byte = tl.arange(0, BK // 2)
    block = tl.arange(0, BK // 16)
    blocks = K // 16
    weight = tl.where(side < BN, b1 + column * b1_stride, b2 + column * b2_stride)
    here = row < M
    there = column < N
    of_row = scale_offset(row, 0, blocks, SWIZZLED)
    of_column = scale_offset(column, 0, blocks, SWIZZLED)
    scale = tl.where(side < BN, sfb1 + of_column, sfb2 + of_column)
    acc = tl.zeros([BM, 2 * BN], tl.float32)
    for k in range(tl.cdiv(K, BK)):
        at_byte = k * (BK // 2) + byte
        at_block = k * (BK // 16) + block
        inside = at_byte < K // 2
        within = at_block < blocks
        of_block = scale_offset(0, at_block, blocks, SWIZZLED)
        b_a = tl.load(a + row[:, None] * a_stride + at_byte[None, :], mask=here[:, None] & inside[None, :], other=0)  # [BM, BK/2]
        b_w = tl.load(weight[None, :] + at_byte[:, None], mask=there[None, :] & inside[:, None], other=0)  # [BK/2, 2 BN]
        s_a = tl.load(sfa + of_row[:, None] + of_block[None, :], mask=here[:, None] & within[None, :], other=0.0)  # [BM, BK/16]
        s_w = tl.load(scale[:, None] + of_block[None, :], mask=there[:, None] & within[None, :], other=0.0)  # [2 BN, BK/16]
        acc = tl.dot_scaled(b_a, s_a, "e2m1", b_w, s_w, "e2m1", acc)
    gate, up = tl.split(tl.permute(tl.reshape(acc, [BM, 2, BN]), (0, 2, 1)))
    shared = tl.load(a_global)
    b_h = silu(gate * (shared * tl.load(b1_global))) * (up * (shared * tl.load(b2_global)))
    c = (first + tl.arange(0, BN)).to(tl.int64)
    tl.store(h + row[:, None] * N + c[None, :], b_h.to(h.dtype.element_ty), mask=here[:, None] & (c < N)[None, :])
