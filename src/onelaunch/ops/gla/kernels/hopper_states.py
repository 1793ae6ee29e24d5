"""Device functions of ``gla``'s Hopper kernels for states in registers: products with queries, and moves from and to memory.

hopper_chunk_state.py, hopper_segment_sum.py and hopper_gradients.py call them. They compute offsets where they use them, panel by
panel where they can: offsets of all elements, computed before a loop, would be held in registers throughout it.
"""

from onelaunch.kernels.gluon.compat import fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from onelaunch.ops.gla.kernels.hopper_tiles import PANEL, C, row_index, store_box, two_terms


@gluon.jit
def scaled_back(x, factors, pair, WHICH: gl.constexpr, FACTORS: gl.constexpr):
    """Return x times a power of 2 of ``factors``, float32 in memory; x itself if that is None.

    Without FACTORS these are a power of 2 by which a gradient was multiplied (rescale.py), for WHICH = 0, and its inverse, for
    all others. Otherwise they are those of scaled_copies.py. A row of three has FACTORS elements for each ``pair`` of a sequence
    and a head of the grid, and a power is a product of two neighbours, since float32 does not hold all of them. What WHICH = 0,
    1 and 2 mean is said with ``tables`` there.
    """
    if factors is not None:
        if FACTORS == 0:
            x *= gl.load(factors + (1 if WHICH > 0 else 0))
        else:
            p_factor = factors + (pair * FACTORS + 2 * WHICH)
            x = x * gl.load(p_factor) * gl.load(p_factor + 1)
    return x


@gluon.jit
def split_columns(x):
    """Return the left and the right half of the columns of x."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def query_panel(out, state, queries, operand: gl.constexpr, FIRST: gl.constexpr):
    """Add the product of the queries with a state [V, PANEL] to out [V, C].

    FIRST is the panel's first channel. The function waits for the product: two in flight take too many registers, and ptxas
    then serializes all products.
    """
    state = gl.convert_layout(state.to(queries.dtype), operand)
    out = warpgroup_mma(state, queries.slice(FIRST, PANEL, dim=1).permute((1, 0)), out, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(out,))


@gluon.jit
def query_state(out, state, queries, operand: gl.constexpr, FIRST: gl.constexpr, KEYS: gl.constexpr):
    """Add the product of the queries with a state [V, any number of panels] to out [V, C], panel by panel from FIRST on.

    Panels of padding alone, from channel KEYS on, are left out.
    """
    if state.shape[1] > PANEL:
        left, right = split_columns(state)
        out = query_state(out, left, queries, operand, FIRST, KEYS)
        out = query_state(out, right, queries, operand, FIRST + state.shape[1] // 2, KEYS)
    elif FIRST < KEYS:
        out = query_panel(out, state, queries, operand, FIRST)
    return out


@gluon.jit
def scaled_values(tile, factors, state_layout: gl.constexpr, SPLIT: gl.constexpr):
    """Return the transpose of a tile of values [C, V], each step times its factor [C], as the operand A of a product.

    The operand stays in registers, 16 of each thread. With SPLIT it is two of them, whose sum is the values (``two_terms``);
    otherwise it is rounded once, and returned twice. ``factors`` are float32 in shared memory. The product adds to a state of
    ``state_layout``.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, state_layout, 2)
    x = tile.permute((1, 0)).load(operand).to(gl.float32) * factors.load(gl.SliceLayout(0, operand))[None, :]
    if SPLIT:
        return two_terms(x, tile.dtype)
    return x.to(tile.dtype), x.to(tile.dtype)


