"""Device functions of the decoupled look-back for Gluon kernels on NVIDIA, where each thread waits for its own words.

Computes   the state that enters a tile of a scan over time, per channel. A tile maps a state s to A s + S: A is the product of
           its decays, which is at least 0, and S its final state when started from zero. These functions exchange the maps
           between the CTAs of one launch and combine them.
Callers    project_scan_gate_chunked_hopper.py of linear_rnn, one CTA per tile. look_back.py does the same for Triton kernels,
           with the same words and the same workspace.
Words      One 64-bit flag-in-data word holds a map of one channel: S in bits 0 to 31, A without its sign in bits 32 to 62, the
           phase in bit 63. Every word is written once per launch, with the phase opposite to that of the previous launch. So no
           launch clears the workspace, and a reader that sees the new phase also sees the new map.
Groups     PARTS * SLABS consecutive tiles form a group. A tile reads the maps of the earlier tiles of its own group at once
           (``wait_for_earlier_tiles``), and the final state of the previous group. So only groups form a serial chain. A tile
           waits only for tiles of a lower program index, which the hardware starts no later.
Workspace  Words of consecutive tiles are ``channels`` words apart; consecutive channels are neighbours. The words of the
           groups' final states have the same order.
Layouts    Maps are tensors [PARTS, BV]: each of PARTS rows combines a part of the earlier tiles (or is one segment of the own
           tile). A thread holds two neighbouring channels, so it reads and writes its words in one access of 16 bytes. The
           number of channels must therefore be even: the two words of a pair are then both in range or both out of range.
On chip    ``in_order`` takes two buffers [PARTS, BV] of float32 in shared memory; all else lies in registers.
Waiting    A thread loads all its words at once. Then, word by word, it loads again until the word has this launch's phase. No
           thread waits for another, so the look-back needs no barrier but the one in :func:`in_order`, where threads combine
           their parts. Threads that hold copies of an element may load it at different moments. Each continues with a published
           word, and published words are equal. So the tensor may be smaller than the number of threads; look_back.py, where the
           whole CTA tests one condition, has a lower bound (POLL_ROWS).
Numerics   float32; parts are combined in a fixed order, so results do not depend on timing.
Source     Merrill and Garland (2016); docs/notebook/linear_rnn.md.
"""

from onelaunch.kernels.gluon.compat import gl, gluon

SIGN = gl.constexpr(-9223372036854775807 - 1)
"""Mask of bit 63 of a word, which carries the phase."""

IDENTITY = gl.constexpr(0x3F80000000000000)
"""Word of the identity map s -> 1 s + 0, with phase 0."""


@gluon.jit
def combine(decay_1, state_1, decay_2, state_2):
    """Return the map that applies (decay_1, state_1) first and (decay_2, state_2) second."""
    return decay_1 * decay_2, decay_2 * state_1 + state_2


@gluon.jit
def launch_phase(words):
    """Return the phase of this launch, in bit 63 of an int64; the other bits are 0.

    ``words`` are the CTA's own words as the previous launch left them. The new phase is the opposite of theirs.
    """
    return (words ^ SIGN) & SIGN


@gluon.jit
def pack(decay, state, phase):
    """Pack a float32 pair (A, S) into words of this phase.

    A is at least 0, so its sign bit is free for the phase. The bit is masked all the same: a NaN with a sign would otherwise
    change the phase.
    """
    high = (decay.to(gl.int32, bitcast=True) & 0x7FFFFFFF).to(gl.int64) << 32
    return high | (state.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF) | phase


