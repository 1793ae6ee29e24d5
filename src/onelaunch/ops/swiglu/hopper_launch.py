"""Launches of ``dual_gemm.cu``: tiles, who works on which of them, and how weights are described where they lie."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from onelaunch import nvrtc
from onelaunch.hardware import processors
from onelaunch.ops.copy_engine import addressable
from onelaunch.ops.gated_scan.launch import cdiv
from onelaunch.ops.warpgroup_products import product_header
from onelaunch.ops.workspace import counters

Schedule = Literal["runs", "tiles"]
"""Whether programs take equal runs of all work, or one whole tile after the other."""

ROW_BYTES = 128
"""Of a tile in shared memory."""

TABLE_BYTES = 256 * 256
"""Of what the codes in a byte stand for, in shared memory: see nvfp4.cuh."""

SHARED_BYTES = 227 * 1024 - 1024
"""Of a program, less what the stages' alignment may cost."""

MOST_STAGES = 20

BYTES_PER_MICROSECOND = 4.6e6 / 132
FLOPS_PER_MICROSECOND = 8e8 / 132
"""Of a processor of an H200, all at work: bulk reads, products of 16-bit numbers."""

GROUP = 8
"""Rows of a weight that follow each other in a tile, before as many of the other."""

WIDEST = 256
"""Rows of x in a tile."""

WIDTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, WIDEST)
"""The same, for fewer rows of x than that. A kernel is compiled for each that is met."""

FARTHEST = 1 << 40
"""Bytes between two weights that the copy engine can step over."""

ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
RESULTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 3}

