"""Gated linear attention by chunks in plain PyTorch, stable for every decay down to -inf.

Time is split into chunks of C steps. Between chunks the state ``[K, V]`` is handed on, one step per chunk; within a chunk

    o = (scores * causal) v + (q * before) S,    scores[t, s] = sum over channels of q_t k_s exp(g_{s+1} + ... + g_t).

A chunk's scores come from halves of halves: between two neighbouring blocks of b steps the decay from s (left) to t (right) is
the product of all decays after s in the left block and all decays up to t in the right one, so these scores are one matrix
product of ``q * before`` and ``k * after``. Blocks grow from one step to the chunk, log2(C) products in all, and the factors of
each size are those of the size below times the whole of the neighbour. Every factor is a product of decays in [0, 1]: nothing
overflows, nothing is divided or subtracted, and a decay of 0 is as good as any other. It is the sub-chunks with an anchor each of
Yang et al. (2024), carried down to sub-chunks of one step.

Memory: what is kept for the backward pass are the inputs; both passes compute a few heads at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from onelaunch.operation.autocast import without_autocast
from onelaunch.tracing import is_traced, is_transformed

CHUNK = 64
"""Steps per chunk. 32 to 128 are within 20 % of each other on two x86 cores at T = 1024, K = V = 64."""

PART = {"cpu": 1 << 19}
"""Elements of q, or of states, that are worked on at a time: what a CPU's caches like."""
LARGEST_PART = 1 << 24
"""The same where memory is all that bounds it: a backward pass holds up to 47 float32 values for each, 3 GB."""

Optional = torch.Tensor | None
Results = tuple[torch.Tensor, torch.Tensor]


def gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    gv: Optional,
    initial: Optional,
    offsets: Optional,
    scale: float,
) -> Results:
    """``o [B, T, H, V]`` in the dtype of ``v``, and the final state ``[N, H, K, V]`` float32; at least one time step.

    Differentiable. For tracers and transforms the backward pass is made of PyTorch's own operations, else it is ours.
    """
    if is_traced(q) or is_transformed():
        return attend(q, k, v, g, gv, initial, offsets, scale)
    return _InParts.apply(scale, q, k, v, g, gv, initial, offsets)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    gv: Optional,
    initial: Optional,
    offsets: Optional,
    scale: float,
) -> Results:
    """The same in one piece, differentiable operation by operation."""
    layout = Unpacked.of(q, initial) if offsets is None else Packed.of(q, initial, offsets)
    queries, keys, values = layout.split(q) * scale, layout.split(k), layout.split(v)  # [B, H, chunks, C, K or V]
    key_decay = products(layout.split(g if g.dim() == 4 else g[..., None]).exp())
    value_decay = None if gv is None else products(layout.split(gv).exp())
    fading, whole = keys * key_decay.after, key_decay.whole.mT  # [..., K or 1, 1]
    taken, outputs = values, inside(queries, keys, values, key_decay, value_decay)
    if value_decay is not None:
        taken, whole = values * value_decay.after, whole * value_decay.whole
    entering, final = layout.states(fading.mT @ taken, whole)
    carried = (queries * key_decay.before) @ entering
    outputs = outputs + (carried if value_decay is None else carried * value_decay.before)
    return layout.join(outputs).to(v.dtype), final


# Within a chunk


class Products(NamedTuple):
    """Products of decays ``[..., C, X]`` within a chunk, and within its blocks of 1, 2, 4... steps."""

    levels: list[Results]
    """Per block size b, ``[..., C/2b, b, X]``: up to and with each step of the right blocks, after each step of the left ones."""
    before: torch.Tensor
    """``[..., C, X]``: from the start of the chunk up to and with each step."""
    after: torch.Tensor
    """``[..., C, X]``: after each step to the end."""
    whole: torch.Tensor
    """``[..., 1, X]``"""


