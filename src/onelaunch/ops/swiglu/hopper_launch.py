"""Launches of ``dual_gemm.cu``, and how weights are described to it where they lie."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from onelaunch import cuda
from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv
from onelaunch.kernels.tma import ROW_BYTES, addressable, tensor_map
from onelaunch.launch.workspace import counters
from onelaunch.ops.swiglu.hopper_schedule import Schedule, Tiles, cut_of, reads_early
from onelaunch.ops.warpgroup_products import product_header

GROUP = 8
"""Rows of a weight that follow each other in a tile, before as many of the other."""

FARTHEST = 1 << 40
"""Bytes between two weights that the copy engine can step over."""

ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
RESULTS = {torch.bfloat16: 0, torch.float16: 1}

TAKEN: dict[Schedule, int] = {"runs": 0, "tiles": 1, "pairs": 2}

MAP: cuda.Kind = "map"
POINTER: cuda.Kind = "pointer"
NUMBER: cuda.Kind = "i32"
KINDS = (*[MAP] * 4, *[POINTER] * 7, *[NUMBER] * 10)
"""Of the kernel's arguments."""


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
    """Both where they lie, if one distance leads from each row of one to that of the other; else copies that do."""
    first, second = addressable(first), addressable(second)
    distance = second.data_ptr() - first.data_ptr()
    if first.stride(0) != second.stride(0) or distance % 16 or not 0 < abs(distance) < FARTHEST:
        first, second = torch.stack((first, second)).unbind()
        distance = second.data_ptr() - first.data_ptr()
    rows, channels = first.shape
    row = first.stride(0) * first.element_size()
    return Matrices(
        first.dtype, min(first.data_ptr(), second.data_ptr()), (channels, GROUP, 2, rows // GROUP),
        (row, abs(distance), GROUP * row), distance < 0, (first, second),
    )  # fmt: skip


def in_words(blocks: torch.Tensor) -> torch.Tensor:
    """Block scales as threads read them, 16 at once: rows one after the other, from an address that is a multiple of 16."""
    blocks = blocks.contiguous()
    return blocks.clone() if blocks.data_ptr() % 16 else blocks


def map_of(matrix: torch.Tensor, tiles: Tiles) -> bytes:
    """Of x: 128 bytes of each row of a tile, or beside NVFP4 weights so many pieces of 128 bytes, one after the other."""
    (rows, channels), size = matrix.shape, matrix.element_size()
    width, row = ROW_BYTES // size, matrix.stride(0) * size
    if tiles.nvfp4:
        pieces = (width, rows, channels // width)
        return tensor_map(matrix.dtype, matrix.data_ptr(), pieces, (row, ROW_BYTES), (width, tiles.rows, tiles.chunks))
    box = (width, min(tiles.rows, rows))
    return tensor_map(matrix.dtype, matrix.data_ptr(), (channels, rows), (row,), box)


SENT_COLUMNS = 32
"""Of a result by a warpgroup."""


def sent_rows(finished: int) -> int:
    """Of a result at once, where a program finishes so many rows of a tile."""
    return next((rows for rows in (64, 32) if finished % rows == 0), finished)


def map_of_result(result: torch.Tensor, matrices: int, rows: int) -> bytes:
    """Of matrices side by side in ``result [M, matrices N]``, so many rows at once: a tile ends where its matrix does."""
    (length, width), size = result.shape, result.element_size()
    columns = width // matrices
    sizes, strides = (columns, matrices, length), (columns * size, width * size)
    return tensor_map(result.dtype, result.data_ptr(), sizes, strides, (SENT_COLUMNS, 1, rows), swizzle=64)


@functools.cache
def source(
    tiles: Tiles, element: torch.dtype, result: torch.dtype, schedule: Schedule, *, scaled: bool, keep: bool
) -> cuda.Source:
    """The kernel for one configuration."""
    here = "onelaunch.ops.swiglu"
    names = ("work.cuh", "sums.cuh", "results.cuh", "nvfp4.cuh")
    headers = (
        cuda.include("hopper.cuh"),
        ("products.cuh", product_header(element, tiles.rows, registers=tiles.nvfp4)),
        *((name, cuda.read(here, name)) for name in names),
    )
    defines = {
        "ROWS": tiles.rows, "COLUMNS": tiles.columns, "SPLIT": tiles.split, "STAGES": tiles.stages,
        "ELEMENT": ELEMENTS[element], "RESULT": RESULTS[result], "NVFP4": int(tiles.nvfp4), "SCALED": int(scaled),
        "KEEP": int(keep), "X_TILES": tiles.chunks, "TAKEN": TAKEN[schedule],
    }  # fmt: skip
    return cuda.Source("dual_gemm.cu", cuda.read(here, "dual_gemm.cu"), "dual_gemm", headers, tuple(defines.items()))


@functools.cache
def function(
    device: torch.device,
    tiles: Tiles,
    element: torch.dtype,
    result: torch.dtype,
    schedule: Schedule,
    *,
    scaled: bool,
    keep: bool,
) -> cuda.Function:
    """The same, loaded."""
    code = source(tiles, element, result, schedule, scaled=scaled, keep=keep)
    cluster = 2 if schedule == "pairs" else 1
    return cuda.load(code, device, KINDS, threads=tiles.threads, shared_bytes=tiles.shared_bytes, cluster=cluster, overlap=True)


class Scales(NamedTuple):
    """Factors of the products: float32, of one element or of one for each row, those of the weights alike; ``None`` is 1."""

    x: torch.Tensor | None
    gate: torch.Tensor
    up: torch.Tensor

    @classmethod
    def of(
        cls, x: torch.Tensor | None, gate: torch.Tensor | None, up: torch.Tensor | None, device: torch.device
    ) -> Scales | None:
        """``None`` if there are none."""
        if x is None and gate is None and up is None:
            return None
        gate, up = (
            torch.ones((), dtype=torch.float32, device=device) if each is None else each.contiguous() for each in (gate, up)
        )
        return cls(None if x is None else x.contiguous(), gate, up)


class Plan(NamedTuple):
    """All of a launch that the addresses of its tensors do not change."""

    launch: cuda.Function
    runs: int
    sums: int
    """float32 numbers that programs leave for each other."""
    words: int
    """64 bits each: a flag of 32 for each of them that does, or two counters of tiles."""
    weight_box: tuple[int, int, int, int]
    result_rows: int
    """That are sent at once."""
    numbers: tuple[int, int, int, int, int, int]
    """M, N, K, and how the work is cut."""
    early: bool


@functools.lru_cache(maxsize=4096)
def plan_of(
    device: torch.device,
    shape: tuple[int, int, int],
    element: torch.dtype,
    result: torch.dtype,
    schedule: Schedule,
    tiles: Tiles,
    *,
    scaled: bool,
    keep: bool,
    constant_weights: bool,
) -> Plan:
    """Of calls of this ``shape`` (M, N, K); as :func:`dual_gemm`."""
    cut = cut_of(tiles, shape, element, processors(device), schedule)
    return Plan(
        launch=function(device, tiles, element, result, schedule, scaled=scaled, keep=keep),
        runs=cut.runs,
        sums=cut.runs * tiles.rows * tiles.columns * 2 if cut.shares else 0,
        words=cdiv(cut.runs, 2) if cut.shares else 1 if schedule == "tiles" else 0,
        weight_box=(tiles.weight_bytes // (1 if tiles.nvfp4 else element.itemsize), GROUP, 2, tiles.columns // GROUP),
        result_rows=sent_rows(tiles.rows // 2 if schedule == "pairs" else tiles.rows),
        numbers=(*shape, cut.each, cut.more, cut.grain),
        early=constant_weights and reads_early(tiles, cut, shape[0]),
    )


def dual_gemm(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    blocks: tuple[torch.Tensor, torch.Tensor] | None,
    scales: Scales | None,
    result: torch.dtype,
    schedule: Schedule,
    tiles: Tiles,
    *,
    keep: bool = False,
    constant_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``h [M, N]`` of ``x [M, K]``, and both products ``[M, 2 N]`` if they are to be kept.

    ``weights`` are ``[N, K]`` of the dtype of x, or codes ``[N, K / 2]`` beside ``blocks``, their scales ``[N, K / 16]``.
    ``constant_weights``: they may be read beside the end of earlier launches.
    """
    x, (rows, channels), columns, device = addressable(x), x.shape, weights[0].shape[0], x.device
    plan = plan_of(
        device, (rows, columns, channels), x.dtype, result, schedule, tiles,
        scaled=scales is not None, keep=keep, constant_weights=constant_weights,
    )  # fmt: skip
    matrices = together(*weights)
    gate_blocks, up_blocks = (None, None) if blocks is None else map(in_words, blocks)
    h = torch.empty((rows, columns), dtype=result, device=device)
    both = torch.empty((rows, 2 * columns), dtype=result, device=device) if keep else None
    partials = torch.empty(plan.sums, dtype=torch.float32, device=device) if plan.sums else None
    words = counters(device, plan.words) if plan.words else None
    weight_map = tensor_map(
        matrices.dtype, matrices.address, matrices.sizes, matrices.strides, plan.weight_box, swizzle=tiles.weight_bytes
    )
    h_map = map_of_result(h, 1, plan.result_rows)
    kept_map = h_map if both is None else map_of_result(both, 2, plan.result_rows)
    of_x, of_gate, of_up = scales or (None, None, None)
    per_row = [each is not None and each.numel() > 1 for each in (of_x, of_gate)]
    plan.launch(
        (plan.runs, 1, 1), map_of(x, tiles), weight_map, h_map, kept_map, gate_blocks, up_blocks, of_x, of_gate, of_up,
        partials, words, *plan.numbers, matrices.flipped, *per_row, plan.early,
    )  # fmt: skip
    return h, both
