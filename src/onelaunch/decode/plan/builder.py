"""Builder of plans: the units of work of each CTA, what they read and write, and the edges between phases."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.plan.phases import (
    ROUNDS,
    TILE,
    Blocks,
    Buffer,
    Edge,
    Op,
    Phase,
    Piece,
    Plan,
    Share,
    Unit,
    Wait,
    blocks_of,
    depth,
    split,
    unit_of,
)

HALF_TILE = TILE // 2
"""Channels of the MLP in a tile: each has a row of the gate and one of the up projection."""

SPLITS = 8
"""Most CTAs that share the positions of a key head: all others read what each of them found."""

POSITIONS = 64
"""Positions from which on one more CTA pays."""

LONG = 1280
"""Positions from which on CTAs take each other's queries, so that each key is read once."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A step of the ladder."""

    summary: str
    norms: bool = False
    """Flag that one CTA normalises for all, in a phase of its own."""
    rope: bool = False
    """Flag that heads are normalised and turned in a phase of their own. Else queries and keys are turned by the CTA that makes
    them, and attention divides by their norms.
    """
    heads: Edge = "grid"
    """Between the projections of a head and its attention."""
    others: Edge = "grid"
    streams: bool = False
    splits: int = 1
    positions: int = POSITIONS
    joined_from: int = LONG
    summed: bool = False
    """Flag that a CTA multiplies the attention results of its own heads by their columns of the output projection.

    It adds the products to the residual stream, whose words count their additions.
    """
    separate: bool = False


