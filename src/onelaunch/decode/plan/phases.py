"""Plan of one token as data: its phases, the work assignment of every CTA in each, and the synchronization between them.

A phase is one step of a layer (a matrix-vector product, attention, ...) that all CTAs of the persistent kernel take part in.
CTAs exchange vectors through buffers in global memory. For each CTA and phase, an :class:`Assignment` lists the units of work it
computes and the :class:`Slice` of buffers that it reads and writes; a phase's :data:`Edge` is the synchronization before
it.

:mod:`onelaunch.decode.plan.builder` builds plans, :mod:`onelaunch.decode.plan.check` proves them free of races and deadlocks, and
:mod:`onelaunch.decode.codegen.emit` generates the kernel. The packing of weights, the layout of memory and the decode runtime
read plans too; ``levels.py`` returns that of each optimization level. Tests also run plans in PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from onelaunch.decode.model.config import ModelConfig

Edge = Literal["none", "grid", "flags", "data"]
"""Kind of synchronization before a phase: none, a grid barrier, semaphores per key head, or flag-in-data words.

Flag-in-data words (as in NCCL's LL protocol) carry a tag in their low bits, and readers spin on the words themselves; see
``codegen/kernels/words.cuh``.
"""

Op = Literal[
    "norm", "qkv", "rope", "attention", "rope_attention", "o", "gate_up", "down", "lm_head", "tally", "draw", "next"
]  # fmt: skip
"""Operation of a phase.

``norm`` normalizes the residual stream in one CTA; ``rope`` normalizes and rotates heads. ``attention`` reads the results of
``rope``; ``rope_attention`` reads heads that the epilogue of ``qkv`` has rotated, and divides them by their RMS. ``qkv``, ``o``,
``gate_up``, ``down`` and ``lm_head`` are matrix-vector products. ``tally`` is a radix-select pass of the sampler, ``draw``
samples a candidate in each CTA, and ``next`` takes the best candidate as the next token.
"""

PRODUCTS: tuple[Op, ...] = ("qkv", "o", "gate_up", "down", "lm_head")
"""Phases that multiply by a weight matrix, in the order of the weight stream."""

WARPS = 8
"""Consumer warps of a CTA; one more warp is the producer."""

TILE = 8
"""Rows of a tile, the smallest unit of work of a CTA in a product."""

STEP = 256
"""Columns of a step: the eight warps of a CTA multiply 32 each."""

GRANULE = TILE * STEP * 2
"""Bytes of a granule, a tile's rows over the columns of a step in bfloat16: 4 KB."""

CHUNK = 4 * GRANULE
"""Bytes of one bulk copy (``cp.async.bulk``) into the ring in shared memory: 16 KB."""


class Slice(NamedTuple):
    """Slice of a buffer: words ``begin`` to ``end``."""

    buffer: str
    begin: int
    end: int


class Wait(NamedTuple):
    """Wait until ``counter`` has been incremented ``arrivals`` times since its previous use."""

    counter: int
    arrivals: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """Work assignment of one CTA in a phase: units, slices that it reads and writes, and its synchronization."""

    begin: int = 0
    end: int = 0
    """First unit and one past the last: tiles of a matrix, units of attention, or key heads.

    With :class:`Blocks`, a unit of the output projection is a block of tiles, numbered through all query splits.
    """
    reads: tuple[Slice, ...] = ()
    """Slices that the CTA reads; earlier phases wrote them."""
    writes: tuple[Slice, ...] = ()
    """Slices that the CTA writes; no other CTA writes the same words in this phase."""
    adds: tuple[Slice, ...] = ()
    """Slices of sums to which the CTA adds atomically, as others may in the same phase."""
    polls: tuple[Slice, ...] = ()
    """Slices of flag-in-data words that the CTA spins on, word by word."""
    awaits: tuple[Wait, ...] = ()
    """Semaphores that the CTA waits for before it reads."""
    arrives: tuple[int, ...] = ()
    """Semaphores that the CTA increments once it has written."""

    @property
    def units(self) -> int:
        """Number of units of work."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Phase:
    """Phase of a token, with the work assignment of every CTA."""

    name: str
    op: Op
    edge: Edge
    """Synchronization before the phase."""
    assignments: tuple[Assignment, ...]
    """Work assignment of each CTA."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Buffer in global memory through which CTAs exchange words."""

    name: str
    words: int
    tagged: bool = False
    """Flag of flag-in-data words: their two low bits are the number of the buffer's use modulo 4, and readers spin on them."""
    per_layer: bool = False
    """Flag of a buffer that exists once per layer, like the KV cache."""
    sums: bool = False
    """Flag of sums: CTAs add to the words atomically. They start as zero, and a write clears them."""
    counts: bool = False
    """Flag of sums that count their additions in the word, so that a reader can spin until all have been made."""
    copies: int = 1
    """Number of copies that tokens use in turn, so that one is written while the previous one may still be read."""


class Blocks(NamedTuple):
    """Layout of the output projection when it is split over units of attention (split-K).

    A CTA multiplies the attention outputs of its own query splits only. Their channels are fewer columns than a step has. Several
    tiles therefore lie side by side in the same columns of the stream, as a block.
    """

    channels: int
    """Channels of the queries of a query split (see :class:`Plan`)."""
    tile_columns: int
    """Columns of the weight stream that a tile takes: ``channels`` rounded up to a power of two, at least a warp's 32."""
    width: int
    """Columns of a block of tiles."""
    count: int
    """Number of blocks that cover all rows of the output projection, for each query split."""

    @property
    def rows(self) -> int:
        """Number of rows in a block."""
        return self.width // self.tile_columns * TILE


@dataclass(frozen=True)
class Plan:
    """Plan of a token: the phases of a layer, which are repeated, and the tail: LM head and next token.

    A key head has ``queries_per_key`` queries. A *unit* of attention is a part of these queries over a part of the positions;
    a CTA has one, or several if there are too few CTAs. ``query_splits`` is the split over queries, ``splits`` the split over
    positions (KV splits, as in flash-decoding).
    """

    config: ModelConfig
    level: str
    """Name of the optimization level."""
    ctas: int
    """Number of CTAs of the launch."""
    layer: tuple[Phase, ...]
    """Phases of a layer, in order."""
    closing: Phase
    """Phase that replaces ``layer[-1]`` in the last layer, since its result has other readers: all CTAs, at the LM head."""
    tail: tuple[Phase, ...]
    """Phases after the last layer, in order."""
    buffers: tuple[Buffer, ...]
    splits: int
    """Number of KV splits of a key head: units that share the positions of the same queries."""
    query_splits: int
    """Number of query splits of a key head: units with different queries and the same positions."""
    query_merge: int
    """Number of neighbouring query splits that take each other's queries in a long context, and split positions instead."""
    used: int
    """Number of KV splits that have positions at the current length.

    With ``blocks``, 1 means that each unit takes all positions, and more than ``splits`` that ``query_merge`` query splits take
    each other's queries.
    """
    positions: int
    """Positions per KV split; with ``blocks``, the number of positions up to which there is one split."""
    merge_from: int
    """Position from which on query splits take each other's queries."""
    streams: bool
    """Flag of a plan whose producer threads prefetch weights across phases, layers and tokens."""
    kv_through_ring: bool = False
    """Flag of a plan in which keys and values pass through the ring like weights, as soon as the previous token is complete."""
    separate: bool = False
    """Flag of a plan with one launch per phase, which needs no other synchronization."""
    blocks: Blocks | None = None
    """Layout of the output projection, if units multiply their own attention results and add to the residual stream."""

    @property
    def apart(self) -> bool:
        """Flag of units of attention that take all positions, so that no partial results are exchanged.

        The units of a query split then all compute its whole result, and divide its blocks of the output projection.
        """
        return self.blocks is not None and self.used == 1

    def unit(self, number: int) -> Unit:
        """Return the unit of attention with this number."""
        query_merge = self.query_merge if self.used > self.splits else 1
        return unit_of(number, self.query_splits, self.splits, query_merge, apart=self.apart)

    @property
    def adders(self) -> int:
        """Number of additions to a residual word per output projection, one by each query split; 0 if words do not count them."""
        return self.config.num_key_value_heads * self.query_splits if self.blocks else 0

    def additions(self, layer: int) -> int:
        """Return the additions to a residual word since the token began, up to a layer's attention; an MLP adds once."""
        return self.adders * (layer + 1) + layer

    def buffer(self, name: str) -> Buffer:
        """Return the buffer of this name."""
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def phases(self) -> tuple[Phase, ...]:
        """Return all phases, each once."""
        return (*self.layer, self.closing, *self.tail)

    def phase(self, op: Op) -> Phase:
        """Return the first phase with this operation."""
        return next(phase for phase in self.phases() if phase.op == op)

    def instances(self, layers: int | None = None) -> Iterator[tuple[int, Phase]]:
        """Yield every phase of a token in order with its layer, for ``layers`` layers or the model's; the tail is one more."""
        layers = layers or self.config.num_hidden_layers
        for layer in range(layers):
            yield from ((layer, phase) for phase in self.layer[:-1])
            yield layer, self.layer[-1] if layer + 1 < layers else self.closing
        yield from ((layers, phase) for phase in self.tail)

    def barriers(self) -> int:
        """Return the number of grid barriers of a token. Tests compare it with the kernel's counter and with studies."""
        return sum(phase.edge == "grid" for _, phase in self.instances())


def split(units: int, parts: int) -> list[tuple[int, int]]:
    """Divide units into ``parts`` ranges, as even as possible, and return begin and end of each."""
    return [(part * units // parts, (part + 1) * units // parts) for part in range(parts)]


class Unit(NamedTuple):
    """Unit of attention: some queries of a key head over one KV split."""

    head: int
    """Key head."""
    first: int
    last: int
    """First query split whose queries the unit takes, and one past the last."""
    part: int
    """Index of the KV split, the part of the positions."""
    stores_newest: bool
    """Flag of the unit that writes the newest key and value to the cache, if its KV split has their position."""


def unit_of(number: int, query_splits: int, splits: int, query_merge: int = 1, *, apart: bool = False) -> Unit:
    """Return a unit of attention by its number and a plan's splits; with ``apart``, each unit takes all positions."""
    rest, part = divmod(number, splits)
    head, query_split = divmod(rest, query_splits)
    if apart:
        return Unit(head, query_split, query_split + 1, 0, query_split == 0 and part == 0)
    first = query_split - query_split % query_merge
    return Unit(head, first, first + query_merge, query_split % query_merge * splits + part, first == 0)


ROUNDS = 9
"""Largest number of radix-select passes of a sampled token.

Top-k takes at most three, over the value of a key; top-p at most six, since it also orders tokens of equal logits.
"""


WARP_COLUMNS = 32
"""Columns of a step that one of the eight warps multiplies."""

DEPTH = 4
"""Largest number of granules of a tile that are contiguous in the stream: those of a chunk."""


def in_parts(config: ModelConfig) -> bool:
    """Return whether the stream is counted in the parts of single warps, because matrices end within a block of steps."""
    return any(columns % (2 * STEP) for columns in (config.hidden_size, config.query_size, config.intermediate_size))


def piece_columns(config: ModelConfig) -> int:
    """Return the columns of a piece, the unit in which the stream is counted: a granule, or the part of it that a warp has."""
    return WARP_COLUMNS if in_parts(config) else STEP


def depth(config: ModelConfig, columns: int) -> int:
    """Return how many granules of a tile are contiguous in the stream, in each block of a matrix with ``columns`` columns.

    If the columns of all matrices allow it, it is 4 for all of them, or else 2. With 4, a chunk is one tile's, and every phase
    ends at a chunk. Otherwise (:func:`in_parts`) the columns are divided into blocks as equal as possible, of at most 4 granules,
    and the last block ends with the columns. The kernel computes the same by ``depth_of``.
    """
    if in_parts(config):
        steps = -(-columns // STEP)
        return -(-steps // -(-steps // DEPTH))
    sizes = (config.hidden_size, config.query_size, config.intermediate_size)
    return DEPTH if not any(size % (DEPTH * STEP) for size in sizes) else DEPTH // 2


def padded(config: ModelConfig, columns: int) -> int:
    """Return ``columns`` rounded up to whole blocks of steps, as operands in shared memory have them, but not the stream."""
    block = depth(config, columns) * STEP
    return -(-columns // block) * block


SPLITS = 8
"""Largest number of KV splits of a key head; where query splits take each other's queries, there are more.

A CTA of the output projection reads the partial output of each split, so more splits cost more than they save.
"""


def blocks_of(config: ModelConfig, query_splits: int) -> Blocks:
    """Return the split-K layout of the output projection for ``query_splits`` query splits per key head.

    A block of tiles is as wide as the blocks of other matrices. In a stream that is counted in parts it may be narrower, so that
    blocks end with the rows of the matrix, and there is one for each of as many KV splits as possible.
    """
    channels = config.queries_per_key // query_splits * config.head_dim
    tile_columns = max(1 << (channels - 1).bit_length(), WARP_COLUMNS)
    if not in_parts(config):
        width = max(tile_columns, depth(config, config.hidden_size) * STEP)
    else:
        widths = [width for width in (4 * STEP, 2 * STEP, STEP) if width >= tile_columns] or [tile_columns]
        tiles = config.hidden_size // TILE
        whole = [width for width in widths if tiles % (width // tile_columns) == 0] or widths[-1:]
        width = next((width for width in whole if tiles // (width // tile_columns) >= SPLITS), whole[-1])
    return Blocks(channels, tile_columns, width, -(-config.hidden_size // (width // tile_columns * TILE)))


MAX_TILES = 6
"""Largest number of tiles whose sums a CTA keeps in registers at once."""


def groups(tiles: int) -> list[tuple[int, int]]:
    """Divide a CTA's tiles into groups that are multiplied together, and return begin and end of each."""
    return split(tiles, -(-tiles // MAX_TILES)) if tiles else []


def groups_of(plan: Plan, op: Op, cta: int) -> list[tuple[int, int]]:
    """Return the groups of tiles of a CTA in a phase.

    With split-K these are groups of blocks. Each stays within a query split, whose attention outputs are the operand of its
    blocks.
    """
    assignment = plan.phase(op).assignments[cta]
    if op != "o" or plan.blocks is None or not assignment.units:
        return groups(assignment.units)
    count = plan.blocks.count
    ends = [0, *range(count - assignment.begin % count, assignment.units, count), assignment.units]
    return [(first + begin, first + end) for first, last in itertools.pairwise(ends) for begin, end in groups(last - first)]
