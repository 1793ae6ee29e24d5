"""Small Triton kernels for the tests of first calls, which compile them but never run them.

``test_first_call.py`` launches them on the stand-in driver of ``first.py``, ``test_triton_cache.py`` by its functions. The tests
see which kernels are compiled and launched, and no results. ``first.py`` clears the compiled kernels. Where Triton's interpreter
is on, no test that needs this file runs.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
