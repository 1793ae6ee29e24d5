"""Configurations of the Hopper matrix product: tiles, schedule and types, their shared memory, and the time of a k-block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch

from onelaunch.device.architectures import HOPPER_SHARED_BYTES, HOPPER_SMS
from onelaunch.kernels.tma import ROW_BYTES

Schedule: TypeAlias = Literal["stream_k", "persistent", "split_k_cluster", "static_persistent"]
"""Which CTA computes which k-blocks of which tiles; ``scheduler.cuh`` describes them."""

Multicast: TypeAlias = Literal["nothing", "a", "b"]
"""Operand that the two CTAs of a cluster have in common, of which each loads a half into both."""

SIDE_ROWS: Final = 64
"""Rows of operand A that a consumer warpgroup multiplies."""

WIDEST: Final = 256
"""Rows of operand B in the widest tile: a WGMMA has so many columns at most."""

SHARED_BYTES = HOPPER_SHARED_BYTES - 1024
"""Dynamic shared memory of a CTA, less what aligning the stages to 1024 bytes may cost."""

MAX_STAGES = 20
"""Most stages of any configuration."""

BARRIER_BYTES = 32 * MAX_STAGES + 64
"""Shared memory for four mbarriers of each stage, and for tiles taken from a counter."""

TABLE_BYTES = 256 * 256
"""Shared memory for the values of NVFP4 codes and the block scales between them; see ``nvfp4.cuh``."""

TMA_BYTES = 96e3
"""Bytes per microsecond that an SM of an H200 loads into shared memory by TMA, with all SMs busy."""

WGMMA_FLOPS = 8e8 / HOPPER_SMS
"""FLOPs per microsecond of an SM of an H200 on 16-bit operands, with all SMs busy. Both were fitted to runs of ``swiglu``."""

DRAM_BYTES = 4.1e6 / HOPPER_SMS
"""Bytes per microsecond that an SM of an H200 reads from memory, with all SMs busy, fitted likewise."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """One configuration of the kernel.

    Attributes:
        a_rows: Rows of operand A in a tile, 64 for each consumer warpgroup that has rows of its own.
        b_rows: Rows of operand B in a tile: the width of its WGMMAs, a multiple of 8.
        store_bytes: Shared memory in which the epilogue prepares its TMA stores.
        schedule: The scheduler.
        element: dtype of operand B, and of A unless it is NVFP4.
        result: dtype of what the epilogue stores, float16 or bfloat16.
        split: Consumer warpgroups that share rows of A and take turns with k-blocks.
        nvfp4: Whether A consists of NVFP4 codes, decoded into registers.
        chunks: Pieces of 128 bytes of each row of B in a k-block; more than one beside NVFP4 only.
        narrow: Width of the WGMMAs of tiles with few columns; 0 if there are none.
        multicast: Operand that the CTAs of a cluster share.
        max_stages: Most stages of the ring.
    """

    a_rows: int
    b_rows: int
    store_bytes: int
    schedule: Schedule = "stream_k"
    element: torch.dtype = torch.bfloat16
    result: torch.dtype = torch.bfloat16
    split: int = 1
    nvfp4: bool = False
    chunks: int = 1
    narrow: int = 0
    multicast: Multicast = "nothing"
    max_stages: int = MAX_STAGES

    @property
    def threads(self) -> int:
        """Threads of a CTA: consumer warpgroups, and one with the producer warp and three that convert block scales."""
        return 128 * (1 + self.a_rows // SIDE_ROWS * self.split)

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return 2 if self.schedule == "split_k_cluster" or self.multicast != "nothing" else 1

    @property
    def a_row_bytes(self) -> Literal[32, 64, 128]:
        """Bytes of a row of operand A in a k-block, and the width of its swizzle."""
        if not self.nvfp4:
            return ROW_BYTES
        return 32 if self.chunks == 1 else 64 if self.chunks == 2 else 128

    @property
    def k_block(self) -> int:
        """Channels of a k-block."""
        return self.chunks * ROW_BYTES // self.element.itemsize

    def stage_bytes(self, width: int | None = None) -> int:
        """Return the shared memory of a stage, of both operands; or the bytes loaded for WGMMAs of ``width`` columns."""
        return self.a_rows * self.a_row_bytes + self.chunks * (width or self.b_rows) * ROW_BYTES

    @property
    def rest_bytes(self) -> int:
        """Shared memory beside the stages: results, sums of split warpgroups, mbarriers, and the table of NVFP4 codes."""
        sums = (self.split - 1) * self.a_rows * 2 * self.b_rows // 2 * 4
        return self.store_bytes + sums + BARRIER_BYTES + (TABLE_BYTES if self.nvfp4 else 0)

    @property
    def stages(self) -> int:
        """Stages of the ring: as many as shared memory has room for, in multiples of ``split``."""
        most = self.max_stages
        if self.nvfp4:  # the 16-bit block scales of all stages lie between the table's rows
            most = TABLE_BYTES // 2 // (2 * self.a_rows * 4 * self.chunks)
        return min((SHARED_BYTES - self.rest_bytes) // self.stage_bytes(), most, self.max_stages) // self.split * self.split

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return 1024 + self.stages * self.stage_bytes() + self.rest_bytes

    def k_block_microseconds(self, width: int | None = None) -> float:
        """Return the least time of a k-block with WGMMAs of ``width`` columns: that of its loads or of its products."""
        products = 2 * self.a_rows * (width or self.b_rows) * self.k_block / (WGMMA_FLOPS * (2 // self.element.itemsize))
        return max(self.stage_bytes(width) / TMA_BYTES, products)
