"""The operation ``rms_norm``: its definition, its arguments and their checks.

Users, ``onelaunch.nn.RMSNorm`` and ``integrations`` call :func:`rms_norm`; the variants take an :class:`RMSNormCall`.
``reference.py``, ``cost.py``, ``probes.py`` and ``variants`` register their parts with the operation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from onelaunch import checks, dispatch
from onelaunch.checks import Facts
from onelaunch.errors import ArgumentError, ShapeError
from onelaunch.operation import Query, Shapes, constant, fixed, operation, remembered
from onelaunch.operation.autocast import without_autocast


class RMSNormCall(NamedTuple):
    """Checked arguments of :func:`rms_norm`. Tensors have any strides."""

    x: torch.Tensor
    """Input, ``[..., D]``."""
    weight: torch.Tensor | None
    """Weight, ``[D]``, dtype of ``x`` or float32."""
    residual: torch.Tensor | None
    """Tensor that is added to ``x`` before the norm, shape of ``x``, dtype of ``x`` or float32."""
    eps: float
    """Number that the norm adds to the mean of squares."""
    key: Query
    """Dispatch key of the call: its device, dtype, sizes and flags, by which the dispatcher chooses a variant."""

    def query(self) -> Query:
        """Return the dispatch key."""
        return self.key


def bind(
    x: torch.Tensor, weight: torch.Tensor | None = None, residual: torch.Tensor | None = None, *, eps: float = 1e-5
) -> RMSNormCall:
    """Check the arguments and return the call; raises the errors that :func:`rms_norm` lists."""
    eps = constant(eps)
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not (math.isfinite(eps) and eps >= 0):
        raise ArgumentError(f"eps is {eps!r}; it must be a number of at least 0.")
    key = key_of(
        checks.facts("x", x),
        checks.optional_facts("weight", weight),
        checks.optional_facts("residual", residual),
        torch.is_grad_enabled(),
    )
    return RMSNormCall(x, weight, residual, float(eps), key)


@remembered
def key_of(x: Facts, weight: Facts | None, residual: Facts | None, grad_enabled: bool) -> Query:
    """Make all checks that need no values, and return the dispatch key; both are cached by these facts.

    The size M is the product of the leading dimensions of x, 1 if there are none.
    """
    if not x.shape:
        raise ShapeError("x", got=x.shape, want="[..., D], a tensor of at least 1 dimension")
    checks.dtype("x", x, checks.FLOATS)
    channels = x.shape[-1]
    if channels == 0:
        raise ShapeError("x", got=x.shape, want="[..., D] of at least one channel")
    beside = f"x {list(x.shape)}"
    if weight is not None:
        checks.shape("weight", weight, (channels,), "[D]", beside)
    if residual is not None:
        checks.shape("residual", residual, x.shape, "[..., D]", beside)
    allowed = tuple(dict.fromkeys((x.dtype, torch.float32)))
    which = ", the dtype of x" + " or float32" * (len(allowed) > 1)
    for name, value in (("weight", weight), ("residual", residual)):
        if value is not None:
            checks.dtype(name, value, allowed, which)
            checks.device(name, value, x.device)
    given = {
        "weight": weight is not None,
        "residual": residual is not None,
        "float32_residual": residual is not None and residual.dtype is not x.dtype,
        "float32_weight": weight is not None and weight.dtype is not x.dtype,
    }
    grad = grad_enabled and checks.grad_wanted(x, weight, residual)
    sizes = fixed(math.prod(x.shape[:-1]), channels, free=1)
    return Query("rms_norm", str(x.device), x.dtype, sizes, grad, tuple([name for name, there in given.items() if there]))


@operation(
    dimensions=("M", "D"),
    outputs=("y", "sum"),
    bind=bind,
    planned=True,
    # Options of a case, from which reference.py makes inputs. Then the variants to prefer where nothing was measured.
    options={"residual": "same", "weight": "same", "eps": 1e-5},
    defaults={"cuda": ("fused", "functional", "eager"), "cpu": ("functional", "eager")},
)
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    variant: str = dispatch.AUTO,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add a residual to rows, and normalize them by their root mean square.

        s = x + residual;  y = s / sqrt(mean(s^2) + eps) * weight

    The mean is over the last dimension. Differentiable in all tensors, through both results. Sums are in float32.
    ``torch.autocast`` casts nothing: the tensors are read as they are.

    Args:
        x: ``[..., D]`` float16, bfloat16 or float32, of at least one dimension; any number of rows, also none.
        weight: ``[D]``, dtype of ``x`` or float32; ``None`` for a norm without weight.
        residual: shape of ``x``, dtype of ``x`` or float32; ``None`` to normalize ``x`` itself.
        eps: constant that is added to the mean of squares; at least 0. The default is that of fla's norms.
        variant: a name from ``rms_norm.variants``, or ``"auto"`` for the fastest variant measured near this call.

    Returns:
        ``y``, shape and dtype of ``x``; and the sum ``s``, shape and dtype of ``residual``, which is the residual of the next
        layer, or ``None`` without ``residual``.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: an argument is invalid; the message names it, what it was and
            what it must be.
        UnknownVariant: there is no variant of that name.
        VariantUnsupported: the named variant cannot run this call; the message says why, and which variants can.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019); the arguments follow ``fla.modules.RMSNorm``.
    """
    call = bind(x, weight, residual, eps=eps)
    with without_autocast(call.x.device):
        y, total = dispatch.run(rms_norm, call, variant)
    return y, total


@rms_norm.shapes
def result_shapes(call: RMSNormCall) -> Shapes:
    """Return the shapes of ``y`` and of the sum."""
    shape = tuple(call.x.shape)
    return shape, None if call.residual is None else shape
