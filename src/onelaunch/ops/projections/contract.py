"""The operation ``projections``: its public function, the checks of its arguments, and the dispatch key.

A packed weight has the rows of several projections of the same input. A segment is the block of rows of one projection. Users,
layers of ``onelaunch.nn`` and ``gla_layer`` call :func:`projections`; the variants take a :class:`ProjectionsCall`, and their
predicates ask :func:`layout_in`. ``reference.py``, ``cost.py``, ``probes.py`` and ``variants`` register their parts with the
operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from onelaunch import checks, dispatch
from onelaunch.checks import Facts
from onelaunch.errors import ArgumentError, ShapeError
from onelaunch.operation import Query, Shapes, constant, fixed, operation, remembered
from onelaunch.operation.autocast import cast, low_dtype, without_autocast
from onelaunch.ops.projections.layout import Layout, Segment, layout_of, read_layout


class ProjectionsCall(NamedTuple):
    """Checked arguments of :func:`projections`. Tensors have any strides."""

    x: torch.Tensor
    """Input, ``[..., D]``."""
    weight: torch.Tensor
    """Packed weight, ``[N, D]``, dtype of ``x``."""
    bias: torch.Tensor | None
    """Packed bias, ``[layout.biases]``, dtype of ``x``."""
    layout: Layout
    """Offsets of the segments in the weight, the bias and the results."""
    eps: float
    """Number that is added to the sum of squares of a normalized head."""
    key: Query
    """Dispatch key."""

    def query(self) -> Query:
        """Return the dispatch key."""
        return self.key


def bind(
    x: torch.Tensor,
    weight: torch.Tensor,
    segments: Sequence[Segment],
    *,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> ProjectionsCall:
    """Check the arguments and return the call; raises the errors that :func:`projections` lists."""
    layout = layout_of(_checked_segments(segments))
    eps = constant(eps)
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not (math.isfinite(eps) and eps >= 0):
        raise ArgumentError(f"eps is {eps!r}; it must be a number of at least 0.")
    given = (checks.facts("x", x), checks.facts("weight", weight), checks.optional_facts("bias", bias))
    return ProjectionsCall(x, weight, bias, layout, float(eps), key_of(*given, layout, torch.is_grad_enabled()))


def _checked_segments(segments: object) -> tuple[Segment, ...]:
    """Return the segments as a tuple; raise :class:`ArgumentError` unless they are segments with different names."""
    if isinstance(segments, (Segment, str)) or not isinstance(segments, Sequence):
        raise ArgumentError(f"segments is {type(segments).__name__}; it must be a sequence of onelaunch.ops.Segment.")
    if not segments:
        raise ArgumentError("segments is empty; it must hold at least one onelaunch.ops.Segment.")
    names: list[str] = []
    for index, each in enumerate(segments):
        if not isinstance(each, Segment):
            raise ArgumentError(f"segments[{index}] is {type(each).__name__}; it must be a onelaunch.ops.Segment.")
        if each.name in names:
            raise ArgumentError(f"segments[{index}] is called {each.name!r}, as another one is; each needs a name of its own.")
        names.append(each.name)
    return tuple(segments)


@remembered
def key_of(x: Facts, weight: Facts, bias: Facts | None, layout: Layout, grad_enabled: bool) -> Query:
    """Make all checks that need no values, and return the dispatch key.

    Its flag is the layout's code, a string that gives heads, head size, activation, normalizer and bias of each segment: all
    that variants need to know of them. Its sizes, B, T, D, H, K and V, tell how similar two calls are. D and T are the last
    two dimensions of x, and B is the product of those before. H and K are the heads and the head size of the first segment,
    and V is the head size of the third, or of the last of fewer.
    """
    if len(x.shape) < 2:
        raise ShapeError("x", got=x.shape, want="[..., D], a tensor of at least 2 dimensions")
    checks.dtype("x", x, checks.FLOATS)
    inner = x.shape[-1]
    checks.rank("weight", weight, "[N, D]")
    if weight.shape[0] != layout.rows:
        parts = " + ".join([f"{span.segment.name} {span.segment.heads}x{span.segment.head_size}" for span in layout.spans])
        said = f"[N, D] = {[layout.rows, inner]}: the segments {parts} add up to {layout.rows} rows, not {weight.shape[0]}"
        raise ShapeError("weight", got=weight.shape, want=said)
    checks.shape("weight", weight, (layout.rows, inner), "[N, D]", f"x {list(x.shape)}")
    if bias is None and layout.biases:
        named = ", ".join([span.segment.name for span in layout.spans if span.segment.bias])
        raise ArgumentError(
            f"bias is None; it must be a tensor of {layout.biases} elements, for the segments that have one: {named}."
        )
    if bias is not None:
        if not layout.biases:
            raise ArgumentError("bias is given, but no segment has one; make a Segment with bias=True, or leave it out.")
        checks.shape("bias", bias, (layout.biases,), "[widths of the segments with a bias]", "segments")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            checks.dtype(name, value, (x.dtype,), ", the dtype of x")
            checks.device(name, value, x.device)
    first, last = layout.spans[0].segment, layout.spans[min(2, len(layout.spans) - 1)].segment
    batch, length = math.prod(x.shape[:-2]), x.shape[-2]
    # ``fixed`` makes plain integers of sizes that are symbolic while a call is traced, except B and T.
    sizes = fixed(batch, length, inner, first.heads, first.head_size, last.head_size, free=2)
    grad = grad_enabled and checks.grad_wanted(x, weight, bias)
    return Query("projections", str(x.device), x.dtype, sizes, grad, (layout.code,))


def layout_in(query: Query) -> Layout:
    """Return the layout that a query encodes; its segments are called ``s0``, ``s1``..."""
    return read_layout(query.flags[0])


def result_names(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the results, which are those of the segments."""
    return tuple([segment.name for segment in arguments["segments"]])


