"""Plan of one token as data: its phases, the work of every CTA in each, and the synchronization between them.

:mod:`onelaunch.decode.plan.rungs` has the plans, :mod:`onelaunch.decode.plan.check` proves that they are ordered, and
:mod:`onelaunch.decode.codegen.emit` generates the kernel. Tests run plans in PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from onelaunch.decode.model.config import ModelConfig

Edge = Literal["none", "grid", "flags", "data"]
"""Synchronization before a phase: none, a grid barrier, semaphores that some CTAs increment, or flag-in-data words."""

Op = Literal[
    "norm", "qkv", "rope", "attention", "rope_attention", "o", "gate_up", "down", "lm_head", "tally", "draw", "next"
]  # fmt: skip

PRODUCTS: tuple[Op, ...] = ("qkv", "o", "gate_up", "down", "lm_head")
"""Phases that multiply by weights, in the order of the weight stream."""

WARPS = 8
"""Warps of a CTA that multiply."""

TILE = 8
"""Rows of a matrix that are multiplied together, the smallest unit of work of a CTA."""

STEP = 256
"""Columns that the eight warps of a CTA multiply at once, 32 each."""

GRANULE = TILE * STEP * 2
"""Bytes of a tile's rows over the columns of a step: 4 KB."""

CHUNK = 4 * GRANULE
"""Bytes of one TMA copy."""


class Piece(NamedTuple):
    """Range of words of a buffer."""

    buffer: str
    begin: int
    end: int


class Wait(NamedTuple):
    """Wait until ``counter`` has been incremented ``arrivals`` times since its previous use."""

    counter: int
    arrivals: int


