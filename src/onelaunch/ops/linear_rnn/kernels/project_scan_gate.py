"""The whole linear-RNN layer in one launch, with its matrix product, on tensor cores for 16-bit inputs.

Computes   v = x W,  s_t = exp(log_decay_t) * s_{t-1} + v_t,  y_t = s_t * silu(gate_t)   (or y = s where GATED is false)
Grid       (ceil(T / BT), B * ceil(V / BV)). A CTA owns one tile of BT steps by BV channels, so time is split too and B = 1
           fills the device as well. All warps do the same work.
On chip    the tile of v, first as the accumulator [BT, BV] of x W in float32, then as ROWS slabs [BT / ROWS, BV] (see
           kernels/scan/look_back.py); the slabs of log_decay, loaded before the product begins, and of the gate, loaded after
           it. All are registers. Triton pipelines x [BT, BD] and W [BD, BV] through shared memory, which also serves the one
           change of layout to slabs.
Memory     reads x once per BV channels, W once per tile of steps (from the L2 cache), log_decay and gate once; writes y once.
           For a backward pass also writes v and one row of states per tile (KEEP).
Protocol   the decoupled look-back of kernels/scan/look_back.py, after the product; see there for words, order and progress.
Numerics   v stays in float32 on its way into the scan; float32 operands are multiplied in TF32 only if PRECISION is "tf32"
           (kernels/common/tf32.py). The scan's numerics are those of kernels/scan/forward.py.
Caller     ``chunked`` in launch.py launches it, for the variant ``fused_chunked`` where the kernel for Hopper does not suit.
Source     the "chunked GEMM fusion" that experiment 040 named as its next step; docs/notebook/linear_rnn.md.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.tf32 import to_precision
from onelaunch.kernels.scan.forward import (
    ROWS,
    load_slabs,
    row_pointer,
    scan_gate_tile,
    sequence_words,
    store_slab,
    tile_pointers,
)
from onelaunch.kernels.scan.look_back import read_previous_words


@triton.jit
def project_tile(
    x, weight, b, start, c, T, width, channels, x_stride_b, x_stride_t, weight_stride,
    BT: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return v = x W for BT steps and BV channels, float32 [BT, BV]; 0 outside the tensors.

    EVEN: BT divides T and BV divides V, so steps and channels need no mask. EVEN_D: BD divides D, so columns of x need none.
    """
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
        # By default products of float32 stay in full precision: TF32 costs three digits of the state.
        v = tl.dot(to_precision(b_x, PRECISION), to_precision(b_weight, PRECISION), v, input_precision=PRECISION)
        p_x += BD
        p_weight += BD * weight_stride
    return v


@triton.jit
def split_into_slabs(tile):
    """Split a tile [BT, BV] into ROWS = 8 slabs [BT / 8, BV]: slab r holds rows r, r + 8, ...

    It costs one trip through shared memory.
    """
    bits = tl.reshape(tile, [tile.shape[0] // ROWS, 2, 2, 2, tile.shape[1]])
    low, high = tl.split(tl.permute(bits, (0, 4, 3, 2, 1)))  # the highest bit of r is split off first
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
    GATED: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y: see the top of the file.

    GATED: multiply the states by the gate, which is not read otherwise. KEEP: also write v and the carries, which the backward
    pass reads.
    """
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    slices = tl.cdiv(channels, BV)
    b = tl.program_id(1) // slices
    c = (tl.program_id(1) % slices) * BV + tl.arange(0, BV)
    own_words, group_words = sequence_words(words, b, tl.num_programs(1) // slices, tiles, channels, GROUP)
    before = read_previous_words(own_words, tile, channels, c)
    segment = tl.arange(0, BT // ROWS)
    start = tile * BT
    t = start + segment * ROWS
    p_decay = row_pointer(log_decay, b, start, decay_stride_b, decay_stride_t)
    log_decays = load_slabs(p_decay, decay_stride_t, segment, t, T, c, channels, EVEN)
    values = split_into_slabs(
        project_tile(
            x,
            weight,
            b,
            start,
            c,
            T,
            width,
            channels,
            x_stride_b,
            x_stride_t,
            weight_stride,
            BT,
            BV,
            BD,
            EVEN,
            EVEN_D,
            PRECISION,
        )
    )
    gates = values  # stands for the argument, which is not read if GATED is false
    if GATED:
        # The gate is loaded after x, which is needed first. It arrives while this CTA waits for its carry.
        p_gate = row_pointer(gate, b, start, gate_stride_b, gate_stride_t)
        gates = load_slabs(p_gate, gate_stride_t, segment, t, T, c, channels, EVEN)
    if KEEP:
        p_v = row_pointer(v, b, start, tl.cast(T, tl.int64) * channels, channels)
        for r in tl.static_range(ROWS):
            store_slab(p_v, r, values[r], channels, segment, t, T, c, channels, EVEN)
    scan_gate_tile(
        values, log_decays, gates, initial, offsets, y, final, carries, own_words, group_words, before,
        tile, tiles, b, segment, c, T, channels, sequences,
        GROUP, STEPS, EVEN, GATED, INITIAL, PACKED, FINAL, KEEP,  # carries are stored if KEEP
    )  # fmt: skip