def products(decay: torch.Tensor) -> Products:
    """All products that :func:`inside` needs, from decays ``[..., C, X]`` with C a power of 2."""
    before = whole = decay.unsqueeze(-2)  # [..., C/b, b, X], and [..., C/b, 1, X]
    after, levels = torch.ones_like(before), []
    while before.shape[-3] > 1:
        left, right = _halves(before)
        left_after, right_after = _halves(after)
        left_whole, right_whole = _halves(whole)
        levels.append((right, left_after))
        before = torch.cat([left, right * left_whole], dim=-2)
        after = torch.cat([left_after * right_whole, right_after], dim=-2)
        whole = left_whole * right_whole
    return Products(levels, before.squeeze(-3), after.squeeze(-3), whole.squeeze(-3))


def inside(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key_decay: Products, value_decay: Products | None
) -> torch.Tensor:
    """What a chunk's steps take from each other: ``[..., C, V]``."""
    if value_decay is not None:
        return _inside_by_blocks(queries, keys, values, key_decay, value_decay)
    if key_decay.whole.shape[-1] == 1:  # one decay for all channels: the decays are a matrix of their own
        one = queries.new_ones(*queries.shape[:-1], 1)
        return ((queries @ keys.mT) * scores(one, one, key_decay.levels)) @ values
    return scores(queries, keys, key_decay.levels) @ values


def scores(queries: torch.Tensor, keys: torch.Tensor, levels: list[Results]) -> torch.Tensor:
    """The lower triangle ``[..., C, C]`` of decayed products of queries and keys, zeros above."""
    found = (queries * keys).sum(-1)[..., None, None]  # blocks of one step: [..., C, 1, 1]
    for level in levels:
        crossing = _crossing(queries, keys, level)
        left, right = _halves(found)
        above = torch.cat([left, torch.zeros_like(crossing)], dim=-1)
        found = torch.cat([above, torch.cat([crossing, right], dim=-1)], dim=-2)
    return found.squeeze(-3)


def _inside_by_blocks(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key_decay: Products, value_decay: Products
) -> torch.Tensor:
    """Values that decay too have a matrix of scores each, so blocks are applied as they come."""
    outputs = (queries * keys).sum(-1, keepdim=True) * values
    for key_level, (through, after) in zip(key_decay.levels, value_decay.levels, strict=True):
        left, _ = _blocks(values, after.shape[-2])
        right = through * (_crossing(queries, keys, key_level) @ (left * after))
        outputs = outputs + torch.stack([torch.zeros_like(right), right], dim=-3).flatten(-4, -2)
    return outputs


def _crossing(queries: torch.Tensor, keys: torch.Tensor, level: Results) -> torch.Tensor:
    """Scores of the steps in right blocks with those in the left blocks beside them: ``[..., C/2b, b, b]``."""
    through, after = level
    _, right = _blocks(queries, through.shape[-2])
    left, _ = _blocks(keys, after.shape[-2])
    return (right * through) @ (left * after).mT


def _blocks(x: torch.Tensor, size: int) -> Results:
    """Left and right blocks of ``[..., C, X]``, each ``[..., C/2b, b, X]``."""
    left, right = x.unflatten(-2, (-1, 2, size)).unbind(-3)
    return left, right


def _halves(blocks: torch.Tensor) -> Results:
    """Every other block of ``[..., C/b, b, X]``, from the first and from the second."""
    left, right = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return left, right


# Between chunks


def _chunk(length: float) -> int:
    """The smallest power of 2 that holds a sequence, at most :data:`CHUNK`."""
    return next((size for size in (1, 2, 4, 8, 16, 32) if size >= min(length, CHUNK)), CHUNK)


@dataclass(frozen=True)
class Unpacked:
    """Every batch entry is one sequence; the last chunk is filled up with steps that change nothing."""

    length: int
    chunk: int
    initial: Optional

    @classmethod
    def of(cls, q: torch.Tensor, initial: Optional) -> Unpacked:
        return cls(q.shape[1], _chunk(q.shape[1]), initial)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, H, X]`` as ``[B, H, chunks, C, X]`` float32."""
        padded = F.pad(x.float(), (0, 0, 0, 0, 0, -self.length % self.chunk))
        return padded.unflatten(1, (-1, self.chunk)).permute(0, 3, 1, 2, 4).contiguous()

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, H, chunks, C, X]`` as ``[B, T, H, X]``."""
        return x.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, : self.length]

    def states(self, added: torch.Tensor, decay: torch.Tensor) -> Results:
        """The states that enter the chunks, and the final ones, from what each chunk adds ``[B, H, chunks, K, V]``."""
        state = torch.zeros_like(added[:, :, 0]) if self.initial is None else self.initial
        entering = []
        for index in range(added.shape[2]):
            entering.append(state)
            state = torch.addcmul(added[:, :, index], decay[:, :, index], state)
        return torch.stack(entering, dim=2), state


