"""The PyTorch operator of ``projections``'s own kernels, one for all of them, and its gradients.

``projections`` computes z = x W^T for a packed weight ``[N, D]`` whose rows form segments, adds each segment's bias and applies
its activation. ``onelaunch::projections_forward`` runs the launches of the variant that its argument names. For a backward pass
it saves x, the weight, and what the gradients of the activations are computed from. The backward pass is one launch, which
writes the gradients of z of all segments into one matrix dz, and one product with dz for each of x and the weight. If x has few
columns (``configure_low_rank.py``), a second launch computes all gradients from dz instead.

Arguments of an operator must have a type that PyTorch knows. So a layout (widths, activations and offsets of the segments) is
passed as a string, its ``code``, such as ``16x128:silu,4x64:logsigmoid/16.0:bias``. ``read_layout`` returns the layout of a
code.

Our own variants call :func:`compute`. ``gla_layer``, which has an operator of its own, calls the functions in :data:`launches`.
These functions, in ``variants``, and ``launch_hopper.py`` take a :class:`Wanted` and return a :class:`Packed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, TypeAlias

import torch
from torch.nn import functional as F

from onelaunch.launch.by_variant import Launches
from onelaunch.launch.operator import Operator
from onelaunch.ops.projections import fakes
from onelaunch.ops.projections.configure_low_rank import takes_low_rank
from onelaunch.ops.projections.contract import ProjectionsCall
from onelaunch.ops.projections.layout import Layout, read_layout


class Wanted(NamedTuple):
    """Properties of a call that its launches depend on, in addition to their operands."""

    layout: Layout
    """Offsets of all segments in the packed tensors."""
    eps: float
    """Number that is added to the sum of squares of a normalized head."""
    keep: bool
    """Flag: a backward pass will follow."""


class Packed(NamedTuple):
    """Results of a variant's launches."""

    y: torch.Tensor
    """Packed result ``[M, layout.pitch]``, contiguous, dtype of x.

    Segments begin at multiples of 8 columns. Columns between segments need not be written.
    """
    rstd: torch.Tensor | None = None
    """``1 / sqrt(sum(z^2) + eps)`` of normalized heads, ``[M, layout.norms]`` float32, contiguous.

    ``None`` unless ``keep`` is set and there are such heads.
    """
    kept: torch.Tensor | None = None
    """Pre-activations z of segments with SiLU, bias included, ``[M, layout.kept]``, contiguous, dtype of x.

    ``None`` unless ``keep`` is set and there are such segments.
    """


Run: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Wanted], Packed]
"""Type of a function that runs a variant's launches, from x ``[M, D]``, the weight ``[N, D]`` and the packed bias."""

launches: Launches[Run] = Launches()
"""Functions that run a variant's launches, by the variant's name."""


def run_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, code: str, eps: float, keep: bool, variant: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the variant of this name; return the packed result ``[..., pitch]``, rstd and the saved pre-activations.

    The last two have no elements if they are not saved. ``code`` is the layout's code, ``x`` is ``[..., D]``, and ``keep`` says
    that a backward pass will follow.
    """
    layout = read_layout(code)
    y, rstd, kept = launches[variant](x.reshape(-1, x.shape[-1]), weight, bias, Wanted(layout, eps, keep))
    y = y.view(*x.shape[:-1], layout.pitch)
    return y, x.new_empty(0, dtype=torch.float32) if rstd is None else rstd, x.new_empty(0) if kept is None else kept


def run_backward(
    dys: Sequence[Optional[torch.Tensor]],  # noqa: UP045 - PyTorch's schema inference needs Optional
    y: torch.Tensor,
    rstd: torch.Tensor,
    kept: torch.Tensor,
    x: Optional[torch.Tensor],  # noqa: UP045
    weight: Optional[torch.Tensor],  # noqa: UP045
    code: str,
    wants: Sequence[bool],
) -> list[torch.Tensor]:
    """Return dz ``[M, gradient_pitch]`` and the sums for the biases, or with ``x`` and ``weight`` all gradients.

    The sums of the columns that have a bias, ``[biases]`` float32, have no elements unless ``wants`` asks for the last gradient.
    dz has N columns in the order of the weight's rows, and zeros behind them; ``gradient_pitch`` is N rounded up to a multiple of
    8. With x ``[..., D]`` and the weight ``[N, D]``, for few D, dz is used here, and the results are the gradients of the rows of
    x ``[M, D]``, of the weight ``[N, D]``, and of a bias of each column ``[N]``, as ``wants`` says for each. One that is not
    wanted has no elements.

    ``dys`` are the gradients of the segments' results, with any strides; ``None`` means zeros. ``y``, ``rstd`` and ``kept`` are
    the results of :func:`run_forward`. The derivative of SiLU is computed from ``kept``, those of the other activations from
    their results in ``y``.
    """
    # These modules import Triton, which is an optional dependency.
    from onelaunch.ops.projections import launch, launch_low_rank

    layout = read_layout(code)
    wants_x, wants_weight, wants_bias = wants
    at_once = x is not None and weight is not None
    sums = wants_bias and not at_once
    dz, found_sums = launch.activation_gradients(dys, y.view(-1, layout.pitch), rstd, kept, layout, sums=sums)
    if x is None or weight is None:
        return [dz, y.new_empty(0, dtype=torch.float32) if found_sums is None else found_sums]
    rows, dz = x.reshape(-1, x.shape[-1]), dz[:, : layout.rows]
    found = launch_low_rank.low_rank_gradients(dz, rows, weight, (wants_x, wants_weight, wants_bias))
    return [y.new_empty(0) if each is None else each for each in found]


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Save x, the weight and all results of :func:`run_forward`: the packed result, rstd and the pre-activations."""
    x, weight, _, ctx.code, *_ = inputs
    ctx.save_for_backward(x, weight, *output)
    ctx.set_materialize_grads(False)  # a segment whose result was not used costs no memory


