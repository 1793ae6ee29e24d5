"""A plan run in PyTorch, CTA by CTA, in any order that its edges permit: what the kernels do, without a GPU.

Words that no phase has written are NaN, and a CTA sees only the words that its share says it reads: a plan that orders too
little, or says too little, gives other numbers than the model. Weights are taken from the stream as the kernel takes them.
"""

from __future__ import annotations

import random

import torch

from onelaunch.decode.cache import KVCache
from onelaunch.decode.emit import PRODUCTS, WARPS, depth
from onelaunch.decode.model import rms_norm
from onelaunch.decode.packing import CHANNELS, Stream, as_operands, columns, granules
from onelaunch.decode.plan import GRANULE, TILE, Op, Phase, Piece, Plan, Share, padded, passes
from onelaunch.decode.rope import rotate, rotation
from onelaunch.decode.weights import Weights
from onelaunch.errors import PlanError

AHEAD = 6
"""Phases that a CTA goes on for at most while all others stand still."""


class Interpreter:
    """One text, token by token.

    Args:
        plan: any rung's.
        weights: in float64, on the CPU.
        stream: the same weights, packed for the plan.
        cache: in float64; the rows of new positions are written.
        seed: of the order.
    """

    def __init__(self, plan: Plan, weights: Weights, stream: Stream, cache: KVCache, seed: int = 0) -> None:
        self.plan, self.weights, self.stream, self.cache = plan, weights, stream, cache
        self.dice = random.Random(seed)  # noqa: S311 - an order, no secret
        self.words = {
            (buffer.name, copy): torch.full((buffer.words,), torch.nan, dtype=torch.float64)
            for buffer in plan.buffers
            for copy in range(buffer.copies)
        }
        self.tags = {key: torch.zeros(len(words), dtype=torch.int64) for key, words in self.words.items()}
        self.counters: dict[int, int] = {}
        self.own: dict[int, torch.Tensor] = {}
        self.tokens: dict[int, int] = {}
        """By position; each CTA must come to the same."""
        self.logits = torch.full((plan.config.vocab_size,), torch.nan, dtype=torch.float64)

    def run(self, token: int, count: int = 1) -> torch.Tensor:
        """Makes so many tokens, always the likeliest, from one at position ``cache.length``.

        Returns:
            logits ``[V]`` of the last one.

        Raises:
            PlanError: all CTAs wait, or two disagree.
        """
        self.tokens[self.cache.length] = token
        steps = [(number, layer, phase) for number in range(count) for layer, phase in self.plan.instances()]
        at = [0] * self.plan.ctas
        while min(at) < len(steps):
            ready = [cta for cta in range(self.plan.ctas) if at[cta] < len(steps) and self._ready(cta, at, steps[at[cta]])]
            if not ready:
                raise PlanError(self.plan.rung, f"all CTAs wait, CTA {at.index(min(at))} before phase {steps[min(at)][2].name}")
            cta = self.dice.choice(ready)
            for _ in range(self.dice.randint(1, AHEAD)):
                self._step(cta, *steps[at[cta]])
                at[cta] += 1
                if at[cta] == len(steps) or not self._ready(cta, at, steps[at[cta]]):
                    break
        return self.logits

    # Edges

    def _ready(self, cta: int, at: list[int], step: tuple[int, int, Phase]) -> bool:
        number, layer, phase = step
        share = phase.shares[cta]
        if phase.edge == "grid" or self.plan.separate:
            return min(at) >= at[cta]
        if phase.edge == "flags":
            use = number * self.plan.config.num_hidden_layers + layer + 1
            return all(self.counters.get(wait.counter, 0) >= wait.arrivals * use for wait in share.awaits)
        if phase.edge == "data":
            return all(self._there(piece, number, layer, phase) for piece in share.polls)
        return True

    def _there(self, piece: Piece, number: int, layer: int, phase: Phase) -> bool:
        if piece.buffer == "hidden" and layer == 0:
            return True
        tag = self._tag(piece.buffer, number, layer - (piece.buffer == "hidden"))
        return bool((self.tags[self._key(piece.buffer, number)][piece.begin : piece.end] == tag).all())

    def _tag(self, buffer: str, number: int, layer: int) -> int:
        """What tells a use from those before, as the kernel has it: two bits, eight of the best candidates."""
        if buffer == "best":
            return (number + 1) % 256
        return (number + 1 if buffer == "final" else number * self.plan.config.num_hidden_layers + layer + 1) % 4

    def _key(self, buffer: str, number: int) -> tuple[str, int]:
        return buffer, number % self.plan.buffer(buffer).copies

    # Phases

    def _step(self, cta: int, number: int, layer: int, phase: Phase) -> None:
        share = phase.shares[cta]
        position = self.cache.length + number
        if phase is self.plan.phases()[0] and layer == 0:
            rows = self.plan.phase("o").shares[cta]
            self.own[cta] = self._embedded(position)[rows.begin * TILE : rows.end * TILE].clone()
        seen = {}
        for piece in share.reads:
            if piece.buffer not in seen:
                seen[piece.buffer] = torch.full_like(self.words[self._key(piece.buffer, number)], torch.nan)
            source = self.words[self._key(piece.buffer, number)]
            seen[piece.buffer][piece.begin : piece.end] = source[piece.begin : piece.end]
        if layer == 0 and "hidden" in seen:
            seen["hidden"] = self._embedded(position)
        found = self._compute(phase.op, cta, share, layer, position, seen)
        for piece in share.writes:
            if piece.buffer in found:
                key = self._key(piece.buffer, number)
                self.words[key][piece.begin : piece.end] = found[piece.buffer][piece.begin : piece.end]
                self.tags[key][piece.begin : piece.end] = self._tag(piece.buffer, number, layer)
        for counter in share.arrives:
            self.counters[counter] = self.counters.get(counter, 0) + 1

    def _embedded(self, position: int) -> torch.Tensor:
        return self.weights.embed_tokens[self.tokens[position]]

    def _compute(
        self, op: Op, cta: int, share: Share, layer: int, position: int, seen: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The words that a CTA writes, among others that it does not."""
        if op == "next":
            return self._choose(seen["best"], position)
        if op == "lm_head":
            return self._head(cta, share, seen["final"])
        if share.units == 0:
            return {}
        if op == "norm":
            return self._norm(layer, seen)
        if op == "rope":
            return self._turn(share, layer, position, seen["qkv"])
        if op in ("attention", "rope_attention"):
            return self._attend(share, layer, position, seen)
        return self._product(op, cta, share, layer, seen)

    def _norm(self, layer: int, seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights, eps = self.weights.layers[layer], self.plan.config.rms_norm_eps
        if "hidden" in seen:
            return {"normed": rms_norm(seen["hidden"], weights.input_layernorm, eps)}
        return {"normed": rms_norm(seen["mid"], weights.post_attention_layernorm, eps)}

    def _product(self, op: Op, cta: int, share: Share, layer: int, seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = seen["normed"] if "normed" in seen else seen["act"] if op == "down" else None
        if op == "o":
            x = self._combined(seen["partial"])
        elif x is None:
            x = self._norm(layer, seen)["normed"]
        rows = self._multiply(op, cta, layer, x)
        first = share.begin * TILE
        if op == "gate_up":
            gate, up = rows.view(-1, 2, TILE // 2).unbind(1)
            return {"act": self._placed("act", share.begin * TILE // 2, (torch.nn.functional.silu(gate) * up).flatten())}
        if op in ("o", "down"):
            self.own[cta] = rows = self.own[cta] + rows
        names = {"qkv": ("qkv",), "o": ("mid",), "down": ("hidden", "final")}[op]
        return {name: self._placed(name, first, rows) for name in names}

    def _placed(self, name: str, first: int, values: torch.Tensor) -> torch.Tensor:
        room = torch.full((self.plan.buffer(name).words,), torch.nan, dtype=torch.float64)
        values = values[: len(room) - first]
        room[first : first + len(values)] = values
        return room

    def _multiply(self, op: Op, cta: int, layer: int, x: torch.Tensor) -> torch.Tensor:
        """A CTA's rows of a matrix times a vector, weights in the order of the stream."""
        plan = self.plan
        layers = sum(granules(plan, each, cta) for each in PRODUCTS[:-1])
        before = sum(granules(plan, each, cta) for each in PRODUCTS[: PRODUCTS.index(op)]) if op != "lm_head" else 0
        at = (int(self.stream.starts[cta]) + GRANULE * (layer * layers + before)) // 2
        width, deep = padded(columns(plan.config, op)), depth(plan.config)
        full = as_operands(torch.cat([x, x.new_zeros(width - len(x))])).view(-1, deep, WARPS, CHANNELS)
        found = []
        for begin, end in passes(plan.phase(op).shares[cta].units):
            shape = (len(full), end - begin, deep, WARPS, TILE, CHANNELS)
            size = (end - begin) * TILE * width
            part = self.stream.data[at : at + size].view(shape).double()
            found.append(torch.einsum("stdwrc,sdwc->tr", part, full).flatten())
            at += size
        return torch.cat(found) if found else x.new_zeros(0)

    def _heads(self, raw: torch.Tensor, head: int) -> torch.Tensor:
        group, size = self.plan.config.queries_per_key, self.plan.config.head_dim
        return raw[head * (group + 2) * size : (head + 1) * (group + 2) * size].view(group + 2, size)

    def _turned(self, raw: torch.Tensor, head: int, layer: int, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries ``[G, D]``, key and value ``[D]`` of a key head, normalised and turned."""
        weights, eps, heads = self.weights.layers[layer], self.plan.config.rms_norm_eps, self._heads(raw, head)
        cosine, sine = rotation(self.plan.config, torch.tensor([position]), torch.float64)
        q = rotate(rms_norm(heads[None, :-2], weights.q_norm, eps), cosine, sine)[0]
        k = rotate(rms_norm(heads[None, -2:-1], weights.k_norm, eps), cosine, sine)[0, 0]
        return q, k, heads[-1]

    def _store(self, layer: int, head: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.cache.keys[layer, head, position] = key
        self.cache.values[layer, head, position] = value

    def _turn(self, share: Share, layer: int, position: int, raw: torch.Tensor) -> dict[str, torch.Tensor]:
        queries = torch.full((self.plan.config.query_size,), torch.nan, dtype=torch.float64)
        by_head = queries.view(self.plan.config.num_key_value_heads, -1)
        for head in range(share.begin, share.end):
            q, key, value = self._turned(raw, head, layer, position)
            by_head[head] = q.flatten()
            self._store(layer, head, position, key, value)
        return {"q": queries, "cache": torch.zeros(self.plan.buffer("cache").words, dtype=torch.float64)}

    def _attend(self, share: Share, layer: int, position: int, seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        config, plan, positions = self.plan.config, self.plan, position + 1
        partial = torch.zeros(plan.buffer("partial").words, dtype=torch.float64)
        size = -(-positions // plan.used)
        for unit in range(share.begin, share.end):
            head, part = divmod(unit, plan.splits)
            if part >= plan.used:
                continue
            begin, end = part * size, min((part + 1) * size, positions)
            keys, values = self.cache.keys[layer, head, begin:end], self.cache.values[layer, head, begin:end]
            if "q" in seen:
                q = seen["q"].view(config.num_key_value_heads, -1, config.head_dim)[head]
            else:
                q, key, value = self._turned(seen["qkv"], head, layer, position)
                if end == positions:
                    self._store(layer, head, position, key, value)
            scores = (q @ keys.T) / config.head_dim**0.5
            slot = partial.view(-1, len(partial) // (config.num_key_value_heads * plan.splits))[unit]
            group = config.queries_per_key
            slot[: group * config.head_dim] = (scores.softmax(-1) @ values).flatten() if begin < end else 0
            slot[group * config.head_dim :][:group] = scores.logsumexp(-1)
        return {"partial": partial, "cache": torch.zeros(plan.buffer("cache").words, dtype=torch.float64)}

    def _combined(self, partial: torch.Tensor) -> torch.Tensor:
        """Attention over all positions ``[Q * D]``: parts weighted by their sums."""
        config = self.plan.config
        slots = partial.view(config.num_key_value_heads, self.plan.splits, -1)[:, : self.plan.used]
        group, size = config.queries_per_key, config.head_dim
        values = slots[..., : group * size].unflatten(-1, (group, size))
        shares = slots[..., group * size :][..., :group].softmax(1)
        return (values * shares[..., None]).sum(1).flatten()

    def _head(self, cta: int, share: Share, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """The candidate of a CTA: its token, or one that none takes."""
        config = self.plan.config
        normed = rms_norm(hidden, self.weights.norm, config.rms_norm_eps)
        rows = self._multiply("lm_head", cta, config.num_hidden_layers, normed)
        first = share.begin * TILE
        rows = rows[: config.vocab_size - first]
        self.logits[first : first + len(rows)] = rows
        best = torch.full((self.plan.ctas,), torch.nan, dtype=torch.float64)
        best[cta] = first + int(rows.argmax()) if len(rows) else -1
        return {"best": best}

    def _choose(self, best: torch.Tensor, position: int) -> dict[str, torch.Tensor]:
        """The likeliest of all candidates."""
        if best.isnan().any():
            raise PlanError(self.plan.rung, "a CTA chooses a token before all have said theirs")
        candidates = [int(each) for each in best if each >= 0]
        token = max(candidates, key=lambda each: float(self.logits[each]))
        if self.tokens.setdefault(position + 1, token) != token:
            raise PlanError(self.plan.rung, f"CTAs disagree about the token at position {position + 1}")
        return {}
