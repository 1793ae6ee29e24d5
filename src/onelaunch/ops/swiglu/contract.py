"""Operation ``swiglu``: public function, argument checks and dispatch key.

Users and the module ``SwiGLU`` call :func:`swiglu`. A call passes through it, :func:`bind` (checks, dispatch key) and :func:`run`
(dispatch to a variant, which takes a :class:`SwigluCall`). ``functions.py`` has further entry points, for quantized operands;
they call these. ``reference.py``, ``cost.py``, ``probes.py`` and ``variants`` register their parts with the operation.
"""

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
"""Format of a call by the kinds of ``x`` and of the weights.

The query (dispatch key) has the format as a flag, unless it is ``dense``. Variants read flags to decide whether they can run.
"""

_RESULTS = {
    "fp8": (torch.bfloat16, torch.float16, torch.float32),
    "nvfp4": (torch.float16, torch.bfloat16, torch.float32),
}
"""Result dtypes by format for a quantized ``x``, the default first. In other formats the result has the dtype of ``x``."""

_LOW = (torch.float16, torch.bfloat16)
"""Dtypes of ``x`` with NVFP4 weights."""

_NAMES = ("x", "w_gate", "w_up")
"""Names of the operands in error messages of :func:`swiglu`."""


class Facts(NamedTuple):
    """Properties of an operand that are known without reading its elements; hashable, so that :func:`key_of` can be cached."""

    name: str
    """Name that the caller knows the operand by."""
    kind: str
    """Kind of the operand: ``dense``, ``fp8`` or ``nvfp4``."""
    shape: torch.Size
    dtype: torch.dtype
    """Dtype of the elements; for NVFP4, of the block scales."""
    device: torch.device
    requires_grad: bool = False
    flags: tuple[str, ...] = ()
    """Flags of the query that follow from this operand."""


class SwigluCall(NamedTuple):
    """Checked arguments of :func:`swiglu`."""

    x: Operand
    """Rows ``[M, K]``, of any strides."""
    w_gate: Operand
    """Weight of the gate, ``[N, K]``; the first N rows of ``stacked`` if that is given."""
    w_up: Operand
    """Weight of the up projection, ``[N, K]``, of the same kind."""
    stacked: Operand | None
    """Stacked weights ``[2 N, K]`` in one matrix, the gate's rows first, or None. It sets the query's flag ``stacked``."""
    key: Query
    """Dispatch key."""
    constant_weights: bool = False
    """Promise that no work still running on the GPU writes the weights; see :func:`swiglu`. It is a flag of the query."""

    def query(self) -> Query:
        """Return the dispatch key."""
        return self.key

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the result."""
        return self.key.dtype


def facts(name: str, operand: object) -> Facts:
    """Return the properties of a plain or quantized operand; raise if it is of another type or its dtypes are wrong.

    Both classes of quantized operands accept float64 tensors as well, for the oracle. A call does not, so that dtypes are
    checked here.
    """
    if isinstance(operand, Fp8Tensor):
        flags = ("row_scales",) * operand.per_row
        checks.dtype(name, operand.values, (torch.float8_e4m3fn,))
        checks.dtype(f"the scale of {name}", operand.scale, (torch.float32,))
        return Facts(name, "fp8", operand.shape, operand.values.dtype, operand.values.device, _requires_grad(operand), flags)
    if isinstance(operand, NVFP4Tensor):
        flags = ("swizzled_scales",) * operand.swizzled
        checks.dtype(f"the scales of {name}", operand.scales, (torch.float8_e4m3fn,))
        return Facts(name, "nvfp4", operand.shape, operand.scales.dtype, operand.codes.device, _requires_grad(operand), flags)
    if not isinstance(operand, torch.Tensor):
        raise ArgumentError(f"{name} is {type(operand).__name__}; it must be a torch.Tensor, an Fp8Tensor or an NVFP4Tensor.")
    return Facts(name, "dense", *checks.facts(name, operand))


def _requires_grad(operand: Bundle) -> bool:
    """Return whether any tensor of a quantized operand requires gradients."""
    return any(tensor.requires_grad for tensor in operand.tensors().values())


def bind(
    x: Operand,
    w_gate: Operand,
    w_up: Operand | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    constant_weights: bool = False,
    names: tuple[str, str, str] = _NAMES,
) -> SwigluCall:
    """Check the arguments of :func:`swiglu` and return the call; ``names`` are the caller's names of the three operands."""
    if not isinstance(constant_weights, bool):
        raise ArgumentError(f"constant_weights is {type(constant_weights).__name__}; it must be True or False.")
    up = None if w_up is None else facts(names[2], w_up)
    key = key_of(facts(names[0], x), facts(names[1], w_gate), up, out_dtype, torch.is_grad_enabled(), constant_weights)
    if isinstance(x, torch.Tensor) and x.dim() > 2:
        x = x.flatten(0, -2)
    if w_up is not None:
        return SwigluCall(x, w_gate, w_up, None, key, constant_weights)
    half = key.sizes[1]
    if isinstance(w_gate, torch.Tensor):
        return SwigluCall(x, w_gate[:half], w_gate[half:], w_gate, key, constant_weights)
    return SwigluCall(x, w_gate.rows(0, half), w_gate.rows(half, 2 * half), w_gate, key, constant_weights)


