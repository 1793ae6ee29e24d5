"""Variants of ``projections`` in plain PyTorch: they run on every device.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, and
``hands`` the products that go through device memory before their activation; ``cost.py`` reads them. ``yardstick`` marks the
PyTorch baseline, whose error sets the tolerance; ``maker`` and ``gemm`` say who made the code and the product. Other keywords are
capabilities, which the class ``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from onelaunch.dispatch.capture import compile_static, compiler_missing
from onelaunch.ops.projections.contract import ProjectionsCall, projections
from onelaunch.ops.projections.layout import Layout, Segment


def _activate(z: torch.Tensor, segment: Segment, eps: float) -> torch.Tensor:
    """Return the result of a segment from its columns ``[..., width]``."""
    z = z.unflatten(-1, segment.shape)
    if segment.activation == "l2norm":
        heads = z.unsqueeze(-1) if segment.head_size == 1 else z
        norm = torch.linalg.vector_norm(heads, dim=-1, keepdim=True, dtype=torch.float32)  # squares may exceed float16
        return (heads * torch.rsqrt(norm.square() + eps).to(z.dtype)).reshape(z.shape)
    if segment.activation == "silu":
        return F.silu(z)
    if segment.activation == "sigmoid":
        return torch.sigmoid(z)
    if segment.activation == "logsigmoid":
        return F.logsigmoid(z) / segment.normalizer
    return z


@projections.variant("unfused", launches=None, fuses=(), hands=("activated",), gemm="cublas", maker="pytorch", yardstick=True)
def unfused(call: ProjectionsCall) -> tuple[torch.Tensor, ...]:
    """Multiply for each segment, then apply PyTorch's activations: the PyTorch baseline that sets the tolerance.

    For the segments called ``normalized`` in reference.py these are five products and four activations; a normalization takes
    several kernels.
    """
    return _chain(call.x, call.weight, call.bias, call.layout, call.eps)


@projections.variant("wide", launches=None, fuses=("products",), hands=("activated",), gemm="cublas", maker="pytorch")
def wide(call: ProjectionsCall) -> tuple[torch.Tensor, ...]:
    """Multiply once by the packed weight, split, then apply PyTorch's activations.

    It is the form that the write-up of experiment 058 calls fused; studies/058-projection-chain.toml quotes its times.
    """
    parts = F.linear(call.x, call.weight).split_with_sizes(call.layout.widths, -1)
    biases = call.layout.cut_bias(call.bias)
    biased = [part if bias is None else part + bias for part, bias in zip(parts, biases, strict=True)]
    return tuple([_activate(z, span.segment, call.eps) for z, span in zip(biased, call.layout.spans, strict=True)])


@projections.variant("compiled", launches=None, recompiles=True, fuses=(), hands=("activated",), maker="pytorch")
def compiled(call: ProjectionsCall) -> tuple[torch.Tensor, ...]:
    """Run the unfused chain, compiled by ``torch.compile``."""
    if torch.compiler.is_compiling():  # the caller's torch.compile compiles the chain with the rest
        return _chain(call.x, call.weight, call.bias, call.layout, call.eps)
    return compile_static(_chain_of(call.layout, call.eps))(call.x, call.weight, call.bias)


compiled.supports(compiler_missing)


def _chain(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layout: Layout, eps: float
) -> tuple[torch.Tensor, ...]:
    """Compute the segments one after another, each by a product of its own."""
    weights = weight.split_with_sizes(layout.widths)
    parts = zip(weights, layout.cut_bias(bias), layout.spans, strict=True)
    return tuple([_activate(F.linear(x, rows, added), span.segment, eps) for rows, added, span in parts])


@functools.lru_cache(maxsize=256)
def _chain_of(layout: Layout, eps: float) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the chain for one layout, whose offsets are constants in the compiled code.

    It is cached because a new function object would be compiled again.
    """
    return lambda x, weight, bias: _chain(x, weight, bias, layout, eps)