@operation(
    dimensions=("B", "T", "D", "H", "K", "V"),
    outputs=result_names,
    bind=bind,
    planned=True,
    # Options of a case and their defaults, for the input maker in reference.py: names of its CHAINS and GATES.
    options={"segments": "normalized", "gate": "silu"},
    # Variants by device type for calls near which nothing was measured, after the one that variants/hopper.py prefers.
    defaults={"cuda": ("wide_activated", "wide"), "cpu": ("wide",)},
)
def projections(
    x: torch.Tensor,
    weight: torch.Tensor,
    segments: Sequence[Segment],
    *,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    variant: str = dispatch.AUTO,
) -> tuple[torch.Tensor, ...]:
    """Compute all projections of a layer's input at once, each with its activation: queries, keys, values, gates, decays.

        y_s = activation_s(x weight_s^T + bias_s)   for every segment s

    The results are differentiable in ``x``, ``weight`` and ``bias``. The backward pass has one matrix product for each of ``x``
    and ``weight``, except in variants with a product for each segment. Sums are in float32. Variants that multiply with PyTorch
    round them to the dtype of ``x`` before the activation.

    Args:
        x: ``[..., D]`` float16, bfloat16 or float32, of at least two dimensions; usually ``[B, T, D]``.
        weight: ``[N, D]``, dtype of ``x``: rows as :class:`torch.nn.Linear` holds them, those of all segments concatenated in
            order. N is the sum of their widths, ``heads * head_size``.
        segments: the meaning of the rows; see :class:`onelaunch.ops.Segment`.
        bias: the biases of the segments that have one, concatenated, dtype of ``x``.
        eps: constant that ``l2norm`` adds to the sum of squares; at least 0.
        variant: a name from ``projections.variants``, or ``"auto"`` for the fastest variant measured near this call.

    Returns:
        For every segment ``[..., heads, head_size]`` in the dtype of ``x``, or ``[..., heads]`` where ``head_size`` is 1, as
        :func:`onelaunch.ops.gla` takes them. They may be views of one packed result, in which our own variants begin
        every segment at a multiple of 8 columns: channels are contiguous, and tokens are one pitch apart.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: an argument is invalid; the message names it, what it was and
            what it must be.
        UnknownVariant: there is no variant of that name.
        VariantUnsupported: the named variant cannot run this call; the message says why, and which variants can.

    Source: the write-up of experiment 058, whose figures studies/058-projection-chain.toml quotes; the normalization is that of
    ``fla.modules.l2norm``.
    """
    low = low_dtype(x)
    if low is not None:
        x, weight, bias = cast(x, low), cast(weight, low), cast(bias, low)
    call = bind(x, weight, segments, bias=bias, eps=eps)
    with without_autocast(call.x.device):
        return dispatch.run(projections, call, variant)


@projections.shapes
def result_shapes(call: ProjectionsCall) -> Shapes:
    """Return the shape ``[..., heads, head_size]`` of every segment's result, or ``[..., heads]`` where ``head_size`` is 1."""
    segments = [span.segment for span in call.layout.spans]
    return tuple((*call.x.shape[:-1], each.heads, each.head_size)[: None if each.head_size > 1 else -1] for each in segments)
