"""Configurations of the Hopper matrix product: tile sizes, schedule, types, shared memory, and the time of a k-block.

The kernel computes tiles of ``A B^T`` with TMA and WGMMA. Operand A has the M dimension of WGMMA and operand B its N dimension,
so a tile of the product has ``a_rows`` rows and ``b_rows`` columns. The :class:`GemmConfig` of a call is chosen by
``configure_hopper.py`` of ``ops/swiglu`` (A: weights, B: rows of x) or of ``ops/projections`` (A: rows of x, B: weights).
``kernel.py`` turns it into macros, from which ``tile.cuh`` computes the same sizes again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch

from onelaunch.device.architectures import HOPPER_SHARED_BYTES, HOPPER_SMS
from onelaunch.kernels.tma import ROW_BYTES

Schedule: TypeAlias = Literal["stream_k", "persistent", "split_k_cluster", "static_persistent"]
"""Name of a tile scheduler, which assigns k-blocks and tiles to CTAs; ``scheduler.cuh`` describes them."""

Multicast: TypeAlias = Literal["nothing", "a", "b"]
"""Operand that the two CTAs of a cluster have in common; each CTA loads one half of it into both by TMA multicast."""

WARPGROUP_ROWS: Final = 64
"""Rows of operand A that a consumer warpgroup multiplies: the M dimension of WGMMA."""

WIDEST: Final = 256
"""Most rows of operand B, which are columns of the product, in a tile: the largest N dimension of WGMMA."""

_SHARED_BYTES = HOPPER_SHARED_BYTES - 1024
"""Bytes of dynamic shared memory of a CTA that buffers may fill; aligning the stages to 1024 bytes may cost the rest."""

MAX_STAGES = 20
"""Most stages of the ring in any configuration."""

_BARRIER_BYTES = 32 * MAX_STAGES + 64
"""Bytes of shared memory for mbarriers and tile numbers; ``SharedMemory`` in ``tile.cuh`` lays them out.

A stage has four mbarriers of 8 bytes: full, empty, and two for NVFP4 scales (copied, converted). The schedule ``persistent`` has
two slots for the numbers of tiles that it takes from a counter in global memory, each with two mbarriers.
"""

TABLE_BYTES = 256 * 256
"""Bytes of shared memory for the NVFP4 look-up table: 256 rows of 256 bytes, one row for each byte of two codes.

The table's entries fill one half of each row; the other half is free for block scales. See ``nvfp4.cuh``.
"""

_TMA_BYTES = 96e3
"""Bytes per microsecond that an SM of an H200 loads into shared memory by TMA, with all SMs busy."""

_WGMMA_FLOPS = 8e8 / HOPPER_SMS
"""FLOPs per microsecond of an SM of an H200 on 16-bit operands, with all SMs busy.

This and :data:`_TMA_BYTES` were fitted to runs of ``swiglu``.
"""

DRAM_BYTES = 4.1e6 / HOPPER_SMS
"""Bytes per microsecond that an SM of an H200 reads from HBM, with all SMs busy; fitted to runs of ``swiglu`` as well."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """One configuration of the kernel.

    Attributes:
        a_rows: Rows of operand A in a tile, a multiple of 64; every 64 rows have ``split`` consumer warpgroups.
        b_rows: Rows of operand B in a tile: the N dimension of its WGMMAs, a multiple of 8.
        store_bytes: Bytes of shared memory in which the epilogue collects results for its TMA stores; it depends on the
            operation's epilogue.
        schedule: Name of the tile scheduler.
        element: dtype of operand B, and of A unless A is NVFP4: float16, bfloat16 or float8_e4m3fn.
        result: dtype of the results that the epilogue stores, float16 or bfloat16.
        split: Number of consumer warpgroups that share rows of A; each takes every ``split``-th k-block.
        nvfp4: Flag that A consists of NVFP4 codes. Consumer warpgroups dequantize them into the registers from which WGMMA reads
            A; converter warps prepare the block scales.
        chunks: Number of 128-byte pieces of each row of B in a k-block: 1, or for NVFP4 1, 2 or 4. A row of A has 32 bytes of
            codes per chunk.
        narrow: N dimension of a second, narrower WGMMA for tiles with few columns (``projections`` has such tiles at the end of
            a segment of its weight); 0 if there are none.
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
        """Number of threads of a CTA: the consumer warpgroups, and one warpgroup of the producer warp and three others.

        Those three convert block scales for NVFP4, and have no work otherwise.
        """
        return 128 * (1 + self.a_rows // WARPGROUP_ROWS * self.split)

    @property
    def cluster(self) -> int:
        """Number of CTAs of a cluster."""
        return 2 if self.schedule == "split_k_cluster" or self.multicast != "nothing" else 1

    @property
    def a_row_bytes(self) -> Literal[32, 64, 128]:
        """Number of bytes of a row of operand A in a k-block, which is also the width of its TMA swizzle: 32, 64 or 128."""
        if not self.nvfp4:
            return ROW_BYTES
        return 32 if self.chunks == 1 else 64 if self.chunks == 2 else 128

    @property
    def k_block(self) -> int:
        """Number of channels (elements along K) of a k-block, which fills one stage."""
        return self.chunks * ROW_BYTES // self.element.itemsize

    def stage_bytes(self, width: int | None = None) -> int:
        """Return the bytes of a k-block of both operands: those of a stage, or those loaded for a tile of ``width`` columns."""
        return self.a_rows * self.a_row_bytes + self.chunks * (width or self.b_rows) * ROW_BYTES

    @property
    def rest_bytes(self) -> int:
        """Number of bytes of shared memory besides the stages: results, partial sums, mbarriers and the NVFP4 table.

        Of the ``split`` warpgroups that share rows, all but one write their float32 sums there, and that one adds them up.
        """
        # 2 * a_rows threads (128 for 64 rows) hold b_rows // 2 accumulators of 4 bytes each.
        sums = (self.split - 1) * self.a_rows * 2 * self.b_rows // 2 * 4
        return self.store_bytes + sums + _BARRIER_BYTES + (TABLE_BYTES if self.nvfp4 else 0)

    @property
    def stages(self) -> int:
        """Number of stages of the ring: as many as fit into shared memory, rounded down to a multiple of ``split``."""
        most = self.max_stages
        if self.nvfp4:
            # The free half of the table must hold the block scales of all stages: 2 bytes for each of the 4 blocks of 16
            # channels that a row of A has per chunk.
            most = TABLE_BYTES // 2 // (2 * self.a_rows * 4 * self.chunks)
        return min((_SHARED_BYTES - self.rest_bytes) // self.stage_bytes(), most, self.max_stages) // self.split * self.split

    @property
    def shared_bytes(self) -> int:
        """Number of bytes of dynamic shared memory of a CTA, with 1024 for aligning the stages."""
        return 1024 + self.stages * self.stage_bytes() + self.rest_bytes

    def k_block_microseconds(self, width: int | None = None) -> float:
        """Return the roofline time of a k-block in microseconds: the longer of its TMA loads and its WGMMAs.

        ``width`` is the number of columns of the tile, ``b_rows`` by default. Float8 products take half the time.
        """
        products = 2 * self.a_rows * (width or self.b_rows) * self.k_block / (_WGMMA_FLOPS * (2 // self.element.itemsize))
        return max(self.stage_bytes(width) / _TMA_BYTES, products)
