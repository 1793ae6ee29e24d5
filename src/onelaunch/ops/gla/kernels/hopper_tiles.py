"""Device functions that the Hopper kernels of gated linear attention share: coordinates, loads, masks, exponentials.

All of them are inlined into the three Gluon kernels of this folder (hopper_chunk_state.py, hopper_segment_sum.py,
hopper_gradients.py) and into their device functions (hopper_prepare.py, hopper_pairs.py, hopper_states.py). None has
barriers of its own; ``load_stage`` announces bytes to one of its caller.
A function that writes shared memory says so: the caller must then run ``fence_async_shared`` before WGMMA or TMA reads the tile,
and must arrive at an mbarrier, or wait for a product, before other warps read it.

Heads that do not fill tiles are padded: K to 64, 128 or 256 channels, V to a multiple of 64 GROUPS. ``load_box`` fills what lies
beyond a head with zeros. So log-decays of padding are 0, its decays 1, and what it adds to a state 0; ``store_box`` drops it.

Two functions, ``row_index`` and ``opaque_zero``, exist to hide constants from the compiler. Index tensors and masks that do not
depend on the loop are otherwise computed before it and held in registers for its whole length (docs/notebook/gla.md, traps).
"""

from onelaunch.kernels.gluon.compat import gl, gluon, mbarrier, tma_load, tma_store

LOG2E = gl.constexpr(1.4426950408889634)
"""Factor from natural logarithms to those of base 2, since the hardware computes ``2^x``."""
C = gl.constexpr(64)
"""Steps of a chunk, which is the height of every tile but those of states."""
PANEL = gl.constexpr(64)
"""Channels that one TMA box or one warpgroup takes at once: 64 16-bit numbers are the 128-byte swizzle width."""

QUERY_HEADS, KEY_HEADS, VALUE_HEADS, DECAY_HEADS, STATE_HEADS = (gl.constexpr(each) for each in range(5))
"""Places of the tensors in the constant SHARED of the kernels, see ``head_of``."""

LARGEST = gl.constexpr(128.0)
"""Largest magnitude of float16 queries and keys for which the chunk's middle may be the anchor.

Times exp(LIMIT), with LIMIT = 6 for float16, they stay finite. A chunk with larger ones takes the path of strong decay.
"""

MIN_LOG_DECAY = gl.constexpr(-120.0)
"""Least log-decay of a step where a head has one decay; smaller ones, -inf included, are replaced by it.

Its exponential is 0 in float32, and sums over 64 such steps are still good to 2^-12.
"""


@gluon.jit
def load_box(source, row, head, channel, CHANNELS: gl.constexpr, bar, tile, enabled=True):
    """Load by TMA a tile [rows, columns] of a tensor [B T, H, X], from ``row`` and ``channel`` of ``head`` on.

    ``source`` describes a matrix [B T, H X] whose heads are CHANNELS columns apart, or a tensor [B T, H, X] if tiles reach beyond
    the channels of a head: there TMA fills them with zeros. Either way ``bar`` gets the bytes of the whole tile. Nothing is
    loaded unless ``enabled``.
    """
    if source.layout.rank == 3:
        tma_load(source, [row, head, channel], bar, tile.reshape([tile.shape[0], 1, tile.shape[1]]), pred=enabled)
    else:
        tma_load(source, [row, head * CHANNELS + channel], bar, tile, pred=enabled)


@gluon.jit
def store_box(target, row, head, channel, channels, tile):
    """Store a tile by TMA to where ``load_box`` would load it from; columns beyond the channels of a head are dropped.

    ``channels`` is the number of columns of a head. The caller fences before and waits afterwards.
    """
    if target.layout.rank == 3:
        tma_store(target, [row, head, channel], tile.reshape([tile.shape[0], 1, tile.shape[1]]))
    else:
        tma_store(target, [row, head * channels + channel], tile)


@gluon.jit
def plus(a, b):
    """Return a + b, as the combining function of an associative scan."""
    return a + b


@gluon.jit
def exp(x):
    """Return e^x through ``2^x``."""
    return gl.exp2(x * LOG2E)


