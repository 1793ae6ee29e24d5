"""Launches of ``wide_gemm.cu``."""

from __future__ import annotations

import functools

import torch

from onelaunch import cuda
from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv
from onelaunch.kernels.tma import ROW_BYTES, addressable, tensor_map
from onelaunch.ops.projections.autograd import Packed, Wanted
from onelaunch.ops.projections.hopper_tiles import BLOCK_M, PANEL, STEP, Shared, Tiles, counts, header, tiles_for
from onelaunch.ops.projections.launch import room_for_results
from onelaunch.ops.projections.layout import Layout
from onelaunch.ops.warpgroup_products import product_header

ELEMENTS = {torch.bfloat16: 0, torch.float16: 1}
SHARED: dict[Shared, int] = {"nothing": 0, "x": 1, "weight": 2}
"""As the kernel has them."""

KINDS: tuple[cuda.Kind, ...] = (*["map"] * 5, *["pointer"] * 4, *["i32"] * 3, "f32")  # pyrefly: ignore[bad-assignment]
"""Of the kernel's arguments."""


def map_of(matrix: torch.Tensor, rows: int, columns: int) -> bytes:
    """Of boxes of so many rows and columns: 128 bytes of each row."""
    (height, width), size = matrix.shape, matrix.element_size()
    return tensor_map(matrix.dtype, matrix.data_ptr(), (width, height), (matrix.stride(0) * size,), (columns, rows))


@functools.lru_cache(maxsize=1024)
def source(layout: Layout, tiles: Tiles, element: torch.dtype, *, keep: bool) -> cuda.Source:
    """The kernel for one layout in one configuration."""
    here = "onelaunch.ops.projections"
    products = product_header(element, tiles.columns)
    if tiles.narrow < tiles.columns:
        products += product_header(element, tiles.narrow).replace("#pragma once\n", "")
    headers = (
        cuda.include("hopper.cuh"),
        ("products.cuh", products),
        ("segments.cuh", header(layout, tiles)),
        ("activations.cuh", cuda.read(here, "activations.cuh")),
    )
    defines = {
        "BLOCK_N": tiles.columns, "NARROW": tiles.narrow, "STAGES": tiles.stages, "SHARED": SHARED[tiles.shared],
        "ELEMENT": ELEMENTS[element], "KEEP": int(keep),
    }  # fmt: skip
    return cuda.Source("wide_gemm.cu", cuda.read(here, "wide_gemm.cu"), "wide_gemm", headers, tuple(defines.items()))


@functools.lru_cache(maxsize=1024)
def function(device: torch.device, layout: Layout, tiles: Tiles, element: torch.dtype, *, keep: bool) -> cuda.Function:
    """The same, loaded."""
    code = source(layout, tiles, element, keep=keep)
    return cuda.load(
        code, device, KINDS, threads=tiles.threads, shared_bytes=tiles.shared_bytes, cluster=tiles.cluster, overlap=True
    )


def programs(layout: Layout, tiles: Tiles, rows: int, multiprocessors: int) -> int:
    """Of a launch: as many as there are processors, in whole clusters, and none without work."""
    units = tiles.units(rows, len(list(counts(layout, tiles.columns))))
    return min(units, multiprocessors // tiles.cluster) * tiles.cluster


@functools.lru_cache(maxsize=4096)
def plan_of(
    device: torch.device, layout: Layout, rows: int, channels: int, element: torch.dtype, shared: Shared, *, keep: bool
) -> tuple[cuda.Function, Tiles, int]:
    """Of calls of this size: the kernel, its tiles, programs."""
    multiprocessors = processors(device)
    tiles = tiles_for(layout, rows, channels, multiprocessors, shared)
    launch = function(device, layout, tiles, element, keep=keep)
    return launch, tiles, programs(layout, tiles, rows, multiprocessors)


def wide_gemm(shared: Shared, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Wanted) -> Packed:
    """All segments in one launch, whose clusters have this in common."""
    layout = wanted.layout
    x, weight = addressable(x), addressable(weight)
    bias = None if bias is None else bias.contiguous()
    rows, channels = x.shape
    launch, tiles, count = plan_of(x.device, layout, rows, channels, x.dtype, shared, keep=wanted.keep)
    y, rstd, kept = room_for_results(x, layout, keep=wanted.keep)
    box = BLOCK_M // 2 if tiles.shared == "x" else min(BLOCK_M, cdiv(rows, 8) * 8)  # of x, in rows
    y_map = map_of(y, PANEL, PANEL)
    launch(
        (count, 1, 1),
        map_of(x, box, STEP),
        map_of(weight, tiles.columns // tiles.unit_rows, STEP),
        map_of(weight, tiles.narrow, STEP),
        y_map,
        y_map if kept is None else map_of(kept, PANEL, PANEL),
        bias,
        rstd,
        y,
        kept,
        rows,
        channels,
        box * tiles.unit_columns * ROW_BYTES,
        wanted.eps,
    )
    return Packed(y, rstd, kept)
