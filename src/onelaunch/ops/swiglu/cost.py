"""What ``swiglu`` must compute and move, per variant."""

from __future__ import annotations

from onelaunch.formats import BLOCK
from onelaunch.operation import Case, Cost, Direction, Variant, launch_count
from onelaunch.ops.swiglu.contract import swiglu
from onelaunch.ops.swiglu.reference import format_of

UNITS = {"fp8": "float8_e4m3fn", "nvfp4": "float4_e2m1fn_x2"}
"""The dtypes whose units could multiply quantized operands, by format; elsewhere it is that of the case."""

PRODUCTS = {"forward": 1, "forward_backward": 3}
"""Pairs of matrix products of equal size: x W^T; backward also d W and d^T x."""


def matrix_bytes(kind: str, rows: int, inner: int, itemsize: int, per_row: bool) -> int:
    """Of a matrix ``[rows, inner]`` as it lies in memory."""
    if kind == "fp8":
        return rows * inner + 4 * (rows if per_row else 1)
    if kind == "nvfp4":
        return rows * inner // 2 + rows * inner // BLOCK + 4
    return rows * inner * itemsize


@swiglu.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """The least: x and both weights in, h out; backward x, the weights and dh in, three gradients out.

    A variant adds x again where its two products are launches of their own (no ``products`` in tag ``fuses``), and what launches
    hand to each other through memory: products that the gate is not applied to in registers (tag ``hands``), and for its backward
    pass both products, kept, and their gradients, which two products read. What plain PyTorch decodes is not counted.
    """
    rows, columns, inner = (case.sizes[name] for name in swiglu.dimensions)
    value, form = case.dtype.itemsize, format_of(case)
    x_kind = form if form in ("fp8", "nvfp4") else "dense"
    w_kind = "nvfp4" if "nvfp4" in form else x_kind
    per_row = swiglu.option(case, "row_scales")
    x = matrix_bytes(x_kind, rows, inner, value, per_row)
    operands = x + 2 * matrix_bytes(w_kind, columns, inner, value, per_row)
    result = rows * columns * value
    moved = operands + result
    if variant is not None and "products" not in variant.tags.get("fuses", ()):
        moved += x
    handed = () if variant is None else variant.tags.get("hands", ())
    moved += 2 * len(handed) * result  # out and in
    written = result + len(handed) * result
    if direction == "forward_backward":
        moved += 2 * operands + result  # x and weights in again, their gradients out, dh in
        written += operands
        if variant is not None:
            moved += (2 - len(handed)) * result  # kept products that the forward pass alone would not write
            moved += 2 * result + 2 * result + 2 * 2 * result  # those in; their gradients out, and in for each product
            written += (2 - len(handed)) * result + 2 * result
    flops = PRODUCTS[direction] * 4 * rows * columns * inner
    return Cost(flops, moved, launch_count(variant, direction), UNITS.get(form), written)
