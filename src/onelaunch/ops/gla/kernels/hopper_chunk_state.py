"""Gated linear attention on Hopper GPUs: chunk state pass and chunk output in one persistent loop, state in registers.

Computes   per head and 64 values, for one chunk of 64 steps after the other (fla's chunk_h and chunk_o in one kernel):
             o  = (q e^before) S + (scores) v,     S' = e^whole S + (k e^after)^T v,
           where S enters the chunk and S' leaves it; before and after are sums of log-decays of the chunk up to and with a
           step, and behind it; whole is the sum of all. With REVERSE time runs backwards and q and k are exchanged: then the
           state is the gradient dS, and the output is dv from do. *Queries* multiply the state and *keys* are added to it: q
           and k forward, k and q with REVERSE (hopper_prepare.py).
Decay      With a decay per channel, ``prepare`` does not decay queries from the chunk's start, but from an anchor within the
           chunk, and keys to the anchor, so that one product gives the scores. So the state is decayed twice per chunk, by
           factors of K channels: from the near end of the chunk (its start; with REVERSE its end) to the anchor before its
           product with the queries, and from the anchor to the far end at last. ``ends`` [2, K] holds both factors. The anchor
           is the middle of the chunk. If decays are too strong for that (``strong`` is 1), queries are decayed from the near
           end and keys to the far end. Then row 0 holds the decay over the whole chunk, applied after the product with the
           queries, and row 1 is 1. With one decay per head (SCALAR) queries and keys are used as they were loaded. ``ends``
           [2, C] then has a factor per step: row 0 for the product with the queries, row 1 for the values. ``multiply`` scales
           its values in registers, where they are the operand A of a product: S' = e^whole S + k^T (e^after v). ``single``
           holds the decay over the whole chunk.
Grid       one CTA per segment of T, sequence, head and slice of 64 GROUPS values (``work_item``). Tensors may have fewer heads:
           ``head_of`` is the one that a CTA reads. States alone are computed once for the heads that share a state. A pass with
           outputs has a CTA for every head of the output, so heads that share a state compute it each.
Roles      GROUPS (1 or 2) warpgroups run ``multiply``: each holds the state [V = 64, K] transposed in registers, issues all
           WGMMAs on it, and stores outputs and states; the first one also issues the TMA loads. One warpgroup runs ``prepare``:
           it decays queries and keys in place in shared memory, or with SCALAR only sums up log-decays, and computes the
           scores. No warp is left to the loads: a warp of its own would cost 24 registers times 128 threads.
Registers  per thread of a ``multiply`` warpgroup: K / 2 for the state and 32 for the output, float32; 152 or 160 in all
           where there are two groups. The state is the A operand of its product with the queries and comes from registers,
           converted 64 channels at a time. It never touches shared memory, except to leave. With SCALAR and K up to 128 it is
           converted at once, and that product is in flight together with the one that adds to the state: 200 registers.
On chip    shared memory for 16-bit numbers, per stage: queries, keys, log-decays [64, K], 128 K bytes each (no log-decays with
           SCALAR); values [64, 64], 8192 bytes per group. Scores [64, 64], 8192 bytes per buffer; states on their way out [64,
           K], 128 K bytes per group and term. K = 128 with two groups: 220 KiB for three stages, with SCALAR 227 for four. The
           second terms of the keys replace the log-decays. float32 log-decays take twice the bytes, and there are two stages of
           K = 128. Outputs leave from where LEAVE says: "values", the tiles of the values, which they replace; "tile", a tile of
           their own, 8192 bytes per group; "state", the tile through which states leave; "registers".
Barriers   one mbarrier per stage of each kind, and one for the scores:
           - full: the TMA loads of the stage have landed (transaction bytes). Waited for by all warpgroups.
           - decayed: ``prepare`` has replaced queries and keys (with SCALAR only cleared keys behind the end of the sequence),
             and written ``ends`` and ``single`` (see Decay). Waited for by ``multiply``.
           - scores_full: ``prepare`` has written the scores. Waited for by ``multiply`` before its last product.
           - scores_empty: all groups have read the only score buffer (SCORES < STAGES). Waited for by ``prepare``.
           - empty: all groups have finished the products that read the stage, and the output in it has been read by TMA.
             Waited for by the first group, which then refills the stage. Where outputs leave from the values this is one chunk
             late, so that the store of an output overlaps with the next chunk. With three stages or more that costs little; of
             two, ``prepare`` could not work on one while ``multiply`` reads the other. Where outputs leave from elsewhere the
             stage is refilled at once. Row 1 of ``ends`` is read after that, so ``ends`` then has more chunks than stages.
           The order is enough because ``prepare`` only touches a stage between ``full`` and its own last arrival, and
           ``multiply`` releases a stage after it has waited for that arrival. Writes by threads that WGMMA or TMA reads are
           followed by ``fence_async_shared`` before an arrival or a TMA store. ``keep_barriers`` keeps Triton from placing
           anything else over the barriers.
Memory     values are read and outputs written once, queries, keys and log-decays read once per slice of values (1.01 times the
           bytes of moving each tensor once, measured forward on an H200). With STORE_STATES the state that enters each chunk is
           stored as well, 16 bits, [V, K], and its rounding error as a second term if ``states_low`` is given. The state after
           the last chunk of a sequence leaves in float32, [K, V], if ``final`` is given: the CTA of the segment at which the
           recurrence ends stores it from registers. With REVERSE that is the gradient of the initial state, and the state
           starts from the gradient of the final one. Where heads share values or a state, each stores its float32 part of dv
           or of the initial state's gradient; sum_heads.py adds up the parts.
Turns      with TURNS nothing overlaps, as a control that measures what overlap gains: a chunk's loads are issued once all groups
           have finished the chunk before and their stores have read their tiles; ``prepare`` waits for the loads, and
           ``multiply`` for the scores too. Tiles, stages, products and registers stay the same. hopper_segment_sum.py does
           likewise. onelaunch/ablations/gla_in_turns.py launches it.
Segments   where heads do not fill the chip, T is cut into segments (a chunk-parallel scan). hopper_segment_sum.py first stores
           what each segment adds to the state, and its decay. Here each CTA starts from the decayed sum over the segments before
           its own, added in the order of time, so results are deterministic. With RECOMPUTE it makes that state itself, from
           the chunks before (hopper_recompute.py): one launch, with segments of different lengths.
Numerics   see hopper_prepare.py; the state and all sums are float32. Backwards in float16 the values are do times a power of 2
           (rescale.py), and outputs and the last state are scaled back before they are stored. Where float32 inputs were copied
           as float16 (scaled_copies.py), all of them are times powers of 2, and outputs leave in float32 from registers.
Callers    launch_hopper.py launches ``chunk_state_kernel``.
Source     Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training (2024); docs/notebook/gla.md.
"""

