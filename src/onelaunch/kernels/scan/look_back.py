"""Device functions of a segmented scan in a single pass: segments inside a tile, and a carry between tiles inside one launch.

Computes   the state that enters tile i, per channel: c_i = A_{i-1} * c_{i-1} + S_{i-1}, where c_0 is given. Tile j maps a state
           s to A_j * s + S_j: A_j is the product of its decays, S_j its final state when started from zero.
Grid       along time one CTA per tile, on program axis 0 (forward: tile 0 first; backward: the last tile first). Other axes are
           independent scans. All warps of a CTA do the same work.
Tile       A tile is [BT, BV] steps by channels. ROWS consecutive steps form a segment, which one thread scans serially. The
           tile is held as ROWS tensors, called slabs, of shape [SEGS, BV] with SEGS = BT / ROWS: slab r holds step r of every
           segment. So all arithmetic on a tile is elementwise, and only one pair (A, S) per segment and channel crosses
           threads.
On chip    the slabs and the pairs lie in registers, in float32; Triton takes shared memory for the scan over
           segments and for the reductions, at most a few pairs [2 SEGS, BV].
Protocol   decoupled look-back (Merrill and Garland 2016). Each CTA publishes its tile's pair, then waits for what it needs.
           Unlike there, pairs are combined in a fixed order, so results do not depend on timing. GROUP tiles form a group. A
           tile reads the pairs of all earlier tiles of its own group at once, and the final state of the group before. The last
           tile of a group publishes that group's final state. Only groups form a serial chain.
Words      The pair and its flag are one 64-bit flag-in-data word (as in NCCL's LL protocol): bits 0 to 31 hold S, bits 32 to 62
           hold A without its sign, bit 63 holds the phase. A is at least 0, so its sign bit is free. A word is written by one
           64-bit access, so a reader that sees the new phase also sees the new pair: no fence and no second round trip are
           needed.
Memory     per tile and channel one word written, and at most GROUP + 1 different words read; one more word is written per
           group and channel.
Callers    forward.py and backward.py of this folder; project_scan_gate.py of ``linear_rnn``. launch.py reads POLL_ROWS.
Reuse      Each word of a workspace is written exactly once per launch, so between launches all words have the same phase. A CTA
           reads the phase from its own word and publishes with the opposite one. So launches may share a workspace only if they
           have equally many words, of which each writes all. No launch clears, counts or receives anything, so a captured graph
           can be replayed.
Ordering   A CTA reads the old value of its own word at its start. A barrier of the CTA must lie between that read and the
           CTA's own write. The scan over segments, which lies between them, has one. No other CTA writes that word.
Progress   A tile waits only for tiles of a lower program index, which the hardware starts no later.
Numerics   float32; decays are multiplied and nothing is divided by a decay, so a decay of 0 (log-decay -inf) is safe.
Source     Merrill and Garland (2016), adapted to affine maps; docs/notebook/linear_rnn.md has the measurements.
"""

import triton
import triton.language as tl

POLL_ROWS = tl.constexpr(8)
"""Rows of the tensor [POLL_ROWS, BV] that a CTA spins on: POLL_ROWS * BV must be at least the CTA's number of threads.

A smaller tensor would have elements that several threads hold copies of. Each of those threads loads the element on its own,
and one may see it published when another does not yet. The loop would then end with a stale copy in the other thread. So no
element that is polled may have copies.
"""


@triton.jit
def combine(decay_1, state_1, decay_2, state_2):
    """Return the map that applies (decay_1, state_1) first and (decay_2, state_2) second."""
    return decay_1 * decay_2, decay_2 * state_1 + state_2


@triton.jit
def interleave(before, after):
    """Interleave the rows of two tensors [SEGS, BV] into one [2 SEGS, BV]; the first row is the first of ``before``."""
    pairs = tl.permute(tl.join(before, after), (0, 2, 1))
    return tl.reshape(pairs, [2 * before.shape[0], before.shape[1]])


