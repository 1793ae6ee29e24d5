"""WGMMA instructions for CUDA C++: the width is part of the instruction, with a register for every accumulator.

No template can count the operands of inline assembly, so the one function that a kernel of a given width needs is generated.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}


def wgmma_header(dtype: torch.dtype, widths: Iterable[int], *, registers: bool = False) -> str:
    """Return a header with the function ``wgmma(d, a, b)`` for each width: ``d [64, width] += a b^T`` by four warps.

    Args:
        dtype: Type of both operands; 32 bytes of each row are multiplied.
        widths: Rows of ``b``, multiples of 8 up to 256. A thread holds half as many accumulators.
        registers: Whether ``a`` lies in 4 registers of each thread instead of shared memory, where ``b`` lies.
    """
    functions = "\n".join(_wgmma(dtype, width, registers=registers) for width in widths)
    return f'#pragma once\n#include "hopper.cuh"\n\n{functions}'


def _wgmma(dtype: torch.dtype, width: int, *, registers: bool) -> str:
    sums = width // 2
    depth = 32 // dtype.itemsize
    held = ", ".join(f"%{at}" for at in range(sums))
    outputs = ", ".join(f'"+f"(d[{at}])' for at in range(sums))
    words = 4 if registers else 1
    first = "{" + ", ".join(f"%{sums + at}" for at in range(words)) + "}" if registers else f"%{sums}"
    inputs = ", ".join(f'"r"(a[{at}])' for at in range(words)) if registers else '"l"(a)'
    second = sums + words
    # transpose flags: both operands are K-major; float8 has no other layout, and a register operand no flag
    order = "" if dtype.itemsize == 1 else ", 0" if registers else ", 0, 0"
    name = f"wgmma.mma_async.sync.aligned.m64n{width}k{depth}.f32.{TYPES[dtype]}.{TYPES[dtype]}"
    operand = "const u32 (&a)[4]" if registers else "u64 a"
    return f"""__device__ __forceinline__ void wgmma(float (&d)[{sums}], {operand}, u64 b) {{
  asm volatile(
      "{name} {{{held}}}, {first}, %{second}, 1, 1, 1{order};"
      : {outputs}
      : {inputs}, "l"(b));
}}
"""