@dataclass(frozen=True, slots=True)
class Share:
    """Work assignment of one CTA in a phase."""

    begin: int = 0
    end: int = 0
    """First unit and one past the last: tiles of a matrix, or heads."""
    reads: tuple[Piece, ...] = ()
    """Words that the CTA reads; earlier phases wrote them."""
    writes: tuple[Piece, ...] = ()
    adds: tuple[Piece, ...] = ()
    """Words of sums to which the CTA adds, as others do in the same phase."""
    polls: tuple[Piece, ...] = ()
    """Flag-in-data words that the CTA spins on, one by one."""
    awaits: tuple[Wait, ...] = ()
    arrives: tuple[int, ...] = ()
    """Counters that the CTA increments once it has written."""

    @property
    def units(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Phase:
    """Step of a token, over all CTAs."""

    name: str
    op: Op
    edge: Edge
    """Synchronization before the phase."""
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory through which CTAs exchange float32 words."""

    name: str
    words: int
    tagged: bool = False
    """Flag of flag-in-data words: their low bits say which use they were written for, so that a reader can spin on them."""
    per_layer: bool = False
    """Flag of a buffer that each layer has one of, as the cache."""
    sums: bool = False
    """Flag of sums: CTAs add to the words, which start as zero and are cleared by writing them."""
    counts: bool = False
    """Flag of sums that count their additions, so that a reader can wait for a number of them."""
    copies: int = 1
    """Copies that tokens use in turn, so that one is written while the previous one may still be read."""


class Blocks(NamedTuple):
    """Cut of the output projection by heads: a unit's channels, and rows in blocks of tiles that lie side by side."""

    channels: int
    """Channels of the queries of a unit of attention."""
    tile_columns: int
    """Columns that a tile of these channels takes in the weight stream: a power of two, at least a warp's 32."""
    width: int
    """Columns of a block."""
    count: int
    """Blocks of all rows."""

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.width // self.tile_columns * TILE


@dataclass(frozen=True)
class Plan:
    """Plan of a token: the phases of a layer, which are repeated, and the epilogue after the last layer."""

    config: ModelConfig
    rung: str
    ctas: int
    layer: tuple[Phase, ...]
    closing: Phase
    """Phase that replaces a layer's last one in the last layer, since its result has other readers."""
    tail: tuple[Phase, ...]
    buffers: tuple[Buffer, ...]
    splits: int
    """Most KV splits of a key head: CTAs that share its positions."""
    sharers: int
    """CTAs that share the queries of a key head, each for the same positions."""
    joined: int
    """Number of these CTAs that, for long contexts, split the positions instead of the queries (flash-decoding)."""
    used: int
    """KV splits that have positions at the current length.

    With ``blocks``, 1 means that each unit takes all positions, and more than ``splits`` that CTAs split positions instead of
    queries.
    """
    positions: int
    """Positions per KV split; with ``blocks``, the position from which on there are several splits."""
    joined_from: int
    """Positions from which on a context is long."""
    streams: bool
    """Flag of weights that are prefetched across synchronization."""
    keys_stream: bool = False
    """Flag of keys and values that are prefetched like weights, as soon as the previous token is done."""
    separate: bool = False
    """Flag of a plan with a launch per phase, which needs no other synchronization."""
    blocks: Blocks | None = None
    """Cut of the output projection, if CTAs multiply their own heads' results and add to the residual stream."""

    @property
    def apart(self) -> bool:
        """Flag of units of attention that take all positions, and nothing from others."""
        return self.blocks is not None and self.used == 1

    def unit(self, number: int) -> Unit:
        """Return a unit of attention by its number."""
        joined = self.joined if self.used > self.splits else 1
        return unit_of(number, self.sharers, self.splits, joined, apart=self.apart)

    @property
    def parts(self) -> int:
        """Most KV splits of the same queries."""
        return self.splits * self.joined

    @property
    def adders(self) -> int:
        """Additions to a word of the residual stream per output projection, where words count them."""
        return self.config.num_key_value_heads * self.sharers if self.blocks else 0

    def additions(self, layer: int) -> int:
        """Return the additions to a residual word since the token began, once a layer's attention is added; an MLP adds once."""
        return self.adders * (layer + 1) + layer

    def buffer(self, name: str) -> Buffer:
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def phases(self) -> tuple[Phase, ...]:
        return (*self.layer, self.closing, *self.tail)

    def phase(self, op: Op) -> Phase:
        return next(phase for phase in self.phases() if phase.op == op)

    def instances(self, layers: int | None = None) -> Iterator[tuple[int, Phase]]:
        """Yield every phase of a token in order with its layer, for ``layers`` layers or the model's; the tail is one more."""
        layers = layers or self.config.num_hidden_layers
        for layer in range(layers):
            yield from ((layer, phase) for phase in self.layer[:-1])
            yield layer, self.layer[-1] if layer + 1 < layers else self.closing
        yield from ((layers, phase) for phase in self.tail)

    def barriers(self) -> int:
        """Return the number of grid barriers of a token."""
        return sum(phase.edge == "grid" for _, phase in self.instances())


def split(units: int, parts: int) -> list[tuple[int, int]]:
    """Return begin and end of each of ``parts`` parts of the units, as even as possible."""
    return [(part * units // parts, (part + 1) * units // parts) for part in range(parts)]


class Unit(NamedTuple):
    """Unit of attention: the work that a CTA does at once."""

    head: int
    """Key head."""
    first: int
    last: int
    """First sharer whose queries the unit takes, and one past the last."""
    part: int
    """KV split: part of the positions."""
    keeps: bool
    """Flag of the unit that stores the newest key and value, if it has their position."""


def unit_of(number: int, sharers: int, splits: int, joined: int = 1, *, apart: bool = False) -> Unit:
    """Return a unit of attention from a plan's numbers; with ``apart``, each takes all positions."""
    rest, part = divmod(number, splits)
    head, sharer = divmod(rest, sharers)
    if apart:
        return Unit(head, sharer, sharer + 1, 0, sharer == 0 and part == 0)
    first = sharer - sharer % joined
    return Unit(head, first, first + joined, sharer % joined * splits + part, first == 0)


def padded(columns: int) -> int:
    """Return the number of columns that the weight stream holds for ``columns``."""
    return -(-columns // STEP) * STEP


ROUNDS = 9
"""Most radix-select passes of a sampled token: three over a key's value for top-k, six for top-p, which orders equals too."""


def depth(config: ModelConfig) -> int:
    """Return how many granules of a tile follow each other in the stream: four where all matrices' columns allow it."""
    steps = [padded(columns) // STEP for columns in (config.hidden_size, config.query_size, config.intermediate_size)]
    return next(each for each in (4, 2, 1) if not any(step % each for step in steps))


WARP_COLUMNS = 32
"""Columns of a step that each of the eight warps multiplies."""


def blocks_of(config: ModelConfig, sharers: int) -> Blocks:
    """Return the cut of the output projection for ``sharers`` units of attention per key head."""
    channels = config.queries_per_key // sharers * config.head_dim
    tile_columns = max(1 << (channels - 1).bit_length(), WARP_COLUMNS)
    width = max(tile_columns, depth(config) * STEP)
    return Blocks(channels, tile_columns, width, -(-config.hidden_size // (width // tile_columns * TILE)))


MAX_TILES = 6
"""Most tiles whose sums a CTA keeps in registers."""


def groups(tiles: int) -> list[tuple[int, int]]:
    """Return begin and end of the groups of a CTA's tiles that are multiplied together."""
    return split(tiles, -(-tiles // MAX_TILES)) if tiles else []


def groups_of(plan: Plan, op: Op, cta: int) -> list[tuple[int, int]]:
    """Return the groups of tiles of a CTA in a phase; unit by unit where each unit of attention has its own vector."""
    share = plan.phase(op).shares[cta]
    if op != "o" or plan.blocks is None or not share.units:
        return groups(share.units)
    count = plan.blocks.count
    ends = [0, *range(count - share.begin % count, share.units, count), share.units]
    return [(first + begin, first + end) for first, last in itertools.pairwise(ends) for begin, end in groups(last - first)]
