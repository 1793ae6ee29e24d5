"""Launches of the layer's portable kernels: allocate results, choose tiles, pass pointers.

``contract.py`` has checked the arguments, and the operators in ``autograd.py`` add gradients. One of them calls :func:`matmul`.
Another makes a :class:`Layer`, which ``variants/triton.py`` passes to :func:`chunked` here or in ``launch_hopper.py``,
``variants/hopper.py`` to another function of that file, and the ablation to a launch of its own. ``fakes.py`` uses the class too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from onelaunch.device.architectures import HOPPER_SMS
from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.kernels.common.sequences import Sequences
from onelaunch.kernels.gemm.choice import mma_with, precision_of
from onelaunch.kernels.scan.launch import ScanTiles, empty_states, scan_tiles
from onelaunch.launch.launch import Launch, Mma
from onelaunch.launch.workspace import workspace
from onelaunch.ops.linear_rnn.kernels.matmul import matmul_kernel
from onelaunch.ops.linear_rnn.kernels.project_scan_gate import project_scan_gate_kernel


class Results(NamedTuple):
    """Results of a launch of the layer; a result that is not wanted has no elements."""

    y: torch.Tensor
    """Output, ``[B, T, V]``."""
    final: torch.Tensor
    """Final states, ``[N, V]`` float32."""
    v: torch.Tensor
    """Product x W, ``[B, T, V]``, saved for a backward pass."""
    carries: torch.Tensor
    """State before every ``scan_tiles(T, V).steps``-th step, ``[B, tiles, V]`` float32, saved for a backward pass."""


class Layer(NamedTuple):
    """Arguments of a forward call of the layer, as the kernels take them."""

    x: torch.Tensor
    weight: torch.Tensor
    log_decay: torch.Tensor
    gate: torch.Tensor | None
    """Gate, ``[B, T, V]``; ``None`` if y are the states."""
    sequences: Sequences
    want_final: bool
    keep: bool
    """Flag: v and the carries are stored for a backward pass."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return B, T, D and V."""
        batch, length, width = self.x.shape
        return batch, length, width, self.weight.shape[1]

    def flags(self) -> dict[str, bool]:
        """Return the compile-time flags that all kernels of the layer have."""
        gated, initial = self.gate is not None, self.sequences.initial is not None
        return {"GATED": gated, "INITIAL": initial, "FINAL": self.want_final, "KEEP": self.keep}

    def results(self) -> Results:
        """Return uninitialized tensors for the results, without elements for those that are not wanted."""
        batch, length, _, channels = self.sizes
        y = torch.empty((batch, length, channels), dtype=self.x.dtype, device=self.x.device)
        final, carries = empty_states(y, self.sequences, self.want_final, self.keep)
        return Results(y, final, torch.empty_like(y) if self.keep else y.new_empty(0), carries)

    def in_rows(self) -> Layer:
        """Return the layer with neighbouring channels next to each other in memory, copied where they are not."""
        x, weight, log_decay = (inner_contiguous(t) for t in (self.x, self.weight, self.log_decay))
        gate = None if self.gate is None else inner_contiguous(self.gate)
        return self._replace(x=x, weight=weight, log_decay=log_decay, gate=gate)

    def strides(self) -> tuple[int, ...]:
        """Return the strides of x (batch, step), of the weight's rows, and of log_decay and gate (batch, step).

        Those of a missing gate are 0.
        """
        decay, gate = self.log_decay.stride(), (0, 0) if self.gate is None else self.gate.stride()
        return *self.x.stride()[:2], self.weight.stride(0), *decay[:2], *gate[:2]


@dataclass(frozen=True, slots=True)
class ProjectTiles:
    """Tiles of the kernel that projects, scans and gates: those of the scan, and ``inner`` (BD) columns of x per step."""

    scan: ScanTiles
    inner: int = 64
    stages: int = 3


_MANY_CTAS = 400
"""Number of CTAs with the tiles of :func:`scan_tiles` beyond which wider tiles are faster: about three per SM of an H200."""


