"""Variants of ``rms_norm`` in plain PyTorch: they run on every device.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, and
``hands`` what goes through device memory between launches: the ``sum``, which is a result too, and the rows that are
``normalized`` but not multiplied by the weight yet. ``cost.py`` reads ``hands``. ``yardstick`` marks the PyTorch baseline, whose
error sets the tolerance; ``maker`` says who made the code. Other keywords are capabilities, which the class ``Capabilities`` of
``onelaunch.operation`` explains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from onelaunch.dispatch.capture import compile_static, compiler_missing
from onelaunch.ops.rms_norm.autograd import Results
from onelaunch.ops.rms_norm.contract import RMSNormCall, rms_norm


@rms_norm.variant("eager", launches=None, fuses=(), hands=("sum", "normalized"), maker="pytorch", yardstick=True)
def eager(call: RMSNormCall) -> Results:
    """Run the definition step by step in PyTorch, as the models of transformers do: the PyTorch baseline."""
    return _steps(call.x, call.weight, call.residual, call.eps)


@rms_norm.variant("compiled", launches=None, recompiles=True, fuses=("add", "norm"), hands=(), maker="pytorch")
def compiled(call: RMSNormCall) -> Results:
    """Run the steps of ``eager``, compiled by torch.compile."""
    if torch.compiler.is_compiling():  # the caller's torch.compile compiles the steps with the rest
        return _steps(call.x, call.weight, call.residual, call.eps)
    return compile_static(_steps_of(call.eps))(call.x, call.weight, call.residual)


compiled.supports(compiler_missing)


@rms_norm.variant("functional", launches=None, fuses=(), hands=("sum",), maker="pytorch")
def functional(call: RMSNormCall) -> Results:
    """Run an addition, if there is a residual, and ``torch.nn.functional.rms_norm``."""
    total = call.x if call.residual is None else call.x + call.residual
    shape, dtype, weight = call.x.shape[-1:], call.x.dtype, call.weight
    if weight is None or weight.dtype is total.dtype:
        y = F.rms_norm(total, shape, weight, call.eps)
    else:  # PyTorch does not fuse the norm with a weight of another dtype
        y = F.rms_norm(total, shape, None, call.eps) * weight
    return y.to(dtype), None if call.residual is None else total


def _steps(x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, eps: float) -> Results:
    """Return the results; as in transformers, rows are rounded to the dtype of x before the weight."""
    total = x if residual is None else x + residual
    wide = total.float()
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else (y * weight).to(x.dtype), None if residual is None else total


@functools.lru_cache(maxsize=256)
def _steps_of(eps: float) -> Callable[..., Results]:
    """Return the steps for an epsilon, which the compiled code sees as a constant.

    It is cached because a new function object would be compiled again.
    """
    return lambda x, weight, residual: _steps(x, weight, residual, eps)
