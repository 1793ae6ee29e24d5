"""Launches of the Hopper matrix product for ``swiglu``: the kernel, both weights as one tensor, and everything else of a call."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from onelaunch import cuda
from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv
from onelaunch.kernels.gemm_sm90.config import GemmConfig
from onelaunch.kernels.gemm_sm90.kernel import Gemm, gemm_of, matrix_map
from onelaunch.kernels.tma import ROW_BYTES, address, addressable, tensor_map
from onelaunch.launch.launch import CudaLaunch
from onelaunch.launch.workspace import counters
from onelaunch.ops.swiglu.configure_hopper import cut_of, reads_early, tile_columns

GROUP = 8
"""Rows of a weight that follow each other in a tile, before as many of the other."""

FARTHEST = 1 << 40
"""Bytes between two weights that TMA can step over."""

MAP: cuda.Kind = "map"
POINTER: cuda.Kind = "pointer"
NUMBER: cuda.Kind = "i32"
KINDS = (*[MAP] * 4, *[POINTER] * 7, *[NUMBER] * 10)
"""Kinds of the parameters in ``operands/swiglu.cuh``."""


class Matrices(NamedTuple):
    """Two matrices of one shape as one tensor of four dimensions: channels, 8 rows, this or the other, groups of rows."""

    dtype: torch.dtype
    address: int
    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    flipped: bool
    """Whether the first lies behind the second."""
    owners: tuple[torch.Tensor, ...]
    """Keep the memory."""


def together(first: torch.Tensor, second: torch.Tensor) -> Matrices:
    """Return both where they lie, if one distance leads from each row of one to that of the other; else copies that do."""
    first, second = addressable(first), addressable(second)
    distance = address(second) - address(first)
    if first.stride(0) != second.stride(0) or distance % 16 or not 0 < abs(distance) < FARTHEST:
        first, second = torch.stack((first, second)).unbind()
        distance = address(second) - address(first)
    rows, channels = first.shape
    row = first.stride(0) * first.element_size()
    return Matrices(
        first.dtype, min(address(first), address(second)), (channels, GROUP, 2, rows // GROUP),
        (row, abs(distance), GROUP * row), distance < 0, (first, second),
    )  # fmt: skip


def in_words(blocks: torch.Tensor) -> torch.Tensor:
    """Return block scales as threads read them, 16 at once: contiguous rows, from an address that is a multiple of 16."""
    blocks = blocks.contiguous()
    return blocks.clone() if address(blocks) % 16 else blocks


def map_of_x(matrix: torch.Tensor, config: GemmConfig) -> bytes:
    """Return the map of x: 128 bytes of each row of a tile, or beside NVFP4 weights several such chunks, one after the other."""
    (rows, channels), size = matrix.shape, matrix.element_size()
    width, row = ROW_BYTES // size, matrix.stride(0) * size
    if config.nvfp4:
        pieces = (width, rows, channels // width)
        return tensor_map(matrix.dtype, address(matrix), pieces, (row, ROW_BYTES), (width, config.b_rows, config.chunks))
    return matrix_map(matrix, min(config.b_rows, rows), width)


SENT_COLUMNS = 32
"""Columns of a result that a warpgroup stores."""


def sent_rows(finished: int) -> int:
    """Return the rows of a result that are stored at once, where a CTA finishes so many rows of a tile."""
    return next((rows for rows in (64, 32) if finished % rows == 0), finished)


def map_of_result(result: torch.Tensor, matrices: int, rows: int) -> bytes:
    """Return the map of matrices side by side in ``result [M, matrices N]``, in boxes that end where their matrix does."""
    (length, width), size = result.shape, result.element_size()
    columns = width // matrices
    sizes, strides = (columns, matrices, length), (columns * size, width * size)
    return tensor_map(result.dtype, address(result), sizes, strides, (SENT_COLUMNS, 1, rows), swizzle=64)


@functools.cache
def gemm_for(config: GemmConfig, *, scaled: bool, keep: bool) -> Gemm:
    """Return the kernel in a configuration, with or without scales of the products, and keeping both products or not."""
    return gemm_of(config, "swiglu", KINDS, SCALED=int(scaled), KEEP=int(keep))


class Scales(NamedTuple):
    """Factors of the products: float32, of one element or of one for each row, those of the weights alike; ``None`` is 1."""

    x: torch.Tensor | None
    gate: torch.Tensor
    up: torch.Tensor

    @classmethod
    def of(
        cls, x: torch.Tensor | None, gate: torch.Tensor | None, up: torch.Tensor | None, device: torch.device
    ) -> Scales | None:
        """Return ``None`` if there are none."""
        if x is None and gate is None and up is None:
            return None
        gate, up = (
            torch.ones((), dtype=torch.float32, device=device) if each is None else each.contiguous() for each in (gate, up)
        )
        return cls(None if x is None else x.contiguous(), gate, up)


class Plan(NamedTuple):
    """Everything of a launch that the addresses of its tensors do not change."""

    gemm: Gemm
    units: int
    sums: int
    """float32 numbers that CTAs leave for each other."""
    words: int
    """64 bits each: a flag of 32 for each CTA that leaves sums, or two counters of tiles."""
    weight_box: tuple[int, int, int, int]
    result_rows: int
    """Rows of a result that are stored at once."""
    numbers: tuple[int, int, int, int, int, int]
    """M, N, K, and how the work is cut."""
    early: bool


@functools.lru_cache(maxsize=4096)
def plan_of(
    config: GemmConfig,
    shape: tuple[int, int, int],
    multiprocessors: int,
    *,
    scaled: bool,
    keep: bool,
    constant_weights: bool,
) -> Plan:
    """Return the plan of calls of this ``shape`` (M, N, K); other arguments as of :func:`dual_gemm`."""
    cut = cut_of(config, shape, multiprocessors)
    columns = tile_columns(config)
    return Plan(
        gemm=gemm_for(config, scaled=scaled, keep=keep),
        units=cut.units,
        sums=cut.units * config.b_rows * columns * 2 if cut.shares else 0,
        words=cdiv(cut.units, 2) if cut.shares else 1 if config.schedule == "persistent" else 0,
        weight_box=(config.a_row_bytes // (1 if config.nvfp4 else config.element.itemsize), GROUP, 2, columns // GROUP),
        result_rows=sent_rows(config.b_rows // 2 if config.schedule == "split_k_cluster" else config.b_rows),
        numbers=(*shape, cut.each, cut.more, cut.grain),
        early=constant_weights and reads_early(config, cut, shape[0]),
    )


def launch_of(
    config: GemmConfig,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    blocks: tuple[torch.Tensor, torch.Tensor] | None,
    scales: Scales | None,
    *,
    keep: bool,
    constant_weights: bool,
) -> tuple[CudaLaunch, torch.Tensor, torch.Tensor | None]:
    """Return the launch of :func:`dual_gemm`, and memory for its results."""
    x, (rows, channels), columns, device = addressable(x), x.shape, weights[0].shape[0], x.device
    plan = plan_of(
        config, (rows, columns, channels), processors(device),
        scaled=scales is not None, keep=keep, constant_weights=constant_weights,
    )  # fmt: skip
    matrices = together(*weights)
    gate_blocks, up_blocks = (None, None) if blocks is None else map(in_words, blocks)
    h = torch.empty((rows, columns), dtype=config.result, device=device)
    both = torch.empty((rows, 2 * columns), dtype=config.result, device=device) if keep else None
    partials = torch.empty(plan.sums, dtype=torch.float32, device=device) if plan.sums else None
    words = counters(device, plan.words) if plan.words else None
    weight_map = tensor_map(
        matrices.dtype, matrices.address, matrices.sizes, matrices.strides, plan.weight_box, swizzle=config.a_row_bytes
    )
    h_map = map_of_result(h, 1, plan.result_rows)
    both_map = h_map if both is None else map_of_result(both, 2, plan.result_rows)
    of_x, of_gate, of_up = scales or (None, None, None)
    per_row = [each is not None and each.numel() > 1 for each in (of_x, of_gate)]
    arguments = (
        map_of_x(x, config), weight_map, h_map, both_map, gate_blocks, up_blocks, of_x, of_gate, of_up,
        partials, words, *plan.numbers, matrices.flipped, *per_row, plan.early,
    )  # fmt: skip
    owners = (x, *matrices.owners)
    return CudaLaunch(plan.gemm.kernel, device, (plan.units, 1, 1), *arguments, owners=owners), h, both


def dual_gemm(
    config: GemmConfig,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    blocks: tuple[torch.Tensor, torch.Tensor] | None,
    scales: Scales | None,
    *,
    keep: bool = False,
    constant_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``h [M, N]`` of ``x [M, K]``, and both products ``[M, 2 N]`` if they are to be kept.

    ``weights`` are ``[N, K]`` of the dtype of x, or codes ``[N, K / 2]`` beside ``blocks``, their scales ``[N, K / 16]``.
    ``constant_weights``: they may be read beside the end of earlier launches.
    """
    launch, h, both = launch_of(config, x, weights, blocks, scales, keep=keep, constant_weights=constant_weights)
    launch.run()
    return h, both