@gluon.jit
def unpack(words):
    """Unpack words into the float32 pair (decay, state)."""
    decay = ((words >> 32).to(gl.int32) & 0x7FFFFFFF).to(gl.float32, bitcast=True)
    return decay, words.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def spin_until_published(words, pointers, phase):
    """Return the words at ``pointers``, loaded again until both words of a pair have this phase.

    ``words`` are the values of a first load. Each thread handles pairs of neighbouring words, 16-byte aligned. A pair that must
    not be waited for is given with this phase in both words. It must be both or neither, since a repeated load replaces both.
    The loads are relaxed at GPU scope: a word holds its own flag, so no acquire is needed.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred stale;
        .reg .b64 first, second;
        mov.b64 $0, $2;
        mov.b64 $1, $3;
        AGAIN:
        xor.b64 first, $0, $6;
        xor.b64 second, $1, $6;
        or.b64 first, first, second;
        setp.lt.s64 stale, first, 0;
        @!stale bra DONE;
        ld.relaxed.gpu.global.v2.b64 {$0, $1}, [$4];
        bra AGAIN;
        DONE:
        }""",
        "=&l,=&l,l,l,l,l,l,l",
        [words, pointers.to(gl.int64), phase],
        dtype=gl.int64,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def publish(pointers, decay, state, mask, phase):
    """Publish the words of a map [1, BV] for other CTAs, with a store that bypasses L1.

    Whole rows of words are stored, so that no line must be fetched from memory first; an atomic exchange would fetch it. A
    barrier of the CTA must lie between the load of the old words, which :func:`launch_phase` was given, and this store.
    Otherwise a thread with a copy of the element could take the new word for the old one and derive the wrong phase.
    """
    gl.store(pointers, pack(decay, state, phase), mask=mask, cache_modifier=".cg")


@gluon.jit
def in_order(decay_memory, state_memory, decay, state, part):
    """Combine the maps of parts [PARTS, BV] in order; return the map before each part, and the map of all parts [1, BV].

    ``part`` [PARTS] is the index of each row. Maps are exchanged through ``decay_memory`` and ``state_memory``, two buffers
    [PARTS, BV] in shared memory. Nothing may have used them before, since no barrier precedes the stores. Every thread combines
    all parts of its channels. That takes one barrier, which the compiler inserts between the stores and the loads; a tree of
    partial results would take several.
    """
    PARTS: gl.constexpr = decay.shape[0]
    BV: gl.constexpr = decay.shape[1]
    layout: gl.constexpr = decay.type.layout
    decay_memory.store(decay)
    state_memory.store(state)
    decays = decay_memory._reinterpret(gl.float32, [PARTS, 1, BV], decay_memory.layout)  # noqa: SLF001 - no public name
    states = state_memory._reinterpret(gl.float32, [PARTS, 1, BV], state_memory.layout)  # noqa: SLF001
    all_decay = gl.full([1, BV], 1.0, gl.float32, layout=layout)
    all_state = gl.zeros([1, BV], gl.float32, layout=layout)
    decay_before = gl.full([PARTS, BV], 1.0, gl.float32, layout=layout)
    state_before = gl.zeros([PARTS, BV], gl.float32, layout=layout)
    for i in gl.static_range(PARTS):
        if i > 0:
            here = (part == i)[:, None]
            decay_before = gl.where(here, all_decay, decay_before)
            state_before = gl.where(here, all_state, state_before)
        all_decay, all_state = combine(all_decay, all_state, decays.index(i).load(layout), states.index(i).load(layout))
    return decay_before, state_before, all_decay, all_state


@gluon.jit
def wait_for_earlier_tiles(words, channels, part, c, count, in_range, phase, SLABS: gl.constexpr):
    """Wait for the first ``count`` tiles of a group; return their maps, combined to [PARTS, BV], SLABS tiles in each row.

    The group has PARTS * SLABS tiles; row r combines tiles r * SLABS to (r + 1) * SLABS - 1. Tiles from ``count`` on, and
    channels outside ``in_range`` [1, BV], are taken as the identity and are not waited for. ``words`` points to the word of the
    group's first tile and of channel 0 of ``c``; ``channels`` is the distance from tile to tile, in words. ``part`` [PARTS] and
    ``c`` [1, BV] are the indices of rows and channels. ``phase`` comes from :func:`launch_phase`. The first loads are all
    issued before the first wait. They are volatile, so that they read memory and not an earlier value.
    """
    tile = (part * SLABS)[:, None]
    pointers = words + (tile * channels + c)
    found = ()
    for i in gl.static_range(SLABS):
        wanted = (tile + i < count) & in_range
        found = found + (gl.load(pointers + i * channels, mask=wanted, other=0, volatile=True),)
    decay = gl.full(pointers.shape, 1.0, gl.float32, layout=pointers.type.layout)
    state = gl.zeros_like(decay)
    for i in gl.static_range(SLABS):
        wanted = (tile + i < count) & in_range
        word = spin_until_published(gl.where(wanted, found[i], phase | IDENTITY), pointers + i * channels, phase)
        next_decay, next_state = unpack(word)
        decay, state = combine(decay, state, next_decay, next_state)
    return decay, state