def halved(words: Piece) -> Piece:
    """Return the slice of the squares of heads' words: one for each two of them."""
    return Piece("squares", words.begin // 2, words.end // 2)


def tiles(config: ModelConfig, op: Op) -> int:
    """Return the number of tiles of a phase's matrix."""
    rows = {
        "qkv": config.query_size + 2 * config.key_value_size,
        "o": config.hidden_size,
        "gate_up": 2 * config.intermediate_size,
        "down": config.hidden_size,
        "lm_head": config.vocab_size,
    }[op]
    return -(-rows // TILE)


def layer_ctas(config: ModelConfig, ctas: int) -> int:
    """CTAs that work in the layers: the fewest with which none of them has more tiles than with all."""
    counts = [tiles(config, op) for op in ("qkv", "o", "gate_up", "down")]
    most = [-(-count // ctas) for count in counts]
    return max(-(-count // each) for count, each in zip(counts, most, strict=True))


class Builder:
    """Builder of an optimization level's plan; the arguments are those of :func:`onelaunch.decode.plan.plan_for`."""

    def __init__(
        self, config: ModelConfig, name: str, rung: Rung, ctas: int, used: int | None = None, rounds: int | None = None
    ) -> None:
        self.config, self.name, self.rung, self.ctas, self.rounds = config, name, rung, ctas, rounds
        self.workers = layer_ctas(config, ctas)
        self.head_words = (config.queries_per_key + 2) * config.head_dim  # queries, key, value
        self.splits = max(1, min(self.rung.splits, self.workers // config.num_key_value_heads))
        self.sharers = self.most_sharers() if self.rung.splits > 1 else 1
        self.blocks: Blocks | None = None
        if self.rung.summed:
            self.sharers, self.splits = self.most_units()
            self.blocks = blocks_of(config, self.sharers)
        self.joined = self.most_joined() if self.blocks else 1
        self.parts = self.splits * self.joined
        self.used = self.parts if used is None else used
        self.apart = self.blocks is not None and self.used == 1  # each unit with all positions, and nothing from the others
        queries = config.queries_per_key // self.sharers * self.joined
        self.slot = queries * config.head_dim + -(-queries // 4) * 4  # results, and the logarithms of their sums; whole 16 bytes

    def plan(self) -> Plan:
        rung, config = self.rung, self.config
        layer: list[Phase] = []
        if rung.norms:
            layer.append(self.norm("input_norm", "hidden"))
        source = "normed" if rung.norms else "hidden"
        if rung.rope:
            layer += [self.product("qkv", {"qkv": TILE}, self.whole(source)), self.rope()]
        else:
            layer.append(self.product("qkv", {"qkv": TILE, "squares": HALF_TILE}, self.whole(source)))
        layer += [
            self.attention(),
            self.summed(self.blocks) if self.blocks else self.product("o", {"mid": TILE}, self.partials()),
        ]
        if rung.norms:
            layer.append(self.norm("post_norm", "mid"))
        source = "normed" if rung.norms else "mid"
        layer.append(self.product("gate_up", {"act": HALF_TILE}, self.whole(source)))
        layer.append(self.down("hidden"))
        found = tuple(self.connected(layer))
        closing = self.down("final")
        tail = (self.head(), self.next_token()) if self.rounds is None else (self.head(), *self.drawing(self.rounds))
        keys_stream = rung.streams and depth(config) == 4  # whole chunks for each phase: others go between them
        parts = (self.splits, self.sharers, self.joined, self.used, rung.positions, rung.joined_from)
        facts = (rung.streams, keys_stream, rung.separate, self.blocks)
        return Plan(config, self.name, self.ctas, found, closing, tail, self.buffers(), *parts, *facts)

    # Buffers

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        config = self.config
        heads = config.num_key_value_heads
        found = dict.fromkeys(("hidden", "final", "mid"), config.hidden_size) | {"act": config.intermediate_size}
        found["qkv"] = heads * self.head_words
        found["partial"] = self.all_units() * self.slot
        found["best"] = self.ctas
        found["cache"] = heads * self.parts
        found |= {"drawn": self.ctas, "tallies": ROUNDS}
        if self.rung.norms:
            found["normed"] = config.hidden_size
        if self.rung.rope:
            found["q"] = config.query_size
        else:
            found["squares"] = tiles(config, "qkv") * HALF_TILE
        return found

    def buffers(self) -> tuple[Buffer, ...]:
        counted = ("mid",) if self.blocks else ()
        untagged = ("cache", "drawn", "tallies", *counted) if self.rung.others == "data" else tuple(self.sizes)
        return tuple(
            Buffer(
                name,
                words,
                name not in untagged,
                per_layer=name == "cache",
                sums=name in ("tallies", *counted),
                counts=name in counted,
                copies=1 + (name == "best"),
            )
            for name, words in self.sizes.items()
        )

    def whole(self, name: str) -> tuple[Piece, ...]:
        return (Piece(name, 0, self.sizes[name]),)

    def waiting(self, edge: Edge, share: Share) -> Share:
        """Return the share with spins on the words it reads where that is the edge; the cache's are ordered by what led here."""
        if edge != "data":
            return share
        return replace(share, polls=tuple(piece for piece in share.reads if piece.buffer != "cache"))

    # Phases

    def norm(self, name: str, source: str) -> Phase:
        first = Share(0, 1, self.whole(source), self.whole("normed"))
        return Phase(name, "norm", self.rung.others, (first, *[Share()] * (self.ctas - 1)))

    def over_workers(self, units: int) -> list[tuple[int, int]]:
        return split(units, self.workers) + [(units, units)] * (self.ctas - self.workers)

    def product(self, op: Op, targets: dict[str, int], reads: tuple[Piece, ...]) -> Phase:
        """A matrix times a vector: a tile gives so many words of each target. CTAs without tiles read nothing."""
        shares = []
        for begin, end in self.over_workers(tiles(self.config, op)):
            written = tuple(
                Piece(target, begin * width, min(end * width, self.sizes[target])) for target, width in targets.items()
            )
            share = Share(begin, end, reads, written) if end > begin else Share(begin, end)
            shares.append(self.waiting(self.rung.others, share))
        return Phase(op, op, self.rung.others, tuple(shares))

    def summed(self, blocks: Blocks) -> Phase:
        """The output projection by heads: each unit's part, over all units the rows' sums."""
        shares = []
        for begin, end in self.units():
            places, reads, adds = [], [], []
            for unit in range(begin, end):
                group, part = divmod(unit, self.splits)
                first, last = split(blocks.count, self.splits)[part]
                places += [group * blocks.count + first, group * blocks.count + last]
                if first == last:
                    continue
                reads += [self.found_by(unit)] if self.apart else self.found_for(unit)
                adds.append(Piece("mid", first * blocks.rows, min(last * blocks.rows, self.config.hidden_size)))
            share = Share(places[0], places[-1], tuple(reads), adds=tuple(adds)) if places else Share()
            shares.append(self.waiting(self.rung.others, share))
        return Phase("o", "o", self.rung.others, tuple(shares))

    def down(self, target: str) -> Phase:
        """With the CTA's own rows of the residual stream, where others add to them too: it adds its own, or clears for the next
        token what it has read.
        """
        phase = self.product("down", {target: TILE}, self.whole("act"))
        if self.blocks is None:
            return phase

        def with_rows(share: Share) -> Share:
            if share.units == 0:
                return share
            rows = (Piece("mid", share.begin * TILE, min(share.end * TILE, self.config.hidden_size)),)
            share = replace(share, reads=(*share.reads, *rows), polls=(*share.polls, *rows))
            return replace(share, writes=(*share.writes, *rows)) if target == "final" else replace(share, adds=rows)

        return replace(phase, shares=tuple(map(with_rows, phase.shares)))

    def most_units(self) -> tuple[int, int]:
        """Sharers of a key head's queries, and of their positions, that give the most CTAs a unit of attention each; and each of
        them a part of the output projection, as nobody waits for one that has none.
        """
        group, heads = self.config.queries_per_key, self.config.num_key_value_heads
        sharers = [each for each in range(1, group + 1) if group % each == 0]
        most = [min(self.rung.splits, blocks_of(self.config, each).count) for each in sharers]
        pairs = [(each, min(parts, self.workers // (heads * each))) for each, parts in zip(sharers, most, strict=True)]
        return max(
            ((each, parts) for each, parts in pairs if parts), key=lambda pair: (pair[0] * pair[1], -pair[0]), default=(1, 1)
        )

    def most_joined(self) -> int:
        """Return the most CTAs whose partial results a warp's lanes can read: eight, or sixteen where a head leaves lanes."""
        most = 8 if self.config.head_dim > 128 else 16
        return max(each for each in range(1, self.sharers + 1) if self.sharers % each == 0 and each * self.splits <= most)

    def most_sharers(self) -> int:
        """Return the most CTAs of a key head that leave each one unit at most, with as many queries each."""
        group, room = self.config.queries_per_key, self.workers // (self.config.num_key_value_heads * self.splits)
        return max(each for each in range(1, group + 1) if group % each == 0 and each <= max(room, 1))

    def all_units(self) -> int:
        return self.config.num_key_value_heads * self.sharers * self.splits

    def unit(self, number: int) -> Unit:
        return unit_of(number, self.sharers, self.splits, self.joined if self.used > self.splits else 1, apart=self.apart)

    def units(self) -> list[tuple[int, int]]:
        """Units of attention over CTAs: one each where there are enough."""
        units, workers = self.all_units(), self.workers
        if units > workers:
            return self.over_workers(units)
        # apart from each other: neighbours share a part of the chip
        places = {unit * workers // units: unit for unit in range(units)}
        return [(places[cta], places[cta] + 1) if cta in places else (0, 0) for cta in range(self.ctas)]

    def queries(self, head: int) -> Piece:
        words = self.config.queries_per_key * self.config.head_dim
        return Piece("q", head * words, (head + 1) * words)

    def made(self, head: int) -> tuple[Piece, ...]:
        """A key head's queries, key and value, and, where they are turned already, their squares: half a word for each."""
        words = Piece("qkv", head * self.head_words, (head + 1) * self.head_words)
        return (words,) if self.rung.rope else (words, halved(words))

    def made_for(self, unit: Unit) -> tuple[Piece, ...]:
        """Return the slices that a unit of attention reads: its queries, and key and value, for it may have the newest one."""
        begin, size = unit.head * self.head_words, self.config.head_dim
        queries = self.config.queries_per_key // self.sharers * size
        own = Piece("qkv", begin + unit.first * queries, begin + unit.last * queries)
        new = Piece("qkv", begin + self.head_words - 2 * size, begin + self.head_words)
        return own, new, halved(own), halved(new)

    def cached(self, head: int) -> Piece:
        return Piece("cache", head * self.parts, (head + 1) * self.parts)

    def rope(self) -> Phase:
        """Norm and rotation of a key head's queries and key; its key and value go to the cache."""
        shares = []
        for begin, end in self.over_workers(self.config.num_key_value_heads):
            heads = range(begin, end)
            written = (*map(self.queries, heads), *map(self.cached, heads))
            reads = tuple(piece for head in heads for piece in self.made(head))
            shares.append(self.waiting(self.rung.heads, Share(begin, end, reads, written)))
        return Phase("rope", "rope", self.rung.heads, tuple(shares))

    def attention(self) -> Phase:
        """Return the phase of attention: a key head's queries over a part of the positions.

        Where heads are not normalised in a phase of their own, they are here. The new key and value then go to the cache from the
        CTA that has their position, which may be each of a head's.
        """
        shares = []
        for begin, end in self.units():
            reads: list[Piece] = []
            writes: list[Piece] = []
            for number in range(begin, end):
                unit = self.unit(number)
                writes.append(self.found_by(number))  # by those without positions too: each word is written once in every use
                if unit.part >= self.used:
                    continue
                reads += [*((self.queries(unit.head),) if self.rung.rope else self.made_for(unit)), self.cached(unit.head)]
                if not self.rung.rope and unit.keeps:
                    kept = unit.head * self.parts + unit.part
                    writes.append(Piece("cache", kept, kept + 1))
            shares.append(self.waiting(self.rung.heads, Share(begin, end, tuple(reads), tuple(writes))))
        op: Op = "attention" if self.rung.rope else "rope_attention"
        return Phase("attention", op, self.rung.heads, tuple(shares))

    def found_by(self, unit: int) -> Piece:
        return Piece("partial", unit * self.slot, (unit + 1) * self.slot)

    def found_for(self, unit: int) -> list[Piece]:
        """Results of a unit's own queries, and the logarithms of their sums, by all units that have parts of them."""
        joined = self.joined if self.used > self.splits else 1
        own, queries = unit // self.splits % joined, self.config.queries_per_key // self.sharers
        parts, pieces = self.splits * joined, []
        for each in range(unit - unit % parts, unit - unit % parts + parts):
            begin, logs = self.found_by(each).begin, self.joined * queries * self.config.head_dim
            results = begin + own * queries * self.config.head_dim
            pieces.append(Piece("partial", results, results + queries * self.config.head_dim))
            pieces.append(Piece("partial", begin + logs + own * queries, begin + logs + (own + 1) * queries))
        return pieces

    def partials(self) -> tuple[Piece, ...]:
        return tuple(self.found_by(unit) for unit in range(self.all_units()) if self.unit(unit).part < self.used)

    def connected(self, phases: list[Phase]) -> Iterable[Phase]:
        """With flags: a counter for each key head and phase that is waited for."""
        heads = self.config.num_key_value_heads
        found = list(phases)
        for place, phase in enumerate(phases):
            if phase.edge != "flags":
                continue
            before, base = found[place - 1], (place - 1) * heads
            arriving = [
                replace(share, arrives=tuple(base + head for head in self.heads_of(share.writes)) if share.units else ())
                for share in before.shares
            ]
            counts: dict[int, int] = {}
            for share in arriving:
                for counter in share.arrives:
                    counts[counter] = counts.get(counter, 0) + 1
            found[place - 1] = replace(before, shares=tuple(arriving))
            waiting = (
                replace(share, awaits=tuple(Wait(base + head, counts[base + head]) for head in self.heads_of(share.reads)))
                for share in phase.shares
            )
            found[place] = replace(found[place], shares=tuple(waiting))
        return found

    def heads_of(self, pieces: tuple[Piece, ...]) -> list[int]:
        """The key heads that words of ``q`` or ``qkv`` belong to."""
        sizes = {"qkv": self.head_words, "q": self.config.queries_per_key * self.config.head_dim}
        found = {
            head
            for piece in pieces
            if (size := sizes.get(piece.buffer))
            for head in range(piece.begin // size, -(-piece.end // size))
        }
        return sorted(found)

    def head(self) -> Phase:
        shares = []
        for cta, (begin, end) in enumerate(split(tiles(self.config, "lm_head"), self.ctas)):
            share = Share(begin, end, self.whole("final"), (Piece("best", cta, cta + 1),))
            shares.append(self.waiting(self.rung.others, share))
        return Phase("lm_head", "lm_head", self.rung.others, tuple(shares))

    def next_token(self) -> Phase:
        share = self.waiting(self.rung.others, Share(0, 1, self.whole("best")))
        return Phase("next", "next", self.rung.others, (share,) * self.ctas)

    def drawing(self, rounds: int) -> Iterable[Phase]:
        """Yield the phases that follow the LM head where a token is drawn.

        All CTAs add to the histogram of a radix-select pass and meet, and so on to the next; then each gives the best of its own,
        all meet, and the histograms are cleared, each by one CTA.
        """

        def sums(begin: int) -> tuple[Piece, ...]:
            return (Piece("tallies", begin, begin + 1),)

        edge, share = self.rung.others, self.waiting(self.rung.others, Share(0, 1, self.whole("best")))
        for number in range(rounds):
            yield Phase(f"tally {number}", "tally", edge, (replace(share, adds=sums(number)),) * self.ctas)
            edge, share = "grid", Share(0, 1, sums(number))
        said = (replace(share, writes=(Piece("drawn", cta, cta + 1),)) for cta in range(self.ctas))
        yield Phase("draw", "draw", edge, tuple(said))
        cleared = (tuple(piece for each in range(cta, rounds, self.ctas) for piece in sums(each)) for cta in range(self.ctas))
        yield Phase("next", "next", "grid", tuple(Share(0, 1, self.whole("drawn"), pieces) for pieces in cleared))
