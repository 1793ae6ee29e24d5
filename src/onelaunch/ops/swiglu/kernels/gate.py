"""SiLU of the gate times the other product, and its gradients, in one pass over products that matrix kernels left.

Computes   h = silu(gate) * up;   dgate = dh * up * silu'(gate),  dup = dh * silu(gate)
Grid       a program per row and BC of its columns.
Memory     reads gate and up (and dh) once, writes h (dgate and dup) once; rows of gate and up may be halves of longer rows.
Numerics   float32 between the loads and the stores.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import silu, silu_slope


@triton.jit
def place(columns, BC: tl.constexpr):
    """The row of this program, 64-bit, its columns, and which of them there are."""
    slices = tl.cdiv(columns, BC)
    item = tl.program_id(0)
    c = (item % slices) * BC + tl.arange(0, BC)
    return (item // slices).to(tl.int64), c, c < columns


@triton.jit
def gate_kernel(gate, up, h, columns, gate_stride, up_stride, BC: tl.constexpr):
    row, c, there = place(columns, BC)
    b_gate = tl.load(gate + row * gate_stride + c, mask=there, other=0.0)  # [BC]
    b_up = tl.load(up + row * up_stride + c, mask=there, other=0.0)
    b_h = silu(b_gate) * b_up.to(tl.float32)
    tl.store(h + row * columns + c, b_h.to(h.dtype.element_ty), mask=there)


@triton.jit
def gate_backward_kernel(
    dh, gate, up, dgate, dup, columns, dh_stride, gate_stride, up_stride, dgate_stride, dup_stride, BC: tl.constexpr
):
    row, c, there = place(columns, BC)
    b_dh = tl.load(dh + row * dh_stride + c, mask=there, other=0.0).to(tl.float32)  # [BC]
    b_gate = tl.load(gate + row * gate_stride + c, mask=there, other=0.0).to(tl.float32)
    b_up = tl.load(up + row * up_stride + c, mask=there, other=0.0).to(tl.float32)
    tl.store(dgate + row * dgate_stride + c, (b_dh * b_up * silu_slope(b_gate)).to(dgate.dtype.element_ty), mask=there)
    tl.store(dup + row * dup_stride + c, (b_dh * silu(b_gate)).to(dup.dtype.element_ty), mask=there)
