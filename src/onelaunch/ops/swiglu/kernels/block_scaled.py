"""SwiGLU with both operands in NVFP4, in one launch, by the block-scaled matrix instructions of Blackwell (tcgen05).

Computes:  h = silu(g) * u,  g = a_global b1_global a b1^T,  u = a_global b2_global a b2^T;  a, b1, b2: codes * block scales
Grid:      one-dimensional, one CTA per tile [BM, BN] of h, along the columns first.
Memory:    each step of BK channels reads BM rows of a and BN rows of each weight with their scales; h is written once.
Operands:  a [M, K / 2], b1 and b2 [N, K / 2] hold two 4-bit codes (e2m1) per byte, the even channel in the lower half. sfa, sfb1
           and sfb2 hold a scale (float8_e4m3fn) for every 16 channels of a row. a_global, b1_global and b2_global are pointers to
           one float32 scale of a whole tensor each.
On chip:   one float32 accumulator [BM, 2 BN] holds both products side by side, the gate's columns first. One tl.dot_scaled
           computes both, with BN rows of each weight as its right operand. The reason: Triton miscompiles or refuses two
           block-scaled products in one loop on these GPUs.
Numerics:  products and sums in float32 as tcgen05 computes them; scales of whole tensors and the gate in float32.
Caller:    ``block_scaled`` in launch.py launches it, for the variant of that name.
Status:    compiled and emulated, not run on hardware.
Source:    NVFP4 and its swizzled scales: cuBLAS 12.9, block scaling.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import silu


@triton.jit
def scale_offset(row, block, blocks, SWIZZLED: tl.constexpr):
    """Return the offset of the scale of ``block`` in ``row``; a row has ``blocks`` scales.

    It is the sum of an offset that depends on the row and one that depends on the block. The kernel computes the first with block
    0 before its loop, and the second with row 0 in each step. Swizzled scales consist of atoms of 128 rows x 4 scales, 512 bytes,
    which follow each other along the blocks first (formats/swizzle.py).
    """
    if SWIZZLED:
        atoms = tl.cdiv(blocks, 4)
        return (row // 128) * (atoms * 512) + (row % 32) * 16 + ((row % 128) // 32) * 4 + (block // 4) * 512 + block % 4
    return row * blocks + block


@triton.jit
def block_scaled_kernel(
    a, b1, b2, sfa, sfb1, sfb2, a_global, b1_global, b2_global, h, M, N, K, a_stride, b1_stride, b2_stride,
    SWIZZLED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store h [M, N], contiguous. The scales of an operand with R rows are [R, K / 16], contiguous, or SWIZZLED."""
    column_tiles = tl.cdiv(N, BN)
    row = (tl.program_id(0) // column_tiles * BM + tl.arange(0, BM)).to(tl.int64)
    first = tl.program_id(0) % column_tiles * BN
    both = tl.arange(0, 2 * BN)  # accumulator columns: those of the gate, then those of up
    column = (first + both % BN).to(tl.int64)
    byte = tl.arange(0, BK // 2)
    block = tl.arange(0, BK // 16)
    blocks = K // 16
    weight = tl.where(both < BN, b1 + column * b1_stride, b2 + column * b2_stride)  # pointers [2 BN]
    in_m = row < M
    in_n = column < N
    row_offsets = scale_offset(row, 0, blocks, SWIZZLED)
    column_offsets = scale_offset(column, 0, blocks, SWIZZLED)
    scale = tl.where(both < BN, sfb1 + column_offsets, sfb2 + column_offsets)  # pointers [2 BN]
    acc = tl.zeros([BM, 2 * BN], tl.float32)
    for k in range(tl.cdiv(K, BK)):
        at_byte = k * (BK // 2) + byte
        at_block = k * (BK // 16) + block
        in_k = at_byte < K // 2
        in_blocks = at_block < blocks
        block_offsets = scale_offset(0, at_block, blocks, SWIZZLED)
        b_a = tl.load(a + row[:, None] * a_stride + at_byte[None, :], mask=in_m[:, None] & in_k[None, :], other=0)  # [BM, BK/2]
        b_w = tl.load(weight[None, :] + at_byte[:, None], mask=in_n[None, :] & in_k[:, None], other=0)  # [BK/2, 2 BN]
        s_a = tl.load(
            sfa + row_offsets[:, None] + block_offsets[None, :], mask=in_m[:, None] & in_blocks[None, :], other=0.0
        )  # [BM, BK/16]
        s_w = tl.load(
            scale[:, None] + block_offsets[None, :], mask=in_n[:, None] & in_blocks[None, :], other=0.0
        )  # [2 BN, BK/16]
        acc = tl.dot_scaled(b_a, s_a, "e2m1", b_w, s_w, "e2m1", acc)
    gate, up = tl.split(tl.permute(tl.reshape(acc, [BM, 2, BN]), (0, 2, 1)))
    a_scale = tl.load(a_global)
    b_h = silu(gate * (a_scale * tl.load(b1_global))) * (up * (a_scale * tl.load(b2_global)))
    c = (first + tl.arange(0, BN)).to(tl.int64)
    tl.store(h + row[:, None] * N + c[None, :], b_h.to(h.dtype.element_ty), mask=in_m[:, None] & (c < N)[None, :])
