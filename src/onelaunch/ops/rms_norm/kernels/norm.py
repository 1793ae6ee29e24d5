"""Addition of a residual and RMSNorm of rows in one pass, and the gradients in one pass and a small sum.

Computes   s = x + residual (s = x without residual), rstd = 1 / sqrt(mean(s^2) + eps) of every row, y = s * rstd * weight.
           Backward, from dy and the gradient ds that comes in through the sum, with n = s * rstd and g = dy * weight:
             dx = dresidual = rstd (g - n mean(g n)) + ds,  dweight = sum of dy n over the rows.
Grid       forward: one CTA per BM rows. Backward: a fixed number of CTAs, each of which takes every num_programs-th tile of BM
           rows. The sum of dweight: one CTA per BC channels. All warps do the same work.
On chip    whole rows [BM, BD] in float32 registers, with BD the power of 2 that holds the D channels; backward also the next
           tile as it lies in memory, and the CTA's own sum of dweight, [BM, BD]. The longest rows are not loaded ahead, and the
           CTA's sum is a row of ``partials``, which stays in the L2 cache.
Memory     forward reads x, the residual and the weight once, writes y and s once, and rstd, one float32 per row, if there is a
           buffer for it. Backward reads s, dy, ds and rstd once and the weight once per CTA, writes dx (and dresidual, if its
           dtype is another) once, and a row of partial sums of dweight per CTA, which another launch reads and adds.
Protocol   CTAs do not exchange anything within a launch.
Numerics   float32 between the loads and the stores. y is computed from s before it is rounded, the gradients from the stored s.
           The rows of a CTA depend on the number of CTAs alone, and partial sums are added in a fixed order: dweight is the same
           each time on a device.
Caller     launch.py launches the kernels.
Source     Zhang and Sennrich (2019); docs/notebook/rms_norm.md.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, weight, residual, y, total, rstd, M, x_stride, residual_stride, eps,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute BM rows of y ``[M, D]``; of ``total [M, D]``, the sum, if there is a residual; of rstd unless it is ``None``."""
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.arange(0, BD)
    rows_valid = m < M
    valid = rows_valid[:, None] & (c < D)[None, :]
    s = tl.load(x + m[:, None] * x_stride + c[None, :], mask=valid, other=0.0).to(tl.float32)  # [BM, BD]
    if residual is not None:
        s += tl.load(residual + m[:, None] * residual_stride + c[None, :], mask=valid, other=0.0).to(tl.float32)
    if weight is not None:  # loaded before the reduction, behind which the compiler would leave it
        w = tl.load(weight + c, mask=c < D, other=0.0)[None, :]
    at = m[:, None] * D + c[None, :]
    if residual is not None:
        tl.store(total + at, s.to(total.dtype.element_ty), mask=valid)
    r = 1.0 / tl.sqrt(tl.sum(s * s, axis=1) * (1.0 / D) + eps)  # [BM]
    if rstd is not None:
        tl.store(rstd + m, r, mask=rows_valid)
    s *= r[:, None]
    if weight is not None:
        s *= w.to(tl.float32)  # pyrefly: ignore[unbound-name]
    tl.store(y + at, s.to(y.dtype.element_ty), mask=valid)


@triton.jit
def load_rows(base, stride, m, M, D: tl.constexpr, BD: tl.constexpr):
    """Return rows m of a matrix [M, D] with this row pitch, as they lie in memory; 0 beyond the end. The result is [BM, BD]."""
    c = tl.arange(0, BD)
    return tl.load(base + m[:, None] * stride + c[None, :], mask=(m < M)[:, None] & (c < D)[None, :], other=0.0)


