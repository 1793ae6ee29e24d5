"""Products of warpgroups for CUDA C++ kernels: the width of one is part of its instruction, with a register for every sum.

What is written here is the one function that a kernel of a given width needs, for no template can count operands of assembly.
"""

from __future__ import annotations

import torch

TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}

ROWS = 64
"""Of a product: those of its first operand."""

WIDEST = 256
"""Columns of a product, in eights."""


def product_header(dtype: torch.dtype, columns: int, *, registers: bool = False) -> str:
    """The function ``product(d, a, b)``: ``d [64, columns] += a b^T`` as one instruction of four warps.

    Args:
        dtype: of both operands; 32 bytes of each row are multiplied.
        columns: rows of ``b``, a multiple of 8 up to 256. A thread holds half as many sums.
        registers: whether ``a`` lies in registers, 4 of each thread, and not like ``b`` in shared memory.
    """
    sums = columns // 2
    depth = 32 // dtype.itemsize
    held = ", ".join(f"%{at}" for at in range(sums))
    outputs = ", ".join(f'"+f"(d[{at}])' for at in range(sums))
    words = 4 if registers else 1
    first = "{" + ", ".join(f"%{sums + at}" for at in range(words)) + "}" if registers else f"%{sums}"
    inputs = ", ".join(f'"r"(a[{at}])' for at in range(words)) if registers else '"l"(a)'
    second = sums + words
    # both operands have their channels side by side; float8 knows no other way
    order = "" if dtype.itemsize == 1 else ", 0" if registers else ", 0, 0"
    name = f"wgmma.mma_async.sync.aligned.m{ROWS}n{columns}k{depth}.f32.{TYPES[dtype]}.{TYPES[dtype]}"
    operand = "const u32 (&a)[4]" if registers else "u64 a"
    return f"""#pragma once
#include "hopper.cuh"

__device__ __forceinline__ void product(float (&d)[{sums}], {operand}, u64 b) {{
  asm volatile(
      "{name} {{{held}}}, {first}, %{second}, 1, 1, 1{order};"
      : {outputs}
      : {inputs}, "l"(b));
}}
"""
