"""Oracle of ``swiglu``, inputs and dispatch keys of its cases, and a control.

The control is a part of the operation that studies time in addition: both products as one wide matrix product without the gate.
The workbench and other code that examines an operation's cases call these functions through the operation. ``cost.py`` calls
:func:`format_of`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from onelaunch.device.architectures import architecture_of
from onelaunch.errors import ArgumentError, ShapeError
from onelaunch.formats import BLOCK, Fp8Tensor, NVFP4Tensor, quantize_fp8, quantize_nvfp4
from onelaunch.operation import Case, Cost, Query, Reading
from onelaunch.ops.swiglu.contract import FORMATS, Facts, Operand, SwigluCall, key_of, swiglu
from onelaunch.wording import listing

_CODES = ("model", "full")
"""Values of the option ``codes``, for NVFP4 operands.

``model``: codes and block scales of quantized normal random numbers. ``full``: random codes and scales, see :func:`every_code`.
"""


def _in_full(operand: Operand, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a plain or quantized matrix as a plain one in ``dtype``."""
    return operand.to(dtype) if isinstance(operand, torch.Tensor) else operand.dequantize(dtype)


@swiglu.oracle
def reference(
    x: Operand,
    w_gate: Operand,
    w_up: Operand | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    constant_weights: bool = False,
) -> tuple[torch.Tensor]:
    """Compute both products and the gate in float64. ``out_dtype`` is ignored; it is the dtype that variants round to."""
    rows = _in_full(x)
    weights = _in_full(w_gate).chunk(2) if w_up is None else (_in_full(w_gate), _in_full(w_up))
    gate, up = (rows @ weight.mT for weight in weights)
    return (F.silu(gate) * up,)


@swiglu.inputs
def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Reading:
    """Return random rows and weights in the case's format, scaled so that both products have unit variance."""
    form, stacked = format_of(case), swiglu.option(case, "stacked")
    rows, columns, inner = (case.sizes[name] for name in swiglu.dimensions)

    def drawn(count: int, size: float, kind: str) -> Operand:
        """Return a random matrix ``[count, K]`` of this kind, whose elements have the standard deviation ``size``."""
        # Fake tensors hold no values, so those of a pretended device are not quantized, which would take 400 operations each.
        if kind == "nvfp4" and (swiglu.option(case, "codes") == "full" or architecture_of(device) is not None):
            return every_code(count, inner, size, device, generator, swizzled=swiglu.option(case, "swizzled_scales"))
        values = torch.randn(count, inner, device=device, generator=generator) * size
        if kind == "fp8":
            return quantize_fp8(values, per_row=swiglu.option(case, "row_scales"))
        if kind == "nvfp4":
            return quantize_nvfp4(values, swizzled=swiglu.option(case, "swizzled_scales"))
        return values.to(case.dtype)

    kinds = next(kinds for kinds, name in FORMATS.items() if name == form)
    shrink = 1 / math.sqrt(max(inner, 1))
    arguments: dict[str, Any] = {"x": drawn(rows, 1.0, kinds[0])}
    if stacked:
        arguments["w_gate"] = drawn(2 * columns, shrink, kinds[1])
    else:
        arguments |= {name: drawn(columns, shrink, kinds[1]) for name in ("w_gate", "w_up")}
    differentiable = tuple(arguments) if form == "dense" else ()
    if form in ("fp8", "nvfp4"):
        arguments["out_dtype"] = case.dtype
    if swiglu.option(case, "constant_weights"):
        arguments["constant_weights"] = True
    return Reading(arguments, differentiable)


