"""Gated linear attention on Hopper GPUs: where tiles lie, and what all groups of warps compute alike."""

from onelaunch.ops.gluon_compat import gl, gluon

LOG2E = gl.constexpr(1.4426950408889634)
C = gl.constexpr(64)
"""Steps of a tile: a chunk."""
PANEL = gl.constexpr(64)
"""Channels that are copied or worked on at once."""


SHORTEST = gl.constexpr(-120.0)
"""Log-decay of a step that stands for all below: exp of it is 0 in float32, and sums of 64 are still good to 2^-12."""


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def exp(x):
    return gl.exp2(x * LOG2E)


@gluon.jit
def ones_where(condition, dtype: gl.constexpr):
    return gl.where(condition, 1.0, 0.0).to(dtype)


@gluon.jit
def bounds(offsets, n, T, PACKED: gl.constexpr):
    """Of sequence n: its first row, its length, and the slot of its first chunk, as kernels.py counts them."""
    if PACKED:
        first = gl.load(offsets + n).to(gl.int32)
        length = gl.load(offsets + n + 1).to(gl.int32) - first
        return first, length, first // C + n
    return n * T, T + 0 * n, n * gl.cdiv(T, C)


@gluon.jit
def span(offsets, n, T, segment, SEGMENT_STEPS: gl.constexpr, PACKED: gl.constexpr):
    """First row and number of steps of a sequence's part."""
    first, length, _ = bounds(offsets, n, T, PACKED)
    start = segment * SEGMENT_STEPS
    return first + start, gl.maximum(gl.minimum(length - start, SEGMENT_STEPS), 0)


@gluon.jit
def place(sizes, SLICES: gl.constexpr):
    """Sequence, head, slice of values and part of the sequence that a program works on."""
    heads, segments = sizes
    item = gl.program_id(0)
    part = item % SLICES
    item = item // SLICES
    head = item % heads
    item = item // heads
    segment = item % segments
    return item // segments, head, part, segment


@gluon.jit
def chunk_of(turn, chunks, REVERSE: gl.constexpr):
    """Which chunk of its part a walk meets in this turn."""
    return chunks - 1 - turn if REVERSE else turn


@gluon.jit
def rows_of(layout: gl.constexpr, left):
    """The row of each element of a tile, computed where it is wanted: left >> 31 is 0, but the compiler cannot know."""
    return gl.arange(0, C, layout=gl.SliceLayout(1, layout))[:, None] + (left >> 31)


@gluon.jit
def zero_of(flag, layout: gl.constexpr):
    """0, from a flag in shared memory that is 1: constants that depend on it are computed where they are used, not kept."""
    return gl.max(flag.load(layout), 0) - 1


@gluon.jit
def store_in_parts(x, high, low):
    """x as the sum of two numbers of the tiles' dtype."""
    first = x.to(high.dtype)
    high.store(first)
    low.store((x - first.to(gl.float32)).to(low.dtype))