@dataclass(frozen=True)
class Packed:
    """Sequences of one batch entry, each split into chunks of its own: at most ``T // C + N`` whatever the offsets are."""

    token: torch.Tensor
    """``[chunks * C]``: which step of T lies there, T for none."""
    place: torch.Tensor
    """``[T]``: where each step lies."""
    starts: torch.Tensor
    """``[chunks]`` bool: whether a sequence starts with this chunk."""
    last: torch.Tensor
    """``[N]``: the last chunk of each sequence."""
    empty: torch.Tensor
    """``[N]`` bool."""
    chunk: int
    entering: torch.Tensor
    """``[chunks, H, K, V]`` or a zero: the initial state of the sequence that each chunk belongs to."""
    initial: torch.Tensor
    """``[N, H, K, V]``, or a zero."""

    @classmethod
    def of(cls, q: torch.Tensor, initial: Optional, offsets: torch.Tensor) -> Packed:
        """By arithmetic on the device of ``q``: nothing is read by the host."""
        length, sequences = q.shape[1], offsets.shape[0] - 1
        chunk = _chunk(length / sequences)
        chunks = length // chunk + sequences
        offsets = offsets.long().contiguous()
        counts = (offsets.diff() + chunk - 1) // chunk  # chunks of each sequence
        ends = counts.cumsum(0)
        steps = torch.arange(length, device=q.device)
        owner = torch.searchsorted(offsets, steps, right=True) - 1
        place = (ends - counts)[owner] * chunk + steps - offsets[owner]
        token = torch.full((chunks * chunk,), length, device=q.device).scatter(0, place, steps)
        index = torch.arange(chunks, device=q.device)
        sequence = torch.searchsorted(ends, index, right=True).clamp(max=sequences - 1)
        starts = (index == (ends - counts)[sequence]) & (counts[sequence] > 0)
        nothing = torch.zeros((), dtype=torch.float32, device=q.device)
        states = (nothing, nothing) if initial is None else (initial[sequence], initial)
        return cls(token, place, starts, (ends - 1).clamp(min=0), counts == 0, chunk, *states)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """``[1, T, H, X]`` as ``[1, H, chunks, C, X]`` float32."""
        padded = F.pad(x[0].float(), (0, 0, 0, 0, 0, 1))
        return padded[self.token].unflatten(0, (-1, self.chunk)).permute(2, 0, 1, 3).unsqueeze(0).contiguous()

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """``[1, H, chunks, C, X]`` as ``[1, T, H, X]``."""
        return x[0].permute(1, 2, 0, 3).flatten(0, 1)[self.place].unsqueeze(0)

    def states(self, added: torch.Tensor, decay: torch.Tensor) -> Results:
        """The states that enter the chunks, and the final ones, from what each chunk adds ``[1, H, chunks, K, V]``."""
        first = self.entering.expand(added.shape[2], *added.shape[1:2], *added.shape[3:])
        entering, leaving = [], []
        state = torch.zeros_like(added[0, :, 0])
        for index in range(added.shape[2]):
            entering.append(torch.where(self.starts[index], first[index], state))
            state = torch.addcmul(added[0, :, index], decay[0, :, index], entering[-1])
            leaving.append(state)
        final = torch.where(self.empty[:, None, None, None], self.initial, torch.stack(leaving)[self.last])
        return torch.stack(entering, dim=1).unsqueeze(0), final


# A few heads at a time


