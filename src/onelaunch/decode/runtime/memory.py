"""What the decode kernels are handed: repacked weights, tables, memory through which CTAs and launches talk to each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onelaunch.decode.codegen.layout import BINS, arrivals_table, marker_words, shares_table, word_offsets
from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.rope import rotation
from onelaunch.decode.model.sampling import Sampler
from onelaunch.decode.model.weights import Weights
from onelaunch.decode.plan.packing import Stream, pack
from onelaunch.decode.plan.phases import ROUNDS, Plan

STATE_WORDS, ERROR = 4, 3
"""Position, tokens, barriers, error: as the kernel counts them."""

OUT_OF_RANGE = 2
"""The error of a sum that its words cannot hold; every other is a wait that was given up."""

COUNTER_WORDS = 32
"""A counter stands alone in 128 bytes."""


def norms_of(weights: Weights) -> torch.Tensor:
    """Factors of all norms: per layer those before attention and before the MLP, of queries, of keys; then the last one."""
    parts = [
        part
        for layer in weights.layers
        for part in (layer.input_layernorm, layer.post_attention_layernorm, layer.q_norm, layer.k_norm)
    ]
    return torch.cat([*parts, weights.norm])


def rotations_of(weights: Weights, positions: int) -> torch.Tensor:
    """``[positions, D]`` float32: cosines, then sines, of each position's angles."""
    return torch.cat(rotation(weights.config, torch.arange(positions, device=weights.device), torch.float32), -1).contiguous()


@dataclass(frozen=True, eq=False)
class Constants:
    """What stays the same for a model, a plan's cut and a context."""

    weights: Weights
    stream: Stream
    norms: torch.Tensor
    rotations: torch.Tensor

    @classmethod
    def of(cls, weights: Weights, stream: Stream, context: int) -> Constants:
        """For texts of up to ``context`` positions."""
        return cls(weights, stream, norms_of(weights), rotations_of(weights, context))

    def renew(self, plan: Plan) -> None:
        """From what the weights hold now, where it lies."""
        pack(self.weights, plan, self.stream)
        self.norms.copy_(norms_of(self.weights))


class Memory:
    """The rest, for one plan and one text at a time."""

    def __init__(self, plan: Plan, constants: Constants, context: int, *, stamps: bool = False) -> None:
        device = constants.weights.device
        arrivals = arrivals_table(plan)
        self.plan, self.constants, self.context = plan, constants, context
        self.shares = torch.tensor(shares_table(plan), dtype=torch.int32, device=device)
        self.arrivals = torch.tensor(arrivals or [0], dtype=torch.int32, device=device)
        self.tokens = torch.zeros(context + 1, dtype=torch.int32, device=device)
        """By position; the kernel reads the one at its position and writes the next."""
        self.words = torch.zeros(word_offsets(plan)["end"], dtype=torch.float32, device=device)
        self.best = torch.zeros(3 * plan.ctas, dtype=torch.int64, device=device)
        """Candidates of each CTA: two sets by turns, and those that are drawn."""
        self.tallies = torch.zeros(ROUNDS * BINS, dtype=torch.int64, device=device)
        self.counters = torch.zeros(COUNTER_WORDS * (1 + len(arrivals)), dtype=torch.int32, device=device)
        """Of barriers over the grid, then those of key heads."""
        self.state = torch.zeros(STATE_WORDS + stamps * plan.ctas * marker_words(plan), dtype=torch.int32, device=device)

    def reset(self) -> None:
        """As when made, after an error: what counts on over launches begins anew."""
        for tensor in (self.words, self.best, self.tallies, self.counters, self.state):
            tensor.zero_()

    def arguments(
        self, cache: KVCache, logits: torch.Tensor, token: torch.Tensor | None = None, sampler: Sampler | None = None
    ) -> list[torch.Tensor | None]:
        """Tensors in the order of the kernel's arguments.

        Args:
            cache: with room for the tokens that are made.
            logits: ``[V]`` float32, to be written.
            token: ``[1]`` int64, the first token; ``None`` for the one that :attr:`tokens` has at the position.
            sampler: how tokens are chosen, and the text's tokens so far, to which those are added that the launch makes;
                ``None`` for the likeliest.
        """
        constants = self.constants
        chosen = (None, None) if sampler is None else (sampler.choices, sampler.seen)
        return [
            constants.stream.data, constants.stream.starts, self.shares, self.arrivals, constants.weights.embed_tokens,
            constants.norms, constants.rotations, cache.keys, cache.values, token, self.tokens, self.words, self.best,
            self.counters, self.state, logits, *chosen, self.tallies,
        ]  # fmt: skip
