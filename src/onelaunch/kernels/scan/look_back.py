"""Scans over segments inside a tile, and a carry along tiles inside one launch: the device functions of a single-pass scan.

Computes   c_i = A_{i-1} * c_{i-1} + S_{i-1} per channel, c_0 given: the state that enters tile i, where tile j maps s to A_j
           s + S_j.
Tile       ROWS consecutive steps are one segment, walked by one thread; a slab [SEGS, BV] holds step r of every segment. So
           a tile is ROWS slabs, all arithmetic on it is elementwise, and only one pair per segment and channel crosses threads.
Method     decoupled look-back (Merrill and Garland 2016), but combined in a fixed order, so that results do not depend on timing:
           GROUP tiles form a group; a tile reads what all earlier tiles of its group published, at once, and the state that left
           the group before. Only groups form a chain.
Memory     one 64-bit word per tile and channel holds A, S and a phase bit: it is its own "ready" flag, so no fence and no second
           round trip are needed. A is at least 0, its sign bit carries the phase.
Reuse      every word of a workspace is written once per launch, so all have the same phase between launches: a program reads
           it off its
           own words and writes the other one. Nobody clears, counts or passes anything, so a captured graph can be replayed.
Progress   a tile waits only for tiles of a lower program index, which the hardware starts no later.
"""

import triton
import triton.language as tl

POLLED = tl.constexpr(8)
"""Rows of what is polled, [POLLED, BV]: POLLED * BV must be at least the number of threads.

Threads that hold copies of one element load it on their own, and one may see it published when another does not yet; the loop
would then end with the other's copy stale. So no element of a poll may have copies.
"""


@triton.jit
def combine(decay_1, state_1, decay_2, state_2):
    """First the map (decay_1, state_1), then (decay_2, state_2)."""
    return decay_1 * decay_2, decay_2 * state_1 + state_2


@triton.jit
def between(before, after):
    """[SEGS, BV] twice to [2 SEGS, BV]: the rows of one between those of the other."""
    pairs = tl.permute(tl.join(before, after), (0, 2, 1))
    return tl.reshape(pairs, [2 * before.shape[0], before.shape[1]])


