"""Rounding of the operands of float32 matrix products to TF32, which the portable kernels of several operations share.

``PRECISION`` is a constant of these kernels: "ieee", or "tf32" where PyTorch's settings allow it (``uses_tf32`` in
``kernels/gemm/choice.py``).
"""

import triton
import triton.language as tl


@triton.jit
def round_to_tf32(x):
    """Return float32 numbers rounded to the nearest TF32, which has 11 significant bits.

    Matrix units drop the other bits, always towards zero, so that products of unrounded numbers are too small on average: their
    error is about 3.5 times as large. Infinity and NaN stay as they are.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7F800000) != 0x7F800000, bits + 0x1000, bits)
    return (bits & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def to_precision(x, PRECISION: tl.constexpr):
    """Return an operand of a product as it is multiplied: rounded to TF32 if PRECISION is "tf32", else unchanged."""
    return round_to_tf32(x) if PRECISION == "tf32" else x
