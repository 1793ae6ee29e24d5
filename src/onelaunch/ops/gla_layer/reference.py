"""Oracle of ``gla_layer``, the inputs that variants are verified on, and the dispatch key of a case.

The workbench and other code that examines an operation's cases call them through the operation. ``cost.py`` asks the functions
about a case's options, shapes and dtypes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from onelaunch.checks import Facts
from onelaunch.errors import ArgumentError
from onelaunch.operation import Case, Query, Reading
from onelaunch.ops.gla import gla
from onelaunch.ops.gla_layer.contract import gla_layer, key_of
from onelaunch.wording import listing

_NORM_WEIGHTS = ("same", "float32")
"""Values of the option ``norm_weight``: dtype of the norm's weight, that of the case or float32."""

_DECAYS_PER = ("channel", "head")
"""Values of the option ``decay_per``: a decay for every key channel, by two factors of low rank, or one for a whole head."""


@gla_layer.oracle
def reference(
    x: torch.Tensor,
    in_proj_weight: torch.Tensor,
    gk_weight: torch.Tensor | None,
    gk_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    w_out: torch.Tensor,
    *,
    heads: int,
    normalizer: float = 16.0,
    eps: float = 1e-5,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    conv_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the definition in the dtype of the arguments (float64 in verification), with the oracle of ``gla``."""
    values, decays = w_out.shape[1], heads if gk_weight is None else gk_weight.shape[1]
    keys = (in_proj_weight.shape[0] - 2 * values - decays) // 2
    q, k, v, gate, logits = (x @ in_proj_weight.mT).split([keys, keys, values, values, decays], -1)
    if conv_weight is not None:
        filters = conv_weight.split([keys, keys, values])
        q, k, v = (_convolve(each, weight) for each, weight in zip((q, k, v), filters, strict=True))
    q, k, v, gate = (each.unflatten(-1, (heads, -1)) for each in (q, k, v, gate))
    if gk_weight is None:
        log_decay = F.logsigmoid(logits + gk_bias) / normalizer
    else:
        log_decay = (F.logsigmoid(logits @ gk_weight.mT + gk_bias) / normalizer).unflatten(-1, (heads, -1))
    o, final_state = gla.reference(q=q, k=k, v=v, g=log_decay, initial_state=initial_state, output_final_state=output_final_state)
    assert o is not None  # noqa: S101 - the first result is always there
    normalized = o / (o.square().mean(-1, keepdim=True) + eps).sqrt() * norm_weight
    return (normalized * gate * torch.sigmoid(gate)).flatten(-2) @ w_out.mT, final_state


def _convolve(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``[B, T, C]`` after a short causal convolution, ``weight [C, W]``, and SiLU, as a sum of shifted inputs."""
    length, past = values.shape[1], weight.shape[1] - 1
    padded = F.pad(values, (0, 0, past, 0))
    y = torch.stack([padded[:, step : step + length] * weight[:, step] for step in range(past + 1)]).sum(0)
    return y * torch.sigmoid(y)


class Options(NamedTuple):
    """Checked options of a case."""

    rank: int | None
    """Inner size of the decay's factors; ``None`` for one decay per head."""
    norm_weight: str
    conv_size: int | None
    """Number of steps of the short convolutions; ``None`` without them."""


def options_of(case: Case) -> Options:
    """Check and return the options of a case on which shapes and dtypes depend."""
    rank, norm_weight, per, size = (gla_layer.option(case, name) for name in ("rank", "norm_weight", "decay_per", "conv_size"))
    for name, value in (("rank", rank), ("conv_size", 1 if size is None else size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ArgumentError(f"{name} is {value!r}; it must be an integer of at least 1.")
    for name, value, known in (("norm_weight", norm_weight, _NORM_WEIGHTS), ("decay_per", per, _DECAYS_PER)):
        if value not in known:
            raise ArgumentError(f"{name} is {value!r}; it must be one of {listing(known)}.")
    return Options(rank if per == "channel" else None, norm_weight, size)


def shapes_of(case: Case) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a call's tensors, by argument, without those that the call does not have."""
    rank, _, conv_size = options_of(case)
    batch, length, width, heads, keys, values = (case.sizes[name] for name in gla_layer.dimensions)
    shapes: dict[str, tuple[int, ...]] = {
        "x": (batch, length, width),
        "in_proj_weight": (2 * heads * (keys + values) + (heads if rank is None else rank), width),
        **({} if rank is None else {"gk_weight": (heads * keys, rank)}),
        "gk_bias": (heads if rank is None else heads * keys,),
        "norm_weight": (values,),
        "w_out": (width, heads * values),
    }
    if conv_size is not None:
        shapes["conv_weight"] = (heads * (2 * keys + values), conv_size)
    if gla_layer.option(case, "initial_state"):
        shapes["initial_state"] = (batch, heads, keys, values)
    return shapes


def dtypes_of(case: Case) -> dict[str, torch.dtype]:
    """Return the dtypes of the tensors whose dtype is not the case's, by argument."""
    wide = options_of(case).norm_weight == "float32"
    return {"initial_state": torch.float32} | ({"norm_weight": torch.float32} if wide else {})


@gla_layer.inputs
def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Reading:
    """Return random x and state, and weights such that projections and results have about unit variance, as in a trained layer.

    Keys have half of their variance from the queries' projection, and their convolutions from the queries' filters. A sequence's
    first result is (q k) v, with q k a scalar per head, and the norm divides by its magnitude. For unrelated vectors q k is
    sometimes about zero, and then results and gradients are only rounding errors in any implementation.
    """
    shapes, dtypes = shapes_of(case), dtypes_of(case)
    arguments: dict[str, Any] = {}
    for name, extent in shapes.items():
        drawn = torch.randn(extent, device=device, generator=generator)
        if name in ("in_proj_weight", "gk_weight", "w_out", "conv_weight"):
            drawn = drawn / math.sqrt(max(extent[1], 1))
            if name in ("in_proj_weight", "conv_weight"):
                # They are views, through which drawn is changed.
                q, k = drawn.split(case.sizes["H"] * case.sizes["K"])[:2]
                k.add_(q).mul_(math.sqrt(0.5))
        elif name == "norm_weight":
            drawn = 1.0 + 0.1 * drawn
        arguments[name] = drawn.to(dtypes.get(name, case.dtype))
    differentiable = tuple(arguments)
    arguments.setdefault("gk_weight", None)
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
        facts("gk_weight") if "gk_weight" in shapes else None,
        facts("gk_bias"),
        facts("norm_weight"),
        facts("w_out"),
        facts("initial_state") if "initial_state" in shapes else None,
        facts("conv_weight") if "conv_weight" in shapes else None,
        case.sizes["H"],
        bool(gla_layer.option(case, "final_state")),
        grad_enabled=grad,
    )