def _project_tiles(batch: int, length: int, width: int, channels: int, element_size: int) -> ProjectTiles:
    """Return tiles with as many steps as those of the scan, since the backward pass reads one carry per tile.

    64 x 32 is fastest while it leaves SMs free (7.3 us against 8.2 us for 64 x 64 at B=4 T=2048 D=256 V=64). With more than
    :data:`_MANY_CTAS` such CTAs, 64 x 64 with 8 warps is fastest (10.0 us against 11.0 us at B=16 T=1024), since it reads x once.
    Tiles of 128 steps are slower at all sizes.
    """
    scan = scan_tiles(length, channels)
    if channels >= 64 and batch * cdiv(length, scan.steps) * cdiv(channels, scan.channels) > _MANY_CTAS:
        scan = replace(scan, channels=64, warps=8)
    inner = next((size for size in (16, 32) if width <= size), 64 if element_size == 2 else 32)
    return ProjectTiles(scan, inner=inner)


def chunked(layer: Layer) -> Results:
    """Launch the portable kernel that projects, scans and gates each tile; it takes any dtype and packed sequences."""
    layer, results, sequences = layer.in_rows(), layer.results(), layer.sequences
    batch, length, width, channels = layer.sizes
    tiles = _project_tiles(batch, length, width, channels, layer.x.element_size())
    tiles = replace(tiles, scan=tiles.scan.on(layer.x.device))
    words = workspace(layer.x.device, tiles.scan.words(batch, length, channels))  # flag-in-data words of the look-back
    Launch(
        project_scan_gate_kernel, tiles.scan.grid(batch, length, channels),
        *layer[:4], *sequences,  # x, weight, log_decay, gate, initial, offsets
        results.y, results.v, results.final, results.carries, words,
        length, width, channels, sequences.count(batch), *layer.strides(),
        BT=tiles.scan.steps, BV=tiles.scan.channels, BD=tiles.inner, EVEN_D=width % tiles.inner == 0,
        GROUP=tiles.scan.group, EVEN=tiles.scan.even(length, channels),
        PACKED=sequences.offsets is not None, STEPS=sequences.bisection_steps(),
        num_stages=tiles.stages, **tiles.scan.options(layer.x.device), **layer.flags(),
        mma=mma_with(layer.x, Mma.WIDEST), PRECISION=precision_of(layer.x),
    ).run()  # fmt: skip
    return results


@dataclass(frozen=True, slots=True)
class MatmulTiles:
    """Tile sizes and launch options of the plain matrix product."""

    m: int = 64
    n: int = 64
    k: int = 64
    group: int = 8
    warps: int = 4
    stages: int = 3


_BLOCKS_PER_SUM = 16
"""Blocks of K that one sum of float32 operands adds up in :func:`matmul`: 16 blocks of 32, so 512 products."""


def _matmul_tiles(m: int, n: int, element_size: int) -> MatmulTiles:
    """Return tiles of 64 x 64, or of 128 x 128 for 16-bit results with a tile for every SM of an H200; not tuned further."""
    if element_size == 4:
        return MatmulTiles(k=32)
    return MatmulTiles(128, 128, 64, warps=8) if m * n >= HOPPER_SMS * 128 * 128 and n >= 128 else MatmulTiles()


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a [M, K] @ b [K, N]``, computed by one launch; operands have any strides."""
    (m, k), n = a.shape, b.shape[1]
    tiles = _matmul_tiles(m, n, a.element_size())
    out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    Launch(
        matmul_kernel, (cdiv(m, tiles.m) * cdiv(n, tiles.n),),
        a, b, out, m, n, k, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
        BM=tiles.m, BN=tiles.n, BK=tiles.k, GROUP_M=tiles.group, PART=_BLOCKS_PER_SUM,
        num_warps=tiles.warps, num_stages=tiles.stages, mma=mma_with(a, Mma.WIDEST), PRECISION=precision_of(a),
    ).run()  # fmt: skip
    return out