@gluon.jit
def ones_where(condition, dtype: gl.constexpr):
    """Return 1 where ``condition`` holds and 0 elsewhere, in ``dtype``: a matrix that sums steps when it multiplies."""
    return gl.where(condition, 1.0, 0.0).to(dtype)


@gluon.jit
def sequence_bounds(offsets, n, T, PACKED: gl.constexpr):
    """Return the first row, the length, and the slot of the first chunk of sequence n.

    Slots number the chunks of all sequences. Packed sequences are counted as in chunk.py: the first slot is offsets[n] // C +
    n.
    """
    if PACKED:
        first = gl.load(offsets + n).to(gl.int32)
        length = gl.load(offsets + n + 1).to(gl.int32) - first
        return first, length, first // C + n
    return n * T, T + 0 * n, n * gl.cdiv(T, C)


@gluon.jit
def segment_span(offsets, n, T, segment, sizes, PACKED: gl.constexpr):
    """Return the first row and the number of steps of one segment of sequence n.

    ``sizes`` is that of ``work_item``. A segment is a multiple of C long. With PACKED each sequence is cut into segments of its
    own length, since lengths differ. The last segments of a short sequence may have fewer steps, or none.
    """
    _, segments, segment_steps = sizes
    first, length, _ = sequence_bounds(offsets, n, T, PACKED)
    if PACKED:
        segment_steps = gl.cdiv(gl.cdiv(length, C), segments) * C
    start = segment * segment_steps
    return first + start, gl.maximum(gl.minimum(length - start, segment_steps), 0)


@gluon.jit
def find_chunk(offsets, slot, T, sequences, BISECTION_STEPS: gl.constexpr, PACKED: gl.constexpr):
    """Return the first row of the chunk in ``slot``, the steps from there to the end of its sequence, and this sequence's number.

    The number of steps is at most 0 in a spare slot, which has no chunk. Packed sequences are found by bisection of the offsets
    in BISECTION_STEPS halvings, so that the host never reads them: see chunk.py.
    """
    if PACKED:
        n = slot * 0
        high = n + sequences
        for _ in gl.static_range(BISECTION_STEPS):
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
    return first + done, length - done, n


@gluon.jit
def work_item(sizes, SLICES: gl.constexpr):
    """Return the sequence, the head, the slice of values and the segment that this CTA works on.

    ``sizes`` holds the number of heads, the number of segments per sequence, and the steps of a segment, which are not used
    where sequences are packed. A head has SLICES slices of values. Slices of values vary fastest, so CTAs that read the same
    queries, keys and log-decays are neighbours.
    """
    heads, segments, _ = sizes
    item = gl.program_id(0)
    value_slice = item % SLICES
    item = item // SLICES
    head = item % heads
    item = item // heads
    segment = item % segments
    return item // segments, head, value_slice, segment


@gluon.jit
def head_of(head, SHARED: gl.constexpr, TENSOR: gl.constexpr):
    """Return the head of a tensor that the CTAs of ``head`` read; without shared heads it has the same number.

    SHARED holds, for queries, keys, values, log-decays and states in this order, how many neighbouring heads of the grid share
    one head of the tensor. TENSOR is the place of one of them, such as KEY_HEADS. Given the number of heads of the grid, or a
    head counted through all sequences (``n heads + head``), the function returns the same of the tensor.
    """
    return head if SHARED[TENSOR] == 1 else head // SHARED[TENSOR]


@gluon.jit
def chunk_of(turn, chunks, REVERSE: gl.constexpr):
    """Return the chunk, of ``chunks``, that is processed in iteration ``turn``: from the last to the first with REVERSE."""
    return chunks - 1 - turn if REVERSE else turn


