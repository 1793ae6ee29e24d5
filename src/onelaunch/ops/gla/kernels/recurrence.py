"""Gated linear attention one step at a time with decays of keys and of values, portable Triton, in both directions of time.

Computes   S_t = diag(e^(g_t)) S_{t-1} diag(e^(gv_t)) + k_t^T v_t,   o_t = scale * q_t S_t   per head, and the final state. The
           same kernel makes the gradients, with other tensors in the places of q, k, v, g and gv ("read", "added", "columns",
           "row_decay" and "column_decay" below; the state has rows and columns):

             result   read  added  columns  row_decay  column_decay   time       state decays
             o        q     k      v        g          gv             forward    before it is read
             dq       do    v      k        gv         g              forward    before it is read (the transposed state)
             dk       v     do     q        gv         g              backward   after it was read (dS transposed)
             dv       k     q      do       g          gv             backward   after it was read

           The log-decays' gradients follow in the last two. With S- the state of a step before k^T v is added, and dS+ the
           gradient of S that comes from later steps, the gradient X_t of g_t is the sum over values of S-_t dS_t, and
             X_t = S-_t dS+_t + q_t (S-_t do_t),   S-_t dS+_t = X_{t+1} - k_t (dS+_t v_t),
           a sum along time. The terms in parentheses are ``bare`` results: dq and dk without the term of their own step. For gv
           the same holds with o, do, v and dv. Every EVERY steps the sum starts anew from a stored state S- (``kept``) times
           dS+: rounding errors do not grow with T, and NaN reaches back by less than EVERY steps.
Cancelling where a decay is tiny, so is X_t, and large terms cancel. A sum that is no more than NOISE times float32's rounding of
           what was added up is set to 0 there, lest its error spoils earlier steps. Constants chosen by a simulation in PyTorch
           with states and strong decays: 3.4e-6 norm-wise without this and without S-, 6e-7 with both.
Grid       one CTA of one warp per sequence, head of o and BV columns. No CTA waits for another one.
On chip    the state [BK, BV], BK >= rows, in registers, float32: nothing is rounded but results. A lane holds ROWS x COLUMNS
           neighbouring elements, and ROW_LANES x COLUMN_LANES = 32 lanes hold the state: a tensor [ROWS, COLUMNS, ROW_LANES,
           COLUMN_LANES], since Triton gives the last dimensions to the lanes of a single warp and the first to their
           registers. With 32 lanes along rows a vector along rows [ROWS, 32] is loaded where it is used, 16 bytes a lane at most
           (128 rows of float32). With fewer lanes, Triton spreads what it loads over all 32, and every step moves each vector
           through shared memory, a register at a time: that took more than half of a step's 1300 cycles on an H100.
           Sums over rows end in five shuffles per column. Results, and sums along time, are vectors [BV] with one element a lane.
           Split by columns only, results are whole sums: nothing is added up in memory.
Memory     columns are read and results written once; vectors along rows once per BV columns, mostly from L2. States move once.
Order      vectors are loaded one step ahead, and stored states from one use to the next.
Heads      GROUP neighbouring heads of o share a head of a tensor (``shared_head`` in chunk.py); a state for every head of o is
           computed, and the first of those that share a state stores the final one.
Caller     launch_recurrence.py, for the variant ``fused_recurrent``.
Source     the recurrent form of Yang et al. (2024), and its gradients.
"""

import triton
import triton.language as tl

from onelaunch.ops.gla.kernels.chunk import exp, row_pointer, sequence_bounds, shared_head

NO_DECAY = tl.constexpr(0)
"""Rows or columns do not decay."""
ONE_DECAY = tl.constexpr(1)
"""All rows or columns of a head have one decay."""
DECAYS = tl.constexpr(2)
"""Every row or column has its own decay."""

NOISE = tl.constexpr(8 * 2.0**-24)
"""Largest sum, relative to the magnitudes that were added, that may be nothing but rounding errors."""
TINY = tl.constexpr(2.0**-20)
"""Largest decay at which such a sum is taken for rounding errors."""


@triton.jit
def load_decay(p, c, channels, inside, KIND: tl.constexpr):
    """Return the decays of one step: 1, the decay of the head, or those of the channels ``c``, 1 for channels outside.

    The one return is for Triton 3.6, which compiles returns of all branches and refuses those of different dtypes.
    """
    if KIND == NO_DECAY:
        decay = 1.0
    elif KIND == ONE_DECAY:
        decay = exp(tl.load(p, mask=inside, other=0.0).to(tl.float32))
    else:
        decay = exp(tl.load(p + c, mask=(c < channels) & inside, other=0.0).to(tl.float32))
    return decay


