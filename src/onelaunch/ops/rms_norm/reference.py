"""Oracle of ``rms_norm``, and the inputs that variants are verified on.

The workbench and other code that examines an operation's cases call these functions through the operation. ``cost.py`` asks
:func:`options_of`.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.checks import Facts
from onelaunch.errors import ArgumentError
from onelaunch.operation import Case, Query, Reading
from onelaunch.ops.rms_norm.contract import key_of, rms_norm
from onelaunch.wording import listing

DTYPES = ("same", "float32", "none")
"""Values of the options ``residual`` and ``weight``: the dtype of the tensor, that of the case or float32, or no tensor."""


@rms_norm.oracle
def reference(
    x: torch.Tensor, weight: torch.Tensor | None = None, residual: torch.Tensor | None = None, *, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the definition in the dtype of the arguments (float64 in verification)."""
    total = x if residual is None else x + residual
    y = total / (total.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight, None if residual is None else total


def options_of(case: Case) -> tuple[str, str]:
    """Check and return the options ``residual`` and ``weight`` of a case."""
    residual, weight = (rms_norm.option(case, name) for name in ("residual", "weight"))
    for name, given in (("residual", residual), ("weight", weight)):
        if given not in DTYPES:
            raise ArgumentError(f"{name} is {given!r}; it must be one of {listing(DTYPES)}.")
    return residual, weight


def _dtype_of(case: Case, option: str) -> torch.dtype:
    """Return the dtype that a value of an option stands for."""
    return torch.float32 if option == "float32" else case.dtype


@rms_norm.inputs
def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Reading:
    """Return rows of different magnitudes, a residual larger than most of them, as in deep models, and a weight near 1."""
    residual, weight = options_of(case)
    rows, channels = (case.sizes[name] for name in rms_norm.dimensions)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    arguments: dict[str, Any] = {
        "x": (drawn(rows, channels) * torch.exp(drawn(rows, 1))).to(case.dtype),
        "weight": None if weight == "none" else (1.0 + 0.1 * drawn(channels)).to(_dtype_of(case, weight)),
        "residual": None if residual == "none" else (2.0 * drawn(rows, channels)).to(_dtype_of(case, residual)),
        "eps": rms_norm.option(case, "eps"),
    }
    return Reading(arguments, tuple([name for name, value in arguments.items() if isinstance(value, torch.Tensor)]))


@rms_norm.queries
def make_query(case: Case, device: str, grad: bool) -> Query:
    """Return the dispatch key of a case, through the checks of a call."""
    residual, weight = options_of(case)
    rows, channels = (case.sizes[name] for name in rms_norm.dimensions)

    def facts(*shape: int, option: str = "same") -> Facts | None:
        if option == "none":
            return None
        return Facts(torch.Size(shape), _dtype_of(case, option), torch.device(device), requires_grad=grad)

    x = Facts(torch.Size((rows, channels)), case.dtype, torch.device(device), requires_grad=grad)
    return key_of(x, facts(channels, option=weight), facts(rows, channels, option=residual), grad_enabled=grad)