def every_code(
    rows: int, inner: int, size: float, device: torch.device, generator: torch.Generator, *, swizzled: bool
) -> NVFP4Tensor:
    """Return an NVFP4 matrix of random codes and block scales, whose global scale makes its root mean square ``size``.

    All values but NaN may occur, among them negative scales, and zero scales of other codes than zero. :func:`make_inputs` calls
    it where ``codes`` is ``full``, and for a pretended device.
    """
    codes = torch.randint(0, 256, (rows, inner // 2), device=device, generator=generator, dtype=torch.uint8)
    bytes_ = torch.randint(0, 0x7F, (rows, inner // BLOCK), device=device, generator=generator, dtype=torch.uint8)
    signs = torch.randint(0, 2, bytes_.shape, device=device, generator=generator, dtype=torch.uint8) << 7
    plain = NVFP4Tensor(codes, (bytes_ | signs).view(torch.float8_e4m3fn))
    spread = plain.decode(torch.float32).square().mean().sqrt() if codes.numel() else torch.ones((), device=device)
    scaled = NVFP4Tensor(plain.codes, plain.scales, size / spread)
    return scaled.swizzle() if swizzled else scaled


def format_of(case: Case) -> str:
    """Return the case's format; raise if the options ``format`` or ``codes`` have unknown values."""
    form = swiglu.option(case, "format")
    if form not in FORMATS.values():
        raise ArgumentError(f"format is {form!r}; it must be one of {listing(FORMATS.values())}.")
    if swiglu.option(case, "codes") not in _CODES:
        raise ArgumentError(f"codes is {swiglu.option(case, 'codes')!r}; it must be one of {listing(_CODES)}.")
    return form


@swiglu.queries
def make_query(case: Case, device: str, grad: bool) -> Query:
    """Return the dispatch key of a case; raise if the contract refuses its operands.

    Variants decide whether they support gradients of these operands, so ``grad`` is set after the checks.
    """
    form, stacked = format_of(case), swiglu.option(case, "stacked")
    rows, columns, inner = (case.sizes[name] for name in swiglu.dimensions)
    x_kind, kind = next(kinds for kinds, name in FORMATS.items() if name == form)
    if "nvfp4" in form and inner % BLOCK:
        raise ShapeError("w_gate", got=(columns, inner), want=f"of a K that is a multiple of {BLOCK}; pad with zeros")

    def facts(name: str, count: int, kind: str) -> Facts:
        """Return the facts of an operand ``[count, K]`` of this kind."""
        details = {"fp8": "row_scales", "nvfp4": "swizzled_scales"}
        flags = (details[kind],) if kind in details and swiglu.option(case, details[kind]) else ()
        dtype = case.dtype if kind == "dense" else torch.float8_e4m3fn
        return Facts(name, kind, torch.Size((count, inner)), dtype, torch.device(device), flags=flags)

    up = None if stacked else facts("w_up", columns, kind)
    gate = facts("w_gate", 2 * columns if stacked else columns, kind)
    out_dtype = case.dtype if x_kind != "dense" else None
    constant = swiglu.option(case, "constant_weights")
    query = key_of(facts("x", rows, x_kind), gate, up, out_dtype, grad_enabled=False, constant_weights=constant)
    return query._replace(grad=grad)


_NO_CODES = "{name} is an NVFP4Tensor; wide_gemm_alone needs operands that PyTorch multiplies."
"""Message for an operand that the control does not support."""


def _wide_cost(case: Case) -> Cost:
    """Return the minimum cost of the control: both products, without the gate."""
    rows, columns, inner = (case.sizes[name] for name in swiglu.dimensions)
    # bytes of an element of x and of the weights
    operand = 1 if format_of(case) == "fp8" else case.dtype.itemsize
    written = 2 * rows * columns * case.dtype.itemsize
    moved = (rows + 2 * columns) * inner * operand + written
    return Cost(4 * rows * columns * inner, moved, 1, "float8_e4m3fn" if operand == 1 else None, written)


def _both(
    x: Operand,
    w_gate: Operand,
    w_up: Operand | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    constant_weights: bool = False,
) -> torch.Tensor:
    """Return both products side by side, ``[M, 2 N]``.

    They are computed in the dtype of plain rows or of float8 scales, and rounded to ``out_dtype`` unless that dtype is float64.
    It is float64 where the verification computes the reference outputs. A second call with the arguments of the case gives the
    error of plain PyTorch, which sets the tolerance; that one rounds.
    """
    if isinstance(x, NVFP4Tensor):
        raise ArgumentError(_NO_CODES.format(name="x"))
    dtype = x.scale.dtype if isinstance(x, Fp8Tensor) else x.dtype
    rows, *weights = (_in_full(each, dtype) for each in (x, w_gate, w_up) if each is not None)
    products = rows @ torch.cat(weights).mT
    return products if out_dtype is None or dtype is torch.float64 else products.to(out_dtype)


@swiglu.control("wide_gemm_alone", oracle=_both, cost=_wide_cost)
def wide_gemm_alone(call: SwigluCall) -> torch.Tensor:
    """Compute both products as one by PyTorch, for stacked weights. Its time is that of the operation if the gate were free."""
    from onelaunch.ops.swiglu.variants.torch import multiply

    if call.stacked is None:
        raise ArgumentError("w_up is given; wide_gemm_alone needs weights that are stacked.")
    if isinstance(call.stacked, NVFP4Tensor) or isinstance(call.x, NVFP4Tensor):
        raise ArgumentError(_NO_CODES.format(name="w_gate"))
    return multiply(call.x, call.stacked, call.dtype)
