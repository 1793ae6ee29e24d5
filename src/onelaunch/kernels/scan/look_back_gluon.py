"""The look-back of look_back.py for kernels in Gluon on NVIDIA, where each thread waits on its own for the words it reads.

Words      as there: one per tile and channel, the map s -> A s + S and a phase bit in 64 bits.
Waiting    a thread reads all its words at once and then, word by word, again until they are of this launch's phase. No thread
           waits for another, so the look-back has no barrier but the one at which threads put their parts together. Threads that
           hold copies of an element may read it at different moments; each goes on with a published word, and those are equal.
Layouts    maps are [PARTS, BV], a thread holding two neighbouring channels: its words come in one access of 16 bytes.
"""

from onelaunch.kernels.gluon.compat import gl, gluon

SIGN = gl.constexpr(-9223372036854775807 - 1)
"""The bit that carries the phase."""

IDENTITY = gl.constexpr(0x3F80000000000000)
"""The word of the map s -> 1 s + 0."""


@gluon.jit
def combine(decay_1, state_1, decay_2, state_2):
    """First the map (decay_1, state_1), then (decay_2, state_2)."""
    return decay_1 * decay_2, decay_2 * state_1 + state_2


@gluon.jit
def launch_phase(words):
    """The phase bit of this launch: the other one than words of the launch before have."""
    return (words ^ SIGN) & SIGN


@gluon.jit
def pack(decay, state, phase):
    """float32 pair to words of this phase; a NaN keeps its sign out of the phase."""
    high = (decay.to(gl.int32, bitcast=True) & 0x7FFFFFFF).to(gl.int64) << 32
    return high | (state.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF) | phase


@gluon.jit
def unpack(words):
    """Words to the float32 pair (decay, state)."""
    decay = ((words >> 32).to(gl.int32) & 0x7FFFFFFF).to(gl.float32, bitcast=True)
    return decay, words.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def until_published(words, pointers, phase):
    """The words, read again where they are not of this phase yet. Pairs of neighbours, 16-byte aligned."""
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
    """Write the words of a map [1, BV] where others see them; rows of words, so that nothing of them must be read first."""
    gl.store(pointers, pack(decay, state, phase), mask=mask, cache_modifier=".cg")


@gluon.jit
def in_order(decay_memory, state_memory, decay, state, part):
    """Maps [PARTS, BV], by way of shared memory of that shape: the map before each part, and the map of all, [1, BV].

    Every thread walks all parts of its channels: one barrier instead of a tree's several.
    """
    PARTS: gl.constexpr = decay.shape[0]
    BV: gl.constexpr = decay.shape[1]
    layout: gl.constexpr = decay.type.layout
    decay_memory.store(decay)
    state_memory.store(state)
    decays = decay_memory._reinterpret(gl.float32, [PARTS, 1, BV], decay_memory.layout)  # noqa: SLF001 - its public name
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
def earlier_tiles(words, channels, part, c, count, in_range, phase, SLABS: gl.constexpr):
    """The maps [PARTS, BV] of SLABS tiles each, of which only the first ``count`` in all are waited for and count.

    ``words`` is where the first tile's words begin; ``part`` and ``c`` are the rows [PARTS] and the channels [1, BV].
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
        word = until_published(gl.where(wanted, found[i], phase | IDENTITY), pointers + i * channels, phase)
        next_decay, next_state = unpack(word)
        decay, state = combine(decay, state, next_decay, next_state)
    return decay, state
