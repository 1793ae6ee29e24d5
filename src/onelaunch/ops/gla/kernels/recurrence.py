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
           registers. So a lane loads few elements of the vectors, sums over rows are mostly its own, and no barrier is needed.
           Split by columns only, results are whole sums: nothing is added up in memory.
Memory     columns are read and results written once; vectors along rows once per BV columns, mostly from L2. States move once.
Order      vectors are loaded one step ahead.
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
    """Load the log-decays of one step, of the shape of the channels ``c``; 0 outside, and without a decay.

    The one return is for Triton 3.6, which compiles returns of all branches and refuses those of different dtypes.
    """
    if KIND == NO_DECAY:
        log_decay = tl.zeros(c.shape, tl.float32)
    elif KIND == ONE_DECAY:
        log_decay = tl.load(p + c * 0, mask=(c < channels) & inside, other=0.0)
    else:
        log_decay = tl.load(p + c, mask=(c < channels) & inside, other=0.0)
    return log_decay


@triton.jit
def load_step(
    p_read, p_added, p_columns, p_row_decay, p_column_decay, r, c, inside, K, V,
    ROW_DECAY: tl.constexpr, COLUMN_DECAY: tl.constexpr,
):  # fmt: skip
    """Load the vectors of one step in their dtypes; zeros where not ``inside``."""
    b_read = tl.load(p_read + r, mask=(r < K) & inside, other=0.0)
    b_added = tl.load(p_added + r, mask=(r < K) & inside, other=0.0)
    b_columns = tl.load(p_columns + c, mask=(c < V) & inside, other=0.0)
    b_row_decay = load_decay(p_row_decay, r, K, inside, ROW_DECAY)
    b_column_decay = load_decay(p_column_decay, c, V, inside, COLUMN_DECAY)
    return b_read, b_added, b_columns, b_row_decay, b_column_decay


@triton.jit
def decayed(state, b_row_decay, b_column_decay, ROW_DECAY: tl.constexpr, COLUMN_DECAY: tl.constexpr):
    """Return the state after the decays of one step."""
    if ROW_DECAY != NO_DECAY:
        state *= exp(b_row_decay.to(tl.float32))[:, None, :, None]
    if COLUMN_DECAY != NO_DECAY:
        state *= exp(b_column_decay.to(tl.float32))[None, :, None, :]
    return state


@triton.jit
def over_rows(x):
    """Return the sums over the rows of [ROWS, COLUMNS, ROW_LANES, COLUMN_LANES], first those of a lane."""
    return tl.sum(tl.sum(x, 0), 1)


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
    rows = r[:, None, :, None]
    cols = c[None, :, None, :]
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
        running = tl.zeros([COLUMNS, COLUMN_LANES], tl.float32)
        added_up = tl.zeros([COLUMNS, COLUMN_LANES], tl.float32)
        next_partner = tl.load(p_partner + c, mask=(c < V) & (length > 0), other=0.0)
        next_partner_bare = tl.load(partner_bare + place + c, mask=(c < V) & (length > 0), other=0.0)
    next_read, next_added, next_columns, next_row_decay, next_column_decay = load_step(
        p_read, p_added, p_columns, p_row_decay, p_column_decay, r, c, length > 0, K, V, ROW_DECAY, COLUMN_DECAY
    )
    # One turn of the outer loop, or with DECAY_GRADIENT one for each EVERY steps of the forward pass, the last of them first.
    turns = 1
    tail = length
    if DECAY_GRADIENT:
        turns = (length + EVERY - 1) // EVERY
        tail = length - (turns - 1) * EVERY
    for turn in tl.range(0, turns, num_stages=1):
        begin_t = tl.maximum(tail + (turn - 1) * EVERY, 0) if DECAY_GRADIENT else turn * 0
        if DECAY_GRADIENT:
            index = (slot + turns - 1 - turn).to(tl.int64) * H + h
            b_kept = tl.load(kept + index * size + rows * kept_stride_k + cols * kept_stride_v, mask=inside, other=0.0)
            running = over_rows(state * b_kept)
            added_up = tl.abs(running)
        for t in tl.range(begin_t, tail + turn * EVERY, num_stages=1):
            b_read, b_added, b_columns = next_read, next_added, next_columns
            b_row_decay, b_column_decay = next_row_decay, next_column_decay
            p_read += SIGN * read_stride_t
            p_added += SIGN * added_stride_t
            p_columns += SIGN * columns_stride_t
            if ROW_DECAY != NO_DECAY:
                p_row_decay += SIGN * row_decay_stride_t
            if COLUMN_DECAY != NO_DECAY:
                p_column_decay += SIGN * column_decay_stride_t
            next_read, next_added, next_columns, next_row_decay, next_column_decay = load_step(
                p_read, p_added, p_columns, p_row_decay, p_column_decay, r, c, t + 1 < length, K, V, ROW_DECAY, COLUMN_DECAY
            )
            if DECAY_GRADIENT:
                b_partner, b_partner_bare = next_partner.to(tl.float32), next_partner_bare
                p_partner += SIGN * partner_stride_t
                another = (c < V) & (t + 1 < length)
                next_partner = tl.load(p_partner + c, mask=another, other=0.0)
                next_partner_bare = tl.load(partner_bare + place + step + c, mask=another, other=0.0)
            x = b_read.to(tl.float32) * read_scale
            y = b_added.to(tl.float32) * added_scale
            z = b_columns.to(tl.float32)
            if not AFTER:
                state = decayed(state, b_row_decay, b_column_decay, ROW_DECAY, COLUMN_DECAY)
            if KEEP:
                if (t % EVERY == EVERY - 1) | (t == length - 1):
                    index = (slot + t // EVERY).to(tl.int64) * H + h
                    tl.store(kept + index * size + rows * kept_stride_k + cols * kept_stride_v, state, mask=inside)
            b_bare = over_rows(state * x[:, None, :, None])
            if OUT:
                own = tl.sum(tl.sum(x * y, 0), 0)
                tl.store(out + place + c, (b_bare + own * z).to(out.dtype.element_ty), mask=c < V)
            if BARE:
                tl.store(bare + place + c, b_bare, mask=c < V)
            if DECAY_GRADIENT:
                term = tl.where(t > begin_t, b_partner * b_bare, 0.0)
                running -= term
                added_up += tl.abs(term)
                term = z * b_partner_bare
                running += term
                added_up += tl.abs(term)
                decay = exp(b_column_decay.to(tl.float32))
                cancelled = (decay <= TINY) & (tl.abs(running) <= added_up * NOISE)
                running = tl.where(cancelled | (decay == 0.0), 0.0, running)
                added_up = tl.where(cancelled | (decay == 0.0), 0.0, added_up)
                tl.store(decay_gradient + place + c, running.to(decay_gradient.dtype.element_ty), mask=c < V)
            state += y[:, None, :, None] * z[None, :, None, :]
            if AFTER:
                state = decayed(state, b_row_decay, b_column_decay, ROW_DECAY, COLUMN_DECAY)
            place += step
    if LAST:
        index = n.to(tl.int64) * shared_head(H, LAST_GROUP) + shared_head(h, LAST_GROUP)
        tl.store(
            last + index * size + rows * last_stride_k + cols * last_stride_v, state,
            mask=inside & (h % LAST_GROUP == 0),
        )  # fmt: skip
