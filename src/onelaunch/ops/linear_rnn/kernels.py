"""The whole linear-RNN layer in one launch, with its matrix product on the tensor cores.

Computes   v = x W,  s_t = exp(log_decay_t) * s_{t-1} + v_t,  y_t = s_t * silu(gate_t)
Grid       (T / BT, B * V / BV): a program owns one tile of time and channels, so B = 1 fills the chip as well.
On chip    the tile of v as the accumulator of x W, then as slabs of steps; log_decay, loaded before the product begins, and
gate, loaded behind it.
Memory     reads x once per BV channels, W once per tile (from the cache), log_decay and gate once; writes y once; for a
           backward pass also v and one row of states a tile.
Carry      lookback_kernels.py.
Source     the "chunked GEMM fusion" that experiment 040 named as its next step.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import decay_of, silu
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


@triton.jit(do_not_specialize=["T", "sequences"])
def stepwise_kernel(
    x, weight, log_decay, gate, initial, offsets, y, v, final, carries,
    T, width, channels, sequences, x_stride_b, x_stride_t, weight_stride,
    decay_stride_b, decay_stride_t, gate_stride_b, gate_stride_t,
    BT: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
    INITIAL: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The write-up's single launch, kept as the lesson it is: a vector-matrix product per time step.

    Grid (B or the packed sequences, V / BV); a program walks its sequence alone, W in registers (BD >= D). No tensor cores, no
    parallelism over time, no load ahead of its step: every step waits for memory once.
    """
    sequence = tl.program_id(0)
    c = tl.program_id(1) * BV + tl.arange(0, BV)
    k = tl.arange(0, BD)
    in_range = c < channels
    b_weight = tl.load(
        weight + k[:, None] * weight_stride + c[None, :], mask=(k < width)[:, None] & in_range[None, :], other=0.0
    ).to(tl.float32)  # [BD, BV]
    first, after, b = tl.cast(0, tl.int32), T, sequence.to(tl.int64)
    if PACKED:
        first, after = tl.load(offsets + sequence).to(tl.int32), tl.load(offsets + sequence + 1).to(tl.int32)
        b = sequence.to(tl.int64) * 0
    s = tl.zeros([BV], tl.float32)
    if INITIAL:
        s = tl.load(initial + sequence.to(tl.int64) * channels + c, mask=in_range, other=0.0)
    t = first
    while t < after:
        row = t.to(tl.int64)
        out = (b * T + row) * channels + c
        if KEEP:
            if t % BT == 0:
                tl.store(carries + (b * tl.cdiv(T, BT) + t // BT) * channels + c, s, mask=in_range)
        # All of a step's loads before its first barrier: behind one, each is a trip to memory of its own
        b_decay = tl.load(log_decay + b * decay_stride_b + row * decay_stride_t + c, mask=in_range, other=0.0)
        b_gate = tl.load(gate + b * gate_stride_b + row * gate_stride_t + c, mask=in_range, other=0.0)
        b_x = tl.load(x + b * x_stride_b + row * x_stride_t + k, mask=k < width, other=0.0).to(tl.float32)
        b_v = tl.sum(b_x[:, None] * b_weight, 0)  # [BV]
        s = decay_of(b_decay) * s + b_v
        tl.store(y + out, (s * silu(b_gate)).to(y.dtype.element_ty), mask=in_range)
        if KEEP:
            tl.store(v + out, b_v.to(v.dtype.element_ty), mask=in_range)
        t += 1
    if FINAL:
        tl.store(final + sequence.to(tl.int64) * channels + c, s, mask=in_range)


@triton.jit
def matmul_kernel(
    a, b, out, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out [M, N] = a b, out contiguous: the first launch of three. Grid: tiles of out, neighbours share columns of b."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    per_group = GROUP_M * tiles_n
    first = (pid // per_group) * GROUP_M
    high = min(tiles_m - first, GROUP_M)
    m = (first + pid % per_group % high) * BM + tl.arange(0, BM)
    n = (pid % per_group // high) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    p_a = a + m.to(tl.int64)[:, None] * a_stride_m + k.to(tl.int64)[None, :] * a_stride_k  # [BM, BK]
    p_b = b + k.to(tl.int64)[:, None] * b_stride_k + n.to(tl.int64)[None, :] * b_stride_n  # [BK, BN]
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        inside = start + k < K
        b_a = tl.load(p_a, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        b_b = tl.load(p_b, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(b_a, b_b, total, input_precision="ieee")
        p_a += BK * a_stride_k
        p_b += BK * b_stride_k
    p_out = out + m.to(tl.int64)[:, None] * N + n.to(tl.int64)[None, :]
    tl.store(p_out, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
