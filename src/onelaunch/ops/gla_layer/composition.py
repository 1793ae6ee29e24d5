"""The layer as calls of other operations, for the operation's variants.

``variants/composed.py`` calls :func:`compose`. ``autograd.py`` and ``variants/peers.py`` ask for the segments of the packed
weights, and the layer ``GatedLinearAttention`` of :mod:`onelaunch.nn` calls :func:`project`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from onelaunch.dispatch import AUTO
from onelaunch.kernels.convolution.operator import convolve, why_not
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
Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Tensors of a call: x, in_proj_weight, gk_weight, gk_bias, norm_weight, w_out, initial_state, conv_weight."""


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
    """Return the segments of ``in_proj_weight``; the last is the low-rank factor of the decays, or the decays of the heads."""
    if sizes.rank is None:
        decays = Segment("gk", sizes.heads, 1, "logsigmoid", sizes.normalizer, bias=True)
    else:
        decays = Segment("low_rank", sizes.rank, 1)
    return (
        Segment("q", sizes.heads, sizes.keys),
        Segment("k", sizes.heads, sizes.keys),
        Segment("v", sizes.heads, sizes.values),
        Segment("gate", sizes.heads, sizes.values),  # before SiLU, which output_chain applies
        decays,
    )


@remembered
def convolved_segments_of(sizes: LayerSizes) -> tuple[Segment, ...]:
    """Return the segments of ``in_proj_weight`` with q, k and v as one, whose channels the short convolutions take together."""
    q, k, v, *rest = segments_of(sizes)
    return (Segment("qkv", 1, q.width + k.width + v.width), *rest)


@remembered
def decay_segments_of(sizes: LayerSizes) -> tuple[Segment, ...]:
    """Return the segments of ``gk_weight``."""
    return (Segment("gk", sizes.heads, sizes.keys, "logsigmoid", sizes.normalizer, bias=True),)


def _convolved(qkv: torch.Tensor, weight: torch.Tensor, sizes: LayerSizes, *, dispatched: bool) -> tuple[torch.Tensor, ...]:
    """Return q, k and v ``[B, T, H, K or V]``, columns of ``qkv [B, T, 1, C]``, after short causal convolutions and SiLU.

    The filters are ``weight [C, W]``. One launch computes them if the layer is ``dispatched`` and a kernel can run, and otherwise
    PyTorch's functions do.
    """
    qkv, heads = qkv.flatten(2), sizes.heads
    channels = [heads * sizes.keys, heads * sizes.keys, heads * sizes.values]
    if dispatched and why_not(qkv, weight) is None:
        parts = convolve(qkv, weight, channels=channels)
    elif qkv.shape[1] == 0:  # conv1d refuses fewer inputs than taps; the product connects an empty result to both for autograd
        parts = (qkv * weight.sum()).split(channels, -1)
    else:
        inputs = F.pad(qkv.transpose(1, 2), (weight.shape[1] - 1, 0))  # [B, C, W - 1 + T]
        y = F.conv1d(inputs, weight[:, None], groups=weight.shape[0])
        parts = F.silu(y.transpose(1, 2)).split(channels, -1)
    return tuple([each.unflatten(-1, (heads, -1)) for each in parts])


def compose(tensors: Tensors, sizes: LayerSizes, eps: float, output_final_state: bool, parts: Parts) -> Results:
    """Compute the layer by calls of operations; ``parts`` names their variants.

    ``projections`` is called twice, or once with one decay per head.
    """
    x, in_proj_weight, gk_weight, gk_bias, norm_weight, w_out, initial_state, conv_weight = tensors
    way_in, recurrence, way_out = parts
    segments = segments_of(sizes) if conv_weight is None else convolved_segments_of(sizes)
    if gk_weight is None:
        *attended, gate, gk = projections(x, in_proj_weight, segments, bias=gk_bias, variant=way_in)
    else:
        decays = decay_segments_of(sizes)
        *attended, gate, gk = project(x, in_proj_weight, segments, gk_weight, gk_bias, decays, variant=way_in)
    if conv_weight is not None:  # variants in plain PyTorch name theirs
        attended = _convolved(attended[0], conv_weight, sizes, dispatched=way_in == AUTO)
    q, k, v = attended
    o, final_state = gla(q, k, v, gk, initial_state=initial_state, output_final_state=output_final_state, variant=recurrence)
    return output_chain(o, gate, norm_weight, w_out, eps=eps, variant=way_out), final_state
