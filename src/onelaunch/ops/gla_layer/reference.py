"""Oracle of ``gla_layer``, the inputs that variants are verified on, and the dispatch key of a case.

The workbench's verification and measurements call them through the operation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from onelaunch.checks import Facts
from onelaunch.errors import ArgumentError
from onelaunch.operation import Case, Query, Reading
from onelaunch.ops.gla import gla
from onelaunch.ops.gla_layer.contract import gla_layer, key_of
from onelaunch.wording import listing

NORM_WEIGHTS = ("same", "float32")
"""Values of the option ``norm_weight``: dtype of the norm's weight, that of the case or float32."""


@gla_layer.oracle
def reference(
    x: torch.Tensor,
    in_proj_weight: torch.Tensor,
    gk_weight: torch.Tensor,
    gk_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    w_out: torch.Tensor,
    *,
    heads: int,
    normalizer: float = 16.0,
    eps: float = 1e-5,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the definition in the dtype of the arguments (float64 in verification), with the oracle of ``gla``."""
    keys, values = gk_weight.shape[0], w_out.shape[1]
    q, k, v, gate, low_rank = (x @ in_proj_weight.mT).split([keys, keys, values, values, gk_weight.shape[1]], -1)
    log_decay = F.logsigmoid(low_rank @ gk_weight.mT + gk_bias) / normalizer
    q, k, v, gate, log_decay = (each.unflatten(-1, (heads, -1)) for each in (q, k, v, gate, log_decay))
    o, final_state = gla.reference(q=q, k=k, v=v, g=log_decay, initial_state=initial_state, output_final_state=output_final_state)
    assert o is not None  # noqa: S101 - the first result is always there
    normalized = o / (o.square().mean(-1, keepdim=True) + eps).sqrt() * norm_weight
    return (normalized * gate * torch.sigmoid(gate)).flatten(-2) @ w_out.mT, final_state


def options_of(case: Case) -> tuple[int, str]:
    """Check and return the options ``rank`` and ``norm_weight`` of a case."""
    rank, norm_weight = gla_layer.option(case, "rank"), gla_layer.option(case, "norm_weight")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ArgumentError(f"rank is {rank!r}; it must be an integer of at least 1.")
    if norm_weight not in NORM_WEIGHTS:
        raise ArgumentError(f"norm_weight is {norm_weight!r}; it must be one of {listing(NORM_WEIGHTS)}.")
    return rank, norm_weight


def shapes_of(case: Case) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a call's tensors, by argument."""
    rank, _ = options_of(case)
    batch, length, width, heads, keys, values = (case.sizes[name] for name in gla_layer.dimensions)
    shapes: dict[str, tuple[int, ...]] = {
        "x": (batch, length, width),
        "in_proj_weight": (2 * heads * (keys + values) + rank, width),
        "gk_weight": (heads * keys, rank),
        "gk_bias": (heads * keys,),
        "norm_weight": (values,),
        "w_out": (width, heads * values),
    }
    if gla_layer.option(case, "initial_state"):
        shapes["initial_state"] = (batch, heads, keys, values)
    return shapes


def dtypes_of(case: Case) -> dict[str, torch.dtype]:
    """Return the dtypes of the tensors whose dtype is not the case's, by argument."""
    _, norm_weight = options_of(case)
    return {"initial_state": torch.float32} | ({"norm_weight": torch.float32} if norm_weight == "float32" else {})


@gla_layer.inputs
def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Reading:
    """Return random x and state, and weights such that projections and results have about unit variance, as in a trained layer.

    Keys have half of their variance from the queries' projection. A sequence's first result is (q k) v, with q k a scalar per
    head, and the norm divides by its magnitude. For unrelated vectors q k is sometimes about zero, and then results and
    gradients are only rounding errors in any implementation.
    """
    shapes, dtypes = shapes_of(case), dtypes_of(case)
    arguments: dict[str, Any] = {}
    for name, extent in shapes.items():
        drawn = torch.randn(extent, device=device, generator=generator)
        if name in ("in_proj_weight", "gk_weight", "w_out"):
            drawn = drawn / math.sqrt(max(extent[1], 1))
            if name == "in_proj_weight":
                q, k = drawn.split(shapes["gk_weight"][0])[:2]  # views, through which the next line changes drawn
                k.add_(q).mul_(math.sqrt(0.5))
        elif name == "norm_weight":
            drawn = 1.0 + 0.1 * drawn
        arguments[name] = drawn.to(dtypes.get(name, case.dtype))
    differentiable = tuple(arguments)
    arguments |= {name: gla_layer.option(case, name) for name in ("normalizer", "eps")}
    arguments |= {"heads": case.sizes["H"], "output_final_state": bool(gla_layer.option(case, "final_state"))}
    return Reading(arguments, differentiable)


@gla_layer.queries
def make_query(case: Case, device: str, grad: bool) -> Query:
    """Return the dispatch key of a case, through the checks of a call."""
    dtypes, shapes = dtypes_of(case), shapes_of(case)

    def facts(name: str) -> Facts:
        return Facts(torch.Size(shapes[name]), dtypes.get(name, case.dtype), torch.device(device), requires_grad=grad)

    return key_of(
        facts("x"),
        facts("in_proj_weight"),
        facts("gk_weight"),
        facts("gk_bias"),
        facts("norm_weight"),
        facts("w_out"),
        facts("initial_state") if "initial_state" in shapes else None,
        case.sizes["H"],
        bool(gla_layer.option(case, "final_state")),
        grad_enabled=grad,
    )