@triton.jit
def deinterleave(rows):
    """Return the two tensors that :func:`interleave` joined."""
    pairs = tl.reshape(rows, [rows.shape[0] // 2, 2, rows.shape[1]])
    return tl.split(tl.permute(pairs, (0, 2, 1)))


@triton.jit
def scan_segments(decay, state):
    """Scan the maps of segments [SEGS, BV] over the segments: return the exclusive pair, then the inclusive pair.

    An identity map is interleaved before each segment, so that one inclusive scan gives both results. A shift of rows would
    give the exclusive scan as well, but would move the tile to other threads (tl.gather chooses another layout for it).
    """
    decays = interleave(tl.zeros_like(decay) + 1.0, decay)
    states = interleave(tl.zeros_like(state), state)
    decays, states = tl.associative_scan((decays, states), 0, combine)
    decay_before, decay_with = deinterleave(decays)
    state_before, state_with = deinterleave(states)
    return decay_before, state_before, decay_with, state_with


@triton.jit
def scan_segments_reverse(decay, state):
    """Scan the maps of segments from the last segment to the first; results are as for :func:`scan_segments`."""
    decays = interleave(decay, tl.zeros_like(decay) + 1.0)
    states = interleave(state, tl.zeros_like(state))
    decays, states = tl.associative_scan((decays, states), 0, combine, reverse=True)
    decay_with, decay_before = deinterleave(decays)
    state_with, state_before = deinterleave(states)
    return decay_before, state_before, decay_with, state_with


@triton.jit
def row(values, index):
    """Return row ``index`` of [SEGS, BV], as [BV]."""
    rows = tl.arange(0, values.shape[0])
    return tl.sum(tl.where((rows == index)[:, None], values, 0.0), 0)


@triton.jit
def pack(decay, state, phase):
    """Pack a float32 pair into 64-bit words that carry ``phase`` (0 or 1) in bit 63."""
    high = (decay.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (phase << 31)
    low = state.to(tl.int32, bitcast=True)
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def unpack(words):
    """Unpack words into the float32 pair (decay, state)."""
    decay = ((words >> 32).to(tl.int32) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    return decay, words.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def read_previous_words(words, tile, channels, c):
    """Read this CTA's own words [BV] as the previous launch left them.

    The caller reads them at its start, long before they are needed, so that the latency is hidden.
    """
    return tl.load(words + tile.to(tl.int64) * channels + c, mask=c < channels, other=0)


@triton.jit
def launch_phase(before):
    """Return the phase of this launch: the opposite of the phase in ``before``, the result of :func:`read_previous_words`.

    The reduction is a barrier of the CTA only if BV channels need more than one warp. With fewer, the barriers of the scan over
    segments, which must lie between, keep threads from reading words that :func:`publish` has overwritten.
    """
    return 1 - tl.max((before < 0).to(tl.int32), 0)


@triton.jit
def not_yet_published(words, mask, phase):
    """Return a mask of the words that do not have this phase yet."""
    return ((words < 0) != (phase == 1)) & mask


@triton.jit
def combine_word(decay, state, words, mask):
    """Return the map (decay, state) followed by the map in ``words``; by the identity where ``mask`` is false."""
    next_decay, next_state = unpack(words)
    return combine(decay, state, tl.where(mask, next_decay, 1.0), tl.where(mask, next_state, 0.0))


@triton.jit
def poll_slabs(pointers, channels, tile, count, in_range, phase, SLABS: tl.constexpr):
    """Load the words of SLABS slabs once; return them, and whether a word of the first ``count`` tiles is missing.

    ``tile`` [POLL_ROWS] is the tile of each row in slab 0. Loads are volatile, so that a repeated call reads memory again.
    """
    words = ()
    missing = tl.full(pointers.shape, 0, tl.int1)
    for r in tl.static_range(SLABS):
        mask = (tile + r < count)[:, None] & in_range
        found = tl.load(pointers + r * channels, mask=mask, other=0, volatile=True)
        missing |= not_yet_published(found, mask, phase)
        words = words + (found,)
    return words, tl.max(missing.to(tl.int32))


@triton.jit
def wait_for_earlier_tiles(words, count, state, channels, c, phase, GROUP: tl.constexpr):
    """Wait for the first ``count`` tiles of a group, and return the state [BV] behind them.

    ``state`` [POLL_ROWS, BV] enters the group; every row holds the same state, as :func:`wait_for_group_state` returns
    it. ``words`` points to the words of the group's first tile.
    """
    slabs: tl.constexpr = GROUP // POLL_ROWS
    # Row i polls the words of tiles i * slabs to (i + 1) * slabs - 1, one per slab. They are combined before the scan over rows.
    tile = tl.arange(0, POLL_ROWS) * slabs
    in_range = (c < channels)[None, :]
    pointers = words + tile.to(tl.int64)[:, None] * channels + c[None, :]  # [POLL_ROWS, BV]
    found, missing = poll_slabs(pointers, channels, tile, count, in_range, phase, slabs)
    while missing > 0:
        found, missing = poll_slabs(pointers, channels, tile, count, in_range, phase, slabs)
    decays = tl.full(pointers.shape, 1.0, tl.float32)
    states = tl.zeros_like(decays)
    for r in tl.static_range(slabs):
        decays, states = combine_word(decays, states, found[r], (tile + r < count)[:, None] & in_range)
    decays, states = tl.associative_scan((decays, states), 0, combine)
    return row(decays * state + states, POLL_ROWS - 1)


@triton.jit
def wait_for_group_state(words, channels, c, phase):
    """Wait until a group's final state is published, and return it in every row of [POLL_ROWS, BV].

    Every row has its own element, although all read the same word: see :data:`POLL_ROWS`.
    """
    pointers = words + tl.zeros([POLL_ROWS], tl.int32)[:, None] + c[None, :]
    mask = (tl.zeros([POLL_ROWS], tl.int32)[:, None] + c[None, :]) < channels
    found = tl.load(pointers, mask=mask, other=0, volatile=True)
    while tl.max(not_yet_published(found, mask, phase).to(tl.int32)) > 0:
        found = tl.load(pointers, mask=mask, other=0, volatile=True)
    return unpack(found)[1]


@triton.jit
def publish(words, decays, states, index, channels, c, phase):
    """Publish row ``index`` of the maps [SEGS, BV] as words that other CTAs spin on.

    The threads that hold the row write it, so nothing is gathered first. Each word is one relaxed 64-bit exchange: it holds its
    own flag, so no order with other accesses is needed. A barrier of the CTA must lie between :func:`read_previous_words` and
    this store, when it writes the word that was read.
    """
    rows = tl.arange(0, decays.shape[0])
    mask = (rows == index)[:, None] & (c < channels)[None, :]
    pointers = words + tl.zeros_like(rows)[:, None] + c[None, :]
    tl.atomic_xchg(pointers, pack(decays, states, phase), mask=mask, sem="relaxed")


@triton.jit
def decoupled_look_back(
    words, group_words, decays, states, index, initial, tile, tiles, channels, c, phase, GROUP: tl.constexpr
):  # fmt: skip
    """Publish this tile's map, wait for the tiles before it, and return the state [BV] that enters the tile.

    Row ``index`` of ``decays`` and ``states`` [SEGS, BV] is the tile's map. ``words`` and ``group_words`` point to the first
    word of this scan's tiles and groups. ``c`` are the channels [BV]; ``initial`` [BV] enters tile 0. ``phase`` comes from
    :func:`launch_phase`, which must precede. The last tile of a group, and of the scan, also publishes the group's final state,
    so that every word of the workspace is written in every launch.
    """
    publish(words + tile.to(tl.int64) * channels, decays, states, index, channels, c, phase)
    group = tile // GROUP
    first = group * GROUP
    entering = tl.zeros([POLL_ROWS], tl.float32)[:, None] + initial[None, :]
    if group > 0:
        entering = wait_for_group_state(group_words + (group - 1).to(tl.int64) * channels, channels, c, phase)
    carry = initial
    if tile > first:
        carry = wait_for_earlier_tiles(words + first.to(tl.int64) * channels, tile - first, entering, channels, c, phase, GROUP)
    elif group > 0:
        carry = row(entering, 0)
    if (tile == first + GROUP - 1) | (tile == tiles - 1):
        leaving = decays * carry[None, :] + states
        # The word of a group holds its final state; the place of the decay is 0 and not read.
        publish(group_words + group.to(tl.int64) * channels, tl.zeros_like(leaving), leaving, index, channels, c, phase)
    return carry