@remembered
def key_of(
    x: Facts, w_gate: Facts, w_up: Facts | None, out_dtype: torch.dtype | None, grad_enabled: bool, constant_weights: bool
) -> Query:
    """Run all checks that need no element values, and return the dispatch key.

    The result is cached by the arguments (``@remembered``), so that calls of equal shapes and dtypes are checked once.
    """
    if len(x.shape) < 2:
        raise ShapeError(x.name, got=x.shape, want="[..., K], a tensor of at least 2 dimensions")
    weights = (w_gate,) if w_up is None else (w_gate, w_up)
    form = _form(x, weights)
    dtype = _result_dtype(form, x, weights, out_dtype)
    columns = _columns(x, weights)
    inner = x.shape[-1]
    if form == "fp8":  # torch._scaled_mm, which variants with PyTorch's float8 products call, needs K and N in multiples of 16
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
    # With constant weights some variants begin earlier. So the dispatcher looks for times that were measured with them.
    flags += ("constant_weights",) * constant_weights
    # ``fixed`` makes plain integers of sizes that are symbolic while a call is traced, except M.
    return Query("swiglu", str(x.device), dtype, fixed(math.prod(x.shape[:-1]), columns, inner, free=1), grad, flags)


def _form(x: Facts, weights: Sequence[Facts]) -> str:
    """Return the format of the operands; raise an error that lists the formats if they make none."""
    gate, *up = weights
    if up and up[0].kind != gate.kind:
        said = f"{up[0].name} is {_called(up[0].kind)} and {gate.name} {_called(gate.kind)}"
        raise ArgumentError(f"{said}; both must be of one kind.")
    if (x.kind, gate.kind) not in FORMATS:
        known = "; ".join(f"{_called(one)} with {_called(other)}" for one, other in FORMATS)
        said = f"{x.name} is {_called(x.kind)} and {gate.name} {_called(gate.kind)}"
        raise ArgumentError(f"{said}; swiglu takes these pairs of {x.name} and weights: {known}.")
    return FORMATS[x.kind, gate.kind]


def _called(kind: str) -> str:
    """Return the name of an operand kind for a message."""
    return {"dense": "a torch.Tensor", "fp8": "an Fp8Tensor", "nvfp4": "an NVFP4Tensor"}[kind]


def _result_dtype(form: str, x: Facts, weights: Sequence[Facts], wanted: torch.dtype | None) -> torch.dtype:
    """Check the dtypes of the operands and return that of the result."""
    if form in _RESULTS:
        if wanted is not None and wanted not in _RESULTS[form]:
            names = " or ".join(str(each).removeprefix("torch.") for each in _RESULTS[form])
            raise DTypeError("out_dtype", got=wanted, want=names)
        return wanted or _RESULTS[form][0]
    if x.dtype not in (checks.FLOATS if form == "dense" else _LOW):
        names = "float16, bfloat16 or float32" if form == "dense" else "float16 or bfloat16 beside NVFP4 weights"
        raise DTypeError(x.name, got=x.dtype, want=names)
    for weight in weights:
        if form == "dense" and weight.dtype != x.dtype:
            raise DTypeError(weight.name, got=weight.dtype, want=f"{str(x.dtype).removeprefix('torch.')}, the dtype of {x.name}")
    if wanted not in (None, x.dtype):
        raise DTypeError("out_dtype", got=wanted, want=f"{str(x.dtype).removeprefix('torch.')}, the dtype of x, or None")
    return x.dtype


