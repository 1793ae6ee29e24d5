"""Gluon as this package uses it: the one place that knows which name a Triton release gives to what.

Gluon is ``triton.experimental`` and renames between releases; kernels import from here, and nothing else imports Gluon.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Renamed in Triton 3.9."""

tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""Renamed with it."""

tma_store_wait = tma.store_wait

block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""A barrier of all threads of a program; renamed in Triton 3.7."""

__all__ = [
    "TensorDescriptor",
    "block_barrier",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
