"""A carry along tiles of one sequence, inside one launch: the device functions of a single-pass scan.

Computes   per channel c_i = A_{i-1} * c_{i-1} + S_{i-1}, c_0 given: the state that enters tile i, where tile j maps a state s to A_j s + S_j.
Method     decoupled look-back (Merrill and Garland 2016) with a fixed order of combination, so that results do not depend on timing:
           tiles come in groups; a tile reads what all earlier tiles of its group published, at once, and the state that left the
           group before. Only groups form a chain.
Memory     one 64-bit word per tile and channel holds A, S and a phase bit: it is its own "ready" flag, so no fence and no second
           round trip are needed. A is at least 0, its sign bit carries the phase.
Reuse      all words of a workspace are written once per launch, and the last program to finish flips the phase: the words of the launch
           before are then stale without anybody clearing them. Nothing is passed from the host, so a captured graph can be replayed.
Progress   a tile waits only for tiles of a lower program index, which the hardware starts no later.
"""

import triton
import triton.language as tl


@triton.jit
def combine(decay_1, state_1, decay_2, state_2):
    """First the map (decay_1, state_1), then (decay_2, state_2)."""
    return decay_1 * decay_2, decay_2 * state_1 + state_2


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
def launch_phase(header):
    """The phase bit of words written in this launch; 1 in the first."""
    return 1 - tl.load(header)


@triton.jit
def finish(header, programs):
    """To be called by every program once it has read all it waits for: the last one flips the phase for the next launch."""
    if tl.atomic_add(header + 1, 1, sem="acq_rel") == programs - 1:
        tl.store(header + 1, 0)
        tl.store(header, 1 - tl.load(header))


@triton.jit
def wait(pointers, mask, phase):
    """The words behind the pointers, once all of them are of this phase."""
    words = tl.load(pointers, mask=mask, other=0, volatile=True)
    stale = tl.sum((((words < 0) != (phase == 1)) & mask).to(tl.int32))
    while stale > 0:
        words = tl.load(pointers, mask=mask, other=0, volatile=True)
        stale = tl.sum((((words < 0) != (phase == 1)) & mask).to(tl.int32))
    return words


@triton.jit
def last_row(values, rows, SIZE: tl.constexpr):
    """Row SIZE - 1 of [SIZE, BV]."""
    return tl.sum(tl.where((rows == SIZE - 1)[:, None], values, 0.0), 0)


@triton.jit
def pass_carry(words, group_words, decay, state, initial, tile, tiles, channels, c, phase, GROUP: tl.constexpr):
    """Publish this tile's map, return the state that enters the tile; both [BV].

    ``words`` and ``group_words`` are where this sequence's words begin; ``c`` are the channels [BV], ``initial`` enters tile 0.
    """
    in_range = c < channels
    tl.atomic_xchg(words + tile.to(tl.int64) * channels + c, pack(decay, state, phase), mask=in_range, sem="relaxed")
    group = tile // GROUP
    first = group * GROUP
    carry = initial
    if group > 0:
        entering = wait(group_words + (group - 1).to(tl.int64) * channels + c, in_range, phase)
        carry = unpack(entering)[1]
    if tile > first:
        rows = tl.arange(0, GROUP)
        mask = (first + rows < tile)[:, None] & in_range[None, :]  # [GROUP, BV]
        earlier = wait(words + (first + rows).to(tl.int64)[:, None] * channels + c[None, :], mask, phase)
        decays, states = unpack(earlier)
        decays, states = tl.associative_scan((tl.where(mask, decays, 1.0), tl.where(mask, states, 0.0)), 0, combine)
        carry = last_row(decays, rows, GROUP) * carry + last_row(states, rows, GROUP)
    if (tile == first + GROUP - 1) | (tile == tiles - 1):
        leaving = decay * carry + state
        tl.atomic_xchg(
            group_words + group.to(tl.int64) * channels + c, pack(tl.zeros_like(leaving), leaving, phase), mask=in_range, sem="relaxed"
        )
    return carry