@gluon.jit
def load_stage(descriptors, tiles, full, at, head, value_slice, stage, enabled, GROUPS: gl.constexpr, SLICES: gl.constexpr,
               OUTPUT: gl.constexpr, SCALAR: gl.constexpr, SHARED: gl.constexpr, queried=None):  # fmt: skip
    """Load one chunk into a stage by TMA: log-decays per channel, keys, queries with OUTPUT, and values of all groups.

    The stage must be empty. Announces the bytes to ``full``, on which the loads arrive; does nothing unless ``enabled``. ``at``
    is the chunk's first row; ``value_slice``, one of SLICES, holds the values of all groups. ``queried``, if given, says whether
    the queries are loaded.
    """
    queries, keys, values, g = descriptors
    tiles_q, tiles_k, tiles_v, tiles_g, _, _, _ = tiles
    K: gl.constexpr = tiles_k.shape[2]
    TILES: gl.constexpr = 1 + (1 if OUTPUT else 0)
    BYTES: gl.constexpr = (0 if SCALAR else g.block_type.nbytes) + GROUPS * values.block_type.nbytes
    bar = full.index(stage)
    if queried is None:
        queried = enabled
    else:
        mbarrier.expect(bar, keys.block_type.nbytes + BYTES, pred=enabled & (queried == 0))
        queried = enabled & queried
    mbarrier.expect(bar, TILES * keys.block_type.nbytes + BYTES, pred=queried)
    if not SCALAR:
        load_box(g, at, head_of(head, SHARED, DECAY_HEADS), 0, K, bar, tiles_g.index(stage), enabled)
    load_box(keys, at, head_of(head, SHARED, KEY_HEADS), 0, K, bar, tiles_k.index(stage), enabled)
    if OUTPUT:
        load_box(queries, at, head_of(head, SHARED, QUERY_HEADS), 0, K, bar, tiles_q.index(stage), queried)
    of_values = head_of(head, SHARED, VALUE_HEADS)
    for group in gl.static_range(GROUPS):
        channel = (value_slice * GROUPS + group) * PANEL
        load_box(values, at, of_values, channel, SLICES * GROUPS * PANEL, bar, tiles_v.index(stage * GROUPS + group), enabled)


@gluon.jit
def row_index(layout: gl.constexpr, left):
    """Return the row of each element of a tile, [C, 1], computed where it is used.

    ``left``, the number of steps from the chunk's start to the end of its sequence, is not negative where this is called, so
    ``left >> 31`` is 0. The compiler cannot know, so it does not compute the index before the loop and hold it in registers.
    """
    return gl.arange(0, C, layout=gl.SliceLayout(1, layout))[:, None] + (left >> 31)


@gluon.jit
def opaque_zero(flag, layout: gl.constexpr):
    """Return 0, read from an int32 in shared memory that holds 1.

    Constants that depend on it are computed where they are used instead of being held in registers.
    """
    return gl.max(flag.load(layout), 0) - 1


