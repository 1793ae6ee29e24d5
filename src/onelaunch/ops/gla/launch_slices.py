"""Launches of ``gla``'s Hopper kernels over one rank's slice of T: local passes whose sums of segments the other passes share.

A pass that cuts time into segments needs what each segment adds to the state. Context parallelism needs what a whole slice adds.
So the local pass is ``segment_sum_kernel`` over all segments, and one launch of ``fold_kernel`` that combines its sums to the
rank's message. The pass with outputs starts its segments from the same sums and the state before the slice. ``slices.py`` makes
:class:`HopperPasses` where the variant ``hopper`` runs the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton import knobs

from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.launch.launch import Launch, Mma
from onelaunch.launch.planned import Planned
from onelaunch.ops.gla import launch_hopper
from onelaunch.ops.gla.kernels.fold import fold_in_place_kernel, fold_kernel
from onelaunch.ops.gla.launch import Attention, empty_final, ratio
from onelaunch.ops.gla.launch_hopper import PassOperands, SegmentSums
from onelaunch.parallel import InPlace, Kept, Passes, Tensors, peer_stores
from onelaunch.parallel.peer_stores import parts_of

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
        back: Flag that states are gradients, so that ranks are in descending order.
    """
    return _folded(gathered, min(ranks), len(ranks), *state, channels, back)