class _InParts(torch.autograd.Function):
    """:func:`attend` part by part; the backward pass takes each part's inputs through it again, with gradients."""

    @staticmethod
    def forward(ctx: Any, scale: float, *inputs: Any) -> Results:
        ctx.scale = scale
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        q, _, v, _, _, _, offsets = inputs
        sequences = q.shape[0] if offsets is None else offsets.shape[0] - 1
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        final = torch.empty((sequences, q.shape[2], q.shape[3], v.shape[3]), dtype=torch.float32, device=q.device)
        for part in _parts(q, v, offsets):
            part.of_steps(o)[...], part.of_states(final)[...] = attend(*part.of_inputs(inputs), scale=scale)
        return o, final

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Optional, ...]:  # pyrefly: ignore[bad-override]
        inputs, wanted = ctx.saved_tensors, ctx.needs_input_grad[1:]
        do, dfinal = grad_outputs
        with without_autocast(inputs[0].device):
            if torch.is_grad_enabled():  # these gradients will be differentiated themselves: in one piece, and kept
                aliases = [None if x is None else x.view_as(x) for x in inputs]  # one tensor may be given twice
                return None, *_gradients(aliases, wanted, do, dfinal, ctx.scale, create_graph=True)
            gradients = [torch.zeros_like(x) if needed else None for x, needed in zip(inputs, wanted, strict=True)]
            for part in _parts(inputs[0], inputs[2], inputs[6]):
                pieces = [
                    None if x is None else x.detach().requires_grad_(needed)
                    for x, needed in zip(part.of_inputs(inputs), wanted, strict=True)
                ]
                incoming = (None if do is None else part.of_steps(do), None if dfinal is None else part.of_states(dfinal))
                found = _gradients(pieces, wanted, *incoming, ctx.scale, create_graph=False)
                for place, gradient in zip(part.of_inputs(gradients), found, strict=True):
                    if place is not None and gradient is not None:
                        place.copy_(gradient)
        return None, *gradients


def _gradients(
    inputs: Sequence[Any],
    wanted: Sequence[bool],
    do: Optional,
    dfinal: Optional,
    scale: float,
    *,
    create_graph: bool,
) -> list[Optional]:
    """Of the inputs of :func:`attend`, by a forward pass through it that is kept for a moment."""
    with torch.enable_grad():
        o, final = attend(*inputs, scale=scale)
    reached = [(y, dy) for y, dy in ((o, do), (final, dfinal)) if dy is not None and y.requires_grad]
    if not reached:
        return [None] * len(inputs)
    leaves = [x for x, needed in zip(inputs, wanted, strict=True) if x is not None and needed]
    outputs, incoming = zip(*reached, strict=True)
    found = iter(torch.autograd.grad(outputs, leaves, incoming, allow_unused=True, create_graph=create_graph))
    return [next(found) if needed else None for needed in wanted]


@dataclass(frozen=True)
class _Part:
    """Some batch entries and some heads."""

    batch: slice
    heads: slice
    sequences: slice

    def of_steps(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, H, ...]``"""
        return x[self.batch, :, self.heads]

    def of_states(self, x: torch.Tensor) -> torch.Tensor:
        """``[N, H, K, V]``"""
        return x[self.sequences, self.heads]

    def of_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Of q, k, v, g, gv, the initial state, and the offsets as they are."""
        *steps, initial, offsets = inputs
        return [
            *(None if x is None else self.of_steps(x) for x in steps),
            None if initial is None else self.of_states(initial),
            offsets,
        ]


def _parts(q: torch.Tensor, v: torch.Tensor, offsets: Optional) -> Iterator[_Part]:
    """Parts of about as many elements as :data:`PART` says, steps or states: whole batch entries, or some heads of one."""
    batch, length, heads, keys = q.shape
    values, sequences = v.shape[3], 1 if offsets is None else offsets.shape[0] - 1
    wanted = PART.get(q.device.type, LARGEST_PART)
    of_head = max(length * max(keys, values), (length // CHUNK + sequences) * keys * values)
    entries = max(wanted // (of_head * max(heads, 1)), 1)
    some = heads if entries > 1 else min(max(wanted // of_head, 1), heads)
    for first in range(0, batch, entries):
        for head in range(0, heads, max(some, 1)):
            entry = slice(first, first + entries)
            yield _Part(entry, slice(head, head + some), entry if offsets is None else slice(None))
