"""Gated linear attention on Hopper GPUs: the state at the start of a segment, recomputed by the CTA that goes on from it.

Computes   S' = e^whole S + (k e^after)^T v for the chunks before a segment, as hopper_chunk_state.py does and with its words, but
           without queries, scores and outputs: such a chunk takes a fraction of the time.
Segments   T is cut into segments where heads leave SMs idle. hopper_segment_sum.py does so with a launch before the pass and
           segments of equal length. With RECOMPUTE the pass is the only launch, each CTA starts at the beginning of the
           sequence, and later segments are shorter, so that all CTAs of a head end at about the same time
           (``recomputed_span``). It is the faster way where the launch would take as long as several chunks. Where T is long
           it is the slower one: if a chunk without outputs takes half the time of one with them, two segments take 2/3 of the
           time of one, and any number of segments more than 1/2.
Roles      those of hopper_chunk_state.py. ``multiply`` calls ``recompute_state`` before its loop, and ``prepare`` writes neither
           scores nor decayed queries for these chunks. Stages and the phases of their barriers go on from one loop to the other.
Memory     these chunks' queries are not loaded. Their keys, values and log-decays are read once more by each later segment,
           mostly from L2.
Callers    hopper_chunk_state.py and hopper_prepare.py.
Source     docs/notebook/gla.md.
"""

from onelaunch.kernels.gluon.compat import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from onelaunch.ops.gla.kernels.hopper_states import scaled_values
from onelaunch.ops.gla.kernels.hopper_tiles import C, load_stage, segment_span, sequence_bounds

SHARES = gl.constexpr(1024)
"""Denominator of the first segment's share of a sequence."""
PREFETCHED = gl.constexpr(4)
"""Chunks that the log-decays of heads are brought into L2 before they are used."""
PREFETCH = gl.constexpr("""
{
    .reg .pred used;
    setp.ne.s32 used, $2, 0;
    @used prefetch.global.L2 [$1];
    mov.u32 $0, 0;
}
""")
PARTS = gl.constexpr(16)
"""Denominator of RECOMPUTE, the time of a chunk without outputs relative to one with them."""


@gluon.jit
def recomputed_span(offsets, n, T, segment, sizes, PACKED: gl.constexpr, RECOMPUTE: gl.constexpr):
    """Return the first row and the number of steps of what a CTA of the pass goes over, and the chunks without outputs.

    Without RECOMPUTE that is the segment (``segment_span``), and all chunks have outputs. Otherwise it is the sequence up to the
    end of the segment, and the chunks before the segment, all of them whole, have no outputs. The third of ``sizes`` is then
    the share of a sequence's chunks that its first segment has, in 1/SHARES. A segment ends so many chunks after its start
    that its CTA takes no longer than that of the first one, given that a chunk without outputs takes RECOMPUTE/PARTS of the
    time of one with them. The last segment has the rest, and at least one chunk; others may be empty.
    """
    if RECOMPUTE == 0:
        row, steps = segment_span(offsets, n, T, segment, sizes, PACKED)
        return row, steps, 0
    _, segments, share = sizes
    first, length, _ = sequence_bounds(offsets, n, T, PACKED)
    chunks = gl.cdiv(length, C)
    whole = gl.cdiv(chunks * share, SHARES)
    start = segment * 0
    end = whole
    for _ in range(segment):
        start, end = end, whole + end * (PARTS - RECOMPUTE) // PARTS
    before_last = gl.maximum(chunks - 1, 0)
    start = gl.minimum(start, before_last)
    end = gl.where(segment == segments - 1, chunks, gl.minimum(end, before_last))
    steps = gl.where(start < end, gl.minimum(end * C, length), 0)
    return first, steps, gl.where(start < end, start, 0)