@Planned
def _folded(
    gathered: torch.Tensor, first: int, count: int, heads: int, keys: int, values: int, channels: int, back: bool
) -> torch.Tensor:
    """Return the state of :func:`folded` from the messages of ``count`` ranks, of which ``first`` is the lowest."""
    elements = gathered.shape[1]
    rows = elements // (keys * values + channels)
    found = gathered.new_empty((rows // heads, heads, keys, values))
    lowest = gathered[first]
    strides = (keys * values, elements, values, 1, channels, elements, 0 if channels == 1 else 1)
    _fold(lowest, lowest[rows * keys * values :], strides, count, found.view(rows, keys, values), back=back)
    return found


def folded_in_place(messages: InPlace, ranks: Sequence[int], state: tuple[int, int, int], channels: int) -> torch.Tensor:
    """Return the state that :func:`folded` returns, from messages that peers store in memory of this rank.

    The kernel waits for the messages.

    Args:
        messages: Memory in which they arrive.
        ranks: Ranks in the order of the recurrence.
        state: Sizes heads, K and V.
        channels: Cumulative decays of a head: 1 or K.
    """
    facts = (messages.ranks, messages.capacity, messages.limit, messages.shape[1])
    return messages.read(lambda: _folded_in_place(messages.memory, tuple(ranks)[::-1], *state, channels, *facts))


@Planned
def _folded_in_place(
    memory: torch.Tensor, nearest_first: tuple[int, ...], heads: int, keys: int, values: int, channels: int,
    ranks: int, capacity: int, limit: int, words: int,
) -> torch.Tensor:  # fmt: skip
    """Launch ``fold_in_place_kernel``, which explains the arguments, and return the state ``[N, heads, K, V]``."""
    rows = words // (keys * values + channels)
    found = memory.new_empty((rows // heads, heads, keys, values), dtype=torch.float32)
    Launch(
        fold_in_place_kernel, (rows, cdiv(keys, _TILE), cdiv(values, _TILE)),
        *parts_of(memory, ranks), found, nearest_first, rows, words, capacity, limit, keys, values, channels,
        mma=Mma.NONE, COUNT=len(nearest_first), RANKS=ranks, CTAS=peer_stores.CTAS, BK=_TILE, BV=_TILE,
        TIMED=not knobs.runtime.interpret, num_warps=4,
    ).run()  # fmt: skip
    return found


class HopperPasses(Passes):
    """Passes of the Hopper kernels; tensors are q, k, v, g and ``None``.

    Sums are shared where a slice is one sequence, or one for each batch entry. In float16 the pass backwards in time scales the
    outputs' gradients, and sums its segments again. The functions below do the work. Each replays its launches from a plan if its
    inputs have the same shapes, dtypes and so on as those of an earlier call.

    Args:
        scale: Factor of q.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def local_state(self, tensors: Tensors, start: int, before: torch.Tensor | None) -> tuple[torch.Tensor, Kept]:
        sent, *sums = _local_state(*tensors[:4], before, start, self.scale)
        return sent, tuple(sums) if start == 0 else ()

    def sums(self, tensors: Tensors, offsets: torch.Tensor | None) -> Kept:
        return () if offsets is not None else tuple(_ordinary_sums(*tensors[:4], self.scale))

    def forward(
        self, tensors: Tensors, initial: torch.Tensor | None, offsets: torch.Tensor | None, kept: Kept, *, want_final: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _forward(*tensors[:4], initial, offsets, *_shared(kept, offsets), want_final, self.scale)

    def initial_gradient(
        self, tensors: Tensors, dy: torch.Tensor, stop: int, behind: torch.Tensor | None
    ) -> tuple[torch.Tensor, Kept]:
        sent, *sums = _initial_gradient(*tensors[:4], dy, behind, stop, self.scale)
        whole = stop == dy.shape[1] and dy.dtype is not torch.float16
        return sent, tuple(sums) if whole else ()

    def states(self, tensors: Tensors, initial: torch.Tensor | None, offsets: torch.Tensor | None, kept: Kept) -> Kept:
        return tuple(_states(*tensors[:4], initial, offsets, *_shared(kept, offsets), self.scale))

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
        both = (*states, None)[:2]
        *found, dinitial = _gradients(*tensors[:4], initial, offsets, dy, dfinal, *both, *_shared(kept, offsets), self.scale)
        return (*found, *(None,) * (len(tensors) - 4)), None if initial is None else dinitial


def _shared(kept: Kept, offsets: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the sums of a slice's segments, or ``None``. Packed sequences have other segments, since each is cut by itself."""
    return (kept[0], kept[1]) if kept and offsets is None else (None, None)


def _summed(states: torch.Tensor | None, decays: torch.Tensor | None) -> SegmentSums | None:
    return None if states is None or decays is None else SegmentSums(states, decays)


def _sums(call: Attention, operands: PassOperands) -> SegmentSums:
    """Return the sums of all segments, which are those of the pass with outputs in this direction of time."""
    options = {"output": True, "store_states": operands.reverse, "split": True, "recompute": False}
    return launch_hopper.sum_segments(call, operands, launch_hopper.configured(call, operands, **options), last=True)


@Planned
def _local_state(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, before: torch.Tensor | None, start: int, scale: float
) -> tuple[torch.Tensor, ...]:
    """Return the message of :meth:`HopperPasses.local_state`, and the sums of all segments."""
    call = Attention.of(q[:, start:], k[:, start:], v[:, start:], g[:, start:], None, None, scale)
    sums = _sums(call, PassOperands(call.q, call.k, call.v, reverse=False))
    return message_of(sums, call, before, back=False), *sums


@Planned
def _ordinary_sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """Return the sums of segments that an ordinary forward pass makes for itself; none if it makes none."""
    call = Attention.of(q, k, v, g, None, None, scale)
    operands = PassOperands(call.q, call.k, call.v, reverse=False)
    configuration = launch_hopper.configured(call, operands, output=True, store_states=False, split=True)
    cut = configuration.cut
    return tuple(launch_hopper.sum_segments(call, operands, configuration)) if cut.count > 1 and not cut.recompute else ()


@Planned
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, initial: torch.Tensor | None,
    offsets: torch.Tensor | None, states: torch.Tensor | None, decays: torch.Tensor | None, want_final: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the results of :meth:`HopperPasses.forward`; ``states`` and ``decays`` are sums of segments."""
    call = Attention.of(q, k, v, g, initial, offsets, scale)
    final = empty_final(call, wanted=True) if want_final else None
    return launch_hopper.forward(call, final=final, sums=_summed(states, decays)), final


@Planned
def _initial_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, dy: torch.Tensor, behind: torch.Tensor | None,
    stop: int, scale: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the message of :meth:`HopperPasses.initial_gradient`, and the sums of all segments."""
    call = Attention.of(q[:, :stop], k[:, :stop], v[:, :stop], g[:, :stop], None, None, scale)
    sums = _sums(call, PassOperands(call.k, call.q, inner_contiguous(dy[:, :stop]), reverse=True))
    return message_of(sums, call, behind, back=True), *sums


@Planned
def _states(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, initial: torch.Tensor | None,
    offsets: torch.Tensor | None, states: torch.Tensor | None, decays: torch.Tensor | None, scale: float,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the states of :meth:`HopperPasses.states`; ``states`` and ``decays`` are sums of segments."""
    call = Attention.of(q, k, v, g, initial, offsets, scale)
    return launch_hopper.computed_states(call, sums=_summed(states, decays))


@Planned
def _gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, initial: torch.Tensor | None,
    offsets: torch.Tensor | None, dy: torch.Tensor, dfinal: torch.Tensor | None, entering: torch.Tensor,
    second: torch.Tensor | None, states: torch.Tensor | None, decays: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k, v, g and the initial states.

    ``entering`` and ``second`` are the tensors of :func:`_states`; ``states`` and ``decays`` are sums of segments.
    """
    call = Attention.of(q, k, v, g, initial, offsets, scale)
    kept = [entering] if second is None else [entering, second]
    found = launch_hopper.backward(call, dy, states=kept, dfinal=dfinal, sums=_summed(states, decays))
    return found.q, found.k, found.v, found.g, found.initial
