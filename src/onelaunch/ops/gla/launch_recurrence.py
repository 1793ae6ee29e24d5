"""Launches of ``gla``'s recurrent kernel (kernels/recurrence.py), forward and backward, for the variant ``fused_recurrent``.

One launch computes the output, and one each dq, dk with dg, and dv with dgv: the same kernel with other tensors in the same
places. Arguments are checked in contract.py, and gradients wired in autograd_recurrence.py, which calls this module.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.launch.launch import Launch
from onelaunch.ops.gla.kernels import recurrence
from onelaunch.ops.gla.launch import (
    Attention,
    block,
    empty_final,
    empty_output,
    empty_parts,
    family,
    final_like,
    output_like,
    ratio,
    step,
    strides,
    sum_heads,
)


class Recurrence(NamedTuple):
    """Tensors of a call as the recurrent kernel takes them."""

    call: Attention
    gv: torch.Tensor | None
    """Log-decay of value channels, ``[B, T, Hg, V]``; its last dimension is contiguous."""
    reverse: bool
    """Flag that every sequence is gone through from its end to its start."""

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        gv: torch.Tensor | None,
        initial: torch.Tensor | None,
        offsets: torch.Tensor | None,
        scale: float,
        reverse: bool,
    ) -> Recurrence:
        """Make the call from tensors of any strides; initial states may have values or keys next to each other in memory."""
        call = Attention.of(q, k, v, g, initial, offsets, scale, either_order=True)
        return cls(call, None if gv is None else inner_contiguous(gv), reverse)


class Gradients(NamedTuple):
    """Gradients of a call's tensors, in their dtypes and shapes; without elements where the call has no such tensor."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    gv: torch.Tensor
    initial: torch.Tensor


class Tile(NamedTuple):
    """Part of a state that the 32 lanes of a warp hold: neighbouring rows and columns of a lane, and lanes along both."""

    rows: int
    columns: int
    row_lanes: int
    column_lanes: int


_COLUMNS = 8
"""Columns of a warp in passes for gradients, and where a grid is small: 16 would be half of the warps, with longer steps."""

_WARPS = 4
"""Warps per SM that are executed at once. With more of them, warps of 16 columns need fewer instructions for the same state."""

_HELD, _HELD_TWICE = 64, 32
"""Most elements of the state in registers of a lane, and those where it holds a stored state too."""


