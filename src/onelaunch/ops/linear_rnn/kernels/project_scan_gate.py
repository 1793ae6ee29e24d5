"""The whole linear-RNN layer in one launch, with its matrix product on the tensor cores.

Computes   v = x W,  s_t = exp(log_decay_t) * s_{t-1} + v_t,  y_t = s_t * silu(gate_t)
Grid       (T / BT, B * V / BV): a program owns one tile of time and channels, so B = 1 fills the chip as well.
On chip    the tile of v as the accumulator of x W, then as slabs of steps; log_decay, loaded before the product begins, and
gate, loaded behind it.
Memory     reads x once per BV channels, W once per tile (from the cache), log_decay and gate once; writes y once; for a
           backward pass also v and one row of states a tile.
Carry      look_back.py of the scan.
Source     the "chunked GEMM fusion" that experiment 040 named as its next step.
"""

import triton
import triton.language as tl

from onelaunch.kernels.scan.forward import (
    ROWS,
    load_slabs,
    row_pointer,
    scan_gate_tile,
    sequence_words,
    store_slab,
    tile_pointers,
)
from onelaunch.kernels.scan.look_back import own_words_before


@triton.jit
def project_tile(
    x, weight, b, start, c, T, width, channels, x_stride_b, x_stride_t, weight_stride,
    BT: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """v = x W for BT steps and BV channels, float32 [BT, BV]; 0 outside the tensors."""
    rows = tl.arange(0, BT)
    k = tl.arange(0, BD)
    in_time = (start + rows < T)[:, None]
    in_range = (c < channels)[None, :]
    p_x = tile_pointers(x, b, start, x_stride_b, x_stride_t, rows, k)  # [BT, BD]
    p_weight = weight + k[:, None] * weight_stride + c[None, :]  # [BD, BV]
    v = tl.zeros([BT, BV], tl.float32)
    for d in range(0, width, BD):
        if EVEN and EVEN_D:
            b_x = tl.load(p_x)
            b_weight = tl.load(p_weight)
        elif EVEN_D:
            b_x = tl.load(p_x, mask=in_time, other=0.0)
            b_weight = tl.load(p_weight, mask=in_range, other=0.0)
        else:
            b_x = tl.load(p_x, mask=in_time & (d + k < width)[None, :], other=0.0)
            b_weight = tl.load(p_weight, mask=in_range & (d + k < width)[:, None], other=0.0)
        # float32 products in full precision: tf32 would cost three digits of the state
        v = tl.dot(b_x, b_weight, v, input_precision="ieee")
        p_x += BD
        p_weight += BD * weight_stride
    return v


@triton.jit
def slabs_of(tile):
    """[BT, BV] to ROWS = 8 slabs [BT / 8, BV]: slab r holds rows r, r + 8, ... One trip through shared memory."""
    bits = tl.reshape(tile, [tile.shape[0] // ROWS, 2, 2, 2, tile.shape[1]])
    low, high = tl.split(tl.permute(bits, (0, 4, 3, 2, 1)))  # the highest bit of r is split first
    low_0, low_1 = tl.split(low)
    high_0, high_1 = tl.split(high)
    slab_0, slab_1 = tl.split(low_0)
    slab_2, slab_3 = tl.split(low_1)
    slab_4, slab_5 = tl.split(high_0)
    slab_6, slab_7 = tl.split(high_1)
    return slab_0, slab_1, slab_2, slab_3, slab_4, slab_5, slab_6, slab_7


@triton.jit(do_not_specialize=["T", "sequences"])
def project_scan_gate_kernel(
    x, weight, log_decay, gate, initial, offsets, y, v, final, carries, words,
    T, width, channels, sequences, x_stride_b, x_stride_t, weight_stride,
    decay_stride_b, decay_stride_t, gate_stride_b, gate_stride_t,
    BT: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr, EVEN_D: tl.constexpr,
    GROUP: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    INITIAL: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """See the top of the file. KEEP: also write v and the carries, which the backward pass reads."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    slices = tl.cdiv(channels, BV)
    b = tl.program_id(1) // slices
    c = (tl.program_id(1) % slices) * BV + tl.arange(0, BV)
    own_words, group_words = sequence_words(words, b, tl.num_programs(1) // slices, tiles, channels, GROUP)
    before = own_words_before(own_words, tile, channels, c)
    segment = tl.arange(0, BT // ROWS)
    start = tile * BT
    t = start + segment * ROWS
    p_decay = row_pointer(log_decay, b, start, decay_stride_b, decay_stride_t)
    log_decays = load_slabs(p_decay, decay_stride_t, segment, t, T, c, channels, EVEN)
    values = slabs_of(
        project_tile(x, weight, b, start, c, T, width, channels, x_stride_b, x_stride_t, weight_stride, BT, BV, BD, EVEN, EVEN_D)
    )
    # Loaded behind x, which is needed first; it arrives while the carry is waited for
    p_gate = row_pointer(gate, b, start, gate_stride_b, gate_stride_t)
    gates = load_slabs(p_gate, gate_stride_t, segment, t, T, c, channels, EVEN)
    if KEEP:
        p_v = row_pointer(v, b, start, tl.cast(T, tl.int64) * channels, channels)
        for r in tl.static_range(ROWS):
            store_slab(p_v, r, values[r], channels, segment, t, T, c, channels, EVEN)
    scan_gate_tile(
        values, log_decays, gates, initial, offsets, y, final, carries, own_words, group_words, before,
        tile, tiles, b, segment, c, T, channels, sequences,
        GROUP, STEPS, EVEN, True, INITIAL, PACKED, FINAL, KEEP,
    )  # fmt: skip