@gluon.jit
def state_offsets(first_value, turn, layout: gl.constexpr, K: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the offset of each element of a state [V, K] in memory, int64, computed where it is used.

    ``turn >> 31`` is 0, but the compiler cannot know: otherwise the offsets are held in registers throughout the loop.
    """
    channel = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    value = first_value + (turn >> 31) + gl.arange(0, PANEL, layout=gl.SliceLayout(1, layout))[:, None]
    return value.to(gl.int64) * K + channel


@gluon.jit
def store_state(to, state, turn, K: gl.constexpr):
    """Store a state [V, any number of panels] to rows of K channels from registers, panel by panel to need fewer of them."""
    if state.shape[1] == PANEL:
        state_layout: gl.constexpr = state.type.layout
        gl.store(to + state_offsets(0, turn, state_layout, K, PANEL), state.to(to.dtype.element_ty))
    else:
        left, right = split_columns(state)
        store_state(to, left, turn, K)
        store_state(to + state.shape[1] // 2, right, turn, K)


@gluon.jit
def store_final(to, state, turn, values, first_value, KEYS: gl.constexpr, FIRST: gl.constexpr):
    """Store a padded state [V, any number of panels] to [KEYS, values], panel by panel from channel FIRST on."""
    if state.shape[1] > PANEL:
        left, right = split_columns(state)
        store_final(to, left, turn, values, first_value, KEYS, FIRST)
        store_final(to, right, turn, values, first_value, KEYS, FIRST + state.shape[1] // 2)
    elif FIRST < KEYS:
        # KEYS is a multiple of 8. So whether a channel is padding is a constant in every register, if nothing hides the index.
        channel = FIRST + gl.arange(0, PANEL, layout=gl.SliceLayout(0, state.type.layout))[None, :]
        value = first_value + (turn >> 31) + gl.arange(0, PANEL, layout=gl.SliceLayout(1, state.type.layout))[:, None]
        gl.store(to + ((channel + (turn >> 31)) * values + value), state, mask=(channel < KEYS) & (value < values))


@gluon.jit
def add_segments(state, sums, pair, segment, segments, values, first_value, REVERSE: gl.constexpr, KEYS: gl.constexpr):
    """Return the state [V, K] that enters a segment, from the one that enters the sequence and the sums of the segments between.

    ``sums`` are ``segment_states`` and ``segment_decays``. ``pair`` counts the heads of all sequences; ``first_value`` is the
    first value of this warpgroup in its head, whose stored states have ``values`` rows. KEYS of the K channels are no padding.
    """
    segment_states, segment_decays = sums
    K: gl.constexpr = state.shape[1]
    state_layout: gl.constexpr = state.type.layout
    across: gl.constexpr = gl.SliceLayout(0, state_layout)
    earlier = segments - 1 - segment if REVERSE else segment
    nearest = pair * segments + (segment + 1 if REVERSE else segment - 1)
    p_nearest = segment_decays + nearest.to(gl.int64) * K + gl.arange(0, K, layout=across)
    if KEYS < K:
        p_decay = gl.load(p_nearest, mask=(earlier > 0) & (gl.arange(0, K, layout=across) < KEYS), other=0.0)
    else:
        p_decay = gl.load(p_nearest, mask=earlier > 0, other=0.0)
    nearest_decay = gl.max(p_decay, 0)
    # If the decay over the nearest segment is 0 in all channels, as with decays of trained models, only that segment's sum has
    # to be read.
    for turn in range(gl.maximum(earlier - 1, 0) if nearest_decay == 0.0 else 0, earlier):
        before = pair * segments + (segments - 1 - turn if REVERSE else turn)
        state = state * gl.load(segment_decays + before.to(gl.int64) * K + gl.arange(0, K, layout=across))[None, :]
        state += gl.load(segment_states + state_offsets(before * values + first_value, turn, state_layout, K, K))
    return state


@gluon.jit
def store_part(to, out, row, left, head, first_value, values, pitch):
    """Store out [V = 64, C], a head's part of a gradient of shared values, in float32 from registers.

    It goes to the first ``left`` rows from ``row`` on, ``pitch`` elements apart, and to the ``values`` columns of the head. Eight
    threads of a warp write 32 neighbouring bytes of a row, a whole sector of memory.
    """
    out_layout: gl.constexpr = out.type.layout
    t = gl.arange(0, C, layout=gl.SliceLayout(0, out_layout))[None, :] + (left >> 31)  # as in row_index
    u = first_value + gl.arange(0, PANEL, layout=gl.SliceLayout(1, out_layout))[:, None]
    gl.store(to + row.to(gl.int64) * pitch + head * values + (t * pitch + u), out, mask=(t < left) & (u < values))


@gluon.jit
def store_gradient(tile, values, out, out_tiles, row, place, pitch, width, left, KEYS: gl.constexpr):
    """Round a float32 gradient [C, PANEL] and store it through ``tile`` to rows ``pitch`` elements apart.

    ``place`` counts the panels of all heads, of which each has KEYS channels. The store goes through TMA if the chunk is whole;
    then the caller waits with ``tma_store_wait``. Otherwise it goes row by row, since a box would overwrite the next sequence.
    Without ``out_tiles`` heads share the tensor, and ``out`` [B T, H K] gets this head's part of the gradient in float32,
    straight from registers, in rows ``width`` elements apart.
    """
    PANELS: gl.constexpr = (KEYS + PANEL - 1) // PANEL
    PADDED: gl.constexpr = KEYS % PANEL != 0
    head = 0
    channel = place * PANEL  # if no panel is padded, heads follow each other as panels do
    if PADDED:
        head = place // PANELS
        channel = place % PANELS * PANEL
    if out_tiles is None:
        acc: gl.constexpr = values.type.layout
        t = row_index(acc, left)
        u = channel + gl.arange(0, PANEL, layout=gl.SliceLayout(0, acc))[None, :]
        inside = t < left
        if PADDED:
            inside = inside & (u < KEYS)
        gl.store(out + (row + t).to(gl.int64) * width + (head * KEYS + u), values, mask=inside)
    else:
        tile.store(values.to(tile.dtype))
        if left >= C:
            fence_async_shared()
            store_box(out_tiles, row, head, channel, KEYS, tile)
        else:
            rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
            t = row_index(rows, left)
            u = channel + gl.arange(0, PANEL, layout=gl.SliceLayout(0, rows))[None, :]
            inside = t < left
            if PADDED:
                inside = inside & (u < KEYS)
            gl.store(out + (row + t).to(gl.int64) * pitch + (head * KEYS + u), tile.load(rows), mask=inside)
