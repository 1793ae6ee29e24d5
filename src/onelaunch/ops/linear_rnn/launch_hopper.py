"""Launches of the layer's kernels for Hopper GPUs, which load tensors by TMA descriptors."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from onelaunch.device.hardware import is_hopper, processors
from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.kernels.scan.launch import ScanTiles
from onelaunch.kernels.tma import addressable, described
from onelaunch.launch.launch import Launch, Mma
from onelaunch.launch.workspace import workspace
from onelaunch.ops.linear_rnn.launch import Layer, ProjectTiles, Results


@dataclass(frozen=True, slots=True)
class PersistentTiles:
    """Tiles of a wide layer: ``steps`` by ``channels`` per tile, ``inner`` columns of x per stage."""

    steps: int = 256
    channels: int = 128
    inner: int = 64
    stages: int = 3
    multiply_registers: int = 168
    scan_registers: int = 152

    def options(self) -> dict[str, int]:
        """Return the kernel's compile-time constants."""
        return {
            "STAGES": self.stages, "MULTIPLY_REGISTERS": self.multiply_registers, "SCAN_REGISTERS": self.scan_registers,
        }  # fmt: skip

    def boxes(self, decay_size: int) -> dict[str, list[int]]:
        """Return the TMA box of each argument; ``decay_size`` is in bytes, and float32 decays take shorter boxes."""
        rows = 16 if decay_size == 2 else 8
        return {
            "x": [self.steps // 2, self.inner],
            "weight": [self.inner, self.channels],
            "log_decay": [rows, self.channels],
            "gate": [rows, self.channels],
        }

    def even(self, length: int, width: int) -> bool:
        """Return whether all tiles lie inside the tensor, so that no access needs a mask."""
        return length % self.steps == 0 and width % self.channels == 0


PERSISTENT = PersistentTiles()


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[B, T, N]`` as ``[B T, N]`` for TMA, copied if its strides or its address do not allow TMA."""
    return addressable(tensor.flatten(0, 1))


def persistent(layer: Layer) -> Results:
    """Run the kernel for wide layers: one persistent CTA per SM, which scans a tile while it multiplies the next."""
    from onelaunch.ops.linear_rnn.kernels.project_scan_gate_hopper import project_scan_gate_hopper_kernel

    results, initial = layer.results(), layer.sequences.initial
    batch, length, width, channels = layer.sizes
    tiles_t, slices = cdiv(length, PERSISTENT.steps), cdiv(channels, PERSISTENT.channels)
    tiles = tiles_t * batch * slices
    boxes = PERSISTENT.boxes(layer.log_decay.element_size())
    given = (layer.x, layer.weight[None], layer.log_decay, layer.gate)
    words = workspace(layer.x.device, batch * tiles_t * channels)
    # No look-back has a workspace of one word, so no other launch uses this one. The kernel resets it to 0.
    counter = workspace(layer.x.device, 1)
    ctas = min(tiles, processors(layer.x.device))
    Launch(
        project_scan_gate_hopper_kernel, (ctas,),
        *(described(rows_of(tensor), box) for tensor, box in zip(given, boxes.values(), strict=True)),
        initial, results.y, results.v, results.final, results.carries, words, counter,
        length, width, channels, tiles, batch * slices,
        EVEN=PERSISTENT.even(length, channels), num_warps=4, **PERSISTENT.options(), **layer.flags(), mma=Mma.WIDEST,
    ).run()  # fmt: skip
    return results


@functools.lru_cache(maxsize=1024)
def chunked_tiles(multiprocessors: int, batch: int, length: int, width: int, channels: int) -> ProjectTiles:
    """Return 64 x 32 while that leaves SMs free, else 64 x 64, which reads x half as often.

    64 steps are the rows of one warpgroup. Measured on an H200 with D=256 V=64, 64 x 32 against 64 x 64: 3.9 against 4.4 us at
    B=1 T=512, 6.8 against 6.4 us at B=4 T=2048, 9.5 against 8.3 us at B=16 T=1024. 64 x 64 with four warps is 4 % faster at
    B=16 T=512 and slower from B=4 T=2048 on. Tiles of 128 steps are slower at nearly all sizes.
    """
    tiles = cdiv(length, 64)
    narrow = channels <= 32 or tiles * batch * cdiv(channels, 32) <= multiprocessors
    scan = ScanTiles(steps=64, channels=32 if narrow else 64, group=8 if tiles <= 8 else 32, warps=4 if narrow else 8)
    return ProjectTiles(scan, inner=64, stages=min(4, cdiv(width, 64)))


def suits(layer: Layer) -> bool:
    """Return whether :func:`chunked` can run the layer: 16-bit, not packed, sizes that TMA can address, on Hopper."""
    batch, length, width, channels = layer.sizes
    return (
        layer.sequences.offsets is None
        and layer.x.dtype in (torch.float16, torch.bfloat16)
        and width % 8 == channels % 8 == 0
        and batch * length < 1 << 31
        and is_hopper(layer.x.device)
    )


def chunked(layer: Layer) -> Results:
    """Run the kernel for layers whose product is short: all loads are in flight at once, and little work follows the product."""
    from onelaunch.ops.linear_rnn.kernels.project_scan_gate_chunked_hopper import project_scan_gate_chunked_hopper_kernel

    results, initial = layer.results(), layer.sequences.initial
    batch, length, width, channels = layer.sizes
    tiles = chunked_tiles(processors(layer.x.device), *map(int, layer.sizes))  # as integers: a tracer's sizes cannot be hashed
    scan = tiles.scan
    x = described(rows_of(layer.x), [scan.steps, tiles.inner])
    weight = described(rows_of(layer.weight[None]), [tiles.inner, scan.channels])
    log_decay, gate = inner_contiguous(layer.log_decay), inner_contiguous(layer.gate)
    Launch(
        project_scan_gate_chunked_hopper_kernel, scan.grid(batch, length, channels),
        x, weight, log_decay, gate, initial, results.y, results.v, results.final, results.carries,
        workspace(layer.x.device, scan.words(batch, length, channels)), length, log_decay.stride(0), gate.stride(0),
        WIDTH=width, CHANNELS=channels, DECAY_STRIDE=log_decay.stride(1), GATE_STRIDE=gate.stride(1),
        STAGES=tiles.stages, GROUP=scan.group, EVEN=scan.even(length, channels), **scan.options(layer.x.device),
        **layer.flags(), mma=Mma.WIDEST,
    ).run()  # fmt: skip
    return results
