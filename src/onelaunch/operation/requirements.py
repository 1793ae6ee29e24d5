"""Requirements that variants of many operations share: predicates that return why a call cannot run, or ``None``."""

from __future__ import annotations

import functools
import importlib.util

import torch

from onelaunch.operation.query import Query


def cannot_launch(query: Query) -> str | None:
    """What every Triton variant of every operation needs."""
    if not triton_here():
        return "needs Triton, which is not installed"
    if query.device_type != "cuda" and not interpreting():
        return "needs a CUDA or ROCm device"
    if 0 in query.sizes:
        return "needs at least one element in every dimension"
    return None


LARGEST_GRID = 65535
"""CTAs along the second dimension of a launch, on CUDA and ROCm."""

FEWEST_CHANNELS = 16
"""Channels of the narrowest tile of kernels that scan along time."""


def cannot_scan(query: Query) -> str | None:
    """Return why Triton kernels that scan along time cannot run a call of sizes (batch, ..., channels)."""
    if (reason := cannot_launch(query)) is not None:
        return reason
    if query.device_type != "cuda" and query.dtype is torch.bfloat16:
        return "needs a GPU for bfloat16: Triton's interpreter computes wrong bfloat16 products"
    slices = query.sizes[0] * -(-query.sizes[-1] // FEWEST_CHANNELS)
    if slices > LARGEST_GRID:
        return f"takes at most {LARGEST_GRID} pairs of a batch entry and {FEWEST_CHANNELS} channels: a launch is no wider"
    return None


@functools.cache
def triton_here() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` when Triton was imported)."""
    if not triton_here():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def no_steps(query: Query) -> str | None:
    """Chunks need a step to chunk."""
    return "needs at least one time step" if query.sizes[1] == 0 else None
