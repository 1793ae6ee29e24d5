"""Small kernels of Triton for the tests of first calls. Triton reads their source, so they are in a file of their own."""

from __future__ import annotations

import triton
import triton.language as tl

SIZE = tl.constexpr(128)


@triton.jit
def double_kernel(x, out, BLOCK: tl.constexpr):
    """Write twice the input."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at))


@triton.jit
def square_kernel(x, out, BLOCK: tl.constexpr):
    """Write the square of the input."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(out + at, value * value)


@triton.jit
def slope_kernel(x, grad, out, BLOCK: tl.constexpr):
    """Write the gradient of ``(2 x) ** 2``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 8 * tl.load(x + at) * tl.load(grad + at))


@triton.jit
def broken_kernel(x, out, BLOCK: tl.constexpr):
    """Fail to compile: the sizes do not agree."""
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, 2 * BLOCK)))
