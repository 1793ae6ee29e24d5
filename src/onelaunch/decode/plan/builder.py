"""Builder of plans: divides each phase's work over the CTAs, and lists what they read and write and how they synchronize.

``levels.py`` builds the plan of each optimization level with it, and ``packing.py`` asks :func:`tiles`. The ``edge`` before a
phase is ``grid`` (a grid barrier), ``flags`` (semaphores per key head), ``data`` (flag-in-data words) or ``none``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.plan.division import AHEAD_BYTES, UNEVEN, balanced, layer_ctas, tiles
from onelaunch.decode.plan.phases import (
    DEPTH,
    ROUNDS,
    TILE,
    Assignment,
    Blocks,
    Buffer,
    Edge,
    Op,
    Phase,
    Plan,
    Slice,
    Unit,
    Wait,
    blocks_of,
    depth,
    in_parts,
    split,
    unit_of,
)
from onelaunch.moved import renamed

__getattr__ = renamed(__name__, {"Rung": "Level"})

_HALF_TILE = TILE // 2
"""Number of MLP channels in a tile of gate and up projection: each has a row of either."""

POSITIONS = 64
"""Positions per KV split, from which on one more split pays."""

_LONG = 1280
"""Position from which on query splits take each other's queries, if they can, so that fewer of them read each key."""


@dataclass(frozen=True, slots=True)
class Level:
    """Optimization level: the choices from which :class:`Builder` makes a plan."""

    summary: str
    """Description for the table of variants."""
    norms: bool = False
    """Flag of norms in a phase of their own, by one CTA for all; else every CTA normalizes the vector that it reads."""
    rope: bool = False
    """Flag of norm and RoPE of heads in a phase of their own.

    Else the epilogue of the QKV product applies RoPE, and attention divides by the RMS. A model without norms of heads is rotated
    in the same place, and attention then takes heads as they are.
    """
    heads: Edge = "grid"
    """Synchronization before attention, and before the RoPE phase if there is one."""
    others: Edge = "grid"
    """Synchronization before all other phases; a sampler's phases after the first have grid barriers in every level."""
    streams: bool = False
    """Flag of weights that are prefetched across phases."""
    splits: int = 1
    """Largest number of KV splits, without those that are added where query splits take each other's queries."""
    positions: int = POSITIONS
    """Positions per KV split; if ``summed``, the number of positions up to which there is one split."""
    merge_from: int = _LONG
    """Position from which on query splits take each other's queries."""
    summed: bool = False
    """Flag of an output projection that is split over heads (split-K) and fused with attention.

    A CTA multiplies the attention results of its own units by their columns and adds the products atomically to the residual
    stream, whose words count their additions.
    """
    separate: bool = False
    """Flag of one launch per phase."""


