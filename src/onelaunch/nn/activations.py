"""Activations, by the names that layers' arguments accept.

``gated.py`` calls :func:`checked` for the arguments that name the activations of the gate and of queries and keys, and looks them
up in the tables.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from onelaunch.errors import ArgumentError
from onelaunch.ops.projections.layout import Activation
from onelaunch.wording import did_you_mean, listing


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Return ``relu(x)^2``."""
    return F.relu(x).square()


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return GELU by its approximation with tanh."""
    return F.gelu(x, approximate="tanh")


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "sqrelu": _squared_relu,
    "gelu": _tanh_gelu,
}
"""Activations by fla's names, without ``bias_gelu``, which needs a bias that no layer has."""

IN_PROJECTION: dict[str, Activation] = {"sigmoid": "sigmoid", "logsigmoid": "logsigmoid", "silu": "silu", "swish": "silu"}
"""Activations that :func:`onelaunch.ops.projections` can apply to a segment (the columns of one projection), by fla's name."""


def checked(argument: str, name: object) -> str:
    """Return the name of an activation; raise :class:`ArgumentError` if there is no such activation."""
    if not isinstance(name, str) or name not in FUNCTIONS:
        hint = did_you_mean(str(name), FUNCTIONS)
        raise ArgumentError(f"{argument} is {name!r}; it must be one of {listing(FUNCTIONS)}.{hint}")
    return name
