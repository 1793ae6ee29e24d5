"""Compatibility layer for Gluon: the names of the supported Triton releases, and a workaround for one of its gaps.

Gluon is ``triton.experimental`` and renames functions between releases. The Gluon kernels (in ``ops/*/kernels`` and
``kernels/scan``), and ``kernels/tma.py`` for their descriptors, import it from here only.
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
"""TMA load into shared memory; Triton 3.9 renamed it."""

tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""TMA store from shared memory; Triton 3.9 renamed it."""

tma_store_wait = tma.store_wait

block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Barrier of all threads of a CTA (``__syncthreads``); Triton 3.7 renamed it."""


@gluon.jit
def keep_barriers(bars):
    """Keep the shared memory of these mbarriers from being reused before this point.

    Triton reuses the shared memory of mbarriers after their last use, for example for values that warps exchange in a reduction.
    PTX requires that the mbarriers be invalidated first. On an H200 that several processes shared, such values were overwritten
    with the contents of mbarriers.
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