MAP: nvrtc.Kind = "map"
POINTER: nvrtc.Kind = "pointer"
NUMBER: nvrtc.Kind = "i32"
KINDS = (*[MAP] * 4, *[POINTER] * 8, *[NUMBER] * 9)
"""Of the kernel's arguments."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """A configuration of the kernel.

    ``rows`` of x and ``columns`` of h, warpgroups that share rows of weights and take turns in K (``split``), whether codes of
    NVFP4 are decoded on the way.
    """

    rows: int
    columns: int = 64
    split: int = 1
    nvfp4: bool = False

    @property
    def threads(self) -> int:
        """Of a program: those that copy, and the warpgroups that multiply."""
        return 128 * (1 + self.columns // 32 * self.split)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a step of K: weights and x."""
        return 2 * self.columns * ROW_BYTES + (4 if self.nvfp4 else 1) * self.rows * ROW_BYTES

    def rest_bytes(self, result: torch.dtype) -> int:
        """Shared memory beside the stages: the tile of h, sums that warpgroups hand over, barriers, and what codes stand for."""
        out = 0 if result is torch.float32 else cdiv(self.rows * self.columns * 2, 1024) * 1024
        table = TABLE_BYTES if self.nvfp4 else 0
        return out + (self.split - 1) * self.columns * 4 * self.rows // 2 * 4 + 24 * MOST_STAGES + 64 + table

    def stages(self, result: torch.dtype) -> int:
        """Steps on their way at once: as many as there is room for."""
        return min((SHARED_BYTES - self.rest_bytes(result)) // self.stage_bytes, MOST_STAGES)

    def shared_bytes(self, result: torch.dtype) -> int:
        """Dynamic shared memory of a program."""
        return 1024 + self.stages(result) * self.stage_bytes + self.rest_bytes(result)

    def step(self, element: torch.dtype) -> int:
        """Channels of a step."""
        return 256 if self.nvfp4 else ROW_BYTES // element.itemsize

    def step_microseconds(self, element: torch.dtype) -> float:
        """What a step takes at least: its weights on their way, or its products."""
        products = 2 * 2 * self.columns * self.rows * self.step(element) / (FLOPS_PER_MICROSECOND * (2 // element.itemsize))
        return max(2 * self.columns * ROW_BYTES / BYTES_PER_MICROSECOND, products)

    def sharing_microseconds(self) -> float:
        """What it costs that two programs share a tile, by the bytes of its sums.

        Reckoned from single runs of a prototype on an H200: 1 us with 8 rows and 64 columns, 10 with 256 rows.
        """
        return 1.2 + self.rows * self.columns / 1860

    def count(self, rows: int, columns: int) -> int:
        """Tiles of a result."""
        return cdiv(rows, self.rows) * cdiv(columns, self.columns)


def width_for(rows: int, most: int = WIDEST) -> int:
    """Rows of x in a tile: all of them if a tile may be so wide."""
    return next((width for width in WIDTHS if rows <= width <= most), most)


def wide_tiles(rows: int, *, nvfp4: bool) -> Tiles:
    """For much work: as much as registers hold. Fewer rows beside codes, of which a step has four times as many."""
    return Tiles(width_for(rows, 64 if nvfp4 else WIDEST), nvfp4=nvfp4)


MOST_IN_TURN = 8
"""Rows of x beside codes up to which four warpgroups have registers enough."""


def narrow_tiles(rows: int, *, nvfp4: bool) -> Tiles:
    """For few rows of x, where the weights' way decides: many small tiles, so that programs need not share one.

    A prototype on an H200, single runs, M=1 N=4096 K=7168: 33.1 us with 32 columns and 128 programs, 33.7 with 64 whose tiles two
    share; with codes, decoded in another way, 22 us with 64 and two warpgroups in turn, 24.5 with 32.
    """
    width = width_for(rows, 64 if nvfp4 else 128)
    return Tiles(width, split=2 if width <= MOST_IN_TURN else 1, nvfp4=True) if nvfp4 else Tiles(width, columns=32, split=2)


def configuration(variant: str, rows: int, *, nvfp4: bool) -> tuple[Tiles, Schedule]:
    """Of the variant of this name, for so many rows of x."""
    tiles = (narrow_tiles if variant == "small_m" else wide_tiles)(rows, nvfp4=nvfp4)
    return tiles, "tiles" if variant == "persistent" else "runs"


ASTRIDE = 2.5
"""Microseconds that sharing costs more where runs begin anywhere in a tile, reckoned likewise: 2 at M=1, 3 at M=512."""


class Cut(NamedTuple):
    """How the steps of all tiles are handed out."""

    runs: int
    each: int
    """Grains of a run; one more in the first ``more`` of them."""
    more: int
    grain: int
    """Steps."""
    shares: bool
    """Whether a tile may belong to several runs."""
    microseconds: float
    """Of the longest run, and of sharing."""


@functools.lru_cache(maxsize=1024)
def cut_for(tiles: int, steps: int, multiprocessors: int, step: float, sharing: float) -> Cut:
    """Whole tiles, equal parts of each, or one equal run for every processor: whichever is done first.

    ``step`` and ``sharing`` are microseconds of a :class:`Tiles`.
    """
    rounds = cdiv(tiles, multiprocessors)
    runs = cdiv(tiles, rounds)
    found = [Cut(runs, *divmod(tiles, runs), steps, shares=False, microseconds=rounds * steps * step)]
    parts = max((part for part in range(1, max(multiprocessors // tiles, 1) + 1) if steps % part == 0), default=1)
    if parts > 1:
        found.append(Cut(tiles * parts, steps // parts, 0, 1, shares=True, microseconds=steps // parts * step + sharing))
    units = tiles * steps
    runs = min(multiprocessors, units)
    found.append(Cut(runs, *divmod(units, runs), 1, shares=True, microseconds=cdiv(units, runs) * step + sharing + ASTRIDE))
    return min(found, key=lambda cut: cut.microseconds)


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
    """Block scales as threads read them, four at once: rows one after the other, from an address that is a multiple of 4."""
    blocks = blocks.contiguous()
    return blocks.clone() if blocks.data_ptr() % 4 else blocks


tensor_map = functools.lru_cache(maxsize=4096)(nvrtc.tensor_map)
"""Kept: the same tensors come again."""


def map_of(matrix: torch.Tensor, tiles: Tiles) -> bytes:
    """Of x: tiles of 128 bytes of each of its rows."""
    (rows, channels), size = matrix.shape, matrix.element_size()
    box = (ROW_BYTES // size, tiles.rows)
    return tensor_map(matrix.dtype, matrix.data_ptr(), (channels, rows), (matrix.stride(0) * size,), box)


def map_of_result(result: torch.Tensor, matrices: int, tiles: Tiles) -> bytes:
    """Of matrices side by side in ``result [M, matrices N]``: a tile ends where its matrix does."""
    (rows, width), size = result.shape, result.element_size()
    columns = width // matrices
    swizzle: Literal[0, 128] = 128 if tiles.columns == 64 else 0
    return tensor_map(
        result.dtype, result.data_ptr(), (columns, matrices, rows), (columns * size, width * size),
        (tiles.columns, 1, tiles.rows), swizzle=swizzle,
    )  # fmt: skip


@functools.cache
def source(
    tiles: Tiles, element: torch.dtype, result: torch.dtype, schedule: Schedule, *, scaled: bool, keep: bool
) -> nvrtc.Source:
    """The kernel for one configuration."""
    here = "onelaunch.ops.swiglu"
    headers = (
        ("hopper.cuh", nvrtc.read("onelaunch.ops", "hopper.cuh")),
        ("nvfp4.cuh", nvrtc.read(here, "nvfp4.cuh")),
        ("products.cuh", product_header(element, tiles.rows, registers=tiles.nvfp4)),
    )
    defines = {
        "ROWS": tiles.rows, "COLUMNS": tiles.columns, "SPLIT": tiles.split, "STAGES": tiles.stages(result),
        "ELEMENT": ELEMENTS[element], "RESULT": RESULTS[result], "NVFP4": int(tiles.nvfp4), "SCALED": int(scaled),
        "KEEP": int(keep), "TAKEN": int(schedule == "tiles"),
    }  # fmt: skip
    return nvrtc.Source("dual_gemm.cu", nvrtc.read(here, "dual_gemm.cu"), "dual_gemm", headers, tuple(defines.items()))


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
) -> nvrtc.Function:
    """The same, loaded."""
    code = source(tiles, element, result, schedule, scaled=scaled, keep=keep)
    return nvrtc.load(code, device, KINDS, threads=tiles.threads, shared_bytes=tiles.shared_bytes(result))


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
        gate, up = (torch.ones((), device=device) if each is None else each.contiguous() for each in (gate, up))
        return cls(None if x is None else x.contiguous(), gate, up)


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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``h [M, N]`` of ``x [M, K]``, and both products ``[M, 2 N]`` if they are to be kept.

    ``weights`` are ``[N, K]`` of the dtype of x, or codes ``[N, K / 2]`` beside ``blocks``, their scales ``[N, K / 16]``.
    """
    x, (rows, channels), columns = addressable(x), x.shape, weights[0].shape[0]
    device = x.device
    matrices = together(*weights)
    gate_blocks, up_blocks = (None, None) if blocks is None else map(in_words, blocks)
    count, steps = tiles.count(rows, columns), cdiv(channels, tiles.step(x.dtype))
    multiprocessors = processors(device)
    cut = cut_for(count, steps, multiprocessors, tiles.step_microseconds(x.dtype), tiles.sharing_microseconds())
    if schedule == "tiles":
        cut = Cut(min(count, multiprocessors), 0, 0, steps, shares=False, microseconds=0.0)
    h = torch.empty((rows, columns), dtype=result, device=device)
    both = torch.empty((rows, 2 * columns), dtype=result, device=device) if keep else None
    partials = torch.empty(cut.runs * tiles.rows * tiles.columns * 2, device=device) if cut.shares else None
    words = counters(device, cdiv(max(cut.runs, 2), 2)) if cut.shares or schedule == "tiles" else None
    groups = tiles.columns // GROUP
    weight_map = tensor_map(
        matrices.dtype,
        matrices.address,
        matrices.sizes,
        matrices.strides,
        (ROW_BYTES // matrices.dtype.itemsize, GROUP, 2, groups),
    )
    x_map = map_of(x, tiles)
    h_map = x_map if result is torch.float32 else map_of_result(h, 1, tiles)
    kept_map = h_map if both is None else map_of_result(both, 2, tiles)
    launch = function(device, tiles, x.dtype, result, schedule, scaled=scales is not None, keep=keep)
    of_x, of_gate, of_up = scales or (None, None, None)
    per_row = [each is not None and each.numel() > 1 for each in (of_x, of_gate)]
    launch(
        (cut.runs, 1, 1), x_map, weight_map, h_map, kept_map, gate_blocks, up_blocks, h, of_x, of_gate, of_up, partials, words,
        rows, columns, channels, cut.each, cut.more, cut.grain, matrices.flipped, *per_row,
    )  # fmt: skip
    return h, both
