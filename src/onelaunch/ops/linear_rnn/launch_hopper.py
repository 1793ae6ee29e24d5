"""Launches of the layer's two Gluon kernels for Hopper GPUs, which load tensors by TMA descriptors.

``variants/hopper.py`` calls :func:`persistent` (the variant ``fused_hopper``, for wide layers), and ``variants/triton.py`` calls
:func:`chunked` (``fused_chunked``) if :func:`suits` allows. Both kernels compute v = x W, scan v over time, and gate the result.
Both kernels take the extents of a tile from the boxes of their descriptors; ``scan.options`` gives only the number of warps.
Below, ``length`` is T, ``width`` is D (columns of x) and ``channels`` is V (columns of the weight).
"""

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
    """Tiles and registers of the kernel for wide layers, one configuration for all layers.

    Attributes:
        steps: Time steps of a tile; each of two consumer warpgroups multiplies one half.
        channels: Columns of v in a tile.
        inner: Columns of x in a stage, the K extent of a k-block.
        stages: Stages of x and W in shared memory, of 48 KiB each.
        multiply_registers: Registers per thread of a consumer warpgroup.
        scan_registers: Registers per thread of the scan warpgroup. With 24 for the producer, 2 * 168 + 152 + 24 = 512 times 128
            threads are all 65536 registers of an SM.
    """

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
        """Return the TMA box ``[rows, columns]`` of each argument, in the order of the kernel's parameters.

        ``decay_size`` is the bytes of an element of log_decay. Two slots of boxes of log_decay and gate must fit beside the
        stages (144 KiB) and v (64 KiB). With 16 rows they take 16 KiB; with float32 decays they would take 24 KiB, and Hopper
        has 227 KiB.
        """
        rows = 16 if decay_size == 2 else 8
        return {
            "x": [self.steps // 2, self.inner],
            "weight": [self.inner, self.channels],
            "log_decay": [rows, self.channels],
            "gate": [rows, self.channels],
        }

    def even(self, length: int, channels: int) -> bool:
        """Return whether all tiles lie inside the tensor, so that no access needs a mask."""
        return length % self.steps == 0 and channels % self.channels == 0


_PERSISTENT = PersistentTiles()
"""Configuration of every launch by :func:`persistent`."""


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[B, T, N]`` as ``[B T, N]`` for TMA, copied if its strides or its address do not allow TMA."""
    return addressable(tensor.flatten(0, 1))


def persistent(layer: Layer) -> Results:
    """Run the kernel for wide layers: one persistent CTA per SM, which scans a tile while it multiplies the next."""
    from onelaunch.ops.linear_rnn.kernels.project_scan_gate_hopper import project_scan_gate_hopper_kernel

    results, initial = layer.results(), layer.sequences.initial
    batch, length, width, channels = layer.sizes
    tiles_t, slices = cdiv(length, _PERSISTENT.steps), cdiv(channels, _PERSISTENT.channels)
    tiles = tiles_t * batch * slices
    boxes = _PERSISTENT.boxes(layer.log_decay.element_size())
    # A kernel without a gate gets log_decay in its place and does not read it.
    given = (layer.x, layer.weight[None], layer.log_decay, layer.log_decay if layer.gate is None else layer.gate)
    words = workspace(layer.x.device, batch * tiles_t * channels)  # one flag-in-data word per tile of time and channel
    # The tile counter must be 0 before a launch; the kernel resets it. Launches that ask for equally many words share a
    # workspace, and no other launch asks for one word: a look-back needs more.
    counter = workspace(layer.x.device, 1)
    ctas = min(tiles, processors(layer.x.device))
    Launch(
        project_scan_gate_hopper_kernel, (ctas,),
        *(described(_rows_of(tensor), box) for tensor, box in zip(given, boxes.values(), strict=True)),
        initial, results.y, results.v, results.final, results.carries, words, counter,
        length, width, channels, tiles, batch * slices,
        EVEN=_PERSISTENT.even(length, channels), num_warps=4, **_PERSISTENT.options(), **layer.flags(), mma=Mma.WIDEST,
    ).run()  # fmt: skip
    return results


@functools.lru_cache(maxsize=1024)
def chunked_tiles(multiprocessors: int, batch: int, length: int, width: int, channels: int) -> ProjectTiles:
    """Return tiles of 64 steps x 32 channels if there is at most one per SM, or if V is at most 32; else of 64 x 64.

    Tiles of 64 x 64 read x half as often. Up to four stages of 64 columns of x hold all of D up to 256, whose loads are then
    in flight at once. The number of tiles in a look-back group (8 or 32) follows the rule of
    :func:`onelaunch.kernels.scan.launch.scan_tiles`.

    64 steps are the rows of one warpgroup. Measured on an H200 with D=256 V=64, 64 x 32 against 64 x 64: 3.9 against 4.4 us at
    B=1 T=512, 6.8 against 6.4 us at B=4 T=2048, 9.5 against 8.3 us at B=16 T=1024. 64 x 64 with four warps is 4 % faster at
    B=16 T=512 and slower from B=4 T=2048 on. Tiles of 128 steps are slower at nearly all sizes.
    """
    tiles = cdiv(length, 64)
    narrow = channels <= 32 or tiles * batch * cdiv(channels, 32) <= multiprocessors
    scan = ScanTiles(steps=64, channels=32 if narrow else 64, group=8 if tiles <= 8 else 32, warps=4 if narrow else 8)
    return ProjectTiles(scan, inner=64, stages=min(4, cdiv(width, 64)))


def suits(layer: Layer) -> bool:
    """Return whether :func:`chunked` can run the layer: 16-bit, not packed, sizes that TMA can address, on Hopper.

    TMA needs rows of whole 16 bytes (8 elements), and its coordinates, here up to B T, are 32-bit integers.
    """
    batch, length, width, channels = layer.sizes
    return (
        layer.sequences.offsets is None
        and layer.x.dtype in (torch.float16, torch.bfloat16)
        and width % 8 == channels % 8 == 0
        and batch * length < 1 << 31
        and is_hopper(layer.x.device)
    )


def chunked(layer: Layer) -> Results:
    """Run the kernel for layers whose product is short: loads are all issued first, and little work follows the product.

    It runs any D. If D exceeds four stages of 64 columns, a stage is loaded again after the WGMMA that read it.
    """
    from onelaunch.ops.linear_rnn.kernels.project_scan_gate_chunked_hopper import project_scan_gate_chunked_hopper_kernel

    results, initial = layer.results(), layer.sequences.initial
    batch, length, width, channels = layer.sizes
    tiles = chunked_tiles(processors(layer.x.device), *map(int, layer.sizes))  # traced sizes (SymInt) have no hash
    scan = tiles.scan
    x = described(_rows_of(layer.x), [scan.steps, tiles.inner])
    weight = described(_rows_of(layer.weight[None]), [tiles.inner, scan.channels])
    log_decay = inner_contiguous(layer.log_decay)
    # A kernel without a gate gets log_decay in its place and does not read it.
    gate = log_decay if layer.gate is None else inner_contiguous(layer.gate)
    Launch(
        project_scan_gate_chunked_hopper_kernel, scan.grid(batch, length, channels),
        x, weight, log_decay, gate, initial, results.y, results.v, results.final, results.carries,
        workspace(layer.x.device, scan.words(batch, length, channels)), length, log_decay.stride(0), gate.stride(0),
        WIDTH=width, CHANNELS=channels, DECAY_STRIDE=log_decay.stride(1), GATE_STRIDE=gate.stride(1),
        STAGES=tiles.stages, GROUP=scan.group, EVEN=scan.even(length, channels), **scan.options(layer.x.device),
        **layer.flags(), mma=Mma.WIDEST,
    ).run()  # fmt: skip
    return results
