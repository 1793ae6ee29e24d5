"""Oracle of ``linear_rnn``, the inputs that variants are verified on, and controls: the product alone, and reading the weight.

A control is a part of the operation that studies time in addition; calls are never dispatched to it. The workbench and other
code that examines an operation's cases call these functions through the operation.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from onelaunch.operation import Case, Cost, Query, Reading
from onelaunch.ops.gated_scan.reference import differentiable_of, scan_flags, scan_inputs
from onelaunch.ops.gated_scan.reference import reference as scan_reference
from onelaunch.ops.linear_rnn.contract import LinearRNNCall, linear_rnn


@linear_rnn.oracle
def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None = None,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project, then compute the recurrence step by step, in the dtype of the arguments (float64 in verification).

    The final states are returned in any case; they are ignored unless the call asks for them.
    """
    return scan_reference(x @ weight, log_decay, gate, initial_state=initial_state, cu_seqlens=cu_seqlens)


@linear_rnn.inputs
def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Reading:
    """Return random x and weight such that ``v`` has unit variance, and the scan's inputs."""
    batch, length, width, channels = (case.sizes[name] for name in linear_rnn.dimensions)
    x = torch.randn(batch, length, width, device=device, generator=generator).to(case.dtype)
    weight = (torch.randn(width, channels, device=device, generator=generator) / math.sqrt(max(width, 1))).to(case.dtype)
    arguments = scan_inputs(case, linear_rnn.options, (batch, length, channels), device, generator)
    return Reading({"x": x, "weight": weight, **arguments}, ("x", "weight", *differentiable_of(arguments)))


@linear_rnn.queries
def make_query(case: Case, device: str, grad: bool) -> Query:
    """Return the dispatch key of a case."""
    sizes = tuple(case.sizes[name] for name in linear_rnn.dimensions)
    return Query("linear_rnn", device, case.dtype, sizes, grad, scan_flags(case, linear_rnn.options))


def _gemm_cost(case: Case) -> Cost:
    batch, length, width, channels = (case.sizes[name] for name in linear_rnn.dimensions)
    rows = batch * length
    elements = rows * width + width * channels + rows * channels
    return Cost(2 * rows * width * channels, elements * case.dtype.itemsize, 1, written=rows * channels * case.dtype.itemsize)


@linear_rnn.control("gemm_alone", oracle=lambda x, weight, **_: x @ weight, cost=_gemm_cost)
def gemm_alone(call: LinearRNNCall) -> torch.Tensor:
    """Compute only ``x @ weight``, by PyTorch: the time of the layer if scan and gate were free."""
    return call.project()


READ_TILE = 32, 1024
"""Rows and columns of the tiles of the weight whose sums ``weight_alone`` returns; a CTA reads one."""


def _tile_sums(weight: torch.Tensor) -> torch.Tensor:
    """Return the sum of each tile of the weight, the last ones padded with zeros."""
    (rows, columns), (width, channels) = READ_TILE, weight.shape
    whole = F.pad(weight, (0, -channels % columns, 0, -width % rows))
    return whole.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).sum((1, 3))


def _read_cost(case: Case) -> Cost:
    elements = case.sizes["D"] * case.sizes["V"]
    tiles = math.prod(math.ceil(case.sizes[name] / of) for name, of in zip(("D", "V"), READ_TILE, strict=True))
    return Cost(elements, (elements + tiles) * case.dtype.itemsize, 1, written=tiles * case.dtype.itemsize)


@linear_rnn.control("weight_alone", oracle=lambda x, weight, **_: _tile_sums(weight), cost=_read_cost)
def weight_alone(call: LinearRNNCall) -> torch.Tensor:
    """Read only the weight, in one launch: the time of a step of few rows if nothing else took any."""
    if call.weight.device.type != "cuda":
        return _tile_sums(call.weight.float()).to(call.weight.dtype)
    from onelaunch.ops.linear_rnn import launch_few_rows  # the module imports Triton, which is an optional dependency

    return launch_few_rows.weight_alone(call.weight, *READ_TILE)