def gradients(ctx: Any, backward: Any, *dys: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return a gradient or ``None`` for every input of :func:`run_forward`: x, the weight, the bias, and four constants.

    ``backward`` is :func:`run_backward` or its registered operator. ``dys`` has one entry per segment, since :func:`views` cuts
    the packed result into one view per segment. PyTorch multiplies unless one launch takes the call (``configure_low_rank.py``).
    """
    x, weight, y, rstd, kept = ctx.saved_tensors
    layout = read_layout(ctx.code)
    wants_x, wants_weight, wants_bias = wants = [bool(each) for each in ctx.needs_input_grad[:3]]
    nothing = (None, None, None, None)  # of the constants
    if takes_low_rank(x.device, x.dtype, int(x.shape[-1]), layout.rows):
        dx, dweight, sums = backward(list(dys), y, rstd, kept, x, weight, ctx.code, wants)
        dbias = _of_biases(layout, lambda columns: sums[columns]) if wants_bias else None
        return dx.view(x.shape) if wants_x else None, dweight if wants_weight else None, dbias, *nothing
    dz, sums = backward(list(dys), y, rstd, kept, None, None, ctx.code, wants)
    if not dz.is_cuda:
        dz = dz[:, : layout.rows]  # [M, N]
    dx, dweight = _products(dz, x, weight, wants_x=wants_x, wants_weight=wants_weight)
    return dx, dweight, sums.to(dz.dtype) if wants_bias else None, *nothing


def _products(
    dz: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, wants_x: bool, wants_weight: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x and of the weight ``[N, D]`` that are wanted, by a product with dz ``[M, at least N]`` for each.

    dz has zeros behind its N columns, if any follow: with a number that is no multiple of 8, cuBLAS takes kernels that are two to
    four times as slow. For the gradient of x a copy of the weight gets as many rows of zeros.
    """
    rows, columns = weight.shape[0], dz.shape[1]
    dx = dweight = None
    if wants_x:
        dx = (dz @ (weight if columns == rows else F.pad(weight, (0, 0, 0, columns - rows)))).view(x.shape)
    if wants_weight:
        dweight = (dz.mT @ x.reshape(-1, x.shape[-1]))[:rows]
    return dx, dweight


def _of_biases(layout: Layout, gradient_of: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """Return the gradient of the packed bias, from a function from the columns of a segment to the gradient of its bias."""
    spans = [span for span in layout.spans if span.segment.bias]
    parts = [gradient_of(slice(span.row, span.row + span.segment.width)) for span in spans]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def views(inputs: tuple[Any, ...], packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the segments' results, as views of the packed result. ``inputs`` are those of :func:`run_forward`."""
    return read_layout(inputs[3]).cut(packed)


backward = Operator("projections_backward", run_backward, fake=fakes.backward)
forward = Operator(
    "projections_forward",
    run_forward,
    fake=fakes.forward,
    save=save,
    gradients=gradients,
    backward=backward,
    views=views,
)


def compute(call: ProjectionsCall, variant: str) -> tuple[torch.Tensor, ...]:
    """Return all results, computed by the variant of this name; differentiable."""
    grad = call.query().grad
    return forward(call.x, call.weight, call.bias, call.layout.code, call.eps, grad, variant, grad=grad)
