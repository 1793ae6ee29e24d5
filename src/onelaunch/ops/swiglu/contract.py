"""The operation ``swiglu``: what it computes, takes and refuses. Its names for few bits stand in ``functions.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from onelaunch import checks, dispatch
from onelaunch.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from onelaunch.formats import ATOM_ROWS, BLOCK, Fp8Tensor, NVFP4Tensor
from onelaunch.operation import Bundle, Query, Shapes, fixed, operation, remembered
from onelaunch.operation.autocast import cast, low_dtype, without_autocast

Operand: TypeAlias = torch.Tensor | Fp8Tensor | NVFP4Tensor

FORMATS = {
    ("dense", "dense"): "dense",
    ("fp8", "fp8"): "fp8",
    ("dense", "nvfp4"): "nvfp4_weights",
    ("nvfp4", "nvfp4"): "nvfp4",
}
"""What a call is, by the kinds of ``x`` and of the weights. All but ``dense`` are flags of the query."""

RESULTS = {
    "fp8": (torch.bfloat16, torch.float16, torch.float32),
    "nvfp4": (torch.float16, torch.bfloat16, torch.float32),
}
"""Dtypes that results may have where ``x`` is quantized, the default first; elsewhere it is that of ``x``."""

LOW = (torch.float16, torch.bfloat16)

NAMES = ("x", "w_gate", "w_up")


class Facts(NamedTuple):
    """What is known of an operand without reading it. Hashable."""

    name: str
    """The caller's."""
    kind: str
    """``dense``, ``fp8`` or ``nvfp4``."""
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    flags: tuple[str, ...] = ()
    """Of the query, as far as they follow from this operand."""


class SwigluCall(NamedTuple):
    """Checked arguments of :func:`swiglu`."""

    x: Operand
    """``[M, K]``, any strides."""
    w_gate: Operand
    """``[N, K]``; the first rows of ``stacked`` where there is one."""
    w_up: Operand
    """``[N, K]``, of the same kind."""
    stacked: Operand | None
    """``[2 N, K]`` where the caller keeps both in one, the gate's rows first: the query's flag ``stacked``."""
    key: Query
    constant_weights: bool = False

    def query(self) -> Query:
        return self.key

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return self.key.dtype


def facts(name: str, operand: object) -> Facts:
    """Of a tensor, or of a quantized one."""
    if isinstance(operand, Fp8Tensor):
        flags = ("row_scales",) * operand.per_row
        checks.dtype(name, operand.values, (torch.float8_e4m3fn,))
        checks.dtype(f"the scale of {name}", operand.scale, (torch.float32,))
        return Facts(name, "fp8", operand.shape, operand.values.dtype, operand.values.device, _wanted(operand), flags)
    if isinstance(operand, NVFP4Tensor):
        flags = ("swizzled_scales",) * operand.swizzled
        checks.dtype(f"the scales of {name}", operand.scales, (torch.float8_e4m3fn,))
        return Facts(name, "nvfp4", operand.shape, operand.scales.dtype, operand.codes.device, _wanted(operand), flags)
    if not isinstance(operand, torch.Tensor):
        raise ArgumentError(f"{name} is {type(operand).__name__}; it must be a torch.Tensor, an Fp8Tensor or an NVFP4Tensor.")
    return Facts(name, "dense", *checks.facts(name, operand))


def _wanted(operand: Bundle) -> bool:
    """Whether anybody asks for gradients of a part of it."""
    return any(tensor.requires_grad for tensor in operand.tensors().values())


def bind(
    x: Operand,
    w_gate: Operand,
    w_up: Operand | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    constant_weights: bool = False,
    names: tuple[str, str, str] = NAMES,
) -> SwigluCall:
    """The checked call; raises as :func:`swiglu` says. ``names`` are the caller's for the three operands."""
    if not isinstance(constant_weights, bool):
        raise ArgumentError(f"constant_weights is {type(constant_weights).__name__}; it must be True or False.")
    up = None if w_up is None else facts(names[2], w_up)
    key = key_of(facts(names[0], x), facts(names[1], w_gate), up, out_dtype, torch.is_grad_enabled())
    if isinstance(x, torch.Tensor) and x.dim() > 2:
        x = x.flatten(0, -2)
    if w_up is not None:
        return SwigluCall(x, w_gate, w_up, None, key, constant_weights)
    half = key.sizes[1]
    if isinstance(w_gate, torch.Tensor):
        return SwigluCall(x, w_gate[:half], w_gate[half:], w_gate, key, constant_weights)
    return SwigluCall(x, w_gate.rows(0, half), w_gate.rows(half, 2 * half), w_gate, key, constant_weights)


