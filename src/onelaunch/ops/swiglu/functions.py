"""Entry points of ``swiglu`` for quantized operands.

:func:`swiglu_fp8` and :func:`dual_gemm_nvfp4` take elements (or codes) and scales as separate tensors. :func:`swiglu_nvfp4` takes
16-bit rows and :class:`NVFP4Tensor` weights. Users call them through ``onelaunch.ops``.
"""

from __future__ import annotations

import torch

from onelaunch import checks, dispatch
from onelaunch.errors import ArgumentError
from onelaunch.formats import Fp8Tensor, NVFP4Tensor
from onelaunch.ops.swiglu.contract import bind, run, swiglu


def swiglu_fp8(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None,
    x_scale: torch.Tensor,
    gate_scale: torch.Tensor,
    up_scale: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    constant_weights: bool = False,
    variant: str = dispatch.AUTO,
) -> torch.Tensor:
    """Compute :func:`onelaunch.ops.swiglu` of float8 matrices and their scales.

        h = silu((x x_scale) (w_gate gate_scale)^T) * ((x x_scale) (w_up up_scale)^T)

    Args:
        x: Rows, shape ``[M, K]``, float8_e4m3fn; K is a multiple of 16.
        w_gate: Weight of the gate, shape ``[N, K]``, float8_e4m3fn; N is a multiple of 16. Shape ``[2 N, K]``, the gate's rows
            first, if ``w_up`` is ``None``.
        w_up: Weight of up, shape ``[N, K]``, float8_e4m3fn, or ``None``.
        x_scale: Scale of x, float32, one element or shape ``[M, 1]``.
        gate_scale: Scale of ``w_gate``, float32, one element or shape ``[N, 1]``; ``[2 N, 1]`` for stacked weights.
        up_scale: Scale of ``w_up``, float32, one element or shape ``[N, 1]``; required together with ``w_up``.
        out_dtype: Dtype of the result: bfloat16, float16 or float32.
        constant_weights: Promise that no work still running on the GPU writes the weights; see :func:`onelaunch.ops.swiglu`.
        variant: Name from ``swiglu.variants``, or ``"auto"``.

    Returns:
        ``h``, shape ``[M, N]``, dtype ``out_dtype``.

    Raises:
        OneLaunchError: An argument does not fit, in the cases of :func:`onelaunch.ops.swiglu`.
    """
    # Fp8Tensor checks its tensors itself; these checks come first, so that messages have the names of this function's arguments.
    Fp8Tensor.check("x", x, "x_scale", x_scale)
    Fp8Tensor.check("w_gate", w_gate, "gate_scale", gate_scale)
    if (w_up is None) != (up_scale is None):
        missing, there = ("w_up", "up_scale") if w_up is None else ("up_scale", "w_up")
        raise ArgumentError(f"{missing} is None, but {there} is given; give both, or neither where w_gate holds both weights.")
    up = None
    if w_up is not None and up_scale is not None:
        Fp8Tensor.check("w_up", w_up, "up_scale", up_scale)
        up = Fp8Tensor(w_up, up_scale)
    rows = Fp8Tensor(x, x_scale)
    call = bind(rows, Fp8Tensor(w_gate, gate_scale), up, out_dtype=out_dtype, constant_weights=constant_weights)
    return run(rows, call, variant)


def swiglu_nvfp4(
    x: torch.Tensor,
    w_gate: NVFP4Tensor,
    w_up: NVFP4Tensor | None = None,
    *,
    constant_weights: bool = False,
    variant: str = dispatch.AUTO,
) -> torch.Tensor:
    """Compute :func:`onelaunch.ops.swiglu` of 16-bit rows and NVFP4 weights.

    Args:
        x: Rows, shape ``[..., K]``, float16 or bfloat16.
        w_gate: Weight of the gate, shape ``[N, K]``; shape ``[2 N, K]``, the gate's rows first, without ``w_up``.
        w_up: Weight of up, shape ``[N, K]``, or ``None``.
        constant_weights: Promise that no work still running on the GPU writes the weights; see :func:`onelaunch.ops.swiglu`.
        variant: Name from ``swiglu.variants``, or ``"auto"``.

    Returns:
        ``h``, shape ``[..., N]``, dtype of ``x``.

    Raises:
        OneLaunchError: An argument does not fit, in the cases of :func:`onelaunch.ops.swiglu`.
    """
    for name, weight in (("w_gate", w_gate), ("w_up", w_up)):
        if weight is not None and not isinstance(weight, NVFP4Tensor):
            raise ArgumentError(f"{name} is {type(weight).__name__}; it must be an NVFP4Tensor: quantize_nvfp4 makes one.")
    checks.tensor("x", x)
    return swiglu(x, w_gate, w_up, constant_weights=constant_weights, variant=variant)


def dual_gemm_nvfp4(
    a: torch.Tensor,
    b1: torch.Tensor,
    b2: torch.Tensor,
    sfa: torch.Tensor,
    sfb1: torch.Tensor,
    sfb2: torch.Tensor,
    *,
    swizzled: bool = False,
    a_global: torch.Tensor | None = None,
    b1_global: torch.Tensor | None = None,
    b2_global: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float16,
    variant: str = dispatch.AUTO,
) -> torch.Tensor:
    """Compute ``silu(a b1^T) * (a b2^T)`` with all operands in NVFP4.

    This is :func:`onelaunch.ops.swiglu` with the arguments of the write-up "dual GEMM with a SiLU-mul epilogue".

    Args:
        a: Codes of the rows, shape ``[M, K / 2]``, uint8; two e2m1 codes per byte, the first in the lower half.
        b1: Codes of the gate's weight, shape ``[N, K / 2]``, uint8.
        b2: Codes of the other weight, shape ``[N, K / 2]``, uint8.
        sfa: Block scales of ``a``, shape ``[M, K / 16]``, float8_e4m3fn; rounded up to whole atoms of 128 x 4 if ``swizzled``.
        sfb1: Block scales of ``b1``, shape ``[N, K / 16]``, float8_e4m3fn; rounded up like ``sfa``.
        sfb2: Block scales of ``b2``, shape ``[N, K / 16]``, float8_e4m3fn; rounded up like ``sfa``.
        swizzled: Flag that the scales are in the 128 x 4 order of cuBLAS.
        a_global: Global scale of ``a``, float32, one element. Defaults to 1.
        b1_global: Global scale of ``b1``, float32, one element. Defaults to 1.
        b2_global: Global scale of ``b2``, float32, one element. Defaults to 1.
        out_dtype: Dtype of the result: float16, bfloat16 or float32.
        variant: Name from ``swiglu.variants``, or ``"auto"``.

    Returns:
        Result, shape ``[M, N]``, dtype ``out_dtype``.

    Raises:
        OneLaunchError: An argument does not fit, in the cases of :func:`onelaunch.ops.swiglu`; or codes or scales have the wrong
            shape or dtype.
    """
    parts = (
        ("a", a, "sfa", sfa, "a_global", a_global),
        ("b1", b1, "sfb1", sfb1, "b1_global", b1_global),
        ("b2", b2, "sfb2", sfb2, "b2_global", b2_global),
    )
    for part in parts:
        NVFP4Tensor.check(*part, swizzled=swizzled)
    rows, gate, up = (NVFP4Tensor(codes, scales, shared, swizzled) for _, codes, _, scales, _, shared in parts)
    return run(rows, bind(rows, gate, up, out_dtype=out_dtype, names=("a", "b1", "b2")), variant)