from onelaunch.kernels.gluon.compat import (
    fence_async_shared,
    gl,
    gluon,
    keep_barriers,
    mbarrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from onelaunch.ops.gla.kernels.hopper_prepare import prepare
from onelaunch.ops.gla.kernels.hopper_recompute import recompute_state, recomputed_span
from onelaunch.ops.gla.kernels.hopper_states import (
    add_segments,
    query_state,
    scaled_back,
    scaled_values,
    store_final,
    store_part,
    store_state,
)
from onelaunch.ops.gla.kernels.hopper_tiles import (
    PANEL,
    STATE_HEADS,
    C,
    chunk_of,
    head_of,
    load_stage,
    row_index,
    sequence_bounds,
    store_box,
    store_split,
    work_item,
)


@gluon.jit
def multiply(descriptors, outputs, state_pointers, tiles, vectors, bars, offsets, T, sizes, values, GROUP: gl.constexpr,
             GROUPS: gl.constexpr, SLICES: gl.constexpr, PACKED: gl.constexpr, OUTPUT: gl.constexpr,
             REVERSE: gl.constexpr, STORE_STATES: gl.constexpr, STAGED: gl.constexpr, ALIASED: gl.constexpr, SCALAR: gl.constexpr,
             SEGMENTED: gl.constexpr, SPLIT_KEYS: gl.constexpr, KEYS: gl.constexpr, SHARED: gl.constexpr,
             TURNS: gl.constexpr, LEAVE: gl.constexpr, RECOMPUTE: gl.constexpr, FACTORS: gl.constexpr):  # fmt: skip
    """Run the role of one warpgroup that holds a state [V, K] for PANEL values, for all chunks of a segment.

    Start from the initial state and the sums of the segments before. Per chunk: store the state if STORE_STATES; wait for
    ``full`` and ``decayed``; decay the state to the anchor (Decay, at the top); out = queries times state; state += keys^T v;
    wait for ``scores_full``; out += scores v; release this stage, or the one before it if outputs leave from the values, and
    refill it (GROUP 0); store out; decay the state to the end of the chunk. At last store the final state. With SCALAR the
    state is decayed, and the product that adds to it issued, while that of its rounded copy with the queries is in flight.
    """
    tiles_q, tiles_k, tiles_v, _, tiles_low, tiles_s, tiles_state = tiles  # low: second terms of keys, over the log-decays
    _, ends, single = vectors  # single: the flag ``strong``, or with SCALAR the decay of the state
    full, decayed, scores_full, empty, scores_empty = bars
    p_out, out_tiles, out_pitch, tiles_out = outputs
    initial, final, states, states_low, segment_states, segment_decays, factors = state_pointers
    K: gl.constexpr = tiles_k.shape[2]
    E: gl.constexpr = tiles_k.dtype
    STAGES: gl.constexpr = tiles_k.shape[0]
    SCORES: gl.constexpr = tiles_s.shape[0]
    LOW: gl.constexpr = tiles_low.shape[0] // STAGES  # tiles of second terms in a stage, of which the first is used
    EARLY: gl.constexpr = not OUTPUT or LEAVE != "values"  # a stage is released as soon as the products have read it
    ENDS: gl.constexpr = STAGES if SCALAR else ends.shape[0]
    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    across: gl.constexpr = gl.SliceLayout(0, state_layout)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    scalar: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ends_flat = ends
    if not SCALAR:
        ends_flat = ends._reinterpret(gl.float32, [2 * ENDS, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # noqa: SLF001
    heads, segments, _ = sizes
    n, head, value_slice, segment = work_item(sizes, SLICES)
    # From here on rows of K elements are counted in 32 bits: no memory holds 2^31 of them, and 64-bit numbers take registers.
    row, steps, skipped = recomputed_span(offsets, n, T, segment, sizes, PACKED, RECOMPUTE)
    first, _, slot = sequence_bounds(offsets, n, T + (n >> 31), PACKED)  # n >> 31 is 0, as in state_offsets
    slot += (row - first) // C
    first_value = (value_slice * GROUPS + GROUP) * PANEL
    PADDED_VALUES: gl.constexpr = descriptors[2].layout.rank == 3
    rows_of_state = values  # of states that are stored for other kernels
    if PADDED_VALUES:
        rows_of_state = SLICES * GROUPS * PANEL
    state = gl.zeros([PANEL, K], gl.float32, layout=state_layout)
    pair = n * heads + head
    sums = (segment_states, segment_decays)
    # Forward, heads that share a state share what segments add to it. In reverse each head has a gradient of it of its own.
    summed = pair if REVERSE else head_of(pair, SHARED, STATE_HEADS)
    if SEGMENTED and initial is None:
        state = add_segments(state, sums, summed, segment, segments, rows_of_state, first_value, REVERSE, KEYS)
    chunks = gl.cdiv(steps, C)
    if GROUP == 0:
        for i in gl.static_range(1 if TURNS else STAGES):
            at = row + chunk_of(i, chunks, REVERSE) * C
            load_stage(descriptors, tiles, full, at, head, value_slice, i, i < chunks, GROUPS, SLICES, OUTPUT, SCALAR, SHARED,
                       None if RECOMPUTE == 0 else i >= skipped)  # fmt: skip
    if initial is not None:  # behind the first TMA loads, which would else spill registers
        channel = gl.arange(0, K, layout=across)[None, :]
        value = first_value + gl.arange(0, PANEL, layout=gl.SliceLayout(1, state_layout))[:, None]
        p_initial = initial + (head_of(pair, SHARED, STATE_HEADS) * values).to(gl.int64) * KEYS + (channel * values + value)
        if REVERSE and SHARED[STATE_HEADS] > 1:
            # Gradients of a shared state are added up, so only the first of its heads starts from that of the final state.
            first_head = (channel < KEYS) & (value < values) & (head % SHARED[STATE_HEADS] == 0)
            state = gl.load(p_initial, mask=first_head, other=0.0)
        elif KEYS < K or PADDED_VALUES:
            state = gl.load(p_initial, mask=(channel < KEYS) & (value < values), other=0.0)
        else:
            state = gl.load(p_initial)
        state = scaled_back(state, factors, pair, 0, FACTORS)
        if SEGMENTED:
            state = add_segments(state, sums, summed, segment, segments, rows_of_state, first_value, REVERSE, KEYS)
    stage = 0
    phase = 0
    if RECOMPUTE > 0:
        state = recompute_state(state, descriptors, tiles, vectors, bars, row, head, value_slice, skipped, chunks,
                                GROUP, GROUPS, SLICES, SCALAR, SPLIT_KEYS, SHARED, TURNS, not TURNS and not EARLY)  # fmt: skip
        stage = skipped % STAGES
        phase = (skipped // STAGES) & 1
    for c in range(skipped, chunks):
        j = chunk_of(c, chunks, REVERSE)
        left = steps - j * C
        b_v = tiles_v.index(stage * GROUPS + GROUP)
        b_k = tiles_k.index(stage)
        near = 2 * (stage if ENDS == STAGES else c % ENDS)  # first row of the chunk in ``ends_flat``
        if TURNS:
            mbarrier.wait(decayed.index(stage), phase)
            if OUTPUT:
                mbarrier.wait(scores_full.index(stage), phase)
        if STORE_STATES:
            of_head = (slot + j) * heads + head
            # Counts rows of K elements. Forward, heads that share a state store the same one.
            state_row = (of_head if REVERSE else head_of(of_head, SHARED, STATE_HEADS)) * rows_of_state + first_value
            if STAGED:
                staging = tiles_state.index(GROUP)
                if LEAVE != "tile":  # with a tile for outputs it was waited for before the one of the last chunk was written
                    tma_store_wait(pendings=0)  # the store of the state before has read its buffer, and that of an output too
                if states_low is None or OUTPUT:
                    staging.store(state.to(E))
                else:
                    store_split(state, staging, tiles_state.index(GROUPS + GROUP))
                fence_async_shared()
                if ALIASED:
                    tma_store(states, [(slot + j) * C, (first_value // PANEL * heads + head) * K], staging)
                else:
                    tma_store(states, [state_row, 0], staging)
                if states_low is not None:
                    if OUTPUT:  # the second term follows in the same tile: with outputs there is no memory for another
                        tma_store_wait(pendings=0)
                        staging.store((state - state.to(E).to(gl.float32)).to(E))
                        fence_async_shared()
                        tma_store(states_low, [state_row, 0], staging)
                    else:
                        tma_store(states_low, [state_row, 0], tiles_state.index(GROUPS + GROUP))
            else:
                store_state(states + state_row.to(gl.int64) * K, state, left, K)
        mbarrier.wait(full.index(stage), phase)
        if left < C:
            t = row_index(rows, left)
            b_v.store(gl.where(t < left, b_v.load(rows), 0.0).to(E))
            fence_async_shared()
        mbarrier.wait(decayed.index(stage), phase)
        flag = 0
        if not SCALAR:
            flag = gl.max(single.index(stage).load(scalar), 0)
            if STORE_STATES and not SEGMENTED:
                # Row 0 with moderate decay; with strong decay row 1, which holds 1. A branch in place of the choice of the row
                # would keep the stored state in registers until TMA has read it.
                state = state * ends_flat.index(near + flag).load(across)[None, :]
            elif flag == 0:
                state = state * ends_flat.index(near).load(across)[None, :]
        out = gl.zeros([PANEL, C], gl.float32, layout=out_layout)
        if OUTPUT:
            if SCALAR and K <= 2 * PANEL:
                rounded = gl.convert_layout(state.to(E), operand)
                out = warpgroup_mma(rounded, tiles_q.index(stage).permute((1, 0)), out, use_acc=False, is_async=True)
            else:
                out = query_state(out, state, tiles_q.index(stage), operand, 0, KEYS)
        if SCALAR:
            scaled, scaled_low = scaled_values(b_v, ends_flat.index(near + 1), state_layout, SPLIT_KEYS)
            state = state * gl.max(single.index(stage).load(scalar), 0)
            state = warpgroup_mma(scaled, b_k, state, is_async=True)
            if SPLIT_KEYS:
                state = warpgroup_mma(scaled_low, b_k, state, is_async=True)
            if OUTPUT:
                query_decay = ends_flat.index(near).load(gl.SliceLayout(0, out_layout))
                out = warpgroup_mma_wait(num_outstanding=2 if SPLIT_KEYS else 1, deps=(out,))
                out = out * query_decay[None, :]
        else:
            if flag > 0:
                state = state * ends_flat.index(near).load(across)[None, :]
            state = warpgroup_mma(b_v.permute((1, 0)), b_k, state, is_async=True)
            state = warpgroup_mma(b_v.permute((1, 0)), tiles_low.index(stage * LOW), state, is_async=True)
        if OUTPUT:
            mbarrier.wait(scores_full.index(stage), phase)
            out = warpgroup_mma(b_v.permute((1, 0)), tiles_s.index(stage % SCORES).permute((1, 0)), out, is_async=True)
            out, state = warpgroup_mma_wait(num_outstanding=0, deps=(out, state))
            if SCORES < STAGES:
                mbarrier.arrive(scores_empty, count=1)
        else:
            state = warpgroup_mma_wait(num_outstanding=0, deps=(state,))
            if not SCALAR:
                state = state * ends_flat.index(near + 1).load(across)[None, :]
        if not TURNS:
            if EARLY:
                freed = stage
                freed_turn = c
            else:
                tma_store_wait(pendings=0)  # the store of the output of the chunk before has read its tile
                freed = (stage + STAGES - 1) % STAGES
                freed_turn = c - 1
            mbarrier.arrive(empty.index(freed), count=1, pred=freed_turn >= 0)
            if GROUP == 0:
                refill = (freed_turn >= 0) & (freed_turn + STAGES < chunks)
                mbarrier.wait(empty.index(freed), (freed_turn // STAGES) & 1, pred=refill)
                at = row + chunk_of(freed_turn + STAGES, chunks, REVERSE) * C
                load_stage(descriptors, tiles, full, at, head, value_slice, freed, refill, GROUPS, SLICES, OUTPUT, SCALAR, SHARED)
        if OUTPUT:
            at = row + j * C
            out = scaled_back(out, factors, pair, 1, FACTORS)
            if out_tiles is None:
                store_part(p_out, out, at, left, head, first_value, values, out_pitch)
            else:
                b_out = b_v
                if EARLY:
                    tma_store_wait(pendings=0)  # the stores of the output before and of this chunk's state have read their tiles
                    b_out = tiles_out.index(GROUP * (tiles_out.shape[0] // GROUPS))
                b_out.permute((1, 0)).store(out.to(E))
                fence_async_shared()
                if left >= C:
                    store_box(out_tiles, at, head, first_value, values, b_out)
                else:
                    t = row_index(rows, left)
                    u = gl.arange(0, PANEL, layout=gl.SliceLayout(0, rows))[None, :]
                    pitch = out_pitch + (left >> 31)  # as in row_index
                    tile = p_out + at.to(gl.int64) * pitch + (head * values + first_value)
                    inside = t < left
                    if PADDED_VALUES:
                        inside = inside & (first_value + u < values)
                    gl.store(tile + t * pitch + u, b_out.load(rows), mask=inside)
            if not SCALAR:  # only now, when out takes no registers any more
                state = state * ends_flat.index(near + 1).load(across)[None, :]
        if TURNS:
            tma_store_wait(pendings=0)  # the stores of this chunk's output and state have read their tiles
            mbarrier.arrive(empty.index(stage), count=1)
            if GROUP == 0:
                more = c + 1 < chunks
                mbarrier.wait(empty.index(stage), phase, pred=more)
                at = row + chunk_of(c + 1, chunks, REVERSE) * C
                after = (stage + 1) % STAGES
                load_stage(descriptors, tiles, full, at, head, value_slice, after, more, GROUPS, SLICES, OUTPUT, SCALAR, SHARED)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if final is not None:
        stores = segment == (0 if REVERSE else segments - 1)
        of_final = pair
        if not REVERSE and SHARED[STATE_HEADS] > 1:  # all heads that share a state compute the same one; the first stores it
            stores = stores & (head % SHARED[STATE_HEADS] == 0)
            of_final = head_of(pair, SHARED, STATE_HEADS)
        if stores:
            state = scaled_back(state, factors, pair, 2, FACTORS)
            if KEYS < K or PADDED_VALUES:
                store_final(final + (of_final * values).to(gl.int64) * KEYS, state, n, values, first_value, KEYS, 0)
            else:
                # n >> 31 is 0, as in state_offsets: offsets that the initial state shares would be held throughout the loop.
                channel = gl.arange(0, K, layout=across)[None, :] + (n >> 31)
                value = first_value + gl.arange(0, PANEL, layout=gl.SliceLayout(1, state_layout))[:, None]
                gl.store(final + (of_final * values).to(gl.int64) * K + (channel * values + value), state)
    if OUTPUT or STAGED:
        tma_store_wait(pendings=0)


@gluon.jit(do_not_specialize=["T", "heads", "segments", "segment_steps"])
def chunk_state_kernel(
    queries, keys, v, g, log_decay, o, out_tiles, initial, final, states, states_low, segment_states, segment_decays, factors,
    offsets, T, heads, segments, segment_steps, scale, values, out_pitch,
    SLICES: gl.constexpr, LIMIT: gl.constexpr, PACKED: gl.constexpr, OUTPUT: gl.constexpr,
    REVERSE: gl.constexpr, STORE_STATES: gl.constexpr, STAGED: gl.constexpr, ALIASED: gl.constexpr,
    SEGMENTED: gl.constexpr, SPLIT_KEYS: gl.constexpr, KEYS: gl.constexpr, K: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr, PREPARE_REGISTERS: gl.constexpr, SHARED: gl.constexpr, TURNS: gl.constexpr,
    LEAVE: gl.constexpr, RECOMPUTE: gl.constexpr, FACTORS: gl.constexpr,
):  # fmt: skip
    """Run the chunk state pass, and with OUTPUT the chunk output, over one segment of time; see the top of the file.

    ``queries``, ``keys``, ``v``, ``g``, ``out_tiles`` are TMA descriptors of matrices [B T, H X], or of tensors [B T, H, X]
    where X is padded: KEYS channels to K, and ``values`` to those of all SLICES (``load_box``). States and sums that kernels
    pass to each other are padded too, but not ``initial`` and ``final``. ``g`` describes log-decays per channel, float32 or
    of the dtype of the others; if it is None, ``log_decay`` [B, T, H] has one per head. ``out_pitch`` is the number of
    elements from row to row of ``o`` [B T, H V]. ``o`` is written without TMA where a chunk is cut off by the end of its
    sequence, since a box would overwrite the next one, and where ``out_tiles`` is None; then it may hold float32 parts of a
    gradient of shared values. ``initial`` and ``final`` [N, H, K, V], float32, are the state from which each sequence starts
    and the one with which it ends, in the order of the pass; each may be None. ``segment_states`` [N, H, segments, V, K] and
    ``segment_decays`` [N, H, segments, K], float32, come from hopper_segment_sum.py. ``factors``, float32, are powers of 2 by
    which ``initial``, ``o`` and ``final`` are multiplied, or None: see ``scaled_back``.

    Constants: OUTPUT: make outputs. STORE_STATES: store the state that enters each chunk. STAGED: ``states`` are descriptors
    and states leave through shared memory by TMA; otherwise ``states`` is a pointer. ALIASED: states lie in the rows of their
    chunk of a matrix [B T, V / PANEL, H, K], see ``aliased_state_buffers`` in launch_hopper.py. SEGMENTED: T is cut into
    several segments. SPLIT_KEYS: keys, or with a decay per head values, as two 16-bit terms; always so with one per channel.
    SLICES: slices of 64 GROUPS values in a head. LIMIT: largest sum of log-decays over half a chunk, in magnitude, that counts
    as moderate. SHARED: heads of the grid that share one of a tensor, see ``head_of``. SCORES: buffers of scores, 1 or STAGES.
    MULTIPLY_REGISTERS, PREPARE_REGISTERS: registers per thread that ``warp_specialize`` assigns to the second ``multiply``
    warpgroup, where there is one, and to ``prepare``. TURNS: see Turns, at the top. LEAVE: place from which outputs leave, see
    On chip: "values", "tile", "state" (with STAGED only), or "registers", which takes no ``out_tiles``. RECOMPUTE: 0,
    or the time of a chunk without outputs in 1/16 of one with them; ``segment_steps`` is then the share of
    ``recomputed_span``. Only forward, with OUTPUT. FACTORS: see ``scaled_back``.
    """
    gl.static_assert(RECOMPUTE == 0 or (OUTPUT and not REVERSE))
    SCALAR: gl.constexpr = g is None
    E: gl.constexpr = keys.dtype
    keys_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], E)
    values_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PANEL], E)
    scores_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], E)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tiles_k = gl.allocate_shared_memory(E, [STAGES, C, K], keys_layout)
    tiles_v = gl.allocate_shared_memory(E, [STAGES * GROUPS, C, PANEL], values_layout)
    tiles_g = tiles_k  # tiles that this build does not use stand for others, so that the tuples below keep their lengths
    tiles_low = tiles_k
    tiles_q = tiles_k
    tiles_s = tiles_v
    WIDE: gl.constexpr = False if SCALAR else g.dtype == gl.float32
    if WIDE:  # the second terms of the keys take the first half of the place of the log-decays
        wide_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.float32)
        tiles_g = gl.allocate_shared_memory(gl.float32, [STAGES, C, K], wide_layout)
        tiles_low = tiles_g._reinterpret(E, [2 * STAGES, C, K], keys_layout)  # noqa: SLF001
    elif not SCALAR:
        tiles_g = gl.allocate_shared_memory(E, [STAGES, C, K], keys_layout)
        tiles_low = tiles_g
    if OUTPUT:
        tiles_q = gl.allocate_shared_memory(E, [STAGES, C, K], keys_layout)
        tiles_s = gl.allocate_shared_memory(E, [SCORES, C, C], scores_layout)
    tiles_state = tiles_k
    if STAGED:
        STATE_TERMS: gl.constexpr = 1 if states_low is None or OUTPUT else 2
        tiles_state = gl.allocate_shared_memory(E, [STATE_TERMS * GROUPS, PANEL, K], keys_layout)
    tiles_out = tiles_v
    if OUTPUT and LEAVE == "tile":
        tiles_out = gl.allocate_shared_memory(E, [GROUPS, C, PANEL], values_layout)
    elif OUTPUT and LEAVE == "state":
        tiles_out = tiles_state._reinterpret(E, [GROUPS * K // PANEL, C, PANEL], values_layout)  # noqa: SLF001
    if SCALAR:
        sums = gl.allocate_shared_memory(gl.float32, [C], flat)
        ends = gl.allocate_shared_memory(gl.float32, [2 * STAGES, C], flat)
        single = gl.allocate_shared_memory(gl.float32, [STAGES, 1], flat)
    else:
        summed: gl.constexpr = gl.bfloat16 if WIDE else E
        sums = gl.allocate_shared_memory(summed, [8, C], gl.NVMMASharedLayout.get_default_for([8, C], summed))
        # Chunks whose factors are kept. Four of two stages, since c % 3 takes registers that would be spilled.
        ENDS: gl.constexpr = 4 if OUTPUT and LEAVE != "values" else STAGES
        gl.static_assert(LEAVE == "values" or ENDS > STAGES)
        ends = gl.allocate_shared_memory(gl.float32, [ENDS, 2, K], lines)
        single = gl.allocate_shared_memory(gl.int32, [STAGES, 1], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    decayed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scores_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scores_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(decayed.index(i), count=1)
        mbarrier.init(scores_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
        if not SCALAR:
            single.index(i).store(gl.full([1], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.init(scores_empty, count=GROUPS)
    fence_async_shared()  # TMA, which arrives at these barriers, sees them initialized
    sizes = (heads, segments, segment_steps)
    descriptors = (queries, keys, v, g)
    outputs = (o, out_tiles, out_pitch, tiles_out)
    state_pointers = (initial, final, states, states_low, segment_states, segment_decays, factors)
    tiles = (tiles_q, tiles_k, tiles_v, tiles_g, tiles_low, tiles_s, tiles_state)
    vectors = (sums, ends, single)
    bars = (full, decayed, scores_full, empty, scores_empty)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply, (descriptors, outputs, state_pointers, tiles, vectors, bars, offsets, T, sizes, values, 0, GROUPS,
                            SLICES, PACKED, OUTPUT, REVERSE, STORE_STATES, STAGED, ALIASED, SCALAR,
                            SEGMENTED, SPLIT_KEYS, KEYS, SHARED, TURNS, LEAVE, RECOMPUTE, FACTORS)),
                (multiply, (descriptors, outputs, state_pointers, tiles, vectors, bars, offsets, T, sizes, values, 1, GROUPS,
                            SLICES, PACKED, OUTPUT, REVERSE, STORE_STATES, STAGED, ALIASED, SCALAR,
                            SEGMENTED, SPLIT_KEYS, KEYS, SHARED, TURNS, LEAVE, RECOMPUTE, FACTORS)),
                (prepare, (tiles, vectors, bars, offsets, log_decay, T, sizes, scale, LIMIT, SLICES, PACKED,
                           OUTPUT, REVERSE, SCALAR, SHARED, TURNS, RECOMPUTE)),
            ],
            [4, 4],
            [MULTIPLY_REGISTERS, PREPARE_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (descriptors, outputs, state_pointers, tiles, vectors, bars, offsets, T, sizes, values, 0, GROUPS,
                            SLICES, PACKED, OUTPUT, REVERSE, STORE_STATES, STAGED, ALIASED, SCALAR,
                            SEGMENTED, SPLIT_KEYS, KEYS, SHARED, TURNS, LEAVE, RECOMPUTE, FACTORS)),
                (prepare, (tiles, vectors, bars, offsets, log_decay, T, sizes, scale, LIMIT, SLICES, PACKED,
                           OUTPUT, REVERSE, SCALAR, SHARED, TURNS, RECOMPUTE)),
            ],
            [4],
            [PREPARE_REGISTERS],
        )  # fmt: skip
    keep_barriers(bars)
    if OUTPUT and LEAVE == "tile":
        tiles_out._keep_alive()  # noqa: SLF001 - Triton would place reductions over tiles that TMA still reads
