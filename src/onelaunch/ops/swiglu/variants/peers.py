"""Variants of ``swiglu`` from other libraries, Liger and quack, called the way their own layers call them.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel: both
``products``, and the ``gate``. ``hands`` names the products that go through device memory before the gate is applied, and is
missing where none do; ``cost.py`` reads both. ``gemm`` says how products are made, and ``maker`` is the library; studies select
variants by tags. ``requires`` is the package to import.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from onelaunch.device.hardware import compute_capability
from onelaunch.operation import Query
from onelaunch.operation.requirements import not_installed
from onelaunch.ops.swiglu.contract import FORMATS, SwigluCall, swiglu

_EIGHTS = 8
"""Divisor that the fused kernels of both libraries require of N and K in 16 bits, because of TMA."""


@swiglu.variant("liger", launches=None, fuses=(), hands=("gate", "up"), gemm="cublas", maker="liger", requires="liger_kernel")
def liger(call: SwigluCall) -> tuple[torch.Tensor]:
    """Run two products by PyTorch and Liger's SiLU-and-multiply, as its ``LigerSwiGLUMLP`` does."""
    from liger_kernel.ops import LigerSiLUMulFunction  # pyrefly: ignore[missing-import]

    assert isinstance(call.x, torch.Tensor)  # noqa: S101 - see plain_tensors
    assert isinstance(call.w_gate, torch.Tensor)  # noqa: S101
    assert isinstance(call.w_up, torch.Tensor)  # noqa: S101
    return (LigerSiLUMulFunction.apply(F.linear(call.x, call.w_gate), F.linear(call.x, call.w_up)),)


@swiglu.variant("liger_fused", launches=None, fuses=("products", "gate"), gemm="triton", maker="liger", requires="liger_kernel")
def liger_fused(call: SwigluCall) -> tuple[torch.Tensor]:
    """Run the first kernel of Liger's ``LigerMLP``, in its form without gradients."""
    from liger_kernel.ops.mlp import gemm_swiglu  # pyrefly: ignore[missing-import]

    assert isinstance(call.x, torch.Tensor)  # noqa: S101 - see plain_tensors
    h, _ = gemm_swiglu(call.x.contiguous()[None], call.w_gate, call.w_up, 1.0, store_preact=False)
    return (h[0],)


@swiglu.variant("quack", launches=None, fuses=("products", "gate"), gemm="cutlass", maker="quack", requires="quack")
def quack(call: SwigluCall) -> tuple[torch.Tensor]:
    """Run quack's ``gemm_gated`` with stacked weights and its own autotuning."""
    from quack.gemm_interface import gemm_gated  # pyrefly: ignore[missing-import]

    assert isinstance(call.stacked, torch.Tensor)  # noqa: S101 - see stacked_for_quack
    # concat_layout: all gate rows come before those of up. By default quack takes them in turn.
    _, h = gemm_gated(call.x, call.stacked.mT, activation="swiglu", store_preact=False, concat_layout=("B",))
    return (h,)


@liger.supports
@liger_fused.supports
@quack.supports
def plain_tensors(query: Query) -> str | None:
    """Return why these libraries cannot run a call: its device, its format or an empty dimension; or None."""
    if query.device_type != "cuda":
        return "needs a CUDA or ROCm device"
    if set(query.flags) & set(FORMATS.values()):
        return "takes plain tensors"
    if 0 in query.sizes:
        return "needs at least one element in every dimension"
    return None


@liger_fused.supports
@quack.supports
def fits_hopper_kernels(query: Query) -> str | None:
    """Return the limit of Liger's and quack's Hopper kernels (versions 0.8.5 and 0.6.5) that a call exceeds, or None."""
    if (compute_capability(torch.device(query.device)) or 0) < 9:
        return "needs an NVIDIA GPU of compute capability 9 or more"
    if query.grad:
        return "has a backward pass only as part of a whole MLP"
    if query.dtype is torch.float32 or query.sizes[1] % _EIGHTS or query.sizes[2] % _EIGHTS:
        return f"needs float16 or bfloat16, and N and K in multiples of {_EIGHTS}"
    return None


@quack.supports
def stacked_for_quack(query: Query) -> str | None:
    """Return why quack cannot run: the weights are not stacked."""
    return None if "stacked" in query.flags else "needs stacked weights: w_gate [2 N, K] and no w_up"


def _installed(package: str, query: Query) -> str | None:
    """Return why a library cannot run: its package is not installed."""
    return not_installed(package)


for variant in (liger, liger_fused, quack):
    assert variant.capabilities.requires is not None  # noqa: S101 - given above
    variant.supports(functools.partial(_installed, variant.capabilities.requires))
