"""Oracle of ``output_chain``, the inputs that variants are verified on, and the output projection alone as a control.

A control is a part of the operation that studies time in addition; calls are never dispatched to it. The workbench and other
code that examines an operation's cases call these functions through the operation. ``cost.py`` asks :func:`options_of`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from onelaunch.checks import Facts
from onelaunch.errors import ArgumentError
from onelaunch.operation import Case, Cost, Query, Reading
from onelaunch.ops.output_chain.contract import OutputChainCall, key_of, output_chain
from onelaunch.wording import listing

GATES = ("silu", "activated", "none")
"""Values of the option ``gate``: a gate before SiLU, one that is activated already, or none."""
_NORM_WEIGHTS = ("same", "float32", "none")
"""Values of the option ``norm_weight``: dtype of the norm's weight, that of the case or float32, or none."""


@output_chain.oracle
def reference(
    h: torch.Tensor,
    gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    w_out: torch.Tensor,
    *,
    activated: bool = False,
    eps: float = 1e-5,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor]:
    """Compute the definition in the dtype of the arguments (float64 in verification)."""
    a = h / (h.square().mean(-1, keepdim=True) + eps).sqrt()
    if norm_weight is not None:
        a = a * norm_weight
    if gate is not None:
        a = a * (gate if activated else gate * torch.sigmoid(gate))
    out = a.flatten(-2) @ w_out.mT
    return (out if bias is None else out + bias,)


def options_of(case: Case) -> tuple[str, str, bool]:
    """Check and return the options ``gate``, ``norm_weight`` and ``bias`` of a case."""
    gate, norm_weight, bias = (output_chain.option(case, name) for name in ("gate", "norm_weight", "bias"))
    for name, given, known in (("gate", gate, GATES), ("norm_weight", norm_weight, _NORM_WEIGHTS), ("bias", bias, (False, True))):
        if given not in known:
            raise ArgumentError(f"{name} is {given!r}; it must be one of {listing(map(str, known))}.")
    return gate, norm_weight, bias


@output_chain.inputs
def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Reading:
    """Return heads of different magnitudes, as a recurrence gives them, and weights such that results are of the order of 1."""
    gate, norm_weight, bias = options_of(case)
    batch, length, heads, values, columns = (case.sizes[name] for name in output_chain.dimensions)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    weight = None if norm_weight == "none" else 1.0 + 0.1 * drawn(values)
    arguments: dict[str, Any] = {
        "h": (drawn(batch, length, heads, values) * torch.exp(drawn(batch, length, heads, 1))).to(case.dtype),
        "gate": None if gate == "none" else drawn(batch, length, heads, values).to(case.dtype),
        "norm_weight": None if weight is None else weight.to(torch.float32 if norm_weight == "float32" else case.dtype),
        "w_out": (drawn(columns, heads * values) / math.sqrt(heads * values)).to(case.dtype),
        "activated": gate == "activated",
        "eps": output_chain.option(case, "eps"),
    }
    if bias:
        arguments["bias"] = drawn(columns).to(case.dtype)
    return Reading(arguments, tuple([name for name, value in arguments.items() if isinstance(value, torch.Tensor)]))


@output_chain.queries
def make_query(case: Case, device: str, grad: bool) -> Query:
    """Return the dispatch key of a case, through the checks of a call."""
    gate, norm_weight, bias = options_of(case)
    batch, length, heads, values, columns = (case.sizes[name] for name in output_chain.dimensions)

    def facts(*shape: int, dtype: torch.dtype = case.dtype) -> Facts:
        return Facts(torch.Size(shape), dtype, torch.device(device), requires_grad=grad)

    weight = None
    if norm_weight != "none":
        weight = facts(values, dtype=torch.float32 if norm_weight == "float32" else case.dtype)
    return key_of(
        facts(batch, length, heads, values),
        None if gate == "none" else facts(batch, length, heads, values),
        weight,
        facts(columns, heads * values),
        facts(columns) if bias else None,
        gate == "activated",
        grad_enabled=grad,
    )


def _product_cost(case: Case) -> Cost:
    batch, length, heads, values, columns = (case.sizes[name] for name in output_chain.dimensions)
    rows, inner = batch * length, heads * values
    written = rows * columns * case.dtype.itemsize
    moved = (rows * inner + columns * inner) * case.dtype.itemsize + written
    return Cost(2 * rows * inner * columns, moved, 1, written=written)


def _product(
    h: torch.Tensor,
    gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    w_out: torch.Tensor,
    *,
    activated: bool = False,
    eps: float = 1e-5,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product of h with the output weight; norm, gate and bias are left out."""
    return h.flatten(-2) @ w_out.mT


@output_chain.control("gemm_alone", oracle=_product, cost=_product_cost)
def gemm_alone(call: OutputChainCall) -> torch.Tensor:
    """Compute only the output projection, by PyTorch: the time of the operation if norm and gate were free."""
    return F.linear(call.h.flatten(-2), call.w_out)
