"""Launches of the Hopper matrix product for ``projections``: tensor maps, the cached plan of a call's size, and arguments.

Operand A has rows of x, operand B rows of the packed weight. A segment is a block of rows of the weight with an activation of
its own. Each tile lies in one segment. Where a segment has few columns left, its last tile is *narrow*: it uses a second WGMMA
with a smaller N dimension, and loads fewer rows of the weight. With ``multicast`` "a" or "b", the two CTAs of a cluster share
that operand, and each loads one half of it into both. The variants in ``variants/hopper.py`` call :func:`wide_gemm`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from onelaunch import cuda
from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv
from onelaunch.kernels.gemm_sm90.config import GemmConfig, Multicast
from onelaunch.kernels.gemm_sm90.kernel import Gemm, gemm_of, matrix_map
from onelaunch.kernels.tma import ROW_BYTES, addressable
from onelaunch.launch.launch import CudaLaunch
from onelaunch.ops.projections.autograd import Packed, Wanted
from onelaunch.ops.projections.configure_hopper import PANEL, TILE_ROWS, cluster_tiles, configuration, counts, header
from onelaunch.ops.projections.launch import empty_results
from onelaunch.ops.projections.layout import Layout

KINDS: tuple[cuda.Kind, ...] = (*["map"] * 5, *["pointer"] * 4, *["i32"] * 3, "f32")  # pyrefly: ignore[bad-assignment]
"""Kinds of the kernel's parameters, in the order of ``kernels/gemm_sm90/operands/segments.cuh``."""


@functools.lru_cache(maxsize=1024)
def gemm_for(layout: Layout, config: GemmConfig, *, keep: bool) -> Gemm:
    """Return the kernel for one layout in one configuration; with ``keep`` it also saves what a backward pass needs."""
    headers = (("layout.cuh", header(layout, config.b_rows)),)
    return gemm_of(config, "segments", KINDS, headers=headers, KEEP=int(keep))


def ctas_of(layout: Layout, config: GemmConfig, rows: int, multiprocessors: int) -> int:
    """Return the number of CTAs of a launch: one per SM, in whole clusters, and none without work."""
    tiles = cluster_tiles(config, rows, len(list(counts(layout, config.b_rows))))
    return min(tiles, multiprocessors // config.cluster) * config.cluster


class Plan(NamedTuple):
    """The part of a launch that depends on sizes but not on tensors' addresses, so that it can be cached."""

    gemm: Gemm
    """Kernel and its configuration."""
    ctas: int
    """Number of CTAs."""
    x_box: int
    """Number of rows of x in one TMA load."""
    weight_box: int
    """Number of rows of the weight in one TMA load, for tiles that are not narrow: half a tile's if they are multicast."""
    x_bytes: int
    """Number of bytes of x that arrive in a CTA's shared memory per k-block, for which its mbarrier waits."""


@functools.lru_cache(maxsize=4096)
def plan_of(
    layout: Layout, rows: int, channels: int, element: torch.dtype, multiprocessors: int, multicast: Multicast, *, keep: bool
) -> Plan:
    """Return the plan of calls of this size."""
    config = configuration(layout, rows, channels, element, multiprocessors, multicast)
    # With few rows, a load that is not multicast has only the rows of x, in groups of 8, the period of the 128-byte swizzle.
    x_box = TILE_ROWS // 2 if multicast == "a" else min(TILE_ROWS, cdiv(rows, 8) * 8)
    return Plan(
        gemm=gemm_for(layout, config, keep=keep),
        ctas=ctas_of(layout, config, rows, multiprocessors),
        x_box=x_box,
        weight_box=config.b_rows // (2 if multicast == "b" else 1),
        x_bytes=x_box * (2 if multicast == "a" else 1) * ROW_BYTES,
    )


def launch_of(
    multicast: Multicast, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Wanted
) -> tuple[CudaLaunch, Packed]:
    """Return the launch of :func:`wide_gemm`, and uninitialized tensors for its results."""
    layout = wanted.layout
    x, weight = addressable(x), addressable(weight)
    bias = None if bias is None else bias.contiguous()
    rows, channels = x.shape
    plan = plan_of(layout, rows, channels, x.dtype, processors(x.device), multicast, keep=wanted.keep)
    config = plan.gemm.config
    y, rstd, kept = empty_results(x, layout, keep=wanted.keep)
    y_map = matrix_map(y, PANEL, PANEL)
    arguments = (
        matrix_map(x, plan.x_box, config.k_block),
        matrix_map(weight, plan.weight_box, config.k_block),
        matrix_map(weight, config.narrow or config.b_rows, config.k_block),  # for narrow tiles; not multicast
        y_map,
        y_map if kept is None else matrix_map(kept, PANEL, PANEL),  # the parameter must be a valid map, but is not stored to
        bias,
        rstd,
        y,  # y and kept again as pointers: columns that do not fill a panel are stored without TMA
        kept,
        rows,
        channels,
        plan.x_bytes,
        wanted.eps,
    )
    launch = CudaLaunch(plan.gemm.kernel, x.device, (plan.ctas, 1, 1), *arguments, owners=(x, weight))
    return launch, Packed(y, rstd, kept)


def wide_gemm(multicast: Multicast, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Wanted) -> Packed:
    """Compute all segments in one launch; the CTAs of a cluster share the operand that ``multicast`` names."""
    launch, results = launch_of(multicast, x, weight, bias, wanted)
    launch.run()
    return results