@remembered
def key_of(x: Facts, w_gate: Facts, w_up: Facts | None, out_dtype: torch.dtype | None, grad_enabled: bool) -> Query:
    """All checks that need no values, and the dispatch key."""
    if len(x.shape) < 2:
        raise ShapeError(x.name, got=x.shape, want="[..., K], a tensor of at least 2 dimensions")
    weights = (w_gate,) if w_up is None else (w_gate, w_up)
    form = _form(x, weights)
    dtype = _result_dtype(form, x, weights, out_dtype)
    columns = _columns(x, weights)
    inner = x.shape[-1]
    if form == "fp8":
        for operand, dimension, size in ((x, "K", inner), (w_gate, "N", columns)):
            if size % BLOCK:
                raise ShapeError(
                    operand.name, got=operand.shape, want=f"of a {dimension} that is a multiple of {BLOCK}; pad with zeros"
                )
    asking = [each.name for each in (x, *weights) if each.requires_grad]
    grad = grad_enabled and bool(asking)
    if grad and form != "dense":
        raise ArgumentError(
            f"{asking[0]} requires gradients, and swiglu of quantized operands has no backward pass; call it under "
            "torch.no_grad(), or detach it."
        )
    details = {flag for each in (x, *weights) for flag in each.flags}
    flags = (form,) * (form != "dense") + tuple(sorted(details)) + ("stacked",) * (w_up is None)
    return Query("swiglu", str(x.device), dtype, fixed(math.prod(x.shape[:-1]), columns, inner), grad, flags)


def _form(x: Facts, weights: Sequence[Facts]) -> str:
    """Which of the formats the operands make, or an error that says which there are."""
    gate, *up = weights
    if up and up[0].kind != gate.kind:
        said = f"{up[0].name} is {_called(up[0].kind)} and {gate.name} {_called(gate.kind)}"
        raise ArgumentError(f"{said}; both must be of one kind.")
    if (x.kind, gate.kind) not in FORMATS:
        known = "; ".join(f"{_called(one)} with {_called(other)}" for one, other in FORMATS)
        said = f"{x.name} is {_called(x.kind)} and {gate.name} {_called(gate.kind)}"
        raise ArgumentError(f"{said}; swiglu takes {x.name} with weights so: {known}.")
    return FORMATS[x.kind, gate.kind]


def _called(kind: str) -> str:
    return {"dense": "a torch.Tensor", "fp8": "an Fp8Tensor", "nvfp4": "an NVFP4Tensor"}[kind]


