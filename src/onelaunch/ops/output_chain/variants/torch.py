"""Variants of ``output_chain`` in plain PyTorch: they run on every device.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, and
``hands`` the intermediates that go through device memory: ``norm``, the normalized heads, ``silu``, the activated gate, and
``a``, their product. ``cost.py`` reads ``hands``. ``yardstick`` marks the PyTorch baseline, whose error sets the tolerance;
``maker`` and ``gemm`` say who made the code and the product. Other keywords are capabilities, which the class ``Capabilities`` of
``onelaunch.operation`` explains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from onelaunch.dispatch.capture import compile_static, compiler_missing
from onelaunch.ops.output_chain.contract import OutputChainCall, output_chain

Results = tuple[torch.Tensor]
"""Result ``out``, as a tuple, which variants return."""


@output_chain.variant(
    "unfused", launches=None, fuses=(), hands=("norm", "silu", "a"), gemm="cublas", maker="pytorch", yardstick=True
)
def unfused(call: OutputChainCall) -> Results:
    """Run the norm, the gate and the product, each by PyTorch: the PyTorch baseline that sets the tolerance."""
    return _chain(call.h, call.gate, call.norm_weight, call.w_out, call.bias, call.activated, call.eps)


@output_chain.variant("compiled", launches=None, recompiles=True, fuses=("norm", "gate"), hands=("a",), maker="pytorch")
def compiled(call: OutputChainCall) -> Results:
    """Run the unfused chain, compiled by torch.compile."""
    if torch.compiler.is_compiling():  # the caller's torch.compile compiles the chain with the rest
        return _chain(call.h, call.gate, call.norm_weight, call.w_out, call.bias, call.activated, call.eps)
    function = compile_static(_chain_of(call.activated, call.eps))
    return function(call.h, call.gate, call.norm_weight, call.w_out, call.bias)


compiled.supports(compiler_missing)


def _chain(
    h: torch.Tensor,
    gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    w_out: torch.Tensor,
    bias: torch.Tensor | None,
    activated: bool,
    eps: float,
) -> Results:
    a = _normalize(h, norm_weight, eps)
    if gate is not None:
        a = a * (gate if activated else F.silu(gate))
    return (F.linear(a.flatten(-2), w_out, bias),)


def _normalize(h: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Apply RMSNorm to every head; PyTorch does not fuse it with a weight of another dtype than ``h``, which is applied here."""
    if weight is None or weight.dtype is h.dtype:
        return F.rms_norm(h, h.shape[-1:], weight, eps)
    return (F.rms_norm(h, h.shape[-1:], None, eps) * weight).to(h.dtype)


@functools.lru_cache(maxsize=256)
def _chain_of(activated: bool, eps: float) -> Callable[..., Results]:
    """Return the chain for these options, which the compiled code sees as constants.

    It is cached because a new function object would be compiled again.
    """
    return lambda h, gate, norm_weight, w_out, bias: _chain(h, gate, norm_weight, w_out, bias, activated, eps)
