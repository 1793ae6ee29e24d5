"""Gluon as this package uses it: the one place that knows which name a Triton release gives to what, and what it leaves undone.

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


@gluon.jit
def keep_barriers(bars):
    """Up to here nothing else lies where these barriers do.

    Triton gives the room of barriers that are not used any more to others, such as words that warps exchange for a reduction;
    PTX asks that they be invalidated first. On an H200 that several processes shared, such words came to hold what barriers hold.
    """
    for i in gl.static_range(len(bars)):
        bars[i]._keep_alive()  # noqa: SLF001


__all__ = [
    "TensorDescriptor",
    "block_barrier",
    "fence_async_shared",
    "gl",
    "gluon",
    "keep_barriers",
    "mbarrier",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
