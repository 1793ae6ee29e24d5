"""The whole linear-RNN layer in one launch for few rows, as in steps of decoding, where loading the weight takes the time.

Computes   v = x W,  s_t = exp(log_decay_t) * s_{t-1} + v_t,  y_t = s_t * silu(gate_t)   (or y = s where GATED is false)
Grid       one CTA per slice of BN columns and part of D, ceil(V / BN) times parts. The slices of a part are neighbours, so that
           CTAs which read the same lines of W run at the same time. A CTA has all M = B T rows, in one tile of BM rows.
On chip    blocks of x [BM, BK] and W [BK, BN], which Triton copies by cp.async into STAGES - 1 buffers of shared memory. A CTA's
           part of W fits into them for usual layers, so all of it is in flight from the start. Matrix units (tensor cores)
           multiply: each of the WARPS warps takes its own BK / WARPS rows of a block of W, and has its own sums [BM, BN], so that
           no two warps read the same data. With VECTOR, for float32 and the fewest rows, CUDA cores multiply and sum row by row
           instead. The sums of all warps are added through shared memory, into a layout that gives each thread its own elements.
           With BY_COLUMNS the columns of W are contiguous, as in the transposed weight of a torch.nn.Linear, and the loads are
           along D.
Memory     reads W once, x once per slice, mostly from L2, and decays, gates and states once per part; writes y and final states.
           With several parts also writes and reads the float32 sums of each, BM * V * parts numbers, in L2.
Protocol   with several parts (SPLIT) one counter per slice: when all warps of a CTA have stored its sums (bar.sync), one thread
           adds 1 with release and acquire semantics at GPU scope. The CTA that finds all others of its slice counted adds the
           sums, finishes the slice, and sets the counter back to 0. No CTA waits for another.
Order      sums are added in the order of the parts, so results do not depend on which CTA is last.
Scan       SCAN: a segmented scan over the rows of a tile, whose segments are sequences; without it every sequence has one step. A
           sequence never reads states of another, so NaN stays in its own.
Numerics   v stays in float32; float32 operands are multiplied in TF32 only if PRECISION is "tf32" (kernels/common/tf32.py).
           Decays multiply in linear space, and nothing is divided by a decay, so -inf is safe. y is rounded once.
Caller     ``few_rows`` in launch_few_rows.py, for the variant ``fused_few_rows``.
Source     split-K products with a last CTA that adds; docs/notebook/linear_rnn.md has the counts of bytes and latencies.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import decay_of, silu
from onelaunch.kernels.common.tf32 import to_precision
from onelaunch.kernels.scan.forward import copy_empty_sequences, sequence_of


@triton.jit
def combine_in_sequences(starts_1, decay_1, state_1, starts_2, decay_2, state_2):
    """Return the map of steps 1 followed by steps 2; where a sequence starts in steps 2, nothing of steps 1 enters."""
    state = tl.where(starts_2 != 0, state_2, decay_2 * state_1 + state_2)
    return starts_1 | starts_2, decay_1 * decay_2, state


@triton.jit
def take_second(first, second):
    """Return the second argument; an inclusive scan with this function returns its input."""
    return second


@triton.jit
def spread(tile):
    """Return the tile with its elements spread over the threads.

    In the layout of a product's sums each warp has a whole tile [BM, BN]. Triton keeps this layout for all that follows, so that
    every warp would compute all exponentials. It does not keep it across a scan, here one along a new axis of size 1. On sm_90a
    the kernel for 16 rows has 448 instructions with this scan and 654 without.
    """
    return tl.sum(tl.associative_scan(tl.expand_dims(tile, 0), 0, take_second), 0)


@triton.jit
def project_by_vectors(
    x, weight, M, c, first_k, blocks, width, channels, x_stride, weight_stride,
    BM: tl.constexpr, BK: tl.constexpr, EVEN_D: tl.constexpr, EVEN_V: tl.constexpr, STAGES: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return x W for all rows and the columns ``c`` over ``blocks`` blocks of D from ``first_k``, float32 [BM, BN].

    ``weight`` points to the first row of W or, with BY_COLUMNS, to column ``c[0]``.

    CUDA cores multiply and sum row by row. With EVEN_D blocks end where D ends, so k needs no mask. With EVEN_V slices end where
    V ends, so ``c`` needs none.
    """
    rows = tl.arange(0, BM)
    k = tl.arange(0, BK)
    in_v = (c < channels)[None, :]
    p_x = x + first_k + k
    if BY_COLUMNS:
        p_weight = weight + first_k + (k[:, None] + tl.arange(0, c.shape[0])[None, :] * weight_stride)  # [BK, BN]
    else:
        p_weight = weight + first_k * tl.cast(weight_stride, tl.int64) + (k[:, None] * weight_stride + c[None, :])
    v = tl.zeros([BM, c.shape[0]], tl.float32)
    for block in tl.range(0, 1 if STAGES == 1 else blocks, num_stages=STAGES):
        in_d = first_k + block * BK + k < width
        if EVEN_D and EVEN_V:
            b_weight = tl.load(p_weight)
        elif EVEN_D:
            b_weight = tl.load(p_weight, mask=in_v, other=0.0)
        else:
            b_weight = tl.load(p_weight, mask=in_d[:, None] & in_v, other=0.0)
        loaded = ()  # all rows are loaded before the first is multiplied
        for m in tl.static_range(BM):
            loaded = loaded + (tl.load(p_x + m * tl.cast(x_stride, tl.int64), mask=in_d & (m < M), other=0.0),)
        for m in tl.static_range(BM):
            products = loaded[m].to(tl.float32)[:, None] * b_weight.to(tl.float32)
            v += tl.where((rows == m)[:, None], tl.sum(products, 0)[None, :], 0.0)
        p_x += BK
        p_weight += BK if BY_COLUMNS else BK * tl.cast(weight_stride, tl.int64)
    return spread(v)


