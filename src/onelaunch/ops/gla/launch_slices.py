"""Launches of ``gla``'s Hopper kernels over one rank's slice of T: local passes whose sums of segments the other passes share.

A pass along time in segments needs what each segment adds to the state. A rank needs what its whole slice adds. So the local pass
is ``segment_sum_kernel`` over all segments, and one launch of ``fold_kernel`` that combines its sums to the rank's message. The
pass with outputs starts its segments from the same sums and the state before the slice. ``slices.py`` makes
:class:`HopperPasses` where the variant ``hopper`` runs the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.launch.launch import Launch, Mma
from onelaunch.ops.gla import launch_hopper
from onelaunch.ops.gla.kernels.fold import fold_kernel
from onelaunch.ops.gla.launch import Attention, empty_final, ratio
from onelaunch.ops.gla.launch_hopper import PassOperands, SegmentSums
from onelaunch.parallel import Kept, Passes, Tensors

_TILE = 32
"""Keys and values of a CTA of ``fold_kernel``; not measured yet."""


def _fold(
    added: torch.Tensor, decays: torch.Tensor, strides: tuple[int, ...], count: int, state: torch.Tensor, *,
    initial: torch.Tensor | None = None, factors: torch.Tensor | None = None, group: int = 1, back: bool,
) -> None:  # fmt: skip
    """Launch ``fold_kernel`` for ``state [heads, K, V]``; the kernel explains the arguments."""
    heads, keys, values = state.shape
    Launch(
        fold_kernel, (heads, cdiv(keys, _TILE), cdiv(values, _TILE)),
        added, decays, initial, state, factors, count, keys, values, *strides, 0 if factors is None else factors.shape[1],
        mma=Mma.NONE, GROUP=group, BACK=back, BK=_TILE, BV=_TILE, num_warps=4,
    ).run()  # fmt: skip


def message_of(sums: SegmentSums, call: Attention, before: torch.Tensor | None, *, back: bool) -> torch.Tensor:
    """Return a rank's message ``[1, elements]``: the state after its slice, ``[B, heads, K, V]``, and the cumulative decays.

    Args:
        sums: Sums of all segments; with ``back`` of every head of the output, else of the states.
        call: Tensors of the slice.
        before: State before the slice, or ``None`` for zeros; with ``back``, the gradient of the state after it.
        back: Flag that the sums are gradients.
    """
    *_, keys, values = call.sizes
    rows, channels = sums.states.shape[0] * call.heads.state, 1 if call.scalar else keys
    message = sums.states.new_empty((1, rows * (keys * values + channels)))
    state, cumulative_decays = message[0].split([rows * keys * values, rows * channels])
    *_, segments, padded_values, padded_keys = sums.states.shape
    strides = (
        segments * padded_values * padded_keys,
        padded_values * padded_keys,
        1,
        padded_keys,
        segments * padded_keys,
        padded_keys,
    )
    _fold(
        sums.states, sums.decays, (*strides, 1), segments, state.view(rows, keys, values),
        initial=None if before is None else before.contiguous(), factors=cumulative_decays.view(rows, channels),
        group=ratio(sums.states.shape[1], call.heads.state), back=back,
    )  # fmt: skip
    return message


def folded(
    gathered: torch.Tensor, ranks: Sequence[int], state: tuple[int, int, int], channels: int, *, back: bool
) -> torch.Tensor:
    """Combine the messages of neighbouring ranks, and return the state after the last of their slices, ``[N, heads, K, V]``.

    Args:
        gathered: Messages, ``[ranks of the group, elements]``.
        ranks: Ranks in the order of the recurrence.
        state: Sizes heads, K and V.
        channels: Cumulative decays of a head: 1 or K.
        back: Flag that states are gradients, so that the order is that of falling ranks.
    """
    heads, keys, values = state
    elements = gathered.shape[1]
    rows = elements // (keys * values + channels)
    found = gathered.new_empty((rows // heads, heads, keys, values))
    first = gathered[min(ranks)]
    strides = (keys * values, elements, values, 1, channels, elements, 0 if channels == 1 else 1)
    _fold(first, first[rows * keys * values :], strides, len(ranks), found.view(rows, keys, values), back=back)
    return found


class HopperPasses(Passes):
    """Passes of the Hopper kernels; tensors are q, k, v, g and ``None``.

    Sums are shared where a slice is one sequence, or one for each batch entry. In float16 the pass backwards in time scales the
    outputs' gradients, and sums its segments again.

    Args:
        scale: Factor of q.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def _call(self, tensors: Tensors, initial: torch.Tensor | None, offsets: torch.Tensor | None) -> Attention:
        """Return the tensors as launches take them."""
        q, k, v, g = (each for each in tensors if each is not None)
        return Attention.of(q, k, v, g, initial, offsets, self.scale)

    def _sums(self, call: Attention, operands: PassOperands) -> SegmentSums:
        """Return the sums of all segments, cut as the pass with outputs in this direction of time is."""
        options = {"output": True, "store_states": operands.reverse, "split": True, "recompute": False}
        return launch_hopper.sum_segments(call, operands, launch_hopper.configured(call, operands, **options), last=True)

    def local_state(self, tensors: Tensors, start: int, before: torch.Tensor | None) -> tuple[torch.Tensor, Kept]:
        call = self._call(tuple(None if each is None else each[:, start:] for each in tensors), None, None)
        sums = self._sums(call, PassOperands(call.q, call.k, call.v, reverse=False))
        return message_of(sums, call, before, back=False), sums if start == 0 else ()

    def forward(
        self, tensors: Tensors, initial: torch.Tensor | None, offsets: torch.Tensor | None, kept: Kept, *, want_final: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        call = self._call(tensors, initial, offsets)
        final = empty_final(call, wanted=True) if want_final else None
        return launch_hopper.forward(call, final=final, sums=_shared(kept, offsets)), final

    def initial_gradient(
        self, tensors: Tensors, dy: torch.Tensor, stop: int, behind: torch.Tensor | None
    ) -> tuple[torch.Tensor, Kept]:
        call = self._call(tuple(None if each is None else each[:, :stop] for each in tensors), None, None)
        sums = self._sums(call, PassOperands(call.k, call.q, inner_contiguous(dy[:, :stop]), reverse=True))
        whole = stop == dy.shape[1] and dy.dtype is not torch.float16
        return message_of(sums, call, behind, back=True), sums if whole else ()

    def states(self, tensors: Tensors, initial: torch.Tensor | None, offsets: torch.Tensor | None, kept: Kept) -> Kept:
        call = self._call(tensors, initial, offsets)
        return tuple(launch_hopper.computed_states(call, sums=_shared(kept, offsets)))

    def gradients(
        self,
        tensors: Tensors,
        initial: torch.Tensor | None,
        offsets: torch.Tensor | None,
        dy: torch.Tensor,
        dfinal: torch.Tensor | None,
        states: Kept,
        kept: Kept,
    ) -> tuple[Tensors, torch.Tensor | None]:
        call = self._call(tensors, initial, offsets)
        found = launch_hopper.backward(call, dy, states=list(states), dfinal=dfinal, sums=_shared(kept, offsets))
        gradients = (found.q, found.k, found.v, found.g, *(None,) * (len(tensors) - 4))
        return gradients, None if initial is None else found.initial


def _shared(kept: Kept, offsets: torch.Tensor | None) -> SegmentSums | None:
    """Return the sums of a slice's segments, or ``None`` where there are none. Packed sequences are cut each for itself."""
    return SegmentSums(*kept) if kept and offsets is None else None