@triton.jit
def rms_norm_gradients_kernel(
    dy, dtotal, total, weight, rstd, dx, dresidual, partials, M, dy_stride, dtotal_stride, total_stride,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the sum for every num_programs-th tile of rows, and this CTA's partial sum of dweight.

    The gradient is stored in ``dx`` and ``dresidual``, each of which may be ``None``. ``dtotal`` is ``None`` if nothing comes in
    through the sum, and ``partials [CTAs, D]`` if dweight is not wanted. A row is loaded while the row before it is computed.
    """
    c = tl.arange(0, BD)
    if weight is not None:
        w = tl.load(weight + c, mask=c < D, other=0.0)[None, :]
    if partials is not None:
        dweight = tl.zeros([BM, BD], tl.float32)
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    step = tl.num_programs(0).to(tl.int64) * BM
    s, d = load_rows(total, total_stride, m, M, D, BD), load_rows(dy, dy_stride, m, M, D, BD)
    r = tl.load(rstd + m, mask=m < M, other=0.0)
    if dtotal is not None:
        more = load_rows(dtotal, dtotal_stride, m, M, D, BD)
    for _ in range(tl.program_id(0), tl.cdiv(M, BM), tl.num_programs(0)):
        following = m + step
        next_s, next_d = load_rows(total, total_stride, following, M, D, BD), load_rows(dy, dy_stride, following, M, D, BD)
        next_r = tl.load(rstd + following, mask=following < M, other=0.0)
        if dtotal is not None:
            next_more = load_rows(dtotal, dtotal_stride, following, M, D, BD)
        n, g = s.to(tl.float32) * r[:, None], d.to(tl.float32)  # [BM, BD]
        if partials is not None:
            dweight += g * n  # pyrefly: ignore[unbound-name]
        if dx is not None or dresidual is not None:
            if weight is not None:
                g *= w.to(tl.float32)  # pyrefly: ignore[unbound-name]
            mean = tl.sum(g * n, axis=1) * (1.0 / D)  # [BM]
            found = r[:, None] * (g - n * mean[:, None])
            if dtotal is not None:
                found += more.to(tl.float32)  # pyrefly: ignore[unbound-name]
            valid = (m < M)[:, None] & (c < D)[None, :]
            at = m[:, None] * D + c[None, :]
            if dx is not None:
                tl.store(dx + at, found.to(dx.dtype.element_ty), mask=valid)
            if dresidual is not None:
                tl.store(dresidual + at, found.to(dresidual.dtype.element_ty), mask=valid)
        m, s, d, r = following, next_s, next_d, next_r
        if dtotal is not None:
            more = next_more  # pyrefly: ignore[unbound-name]
    if partials is not None:
        at = partials + tl.program_id(0).to(tl.int64) * D + c
        total_dweight = tl.sum(dweight, axis=0)  # pyrefly: ignore[unbound-name]
        tl.store(at, total_dweight.to(partials.dtype.element_ty), mask=c < D)


@triton.jit
def long_rows_gradients_kernel(
    dy, dtotal, total, weight, rstd, dx, dresidual, partials, M, dy_stride, dtotal_stride, total_stride,
    D: tl.constexpr, BD: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Do the same for long rows, one at a time, with the weight and ``dtotal`` loaded late, since registers are full before.

    With KEEP a CTA keeps its sum of dweight in registers and loads the next row ahead. Else it adds to its row of ``partials
    [CTAs, D]`` in memory.
    """
    c = tl.arange(0, BD)
    valid = c < D
    partial = partials + tl.program_id(0).to(tl.int64) * D + c if partials is not None else None
    m = tl.program_id(0).to(tl.int64)
    if KEEP:
        s = tl.load(total + m * total_stride + c, mask=valid, other=0.0)
        d = tl.load(dy + m * dy_stride + c, mask=valid, other=0.0)
        if partials is not None:
            dweight = tl.zeros([BD], tl.float32)
    for _ in range(tl.program_id(0), M, tl.num_programs(0)):
        following = m + tl.num_programs(0)
        ahead = tl.minimum(following, M - 1)  # a row that exists; the last one's is not used
        r = tl.load(rstd + m)
        if KEEP:
            n, g = s.to(tl.float32) * r, d.to(tl.float32)  # [BD]  # pyrefly: ignore[unbound-name]
        else:
            n = tl.load(total + m * total_stride + c, mask=valid, other=0.0).to(tl.float32) * r
            g = tl.load(dy + m * dy_stride + c, mask=valid, other=0.0).to(tl.float32)
        if partials is not None:
            if KEEP:
                dweight += g * n  # pyrefly: ignore[unbound-name]
            else:
                # Nothing is there before the first row. L1 is left to the weight.
                before = tl.load(partial, mask=valid & (m >= tl.num_programs(0)), other=0.0, cache_modifier=".cg")
                tl.store(partial, (before + g * n).to(partials.dtype.element_ty), mask=valid)
        if dx is not None or dresidual is not None:
            if weight is not None:
                g *= tl.load(weight + c, mask=valid, other=0.0).to(tl.float32)
            mean = tl.sum(g * n, axis=0) * (1.0 / D)
            if KEEP:
                s = tl.load(total + ahead * total_stride + c, mask=valid, other=0.0)
                d = tl.load(dy + ahead * dy_stride + c, mask=valid, other=0.0)
            found = r * (g - n * mean)
            if dtotal is not None:
                found += tl.load(dtotal + m * dtotal_stride + c, mask=valid, other=0.0).to(tl.float32)
            if dx is not None:
                tl.store(dx + m * D + c, found.to(dx.dtype.element_ty), mask=valid)
            if dresidual is not None:
                tl.store(dresidual + m * D + c, found.to(dresidual.dtype.element_ty), mask=valid)
        elif KEEP:
            s = tl.load(total + ahead * total_stride + c, mask=valid, other=0.0)
            d = tl.load(dy + ahead * dy_stride + c, mask=valid, other=0.0)
        m = following
        if not KEEP:
            tl.debug_barrier()  # the next row's loads of ``partial`` see this row's stores, whichever thread made them
    if KEEP and partials is not None:
        tl.store(partial, dweight.to(partials.dtype.element_ty), mask=valid)  # pyrefly: ignore[unbound-name]


@triton.jit
def add_partials_kernel(partials, dweight, rows, D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Store the sums of BC columns of ``partials [rows, D]`` in dweight ``[D]``, in the same order each time."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    r = tl.arange(0, BR)
    sums = tl.zeros([BR, BC], tl.float32)
    for first in range(0, rows, BR):
        row = first + r
        valid = (row < rows)[:, None] & (c < D)[None, :]
        sums += tl.load(partials + row.to(tl.int64)[:, None] * D + c[None, :], mask=valid, other=0.0)
    tl.store(dweight + c, tl.sum(sums, axis=0).to(dweight.dtype.element_ty), mask=c < D)
