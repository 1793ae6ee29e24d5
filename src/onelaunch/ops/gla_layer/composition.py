"""The layer as four calls of operations, for the operation's variants. :mod:`onelaunch.nn` uses :func:`project`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onelaunch.dispatch import AUTO
from onelaunch.operation import remembered
from onelaunch.ops.gla import gla
from onelaunch.ops.gla_layer.contract import LayerSizes
from onelaunch.ops.output_chain import output_chain
from onelaunch.ops.projections import Segment, projections

Results = tuple[torch.Tensor, torch.Tensor | None]
"""Output ``[B, T, D]`` and the final state, if it was asked for."""
Parts = tuple[str, str, str]
"""Names of the variants of ``projections`` (for both of its calls), ``gla`` and ``output_chain``; ``auto`` to dispatch."""

Tensor = torch.Tensor
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Tensors of a call: x, in_proj_weight, gk_weight, gk_bias, norm_weight, w_out, initial_state."""


def project(
    x: torch.Tensor,
    in_proj_weight: torch.Tensor,
    segments: Sequence[Segment],
    gk_weight: torch.Tensor,
    gk_bias: torch.Tensor,
    decay_segments: Sequence[Segment],
    variant: str = AUTO,
) -> tuple[torch.Tensor, ...]:
    """Return all projections of ``x [B, T, D]``, the log-decays last.

    The last of ``segments`` is the low-rank factor that log-decays are projected from by ``gk_weight``; it is not returned. With
    one packed weight the gradient of x is one matrix product instead of a sum of several.
    """
    *projected, low_rank = projections(x, in_proj_weight, segments, variant=variant)
    return *projected, *projections(low_rank, gk_weight, decay_segments, bias=gk_bias, variant=variant)


@remembered
def segments_of(sizes: LayerSizes) -> tuple[Segment, ...]:
    """Return the segments of ``in_proj_weight``."""
    return (
        Segment("q", sizes.heads, sizes.keys),
        Segment("k", sizes.heads, sizes.keys),
        Segment("v", sizes.heads, sizes.values),
        Segment("gate", sizes.heads, sizes.values),  # before SiLU, which output_chain applies
        Segment("low_rank", sizes.rank, 1),
    )


@remembered
def decay_segments_of(sizes: LayerSizes) -> tuple[Segment, ...]:
    """Return the segments of ``gk_weight``."""
    return (Segment("gk", sizes.heads, sizes.keys, "logsigmoid", sizes.normalizer, bias=True),)


def compose(tensors: Tensors, sizes: LayerSizes, eps: float, output_final_state: bool, parts: Parts) -> Results:
    """Compute the layer by four calls of operations, ``projections`` twice; ``parts`` names their variants."""
    x, in_proj_weight, gk_weight, gk_bias, norm_weight, w_out, initial_state = tensors
    way_in, recurrence, way_out = parts
    segments, decay_segments = segments_of(sizes), decay_segments_of(sizes)
    q, k, v, gate, gk = project(x, in_proj_weight, segments, gk_weight, gk_bias, decay_segments, variant=way_in)
    o, final_state = gla(q, k, v, gk, initial_state=initial_state, output_final_state=output_final_state, variant=recurrence)
    return output_chain(o, gate, norm_weight, w_out, eps=eps, variant=way_out), final_state