def _columns(x: Facts, weights: Sequence[Facts]) -> int:
    """Check the shapes and devices of the weights and return N."""
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
    # Swizzled scales come in atoms of 128 rows. The stacked weights are cut after N rows, which must not be inside an atom.
    if "swizzled_scales" in gate.flags and rows // 2 % ATOM_ROWS:
        said = f"[2 N, K] with N a multiple of {ATOM_ROWS} where its scales are swizzled; pass plain() of it"
        raise ShapeError(gate.name, got=gate.shape, want=said)
    return rows // 2


@operation(
    dimensions=("M", "N", "K"),
    outputs=("h",),
    bind=bind,
    planned=True,
    # Options of a case and their defaults, for the input maker in reference.py, which draws the arguments of tests and studies.
    # ``format`` is a value of FORMATS; ``codes`` selects what NVFP4 codes are drawn.
    options={
        "format": "dense",
        "stacked": False,
        "row_scales": False,
        "swizzled_scales": False,
        "codes": "model",
        "constant_weights": False,
    },
    # Variants by device type for calls near which nothing was measured, after those that variants/hopper.py prefers.
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
    """Compute the gated half of a SwiGLU MLP: two matrix products of the same rows, and SiLU of one as the gate of the other.

        h = silu(x w_gate^T) * (x w_up^T)

    The result is differentiable in ``x`` and the weights if all three are plain tensors. Sums are in float32, except that
    Hopper's tensor cores sum float8 products in fewer bits. A value that a 16-bit result cannot hold becomes infinite.
    Variants that use PyTorch's matrix products round each of them to the dtype of the result before the gate, except to float16
    with quantized operands. In these variants a product of plain float16 tensors that float16 cannot hold is infinite, and the
    result may be NaN.

    Args:
        x: Rows, shape ``[..., K]``, float16, bfloat16 or float32; or shape ``[M, K]`` as :class:`Fp8Tensor` or
            :class:`NVFP4Tensor`.
        w_gate: Weight of the gate, shape ``[N, K]``, as ``torch.nn.Linear`` holds it. It has the dtype of a plain ``x``, is an
            :class:`Fp8Tensor` like ``x``, or is an :class:`NVFP4Tensor` with ``x`` in NVFP4 or 16 bits. Shape ``[2 N, K]``, the
            gate's rows first, if ``w_up`` is not given.
        w_up: Weight of the up projection, shape ``[N, K]``, of the kind and dtype of ``w_gate``. Defaults to the second half of
            ``w_gate``.
        out_dtype: Dtype of the result if ``x`` is quantized: bfloat16 (default for float8), float16 (default for NVFP4) or
            float32. A plain ``x`` determines the dtype.
        constant_weights: Promise of the caller that no work still running on the GPU writes the weights, as in inference. A
            launch may then read them before the previous launch has ended. Results are the same; if the promise is broken, they
            are undefined.
        variant: Name from ``swiglu.variants``, or ``"auto"`` for the fastest variant measured near this call.

    Returns:
        ``h``, shape ``[..., N]``.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: An argument does not fit. The message names it, its value and the
            requirement.
        UnknownVariant: There is no variant of that name.
        VariantUnsupported: The named variant cannot run this call. The message gives the reason and the variants that can.

    Source: the write-up "dual GEMM with a SiLU-mul epilogue", whose figures studies/dual-gemm-swiglu.toml quotes; Shazeer, GLU
    Variants Improve Transformer (2020).
    """
    x, w_gate, w_up = _under_autocast(x, w_gate, w_up)
    return run(x, bind(x, w_gate, w_up, out_dtype=out_dtype, constant_weights=constant_weights), variant)


def _under_autocast(x: Operand, w_gate: Operand, w_up: Operand | None) -> tuple[Operand, Operand, Operand | None]:
    """Return the operands; under ``torch.autocast``, plain tensors are cast to the autocast dtype."""
    low = low_dtype(x)
    if low is None:
        return x, w_gate, w_up
    return cast(x, low), cast(w_gate, low), cast(w_up, low)


def run(x: Operand, call: SwigluCall, variant: str) -> torch.Tensor:
    """Run a checked call by a variant; return the result with the leading dimensions of the caller's ``x``.

    Autocast is off meanwhile: the operands have been cast, and it must not lower a variant's float32 products.
    """
    with without_autocast(torch.device(call.key.device)):
        (h,) = dispatch.run(swiglu, call, variant)
    return h.unflatten(0, x.shape[:-1]) if len(x.shape) > 2 else h


@swiglu.shapes
def result_shapes(call: SwigluCall) -> Shapes:
    """Return the shape of ``h``, ``[M, N]``."""
    return ((call.x.shape[0], call.w_gate.shape[0]),)
