"""Names of ``swiglu`` for operands in few bits: plain tensors in, as kernels and checkpoints hold them."""

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
    """:func:`onelaunch.ops.swiglu` of float8 matrices and their scales.

        h = silu((x x_scale) (w_gate gate_scale)^T) * ((x x_scale) (w_up up_scale)^T)

    Args:
        x: ``[M, K]`` float8_e4m3fn, K a multiple of 16.
        w_gate: ``[N, K]`` float8_e4m3fn, N a multiple of 16; ``[2 N, K]`` if ``w_up`` is ``None``.
        w_up: ``[N, K]`` float8_e4m3fn, or ``None``.
        x_scale: float32, of one element or ``[M, 1]``.
        gate_scale: float32, of one element or ``[N, 1]``; ``[2 N, 1]`` for stacked weights.
        up_scale: float32, of one element or ``[N, 1]``; needed together with ``w_up``.
        out_dtype: bfloat16, float16 or float32.
        constant_weights: as in :func:`onelaunch.ops.swiglu`.
        variant: a name from ``swiglu.variants``, or ``"auto"``.

    Returns:
        ``h [M, N]``.

    Raises:
        OneLaunchError: as :func:`onelaunch.ops.swiglu`.
    """
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
    """:func:`onelaunch.ops.swiglu` of 16-bit rows and NVFP4 weights.

    Args:
        x: ``[..., K]`` float16 or bfloat16.
        w_gate: ``[N, K]``, or ``[2 N, K]`` without ``w_up``.
        w_up: ``[N, K]``.
        constant_weights: as in :func:`onelaunch.ops.swiglu`.
        variant: a name from ``swiglu.variants``, or ``"auto"``.

    Returns:
        ``h [..., N]`` in the dtype of ``x``.

    Raises:
        OneLaunchError: as :func:`onelaunch.ops.swiglu`.
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
    """``silu(a b1^T) * (a b2^T)`` with both sides in NVFP4: :func:`onelaunch.ops.swiglu` as the write-up states it.

    Args:
        a: ``[M, K / 2]`` uint8, two e2m1 codes a byte, the lower half first.
        b1: ``[N, K / 2]`` uint8, the gate's.
        b2: ``[N, K / 2]`` uint8.
        sfa: ``[M, K / 16]`` float8_e4m3fn; of whole atoms of 128 x 4 if ``swizzled``.
        sfb1: ``[N, K / 16]`` float8_e4m3fn, likewise.
        sfb2: ``[N, K / 16]`` float8_e4m3fn, likewise.
        swizzled: scales lie in the 128 x 4 order of cuBLAS.
        a_global: float32 of one element. Default: 1.
        b1_global: float32 of one element. Default: 1.
        b2_global: float32 of one element. Default: 1.
        out_dtype: float16, bfloat16 or float32.
        variant: a name from ``swiglu.variants``, or ``"auto"``.

    Returns:
        ``[M, N]``.

    Raises:
        OneLaunchError: as :func:`onelaunch.ops.swiglu`, and naming codes or scales of the wrong shape or dtype.
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
