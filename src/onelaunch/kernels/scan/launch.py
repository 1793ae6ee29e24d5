"""Launches of the scan's kernels: allocate results, choose tiles, pass pointers.

Arguments are not checked here: the contracts of ``gated_scan`` and ``linear_rnn`` have done so. The operators in
``ops/gated_scan/autograd.py`` call these functions and add gradients; ``linear_rnn`` calls :func:`backward` too. The launch code
of its one-launch kernels and of its ablation takes :func:`scan_tiles`. It and the fakes of both operations (``fakes.py``)
allocate by :func:`empty_states` or :func:`empty_gradients`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from onelaunch.device.hardware import is_hip, processors
from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.kernels.common.sequences import Sequences
from onelaunch.kernels.scan import backward as backward_kernels
from onelaunch.kernels.scan import forward as kernels
from onelaunch.kernels.scan.look_back import POLL_ROWS
from onelaunch.launch.launch import Launch
from onelaunch.launch.workspace import workspace


@dataclass(frozen=True, slots=True)
class ScanTiles:
    """Tile sizes and launch options of a scan: ``steps`` by ``channels`` per CTA."""

    steps: int = 64
    channels: int = 64
    group: int = 32
    """Number of tiles in a group of the look-back, whose words a tile reads at once.

    A multiple of 8 (``POLL_ROWS``). 8 * ``channels`` must be at least the number of threads, so ``channels`` at least
    4 * ``warps`` where a warp has 32 threads. On AMD, where it has 64, :meth:`on` takes fewer warps for narrow tiles.
    """
    warps: int = 4
    backward_warps: int = 4
    stages: int = 1
    """Number of tiles in flight, where a CTA loops over time."""
    registers: int | None = None
    """Limit on registers per thread, so that enough CTAs fit on an SM; NVIDIA only. ``None``: no limit."""

    def on(self, device: torch.device) -> ScanTiles:
        """Return these tiles with at most as many threads as the tensor has elements on which a CTA spins (look_back.py)."""
        most = POLL_ROWS.value * self.channels // (64 if is_hip(device) else 32)
        return replace(self, warps=min(self.warps, most), backward_warps=min(self.backward_warps, most))

    def grid(self, batch: int, length: int, width: int) -> tuple[int, int]:
        """Return the grid: tiles along time, then batch entries times slices of channels."""
        return cdiv(length, self.steps), batch * cdiv(width, self.channels)

    def options(self, device: torch.device) -> dict[str, Any]:
        """Return Triton's options for the forward kernel."""
        limit = {} if self.registers is None or is_hip(device) else {"maxnreg": self.registers}
        return {"num_warps": self.warps, **limit}

    def even(self, length: int, width: int) -> bool:
        """Return whether all tiles lie inside the tensor, so that no access needs a mask."""
        return length % self.steps == 0 and width % self.channels == 0

    def words(self, batch: int, length: int, width: int) -> int:
        """Return the number of 64-bit words of the look-back: one per tile and channel, and one per group and channel."""
        tiles = cdiv(length, self.steps)
        return batch * width * (tiles + cdiv(tiles, self.group))


MOST_STEPS = 64
"""Largest number of steps of a tile of :func:`scan_tiles`."""


def scan_tiles(length: int, width: int) -> ScanTiles:
    """Return the tiles of a scan over ``length`` steps of ``width`` channels.

    The backward pass uses the same tiles, since it reads the state that entered each of them.

    64 x 32 with 4 warps was fastest or within 3 % of it at all seven sizes of experiment 040 on an H200. At B=4 T=2048 V=64 it
    took 9.2 us, the layer's matrix product included, where 64 x 64 took 10.4 and 128 x 32 10.9. Two warps or eight are slower by
    5 to 20 %. Groups of 8 tiles are 6 % faster than 32 while no sequence has more than 8 tiles. Longer chains of smaller groups
    are slower (11.9 us with groups of 16).
    """
    steps = MOST_STEPS if length > 32 else 32 if length > 16 else 16
    return ScanTiles(steps=steps, channels=32 if width > 16 else 16, group=8 if length <= 8 * steps else 32)


def sequential_tiles(device: torch.device, batch: int, width: int) -> ScanTiles | None:
    """Return tiles for CTAs that loop over time, or ``None`` if the channels alone do not keep the device busy.

    One warp per CTA needs no barrier between its threads. It took 152 us for B=8 T=4096 V=2048 on an H200. Tiles of 64 x 64
    with 4 warps took 171 us, the look-back 290 us, and a plain copy with the same accesses 134 us.
    """
    if device.type != "cuda":
        return None
    sequential = ScanTiles(steps=32, channels=32, warps=1, stages=3)
    ctas = batch * cdiv(width, sequential.channels)
    return sequential if ctas >= 3 * processors(device) else None


