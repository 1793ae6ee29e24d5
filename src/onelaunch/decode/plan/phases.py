"""One token as data: phases, what every CTA does in each, and the edges that order them.

A plan is what everything else is made of: :mod:`onelaunch.decode.plan.check` proves that it is ordered,
:mod:`tests.decode.interpret` runs it in PyTorch, :mod:`onelaunch.decode.codegen.emit` writes the kernel. Plans of the ladder:
:mod:`onelaunch.decode.plan.rungs`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from onelaunch.decode.model.config import ModelConfig

Edge = Literal["none", "grid", "flags", "data"]
"""What a phase waits for: nothing, a barrier over the grid, counters that some CTAs bump, or the very words that it reads."""

Op = Literal[
    "norm", "qkv", "rope", "attention", "rope_attention", "o", "gate_up", "down", "lm_head", "tally", "draw", "next"
]  # fmt: skip

PRODUCTS: tuple[Op, ...] = ("qkv", "o", "gate_up", "down", "lm_head")
"""Phases that multiply by weights, in the order of the weight stream."""

WARPS = 8
"""Warps of a CTA that multiply."""

TILE = 8
"""Rows of a matrix that are multiplied together: the least that a CTA takes."""

STEP = 256
"""Columns that the eight warps of a CTA multiply at once, 32 each."""

GRANULE = TILE * STEP * 2
"""Bytes of both: 4 KB."""

CHUNK = 4 * GRANULE
"""Bytes that the copy engine brings at once."""


class Piece(NamedTuple):
    """Words of a buffer."""

    buffer: str
    begin: int
    end: int


class Wait(NamedTuple):
    """Until a counter was bumped so often since the last time."""

    counter: int
    arrivals: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one CTA does in a phase."""

    begin: int = 0
    end: int = 0
    """Its units: tiles of a matrix, or heads."""
    reads: tuple[Piece, ...] = ()
    """Words of buffers; they were written by earlier phases."""
    writes: tuple[Piece, ...] = ()
    adds: tuple[Piece, ...] = ()
    """Words of sums, to which others add in the same phase."""
    polls: tuple[Piece, ...] = ()
    """Words of tagged buffers that it waits for one by one."""
    awaits: tuple[Wait, ...] = ()
    arrives: tuple[int, ...] = ()
    """Counters that it bumps once it has written."""

    @property
    def units(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Phase:
    """A step of a token, over all CTAs."""

    name: str
    op: Op
    edge: Edge
    """What it waits for."""
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory through which CTAs talk to each other: float32 words."""

    name: str
    words: int
    tagged: bool = False
    """Whether the low bits of each word say which use it was written for, so that a reader can wait for the word itself."""
    per_layer: bool = False
    """Whether each layer has its own, as the cache."""
    sums: bool = False
    """Whether CTAs add to its words, which are zero before: at first, and once somebody has written them."""
    counts: bool = False
    """Whether each of these sums counts what was added to it, so that a reader can wait for so many additions."""
    copies: int = 1
    """That tokens take in turn, so that one is written while the one before may still be read."""


class Blocks(NamedTuple):
    """The output projection cut by heads: a unit's channels, and of the rows blocks of some tiles that lie side by side."""

    channels: int
    """Of the queries of a unit of attention."""
    room: int
    """Columns that a tile of them takes in the stream: a power of two, at least a warp's 32."""
    width: int
    """Columns of a block."""
    count: int
    """Blocks of all rows."""

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.width // self.room * TILE


@dataclass(frozen=True)
class Plan:
    """The phases of a layer, which are repeated, and those after the last one."""

    config: ModelConfig
    rung: str
    ctas: int
    layer: tuple[Phase, ...]
    closing: Phase
    """What takes the place of a layer's last phase in the last layer: its result has other readers."""
    tail: tuple[Phase, ...]
    buffers: tuple[Buffer, ...]
    splits: int
    """CTAs that may share the positions of a key head."""
    sharers: int
    """CTAs that share the queries of a key head, each for the same positions."""
    joined: int
    """Of these, those that take each other's queries too in a long text, each for a part of the positions."""
    used: int
    """CTAs that have positions at the length at hand, for the same queries. With ``blocks``, 1 says that each has all, and
    more than ``splits`` that some are joined.
    """
    positions: int
    """From which on there is one more of these; with ``blocks``, from which on they share them at all."""
    joined_from: int
    """Positions from which on a text is long."""
    streams: bool
    """Whether weights are fetched ahead of the edges."""
    keys_stream: bool = False
    """Whether keys and values of earlier positions are fetched ahead like weights: as soon as the token before is done."""
    separate: bool = False
    """Whether each phase is a launch: all edges are then the launches' own."""
    blocks: Blocks | None = None
    """How the output projection is cut where CTAs multiply what their own heads found, and add to the residual stream."""

    @property
    def apart(self) -> bool:
        """Whether each unit of attention takes all positions, and nothing from others."""
        return self.blocks is not None and self.used == 1

    def unit(self, number: int) -> Unit:
        """Of attention."""
        joined = self.joined if self.used > self.splits else 1
        return unit_of(number, self.sharers, self.splits, joined, apart=self.apart)

    @property
    def parts(self) -> int:
        """CTAs that may share the positions of the same queries."""
        return self.splits * self.joined

    @property
    def adders(self) -> int:
        """Additions to a word of the residual stream for each output projection, of those that count them."""
        return self.config.num_key_value_heads * self.sharers if self.blocks else 0

    def additions(self, layer: int) -> int:
        """To a word of the residual stream since the token began, once a layer's attention is added; each MLP adds once."""
        return self.adders * (layer + 1) + layer

    def buffer(self, name: str) -> Buffer:
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def phases(self) -> tuple[Phase, ...]:
        return (*self.layer, self.closing, *self.tail)

    def phase(self, op: Op) -> Phase:
        return next(phase for phase in self.phases() if phase.op == op)

    def instances(self, layers: int | None = None) -> Iterator[tuple[int, Phase]]:
        """Every phase of a token in order, with its layer, of so many or the model's; the tail counts as another layer."""
        layers = layers or self.config.num_hidden_layers
        for layer in range(layers):
            yield from ((layer, phase) for phase in self.layer[:-1])
            yield layer, self.layer[-1] if layer + 1 < layers else self.closing
        yield from ((layers, phase) for phase in self.tail)

    def barriers(self) -> int:
        """Over the grid, for a token."""
        return sum(phase.edge == "grid" for _, phase in self.instances())


def split(units: int, parts: int) -> list[tuple[int, int]]:
    """Units in order over so many parts, as evenly as possible."""
    return [(part * units // parts, (part + 1) * units // parts) for part in range(parts)]


class Unit(NamedTuple):
    """What attention does at once."""

    head: int
    """Of keys."""
    first: int
    last: int
    """Sharers whose queries it takes."""
    part: int
    """Of the positions."""
    keeps: bool
    """Whether it keeps the newest key and value, if it has their position."""


def unit_of(number: int, sharers: int, splits: int, joined: int = 1, *, apart: bool = False) -> Unit:
    """A unit of attention, by what a plan says of them; ``apart``: each takes all positions."""
    rest, part = divmod(number, splits)
    head, sharer = divmod(rest, sharers)
    if apart:
        return Unit(head, sharer, sharer + 1, 0, sharer == 0 and part == 0)
    first = sharer - sharer % joined
    return Unit(head, first, first + joined, sharer % joined * splits + part, first == 0)


def padded(columns: int) -> int:
    """Columns as the stream of weights holds them."""
    return -(-columns // STEP) * STEP


ROUNDS = 9
"""In which a drawn token's limits are found, at most: top-k looks at a key's value in three, top-p at equals too, in six."""


def depth(config: ModelConfig) -> int:
    """Granules of a tile that follow each other in the stream: four where all matrices' columns allow it."""
    steps = [padded(columns) // STEP for columns in (config.hidden_size, config.query_size, config.intermediate_size)]
    return next(each for each in (4, 2, 1) if not any(step % each for step in steps))


WARP_COLUMNS = 32
"""Of a step: what each of eight warps multiplies."""


def blocks_of(config: ModelConfig, sharers: int) -> Blocks:
    """The output projection for units of attention with so many of them for a key head."""
    channels = config.queries_per_key // sharers * config.head_dim
    room = max(1 << (channels - 1).bit_length(), WARP_COLUMNS)
    width = max(room, depth(config) * STEP)
    return Blocks(channels, room, width, -(-config.hidden_size // (width // room * TILE)))


MOST_TILES = 6
"""Tiles whose sums a CTA keeps in registers."""


def passes(tiles: int) -> list[tuple[int, int]]:
    """Tiles of a CTA in groups that are multiplied together."""
    return split(tiles, -(-tiles // MOST_TILES)) if tiles else []


def passes_of(plan: Plan, op: Op, cta: int) -> list[tuple[int, int]]:
    """Of a phase's share: where each unit of attention has a vector of its own, unit by unit."""
    share = plan.phase(op).shares[cta]
    if op != "o" or plan.blocks is None or not share.units:
        return passes(share.units)
    count = plan.blocks.count
    ends = [0, *range(count - share.begin % count, share.units, count), share.units]
    return [(first + begin, first + end) for first, last in itertools.pairwise(ends) for begin, end in passes(last - first)]
