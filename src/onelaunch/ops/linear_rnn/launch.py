"""Launches of the layer's kernels: allocate the results, choose the tiles, pass the pointers. No checks, no autograd."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from onelaunch.ops.gated_scan.launch import ScanTiles, Sequences, empty_states, inner_contiguous, scan_tiles
from onelaunch.ops.linear_rnn import kernels
from onelaunch.ops.workspace import workspace

STEPWISE_WIDTH = 2048
"""Widest x that the stepwise kernel holds the weights for in registers."""


@dataclass(frozen=True, slots=True)
class ProjectTiles:
    """Tiles of the kernel that projects, scans and gates: the scan's, and BD columns of x at once."""

    scan: ScanTiles
    inner: int = 64
    stages: int = 3


MANY = 400
"""Programs beyond which wider tiles pay: three on each of an H200's 132 processors."""


def project_tiles(batch: int, length: int, width: int, channels: int, element_size: int) -> ProjectTiles:
    """As many steps as the scan's own tiles have, since the backward pass reads one carry a tile.

    64 x 32 is fastest while it leaves processors free (7.3 against 8.2 us for 64 x 64 at B=4 T=2048 D=256 V=64); with more
    than :data:`MANY` such programs 64 x 64 by 8 warps is (10.0 against 11.0 us at B=16 T=1024), since it reads x once. 128
    steps lose at all sizes.
    """
    scan = scan_tiles(length, channels)
    if channels >= 64 and batch * triton.cdiv(length, scan.steps) * triton.cdiv(channels, scan.channels) > MANY:
        scan = replace(scan, channels=64, warps=8)
    inner = min(64 if element_size == 2 else 32, max(16, triton.next_power_of_2(width)))
    return ProjectTiles(scan, inner=inner)


def project_scan_gate(
    x: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor,
    sequences: Sequences,
    *,
    want_final: bool,
    keep: bool,
    stepwise: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y ``[B, T, V]``, final state ``[N, V]``, and, to keep for a backward pass, v and the carries. One launch.

    What is not wanted comes back with no elements.
    """
    batch, length, width = x.shape
    channels = weight.shape[1]
    tiles = project_tiles(batch, length, width, channels, x.element_size())
    x, weight, log_decay, gate = (inner_contiguous(tensor) for tensor in (x, weight, log_decay, gate))
    y = torch.empty((batch, length, channels), dtype=x.dtype, device=x.device)
    v = torch.empty_like(y) if keep else y.new_empty(0)
    final, carries = empty_states(y, sequences, tiles.scan, want_final, keep)
    strides = (
        x.stride(0), x.stride(1), weight.stride(0),
        log_decay.stride(0), log_decay.stride(1), gate.stride(0), gate.stride(1),
    )  # fmt: skip
    flags = {
        "INITIAL": sequences.initial is not None,
        "PACKED": sequences.offsets is not None,
        "FINAL": want_final,
        "KEEP": keep,
    }
    count = sequences.count(batch)
    given = (x, weight, log_decay, gate, sequences.initial, sequences.offsets, y, v, final, carries)
    if stepwise:
        kernels.stepwise_kernel[count, triton.cdiv(channels, STEPWISE_CHANNELS)](
            *given, length, width, channels, count, *strides,
            BT=tiles.scan.steps, BV=STEPWISE_CHANNELS, BD=triton.next_power_of_2(width), num_warps=stepwise_warps(width), **flags,
        )  # fmt: skip
    else:
        words = workspace(x.device, tiles.scan.words(batch, length, channels))
        kernels.project_scan_gate_kernel[tiles.scan.grid(batch, length, channels)](
            *given, words, length, width, channels, count, *strides,
            BT=tiles.scan.steps, BV=tiles.scan.channels, BD=tiles.inner, EVEN_D=width % tiles.inner == 0,
            GROUP=tiles.scan.group, EVEN=tiles.scan.even(length, channels),
            STEPS=sequences.bisection_steps(),
            num_stages=tiles.stages, **tiles.scan.options(), **flags,
        )  # fmt: skip
    return y, final, v, carries


STEPWISE_CHANNELS = 16
"""Channels a program of the stepwise kernel walks: its weights [D, 16] stay in registers."""


def stepwise_warps(width: int) -> int:
    """Enough threads that each holds at most 64 weights."""
    return min(16, max(4, triton.next_power_of_2(width) * STEPWISE_CHANNELS // (32 * 64)))


@dataclass(frozen=True, slots=True)
class MatmulTiles:
    """Tiles of the plain matrix product."""

    m: int = 64
    n: int = 64
    k: int = 64
    group: int = 8
    warps: int = 4
    stages: int = 3


def matmul_tiles(m: int, n: int, element_size: int) -> MatmulTiles:
    """64 x 64 for narrow results, 128 x 128 where that still gives every processor a tile; not tuned further."""
    if element_size == 4:
        return MatmulTiles(k=32)
    return MatmulTiles(128, 128, 64, warps=8) if m * n >= 132 * 128 * 128 and n >= 128 else MatmulTiles()


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a [M, K] @ b [K, N]`` in one launch; any strides."""
    (m, k), n = a.shape, b.shape[1]
    tiles = matmul_tiles(m, n, a.element_size())
    out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    kernels.matmul_kernel[(triton.cdiv(m, tiles.m) * triton.cdiv(n, tiles.n),)](
        a, b, out, m, n, k, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
        BM=tiles.m, BN=tiles.n, BK=tiles.k, GROUP_M=tiles.group, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