def tile_of(rows: int, columns: int, states: int, device: torch.device, *, gradients: bool) -> Tile:
    """Return the tile of each of ``states`` states of this size, with all of its rows; in the interpreter with all columns too.

    Where it has 32 lanes along rows, each loads other elements of a vector, and Triton leaves them where they are used.
    """
    held = block(rows, 512)
    row_lanes = min(held, 32)
    column_lanes, own_rows = 32 // row_lanes, held // row_lanes
    if family(device) == "cpu":
        return Tile(own_rows, block(columns, 512) // column_lanes, row_lanes, column_lanes)
    many = not gradients and states * cdiv(columns, _COLUMNS) > _WARPS * processors(device)
    held_twice = _HELD_TWICE if own_rows <= 4 else _HELD_TWICE // 2  # vectors of wide heads need the other registers
    most = min(2 * _COLUMNS if many else _COLUMNS, (held_twice if gradients else _HELD) // own_rows)
    return Tile(own_rows, max(most // column_lanes, 1), row_lanes, column_lanes)


def kept_every(dtype: torch.dtype) -> int:
    """Return the number of steps per stored state, for a dtype of q.

    From state to state the gradients of log-decays are sums in which terms cancel. Float32 gradients need shorter ones.
    """
    return 16 if dtype is torch.float32 else 64


def _slots(call: Attention) -> int:
    """Return an upper bound of the number of stored states, as :attr:`Attention.slots` for chunks."""
    batch, length = call.q.shape[:2]
    every = kept_every(call.q.dtype)
    return batch * cdiv(length, every) if call.sequences.offsets is None else length // every + call.sequence_count


_FEW_STEPS = 16
"""Most steps per sequence that the kernel for decoding (kernels/step.py) takes forward."""


class Pass(NamedTuple):
    """One pass along time: tensors ``[B, T, heads, channels]`` in their places in the kernel, see kernels/recurrence.py."""

    read: torch.Tensor
    added: torch.Tensor
    columns: torch.Tensor
    row_decay: torch.Tensor | None
    column_decay: torch.Tensor | None
    reverse: bool
    after: bool = False
    read_scale: float = 1.0
    added_scale: float = 1.0
    first: torch.Tensor | None = None
    """State ``[N, heads, K, V]`` before the first step of this pass."""
    out: torch.Tensor | None = None
    """Destination of the result, ``[B, T, H, columns]``, contiguous."""
    bare: torch.Tensor | None = None
    """Destination of the result without the term of the step itself, float32."""
    last: torch.Tensor | None = None
    """Destination of the state after the last step of this pass, ``[N, heads, K, V]``."""
    kept: torch.Tensor | None = None
    """States ``[slots, H, K, V]`` of some steps (:func:`kept_every`): stored, or read for ``decay_gradient``."""
    partner: torch.Tensor | None = None
    """Tensor ``[B, T, heads, columns]`` of which ``out`` is the gradient."""
    partner_bare: torch.Tensor | None = None
    """Bare result, float32, of the pass for the gradient of ``columns``."""
    decay_gradient: torch.Tensor | None = None
    """Destination of the gradient of the columns' log-decays, ``[B, T, H, columns]``, contiguous."""

    def run(self, call: Attention, *, transposed: bool) -> None:
        """Launch the kernel; ``transposed`` says that rows are values and columns are keys."""
        _, length, heads, keys, values = call.sizes
        rows, columns = (values, keys) if transposed else (keys, values)
        gradients = self.after or self.kept is not None
        tile = tile_of(rows, columns, call.sequence_count * heads, call.q.device, gradients=gradients)
        given = self.read, self.added, self.columns, self.row_decay, self.column_decay, self.partner
        groups = [1 if each is None else ratio(heads, each.shape[2]) for each in given]
        storing = self.kept is not None and self.decay_gradient is None
        Launch(
            recurrence.recurrence_kernel, (call.sequence_count * heads * cdiv(columns, tile.columns * tile.column_lanes),),
            *given[:5], self.first, call.sequences.offsets, self.out, self.bare, self.last, self.kept,
            self.partner, self.partner_bare, self.decay_gradient, self.read_scale, self.added_scale,
            length, heads, rows, columns, call.sequence_count,
            *(each for state in (self.first, self.last, self.kept) for each in _along(state, transposed=transposed)),
            *(each for tensor in given for each in ((0, 0, 0) if tensor is None else strides(tensor))),
            ROWS=tile.rows, COLUMNS=tile.columns, ROW_LANES=tile.row_lanes, COLUMN_LANES=tile.column_lanes,
            ROW_DECAY=_kind(self.row_decay), COLUMN_DECAY=_kind(self.column_decay),
            PACKED=call.sequences.offsets is not None, REVERSE=self.reverse, AFTER=self.after,
            FIRST=self.first is not None, OUT=self.out is not None, BARE=self.bare is not None, LAST=self.last is not None,
            KEEP=storing, DECAY_GRADIENT=self.decay_gradient is not None, EVERY=kept_every(call.q.dtype),
            READ_GROUP=groups[0], ADDED_GROUP=groups[1], COLUMNS_GROUP=groups[2], ROW_DECAY_GROUP=groups[3],
            COLUMN_DECAY_GROUP=groups[4], PARTNER_GROUP=groups[5],
            FIRST_GROUP=_state_group(self.first, heads), LAST_GROUP=_state_group(self.last, heads), num_warps=1, num_stages=1,
        ).run()  # fmt: skip


def _along(state: torch.Tensor | None, *, transposed: bool) -> tuple[int, int]:
    """Return the strides of a state along rows and columns."""
    if state is None:
        return 0, 0
    of_keys, of_values = state.stride()[2:]
    return (of_values, of_keys) if transposed else (of_keys, of_values)


def _state_group(state: torch.Tensor | None, heads: int) -> int:
    """Return how many heads of the output share a state."""
    return 1 if state is None else ratio(heads, state.shape[1])


def _kind(decay: torch.Tensor | None) -> int:
    """Return the kernel's constant for no decay, one for all channels, or one per channel."""
    if decay is None:
        return recurrence.NO_DECAY.value
    return recurrence.ONE_DECAY.value if decay.shape[3] == 1 else recurrence.DECAYS.value


def forward(recurrence_call: Recurrence, *, want_final: bool, want_bare: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``o [B, T, H, V]``, the final state, and the bare output for the gradient of gv, each empty if it is not wanted.

    The final state ``[N, heads, K, V]`` lies in memory as the initial one does. The bare output is float32, as large as o.
    """
    call, gv, reverse = recurrence_call
    few = call.q.shape[0] * call.q.shape[1] <= _FEW_STEPS * call.sequence_count
    if few and not want_bare and not reverse:
        return (*step(call, want_final=want_final, gv=gv), call.q.new_empty((0,), dtype=torch.float32))
    out = empty_output(call)
    final = final_like(call.sequences.initial, empty_final(call, wanted=want_final))
    bare = out.new_empty(out.shape if want_bare else (0,), dtype=torch.float32)
    Pass(
        call.q, call.k, call.v, call.g, gv, reverse, read_scale=call.scale, first=call.sequences.initial, out=out,
        bare=bare if want_bare else None, last=final if want_final else None,
    ).run(call, transposed=False)  # fmt: skip
    return out, final, bare


def backward(recurrence_call: Recurrence, do: torch.Tensor, dfinal: torch.Tensor | None, bare: torch.Tensor) -> Gradients:
    """Compute the gradients of all inputs from those of ``o`` and of the final state, and from the bare output if there is gv.

    States and gradients of states are computed again for each of the results; some states are stored (:func:`kept_every`).
    """
    call, gv, reverse = recurrence_call
    *_, heads, keys, values = call.sizes
    initial, do = call.sequences.initial, inner_contiguous(do)
    if dfinal is not None and not dfinal.mT.is_contiguous():  # keys or values may be next to each other
        dfinal = dfinal.contiguous()
    dq, dk, dv = (_Sum.of(tensor, heads) for tensor in (call.q, call.k, call.v))
    dg = _Sum.of(call.g, heads, channels=keys)
    dgv = None if gv is None else _Sum.of(gv, heads)
    kept = do.new_empty((_slots(call), heads, keys, values), dtype=torch.float32)
    dq_bare = empty_parts(call.q, heads)
    dinitial = empty_final(call, wanted=initial is not None)
    starts = dinitial  # what every head gives to it
    if initial is not None and initial.shape[1] < heads:
        starts = dinitial.new_empty((initial.shape[0], heads, keys, values))
    Pass(
        do, call.v, call.k, gv, call.g, reverse, read_scale=call.scale, first=initial, out=dq.parts, bare=dq_bare, kept=kept,
    ).run(call, transposed=True)  # fmt: skip
    Pass(
        call.v, do, call.q, gv, call.g, not reverse, after=True, added_scale=call.scale, first=dfinal, out=dk.parts, kept=kept,
        partner=call.k, partner_bare=dq_bare, decay_gradient=dg.parts,
    ).run(call, transposed=True)  # fmt: skip
    Pass(
        call.k, call.q, do, call.g, gv, not reverse, after=True, added_scale=call.scale, first=dfinal, out=dv.parts,
        last=None if initial is None else starts, kept=None if dgv is None else kept,
        partner=None if dgv is None else call.v, partner_bare=None if dgv is None else bare,
        decay_gradient=None if dgv is None else dgv.parts,
    ).run(call, transposed=False)  # fmt: skip
    if starts is not dinitial:
        dinitial = starts.unflatten(1, (dinitial.shape[1], -1)).sum(2)
    to_g = dg.total()
    return Gradients(
        dq.total(), dk.total(), dv.total(), to_g.squeeze(-1) if call.scalar else to_g,
        call.g.new_empty(0) if dgv is None else dgv.total(), dinitial,
    )  # fmt: skip


class _Sum(NamedTuple):
    """Gradient of a tensor whose heads several heads of the output may share, and whose channels may have one decay."""

    parts: torch.Tensor
    """Part of each head of the output, ``[B, T, H, X]``, contiguous: the gradient itself if no heads are shared, else float32."""
    gradient: torch.Tensor
    """Gradient in the shape of the tensor, contiguous."""

    @classmethod
    def of(cls, tensor: torch.Tensor, heads: int, channels: int | None = None) -> _Sum:
        """Allocate both; ``channels`` is the number of channels of the parts, by default those of the tensor."""
        gradient = output_like(tensor, None)
        if tensor.shape[2] == heads and channels in (None, tensor.shape[3]):
            return cls(gradient, gradient)
        batch, length, *_, own = tensor.shape
        extent = (batch, length, heads, own if channels is None else channels)
        return cls(torch.empty(extent, dtype=torch.float32, device=tensor.device), gradient)

    def total(self) -> torch.Tensor:
        """Return the gradient, for which the parts are added up and rounded once."""
        if self.parts is self.gradient:
            return self.gradient
        parts = self.parts if self.parts.shape[3] == self.gradient.shape[3] else self.parts.sum(3, keepdim=True)
        if parts.shape[2] == self.gradient.shape[2]:
            return parts.to(self.gradient.dtype)
        sum_heads(parts, self.gradient)
        return self.gradient
