"""Gated linear attention on Hopper GPUs: where tiles lie, and what all groups of warps compute alike."""

from onelaunch.kernels.gluon.compat import gl, gluon

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
    """Of sequence n: its first row, its length, and the slot of its first chunk, as chunk.py counts them."""
    if PACKED:
        first = gl.load(offsets + n).to(gl.int32)
        length = gl.load(offsets + n + 1).to(gl.int32) - first
        return first, length, first // C + n
    return n * T, T + 0 * n, n * gl.cdiv(T, C)


@gluon.jit
def span(offsets, n, T, segment, part_steps, PACKED: gl.constexpr):
    """First row and number of steps of a sequence's part."""
    first, length, _ = bounds(offsets, n, T, PACKED)
    start = segment * part_steps
    return first + start, gl.maximum(gl.minimum(length - start, part_steps), 0)


@gluon.jit
def find_chunk(offsets, slot, T, sequences, STEPS: gl.constexpr, PACKED: gl.constexpr):
    """First row of the chunk in ``slot``, and steps from there to its sequence's end, none in a spare slot: see chunk.py."""
    if PACKED:
        n = slot * 0
        high = n + sequences
        for _ in gl.static_range(STEPS):
            middle = (n + high) // 2
            below = gl.load(offsets + middle).to(gl.int32) // C + middle <= slot
            n = gl.where(below, middle, n)
            high = gl.where(below, high, middle)
        first = gl.load(offsets + n).to(gl.int32)
        length = gl.load(offsets + n + 1).to(gl.int32) - first
        done = (slot - first // C - n) * C
    else:
        chunks = gl.cdiv(T, C)
        n = slot // chunks
        first = n * T
        length = T + 0 * n
        done = (slot - n * chunks) * C
    return first + done, length - done


@gluon.jit
def place(sizes, SLICES: gl.constexpr):
    """Sequence, head, slice of values and part of the sequence that a program works on."""
    heads, segments, _ = sizes
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


PARTS_BF16 = gl.constexpr("""
{
    .reg .b32 c, d;
    .reg .f32 a, b;
    cvt.rn.bf16x2.f32 $0, $3, $2;
    shl.b32 c, $0, 16;
    and.b32 d, $0, 0xffff0000;
    mov.b32 a, c;
    mov.b32 b, d;
    sub.f32 a, $2, a;
    sub.f32 b, $3, b;
    cvt.rn.bf16x2.f32 $1, b, a;
}
""")
PARTS_FP16 = gl.constexpr("""
{
    .reg .b16 c, d;
    .reg .f32 a, b;
    cvt.rn.f16x2.f32 $0, $3, $2;
    mov.b32 {c, d}, $0;
    cvt.f32.f16 a, c;
    cvt.f32.f16 b, d;
    sub.f32 a, $2, a;
    sub.f32 b, $3, b;
    cvt.rn.f16x2.f32 $1, b, a;
}
""")


@gluon.jit
def store_in_parts(x, high, low):
    """x as the sum of two numbers of the tiles' dtype, two elements at a time."""
    E: gl.constexpr = high.dtype
    if gl.bfloat16 == E:
        first, second = gl.inline_asm_elementwise(
            PARTS_BF16, "=r,=r,f,f", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        first, second = gl.inline_asm_elementwise(
            PARTS_FP16, "=r,=r,f,f", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
        )
    high.store(first)
    low.store(second)


@gluon.jit
def exp2_flushed(x):
    """2^x, 0 where that is not a normal number: a third of the instructions."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log_sigmoid_slope(y):
    """The derivative of logsigmoid by its result, 1 - exp(y); a series where the exponential is all but 1."""
    series = -y * (1.0 + y * (0.5 + y * (1.0 / 6.0)))
    return gl.where(y > -0.01, series, 1.0 - exp2_flushed(y * LOG2E))


@gluon.jit
def cut(tile, left, layout: gl.constexpr):
    """Make 0 of what belongs to somebody else: the rows from ``left`` on."""
    for panel in gl.static_range(tile.shape[1] // PANEL):
        part = tile.slice(panel * PANEL, PANEL, dim=1)
        kept = gl.where(rows_of(layout, left) < left, part.load(layout).to(gl.float32), 0.0)
        part.store(kept.to(tile.dtype))


@gluon.jit
def raise_to(tile, layout: gl.constexpr):
    """Make log-decays at least what the dtype holds, since -inf times 0 is NaN; NaN stays."""
    E: gl.constexpr = tile.dtype
    for panel in gl.static_range(tile.shape[1] // PANEL):
        part = tile.slice(panel * PANEL, PANEL, dim=1)
        if gl.bfloat16 == E:
            raised = gl.inline_asm_elementwise(
                "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [part.load(layout), gl.full([C, PANEL], -1e30, E, layout=layout)],
                dtype=gl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            raised = gl.inline_asm_elementwise(
                "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [part.load(layout), gl.full([C, PANEL], -65504.0, E, layout=layout)],
                dtype=gl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        part.store(raised)