def forward(
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None,
    sequences: Sequences,
    *,
    want_final: bool,
    want_carries: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scan, and gate unless ``gate`` is ``None``.

    Returns:
        y, or the states without a gate, ``[B, T, V]`` in the dtype of ``v``; the final state ``[N, V]`` float32; the state that
        enters each tile, ``[B, tiles, V]`` float32. The last two have no elements unless ``want_final`` and ``want_carries``
        ask for them.
    """
    batch, length, width = v.shape
    tiles = scan_tiles(length, width).on(v.device)
    v, log_decay = inner_contiguous(v), inner_contiguous(log_decay)
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final, carries = empty_states(v, sequences, want_final, want_carries)
    gated = gate is not None
    gate = v if gate is None else inner_contiguous(gate)  # a kernel without a gate gets v in its place and does not read it
    given = (v, log_decay, gate, sequences.initial, sequences.offsets, y, final, carries)
    sizes = (
        length, width, sequences.count(batch),
        v.stride(0), v.stride(1), log_decay.stride(0), log_decay.stride(1), gate.stride(0), gate.stride(1),
    )  # fmt: skip
    flags: dict[str, Any] = {
        "STEPS": sequences.bisection_steps(),
        "GATED": gated,
        "INITIAL": sequences.initial is not None,
        "PACKED": sequences.offsets is not None,
        "FINAL": want_final,
        "CARRIES": want_carries,
    }
    sequential = sequential_tiles(v.device, batch, width)
    if sequential is not None:
        ctas = batch * cdiv(width, sequential.channels)
        Launch(
            kernels.sequential_scan_gate_kernel, (ctas,),
            *given, *sizes, BT=sequential.steps, BV=sequential.channels, EVEN=sequential.even(length, width),
            STAGES=sequential.stages, CARRY_STEPS=tiles.steps,  # one state per tile of the backward pass
            **sequential.options(v.device), **flags,
        ).run()  # fmt: skip
    else:
        words = workspace(v.device, tiles.words(batch, length, width))
        Launch(
            kernels.scan_gate_kernel, tiles.grid(batch, length, width),
            *given, words, *sizes, BT=tiles.steps, BV=tiles.channels, GROUP=tiles.group, EVEN=tiles.even(length, width),
            **tiles.options(v.device), **flags,
        ).run()  # fmt: skip
    return y, final, carries


def empty_states(
    v: torch.Tensor, sequences: Sequences, want_final: bool, want_carries: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialized tensors for the final state and the carries; a tensor that is not wanted has no elements.

    The number of carries is that of the tiles of :func:`scan_tiles`, which have fewer than :data:`MOST_STEPS` steps only if one
    of them holds the whole sequence. Its formula has no comparison of the length, which may be symbolic while a call is traced.
    """
    batch, length, width = v.shape
    final = v.new_empty((sequences.count(batch), width) if want_final else (0,), dtype=torch.float32)
    kept = (batch, cdiv(length, MOST_STEPS), width) if want_carries else (0,)
    return final, v.new_empty(kept, dtype=torch.float32)


def empty_gradients(
    v: torch.Tensor, log_decay: torch.Tensor, gate: torch.Tensor | None, initial: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return uninitialized tensors for the results of :func:`backward`, contiguous whatever the strides of its inputs are."""
    dv, dlog_decay = v.new_empty(v.shape), log_decay.new_empty(v.shape)
    dgate = v.new_empty((0,) if gate is None else v.shape)
    return dv, dlog_decay, dgate, v.new_empty(0) if initial is None else initial.new_empty(initial.shape)


def backward(
    dy: torch.Tensor,
    dfinal: torch.Tensor | None,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None,
    sequences: Sequences,
    carries: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dv, dlog_decay, dgate and dinitial, each in its input's dtype.

    ``carries`` is what :func:`forward` returned. dgate and dinitial have no elements without a gate or an initial state.
    """
    batch, length, width = v.shape
    tiles = scan_tiles(length, width).on(v.device)
    dy, v, log_decay = inner_contiguous(dy), inner_contiguous(v), inner_contiguous(log_decay)
    dv, dlog_decay, dgate, dinitial = empty_gradients(v, log_decay, gate, sequences.initial)
    dfinal = None if dfinal is None else dfinal.contiguous()
    words = workspace(v.device, tiles.words(batch, length, width))
    gated = gate is not None
    gate = v if gate is None else inner_contiguous(gate)
    Launch(
        backward_kernels.scan_gate_backward_kernel, tiles.grid(batch, length, width),
        dy, dfinal, v, log_decay, gate, sequences.initial, sequences.offsets, carries,
        dv, dlog_decay, dgate, dinitial, words,
        length, width, sequences.count(batch),
        dy.stride(0), dy.stride(1), v.stride(0), v.stride(1),
        log_decay.stride(0), log_decay.stride(1), gate.stride(0), gate.stride(1),
        BT=tiles.steps, BV=tiles.channels, GROUP=tiles.group, STEPS=sequences.bisection_steps(), EVEN=tiles.even(length, width),
        GATED=gated, INITIAL=sequences.initial is not None, PACKED=sequences.offsets is not None,
        DFINAL=dfinal is not None, num_warps=tiles.backward_warps,
    ).run()  # fmt: skip
    return dv, dlog_decay, dgate, dinitial


def gate_states(s: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return ``s * silu(gate)``, computed in a launch of its own."""
    batch, length, width = s.shape
    tiles = scan_tiles(length, width)
    gate, y = inner_contiguous(gate), torch.empty_like(s)
    Launch(
        kernels.gate_kernel, tiles.grid(batch, length, width),
        s, gate, y, length, width, gate.stride(0), gate.stride(1), BT=tiles.steps, BV=tiles.channels, num_warps=tiles.warps,
    ).run()  # fmt: skip
    return y


def gate_states_backward(dy: torch.Tensor, s: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the states, in float32 because the reverse scan sums it, and the gradient of the gate."""
    batch, length, width = s.shape
    tiles = scan_tiles(length, width)
    dy, gate = inner_contiguous(dy), inner_contiguous(gate)
    ds, dgate = torch.empty_like(s, dtype=torch.float32), torch.empty_like(s)
    Launch(
        backward_kernels.gate_backward_kernel, tiles.grid(batch, length, width),
        dy, s, gate, ds, dgate, length, width, dy.stride(0), dy.stride(1), gate.stride(0), gate.stride(1),
        BT=tiles.steps, BV=tiles.channels, num_warps=tiles.warps,
    ).run()  # fmt: skip
    return ds, dgate
