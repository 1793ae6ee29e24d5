"""Configuration of the Hopper kernel for few rows: how CTAs share the product, the layout of shared memory, and its source.

``launch_prologue.py`` asks for the configuration of a call, and ``launch_few_rows.py`` for its kernel. The CUDA file is
``kernels/few_rows.cu``; its sizes and offsets are the constants of a header that :func:`header` generates.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import product

from onelaunch import cuda
from onelaunch.device.architectures import HOPPER_SHARED_BYTES
from onelaunch.kernels.common.layout import cdiv
from onelaunch.launch.launch import CudaKernel, Mma

MOST_ROWS = 64
"""Most rows of h. More rows are more products of matrix units than the time of loading the weights leaves."""

HEAD_SIZES = (32, 64, 128, 256)
"""Channels of a head that the threads of a warp can divide, 8 channels each."""

CLUSTERS = (4, 2)
"""CTAs of a cluster, those that are tried first first. Each normalizes and gates a part of the rows for all of them.

With one CTA on an SM, an H200 of 132 SMs runs 30 clusters of 4 at once, since SMs of different GPCs make no cluster, or 66 of 2.
"""

_ROWS, _TILES = (8, 16, 32), (8, 16, 24, 32)
"""Rows that are in shared memory at once, and columns of a tile of out: multiples of 8, as ``mma.m16n8k16`` asks."""

_STEP = 32
"""Columns that a warp multiplies at once: a row of the weights is padded to an odd multiple of their bytes."""

_POINTERS: list[cuda.Kind] = ["pointer"] * 7
KINDS: tuple[cuda.Kind, ...] = (*_POINTERS, "i32", "i32", "i64", "i64", "i64", "f32")
"""Kinds of the kernel's arguments, in the order of ``output_chain_few_rows`` in ``few_rows.cu``."""

GATES = ("none", "activated", "silu")
"""Kinds of gates, in the order of the enumeration in ``few_rows.cu``."""

NORMS = ("none", "bfloat16", "float32")
"""Kinds of norm weights, in the order of the enumeration in ``few_rows.cu``."""


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """Sizes of a product, and how a launch divides it."""

    heads: int
    values: int
    """Channels of a head."""
    rows: int
    """Rows of a slab, which are in shared memory at once."""
    tile: int
    """Columns of out that a CTA computes."""
    gate: str
    """One of :data:`GATES`."""
    norm: str
    """One of :data:`NORMS`."""
    cluster: int = 2
    warps: int = 8

    @property
    def pitch(self) -> int:
        """Bytes from one row in shared memory to the next."""
        steps = self.heads * self.values // _STEP
        return 2 * _STEP * (steps + 1 - steps % 2)

    @property
    def offsets(self) -> dict[str, int]:
        """Offsets of the arrays in shared memory in bytes, by the names of their constants in the kernel."""
        operand = self.tile * self.pitch
        sums = operand + self.rows * self.pitch
        return {"OPERAND": operand, "SUMS": sums, "FULL": sums + 16 * cdiv(4 * self.warps * self.tile * (self.rows + 1), 16)}

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA in bytes."""
        return self.offsets["FULL"] + 8 * 2

    def ctas(self, columns: int) -> int:
        """Return the number of CTAs for ``columns`` columns of out, whole clusters."""
        return cdiv(columns, self.tile * self.cluster) * self.cluster


@functools.lru_cache(maxsize=4096)
def config_of(rows: int, columns: int, heads: int, values: int, gate: str, norm: str, sms: int) -> FewRowsConfig | None:
    """Return the configuration of a call, or ``None`` if the kernel cannot run it with all CTAs at once.

    Slabs have as many rows as there are, up to 32, and fewer if shared memory has no space for more. Then clusters of 4 CTAs come
    before those of 2, since their CTAs normalize and gate half as much, small tiles before large ones, of those with which all
    clusters run at once, and 16 warps before 8. Up to 8 rows take clusters of 2 and 8 warps alone. On an H100, at 2048 columns:
    6.3 us at 1 row, where clusters of 4 take 6.7; 7.4 at 16 rows, where clusters of 2 take 8.0 and 8 warps 7.6. The least of all
    is 7.4 there, too.

    Args:
        rows: Rows of h.
        columns: Columns of out, D.
        heads: Number of heads, H.
        values: Channels of a head, V.
        gate: One of :data:`GATES`.
        norm: One of :data:`NORMS`.
        sms: Number of SMs.
    """
    if not 0 < rows <= MOST_ROWS or columns <= 0 or values not in HEAD_SIZES:
        return None
    enough = next((n for n in _ROWS if n >= rows), _ROWS[-1])
    few = rows <= _ROWS[0]
    slabs = [slab for slab in reversed(_ROWS) if slab <= enough]
    for slab, cluster, tile, warps in product(slabs, CLUSTERS[1:] if few else CLUSTERS, _TILES, (8,) if few else (16, 8)):
        config = FewRowsConfig(heads, values, slab, tile, gate, norm, cluster, warps)
        if config.ctas(columns) <= at_once(cluster, sms) and config.shared_bytes <= HOPPER_SHARED_BYTES:
            return config
    return None


def at_once(cluster: int, sms: int) -> int:
    """Return how many CTAs in clusters surely run at once, each on an SM of its own: 120 of 132 in clusters of 4."""
    return sms - 2 if cluster == 2 else sms * 10 // 11 // cluster * cluster


def header(config: FewRowsConfig) -> str:
    """Return the text of ``sizes.cuh``: sizes and offsets of a configuration."""
    numbers = {
        "HEADS": config.heads, "VALUES": config.values, "ROWS": config.rows, "TILE": config.tile, "WARPS": config.warps,
        "CLUSTER": config.cluster, "PITCH": config.pitch, "GATE": GATES.index(config.gate),
        "NORM": NORMS.index(config.norm), **{f"{name}_AT": offset for name, offset in config.offsets.items()},
    }  # fmt: skip
    return "\n".join(["#pragma once", *(f"constexpr int {name} = {value};" for name, value in numbers.items()), ""])


def source_of(config: FewRowsConfig) -> cuda.Source:
    """Return the source of a configuration's kernel."""
    files = (cuda.include("hopper.cuh"), cuda.include("machine.cuh"), ("sizes.cuh", header(config)))
    text = cuda.read("onelaunch.ops.output_chain.kernels", "few_rows.cu")
    return cuda.Source("few_rows.cu", text, "output_chain_few_rows", files)


@functools.lru_cache(maxsize=256)
def kernel_of(config: FewRowsConfig) -> CudaKernel:
    """Return the kernel of a configuration, not compiled yet."""
    return CudaKernel(
        source_of(config), KINDS, threads=32 * config.warps, shared_bytes=config.shared_bytes, cluster=config.cluster,
        mma=Mma.WARP,
    )  # fmt: skip
