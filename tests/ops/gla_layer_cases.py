"""Cases of ``gla_layer`` shared by its tests.

A case is written as arguments of ``GLA_LAYER.case``: dtype; sizes (B sequences of T steps, D columns of x, H heads of K key and
V value channels); and options, such as ``rank``, the inner width of the low-rank projection that makes the log-decays,
``decay_per``, and ``conv_size``, the steps of the short convolutions.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.operation import find_operation
from onelaunch.ops.gla_layer import probes
from onelaunch.ops.gla_layer.probes import SMALL
from tests.ops.cases import runnable

GLA_LAYER = find_operation("gla_layer")

CASES = runnable(GLA_LAYER, probes.CASES)
"""Probes of the operation without an empty dimension."""

TENSORS = ("x", "in_proj_weight", "gk_weight", "gk_bias", "norm_weight", "w_out")
"""Tensor arguments of the function in their order, without the optional ``initial_state`` and ``conv_weight``."""


def case_of(name: str):
    """Return the case of a name in :data:`CASES`."""
    return GLA_LAYER.case(name=name, **CASES[name])


def made(grad: bool = False, seed: int = 0, **given: Any) -> dict[str, Any]:
    """Return random arguments of ``gla_layer`` on the CPU: of the small case in float32, changed by ``given``."""
    chosen = {"dtype": "float32", **SMALL, **given}
    reading = GLA_LAYER.make_inputs(GLA_LAYER.case(**chosen), torch.device("cpu"), seed)
    for name in reading.differentiable if grad else ():
        reading.arguments[name].requires_grad_()
    return reading.arguments