def _result_dtype(form: str, x: Facts, weights: Sequence[Facts], wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of the result, once those of the operands are right."""
    if form in RESULTS:
        if wanted is not None and wanted not in RESULTS[form]:
            names = " or ".join(str(each).removeprefix("torch.") for each in RESULTS[form])
            raise DTypeError("out_dtype", got=wanted, want=names)
        return wanted or RESULTS[form][0]
    if x.dtype not in (checks.FLOATS if form == "dense" else LOW):
        names = "float16, bfloat16 or float32" if form == "dense" else "float16 or bfloat16 beside NVFP4 weights"
        raise DTypeError(x.name, got=x.dtype, want=names)
    for weight in weights:
        if form == "dense" and weight.dtype != x.dtype:
            raise DTypeError(weight.name, got=weight.dtype, want=f"{str(x.dtype).removeprefix('torch.')}, the dtype of {x.name}")
    if wanted not in (None, x.dtype):
        raise DTypeError("out_dtype", got=wanted, want=f"{str(x.dtype).removeprefix('torch.')}, the dtype of x, or None")
    return x.dtype


def _columns(x: Facts, weights: Sequence[Facts]) -> int:
    """N, once the shapes and devices of the weights are right."""
    gate, stacked = weights[0], len(weights) == 1
    dimensions = "[2 N, K]" if stacked else "[N, K]"
    for weight in weights:
        if len(weight.shape) != 2:
            raise ShapeError(weight.name, got=weight.shape, want=f"{dimensions}, a tensor of 2 dimensions")
        want = (gate.shape[0], x.shape[-1])
        if tuple(weight.shape) != want:
            like = f"{x.name} {list(x.shape)}" + (f" and {gate.name} {list(gate.shape)}" if weight is not gate else "")
            turned = "; pass its transpose: weights lie as torch.nn.Linear holds them" if weight.shape[0] == want[1] else ""
            raise ShapeError(weight.name, got=weight.shape, want=f"{dimensions} = {list(want)} to match {like}{turned}")
        if weight.device != x.device:
            raise DeviceError(weight.name, got=weight.device, want=x.device)
    rows = gate.shape[0]
    if not stacked:
        return rows
    if rows % 2:
        raise ShapeError(gate.name, got=gate.shape, want="[2 N, K], the gate's rows before those of up, where w_up is not given")
    if "swizzled_scales" in gate.flags and rows // 2 % ATOM_ROWS:
        said = f"[2 N, K] with N a multiple of {ATOM_ROWS} where its scales are swizzled; pass plain() of it"
        raise ShapeError(gate.name, got=gate.shape, want=said)
    return rows // 2


@operation(
    dimensions=("M", "N", "K"),
    outputs=("h",),
    bind=bind,
    options={
        "format": "dense",
        "stacked": False,
        "row_scales": False,
        "swizzled_scales": False,
        "codes": "model",
        "constant_weights": False,
    },
    defaults={"cuda": ("eager",), "cpu": ("eager",)},
)
def swiglu(
    x: Operand,
    w_gate: Operand,
    w_up: Operand | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    constant_weights: bool = False,
    variant: str = dispatch.AUTO,
) -> torch.Tensor:
    """The gated half of a SwiGLU MLP: two matrix products of the same rows, one through SiLU as the other's gate.

        h = silu(x w_gate^T) * (x w_up^T)

    Differentiable in ``x`` and the weights where all three are plain tensors. Sums are in float32; what a 16-bit result cannot
    hold becomes infinite. Variants whose products are PyTorch's round each to the dtype of the result before the gate (but not to
    float16 where operands are quantized): there, a product of plain tensors beyond float16 is infinite, and its gate may be NaN.

    Args:
        x: ``[..., K]`` float16, bfloat16 or float32; or ``[M, K]`` as :class:`Fp8Tensor` or :class:`NVFP4Tensor`.
        w_gate: ``[N, K]``, as checkpoints hold it, dtype of ``x``; an :class:`Fp8Tensor` beside an ``x`` of the kind; or an
            :class:`NVFP4Tensor` beside an ``x`` of the kind or in 16 bits. ``[2 N, K]``, the gate's rows first, if ``w_up`` is
            not given.
        w_up: ``[N, K]``, of the kind and dtype of ``w_gate``. Default: the other half of ``w_gate``.
        out_dtype: of the result where ``x`` is quantized: bfloat16 (default for float8), float16 (default for NVFP4), float32.
            Elsewhere it is that of ``x``.
        constant_weights: the caller's word that nothing which the GPU may still be doing when the call is made writes the
            weights, as in inference: a launch may then read them beside the end of the one before it. Results are the same; if it
            is not true, they are undefined.
        variant: a name from ``swiglu.variants``, or ``"auto"`` for the fastest measured one.

    Returns:
        ``h [..., N]``.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: naming the argument, what it was and what it has to be.
        UnknownVariant: no variant of that name.
        VariantUnsupported: the named variant cannot run this call; says why and which can.

    Source: the write-up "dual GEMM with a SiLU-mul epilogue"; Shazeer, GLU Variants Improve Transformer (2020).
    """
    x, w_gate, w_up = under_autocast(x, w_gate, w_up)
    return run(x, bind(x, w_gate, w_up, out_dtype=out_dtype, constant_weights=constant_weights), variant)


def under_autocast(x: Operand, w_gate: Operand, w_up: Operand | None) -> tuple[Operand, Operand, Operand | None]:
    """Under autocast, plain tensors in the autocast dtype."""
    low = low_dtype(x)
    if low is None:
        return x, w_gate, w_up
    return cast(x, low), cast(w_gate, low), cast(w_up, low)


def run(x: Operand, call: SwigluCall, variant: str) -> torch.Tensor:
    """The result of a checked call by a variant, in the shape that ``x`` came in."""
    with without_autocast(torch.device(call.key.device)):
        (h,) = dispatch.run(swiglu, call, variant)
    return h.unflatten(0, x.shape[:-1]) if len(x.shape) > 2 else h


@swiglu.shapes
def result_shapes(call: SwigluCall) -> Shapes:
    """Return ``h [M, N]``."""
    return ((call.x.shape[0], call.w_gate.shape[0]),)
