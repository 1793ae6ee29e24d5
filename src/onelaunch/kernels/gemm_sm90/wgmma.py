"""Generated CUDA C++ wrappers of the WGMMA instruction.

The N dimension is part of the instruction's name, and each accumulator is an operand. No template can vary the number of
operands of inline assembly, so the function for each width is generated. ``kernel.py`` passes the header to the compiler as
``wgmma.cuh``. The functions only start the instruction: ``wgmma_fence()`` must precede, ``wgmma_commit_group()`` and
``wgmma_wait_group()`` must follow (``hopper.cuh``).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}
"""Names of the operands' types in the instruction's name."""


def wgmma_header(dtype: torch.dtype, widths: Iterable[int], *, registers: bool = False) -> str:
    """Return a header with ``wgmma(d, a, b)`` for each width: a warpgroup adds ``a b^T`` to ``d [64, width]``.

    ``d`` is in registers; ``b``, and ``a`` unless it is in registers too, are descriptors from ``wgmma_descriptor()``.

    Args:
        dtype: Type of both operands. One instruction multiplies 32 bytes of each row.
        widths: Numbers of rows of ``b``, multiples of 8 up to 256. A thread holds half as many accumulators.
        registers: Flag that ``a`` is in 4 registers of each thread; otherwise it is in shared memory, like ``b``.
    """
    functions = "\n".join(_wgmma(dtype, width, registers=registers) for width in widths)
    return f'#pragma once\n#include "hopper.cuh"\n\n{functions}'


def _wgmma(dtype: torch.dtype, width: int, *, registers: bool) -> str:
    sums = width // 2  # accumulators of each of 128 threads
    depth = 32 // dtype.itemsize  # the K dimension of one instruction
    accumulators = ", ".join(f"%{at}" for at in range(sums))
    outputs = ", ".join(f'"+f"(d[{at}])' for at in range(sums))
    a_registers = 4 if registers else 1
    a_operand = "{" + ", ".join(f"%{sums + at}" for at in range(a_registers)) + "}" if registers else f"%{sums}"
    inputs = ", ".join(f'"r"(a[{at}])' for at in range(a_registers)) if registers else '"l"(a)'
    b_index = sums + a_registers
    # The numbers 1, 1, 1 behind the operands: add to d instead of overwriting it; do not negate a; do not negate b.
    # Transpose flags: both operands are K-major. float8 has no other layout, and an operand in registers has no flag.
    transpose = "" if dtype.itemsize == 1 else ", 0" if registers else ", 0, 0"
    name = f"wgmma.mma_async.sync.aligned.m64n{width}k{depth}.f32.{_TYPES[dtype]}.{_TYPES[dtype]}"
    a_parameter = "const u32 (&a)[4]" if registers else "u64 a"
    return f"""__device__ __forceinline__ void wgmma(float (&d)[{sums}], {a_parameter}, u64 b) {{
  asm volatile(
      "{name} {{{accumulators}}}, {a_operand}, %{b_index}, 1, 1, 1{transpose};"
      : {outputs}
      : {inputs}, "l"(b));
}}
"""
