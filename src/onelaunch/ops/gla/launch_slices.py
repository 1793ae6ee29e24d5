"""Launches of ``gla``'s Hopper kernels over one rank's slice of T: local passes whose sums of segments the other passes share.

A pass that cuts time into segments needs what each segment adds to the state. Context parallelism needs what a whole slice adds.
So the local pass is ``segment_sum_kernel`` over all segments, and one launch that combines its sums to the rank's message:
``fold_and_send_kernel``, which also stores the message to the memory of peers, or ``fold_kernel`` where a collective sends it.
The pass with outputs starts its segments from the same sums and the state before the slice. ``slices.py`` makes
:class:`HopperPasses` where the variant ``hopper`` runs the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from triton import knobs

from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.launch.launch import Launch, Mma
from onelaunch.launch.planned import Planned
from onelaunch.ops.gla import launch_hopper
from onelaunch.ops.gla.kernels.fold import fold_and_send_kernel, fold_in_place_kernel, fold_kernel
from onelaunch.ops.gla.launch import Attention, empty_final
from onelaunch.ops.gla.launch_hopper import PassOperands, SegmentSums
from onelaunch.parallel import InPlace, Kept, Outgoing, Passes, Tensors, peer_stores
from onelaunch.parallel.peer_stores import parts_of

_TILE = 32
"""Keys and values of a CTA of ``fold_kernel``; not measured yet."""

_SENT_VALUES = 128
"""Most values of a block of ``fold_and_send_kernel``; not measured yet."""


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


class MessageSizes(NamedTuple):
    """Sizes of a rank's message: a state for each batch entry and head, then their cumulative decays."""

    rows: int
    """Number of states: batch size times heads of the states."""
    keys: int
    values: int
    channels: int
    """Number of cumulative decays of a state: 1 or K."""

    @classmethod
    def of(cls, q: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> MessageSizes:
        """Return the sizes of the message that describes a slice of these tensors."""
        keys = q.shape[3]
        return cls(g.shape[0] * g.shape[2], keys, v.shape[3], 1 if g.dim() == 3 else keys)

    @property
    def elements(self) -> int:
        """Number of elements of the message."""
        return self.rows * (self.keys * self.values + self.channels)


def outgoing(
    states: torch.Tensor,
    decays: torch.Tensor,
    sizes: MessageSizes,
    before: torch.Tensor | None,
    like: torch.Tensor,
    *,
    back: bool,
) -> Outgoing:
    """Return a rank's message: the state after its slice, ``[B, heads, K, V]``, and the cumulative decays.

    Args:
        states: States of :class:`SegmentSums` of all segments; with ``back`` of every head of the output, else of the states.
        decays: Their decays.
        sizes: Sizes of the message.
        before: State before the slice, or ``None`` for zeros; with ``back``, the gradient of the state after it.
        like: Tensor of the call.
        back: Flag that the sums are gradients.
    """
    before = None if before is None else before.contiguous()
    return Outgoing(
        sizes.elements,
        like,
        lambda: _message(states, decays, before, *sizes, back),
        lambda outbox: _send_message(states, decays, before, *sizes, back, *outbox),
    )


@Planned
def _message(
    states: torch.Tensor, decays: torch.Tensor, before: torch.Tensor | None, rows: int, keys: int, values: int, channels: int,
    back: bool,
) -> torch.Tensor:  # fmt: skip
    """Return the message of :func:`outgoing`, ``[1, elements]``."""
    message = states.new_empty((1, rows * (keys * values + channels)))
    state, cumulative_decays = message[0].split([rows * keys * values, rows * channels])
    *_, segments, padded_values, padded_keys = states.shape
    strides = (
        segments * padded_values * padded_keys,
        padded_values * padded_keys,
        1,
        padded_keys,
        segments * padded_keys,
        padded_keys,
    )
    _fold(
        states, decays, (*strides, 1), segments, state.view(rows, keys, values),
        initial=before, factors=cumulative_decays.view(rows, channels), group=_group(states, rows), back=back,
    )  # fmt: skip
    return message


@Planned
def _send_message(
    states: torch.Tensor, decays: torch.Tensor, before: torch.Tensor | None, rows: int, keys: int, values: int, channels: int,
    back: bool, memory: torch.Tensor, targets: tuple[int, ...], readers: int, rank: int, capacity: int, limit: int,
) -> None:  # fmt: skip
    """Launch ``fold_and_send_kernel``, which explains the arguments."""
    words, ranks = rows * (keys * values + channels), len(targets)
    message = states.new_empty((words,))
    *_, segments, padded_values, padded_keys = states.shape
    flags, epochs, _ = parts_of(memory, ranks)
    Launch(
        fold_and_send_kernel, (peer_stores.CTAS,),
        states, decays, before, message, flags, epochs, targets, rank, readers, words, capacity, limit,
        rows, segments, keys, values, segments * padded_values * padded_keys, padded_values * padded_keys, padded_keys,
        segments * padded_keys, padded_keys, channels,
        mma=Mma.NONE, GROUP=_group(states, rows), BACK=back, SLOTS=peer_stores.SLOTS, RANKS=ranks,
        BK=_sent_keys(rows, keys), BV=min(triton.next_power_of_2(values), _SENT_VALUES),
        TIMED=not knobs.runtime.interpret, num_warps=16,
    ).run()  # fmt: skip


def _group(states: torch.Tensor, rows: int) -> int:
    """Return how many heads of sums share a state, of which a message has ``rows``."""
    return states.shape[0] * states.shape[1] // rows


def _sent_keys(rows: int, keys: int) -> int:
    """Return the keys of a block of ``fold_and_send_kernel``: as few as give every CTA at most one block, from 16 to 64."""
    return next((each for each in (16, 32) if rows * cdiv(keys, each) <= peer_stores.CTAS), 64)


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

    def local_state(self, tensors: Tensors, start: int, before: torch.Tensor | None) -> tuple[Outgoing, Kept]:
        q, _, v, g, _ = tensors
        assert q is not None and v is not None and g is not None  # noqa: PT018, S101 - checked
        states, decays = _local_sums(*tensors[:4], start, self.scale)
        sent = outgoing(states, decays, MessageSizes.of(q, v, g), before, q, back=False)
        return sent, (states, decays) if start == 0 else ()

    def sums(self, tensors: Tensors, offsets: torch.Tensor | None) -> Kept:
        return () if offsets is not None else tuple(_ordinary_sums(*tensors[:4], self.scale))

    def forward(
        self, tensors: Tensors, initial: torch.Tensor | None, offsets: torch.Tensor | None, kept: Kept, *, want_final: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _forward(*tensors[:4], initial, offsets, *_shared(kept, offsets), want_final, self.scale)

    def initial_gradient(
        self, tensors: Tensors, dy: torch.Tensor, stop: int, behind: torch.Tensor | None
    ) -> tuple[Outgoing, Kept]:
        q, _, v, g, _ = tensors
        assert q is not None and v is not None and g is not None  # noqa: PT018, S101 - checked
        states, decays = _gradient_sums(*tensors[:4], dy, stop, self.scale)
        whole = stop == dy.shape[1] and dy.dtype is not torch.float16
        sent = outgoing(states, decays, MessageSizes.of(q, v, g), behind, q, back=True)
        return sent, (states, decays) if whole else ()

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
        *,
        want_initial: bool,
    ) -> tuple[Tensors, torch.Tensor | None]:
        both = (*states, None)[:2]
        *found, dinitial = _gradients(
            *tensors[:4], initial, offsets, dy, dfinal, *both, *_shared(kept, offsets), want_initial, self.scale
        )
        return (*found, *(None,) * (len(tensors) - 4)), None if initial is None or not want_initial else dinitial


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
def _local_sums(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, start: int, scale: float
) -> tuple[torch.Tensor, ...]:
    """Return the sums of all segments of the steps from ``start`` on."""
    call = Attention.of(q[:, start:], k[:, start:], v[:, start:], g[:, start:], None, None, scale)
    return tuple(_sums(call, PassOperands(call.q, call.k, call.v, reverse=False)))


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
def _gradient_sums(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, dy: torch.Tensor, stop: int, scale: float
) -> tuple[torch.Tensor, ...]:
    """Return the sums of all segments of the first ``stop`` steps, backwards in time."""
    call = Attention.of(q[:, :stop], k[:, :stop], v[:, :stop], g[:, :stop], None, None, scale)
    return tuple(_sums(call, PassOperands(call.k, call.q, inner_contiguous(dy[:, :stop]), reverse=True)))


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
    second: torch.Tensor | None, states: torch.Tensor | None, decays: torch.Tensor | None, want_initial: bool, scale: float,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k, v, g and the initial states.

    ``entering`` and ``second`` are the tensors of :func:`_states`; ``states`` and ``decays`` are sums of segments.
    """
    call = Attention.of(q, k, v, g, initial, offsets, scale)
    kept = [entering] if second is None else [entering, second]
    sums = _summed(states, decays)
    found = launch_hopper.backward(call, dy, states=kept, dfinal=dfinal, sums=sums, want_initial=want_initial)
    return found.q, found.k, found.v, found.g, found.initial
