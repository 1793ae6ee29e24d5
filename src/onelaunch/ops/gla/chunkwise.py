"""Gated linear attention by chunks in plain PyTorch, stable for every decay down to -inf.

Time is split into chunks of C steps. Between chunks the state ``[K, V]`` is updated serially; within a chunk

    o = (scores * causal) v + (q * before) S,    scores[t, s] = sum over channels of q_t k_s exp(g_{s+1} + ... + g_t).

A chunk's scores are computed by recursive halving: between two neighbouring blocks of b steps the decay from s (left) to t
(right) is the product of all decays after s in the left block and all decays up to t in the right one. So these scores are one
matrix product of ``q * before`` and ``k * after``. Blocks grow from one step to the chunk, log2(C) products in all. Where two
blocks become one, ``before`` of the right one is multiplied by all decays of the left one, and ``after`` of the left one by all
decays of the right one. Every factor is a product of decays in [0, 1]: nothing overflows, nothing is divided or subtracted, and
a decay of 0 needs no special case. It is the secondary chunking of Yang et al. (2024), carried down to sub-chunks of one step.

Memory of :func:`gla`, unless a tracer or a transform sees it: only the inputs are saved for the backward pass, and both passes
compute a few heads at a time. Two variants of ``gla`` (``variants/torch.py``) call this file: ``chunked`` calls :func:`gla`, and
``compiled`` compiles :func:`attend`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from onelaunch.kernels.scan.chunked import is_open, scan
from onelaunch.operation.autocast import without_autocast
from onelaunch.ops.gla.heads import Heads, expanded
from onelaunch.tracing import is_traced, is_transformed

CHUNK = 64
"""Steps per chunk. 32 to 128 are within 20 % of each other on two x86 cores at T = 1024, K = V = 64."""

PART = {"cpu": 1 << 19}
"""Elements of q, or of states, that are computed at a time, by device: few enough for a CPU's caches."""
_LARGEST_PART = 1 << 24
"""Elements of q, or of states, that are computed at a time where only memory bounds them.

A backward pass holds up to 47 float32 values for each, 3 GB.
"""

Optional = torch.Tensor | None
"""Tensor that may be absent."""
Results = tuple[torch.Tensor, torch.Tensor]
"""Output and final state, or another pair of tensors."""


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
    """Return ``o [B, T, H, V]`` in the dtype of ``v``, and the final state ``[N, H, K, V]`` float32; T is at least 1.

    Differentiable. Tracers and transforms get PyTorch's own operations; otherwise the backward pass is :class:`_InParts`.
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
    """Return the results of :func:`gla` computed for all heads at once, in row-major order, differentiable by operations.

    Shared heads, the states' too, are repeated for all heads of the output that share them.
    """
    heads = max(q.shape[2], k.shape[2], v.shape[2], g.shape[2])
    of_a_state = 1 if initial is None else heads // max(initial.shape[1], 1)
    q, k, v, g = expanded(q, heads), expanded(k, heads), expanded(v, heads), expanded(g, heads)
    gv = None if gv is None else expanded(gv, heads)
    initial = None if initial is None else expanded(initial, heads, dim=1)
    layout = Unpacked.of(q, initial) if offsets is None else Packed.of(q, initial, offsets)
    queries, keys, values = layout.split(q) * scale, layout.split(k), layout.split(v)  # [B, H, chunks, C, K or V]
    key_decay = _products(layout.split(g if g.dim() == 4 else g[..., None]).exp())
    value_decay = None if gv is None else _products(layout.split(gv).exp())
    # Keys decayed to the end of their chunk, and the decays of whole chunks [..., K or 1, 1].
    fading, whole = keys * key_decay.after, key_decay.whole.mT
    taken, outputs = values, _inside(queries, keys, values, key_decay, value_decay)
    if value_decay is not None:
        taken, whole = values * value_decay.after, whole * value_decay.whole
    entering, final = layout.states(fading.mT @ taken, whole)
    carried = (queries * key_decay.before) @ entering
    outputs = outputs + (carried if value_decay is None else carried * value_decay.before)
    # One chunk would otherwise leave the order of heads and steps as it is in ``outputs``.
    return layout.join(outputs).to(v.dtype).contiguous(), final[:, ::of_a_state].contiguous()


# Within a chunk


class Products(NamedTuple):
    """Products of decays ``[..., C, X]`` within a chunk, and within its blocks of 1, 2, 4... steps."""

    levels: list[Results]
    """Per block size b, two ``[..., C/2b, b, X]``: up to and with each step of right blocks, and after each of left ones."""
    before: torch.Tensor
    """Products from the start of the chunk up to and with each step, ``[..., C, X]``."""
    after: torch.Tensor
    """Products after each step to the end of the chunk, ``[..., C, X]``."""
    whole: torch.Tensor
    """Products of whole chunks, ``[..., 1, X]``."""


def _products(decay: torch.Tensor) -> Products:
    """Return all products that :func:`_inside` needs, from decays ``[..., C, X]`` with C a power of 2."""
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


def _inside(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key_decay: Products, value_decay: Products | None
) -> torch.Tensor:
    """Return the terms of a chunk's outputs that come from steps of the same chunk, ``[..., C, V]``."""
    if value_decay is not None:
        return _inside_by_blocks(queries, keys, values, key_decay, value_decay)
    if key_decay.whole.shape[-1] == 1:  # one decay per head: the decays between steps are a matrix
        one = queries.new_ones(*queries.shape[:-1], 1)
        return ((queries @ keys.mT) * _scores(one, one, key_decay.levels)) @ values
    return _scores(queries, keys, key_decay.levels) @ values


