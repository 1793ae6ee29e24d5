"""Activations of all segments of a packed projection, and their gradients, each in one pass over an existing product.

Computes   y = activation(z + bias); a log-sigmoid is divided by the segment's NORMALIZER. Backward: dz from dy and what the
           forward pass saved: y, 1 / norm of every normalized head (rstd), and z + bias where SiLU was applied (kept).
             l2norm      dz = rstd (dy - y sum(y dy)), the sum over the head
             silu        dz = dy silu'(kept)
             sigmoid     dz = dy y (1 - y)
             logsigmoid  dz = dy (1 - exp(y NORMALIZER)) / NORMALIZER
Grid       one CTA per BM rows and one tile of columns: CTA i has rows from BM * (i // TILES) and tile i % TILES. A tile lies in
           one segment, and is one head where heads are normalized. All warps do the same work.
On chip    one tile [BM, BLOCK] in float32 registers; only the norm of a head is a reduction over threads.
Memory     forward reads z once and writes y once (and rstd, kept); backward reads dy, and y or kept, once and writes dz once,
           and for biases a float32 sum of each column over the tile's rows.
           Segment s begins at column ROWS[s] of z and dz, which is its first row of the weight, and at column COLUMNS[s] of y.
Constants  plural names are tuples with an entry per segment. FIRSTS: index of its first tile; one more entry at the end is the
           number of tiles, TILES. STEPS: columns that a tile covers. BLOCKS: columns of the tile in registers, a power of 2;
           those from STEP on are idle. WIDTHS: columns of the segment. NORMS, KEPTS, BIASES: its first column in rstd, its
           first column in kept, its first element in bias, or NOTHING. Z_PITCH, PITCH, NORM_PITCH, KEPT_PITCH, SUM_PITCH:
           elements from one row to the next of z (or dz), y, rstd, kept, sums.
Protocol   CTAs do not exchange anything.
Numerics   float32 between the loads and the stores; a head is normalized by the sum of its squares plus eps, as fla does.
Callers    launch.py launches the kernels: ``activate`` after a product, ``activation_gradients`` in the backward pass of all
           variants with own kernels, and in that of ``gla_layer`` for log-decays. product.py uses ``finish_tile``.
Source     experiment 058; docs/notebook/projections.md.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import LOG2E, sigmoid, silu_slope

NONE, L2NORM, SILU, SIGMOID, LOGSIGMOID = (tl.constexpr(n) for n in range(5))
"""Numbers of the activations, in the order of ``layout.py``; tuples of compile-time constants can hold only numbers."""

NOTHING = tl.constexpr(-1)
"""Value of NORM, KEPT or BIAS if the segment has no such thing."""

SMALL = tl.constexpr(0.01)
"""Bound of an argument below which three terms of a series are exact to one or two roundings of float32."""


@triton.jit
def log_sigmoid(z):
    """Return -log(1 + exp(-z)) of float32; by a series where adding the exponential to 1 would lose it."""
    power = tl.exp2(-tl.abs(z) * LOG2E)
    series = power * (1.0 - power * (0.5 - power * (1.0 / 3.0)))
    return tl.minimum(z, 0.0) - tl.where(power < SMALL, series, tl.log(1.0 + power))


@triton.jit
def log_sigmoid_slope(y):
    """Return 1 - exp(y), the derivative of log_sigmoid where its result is y; by a series where the subtraction would cancel."""
    series = -y * (1.0 + y * (0.5 + y * (1.0 / 6.0)))
    return tl.where(y > -SMALL, series, 1.0 - tl.exp2(y * LOG2E))


@triton.jit
def tile_coordinates(M, first, TILES: tl.constexpr, BM: tl.constexpr):
    """Return this CTA's rows, 64-bit, the mask of those below M, and its tile's index within the segment.

    ``first`` is the index of the segment's first tile, TILES the number of tiles of all segments.
    """
    m = (tl.program_id(0) // TILES).to(tl.int64) * BM + tl.arange(0, BM)
    return m, m < M, tl.program_id(0) % TILES - first


@triton.jit
def finish_tile(
    v, m, c, valid, rows_valid, columns_valid, norm, bias, y, rstd, kept, eps,
    HEAD: tl.constexpr, COLUMN: tl.constexpr, ACTIVATION: tl.constexpr, NORMALIZER: tl.constexpr, NORM: tl.constexpr,
    KEPT: tl.constexpr, BIAS: tl.constexpr, PITCH: tl.constexpr, NORM_PITCH: tl.constexpr, KEPT_PITCH: tl.constexpr,
):  # fmt: skip
    """Add the bias to products ``v`` [BM, BLOCK] of one segment, activate them, and store the results.

    Stores y, rstd unless NORM is NOTHING, and z before the activation unless KEPT is NOTHING. ``v`` is float32, and 0 outside
    ``valid``. ``m`` are the rows, ``c`` the columns within the segment. If heads are normalized, the tile holds BLOCK / HEAD
    heads, the first of which has index ``norm`` in the segment. HEAD is a power of 2: a tile of one head has HEAD = BLOCK, with
    zeros behind the head, which add nothing to its norm. COLUMN is the segment's first column of y. The kernel of the fused
    product (product.py) calls this as well.
    """
    if BIAS != NOTHING:
        v += tl.load(bias + BIAS + c, mask=columns_valid, other=0.0).to(tl.float32)[None, :]
    if KEPT != NOTHING:
        tl.store(kept + m[:, None] * KEPT_PITCH + (KEPT + c)[None, :], v.to(kept.dtype.element_ty), mask=valid)
    if ACTIVATION == L2NORM:
        heads = tl.reshape(v, [v.shape[0], v.shape[1] // HEAD, HEAD])
        r = 1.0 / tl.sqrt(tl.sum(heads * heads, axis=2) + eps)  # [BM, BLOCK / HEAD]
        v = tl.reshape(heads * tl.expand_dims(r, 2), v.shape)
        if NORM != NOTHING:
            head = tl.arange(0, v.shape[1] // HEAD)
            heads_valid = tl.max(tl.reshape(columns_valid, [v.shape[1] // HEAD, HEAD]).to(tl.int32), axis=1) > 0
            at = rstd + m[:, None] * NORM_PITCH + (NORM + norm + head)[None, :]
            tl.store(at, r, mask=rows_valid[:, None] & heads_valid[None, :])
    if ACTIVATION == SILU:
        v *= sigmoid(v)
    if ACTIVATION == SIGMOID:
        v = sigmoid(v)
    if ACTIVATION == LOGSIGMOID:
        v = log_sigmoid(v) * (1.0 / NORMALIZER)
    tl.store(y + m[:, None] * PITCH + (COLUMN + c)[None, :], v.to(y.dtype.element_ty), mask=valid)


@triton.jit
def activate_tile(
    z, bias, y, rstd, kept, M, eps,
    FIRST: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, ACTIVATION: tl.constexpr, NORMALIZER: tl.constexpr, NORM: tl.constexpr,
    KEPT: tl.constexpr, BIAS: tl.constexpr, Z_PITCH: tl.constexpr, PITCH: tl.constexpr, NORM_PITCH: tl.constexpr,
    KEPT_PITCH: tl.constexpr,
):  # fmt: skip
    """Load, activate and store one tile of one segment; WIDTH is the segment's width, STEP the columns of a tile."""
    m, rows_valid, tile = tile_coordinates(M, FIRST, TILES, BM)
    at = tl.arange(0, BLOCK)
    c = tile * STEP + at
    columns_valid = (at < STEP) & (c < WIDTH)
    valid = rows_valid[:, None] & columns_valid[None, :]
    v = tl.load(z + m[:, None] * Z_PITCH + (ROW + c)[None, :], mask=valid, other=0.0).to(tl.float32)  # [BM, BLOCK]
    finish_tile(
        v, m, c, valid, rows_valid, columns_valid, tile, bias, y, rstd, kept, eps,
        BLOCK, COLUMN, ACTIVATION, NORMALIZER, NORM, KEPT, BIAS, PITCH, NORM_PITCH, KEPT_PITCH,
    )  # fmt: skip