@gluon.jit
def recompute_state(state, descriptors, tiles, vectors, bars, row, head, value_slice, skipped, chunks,
                    GROUP: gl.constexpr, GROUPS: gl.constexpr, SLICES: gl.constexpr, SCALAR: gl.constexpr,
                    SPLIT_KEYS: gl.constexpr, SHARED: gl.constexpr, TURNS: gl.constexpr, LATE: gl.constexpr):  # fmt: skip
    """Return the state [V, K] after ``skipped`` of the ``chunks`` from ``row`` on; they go forward in time.

    The arguments are those of ``multiply`` of hopper_chunk_state.py, which has issued the loads of the first stages. Per
    chunk: wait for ``full`` and ``decayed``, decay the state, add keys^T v, and while the product is in flight release the
    stage before this one and refill it (GROUP 0). So ``multiply`` must release the last stage, as it does after a chunk with
    outputs. Without LATE each chunk's own stage is released, after the product.
    """
    _, tiles_k, tiles_v, _, tiles_low, _, _ = tiles
    _, ends, single = vectors
    full, decayed, _, empty, _ = bars
    K: gl.constexpr = tiles_k.shape[2]
    STAGES: gl.constexpr = tiles_k.shape[0]
    LOW: gl.constexpr = tiles_low.shape[0] // STAGES
    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    across: gl.constexpr = gl.SliceLayout(0, state_layout)
    scalar: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ENDS: gl.constexpr = ends.shape[0] // 2 if SCALAR else ends.shape[0]
    factors = ends
    if not SCALAR:
        factors = ends._reinterpret(gl.float32, [2 * ENDS, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # noqa: SLF001
    for c in range(skipped):
        stage = c % STAGES
        phase = (c // STAGES) & 1
        near = 2 * (c % ENDS)  # row of ``factors``; the other one follows it
        b_v = tiles_v.index(stage * GROUPS + GROUP)
        b_k = tiles_k.index(stage)
        mbarrier.wait(full.index(stage), phase)
        mbarrier.wait(decayed.index(stage), phase)
        if SCALAR:
            scaled, scaled_low = scaled_values(b_v, factors.index(near + 1), state_layout, SPLIT_KEYS)
            state = state * gl.max(single.index(stage).load(scalar), 0)
            state = warpgroup_mma(scaled, b_k, state, is_async=True)
            if SPLIT_KEYS:
                state = warpgroup_mma(scaled_low, b_k, state, is_async=True)
        else:
            # Without a product with the queries between them, both rows of factors are applied alike to all decays.
            state = state * factors.index(near).load(across)[None, :]
            state = warpgroup_mma(b_v.permute((1, 0)), b_k, state, is_async=True)
            state = warpgroup_mma(b_v.permute((1, 0)), tiles_low.index(stage * LOW), state, is_async=True)
        if not LATE:
            state = warpgroup_mma_wait(num_outstanding=0, deps=(state,))
        freed_turn = c - 1 if LATE else c
        freed = (freed_turn + STAGES) % STAGES
        ahead = c + 1 if TURNS else freed_turn + STAGES  # with TURNS its stage has been empty for longer than this one
        mbarrier.arrive(empty.index(freed), count=1, pred=freed_turn >= 0)
        if GROUP == 0:
            refill = (freed_turn >= 0) & (ahead < chunks)
            mbarrier.wait(empty.index(freed), (freed_turn // STAGES) & 1, pred=refill)
            load_stage(descriptors, tiles, full, row + ahead * C, head, value_slice, ahead % STAGES, refill, GROUPS, SLICES, True,
                       SCALAR, SHARED, ahead >= skipped)  # fmt: skip
        if LATE:
            state = warpgroup_mma_wait(num_outstanding=0, deps=(state,))
        if not SCALAR:
            state = state * factors.index(near + 1).load(across)[None, :]
    return state


@gluon.jit
def prefetch(pointers, mask):
    """Bring what the pointers point to into L2, where ``mask`` holds, without waiting for it."""
    gl.inline_asm_elementwise(PREFETCH, "=r,l,r", [pointers, mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)
