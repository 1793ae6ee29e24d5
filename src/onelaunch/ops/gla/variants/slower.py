"""Calls of ``gla`` on Hopper GPUs that fla (flash-linear-attention) 0.6.0 runs faster than the variant that ``auto`` takes.

``onelaunch explain`` quotes these statements where no table of measured times compares the two. They are registered by
``slower_than`` and do not influence the choice. The measurements and the estimates are in the log of the operation's notebook,
docs/notebook/gla.md, in entries of 2026-11-21 and 2026-11-26.
"""

from __future__ import annotations

import torch

from onelaunch.device.hardware import is_hopper
from onelaunch.operation import Query
from onelaunch.ops.gla.contract import FUSED_RECURRENT, gla
from onelaunch.ops.gla.variants.peers import FEW_STEPS, chunk_backward

_WIDE, _WIDEST = 128, 256
"""Most key channels of the heads that ``hopper`` takes, with float32 and with 16-bit log-decays per channel."""

_TF32 = "fla multiplies float32 in TF32, whatever PyTorch's settings say, so its results are less accurate"


def _on_hopper(query: Query) -> bool:
    """Return whether a call is one on a Hopper GPU."""
    return query.device_type == "cuda" and is_hopper(torch.device(query.device))


def _fla_takes_chunks(query: Query) -> bool:
    """Return whether a call is one of many steps on a Hopper GPU that ``chunk_gla`` or ``chunk_simple_gla`` can run."""
    many = query.sizes[1] > FEW_STEPS and "value_gate" not in query.flags
    return many and _on_hopper(query) and chunk_backward(query) is None


@gla.variants[FUSED_RECURRENT].slower_than("fla")
def step_by_step(query: Query) -> str | None:
    """Return why a loop over many steps is slower than fla's chunks, or ``None``. Decays of values have no chunks."""
    if not _fla_takes_chunks(query):
        return None
    if query.dtype is torch.float32:
        took = "it took 2.08 ms and chunk_gla 0.58 at B=4, T=2048, H=16, K=V=128 forward on an H100"
        return f"{took}; it was not timed with gradients; {_TF32}" if query.grad else f"{took}; {_TF32}"
    keys = query.sizes[3]
    if "scalar_decay" not in query.flags and keys > _WIDEST:
        return "by an estimate, not a measurement, 12 ms and chunk_gla 4 at B=4, T=2048, H=16, K=V=512 forward on an H100"
    if "scalar_decay" not in query.flags and "float32_decay" in query.flags and keys > _WIDE:
        return (
            "by an estimate, not a measurement, 2.3 ms and chunk_gla 1 at B=4, T=2048, H=16, K=V=256 with float32 log-decays "
            "forward on an H100"
        )
    return None


@gla.variants["fused"].slower_than("fla")
def portable_products(query: Query) -> str | None:
    """Return why the portable kernels are slower than fla's on a Hopper GPU, or ``None``."""
    if not _fla_takes_chunks(query):
        return None
    if query.dtype is torch.float32:
        took = "with TF32 allowed it took 2.54 ms and chunk_gla 0.58 at B=4, T=2048, H=16, K=V=128 forward on an H100"
        return f"{took}; it was not timed with gradients; {_TF32}" if query.grad else f"{took}; {_TF32}"
    return "it does not use WGMMA, and took 12 ms and chunk_gla 2.0 at B=1, T=8192, H=96, K=V=128 forward in bfloat16 on an H200"