def _scores(queries: torch.Tensor, keys: torch.Tensor, levels: list[Results]) -> torch.Tensor:
    """Return the lower triangle ``[..., C, C]`` of decayed products of queries and keys, zeros above."""
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
    """Return the outputs within chunks where values decay too.

    Each value channel then has its own matrix of scores, so blocks are applied as they are made.
    """
    outputs = (queries * keys).sum(-1, keepdim=True) * values
    for key_level, (through, after) in zip(key_decay.levels, value_decay.levels, strict=True):
        left, _ = _blocks(values, after.shape[-2])
        right = through * (_crossing(queries, keys, key_level) @ (left * after))
        outputs = outputs + torch.stack([torch.zeros_like(right), right], dim=-3).flatten(-4, -2)
    return outputs


def _crossing(queries: torch.Tensor, keys: torch.Tensor, level: Results) -> torch.Tensor:
    """Return the scores of the steps of right blocks with those of the left blocks next to them, ``[..., C/2b, b, b]``."""
    through, after = level
    _, right = _blocks(queries, through.shape[-2])
    left, _ = _blocks(keys, after.shape[-2])
    return (right * through) @ (left * after).mT


def _blocks(x: torch.Tensor, size: int) -> Results:
    """Return the left and the right blocks of ``[..., C, X]``, each ``[..., C/2b, b, X]``."""
    left, right = x.unflatten(-2, (x.shape[-2] // (2 * size), 2, size)).unbind(-3)  # -1 is slow to infer from symbolic sizes
    return left, right


def _halves(blocks: torch.Tensor) -> Results:
    """Return every other block of ``[..., C/b, b, X]``, from the first and from the second."""
    left, right = blocks.unflatten(-3, (blocks.shape[-3] // 2, 2)).unbind(-3)
    return left, right


# Between chunks


def _chunk(length: float) -> int:
    """Return the smallest power of 2 that holds a sequence, at most :data:`CHUNK`; the latter for a symbolic length."""
    if is_open(length):
        return CHUNK
    return next((size for size in (1, 2, 4, 8, 16, 32) if size >= min(length, CHUNK)), CHUNK)


def _scan_chunks(added: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Return the states that leave the chunks ``[B, H, chunks, K, V]``, from zero, for any number of chunks."""
    leaving = scan(decay.expand_as(added).flatten(-2), added.flatten(-2))
    return leaving.unflatten(-1, added.shape[-2:])


@dataclass(frozen=True)
class Unpacked:
    """Layout in which every batch entry is one sequence; the last chunk is padded with steps that change nothing."""

    length: int
    chunk: int
    initial: Optional

    @classmethod
    def of(cls, q: torch.Tensor, initial: Optional) -> Unpacked:
        """Make the layout for the shape of q."""
        return cls(q.shape[1], _chunk(q.shape[1]), initial)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[B, T, H, X]`` as ``[B, H, chunks, C, X]`` float32."""
        chunks = -(-self.length // self.chunk)
        padded = F.pad(x.float(), (0, 0, 0, 0, 0, chunks * self.chunk - self.length))
        return padded.unflatten(1, (chunks, self.chunk)).permute(0, 3, 1, 2, 4).contiguous()

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[B, H, chunks, C, X]`` as ``[B, T, H, X]``."""
        return x.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, : self.length]

    def states(self, added: torch.Tensor, decay: torch.Tensor) -> Results:
        """Return the states that enter the chunks, and the final ones, from what each chunk adds ``[B, H, chunks, K, V]``."""
        state = torch.zeros_like(added[:, :, 0]) if self.initial is None else self.initial
        if is_open(added.shape[2]):
            first = torch.addcmul(added[:, :, :1], decay[:, :, :1], state.unsqueeze(2))
            leaving = _scan_chunks(torch.cat([first, added[:, :, 1:]], dim=2), decay)
            return torch.cat([state.unsqueeze(2), leaving[:, :, :-1]], dim=2), leaving[:, :, -1]
        entering = []
        for index in range(added.shape[2]):
            entering.append(state)
            state = torch.addcmul(added[:, :, index], decay[:, :, index], state)
        return torch.stack(entering, dim=2), state


@dataclass(frozen=True)
class Packed:
    """Layout in which packed sequences have chunks of their own: at most ``T // C + N``, whatever the offsets are."""

    token: torch.Tensor
    """Step of T at each position, T for padding, ``[chunks * C]``."""
    place: torch.Tensor
    """Position of each step, ``[T]``."""
    starts: torch.Tensor
    """Flags of the chunks that start a sequence, ``[chunks]`` bool."""
    last: torch.Tensor
    """Last chunk of each sequence, ``[N]``."""
    empty: torch.Tensor
    """Flags of the sequences without steps, ``[N]`` bool."""
    chunk: int
    entering: torch.Tensor
    """Initial state of the sequence that each chunk belongs to, ``[chunks, H, K, V]``, or a zero."""
    initial: torch.Tensor
    """Initial states, ``[N, H, K, V]``, or a zero."""

    @classmethod
    def of(cls, q: torch.Tensor, initial: Optional, offsets: torch.Tensor) -> Packed:
        """Make the layout by arithmetic on the device of ``q``: the host reads nothing."""
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
        """Return ``[1, T, H, X]`` as ``[1, H, chunks, C, X]`` float32."""
        padded = F.pad(x[0].float(), (0, 0, 0, 0, 0, 1))
        chunks = self.starts.shape[0]
        return padded[self.token].unflatten(0, (chunks, self.chunk)).permute(2, 0, 1, 3).unsqueeze(0).contiguous()

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[1, H, chunks, C, X]`` as ``[1, T, H, X]``."""
        return x[0].permute(1, 2, 0, 3).flatten(0, 1)[self.place].unsqueeze(0)

    def states(self, added: torch.Tensor, decay: torch.Tensor) -> Results:
        """Return the states that enter the chunks, and the final ones, from what each chunk adds ``[1, H, chunks, K, V]``."""
        first = self.entering.expand(added.shape[2], *added.shape[1:2], *added.shape[3:])
        if is_open(added.shape[2]):
            starts, first = self.starts[:, None, None], first.transpose(0, 1).unsqueeze(0)
            folded = added + torch.where(starts, decay * first, 0.0)
            leaving = _scan_chunks(folded, torch.where(starts, 0.0, decay))
            before = F.pad(leaving, (0, 0, 0, 0, 1, 0))[:, :, :-1]
            final = torch.where(self.empty[:, None, None, None], self.initial, leaving[0].transpose(0, 1)[self.last])
            return torch.where(starts, first, before), final
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
    """Form of :func:`attend` that computes a few heads at a time.

    The backward pass runs the forward pass of each part again, with gradients.
    """

    @staticmethod
    def forward(ctx: Any, scale: float, *inputs: Any) -> Results:
        """Compute each part of the results, and save the inputs."""
        ctx.scale = scale
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        q, _, v, _, _, _, offsets = inputs
        heads = _heads(inputs)
        sequences = q.shape[0] if offsets is None else offsets.shape[0] - 1
        o = v.new_empty((*q.shape[:2], heads.output, v.shape[3]))
        final = torch.empty((sequences, heads.state, q.shape[3], v.shape[3]), dtype=torch.float32, device=q.device)
        for part in _parts(q, v, heads, offsets):
            part.of_steps(o)[...], part.of_states(final)[...] = attend(*part.of_inputs(inputs), scale=scale)
        return o, final

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Optional, ...]:  # pyrefly: ignore[bad-override]
        """Compute the gradients part by part, or at once where they will be differentiated themselves."""
        inputs, wanted = ctx.saved_tensors, ctx.needs_input_grad[1:]
        do, dfinal = grad_outputs
        with without_autocast(inputs[0].device):
            if torch.is_grad_enabled():  # double backward: in one piece, and the graph is kept
                aliases = [None if x is None else x.view_as(x) for x in inputs]  # the same tensor may be passed as two inputs
                return None, *_gradients(aliases, wanted, do, dfinal, ctx.scale, create_graph=True)
            gradients = [torch.zeros_like(x) if needed else None for x, needed in zip(inputs, wanted, strict=True)]
            for part in _parts(inputs[0], inputs[2], _heads(inputs), inputs[6]):
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
    """Return the gradients of the inputs of :func:`attend`, by a forward pass whose graph is dropped after use."""
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
    """Some batch entries and some heads; of tensors that share heads, the same heads of the output."""

    batch: slice
    groups: slice
    """Heads of the tensor with the fewest; of other tensors all heads that share these."""
    fewest: int
    """Number of heads of that tensor, at least 1."""
    sequences: slice

    def _heads(self, count: int) -> slice:
        """Return the heads of the part, of a tensor with ``count`` heads."""
        each = count // self.fewest
        return slice(self.groups.start * each, self.groups.stop * each)

    def of_steps(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor ``[B, T, H, ...]``."""
        return x[self.batch, :, self._heads(x.shape[2])]

    def of_states(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor ``[N, H, K, V]``."""
        return x[self.sequences, self._heads(x.shape[1])]

    def of_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the parts of q, k, v, g, gv and the initial state, and the offsets as they are."""
        *steps, initial, offsets = inputs
        return [
            *(None if x is None else self.of_steps(x) for x in steps),
            None if initial is None else self.of_states(initial),
            offsets,
        ]


def _heads(inputs: Sequence[Any]) -> Heads:
    """Return the numbers of heads of q, k, v, g and the states."""
    q, k, v, g, _, initial, _ = inputs
    heads = Heads(q.shape[2], k.shape[2], v.shape[2], g.shape[2], 0)
    return heads._replace(state=heads.output if initial is None else initial.shape[1])


def _parts(q: torch.Tensor, v: torch.Tensor, heads: Heads, offsets: Optional) -> Iterator[_Part]:
    """Yield parts of about :data:`PART` elements, of steps or of states: whole batch entries, or some heads of one.

    Heads of the output that share a head of any tensor stay together.
    """
    batch, length, _, keys = q.shape
    values, sequences, fewest = v.shape[3], 1 if offsets is None else offsets.shape[0] - 1, min(heads)
    wanted = PART.get(q.device.type, _LARGEST_PART)
    of_head = max(length * max(keys, values), (length // CHUNK + sequences) * keys * values)
    of_group = of_head * (heads.output // max(fewest, 1))
    entries = max(wanted // (of_head * max(heads.output, 1)), 1)
    some = fewest if entries > 1 else min(max(wanted // max(of_group, 1), 1), fewest)
    for first in range(0, batch, entries):
        for head in range(0, fewest, max(some, 1)):
            entry = slice(first, first + entries)
            groups = slice(head, min(head + some, fewest))
            yield _Part(entry, groups, max(fewest, 1), entry if offsets is None else slice(None))
