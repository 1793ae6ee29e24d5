"""Oracle of ``projections``, inputs and dispatch keys of its cases, and a control.

The control is a part of the operation that studies time in addition: the product with the whole packed weight, without bias and
activations. The workbench and other code that examines an operation's cases call these functions through the operation.
``cost.py`` asks :func:`segments_of`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from onelaunch.checks import Facts
from onelaunch.errors import ArgumentError
from onelaunch.operation import Case, Cost, Query, Reading
from onelaunch.ops.projections.contract import ProjectionsCall, key_of, projections
from onelaunch.ops.projections.layout import Segment, layout_of, read_layout
from onelaunch.wording import listing

CHAINS = ("normalized", "gla")
"""Names that the option ``segments`` accepts; any other string is the code of a layout, such as ``2x20:l2norm,3x7:silu``.

``normalized``: q and k normalized, v, a gate, a decay per head by a sigmoid, as in the write-up whose figures
studies/058-projection-chain.toml quotes. ``gla``: q, k and v as they are, a gate, and log-decays per channel with a bias, as in
fla's GLA. The option ``gate`` names the activation of the gate of both.
"""

GATES = ("silu", "none")
"""Activations that the option ``gate`` accepts."""


@projections.oracle
def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    segments: Sequence[Segment],
    *,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, ...]:
    """Compute the results segment by segment, in the dtype of the arguments (float64 in verification)."""
    results, row, used = [], 0, 0
    for segment in segments:
        z = x @ weight[row : row + segment.width].mT
        row += segment.width
        if segment.bias and bias is not None:
            z = z + bias[used : used + segment.width]
            used += segment.width
        z = z.reshape(*x.shape[:-1], segment.heads, segment.head_size)
        if segment.activation == "l2norm":
            z = z / (z.square().sum(-1, keepdim=True) + eps).sqrt()
        elif segment.activation == "silu":
            z = z * torch.sigmoid(z)
        elif segment.activation == "sigmoid":
            z = torch.sigmoid(z)
        elif segment.activation == "logsigmoid":
            z = F.logsigmoid(z) / segment.normalizer
        results.append(z.reshape(*x.shape[:-1], *segment.shape))
    return tuple(results)


def segments_of(case: Case) -> tuple[Segment, ...]:
    """Return the segments that a case names, with its sizes; a layout's code gives sizes of its own."""
    chain, gate = projections.option(case, "segments"), projections.option(case, "gate")
    heads, keys, values = (case.sizes[name] for name in ("H", "K", "V"))
    if gate not in GATES:
        raise ArgumentError(f"gate is {gate!r}; it must be one of {listing(GATES)}.")
    if chain == "normalized":
        return (
            Segment("q", heads, keys, "l2norm"),
            Segment("k", heads, keys, "l2norm"),
            Segment("v", heads, values),
            Segment("gate", heads, values, gate),
            Segment("decay", heads, 1, "sigmoid"),
        )
    if chain == "gla":
        return (
            Segment("q", heads, keys),
            Segment("k", heads, keys),
            Segment("v", heads, values),
            Segment("gate", heads, values, gate),
            Segment("gk", heads, keys, "logsigmoid", normalizer=16.0, bias=True),
        )
    if not isinstance(chain, str) or "x" not in chain:
        raise ArgumentError(f"segments is {chain!r}; it must be one of {listing(CHAINS)}, or codes such as 2x20:l2norm,3x7:silu.")
    return tuple([span.segment for span in read_layout(chain).spans])


@projections.inputs
def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Reading:
    """Return random x, weight and bias such that the product and the bias both have about unit variance."""
    segments = segments_of(case)
    layout = layout_of(segments)
    batch, length, inner = (case.sizes[name] for name in ("B", "T", "D"))

    def drawn(*shape: int) -> torch.Tensor:
        """Return standard normal random numbers."""
        return torch.randn(shape, device=device, generator=generator)

    x = drawn(batch, length, inner).to(case.dtype)
    weight = (drawn(layout.rows, inner) / math.sqrt(max(inner, 1))).to(case.dtype)
    arguments = {"x": x, "weight": weight, "segments": segments}
    if not layout.biases:
        return Reading(arguments, ("x", "weight"))
    return Reading({**arguments, "bias": drawn(layout.biases).to(case.dtype)}, ("x", "weight", "bias"))


@projections.queries
def make_query(case: Case, device: str, grad: bool) -> Query:
    """Return the dispatch key of a case, through the checks of a call."""
    layout = layout_of(segments_of(case))
    batch, length, inner = (case.sizes[name] for name in ("B", "T", "D"))

    def facts(*shape: int) -> Facts:
        """Return the facts of a tensor of this shape."""
        return Facts(torch.Size(shape), case.dtype, torch.device(device), requires_grad=grad)

    bias = facts(layout.biases) if layout.biases else None
    return key_of(facts(batch, length, inner), facts(layout.rows, inner), bias, layout, grad_enabled=grad)


def _wide_cost(case: Case) -> Cost:
    """Return the minimum cost of the control: the product with the packed weight."""
    rows, layout = case.sizes["B"] * case.sizes["T"], layout_of(segments_of(case))
    written = rows * layout.rows * case.dtype.itemsize
    moved = (rows + layout.rows) * case.sizes["D"] * case.dtype.itemsize + written
    return Cost(2 * rows * case.sizes["D"] * layout.rows, moved, 1, written=written)


def _wide(
    x: torch.Tensor,
    weight: torch.Tensor,
    segments: Sequence[Segment],
    *,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Return the product with the packed weight."""
    return x @ weight.mT


@projections.control("wide_gemm_alone", oracle=_wide, cost=_wide_cost)
def wide_gemm_alone(call: ProjectionsCall) -> torch.Tensor:
    """Multiply by the packed weight with PyTorch: the time of the operation if activations were free."""
    return F.linear(call.x, call.weight)
