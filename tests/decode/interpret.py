"""Interpreter of a decode plan in PyTorch: it runs CTA by CTA, in any order that the plan's synchronization edges permit.

It shows without a GPU whether a plan orders enough. Buffer words that no phase has written are NaN, and a CTA sees only the
words that its work assignment (``Assignment``) declares as read. A plan that orders or declares too little therefore gives other
numbers than the model. Weights are read from the packed stream in the kernel's own order. ``test_plan.py`` runs plans in it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import torch

from onelaunch.decode.codegen.layout import BINS
from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.forward import rms_norm
from onelaunch.decode.model.rope import layer_rotations, rotate
from onelaunch.decode.model.sampling import COLDEST, Sampler, Sampling, gumbel, penalise
from onelaunch.decode.model.weights import Weights
from onelaunch.decode.plan.packing import (
    Stream,
    as_operands,
    block_pieces,
    from_pairs,
    from_warps,
    in_pairs,
    piece_bytes,
    pieces,
    row_order,
)
from onelaunch.decode.plan.phases import (
    PRODUCTS,
    ROUNDS,
    TILE,
    WARP_COLUMNS,
    Assignment,
    Blocks,
    Op,
    Phase,
    Plan,
    Slice,
    groups_of,
)
from onelaunch.errors import PlanError
from tests.decode.radix_select import DIGIT, Search, digits, keys_of, narrow

AHEAD = 6
"""Largest number of phases that one CTA runs before another CTA is chosen."""


class Interpreter:
    """Interpreter of one sequence, token by token. :class:`Plan` explains fields such as ``splits`` and ``query_merge``.

    Args:
        plan: Plan of any variant. For drawn tokens it has as many radix-select passes as :func:`digits` returns.
        weights: Weights in float64, on the CPU.
        stream: The same weights, packed for the plan.
        cache: KV cache in float64. Rows of new positions are written.
        seed: Seed of the order in which CTAs run.
        sampler: Sampler with the sequence so far. By default the likeliest token is taken.
    """

    def __init__(
        self, plan: Plan, weights: Weights, stream: Stream, cache: KVCache, seed: int = 0, sampler: Sampler | None = None
    ) -> None:
        self.plan, self.weights, self.stream, self.cache = plan, weights, stream, cache
        self.sampler = sampler or Sampler(Sampling(), torch.tensor([0]), plan.config.vocab_size)
        self.dice = random.Random(seed)
        self.words = {
            (buffer.name, copy): torch.full((buffer.words,), torch.nan, dtype=torch.float64)
            for buffer in plan.buffers
            for copy in range(buffer.copies)
        }
        # Tag of each word; for sums that count their additions, their number so far.
        self.tags = {key: torch.zeros(len(words), dtype=torch.int64) for key, words in self.words.items()}
        for buffer in plan.buffers:
            if buffer.counts:
                self.words[buffer.name, 0].zero_()
        self.counters: dict[int, int] = {}
        self.own_rows: dict[int, torch.Tensor] = {}  # rows of the residual stream that a CTA keeps to itself, without blocks
        self.tokens: dict[int, int] = {}  # by position; every CTA must arrive at the same token
        self.logits = torch.full((plan.config.vocab_size,), torch.nan, dtype=torch.float64)
        self.penalised = self.logits.clone()
        self.scores: dict[tuple[str, int, int], float] = {}  # of each candidate, by buffer, position and token
        self.searches: dict[int, Search] = {}
        self.narrowed: dict[tuple[int, int], tuple[int, int]] = {}
        """Digit prefix and remaining target by position and radix-select pass. Every CTA must arrive at the same pair."""
        self.histograms = torch.zeros(ROUNDS, BINS, dtype=torch.int64)

    def run(self, token: int, count: int = 1) -> torch.Tensor:
        """Make ``count`` tokens, beginning with ``token`` at position ``cache.length``.

        Returns:
            Logits ``[V]`` of the last token.

        Raises:
            PlanError: All CTAs wait, or two CTAs disagree.
        """
        self.tokens[self.cache.length] = token
        steps = [(number, layer, phase) for number in range(count) for layer, phase in self.plan.instances()]
        at = [0] * self.plan.ctas
        while min(at) < len(steps):
            ready = [cta for cta in range(self.plan.ctas) if at[cta] < len(steps) and self._ready(cta, at, steps[at[cta]])]
            if not ready:
                raise PlanError(self.plan.level, f"all CTAs wait, CTA {at.index(min(at))} before phase {steps[min(at)][2].name}")
            cta = self.dice.choice(ready)
            for _ in range(self.dice.randint(1, AHEAD)):
                self._step(cta, *steps[at[cta]])
                at[cta] += 1
                if at[cta] == len(steps) or not self._ready(cta, at, steps[at[cta]]):
                    break
        return self.logits

    # Synchronization edges

    def _ready(self, cta: int, at: list[int], step: tuple[int, int, Phase]) -> bool:
        """Return whether a CTA may begin its next step (token, layer, phase). ``at`` holds the steps that each CTA has done."""
        number, layer, phase = step
        assignment = phase.assignments[cta]
        if phase.edge == "grid" or self.plan.separate:  # a launch of its own also begins after all CTAs have finished
            return min(at) >= at[cta]
        if phase.edge == "flags":
            use = number * self.plan.config.num_hidden_layers + layer + 1
            return all(self.counters.get(wait.counter, 0) >= wait.arrivals * use for wait in assignment.awaits)
        if phase.edge == "data":
            return all(self._arrived(slice_, number, layer, phase) for slice_ in assignment.polls)
        return True

    def _arrived(self, slice_: Slice, number: int, layer: int, phase: Phase) -> bool:
        """Return whether all words of a slice have the tag of this use: token ``number`` of the run, and layer."""
        if slice_.buffer == "hidden" and layer == 0:  # the embedding, which each CTA reads for itself
            return True
        tag = self._tag(slice_.buffer, number, layer - (slice_.buffer == "hidden"))  # the layer before wrote ``hidden``
        if self.plan.buffer(slice_.buffer).counts:
            tag = self.plan.additions(layer)
        return bool((self.tags[self._key(slice_.buffer, number)][slice_.begin : slice_.end] == tag).all())

    def _tag(self, buffer: str, number: int, layer: int) -> int:
        """Return the tag that tells a use of a word from earlier uses: of 2 bits as in the kernel, or 8 for best candidates."""
        if buffer == "best":
            return (number + 1) % 256
        return (number + 1 if buffer == "final" else number * self.plan.config.num_hidden_layers + layer + 1) % 4

    def _key(self, buffer: str, number: int) -> tuple[str, int]:
        """Return the key in ``words`` of the copy of a buffer that token ``number`` uses."""
        return buffer, number % self.plan.buffer(buffer).copies

    # Phases

    def _step(self, cta: int, number: int, layer: int, phase: Phase) -> None:
        assignment = phase.assignments[cta]
        position = self.cache.length + number
        if phase is self.plan.phases()[0] and layer == 0 and self.plan.blocks is None:
            rows = self.plan.phase("o").assignments[cta]
            self.own_rows[cta] = self._embedded(position)[rows.begin * TILE : rows.end * TILE].clone()
        seen = self._visible(assignment, number)
        if layer == 0 and "hidden" in seen:
            seen["hidden"] = self._embedded(position)
        self._store_results(assignment, self._compute(phase.op, cta, assignment, layer, position, seen), number, layer)
        for counter in assignment.arrives:
            self.counters[counter] = self.counters.get(counter, 0) + 1

    def _visible(self, assignment: Assignment, number: int) -> dict[str, torch.Tensor]:
        """Return for each buffer the words that a CTA's assignment reads. All other words are NaN."""
        seen: dict[str, torch.Tensor] = {}
        for slice_ in assignment.reads:
            source = self.words[self._key(slice_.buffer, number)]
            words = seen.setdefault(slice_.buffer, torch.full_like(source, torch.nan))
            words[slice_.begin : slice_.end] = source[slice_.begin : slice_.end]
        return seen

    def _store_results(self, assignment: Assignment, found: dict[str, torch.Tensor], number: int, layer: int) -> None:
        """Store the results of an assignment: add the words that it accumulates, and write the words that it owns."""
        for index, slice_ in enumerate(assignment.adds):
            if slice_.buffer in found:
                at = slice(slice_.begin, slice_.end)
                self.tags[slice_.buffer, 0][at] += 1
                if index == 0:  # each unit adds to all rows, and ``found`` is already the sum over units
                    self.words[slice_.buffer, 0][at] += found[slice_.buffer][at]
        for slice_ in assignment.writes:
            at, key = slice(slice_.begin, slice_.end), self._key(slice_.buffer, number)
            if self.plan.buffer(slice_.buffer).counts:  # cleared for the next token
                self.words[key][at] = self.tags[key][at] = 0
            elif slice_.buffer in found:
                self.words[key][at] = found[slice_.buffer][at]
                self.tags[key][at] = self._tag(slice_.buffer, number, layer)
            elif slice_.buffer == "histograms":
                self.histograms[at] = 0

    def _embedded(self, position: int) -> torch.Tensor:
        return self.weights.embed_tokens[self.tokens[position]]

    def _compute(
        self, op: Op, cta: int, assignment: Assignment, layer: int, position: int, seen: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return what a CTA computes in a phase, by buffer. Words that the CTA does not write are NaN or unused."""
        if op == "next":
            return self._choose(cta, seen, position)
        if op == "lm_head":
            return self._head(cta, assignment, seen["final"], position)
        if op in ("tally", "draw"):
            return self._draw(cta, assignment, position, seen)
        if assignment.units == 0:
            return {}
        if op == "norm":
            return self._norm(layer, seen)
        if op == "rope":
            return self._norm_rope(assignment, layer, position, seen["qkv"])
        if op in ("attention", "rope_attention"):
            return self._attend(assignment, layer, position, seen)
        return self._product(op, cta, assignment, layer, position, seen)

    def _norm(self, layer: int, seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights, eps = self.weights.layers[layer], self.plan.config.rms_norm_eps
        if "hidden" in seen:
            return {"normed": rms_norm(seen["hidden"], weights.input_layernorm, eps)}
        return {"normed": rms_norm(seen["mid"], weights.post_attention_layernorm, eps)}

    def _product(
        self, op: Op, cta: int, assignment: Assignment, layer: int, position: int, seen: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        x = seen["normed"] if "normed" in seen else seen["act"] if op == "down" else None
        if op == "o" and self.plan.blocks:
            return {"mid": self._split_k_output(cta, assignment, layer, position, seen["partial"], self.plan.blocks)}
        if op == "o":
            x = self._combine_all(seen["partial"])
        elif x is None:
            x = self._norm(layer, seen)["normed"]
        rows = self._multiply(op, cta, layer, x)
        first = assignment.begin * TILE
        if op == "gate_up":
            gate, up = rows.view(-1, 2, TILE // 2).unbind(1)
            return {"act": self._in_buffer("act", assignment.begin * TILE // 2, (torch.nn.functional.silu(gate) * up).flatten())}
        if op == "down" and self.plan.blocks:
            before = seen["mid"][first : first + len(rows)]
            found = {name: self._in_buffer(name, first, before + rows[: len(before)]) for name in ("hidden", "final")}
            return found | {"mid": self._in_buffer("mid", first, rows)}  # an addition; in the last layer ``mid`` is cleared
        if op == "qkv" and self.plan.config.attention_bias:
            rows = rows + self._qkv_bias(layer)[first : first + len(rows)]
        if op == "o" and (bias := self.weights.layers[layer].o_bias) is not None:
            rows = rows + bias[first : first + len(rows)]
        if op in ("o", "down"):
            self.own_rows[cta] = rows = self.own_rows[cta] + rows
        names = {"qkv": ("qkv",), "o": ("mid",), "down": ("hidden", "final")}[op]
        found = {name: self._in_buffer(name, first, rows) for name in names}
        if op == "qkv" and not any(phase.op == "rope" for phase in self.plan.layer):
            if self.plan.config.qk_norm:
                found["squares"] = found["qkv"].view(-1, 2, TILE // 2).square().sum(1).flatten()
            found["qkv"] = self._rotated(found["qkv"], layer, position)
        return found

    def _qkv_bias(self, layer: int) -> torch.Tensor:
        """Return the biases of queries, keys and values in the order of the product's rows."""
        weights = self.weights.layers[layer]
        bias = torch.cat([each for each in (weights.q_bias, weights.k_bias, weights.v_bias) if each is not None])
        return bias[row_order(self.plan.config, "qkv").flatten()]

    def _in_buffer(self, name: str, first: int, values: torch.Tensor) -> torch.Tensor:
        """Return a buffer with the values from word ``first`` on, without rows of padding; all other words are NaN."""
        words = torch.full((self.plan.buffer(name).words,), torch.nan, dtype=torch.float64)
        values = values[: len(words) - first]
        words[first : first + len(values)] = values
        return words

    def _weights(self, op: Op, cta: int, layer: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each group of a CTA's tiles in a phase, in stream order: its first tile's index, and ``[tiles, 8, columns]``."""
        plan = self.plan
        per_layer = sum(pieces(plan, each, cta) for each in PRODUCTS[:-1])
        before = sum(pieces(plan, each, cta) for each in PRODUCTS[: PRODUCTS.index(op)]) if op != "lm_head" else 0
        piece = piece_bytes(plan.config) // 2  # bytes to bfloat16
        at = int(self.stream.starts[cta]) // 2 + piece * (layer * per_layer + before)
        for begin, end in groups_of(plan, op, cta):
            blocks = []
            for count in block_pieces(plan, op):
                size = (end - begin) * count * piece
                part = self.stream.data[at : at + size].view(end - begin, -1, TILE, WARP_COLUMNS)
                blocks.append(part.transpose(1, 2).flatten(2))
                at += size
            yield begin, as_operands(torch.cat(blocks, -1)).double()  # as_operands is its own inverse

    def _multiply(self, op: Op, cta: int, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Multiply a CTA's rows of a matrix by a vector."""
        found = [(part[..., : len(x)] @ x).flatten() for _, part in self._weights(op, cta, layer)]
        return torch.cat(found) if found else x.new_zeros(0)

    def _split_k_output(
        self, cta: int, assignment: Assignment, layer: int, position: int, partial: torch.Tensor, blocks: Blocks
    ) -> torch.Tensor:
        """Return what a CTA adds to each row of the residual stream in the output projection (split over its heads).

        The CTAs of the first query split add the bias as well, and in the first layer the embedding.
        """
        rows = torch.zeros(blocks.count * blocks.rows, dtype=torch.float64)
        plan = self.plan
        slots = partial.view(plan.adders * plan.splits, -1)
        first_unit = plan.phase("rope_attention").assignments[cta].begin  # the CTA's first unit of attention
        for begin, part in self._weights("o", cta, layer):
            unit, block = divmod(assignment.begin + begin, blocks.count)
            if plan.apart:
                x = self._combine(slots[first_unit + unit - assignment.begin // blocks.count][None, None])
            else:
                joined = plan.query_merge if plan.used > plan.splits else 1
                first = unit // joined * joined * plan.splits
                x = self._combine(slots[first : first + joined * plan.splits][None], unit % joined)
            side_by_side = from_warps(part, blocks).unflatten(-1, (-1, blocks.tile_columns))
            found = side_by_side[..., : blocks.channels] @ x  # [blocks, 8, tiles]
            found = found.transpose(1, 2).flatten()
            at = slice(block * blocks.rows, block * blocks.rows + len(found))
            rows[at] += found
            bias = self.weights.layers[layer].o_bias
            for added in (self._embedded(position) if layer == 0 else None, bias):
                if unit == 0 and added is not None:
                    rows[at][: len(added[at])] += added[at]
        return rows[: self.plan.config.hidden_size]

    def _heads(self, words: torch.Tensor) -> torch.Tensor:
        """Return queries, key and value of each key head, ``[K, G + 2, D]``."""
        config = self.plan.config
        return from_pairs(words.view(config.num_key_value_heads, config.queries_per_key + 2, config.head_dim))

    def _rotated(self, raw: torch.Tensor, layer: int, position: int) -> torch.Tensor:
        """Return a CTA's QKV words with queries and keys rotated (RoPE) but not yet divided by their RMS."""
        weights, heads = self.weights.layers[layer], self._heads(raw)
        q, k = heads[:, :-2], heads[:, -2:-1]
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = q * weights.q_norm, k * weights.k_norm
        q, k = (rotate(each, *self._rotation(layer, position)) for each in (q, k))
        return in_pairs(torch.cat([q, k, heads[:, -1:]], 1)).flatten()

    def _rotation(self, layer: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine of a layer at a position; those of the identity in a layer that does not rotate."""
        return layer_rotations(self.plan.config, torch.tensor([position]), torch.float64)[layer]

    def _normed(self, seen: dict[str, torch.Tensor], head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries ``[G, D]``, key ``[D]`` and value ``[D]`` of a key head from words that are rotated already."""
        heads, size = self._heads(seen["qkv"])[head], self.plan.config.head_dim
        if not self.plan.config.qk_norm:
            return heads[:-2], heads[-2], heads[-1]
        squares = seen["squares"].view(self.plan.config.num_key_value_heads, -1, size // 2)[head].sum(-1, keepdim=True)
        *q, k = heads[:-1] * (squares[:-1] / size + self.plan.config.rms_norm_eps).rsqrt()
        return torch.stack(q), k, heads[-1]

    def _norm_and_rotate(
        self, raw: torch.Tensor, head: int, layer: int, position: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalise and rotate a key head's queries ``[G, D]`` and key ``[D]``; return them with its value ``[D]``."""
        weights, eps, heads = self.weights.layers[layer], self.plan.config.rms_norm_eps, self._heads(raw)[head]
        q, k = heads[None, :-2], heads[None, -2:-1]
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = rms_norm(q, weights.q_norm, eps), rms_norm(k, weights.k_norm, eps)
        q, k = (rotate(each, *self._rotation(layer, position)) for each in (q, k))
        return q[0], k[0, 0], heads[-1]

    def _store(self, layer: int, head: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.cache.keys[layer, head, position] = key
        self.cache.values[layer, head, position] = value

    def _norm_rope(self, assignment: Assignment, layer: int, position: int, raw: torch.Tensor) -> dict[str, torch.Tensor]:
        queries = torch.full((self.plan.config.query_size,), torch.nan, dtype=torch.float64)
        by_head = queries.view(self.plan.config.num_key_value_heads, -1)
        for head in range(assignment.begin, assignment.end):
            q, key, value = self._norm_and_rotate(raw, head, layer, position)
            by_head[head] = q.flatten()
            self._store(layer, head, position, key, value)
        return {"q": queries, "cache": torch.zeros(self.plan.buffer("cache").words, dtype=torch.float64)}

    def _attend(
        self, assignment: Assignment, layer: int, position: int, seen: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return ``partial`` with a slot per unit: outputs of its queries, then their LSE (-inf without positions)."""
        config, plan, positions = self.plan.config, self.plan, position + 1
        partial = torch.zeros(plan.buffer("partial").words, dtype=torch.float64)
        size, queries = -(-positions // plan.used), config.queries_per_key // plan.query_splits
        slots = partial.view(config.num_key_value_heads * plan.query_splits * plan.splits, -1)
        for number in range(assignment.begin, assignment.end):
            slot, (head, first, last, part, keeps) = slots[number], plan.unit(number)
            lse = slot[queries * plan.query_merge * config.head_dim :]
            if part >= plan.used:
                lse.fill_(-torch.inf)
                continue
            begin, end = part * size, min((part + 1) * size, positions)
            keys, values = self.cache.keys[layer, head, begin:end], self.cache.values[layer, head, begin:end]
            if "q" in seen:
                q = seen["q"].view(config.num_key_value_heads, -1, config.head_dim)[head]
            else:
                q, key, value = self._normed(seen, head)
                newest = begin < end == positions
                if newest and keeps:
                    self._store(layer, head, position, key, value)
                if newest:
                    keys, values = torch.cat([keys[:-1], key[None]]), torch.cat([values[:-1], value[None]])
                q = q[first * queries : last * queries]
            scores = (q @ keys.T) / config.head_dim**0.5
            slot[: q.numel()] = (scores.softmax(-1) @ values).flatten() if begin < end else 0
            lse[: len(q)] = scores.logsumexp(-1)
        return {"partial": partial, "cache": torch.zeros(plan.buffer("cache").words, dtype=torch.float64)}

    def _combine_all(self, partial: torch.Tensor) -> torch.Tensor:
        """Combine the KV splits' partial outputs into attention over all positions, ``[Q * D]``, weighted by their LSE."""
        config = self.plan.config
        return self._combine(
            partial.view(config.num_key_value_heads * self.plan.query_splits, self.plan.splits, -1)[:, : self.plan.used]
        )

    def _combine(self, slots: torch.Tensor, sharer: int = 0) -> torch.Tensor:
        """Combine slots ``[units, splits, words]`` by their LSE; if units are joined, for query split ``sharer`` of them."""
        queries, size = self.plan.config.queries_per_key // self.plan.query_splits, self.plan.config.head_dim
        at = slice(sharer * queries, (sharer + 1) * queries)
        values = slots[..., : self.plan.query_merge * queries * size].unflatten(-1, (-1, size))[..., at, :]
        weights = slots[..., self.plan.query_merge * queries * size :][..., at].softmax(1)
        return (values * weights[..., None]).sum(1).flatten()

    def _head(self, cta: int, assignment: Assignment, hidden: torch.Tensor, position: int) -> dict[str, torch.Tensor]:
        """Return a CTA's candidate among its tokens, after the repetition penalty. Reported logits have no penalty."""
        config = self.plan.config
        normed = rms_norm(hidden, self.weights.norm, config.rms_norm_eps)
        rows = self._multiply("lm_head", cta, config.num_hidden_layers, normed)
        first = assignment.begin * TILE
        rows = rows[: config.vocab_size - first]
        at = self._own_tokens(cta)
        self.logits[at] = rows
        if self.sampler.seen is not None:
            rows = penalise(rows, self.sampler.seen[at], self.sampler.sampling.repetition_penalty)
        self.penalised[at] = rows
        return self._candidate("best", cta, position, rows)

    def _own_tokens(self, cta: int) -> slice:
        """Return the tokens whose logits a CTA computes."""
        assignment, most = self.plan.phase("lm_head").assignments[cta], self.plan.config.vocab_size
        return slice(min(assignment.begin * TILE, most), min(assignment.end * TILE, most))

    def _candidate(self, buffer: str, cta: int, position: int, scores: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the best of a CTA's tokens, or -1 if the CTA has no token."""
        found = torch.full((self.plan.ctas,), torch.nan, dtype=torch.float64)
        found[cta] = token = self._own_tokens(cta).start + int(scores.argmax()) if len(scores) else -1
        self.scores[buffer, position, token] = float(scores.max()) if len(scores) else -math.inf
        return {buffer: found}

    def _best(self, buffer: str, seen: dict[str, torch.Tensor], position: int) -> int:
        """Return the candidate with the largest score; the CTA must see those of all CTAs."""
        if seen[buffer].isnan().any():
            raise PlanError(self.plan.level, "a CTA chooses a token before all CTAs have written their candidates")
        return max(map(int, seen[buffer]), key=lambda token: self.scores.get((buffer, position, token), -math.inf))

    def _choose(self, cta: int, seen: dict[str, torch.Tensor], position: int) -> dict[str, torch.Tensor]:
        """Choose the best of all CTAs' candidates as the next token."""
        token = self._best("drawn" if "drawn" in seen else "best", seen, position)
        if self.tokens.setdefault(position + 1, token) != token:
            raise PlanError(self.plan.level, f"CTAs disagree about the token at position {position + 1}")
        own = self._own_tokens(cta)
        if self.sampler.seen is not None and own.start <= token < own.stop:
            self.sampler.seen[token] = True
        return {}

    def _draw(self, cta: int, assignment: Assignment, position: int, seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Apply the previous radix-select pass; then add to the next one's histogram, or after the last draw a candidate."""
        sampling, rounds = self.sampler.sampling, digits(self.sampler.sampling)
        if "best" in seen:
            likeliest = self._best("best", seen, position)
            self.searches[cta] = Search(self.scores.get(("best", position, likeliest), math.nan))
        search, own = self.searches[cta], self._own_tokens(cta)
        for slice_ in assignment.reads:
            if slice_.buffer == "histograms":
                narrow(self.sampler.sampling, search, *rounds[slice_.begin], self.histograms[slice_.begin])
                pair = search.prefix, search.target
                if self.narrowed.setdefault((position, slice_.begin), pair) != pair:
                    raise PlanError(self.plan.level, f"CTAs disagree about round {slice_.begin} of position {position + 1}")
        distances = (search.largest - self.penalised[own]) / max(sampling.temperature, COLDEST)
        keys = keys_of(distances) | torch.arange(own.start, own.stop)
        for slice_ in assignment.adds:  # at most one histogram
            by_probability, at = rounds[slice_.begin]
            kept = (keys <= search.limit) & (keys >> at >> DIGIT == (search.prefix if at < 50 else 0))
            weights = (distances.neg().exp() * 2**38).long() if by_probability else torch.ones_like(keys)
            self.histograms[slice_.begin].index_add_(0, (keys >> at)[kept] % BINS, weights[kept])
            return {}
        if sampling.min_p:
            search.limit = min(search.limit, int(keys_of(torch.tensor(-math.log(sampling.min_p)).abs())) | 0xFFFFFFFF)
        scores = gumbel(sampling.seed, position + 1, len(self.logits), "cpu")[own] - distances
        return self._candidate("drawn", cta, position, scores.where(keys <= search.limit, -math.inf))
