"""Launch of the output projection of a few rows on Hopper: the rows are normalized and gated while the weights are on their way.

:func:`onelaunch.ops.output_chain.launch_prologue.prologue` calls :func:`few_rows` with the configuration that
:func:`config_for` returned.
"""

from __future__ import annotations

import torch

from onelaunch import cuda
from onelaunch.device.architectures import HOPPER_SHARED_BYTES
from onelaunch.device.hardware import is_hopper, processors, shared_bytes
from onelaunch.kernels.tma import address, addressable
from onelaunch.launch.launch import CudaLaunch
from onelaunch.ops.output_chain.configure_few_rows import FewRowsConfig, config_of, kernel_of
from onelaunch.ops.output_chain.launch import Made, Operands

_LEAST_EPS = 2.0**-126
"""Least eps of the kernel, whose reciprocal square root takes smaller numbers for 0."""


def config_for(given: Operands, w_out: torch.Tensor, eps: float) -> FewRowsConfig | None:
    """Return the configuration of a call, or ``None`` if it needs the portable kernel of ``launch_prologue.py``."""
    h, weight, device = given.h, given.norm_weight, given.h.device
    if h.dtype is not torch.bfloat16 or eps < _LEAST_EPS or not is_hopper(device):
        return None
    if shared_bytes(device) < HOPPER_SHARED_BYTES or cuda.missing() is not None:
        return None
    gate = "none" if given.gate is None else "activated" if given.activated else "silu"
    norm = "none" if weight is None else "float32" if weight.dtype is torch.float32 else "bfloat16"
    sizes = int(h.shape[0]), int(w_out.shape[0]), int(given.heads), int(given.values)  # a tracer's sizes cannot be hashed
    return config_of(*sizes, gate, norm, processors(device))


def few_rows(
    config: FewRowsConfig, given: Operands, w_out: torch.Tensor, bias: torch.Tensor | None, eps: float, *, keep: bool
) -> Made:
    """Launch the projection; return ``out [M, D]`` bfloat16 and, with ``keep``, rstd ``[M, H]`` float32."""
    h, w_out = addressable(given.h), addressable(w_out)
    gate = None if given.gate is None else addressable(given.gate)
    weight = given.norm_weight
    if weight is not None and address(weight) % 16:
        weight = weight.clone()
    rows, columns = h.shape[0], w_out.shape[0]
    out = h.new_empty(rows, columns)
    rstd = h.new_empty(rows, given.heads, dtype=torch.float32) if keep else None
    CudaLaunch(
        kernel_of(config), h.device, (config.ctas(columns), 1, 1),
        h, gate, weight, w_out, None if bias is None else bias.contiguous(), out, rstd, rows, columns,
        h.stride(0), 0 if gate is None else gate.stride(0), w_out.stride(0), eps,
    ).run()  # fmt: skip
    return Made(out, rstd)
