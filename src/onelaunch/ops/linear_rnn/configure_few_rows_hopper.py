"""Configuration of ``linear_rnn``'s Hopper kernel for at most 16 rows: how CTAs share the weight, and the kernel's source.

``launch_few_rows_hopper.py`` asks for the configuration of a call and for its kernel. The CUDA file is ``kernels/few_rows.cu``;
its sizes and offsets are the constants of a header that :func:`header` generates. Other calls of few rows take the portable
kernel, see ``configure_few_rows.py``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from onelaunch import cuda
from onelaunch.kernels.common.layout import cdiv
from onelaunch.launch.launch import CudaKernel, Mma

MOST_ROWS = 16
"""Most rows B T: those of operand A of ``mma.m16n8k16``."""

DIVISIONS = ((32, 2), (64, 4), (16, 1), (64, 2), (64, 1))
"""Columns of a slice of the weight and the CTAs of a cluster that share it, those that are tried first first.

A slice of 64 columns has whole cache lines of 128 bytes of each row; one of 16 needs no cluster. On an H100 at D = V = 2048 a row
takes 5.5 us with the first, 6.4, 5.7 with the next two, and 16 rows 5.9, 7.6 and 6.8.
"""

WARPS, OVERLAP, RESIDENT = 8, False, 1
"""Warps of a CTA; whether a launch may begin while the one before it ends; and the CTAs of an SM for which registers suffice.

On an H100 16 warps take 0.1 us more at most shapes. Launches that overlap, with two CTAs on an SM, take 0.1 us less at 1 row, and
as long at 16.
"""

_WORDS = 64
"""Most 32-bit words of the weight that a thread holds: all that it multiplies."""

_POINTERS: list[cuda.Kind] = ["pointer"] * 7
KINDS: tuple[cuda.Kind, ...] = (*_POINTERS, "i32", "i32", "i32", "i64", "i64", "i64", "i64")
"""Kinds of the kernel's arguments, in the order of ``linear_rnn_few_rows`` in ``few_rows.cu``."""


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Sizes of a call, and how a launch divides the weight."""

    rows: int
    """Rows that a CTA has room for: 8 or 16."""
    width: int
    """Columns D of x."""
    float_decay: bool
    """Flag that log_decay is float32."""
    one_step: bool
    """Flag that every sequence has one step, T = 1."""
    columns: int
    """Columns of a slice of the weight."""
    parts: int
    """CTAs of a cluster, which share the rows of a slice."""
    by_columns: bool = False
    """Flag that columns of the weight are contiguous, as in the transposed weight of a ``torch.nn.Linear``, and not its rows."""
    warps: int = WARPS
    overlap: bool = OVERLAP
    """Flag that a launch may begin while the one before it ends (programmatic dependent launch)."""
    resident: int = RESIDENT
    """CTAs of an SM for which registers suffice."""

    @property
    def words(self) -> int:
        """Number of 32-bit words of the weight that a thread holds."""
        return self.width * self.columns // (2 * 32 * self.parts * self.warps)

    @property
    def pitch(self) -> int:
        """Floats from one row of a warp's sums to the next; 8 lanes that store 16 bytes each use all banks."""
        return {64: 72, 32: 36, 16: 16}[self.columns]

    @property
    def offsets(self) -> dict[str, int]:
        """Offsets of the arrays in shared memory in bytes, by the names of their constants in the kernel."""
        parts = 4 * self.warps * self.rows * self.pitch
        scan = parts + 4 * self.rows * self.columns
        return {"PARTS": parts, "SCAN": scan, "READY": scan + 4 * 2 * self.rows * self.columns // self.parts}

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA in bytes."""
        return self.offsets["READY"] + 16

    def ctas(self, channels: int) -> int:
        """Return the number of CTAs for ``channels`` columns of the weight."""
        return channels // self.columns * self.parts


def divided(config: HopperConfig, channels: int, ctas: int) -> bool:
    """Return whether a configuration divides a weight of ``channels`` columns among at most ``ctas`` CTAs."""
    fits = channels % config.columns == 0 and config.width % (32 * config.parts * config.warps) == 0
    return fits and config.words <= _WORDS and config.ctas(channels) <= ctas


@functools.lru_cache(maxsize=4096)
def config_of(batch: int, length: int, width: int, channels: int, *, float_decay: bool, sms: int) -> HopperConfig | None:
    """Return the configuration of a call, or ``None`` if it needs the portable kernel.

    Args:
        batch: Number of sequences, B.
        length: Number of steps, T.
        width: Columns of x, D.
        channels: Columns of the weight, V.
        float_decay: Flag that log_decay is float32.
        sms: Number of SMs. A launch has at most that many CTAs, so that each has an SM of its own.
    """
    rows = batch * length
    if not 0 < rows <= MOST_ROWS or width <= 0 or channels <= 0:
        return None
    tried = (HopperConfig(8 * cdiv(rows, 8), width, float_decay, length == 1, *division) for division in DIVISIONS)
    return next((config for config in tried if divided(config, channels, sms)), None)


def header(config: HopperConfig) -> str:
    """Return the text of ``sizes.cuh``: sizes, flags and offsets of a configuration."""
    numbers = {
        "ROWS": config.rows, "WIDTH": config.width, "COLUMNS": config.columns, "PARTS": config.parts, "WARPS": config.warps,
        "RESIDENT": config.resident, "PITCH": config.pitch, **{f"{name}_AT": offset for name, offset in config.offsets.items()},
    }  # fmt: skip
    flags = {
        "OVERLAP": config.overlap,
        "FLOAT_DECAY": config.float_decay,
        "ONE_STEP": config.one_step,
        "BY_COLUMNS": config.by_columns,
    }
    lines = ["#pragma once", *(f"constexpr int {name} = {value};" for name, value in numbers.items())]
    return "\n".join([*lines, *(f"constexpr bool {name} = {str(flag).lower()};" for name, flag in flags.items()), ""])


def source_of(config: HopperConfig) -> cuda.Source:
    """Return the source of a configuration's kernel."""
    files = (cuda.include("hopper.cuh"), cuda.include("machine.cuh"), ("sizes.cuh", header(config)))
    text = cuda.read("onelaunch.ops.linear_rnn.kernels", "few_rows.cu")
    return cuda.Source("few_rows.cu", text, "linear_rnn_few_rows", files)


@functools.lru_cache(maxsize=256)
def kernel_of(config: HopperConfig) -> CudaKernel:
    """Return the kernel of a configuration, not compiled yet."""
    return CudaKernel(
        source_of(config), KINDS, threads=32 * config.warps, shared_bytes=config.shared_bytes, cluster=config.parts,
        overlap=config.overlap, mma=Mma.WARP,
    )  # fmt: skip
