"""Scans over segments inside a tile, and a carry along tiles inside one launch: the device functions of a single-pass scan.

Computes   c_i = A_{i-1} * c_{i-1} + S_{i-1} per channel, c_0 given: the state that enters tile i, where tile j maps s to A_j
           s + S_j.
Tile       ROWS consecutive steps are one segment, walked by one thread; a slab [SEGS, BV] holds step r of every segment. So
           a tile is ROWS slabs, all arithmetic on it is elementwise, and only one pair per segment and channel crosses threads.
Method     decoupled look-back (Merrill and Garland 2016) with a fixed order of combination, so that results do not depend on
           timing:
           tiles come in groups; a tile reads what all earlier tiles of its group published, at once, and the state that left the
           group before. Only groups form a chain.
Memory     one 64-bit word per tile and channel holds A, S and a phase bit: it is its own "ready" flag, so no fence and no second
           round trip are needed. A is at least 0, its sign bit carries the phase.
Reuse      every word of a workspace is written once per launch, so all have the same phase between launches: a program reads
           it off its
           own words and writes the other one. Nobody clears, counts or passes anything, so a captured graph can be replayed.
Progress   a tile waits only for tiles of a lower program index, which the hardware starts no later.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(32)
"""Tiles that are read at once; 4 slabs of words."""


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
    """What :func:`between` put together."""
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
def launch_phase(words, tile, channels, c):
    """The phase bit of this launch: the other one than this program's own words have. ``words``: of this sequence."""
    own = tl.load(words + tile.to(tl.int64) * channels + c, mask=c < channels, other=0)
    return 1 - tl.max((own < 0).to(tl.int32), 0)


@triton.jit
def stale(words, mask, phase):
    """Where words are not yet of this phase."""
    return ((words < 0) != (phase == 1)) & mask


@triton.jit
def follow(decay, state, words, mask):
    """The map (decay, state), then that of the words where the mask holds."""
    next_decay, next_state = unpack(words)
    return combine(decay, state, tl.where(mask, next_decay, 1.0), tl.where(mask, next_state, 0.0))


@triton.jit
def poll_slabs(pointers, channels, mask_0, mask_1, mask_2, mask_3, phase):
    """Four slabs of words as they are now, and whether any is missing."""
    words_0 = tl.load(pointers, mask=mask_0, other=0, volatile=True)
    words_1 = tl.load(pointers + channels, mask=mask_1, other=0, volatile=True)
    words_2 = tl.load(pointers + 2 * channels, mask=mask_2, other=0, volatile=True)
    words_3 = tl.load(pointers + 3 * channels, mask=mask_3, other=0, volatile=True)
    missing = stale(words_0, mask_0, phase) | stale(words_1, mask_1, phase)
    missing |= stale(words_2, mask_2, phase) | stale(words_3, mask_3, phase)
    return words_0, words_1, words_2, words_3, tl.max(missing.to(tl.int32))


@triton.jit
def after_earlier_tiles(words, count, state, channels, c, phase):
    """The state [BV] after the first ``count`` (below GROUP) tiles of a group, from the given one: waits for all of them."""
    segments = tl.arange(0, GROUP // 4)
    tile = segments * 4
    in_range = (c < channels)[None, :]
    pointers = words + tile.to(tl.int64)[:, None] * channels + c[None, :]  # [GROUP / 4, BV]
    mask_0 = (tile < count)[:, None] & in_range
    mask_1 = (tile + 1 < count)[:, None] & in_range
    mask_2 = (tile + 2 < count)[:, None] & in_range
    mask_3 = (tile + 3 < count)[:, None] & in_range
    words_0, words_1, words_2, words_3, missing = poll_slabs(pointers, channels, mask_0, mask_1, mask_2, mask_3, phase)
    while missing > 0:
        words_0, words_1, words_2, words_3, missing = poll_slabs(pointers, channels, mask_0, mask_1, mask_2, mask_3, phase)
    decays = tl.full(words_0.shape, 1.0, tl.float32)
    decays, states = follow(decays, tl.zeros_like(decays), words_0, mask_0)
    decays, states = follow(decays, states, words_1, mask_1)
    decays, states = follow(decays, states, words_2, mask_2)
    decays, states = follow(decays, states, words_3, mask_3)
    decays, states = tl.associative_scan((decays, states), 0, combine)
    return row(decays * state[None, :] + states, GROUP // 4 - 1)


@triton.jit
def state_after(words, channels, c, phase):
    """The state [BV] that left a group: waits until it is published."""
    in_range = c < channels
    found = tl.load(words + c, mask=in_range, other=0, volatile=True)
    while tl.max(stale(found, in_range, phase).to(tl.int32), 0) > 0:
        found = tl.load(words + c, mask=in_range, other=0, volatile=True)
    return unpack(found)[1]


@triton.jit
def publish(words, decays, states, index, channels, c, phase):
    """Write row ``index`` of the maps [SEGS, BV]: the threads that hold it write it, nothing is gathered first."""
    rows = tl.arange(0, decays.shape[0])
    mask = (rows == index)[:, None] & (c < channels)[None, :]
    pointers = words + tl.zeros_like(rows)[:, None] + c[None, :]
    tl.atomic_xchg(pointers, pack(decays, states, phase), mask=mask, sem="relaxed")


@triton.jit
def pass_carry(words, group_words, decays, states, index, initial, tile, tiles, channels, c, phase):
    """Publish this tile's map, which is row ``index`` of [SEGS, BV], and return the state [BV] that enters the tile.

    ``words`` and ``group_words`` are where this sequence's words begin; ``c`` are the channels [BV], ``initial`` enters tile 0.
    """
    publish(words + tile.to(tl.int64) * channels, decays, states, index, channels, c, phase)
    group = tile // GROUP
    first = group * GROUP
    carry = initial
    if group > 0:
        carry = state_after(group_words + (group - 1).to(tl.int64) * channels, channels, c, phase)
    if tile > first:
        carry = after_earlier_tiles(words + first.to(tl.int64) * channels, tile - first, carry, channels, c, phase)
    if (tile == first + GROUP - 1) | (tile == tiles - 1):
        leaving = decays * carry[None, :] + states
        publish(group_words + group.to(tl.int64) * channels, tl.zeros_like(leaving), leaving, index, channels, c, phase)
    return carry