def _squares_of(words: Slice) -> Slice:
    """Return the slice of ``squares`` that belongs to a slice of ``qkv``: one word per RoPE pair."""
    return Slice("squares", words.begin // 2, words.end // 2)


class Builder:
    """Builder of an optimization level's plan.

    ``name`` is the level's name and ``options`` its choices; the other arguments are those of
    :func:`onelaunch.decode.plan.plan_for`.

    The layers use ``workers`` CTAs, the LM head all of them. :class:`~onelaunch.decode.plan.phases.Plan` explains the splits of
    attention.
    """

    def __init__(
        self, config: ModelConfig, name: str, options: Level, ctas: int, used: int | None = None, rounds: int | None = None
    ) -> None:
        self.config, self.name, self.options, self.ctas, self.rounds = config, name, options, ctas, rounds
        self.workers = layer_ctas(config, ctas)
        self.squares = config.qk_norm and not options.rope  # the norms of heads need sums of squares that other CTAs computed
        self.head_words = (config.queries_per_key + 2) * config.head_dim  # queries, key, value
        self.splits = max(1, min(self.options.splits, self.workers // config.num_key_value_heads))
        self.query_splits = self.most_query_splits() if self.options.splits > 1 else 1
        self.blocks: Blocks | None = None
        if self.options.summed:
            self.query_splits, self.splits = self.most_units()
            self.blocks = blocks_of(config, self.query_splits)
        self.query_merge = self.most_query_merge() if self.blocks else 1
        self.parts = self.splits * self.query_merge  # largest number of KV splits of the same queries
        self.used = self.parts if used is None else used  # KV splits that have positions, see Plan.used
        self.apart = self.blocks is not None and self.used == 1  # each unit takes all positions
        queries = config.queries_per_key // self.query_splits * self.query_merge
        self.slot = queries * config.head_dim + -(-queries // 4) * 4  # outputs, then LSE, in whole 16 bytes

    def plan(self) -> Plan:
        """Return the plan."""
        options, config = self.options, self.config
        layer: list[Phase] = []
        if options.norms:
            layer.append(self.norm("input_norm", "hidden"))
        source = "normed" if options.norms else "hidden"
        written = {"qkv": TILE} | ({"squares": _HALF_TILE} if self.squares else {})
        layer.append(self.product("qkv", written, self.whole(source)))
        if options.rope:
            layer.append(self.rope())
        layer += [
            self.attention(),
            self.split_k_output(self.blocks) if self.blocks else self.product("o", {"mid": TILE}, self.partials()),
        ]
        if options.norms:
            layer.append(self.norm("post_norm", "mid"))
        source = "normed" if options.norms else "mid"
        down = self.down("hidden")
        division = self.gate_up_tiles([*layer, down])
        layer += [self.product("gate_up", {"act": _HALF_TILE}, self.whole(source), division), down]
        phases = tuple(self.with_semaphores(layer))
        closing = self.down("final")
        tail = (self.lm_head(), self.next_token()) if self.rounds is None else (self.lm_head(), *self.sampling(self.rounds))
        # If phases end at chunks, keys and values can come between.
        kv_through_ring = options.streams and not in_parts(config) and depth(config, config.hidden_size) == DEPTH
        splits = (self.splits, self.query_splits, self.query_merge, self.used, options.positions, options.merge_from)
        flags = (options.streams, kv_through_ring, options.separate, self.blocks)
        return Plan(config, self.name, self.ctas, phases, closing, tail, self.buffers(), *splits, *flags)

    # Buffers

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Number of words of each buffer.

        ``hidden`` is the residual stream after a layer's MLP, ``final`` that of the last layer, and ``mid`` that after
        attention (as sums that count their additions, with a split-K output projection). ``normed`` is the normalized
        vector, if one CTA computes it. ``qkv`` has the outputs of the QKV product, ``squares`` the sums of squares of its
        RoPE pairs, ``q`` the queries after RoPE in a phase of its own, ``partial`` the partial outputs and LSE of
        attention, and ``act`` the MLP's activations. ``best`` has each CTA's best candidate, ``drawn`` its sampled one.
        ``cache`` stands for the KV cache with one word per key head and KV split, and ``histograms`` for the sampler's, with one
        word per radix-select pass.
        """
        config = self.config
        heads = config.num_key_value_heads
        sizes = dict.fromkeys(("hidden", "final", "mid"), config.hidden_size) | {"act": config.intermediate_size}
        sizes["qkv"] = heads * self.head_words
        sizes["partial"] = self.all_units() * self.slot
        sizes["best"] = self.ctas
        sizes["cache"] = heads * self.parts
        sizes |= {"drawn": self.ctas, "histograms": ROUNDS}
        if self.options.norms:
            sizes["normed"] = config.hidden_size
        if self.options.rope:
            sizes["q"] = config.query_size
        if self.squares:
            sizes["squares"] = tiles(config, "qkv") * _HALF_TILE
        return sizes

    def buffers(self) -> tuple[Buffer, ...]:
        """Return the buffers, with what synchronizes their words."""
        counted = ("mid",) if self.blocks else ()
        untagged = ("cache", "drawn", "histograms", *counted) if self.options.others == "data" else tuple(self.sizes)
        return tuple(
            Buffer(
                name,
                words,
                name not in untagged,
                per_layer=name == "cache",
                sums=name in ("histograms", *counted),
                counts=name in counted,
                copies=1 + (name == "best"),
            )
            for name, words in self.sizes.items()
        )

    def whole(self, name: str) -> tuple[Slice, ...]:
        """Return the slice of a whole buffer."""
        return (Slice(name, 0, self.sizes[name]),)

    def with_polls(self, edge: Edge, assignment: Assignment) -> Assignment:
        """Return the assignment with spins on all words that it reads, if ``edge`` is flag-in-data.

        Rows of the KV cache have no tags: the spins on other words order them.
        """
        if edge != "data":
            return assignment
        return replace(assignment, polls=tuple(slice_ for slice_ in assignment.reads if slice_.buffer != "cache"))

    # Phases

    def norm(self, name: str, source: str) -> Phase:
        """Return the phase in which CTA 0 normalizes the residual stream for all; the kernel's function has its ``name``."""
        first = Assignment(0, 1, self.whole(source), self.whole("normed"))
        return Phase(name, "norm", self.options.others, (first, *[Assignment()] * (self.ctas - 1)))

    def over_workers(self, units: int) -> list[tuple[int, int]]:
        """Divide units over the CTAs that work in the layers; the others have none."""
        return split(units, self.workers) + [(units, units)] * (self.ctas - self.workers)

    def gate_up_tiles(self, others: list[Phase]) -> list[tuple[int, int]]:
        """Return the tiles of gate and up projection of each CTA, given the other phases of a layer.

        Each CTA has about as many. If the weights of a layer are then too uneven, CTAs with fewer weights in other phases take
        more of these tiles, which are the most numerous.
        """
        config, count = self.config, tiles(self.config, "gate_up")
        even = self.over_workers(count)
        widths = {"qkv": config.hidden_size, "o": config.query_size, "down": config.intermediate_size}
        if self.blocks is not None:
            widths["o"] = self.blocks.width
        sizes = [
            sum(widths[phase.op] * phase.assignments[cta].units for phase in others if phase.op in widths)
            for cta in range(self.workers)
        ]
        weights = [size + (end - begin) * config.hidden_size for size, (begin, end) in zip(sizes, even, strict=False)]
        mean = sum(weights) / self.workers
        if not self.options.streams or max(weights) <= UNEVEN * mean or 2 * TILE * mean <= AHEAD_BYTES:
            return even
        return balanced(count, config.hidden_size, sizes) + [(count, count)] * (self.ctas - self.workers)

    def product(
        self, op: Op, targets: dict[str, int], reads: tuple[Slice, ...], division: list[tuple[int, int]] | None = None
    ) -> Phase:
        """Return a phase that multiplies a matrix by a vector.

        Args:
            op: Operation, which names the matrix.
            targets: Words that a tile writes to each buffer.
            reads: Slices that every CTA with tiles reads.
            division: Tiles of each CTA; by default as many for each CTA that works in the layers as for the others.
        """
        assignments = []
        for begin, end in division or self.over_workers(tiles(self.config, op)):
            written = tuple(
                Slice(target, begin * width, min(end * width, self.sizes[target])) for target, width in targets.items()
            )
            assignment = Assignment(begin, end, reads, written) if end > begin else Assignment(begin, end)
            assignments.append(self.with_polls(self.options.others, assignment))
        return Phase(op, op, self.options.others, tuple(assignments))

    def split_k_output(self, blocks: Blocks) -> Phase:
        """Return the output projection, split over query splits: each adds its product to the residual stream."""
        assignments = []
        for begin, end in self.units():
            ends, reads, adds = [], [], []
            for unit in range(begin, end):  # the KV splits of a query split divide its blocks of rows among themselves
                query_split, part = divmod(unit, self.splits)
                first, last = split(blocks.count, self.splits)[part]
                ends += [query_split * blocks.count + first, query_split * blocks.count + last]
                if first == last:
                    continue
                reads += [self.partial(unit)] if self.apart else self.partials_for(unit)
                adds.append(Slice("mid", first * blocks.rows, min(last * blocks.rows, self.config.hidden_size)))
            assignment = Assignment(ends[0], ends[-1], tuple(reads), adds=tuple(adds)) if ends else Assignment()
            assignments.append(self.with_polls(self.options.others, assignment))
        return Phase("o", "o", self.options.others, tuple(assignments))

    def down(self, target: str) -> Phase:
        """Return the down projection.

        If others add to the residual stream too, a CTA reads its own rows of it, and adds the product to them; in the last
        layer (``target`` is ``final``) it clears them for the next token instead.
        """
        phase = self.product("down", {target: TILE}, self.whole("act"))
        if self.blocks is None:
            return phase

        def with_rows(assignment: Assignment) -> Assignment:
            if assignment.units == 0:
                return assignment
            rows = (Slice("mid", assignment.begin * TILE, min(assignment.end * TILE, self.config.hidden_size)),)
            assignment = replace(assignment, reads=(*assignment.reads, *rows), polls=(*assignment.polls, *rows))
            return (
                replace(assignment, writes=(*assignment.writes, *rows)) if target == "final" else replace(assignment, adds=rows)
            )

        return replace(phase, assignments=tuple(map(with_rows, phase.assignments)))

    def most_units(self) -> tuple[int, int]:
        """Return the query splits and KV splits that give the most CTAs one unit of attention each.

        Each of them must also have a part of the output projection: nothing would wait for a CTA that has none, so its reads
        of queries would be unordered.
        """
        group, heads = self.config.queries_per_key, self.config.num_key_value_heads
        divisors = [each for each in range(1, group + 1) if group % each == 0]
        most = [min(self.options.splits, blocks_of(self.config, each).count) for each in divisors]
        pairs = [(each, min(parts, self.workers // (heads * each))) for each, parts in zip(divisors, most, strict=True)]
        # Of pairs with equally many units, the one with the fewest query splits reads each key the least often.
        return max(
            ((each, parts) for each, parts in pairs if parts), key=lambda pair: (pair[0] * pair[1], -pair[0]), default=(1, 1)
        )

    def most_query_merge(self) -> int:
        """Return how many query splits take each other's queries in a long context.

        A thread reads all of a query's partial results at once: at most sixteen, or eight if a head has more than 128
        channels.
        """
        most = 8 if self.config.head_dim > 128 else 16
        return max(
            each for each in range(1, self.query_splits + 1) if self.query_splits % each == 0 and each * self.splits <= most
        )

    def most_query_splits(self) -> int:
        """Return the largest number of query splits of equal size with which no CTA has more than one unit."""
        group, most = self.config.queries_per_key, self.workers // (self.config.num_key_value_heads * self.splits)
        return max(each for each in range(1, group + 1) if group % each == 0 and each <= max(most, 1))

    def all_units(self) -> int:
        """Return the number of units of attention."""
        return self.config.num_key_value_heads * self.query_splits * self.splits

    def unit(self, number: int) -> Unit:
        """Return a unit of attention by its number."""
        return unit_of(
            number, self.query_splits, self.splits, self.query_merge if self.used > self.splits else 1, apart=self.apart
        )

    def units(self) -> list[tuple[int, int]]:
        """Return the first unit of attention of each CTA and one past the last: one unit if there are enough CTAs."""
        units, workers = self.all_units(), self.workers
        if units > workers:
            return self.over_workers(units)
        # spread over the CTAs, since neighbouring CTAs share a part of the chip
        unit_at = {unit * workers // units: unit for unit in range(units)}
        return [(unit_at[cta], unit_at[cta] + 1) if cta in unit_at else (0, 0) for cta in range(self.ctas)]

    def queries(self, head: int) -> Slice:
        """Return the slice of a key head's queries after norm and RoPE."""
        words = self.config.queries_per_key * self.config.head_dim
        return Slice("q", head * words, (head + 1) * words)

    def qkv_of(self, head: int) -> tuple[Slice, ...]:
        """Return the slices of a key head's queries, key and value, which the phase of RoPE reads."""
        return (Slice("qkv", head * self.head_words, (head + 1) * self.head_words),)

    def qkv_for(self, unit: Unit) -> tuple[Slice, ...]:
        """Return the slices that a unit of attention reads: its queries, and the newest key and value, which it may need."""
        begin, size = unit.head * self.head_words, self.config.head_dim
        queries = self.config.queries_per_key // self.query_splits * size
        own = Slice("qkv", begin + unit.first * queries, begin + unit.last * queries)
        new = Slice("qkv", begin + self.head_words - 2 * size, begin + self.head_words)
        return (own, new, _squares_of(own), _squares_of(new)) if self.squares else (own, new)

    def cached(self, head: int) -> Slice:
        """Return the slice of a key head's cache: one word stands for the rows of each KV split."""
        return Slice("cache", head * self.parts, (head + 1) * self.parts)

    def rope(self) -> Phase:
        """Return the phase of norm and RoPE of queries and keys, which also writes the newest key and value to the cache."""
        assignments = []
        for begin, end in self.over_workers(self.config.num_key_value_heads):
            heads = range(begin, end)
            written = (*map(self.queries, heads), *map(self.cached, heads))
            reads = tuple(slice_ for head in heads for slice_ in self.qkv_of(head))
            assignments.append(self.with_polls(self.options.heads, Assignment(begin, end, reads, written)))
        return Phase("rope", "rope", self.options.heads, tuple(assignments))

    def attention(self) -> Phase:
        """Return the phase of attention.

        Without a phase of norm and RoPE it divides by the RMS and writes the newest key and value to the cache: in the CTA
        whose split has their position, which may be any of a head's.
        """
        assignments = []
        for begin, end in self.units():
            reads: list[Slice] = []
            writes: list[Slice] = []
            for number in range(begin, end):
                unit = self.unit(number)
                writes.append(self.partial(number))  # also without positions: each word is written in every use of the buffer
                if unit.part >= self.used:
                    continue
                reads += [*((self.queries(unit.head),) if self.options.rope else self.qkv_for(unit)), self.cached(unit.head)]
                if not self.options.rope and unit.stores_newest:
                    word = unit.head * self.parts + unit.part
                    writes.append(Slice("cache", word, word + 1))
            assignments.append(self.with_polls(self.options.heads, Assignment(begin, end, tuple(reads), tuple(writes))))
        op: Op = "attention" if self.options.rope else "rope_attention"
        return Phase("attention", op, self.options.heads, tuple(assignments))

    def partial(self, unit: int) -> Slice:
        """Return the slot in ``partial`` of a unit of attention, with its partial outputs and LSE."""
        return Slice("partial", unit * self.slot, (unit + 1) * self.slot)

    def partials_for(self, unit: int) -> list[Slice]:
        """Return the slices of partial outputs and of LSE of a unit's own queries, one of each per KV split."""
        query_merge = self.query_merge if self.used > self.splits else 1
        own, queries = unit // self.splits % query_merge, self.config.queries_per_key // self.query_splits
        parts, slices = self.splits * query_merge, []
        for each in range(unit - unit % parts, unit - unit % parts + parts):
            begin, lse = self.partial(each).begin, self.query_merge * queries * self.config.head_dim
            results = begin + own * queries * self.config.head_dim
            slices.append(Slice("partial", results, results + queries * self.config.head_dim))
            slices.append(Slice("partial", begin + lse + own * queries, begin + lse + (own + 1) * queries))
        return slices

    def partials(self) -> tuple[Slice, ...]:
        """Return the slots of all units that have positions."""
        return tuple(self.partial(unit) for unit in range(self.all_units()) if self.unit(unit).part < self.used)

    def with_semaphores(self, phases: list[Phase]) -> Iterable[Phase]:
        """Add semaphores, one per key head and phase that is waited for, to phases whose edge is ``flags``."""
        heads = self.config.num_key_value_heads
        linked = list(phases)
        for index, phase in enumerate(phases):
            if phase.edge != "flags":
                continue
            before, base = linked[index - 1], (index - 1) * heads
            arriving = [
                replace(
                    assignment,
                    arrives=tuple(base + head for head in self.heads_of(assignment.writes)) if assignment.units else (),
                )
                for assignment in before.assignments
            ]
            counts: dict[int, int] = {}
            for assignment in arriving:
                for counter in assignment.arrives:
                    counts[counter] = counts.get(counter, 0) + 1
            linked[index - 1] = replace(before, assignments=tuple(arriving))
            waiting = (
                replace(
                    assignment, awaits=tuple(Wait(base + head, counts[base + head]) for head in self.heads_of(assignment.reads))
                )
                for assignment in phase.assignments
            )
            linked[index] = replace(linked[index], assignments=tuple(waiting))
        return linked

    def heads_of(self, slices: tuple[Slice, ...]) -> list[int]:
        """Return the key heads that slices of ``q`` or ``qkv`` belong to."""
        sizes = {"qkv": self.head_words, "q": self.config.queries_per_key * self.config.head_dim}
        heads = {
            head
            for slice_ in slices
            if (size := sizes.get(slice_.buffer))
            for head in range(slice_.begin // size, -(-slice_.end // size))
        }
        return sorted(heads)

    def lm_head(self) -> Phase:
        """Return the phase of the LM head: each CTA writes the best candidate of its rows."""
        assignments = []
        for cta, (begin, end) in enumerate(split(tiles(self.config, "lm_head"), self.ctas)):
            assignment = Assignment(begin, end, self.whole("final"), (Slice("best", cta, cta + 1),))
            assignments.append(self.with_polls(self.options.others, assignment))
        return Phase("lm_head", "lm_head", self.options.others, tuple(assignments))

    def next_token(self) -> Phase:
        """Return the phase in which every CTA takes the best of all candidates."""
        assignment = self.with_polls(self.options.others, Assignment(0, 1, self.whole("best")))
        return Phase("next", "next", self.options.others, (assignment,) * self.ctas)

    def sampling(self, rounds: int) -> Iterable[Phase]:
        """Yield the phases that follow the LM head if the token is sampled.

        In each radix-select pass all CTAs add to a histogram and pass a grid barrier. Then each writes the best candidate of
        its own, and after another barrier all read these, and the histograms are cleared, each by one CTA.
        """

        def histogram(begin: int) -> tuple[Slice, ...]:
            return (Slice("histograms", begin, begin + 1),)

        edge, assignment = self.options.others, self.with_polls(self.options.others, Assignment(0, 1, self.whole("best")))
        for number in range(rounds):
            yield Phase(f"tally {number}", "tally", edge, (replace(assignment, adds=histogram(number)),) * self.ctas)
            edge, assignment = "grid", Assignment(0, 1, histogram(number))
        sampled = (replace(assignment, writes=(Slice("drawn", cta, cta + 1),)) for cta in range(self.ctas))
        yield Phase("draw", "draw", edge, tuple(sampled))
        cleared = (
            tuple(each for number in range(cta, rounds, self.ctas) for each in histogram(number)) for cta in range(self.ctas)
        )
        yield Phase("next", "next", "grid", tuple(Assignment(0, 1, self.whole("drawn"), slices) for slices in cleared))
