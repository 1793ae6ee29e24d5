"""Launches of the Hopper matrix product for ``swiglu``: tensor maps, workspace, scales and the kernel's arguments.

:func:`dual_gemm` is the entry, which ``variants/hopper.py`` calls with the configuration that ``configure_hopper.py`` chooses.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from onelaunch import cuda
from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv
from onelaunch.kernels.gemm_sm90.config import GemmConfig
from onelaunch.kernels.gemm_sm90.kernel import Gemm, gemm_of, matrix_map
from onelaunch.kernels.tma import ROW_BYTES, address, addressable, distance, tensor_map
from onelaunch.launch.launch import CudaLaunch
from onelaunch.launch.workspace import counters
from onelaunch.ops.swiglu.configure_hopper import partition_of, reads_early, tile_columns

_GROUP_ROWS = 8
"""Rows of one weight that follow each other in operand A, before as many rows of the other weight."""

_FARTHEST = 1 << 40
"""Bound of the stride of a tensor map in bytes, and so of the distance between the weights."""

_MAP: cuda.Kind = "map"
_POINTER: cuda.Kind = "pointer"
_NUMBER: cuda.Kind = "i32"
PARAMETER_KINDS = (*[_MAP] * 4, *[_POINTER] * 7, *[_NUMBER] * 10)
"""Kinds of the kernel parameters, in the order of ``operands/swiglu.cuh``."""


class InterleavedWeights(NamedTuple):
    """Two weights of one shape as one tensor of four dimensions: channels, 8 rows, weight, groups of 8 rows.

    The weight at the lower address comes first.
    """

    dtype: torch.dtype
    """dtype of both weights."""
    address: int
    """Address of the weight that comes first."""
    sizes: tuple[int, int, int, int]
    """Number of elements along each dimension, innermost first."""
    strides: tuple[int, int, int]
    """Strides in bytes of all dimensions but the innermost."""
    up_first: bool
    """Flag that the second weight (up) lies at a lower address than the first (the gate's)."""
    owners: tuple[torch.Tensor, ...]
    """Tensors that own the memory; they must outlive the launch."""


def interleaved(first: torch.Tensor, second: torch.Tensor) -> InterleavedWeights:
    """Return both weights interleaved by strides alone; copy them first if TMA cannot address them so."""
    first, second = addressable(first), addressable(second)
    apart = distance(first, second)  # 0 for one weight passed twice, which no stride can express
    if first.stride(0) != second.stride(0) or apart % 16 or not 0 < abs(apart) < _FARTHEST:
        first, second = torch.stack((first, second)).unbind()
        apart = distance(first, second)
    rows, channels = first.shape
    row = first.stride(0) * first.element_size()
    return InterleavedWeights(
        first.dtype, min(address(first), address(second)), (channels, _GROUP_ROWS, 2, rows // _GROUP_ROWS),
        (row, abs(apart), _GROUP_ROWS * row), apart < 0, (first, second),
    )  # fmt: skip


def _aligned_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Return block scales contiguous and 16-byte aligned, because threads copy up to 16 bytes at once."""
    blocks = blocks.contiguous()
    return blocks.clone() if address(blocks) % 16 else blocks


def _x_map(matrix: torch.Tensor, config: GemmConfig) -> bytes:
    """Return the tensor map of x: a box has 128 bytes of each row of a tile, or with NVFP4 weights several such chunks."""
    (rows, channels), size = matrix.shape, matrix.element_size()
    width, row = ROW_BYTES // size, matrix.stride(0) * size
    if config.nvfp4:
        pieces = (width, rows, channels // width)
        return tensor_map(matrix.dtype, address(matrix), pieces, (row, ROW_BYTES), (width, config.b_rows, config.chunks))
    return matrix_map(matrix, min(config.b_rows, rows), width)  # the kernel expects the bytes of this box: operands/swiglu.cuh


_STORE_COLUMNS = 32
"""Columns of a result that one warpgroup stores; ``epilogue/swiglu.cuh`` relies on it."""


def store_rows(finished: int) -> int:
    """Return the rows of one TMA store, for a CTA that finishes ``finished`` rows of a tile: ``STORE_ROWS`` of the epilogue."""
    return next((rows for rows in (64, 32) if finished % rows == 0), finished)


def _result_map(result: torch.Tensor, matrices: int, rows: int) -> bytes:
    """Return the tensor map of matrices side by side in ``result [M, matrices N]``.

    The matrix is a dimension of its own, so that a box ends where its matrix does.
    """
    (length, width), size = result.shape, result.element_size()
    columns = width // matrices
    sizes, strides = (columns, matrices, length), (columns * size, width * size)
    return tensor_map(result.dtype, address(result), sizes, strides, (_STORE_COLUMNS, 1, rows), swizzle=64)


@functools.cache
def gemm_for(config: GemmConfig, *, scaled: bool, keep: bool) -> Gemm:
    """Return the kernel of a configuration; ``scaled`` if products have scales, ``keep`` if it stores both products."""
    return gemm_of(config, "swiglu", PARAMETER_KINDS, SCALED=int(scaled), KEEP=int(keep))


class Scales(NamedTuple):
    """Scales of the operands: float32, one element or one for each row (both weights alike); ``None`` stands for 1."""

    x: torch.Tensor | None
    gate: torch.Tensor
    up: torch.Tensor

    @classmethod
    def of(
        cls, x: torch.Tensor | None, gate: torch.Tensor | None, up: torch.Tensor | None, device: torch.device
    ) -> Scales | None:
        """Return the scales, contiguous, or ``None`` if there are none."""
        if x is None and gate is None and up is None:
            return None
        gate, up = (
            torch.ones((), dtype=torch.float32, device=device) if each is None else each.contiguous() for each in (gate, up)
        )
        return cls(None if x is None else x.contiguous(), gate, up)


class Plan(NamedTuple):
    """Part of a launch that does not depend on the addresses of its tensors; cached by :func:`plan_of`."""

    gemm: Gemm
    """Kernel and its configuration."""
    units: int
    """Number of CTAs."""
    workspace_floats: int
    """float32 elements of the stream-K workspace, in which CTAs leave partial sums; 0 unless CTAs of stream-K share tiles."""
    counter_words: int
    """64-bit words for the counters: a 32-bit flag for each CTA of stream-K, or the two 32-bit
    counters of ``persistent``: tiles taken, and CTAs that have finished."""
    weight_box: tuple[int, int, int, int]
    """Box of the weights' tensor map, innermost first."""
    result_rows: int
    """Rows of one TMA store."""
    sizes: tuple[int, int, int, int, int, int]
    """M, N, K, and the granules of a unit, longer units and k-blocks of a granule of the partition."""
    early: bool
    """Flag that weights are loaded before earlier launches have ended."""


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
    """Return the plan for calls of ``shape`` (M, N, K) on a device with this number of SMs.

    ``scaled`` tells that the operands have scales. The other flags are those of :func:`dual_gemm`.
    """
    partition = partition_of(config, shape, multiprocessors)
    columns = tile_columns(config)
    return Plan(
        gemm=gemm_for(config, scaled=scaled, keep=keep),
        units=partition.units,
        workspace_floats=partition.units * config.b_rows * columns * 2 if partition.splits_tiles else 0,
        counter_words=cdiv(partition.units, 2) if partition.splits_tiles else 1 if config.schedule == "persistent" else 0,
        weight_box=(
            config.a_row_bytes // (1 if config.nvfp4 else config.element.itemsize),
            _GROUP_ROWS,
            2,
            columns // _GROUP_ROWS,
        ),
        result_rows=store_rows(config.b_rows // 2 if config.schedule == "split_k_cluster" else config.b_rows),
        sizes=(*shape, partition.unit_granules, partition.longer_units, partition.granule),
        early=constant_weights and reads_early(config, partition, shape[0]),
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
    """Return the launch of :func:`dual_gemm`, and the uninitialized tensors of its results: h, and both products or None."""
    x, (rows, channels), columns, device = addressable(x), x.shape, weights[0].shape[0], x.device
    plan = plan_of(
        config, (rows, columns, channels), processors(device),
        scaled=scales is not None, keep=keep, constant_weights=constant_weights,
    )  # fmt: skip
    matrices = interleaved(*weights)
    gate_blocks, up_blocks = (None, None) if blocks is None else map(_aligned_scales, blocks)
    h = torch.empty((rows, columns), dtype=config.result, device=device)
    both = torch.empty((rows, 2 * columns), dtype=config.result, device=device) if keep else None
    workspace = torch.empty(plan.workspace_floats, dtype=torch.float32, device=device) if plan.workspace_floats else None
    flags = counters(device, plan.counter_words) if plan.counter_words else None
    weight_map = tensor_map(
        matrices.dtype, matrices.address, matrices.sizes, matrices.strides, plan.weight_box, swizzle=config.a_row_bytes
    )
    h_map = _result_map(h, 1, plan.result_rows)
    both_map = h_map if both is None else _result_map(both, 2, plan.result_rows)
    x_scale, gate_scale, up_scale = scales or (None, None, None)
    per_row = [each is not None and each.numel() > 1 for each in (x_scale, gate_scale)]
    arguments = (
        _x_map(x, config), weight_map, h_map, both_map, gate_blocks, up_blocks, x_scale, gate_scale, up_scale,
        workspace, flags, *plan.sizes, matrices.up_first, *per_row, plan.early,
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
    """Compute ``h [M, N]`` in one launch, and both products ``[M, 2 N]`` if ``keep``.

    Args:
        config: Configuration of the kernel.
        x: Rows ``[M, K]``.
        weights: Weights of gate and up, ``[N, K]`` in the dtype of x, or NVFP4 codes ``[N, K / 2]``.
        blocks: Block scales ``[N, K / 16]`` of NVFP4 weights, else None.
        scales: Scales of the operands, or None.
        keep: Flag that both products are returned for a backward pass.
        constant_weights: Flag that the weights may be read before earlier launches have ended.
    """
    launch, h, both = launch_of(config, x, weights, blocks, scales, keep=keep, constant_weights=constant_weights)
    launch.run()
    return h, both