@triton.jit
def load_step(
    p_read, p_added, p_columns, p_row_decay, p_column_decay, r, c, single, inside, K, V,
    ROW_DECAY: tl.constexpr, COLUMN_DECAY: tl.constexpr, DECAY_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Load the vectors of one step, float32, zeros where not ``inside``, and compute the decays.

    Those along columns are returned for ``c`` and for ``single``, the decays for the latter only with DECAY_GRADIENT.
    """
    x = tl.load(p_read + r, mask=(r < K) & inside, other=0.0).to(tl.float32)
    y = tl.load(p_added + r, mask=(r < K) & inside, other=0.0).to(tl.float32)
    z = tl.load(p_columns + c, mask=(c < V) & inside, other=0.0).to(tl.float32)
    z_single = tl.load(p_columns + single, mask=(single < V) & inside, other=0.0).to(tl.float32)
    row_decay = load_decay(p_row_decay, r, K, inside, ROW_DECAY)
    column_decay = load_decay(p_column_decay, c, V, inside, COLUMN_DECAY)
    single_decay = 1.0
    if DECAY_GRADIENT:
        single_decay = load_decay(p_column_decay, single, V, inside, COLUMN_DECAY) + tl.zeros(single.shape, tl.float32)
    return x, y, z, z_single, row_decay, column_decay, single_decay


@triton.jit
def along_rows(x):
    """Return a vector along rows with the dimensions of the state."""
    return x[:, None, :, None]


@triton.jit
def along_columns(x):
    """Return a vector along columns with the dimensions of the state."""
    return x[None, :, None, :]


@triton.jit
def decayed(state, row_decay, column_decay, ROW_DECAY: tl.constexpr, COLUMN_DECAY: tl.constexpr):
    """Return the state after the decays of one step."""
    if ROW_DECAY == ONE_DECAY:
        state *= row_decay
    elif ROW_DECAY == DECAYS:
        state *= along_rows(row_decay)
    if COLUMN_DECAY == ONE_DECAY:
        state *= column_decay
    elif COLUMN_DECAY == DECAYS:
        state *= along_columns(column_decay)
    return state


@triton.jit
def over_rows(x, BV: tl.constexpr):
    """Return the sums over the rows of a tensor with the dimensions of the state, first those of a lane, as a vector [BV]."""
    return tl.reshape(tl.trans(tl.sum(tl.sum(x, 0), 1)), [BV])


@triton.jit
def total(x, y):
    """Return the sum of the products of two vectors along rows."""
    return tl.sum(tl.sum(x * y, 0), 0)


@triton.jit(do_not_specialize=["T", "sequences"])
def recurrence_kernel(
    read, added, columns, row_decay, column_decay, first, offsets, out, bare, last, kept,
    partner, partner_bare, decay_gradient, read_scale, added_scale,
    T, H, K, V, sequences,
    first_stride_k, first_stride_v, last_stride_k, last_stride_v, kept_stride_k, kept_stride_v,
    read_stride_b, read_stride_t, read_stride_h, added_stride_b, added_stride_t, added_stride_h,
    columns_stride_b, columns_stride_t, columns_stride_h, row_decay_stride_b, row_decay_stride_t, row_decay_stride_h,
    column_decay_stride_b, column_decay_stride_t, column_decay_stride_h,
    partner_stride_b, partner_stride_t, partner_stride_h,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_LANES: tl.constexpr, COLUMN_LANES: tl.constexpr,
    ROW_DECAY: tl.constexpr, COLUMN_DECAY: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, AFTER: tl.constexpr,
    FIRST: tl.constexpr, OUT: tl.constexpr, BARE: tl.constexpr, LAST: tl.constexpr, KEEP: tl.constexpr,
    DECAY_GRADIENT: tl.constexpr, EVERY: tl.constexpr,
    READ_GROUP: tl.constexpr, ADDED_GROUP: tl.constexpr, COLUMNS_GROUP: tl.constexpr, ROW_DECAY_GROUP: tl.constexpr,
    COLUMN_DECAY_GROUP: tl.constexpr, PARTNER_GROUP: tl.constexpr, FIRST_GROUP: tl.constexpr, LAST_GROUP: tl.constexpr,
):  # fmt: skip
    """Loop over the steps of one sequence, head and block of columns; see the top of the file.

    H counts the heads of o. ``out``, ``bare`` (float32), ``partner_bare`` and ``decay_gradient`` are [B, T, H, V], contiguous.
    ``kept`` holds the state S- of every EVERY-th step in the order of the forward pass, and of the last: it is stored with
    KEEP and read with DECAY_GRADIENT. States are [N, heads, ...] with strides of rows and columns in elements.

    Constants: REVERSE: from the last step to the first. AFTER: states decay after they are read, and the forward pass had the
    other direction. FIRST, LAST: there is an initial state, a final one is stored. With AFTER only the first of FIRST_GROUP
    heads starts from the initial state, which is the gradient of a final state they share. OUT, BARE: results with and without
    the term of the step itself are stored. DECAY_GRADIENT: the gradient of the columns' log-decays is stored.
    """
    BV: tl.constexpr = COLUMNS * COLUMN_LANES
    blocks = tl.cdiv(V, BV)
    head = tl.program_id(0) // blocks
    n, h = head // H, head % H
    r = tl.arange(0, ROWS)[:, None] + tl.arange(0, ROW_LANES)[None, :] * ROWS
    c = tl.arange(0, COLUMNS)[:, None] + tl.arange(0, COLUMN_LANES)[None, :] * COLUMNS + (tl.program_id(0) % blocks) * BV
    single = tl.arange(0, BV) + (tl.program_id(0) % blocks) * BV  # the same columns, each held once
    rows = along_rows(r)
    cols = along_columns(c)
    inside = (rows < K) & (cols < V)
    b, start, length, _ = sequence_bounds(offsets, n, T, PACKED)
    slot = start // EVERY + n if PACKED else n * ((T + EVERY - 1) // EVERY)  # as sequence_bounds numbers chunks
    size = tl.cast(K, tl.int64) * V
    state = tl.zeros([ROWS, COLUMNS, ROW_LANES, COLUMN_LANES], tl.float32)
    if FIRST:
        index = n.to(tl.int64) * shared_head(H, FIRST_GROUP) + shared_head(h, FIRST_GROUP)
        wanted = inside
        if AFTER and FIRST_GROUP > 1:
            wanted = inside & (h % FIRST_GROUP == 0)
        state = tl.load(first + index * size + rows * first_stride_k + cols * first_stride_v, mask=wanted, other=0.0)
    begin = start
    SIGN: tl.constexpr = -1 if REVERSE else 1
    if REVERSE:
        begin = start + length - 1
    p_read = row_pointer(read, b, begin, shared_head(h, READ_GROUP), read_stride_b, read_stride_t, read_stride_h)
    p_added = row_pointer(added, b, begin, shared_head(h, ADDED_GROUP), added_stride_b, added_stride_t, added_stride_h)
    p_columns = row_pointer(
        columns, b, begin, shared_head(h, COLUMNS_GROUP), columns_stride_b, columns_stride_t, columns_stride_h
    )
    p_row_decay = read
    if ROW_DECAY != NO_DECAY:
        decay_head = shared_head(h, ROW_DECAY_GROUP)
        p_row_decay = row_pointer(row_decay, b, begin, decay_head, row_decay_stride_b, row_decay_stride_t, row_decay_stride_h)
    p_column_decay = read
    if COLUMN_DECAY != NO_DECAY:
        decay_head = shared_head(h, COLUMN_DECAY_GROUP)
        p_column_decay = row_pointer(
            column_decay, b, begin, decay_head, column_decay_stride_b, column_decay_stride_t, column_decay_stride_h
        )
    # results and their like are contiguous
    place = ((b.to(tl.int64) * T + begin) * H + h) * V
    step = tl.cast(SIGN, tl.int64) * H * V
    if DECAY_GRADIENT:
        p_partner = row_pointer(
            partner, b, begin, shared_head(h, PARTNER_GROUP), partner_stride_b, partner_stride_t, partner_stride_h
        )
        running = tl.zeros([BV], tl.float32)
        added_up = tl.zeros([BV], tl.float32)
        next_partner = tl.load(p_partner + single, mask=(single < V) & (length > 0), other=0.0).to(tl.float32)
        next_partner_bare = tl.load(partner_bare + place + single, mask=(single < V) & (length > 0), other=0.0)
    next_x, next_y, next_z, next_single, next_row_decay, next_column_decay, next_single_decay = load_step(
        p_read, p_added, p_columns, p_row_decay, p_column_decay, r, c, single, length > 0, K, V, ROW_DECAY, COLUMN_DECAY,
        DECAY_GRADIENT,
    )  # fmt: skip
    if DECAY_GRADIENT:
        index = (slot + (length - 1) // EVERY).to(tl.int64) * H + h
        p_kept = kept + index * size
        next_kept = tl.load(p_kept + rows * kept_stride_k + cols * kept_stride_v, mask=inside & (length > 0), other=0.0)
    for t in tl.range(0, length, num_stages=1):
        x, y, z, z_single = next_x, next_y, next_z, next_single
        row_factor, column_factor, single_factor = next_row_decay, next_column_decay, next_single_decay
        p_read += SIGN * read_stride_t
        p_added += SIGN * added_stride_t
        p_columns += SIGN * columns_stride_t
        if ROW_DECAY != NO_DECAY:
            p_row_decay += SIGN * row_decay_stride_t
        if COLUMN_DECAY != NO_DECAY:
            p_column_decay += SIGN * column_decay_stride_t
        next_x, next_y, next_z, next_single, next_row_decay, next_column_decay, next_single_decay = load_step(
            p_read, p_added, p_columns, p_row_decay, p_column_decay, r, c, single, t + 1 < length, K, V, ROW_DECAY, COLUMN_DECAY,
            DECAY_GRADIENT,
        )  # fmt: skip
        if DECAY_GRADIENT:
            b_partner, b_partner_bare = next_partner, next_partner_bare  # pyrefly: ignore[unbound-name]
            p_partner += SIGN * partner_stride_t  # pyrefly: ignore[unbound-name]
            another = (single < V) & (t + 1 < length)
            next_partner = tl.load(p_partner + single, mask=another, other=0.0).to(tl.float32)
            next_partner_bare = tl.load(partner_bare + place + step + single, mask=another, other=0.0)
        if not AFTER:
            state = decayed(state, row_factor, column_factor, ROW_DECAY, COLUMN_DECAY)
        if KEEP:
            if (t % EVERY == EVERY - 1) | (t == length - 1):
                index = (slot + t // EVERY).to(tl.int64) * H + h
                tl.store(kept + index * size + rows * kept_stride_k + cols * kept_stride_v, state, mask=inside)
        b_bare = over_rows(state * along_rows(x), BV) * read_scale
        if OUT:
            own = total(x, y) * (read_scale * added_scale)
            tl.store(out + place + single, (b_bare + own * z_single).to(out.dtype.element_ty), mask=single < V)
        if BARE:
            tl.store(bare + place + single, b_bare, mask=single < V)
        if DECAY_GRADIENT:
            left = length - 1 - t
            anew = (t == 0) | (left % EVERY == EVERY - 1)
            if anew:
                # tl.gather copies: without it the sums of every step would get this one's layout, through shared memory
                running = tl.gather(over_rows(state * next_kept, BV), tl.arange(0, BV), 0)  # pyrefly: ignore[unbound-name]
                added_up = tl.abs(running)
                p_kept -= size * H  # pyrefly: ignore[unbound-name]
                next_kept = tl.load(
                    p_kept + rows * kept_stride_k + cols * kept_stride_v, mask=inside & (left >= EVERY), other=0.0
                )
            term = tl.where(anew, 0.0, b_partner * b_bare)  # pyrefly: ignore[unbound-name]
            running -= term  # pyrefly: ignore[unbound-name]
            added_up += tl.abs(term)  # pyrefly: ignore[unbound-name]
            term = z_single * b_partner_bare  # pyrefly: ignore[unbound-name]
            running += term
            added_up += tl.abs(term)
            cancelled = (single_factor <= TINY) & (tl.abs(running) <= added_up * NOISE)
            running = tl.where(cancelled | (single_factor == 0.0), 0.0, running)
            added_up = tl.where(cancelled | (single_factor == 0.0), 0.0, added_up)
            tl.store(decay_gradient + place + single, running.to(decay_gradient.dtype.element_ty), mask=single < V)
        state += along_rows(y) * along_columns(z * added_scale)
        if AFTER:
            state = decayed(state, row_factor, column_factor, ROW_DECAY, COLUMN_DECAY)
        place += step
    if LAST:
        index = n.to(tl.int64) * shared_head(H, LAST_GROUP) + shared_head(h, LAST_GROUP)
        tl.store(
            last + index * size + rows * last_stride_k + cols * last_stride_v, state,
            mask=inside & (h % LAST_GROUP == 0),
        )  # fmt: skip
