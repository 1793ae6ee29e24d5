"""Activations of all segments of a packed projection, and their gradients, each in one pass over a product that is there.

Computes   y = activation(z + bias); dz from dy, y, and what was kept: 1 / norm of every head, z where SiLU was applied
Grid       a program per BM rows and one tile of columns; a tile lies in one segment, and is one head where heads are normalized.
Memory     reads z (dy, and y or z) once, writes y (dz) once; a segment begins at column ROWS[s] of z and dz, COLUMNS[s] of y.
Numerics   float32 between the loads and the stores; a head is normalized by the sum of its squares plus eps, as fla does.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import LOG2E, sigmoid, silu_slope

NONE, L2NORM, SILU, SIGMOID, LOGSIGMOID = (tl.constexpr(n) for n in range(5))
"""Activations, in the order of ``layout.py``: tuples of constants hold numbers alone."""

NOTHING = tl.constexpr(-1)
"""Of NORM, KEPT and BIAS: there is nothing of the kind."""

SMALL = tl.constexpr(0.01)
"""Below it, three terms of a series are exact to a rounding or two of float32."""


@triton.jit
def log_sigmoid(z):
    """-log(1 + exp(-z)) of float32; a series where the exponential is lost beside 1."""
    power = tl.exp2(-tl.abs(z) * LOG2E)
    series = power * (1.0 - power * (0.5 - power * (1.0 / 3.0)))
    return tl.minimum(z, 0.0) - tl.where(power < SMALL, series, tl.log(1.0 + power))


@triton.jit
def log_sigmoid_slope(y):
    """The derivative of log_sigmoid by its result, 1 - exp(y); likewise."""
    series = -y * (1.0 + y * (0.5 + y * (1.0 / 6.0)))
    return tl.where(y > -SMALL, series, 1.0 - tl.exp2(y * LOG2E))


@triton.jit
def place(M, first, TILES: tl.constexpr, BM: tl.constexpr):
    """Rows of this program, 64-bit, which of them there are, and how far its tile lies behind the segment's first."""
    m = (tl.program_id(0) // TILES).to(tl.int64) * BM + tl.arange(0, BM)
    return m, m < M, tl.program_id(0) % TILES - first


@triton.jit
def finish_tile(
    v, m, c, there, rows_there, columns_there, norm, bias, y, rstd, kept, eps,
    HEAD: tl.constexpr, COLUMN: tl.constexpr, ACTIVATION: tl.constexpr, NORMALIZER: tl.constexpr, NORM: tl.constexpr,
    KEPT: tl.constexpr, BIAS: tl.constexpr, PITCH: tl.constexpr, NORM_PITCH: tl.constexpr, KEPT_PITCH: tl.constexpr,
):  # fmt: skip
    """From products ``v`` [BM, BLOCK] of one segment in float32, zeros where nothing is, to what is written of them.

    ``m`` and ``c`` are rows, and columns of the segment. Where heads are normalized the tile holds BLOCK / HEAD of them, of which
    ``norm`` is the first.
    """
    if BIAS != NOTHING:
        v += tl.load(bias + BIAS + c, mask=columns_there, other=0.0).to(tl.float32)[None, :]
    if KEPT != NOTHING:
        tl.store(kept + m[:, None] * KEPT_PITCH + (KEPT + c)[None, :], v.to(kept.dtype.element_ty), mask=there)
    if ACTIVATION == L2NORM:
        heads = tl.reshape(v, [v.shape[0], v.shape[1] // HEAD, HEAD])
        r = 1.0 / tl.sqrt(tl.sum(heads * heads, axis=2) + eps)  # [BM, BLOCK / HEAD]
        v = tl.reshape(heads * tl.expand_dims(r, 2), v.shape)
        if NORM != NOTHING:
            head = tl.arange(0, v.shape[1] // HEAD)
            heads_there = tl.max(tl.reshape(columns_there, [v.shape[1] // HEAD, HEAD]).to(tl.int32), axis=1) > 0
            at = rstd + m[:, None] * NORM_PITCH + (NORM + norm + head)[None, :]
            tl.store(at, r, mask=rows_there[:, None] & heads_there[None, :])
    if ACTIVATION == SILU:
        v *= sigmoid(v)
    if ACTIVATION == SIGMOID:
        v = sigmoid(v)
    if ACTIVATION == LOGSIGMOID:
        v = log_sigmoid(v) * (1.0 / NORMALIZER)
    tl.store(y + m[:, None] * PITCH + (COLUMN + c)[None, :], v.to(y.dtype.element_ty), mask=there)


@triton.jit
def activate_tile(
    z, bias, y, rstd, kept, M, eps,
    FIRST: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, ACTIVATION: tl.constexpr, NORMALIZER: tl.constexpr, NORM: tl.constexpr,
    KEPT: tl.constexpr, BIAS: tl.constexpr, Z_PITCH: tl.constexpr, PITCH: tl.constexpr, NORM_PITCH: tl.constexpr,
    KEPT_PITCH: tl.constexpr,
):  # fmt: skip
    """A tile of one segment."""
    m, rows_there, tile = place(M, FIRST, TILES, BM)
    at = tl.arange(0, BLOCK)
    c = tile * STEP + at
    columns_there = (at < STEP) & (c < WIDTH)
    there = rows_there[:, None] & columns_there[None, :]
    v = tl.load(z + m[:, None] * Z_PITCH + (ROW + c)[None, :], mask=there, other=0.0).to(tl.float32)  # [BM, BLOCK]
    finish_tile(
        v, m, c, there, rows_there, columns_there, tile, bias, y, rstd, kept, eps,
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
    """Every tile of every segment; FIRSTS holds each segment's first tile, and their number."""
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
    dy, dy_stride, y, rstd, kept, dz, M,
    FIRST: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, ACTIVATION: tl.constexpr, NORMALIZER: tl.constexpr, NORM: tl.constexpr,
    KEPT: tl.constexpr, Z_PITCH: tl.constexpr, PITCH: tl.constexpr, NORM_PITCH: tl.constexpr, KEPT_PITCH: tl.constexpr,
):  # fmt: skip
    """A tile of one segment; zeros where dy is ``None``."""
    m, rows_there, tile = place(M, FIRST, TILES, BM)
    at = tl.arange(0, BLOCK)
    c = tile * STEP + at
    there = rows_there[:, None] & ((at < STEP) & (c < WIDTH))[None, :]
    if dy is None:
        d = tl.zeros((BM, BLOCK), tl.float32)
    else:
        d = tl.load(dy + m[:, None] * dy_stride + c[None, :], mask=there, other=0.0).to(tl.float32)  # [BM, BLOCK]
        if ACTIVATION == SILU:
            v = tl.load(kept + m[:, None] * KEPT_PITCH + (KEPT + c)[None, :], mask=there, other=0.0)
            d *= silu_slope(v)
        elif ACTIVATION != NONE:
            v = tl.load(y + m[:, None] * PITCH + (COLUMN + c)[None, :], mask=there, other=0.0).to(tl.float32)
            if ACTIVATION == L2NORM:
                r = tl.load(rstd + m * NORM_PITCH + (NORM + tile), mask=rows_there, other=0.0)  # [BM]
                d = r[:, None] * (d - v * tl.sum(v * d, axis=1)[:, None])
            elif ACTIVATION == SIGMOID:
                d *= v * (1.0 - v)
            else:
                d *= log_sigmoid_slope(v * NORMALIZER) * (1.0 / NORMALIZER)
    tl.store(dz + m[:, None] * Z_PITCH + (ROW + c)[None, :], d.to(dz.dtype.element_ty), mask=there)


@triton.jit
def activation_gradients_kernel(
    dys, dy_strides, y, rstd, kept, dz, M,
    FIRSTS: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, WIDTHS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ACTIVATIONS: tl.constexpr, NORMALIZERS: tl.constexpr, NORMS: tl.constexpr, KEPTS: tl.constexpr,
    Z_PITCH: tl.constexpr, PITCH: tl.constexpr, NORM_PITCH: tl.constexpr, KEPT_PITCH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Every tile of every segment; dys and dy_strides hold one entry for each."""
    tile = tl.program_id(0) % FIRSTS[len(WIDTHS)]
    for s in tl.static_range(len(WIDTHS)):
        if (tile >= FIRSTS[s]) & (tile < FIRSTS[s + 1]):
            gradient_tile(
                dys[s], dy_strides[s], y, rstd, kept, dz, M,
                FIRSTS[s], FIRSTS[len(WIDTHS)], BM, BLOCKS[s], STEPS[s], WIDTHS[s], ROWS[s], COLUMNS[s], ACTIVATIONS[s],
                NORMALIZERS[s], NORMS[s], KEPTS[s], Z_PITCH, PITCH, NORM_PITCH, KEPT_PITCH,
            )  # fmt: skip