@triton.jit
def project_by_matrix_units(
    x, weight, M, c, first_k, blocks, width, channels, x_stride, weight_stride,
    BM: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr, EVEN_D: tl.constexpr, EVEN_V: tl.constexpr,
    STAGES: tl.constexpr, BY_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return x W as :func:`project_by_vectors` does, by matrix units; each warp sums a part of each block."""
    SHARE: tl.constexpr = BK // WARPS  # rows of a block of W that a warp multiplies
    rows = tl.arange(0, BM)
    share = tl.arange(0, SHARE)
    k = tl.arange(0, WARPS)[:, None] * SHARE + share[None, :]  # [WARPS, SHARE]
    p_x = x + first_k + (rows[None, :, None] * x_stride + k[:, None, :])  # [WARPS, BM, SHARE]
    if BY_COLUMNS:
        p_weight = weight + first_k + (k[:, :, None] + tl.arange(0, c.shape[0])[None, None, :] * weight_stride)
    else:
        of_weight = k[:, :, None] * weight_stride + c[None, None, :]  # [WARPS, SHARE, BN]
        p_weight = weight + first_k * tl.cast(weight_stride, tl.int64) + of_weight
    in_m = (rows < M)[None, :, None]
    in_v = (c < channels)[None, None, :]
    sums = tl.zeros([WARPS, BM, c.shape[0]], tl.float32)
    for block in tl.range(0, 1 if STAGES == 1 else blocks, num_stages=STAGES):
        in_d = first_k + block * BK + k < width
        if EVEN_D and EVEN_V:
            b_x = tl.load(p_x, mask=in_m, other=0.0)
            b_weight = tl.load(p_weight)
        elif EVEN_D:
            b_x = tl.load(p_x, mask=in_m, other=0.0)
            b_weight = tl.load(p_weight, mask=in_v, other=0.0)
        else:
            b_x = tl.load(p_x, mask=in_m & in_d[:, None, :], other=0.0)
            b_weight = tl.load(p_weight, mask=in_d[:, :, None] & in_v, other=0.0)
        sums = tl.dot(to_precision(b_x, PRECISION), to_precision(b_weight, PRECISION), sums, input_precision=PRECISION)
        p_x += BK
        p_weight += BK if BY_COLUMNS else BK * tl.cast(weight_stride, tl.int64)
    return tl.sum(spread(sums), 0)


@triton.jit
def add_parts(terms, parts, distance, AT_ONCE: tl.constexpr):
    """Return the sum of ``parts`` tiles, ``distance`` elements apart, read from L2, since other CTAs have just written them.

    AT_ONCE of them are loaded before they are added: one after the other, each would take the latency of L2.
    """
    total = tl.zeros(terms.shape, tl.float32)
    for first in range(0, parts, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            there = tl.full(terms.shape, 1, tl.int1) & (first + i < parts)
            total += tl.load(terms + (first + i) * tl.cast(distance, tl.int64), mask=there, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def finish(
    v, decays, gates, entering, initial, offsets, y, final, m, c, M, T, channels, sequences,
    STEPS: tl.constexpr, SCAN: tl.constexpr, GATED: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr,
    FINAL: tl.constexpr,
):  # fmt: skip
    """Scan v [BM, BN] over the rows of each sequence, gate, and store y and the final states.

    ``entering`` holds the initial states in the rows of first steps. For packed sequences they are loaded here, by the offsets.
    """
    valid = (m < M)[:, None] & (c < channels)[None, :]
    if PACKED:
        sequence, start, after = sequence_of(offsets, sequences, m, STEPS)
        starts, ends = m == start, m + 1 == after
        if INITIAL:
            own = initial + sequence.to(tl.int64)[:, None] * channels + c[None, :]
            entering = tl.load(own, mask=valid & starts[:, None], other=0.0)
    elif SCAN:
        sequence = m // T
        starts, ends = m == sequence * T, m + 1 == (sequence + 1) * T
    else:
        sequence = m
        starts, ends = m >= 0, m >= 0
    s = v
    if INITIAL:
        s = tl.where(starts[:, None], decays * entering + v, v)
    if SCAN:
        flags = tl.where(starts[:, None], 1, tl.zeros(v.shape, tl.int32))
        _, _, s = tl.associative_scan((flags, decays, s), 0, combine_in_sequences)
    out = s
    if GATED:
        out = s * gates
    tl.store(y + (m[:, None] * channels + c[None, :]), out.to(y.dtype.element_ty), mask=valid)
    if FINAL:
        of_final = sequence.to(tl.int64)[:, None] * channels + c[None, :]
        tl.store(final + of_final, s, mask=valid & ends[:, None])
        if PACKED:
            copy_empty_sequences(initial, final, offsets, sequences, 0, 1, c, channels, INITIAL)


# Without do_not_specialize, Triton would compile again for a number that is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["M", "T", "sequences", "parts", "blocks"])
def few_rows_kernel(
    x, weight, log_decay, gate, initial, offsets, y, final, terms, counters,
    M, T, width, channels, sequences, parts, blocks,
    x_stride, weight_stride, decay_stride, gate_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_V: tl.constexpr, SPLIT: tl.constexpr, AT_ONCE: tl.constexpr, STEPS: tl.constexpr,
    SCAN: tl.constexpr, GATED: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr,
    BY_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one slice of y and of the final states, or one part of its sums: see the top of the file.

    x [M, D], log_decay and gate [M, V] have a row for each step of each sequence, ``x_stride`` and so on elements apart. BM times
    each of these strides is below 2^31. So is BK times ``weight_stride``, the elements from one row of W to the next, or with
    BY_COLUMNS BN times it, those from one column to the next. A part has ``blocks`` blocks of BK rows of W, one if
    STAGES is 1. ``terms`` [parts, slices, BM, BN] is float32 scratch, and ``counters`` [slices], int64, are 0 before and after
    the launch; both are None unless SPLIT.
    """
    slices = tl.cdiv(channels, BN)
    own, part = tl.program_id(0) % slices, tl.program_id(0) // slices
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    c = own * BN + n
    valid = (m < M)[:, None] & (c < channels)[None, :]
    # Loads that the scan needs are issued before the product, so that they arrive while the weight does.
    log_decays = tl.load(log_decay + (m[:, None] * decay_stride + c[None, :]), mask=valid, other=0.0)
    gates = log_decays  # a placeholder, which is not used if GATED is false
    if GATED:
        gates = tl.load(gate + (m[:, None] * gate_stride + c[None, :]), mask=valid, other=0.0)
    entering = tl.zeros([BM, BN], tl.float32)
    if INITIAL and not PACKED:
        b = m // T if SCAN else m
        p_initial = initial + (b[:, None] * channels + c[None, :])
        entering = tl.load(p_initial, mask=valid & (m == b * T)[:, None] if SCAN else valid, other=0.0)
    decays = decay_of(log_decays)
    gates = silu(gates)
    first_k = part * blocks * BK
    if BY_COLUMNS:
        weight += own * BN * tl.cast(weight_stride, tl.int64)
    if VECTOR:
        v = project_by_vectors(
            x, weight, M, c, first_k, blocks, width, channels, x_stride, weight_stride,
            BM, BK, EVEN_D, EVEN_V, STAGES, BY_COLUMNS,
        )  # fmt: skip
    else:
        v = project_by_matrix_units(
            x, weight, M, c, first_k, blocks, width, channels, x_stride, weight_stride,
            BM, BK, WARPS, EVEN_D, EVEN_V, STAGES, BY_COLUMNS, PRECISION,
        )  # fmt: skip
    if SPLIT:
        of_tile = m[:, None] * BN + n[None, :]
        p_terms = terms + own * (BM * BN) + of_tile
        distance = slices * (BM * BN)
        tl.store(p_terms + part * tl.cast(distance, tl.int64), v)
        tl.debug_barrier()  # all warps have stored before one thread counts the CTA
        if tl.atomic_add(counters + own, 1, sem="acq_rel", scope="gpu") == parts - 1:
            finish(
                add_parts(p_terms, parts, distance, AT_ONCE), decays, gates, entering, initial, offsets, y, final,
                m, c, M, T, channels, sequences, STEPS, SCAN, GATED, INITIAL, PACKED, FINAL,
            )  # fmt: skip
            tl.store(counters + own, 0)
    else:
        finish(
            v, decays, gates, entering, initial, offsets, y, final, m, c, M, T, channels, sequences,
            STEPS, SCAN, GATED, INITIAL, PACKED, FINAL,
        )  # fmt: skip