SPLIT_BF16 = gl.constexpr("""
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
SPLIT_FP16 = gl.constexpr("""
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
def two_terms(x, E: gl.constexpr):
    """Return float32 x as the sum of two 16-bit numbers of dtype E: x rounded, and the rounded remainder.

    The sum has about twice the mantissa of either. Six instructions for two elements.
    """
    if gl.bfloat16 == E:
        first, second = gl.inline_asm_elementwise(
            SPLIT_BF16, "=r,=r,f,f", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        first, second = gl.inline_asm_elementwise(
            SPLIT_FP16, "=r,=r,f,f", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
        )
    return first, second


@gluon.jit
def store_split(x, high, low):
    """Store float32 x as the sum of two 16-bit numbers (``two_terms``) into two tiles of one dtype in shared memory.

    The caller fences.
    """
    first, second = two_terms(x, high.dtype)
    high.store(first)
    low.store(second)


@gluon.jit
def exp2_flushed(x):
    """Return 2^x, and 0 where that is subnormal: one instruction, where ex2.approx without ftz takes four."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log_sigmoid_slope(y):
    """Return the derivative of logsigmoid from its result y: 1 - exp(y).

    Near y = 0 the exponential is all but 1 and the difference would cancel; a series replaces it from -0.01 on.
    """
    series = -y * (1.0 + y * (0.5 + y * (1.0 / 6.0)))
    return gl.where(y > -0.01, series, 1.0 - exp2_flushed(y * LOG2E))


@gluon.jit
def zero_tail(tile, left, layout: gl.constexpr):
    """Set the rows of a tile in shared memory from ``left`` on to 0.

    They belong to the next sequence, or lie behind the tensor, and may hold NaN. The caller fences before WGMMA reads the tile.
    """
    for panel in gl.static_range(tile.shape[1] // PANEL):
        p_tile = tile.slice(panel * PANEL, PANEL, dim=1)
        inside = gl.where(row_index(layout, left) < left, p_tile.load(layout).to(gl.float32), 0.0)
        p_tile.store(inside.to(tile.dtype))


@gluon.jit
def decay_terms(tile):
    """Return float32 log-decays [C, K] in shared memory as the tiles into which ``split_log_decays`` turns them.

    The result is [2 K / PANEL, C, PANEL] bfloat16 in the same memory: the first and the second terms of each panel.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PANEL], gl.bfloat16)
    return tile._reinterpret(gl.bfloat16, [2 * (tile.shape[1] // PANEL), C, PANEL], layout)  # noqa: SLF001


@gluon.jit
def split_log_decays(tile, left, layout: gl.constexpr):
    """Replace float32 log-decays [C, K] in shared memory by sums of two bfloat16 numbers, in the tiles of ``decay_terms``.

    WGMMA sums log-decays by products with matrices of 0 and 1, which are exact for 16-bit numbers. The sum of two terms has a
    relative error of 2^-17. Log-decays are raised to at least -1e30, since -inf times 0 would be NaN; NaN stays NaN. Rows from
    ``left`` on are set to 0. A panel of float32 boxes [C, PANEL / 2] is as large as its two terms and lies in the same place,
    so panels can be replaced one by one. The caller fences.
    """
    terms = decay_terms(tile)
    for panel in gl.static_range(tile.shape[1] // PANEL):
        g = tile.slice(panel * PANEL, PANEL, dim=1).load(layout)
        g = gl.where(g < -1e30, -1e30, g)
        if left < C:
            g = gl.where(row_index(layout, left) < left, g, 0.0)
        store_split(g, terms.index(2 * panel), terms.index(2 * panel + 1))


@gluon.jit
def clamp_log_decays(tile, layout: gl.constexpr):
    """Raise the log-decays of a tile in shared memory to at least -1e30 in bfloat16 and -65504 in float16; NaN stays NaN.

    They are summed by a product with a matrix of 0 and 1, where -inf times 0 would be NaN. The caller fences.
    """
    E: gl.constexpr = tile.dtype
    for panel in gl.static_range(tile.shape[1] // PANEL):
        p_tile = tile.slice(panel * PANEL, PANEL, dim=1)
        if gl.bfloat16 == E:
            raised = gl.inline_asm_elementwise(
                "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [p_tile.load(layout), gl.full([C, PANEL], -1e30, E, layout=layout)],
                dtype=gl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            raised = gl.inline_asm_elementwise(
                "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [p_tile.load(layout), gl.full([C, PANEL], -65504.0, E, layout=layout)],
                dtype=gl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        p_tile.store(raised)


@gluon.jit
def head_log_decays(p_g, next_g, step, left, c, full, empty, TURNS: gl.constexpr):
    """Return the log-decays [C] of chunk ``c`` where a head has one decay per step, float32 and at least MIN_LOG_DECAY.

    They are ``next_g``, which were loaded a chunk ahead. With TURNS they are loaded now from ``p_g``, those of a ``step`` before
    ``left``: after the stage of the chunk before is ``empty``, and together with the tiles, for which the function then waits at
    ``full``.
    """
    STAGES: gl.constexpr = full.shape[0]
    if TURNS:
        last = gl.maximum(c - 1, 0)
        mbarrier.wait(empty.index(last % STAGES), (last // STAGES) & 1, pred=c > 0)
        g = gl.load(p_g, mask=step < left, other=0.0).to(gl.float32)
        mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)
    else:
        g = next_g.to(gl.float32)
    return gl.where(g < MIN_LOG_DECAY, MIN_LOG_DECAY, g)


@gluon.jit
def exceeds_largest(tile, scale, layout: gl.constexpr):
    """Return a number above 0 if any element of a tile times ``scale`` is beyond LARGEST or NaN, else 0."""
    found = 0
    for panel in gl.static_range(tile.shape[1] // PANEL):
        size = gl.abs(tile.slice(panel * PANEL, PANEL, dim=1).load(layout).to(gl.float32) * scale)
        found += gl.max(gl.max(gl.where(size <= LARGEST, 0, 1), 1), 0)
    return found