@triton.jit
def apart(rows):
    """Return the two tensors that :func:`between` put together."""
    pairs = tl.reshape(rows, [rows.shape[0] // 2, 2, rows.shape[1]])
    return tl.split(tl.permute(pairs, (0, 2, 1)))


@triton.jit
def scan_segments(decay, state):
    """Maps of segments [SEGS, BV]: of all segments before each one (exclusive), and with it (inclusive).

    An identity before each segment turns an inclusive scan into both: no shift of rows, which would move the tile to other
    threads.
    """
    decays = between(tl.zeros_like(decay) + 1.0, decay)
    states = between(tl.zeros_like(state), state)
    decays, states = tl.associative_scan((decays, states), 0, combine)
    decay_before, decay_with = apart(decays)
    state_before, state_with = apart(states)
    return decay_before, state_before, decay_with, state_with


@triton.jit
def scan_segments_reverse(decay, state):
    """:func:`scan_segments` from the last segment to the first."""
    decays = between(decay, tl.zeros_like(decay) + 1.0)
    states = between(state, tl.zeros_like(state))
    decays, states = tl.associative_scan((decays, states), 0, combine, reverse=True)
    decay_with, decay_before = apart(decays)
    state_with, state_before = apart(states)
    return decay_before, state_before, decay_with, state_with


@triton.jit
def row(values, index):
    """One row of [SEGS, BV]."""
    rows = tl.arange(0, values.shape[0])
    return tl.sum(tl.where((rows == index)[:, None], values, 0.0), 0)


@triton.jit
def pack(decay, state, phase):
    """float32 pair to words of this phase."""
    high = (decay.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (phase << 31)
    low = state.to(tl.int32, bitcast=True)
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def unpack(words):
    """Words to the float32 pair (decay, state)."""
    decay = ((words >> 32).to(tl.int32) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    return decay, words.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def own_words_before(words, tile, channels, c):
    """This program's own words [BV] of the launch before; to be read at the start, long before they are needed."""
    return tl.load(words + tile.to(tl.int64) * channels + c, mask=c < channels, other=0)


@triton.jit
def launch_phase(before):
    """The phase bit of this launch: the other one than :func:`own_words_before` have.

    The reduction is also the barrier behind which no thread still reads the words that :func:`publish` overwrites.
    """
    return 1 - tl.max((before < 0).to(tl.int32), 0)


@triton.jit
def stale(words, mask, phase):
    """Return a mask of the words that are not of this phase yet."""
    return ((words < 0) != (phase == 1)) & mask


@triton.jit
def follow(decay, state, words, mask):
    """The map (decay, state), then that of the words where the mask holds."""
    next_decay, next_state = unpack(words)
    return combine(decay, state, tl.where(mask, next_decay, 1.0), tl.where(mask, next_state, 0.0))


@triton.jit
def poll_slabs(pointers, channels, tile, count, in_range, phase, SLABS: tl.constexpr):
    """SLABS slabs of words as they are now, and whether any of the first ``count`` tiles is missing."""
    words = ()
    missing = tl.full(pointers.shape, 0, tl.int1)
    for r in tl.static_range(SLABS):
        mask = (tile + r < count)[:, None] & in_range
        found = tl.load(pointers + r * channels, mask=mask, other=0, volatile=True)
        missing |= stale(found, mask, phase)
        words = words + (found,)
    return words, tl.max(missing.to(tl.int32))


@triton.jit
def after_earlier_tiles(words, count, state, channels, c, phase, GROUP: tl.constexpr):
    """The state [BV] after the first ``count`` tiles of a group from ``state`` [POLLED, BV]: waits for all of them."""
    slabs: tl.constexpr = GROUP // POLLED
    tile = tl.arange(0, POLLED) * slabs
    in_range = (c < channels)[None, :]
    pointers = words + tile.to(tl.int64)[:, None] * channels + c[None, :]  # [POLLED, BV]
    found, missing = poll_slabs(pointers, channels, tile, count, in_range, phase, slabs)
    while missing > 0:
        found, missing = poll_slabs(pointers, channels, tile, count, in_range, phase, slabs)
    decays = tl.full(pointers.shape, 1.0, tl.float32)
    states = tl.zeros_like(decays)
    for r in tl.static_range(slabs):
        decays, states = follow(decays, states, found[r], (tile + r < count)[:, None] & in_range)
    decays, states = tl.associative_scan((decays, states), 0, combine)
    return row(decays * state + states, POLLED - 1)


@triton.jit
def state_after(words, channels, c, phase):
    """The state that left a group, in every row of [POLLED, BV]: waits until it is published."""
    pointers = words + tl.zeros([POLLED], tl.int32)[:, None] + c[None, :]
    mask = (tl.zeros([POLLED], tl.int32)[:, None] + c[None, :]) < channels
    found = tl.load(pointers, mask=mask, other=0, volatile=True)
    while tl.max(stale(found, mask, phase).to(tl.int32)) > 0:
        found = tl.load(pointers, mask=mask, other=0, volatile=True)
    return unpack(found)[1]


@triton.jit
def publish(words, decays, states, index, channels, c, phase):
    """Write row ``index`` of the maps [SEGS, BV]: the threads that hold it write it, nothing is gathered first."""
    rows = tl.arange(0, decays.shape[0])
    mask = (rows == index)[:, None] & (c < channels)[None, :]
    pointers = words + tl.zeros_like(rows)[:, None] + c[None, :]
    tl.atomic_xchg(pointers, pack(decays, states, phase), mask=mask, sem="relaxed")


@triton.jit
def pass_carry(
    words, group_words, decays, states, index, initial, tile, tiles, channels, c, phase, GROUP: tl.constexpr
):  # fmt: skip
    """Publish this tile's map, which is row ``index`` of [SEGS, BV], and return the state [BV] that enters the tile.

    ``words`` and ``group_words`` are where this sequence's words begin; ``c`` are the channels [BV], ``initial`` enters tile 0.
    """
    publish(words + tile.to(tl.int64) * channels, decays, states, index, channels, c, phase)
    group = tile // GROUP
    first = group * GROUP
    entering = tl.zeros([POLLED], tl.float32)[:, None] + initial[None, :]
    if group > 0:
        entering = state_after(group_words + (group - 1).to(tl.int64) * channels, channels, c, phase)
    carry = initial
    if tile > first:
        carry = after_earlier_tiles(words + first.to(tl.int64) * channels, tile - first, entering, channels, c, phase, GROUP)
    elif group > 0:
        carry = row(entering, 0)
    if (tile == first + GROUP - 1) | (tile == tiles - 1):
        leaving = decays * carry[None, :] + states
        publish(group_words + group.to(tl.int64) * channels, tl.zeros_like(leaving), leaving, index, channels, c, phase)
    return carry
