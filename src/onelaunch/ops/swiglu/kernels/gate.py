"""SiLU gate and its gradients, elementwise in one pass over products that matrix kernels left in memory.

Computes:  h = silu(gate) * up;   dgate = dh * up * silu'(gate),  dup = dh * silu(gate), and h again if there is a buffer for it
Grid:      one-dimensional, M * ceil(N / BC) CTAs; one CTA owns BC columns of one row.
Registers: BC elements of each tensor, spread over 4 warps.
Memory:    reads gate and up (and dh) once and writes h (dgate, dup and h) once. Rows of gate and up may be halves of longer rows.
Sync:      none; CTAs are independent.
Callers:   launch.py launches both, for the operators in autograd.py.
Numerics:  float32 between the loads and the stores, then one rounding to the dtype of the result.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import silu, silu_slope


@triton.jit
def row_and_columns(columns, BC: tl.constexpr):
    """Return this CTA's row (64-bit), its column indices [BC], and the mask of those inside the matrix."""
    slices = tl.cdiv(columns, BC)
    item = tl.program_id(0)
    c = (item % slices) * BC + tl.arange(0, BC)
    return (item // slices).to(tl.int64), c, c < columns


@triton.jit
def gate_kernel(gate, up, h, columns, gate_stride, up_stride, BC: tl.constexpr):
    """Store h [M, columns], contiguous."""
    row, c, inside = row_and_columns(columns, BC)
    b_gate = tl.load(gate + row * gate_stride + c, mask=inside, other=0.0)  # [BC]
    b_up = tl.load(up + row * up_stride + c, mask=inside, other=0.0)
    b_h = silu(b_gate) * b_up.to(tl.float32)
    tl.store(h + row * columns + c, b_h.to(h.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward_kernel(
    dh, gate, up, dgate, dup, h, columns, dh_stride, gate_stride, up_stride, dgate_stride, dup_stride, BC: tl.constexpr
):
    """Store the gradients of gate and up, given dh, and h [M, columns], contiguous, unless it is ``None``."""
    row, c, inside = row_and_columns(columns, BC)
    b_dh = tl.load(dh + row * dh_stride + c, mask=inside, other=0.0).to(tl.float32)  # [BC]
    b_gate = tl.load(gate + row * gate_stride + c, mask=inside, other=0.0).to(tl.float32)
    b_up = tl.load(up + row * up_stride + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(dgate + row * dgate_stride + c, (b_dh * b_up * silu_slope(b_gate)).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + row * dup_stride + c, (b_dh * silu(b_gate)).to(dup.dtype.element_ty), mask=inside)
    if h is not None:
        tl.store(h + row * columns + c, (silu(b_gate) * b_up).to(h.dtype.element_ty), mask=inside)
