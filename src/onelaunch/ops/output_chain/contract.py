"""The operation ``output_chain``: its definition, its arguments and their checks.

Users, the gated layers of ``onelaunch.nn`` and ``gla_layer`` call :func:`output_chain`; the variants take an
:class:`OutputChainCall`. ``reference.py``, ``cost.py``, ``probes.py`` and ``variants`` register their parts with the operation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from onelaunch import checks, dispatch
from onelaunch.checks import Facts
from onelaunch.errors import ArgumentError, ShapeError
from onelaunch.operation import Query, Shapes, constant, fixed, operation, remembered
from onelaunch.operation.autocast import cast, low_dtype, without_autocast


class OutputChainCall(NamedTuple):
    """Checked arguments of :func:`output_chain`. Tensors have any strides."""

    h: torch.Tensor
    """Input, before the norm, ``[..., H, V]``."""
    gate: torch.Tensor | None
    """Gate, ``[..., H, V]``, dtype of ``h``; before SiLU unless ``activated``."""
    norm_weight: torch.Tensor | None
    """Weight of the norm, ``[V]``, dtype of ``h`` or float32."""
    w_out: torch.Tensor
    """Output weight, ``[D, H * V]``, dtype of ``h``."""
    bias: torch.Tensor | None
    """Bias, ``[D]``, dtype of ``h``."""
    activated: bool
    """Flag that the gate is activated already."""
    eps: float
    """Number that the norm adds to the mean of squares."""
    key: Query
    """Dispatch key of the call: its device, dtype, sizes and flags, by which the dispatcher chooses a variant."""

    def query(self) -> Query:
        """Return the dispatch key."""
        return self.key


def bind(
    h: torch.Tensor,
    gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    w_out: torch.Tensor,
    *,
    activated: bool = False,
    eps: float = 1e-5,
    bias: torch.Tensor | None = None,
) -> OutputChainCall:
    """Check the arguments and return the call; raises the errors that :func:`output_chain` lists."""
    if not isinstance(activated, bool):
        raise ArgumentError(f"activated is {activated!r}; it must be True or False.")
    if activated and gate is None:
        raise ArgumentError("activated is True, but gate is None; pass the activated gate, or leave activated out.")
    eps = constant(eps)
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not (math.isfinite(eps) and eps >= 0):
        raise ArgumentError(f"eps is {eps!r}; it must be a number of at least 0.")
    key = key_of(
        checks.facts("h", h),
        checks.optional_facts("gate", gate),
        checks.optional_facts("norm_weight", norm_weight),
        checks.facts("w_out", w_out),
        checks.optional_facts("bias", bias),
        activated,
        torch.is_grad_enabled(),
    )
    return OutputChainCall(h, gate, norm_weight, w_out, bias, activated, float(eps), key)


@remembered
def key_of(
    h: Facts,
    gate: Facts | None,
    norm_weight: Facts | None,
    w_out: Facts,
    bias: Facts | None,
    activated: bool,
    grad_enabled: bool,
) -> Query:
    """Make all checks that need no values, and return the dispatch key; both are cached by these facts.

    Of the leading dimensions of h, the last is T and B is the product of the others.
    """
    if len(h.shape) < 3:
        raise ShapeError("h", got=h.shape, want="[..., H, V], a tensor of at least 3 dimensions")
    checks.dtype("h", h, checks.FLOATS)
    heads, values = h.shape[-2:]
    if heads == 0 or values == 0:
        raise ShapeError("h", got=h.shape, want="[..., H, V] of at least one head and one channel")
    beside = f"h {list(h.shape)}"
    if gate is not None:
        checks.shape("gate", gate, h.shape, "[..., H, V]", beside)
    if norm_weight is not None:
        checks.shape("norm_weight", norm_weight, (values,), "[V]", beside)
        allowed = (h.dtype,) if h.dtype is torch.float32 else (h.dtype, torch.float32)
        checks.dtype("norm_weight", norm_weight, allowed, ", the dtype of h or float32")
        checks.device("norm_weight", norm_weight, h.device)
    checks.rank("w_out", w_out, "[D, H * V]")
    checks.shape("w_out", w_out, (w_out.shape[0], heads * values), "[D, H * V]", beside)
    if bias is not None:
        checks.shape("bias", bias, (w_out.shape[0],), "[D]", f"w_out {list(w_out.shape)}")
    for name, value in (("gate", gate), ("w_out", w_out), ("bias", bias)):
        if value is not None:
            checks.dtype(name, value, (h.dtype,), ", the dtype of h")
            checks.device(name, value, h.device)
    batch, length = math.prod(h.shape[:-3]), h.shape[-3]
    given = {
        "gate": gate is not None and not activated,
        "activated": activated,
        "norm_weight": norm_weight is not None,
        "bias": bias is not None,
    }
    grad = grad_enabled and checks.grad_wanted(h, gate, norm_weight, w_out, bias)
    sizes = fixed(batch, length, heads, values, w_out.shape[0], free=2)
    return Query("output_chain", str(h.device), h.dtype, sizes, grad, tuple([name for name, there in given.items() if there]))


@operation(
    dimensions=("B", "T", "H", "V", "D"),
    outputs=("out",),
    bind=bind,
    planned=True,
    # Options of a case, from which reference.py makes inputs. Then the variants to prefer where nothing was measured.
    options={"gate": "silu", "norm_weight": "same", "bias": False, "eps": 1e-5},
    defaults={"cuda": ("norm_gate", "unfused"), "cpu": ("unfused",)},
)
def output_chain(
    h: torch.Tensor,
    gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    w_out: torch.Tensor,
    *,
    activated: bool = False,
    eps: float = 1e-5,
    bias: torch.Tensor | None = None,
    variant: str = dispatch.AUTO,
) -> torch.Tensor:
    """Compute the output of a linear-attention layer: RMSNorm of every head, times the gate, and the output projection.

        a = h / sqrt(mean(h^2) + eps) * norm_weight * silu(gate);  out = a w_out^T + bias

    The mean is over the channels of a head. Differentiable in all tensors. Sums are in float32; ``a`` is rounded to the dtype
    of ``h`` before the product. Under ``torch.autocast`` tensors are cast to the autocast dtype, ``norm_weight`` to float32.

    Args:
        h: ``[..., H, V]`` float16, bfloat16 or float32, of at least three dimensions; usually ``o [B, T, H, V]`` of
            :func:`onelaunch.ops.gla`.
        gate: ``[..., H, V]``, dtype of ``h``: before SiLU, unless ``activated``. ``None`` for a layer without a gate. A view of
            the packed result of :func:`onelaunch.ops.projections` is read without a copy.
        norm_weight: ``[V]``, dtype of ``h`` or float32, the same for all heads; ``None`` for a norm without weight.
        w_out: ``[D, H * V]``, dtype of ``h``: rows as :class:`torch.nn.Linear` holds them.
        activated: whether ``gate`` is activated already, by any function. Its gradient is that of the given tensor.
        eps: constant that is added to the mean of squares; at least 0. The default is that of fla's layers.
        bias: bias of the projection, ``[D]``, dtype of ``h``.
        variant: a name from ``output_chain.variants``, or ``"auto"`` for the fastest variant measured near this call.

    Returns:
        ``out [..., D]`` in the dtype of ``h``.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: an argument is invalid; the message names it, what it was and
            what it must be.
        UnknownVariant: there is no variant of that name.
        VariantUnsupported: the named variant cannot run this call; the message says why, and which variants can.

    Source: experiment 058; the norm and the gate are those of ``fla.modules.FusedRMSNormGated``.
    """
    low = low_dtype(h)
    if low is not None:
        h, gate, w_out, bias = cast(h, low), cast(gate, low), cast(w_out, low), cast(bias, low)
        norm_weight = cast(norm_weight, torch.float32)
    call = bind(h, gate, norm_weight, w_out, activated=activated, eps=eps, bias=bias)
    with without_autocast(call.h.device):
        (out,) = dispatch.run(output_chain, call, variant)
    return out


@output_chain.shapes
def result_shapes(call: OutputChainCall) -> Shapes:
    """Return the shape of ``out [..., D]``."""
    return ((*call.h.shape[:-2], call.w_out.shape[0]),)