@triton.jit
def activate_kernel(
    z, bias, y, rstd, kept, M, eps,
    FIRSTS: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, WIDTHS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ACTIVATIONS: tl.constexpr, NORMALIZERS: tl.constexpr, NORMS: tl.constexpr, KEPTS: tl.constexpr,
    BIASES: tl.constexpr, Z_PITCH: tl.constexpr, PITCH: tl.constexpr, NORM_PITCH: tl.constexpr, KEPT_PITCH: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Activate the tile of this CTA; FIRSTS holds each segment's first tile, and behind them the number of tiles."""
    tile = tl.program_id(0) % FIRSTS[len(WIDTHS)]
    for s in tl.static_range(len(WIDTHS)):
        if (tile >= FIRSTS[s]) & (tile < FIRSTS[s + 1]):
            activate_tile(
                z, bias, y, rstd, kept, M, eps,
                FIRSTS[s], FIRSTS[len(WIDTHS)], BM, BLOCKS[s], STEPS[s], WIDTHS[s], ROWS[s], COLUMNS[s], ACTIVATIONS[s],
                NORMALIZERS[s], NORMS[s], KEPTS[s], BIASES[s], Z_PITCH, PITCH, NORM_PITCH, KEPT_PITCH,
            )  # fmt: skip


@triton.jit
def gradient_tile(
    dy, dy_stride, y, rstd, kept, dz, sums, M,
    FIRST: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, ACTIVATION: tl.constexpr, NORMALIZER: tl.constexpr, NORM: tl.constexpr,
    KEPT: tl.constexpr, BIAS: tl.constexpr, Z_PITCH: tl.constexpr, PITCH: tl.constexpr, NORM_PITCH: tl.constexpr,
    KEPT_PITCH: tl.constexpr, SUM_PITCH: tl.constexpr,
):  # fmt: skip
    """Compute one tile of dz of one segment; zeros if dy is ``None``, because no gradient reaches the segment.

    A segment with a bias also gets the float32 sums of its columns over the tile's rows, before they are rounded.
    """
    m, rows_valid, tile = tile_coordinates(M, FIRST, TILES, BM)
    at = tl.arange(0, BLOCK)
    c = tile * STEP + at
    valid = rows_valid[:, None] & ((at < STEP) & (c < WIDTH))[None, :]
    if dy is None:
        d = tl.zeros((BM, BLOCK), tl.float32)
    else:
        d = tl.load(dy + m[:, None] * dy_stride + c[None, :], mask=valid, other=0.0).to(tl.float32)  # [BM, BLOCK]
        if ACTIVATION == SILU:
            v = tl.load(kept + m[:, None] * KEPT_PITCH + (KEPT + c)[None, :], mask=valid, other=0.0)
            d *= silu_slope(v)
        elif ACTIVATION != NONE:
            v = tl.load(y + m[:, None] * PITCH + (COLUMN + c)[None, :], mask=valid, other=0.0).to(tl.float32)
            if ACTIVATION == L2NORM:
                r = tl.load(rstd + m * NORM_PITCH + (NORM + tile), mask=rows_valid, other=0.0)  # [BM]
                d = r[:, None] * (d - v * tl.sum(v * d, axis=1)[:, None])
            elif ACTIVATION == SIGMOID:
                d *= v * (1.0 - v)
            else:
                d *= log_sigmoid_slope(v * NORMALIZER) * (1.0 / NORMALIZER)
    tl.store(dz + m[:, None] * Z_PITCH + (ROW + c)[None, :], d.to(dz.dtype.element_ty), mask=valid)
    if sums is not None and BIAS != NOTHING:
        p_sum = sums + (tl.program_id(0) // TILES).to(tl.int64) * SUM_PITCH + (BIAS + c)
        tl.store(p_sum, tl.sum(d, 0), mask=(at < STEP) & (c < WIDTH))


@triton.jit
def activation_gradients_kernel(
    dys, dy_strides, y, rstd, kept, dz, sums, M,
    FIRSTS: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, WIDTHS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ACTIVATIONS: tl.constexpr, NORMALIZERS: tl.constexpr, NORMS: tl.constexpr, KEPTS: tl.constexpr,
    BIASES: tl.constexpr, Z_PITCH: tl.constexpr, PITCH: tl.constexpr, NORM_PITCH: tl.constexpr, KEPT_PITCH: tl.constexpr,
    SUM_PITCH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute the tile of dz of this CTA; dys and dy_strides hold one entry per segment.

    ``sums`` [tiles of rows, SUM_PITCH] float32, which may be None, gets the sums of the columns that have a bias.
    """
    tile = tl.program_id(0) % FIRSTS[len(WIDTHS)]
    for s in tl.static_range(len(WIDTHS)):
        if (tile >= FIRSTS[s]) & (tile < FIRSTS[s + 1]):
            gradient_tile(
                dys[s], dy_strides[s], y, rstd, kept, dz, sums, M,
                FIRSTS[s], FIRSTS[len(WIDTHS)], BM, BLOCKS[s], STEPS[s], WIDTHS[s], ROWS[s], COLUMNS[s], ACTIVATIONS[s],
                NORMALIZERS[s], NORMS[s], KEPTS[s], BIASES[s], Z_PITCH, PITCH, NORM_PITCH, KEPT_PITCH, SUM_PITCH,
            )  # fmt: skip
