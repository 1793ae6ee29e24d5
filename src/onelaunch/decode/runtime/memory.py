"""Device memory of the decode kernels: repacked weights, tables, and buffers for CTAs and launches to exchange data."""

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
"""Words of the kernel's state (position, tokens, barriers, error), and the index of the error."""

OUT_OF_RANGE = 2
"""Error of a sum out of the range of its words; every other error is a wait that was given up."""

COUNTER_WORDS = 32
"""Words between two counters, so that each has 128 bytes to itself."""


def norms_of(weights: Weights) -> torch.Tensor:
    """Return the factors of all norms: per layer those before attention and MLP, of queries and of keys; then the last."""
    parts = [
        part
        for layer in weights.layers
        for part in (layer.input_layernorm, layer.post_attention_layernorm, layer.q_norm, layer.k_norm)
    ]
    return torch.cat([*parts, weights.norm])


def rotations_of(weights: Weights, positions: int) -> torch.Tensor:
    """Return cosines, then sines, of each position's angles, ``[positions, D]`` float32."""
    return torch.cat(rotation(weights.config, torch.arange(positions, device=weights.device), torch.float32), -1).contiguous()


@dataclass(frozen=True, eq=False)
class Constants:
    """Tensors that depend on the model, on how a plan cuts its matrices, and on the context, and not on a sequence."""

    weights: Weights
    stream: Stream
    norms: torch.Tensor
    rotations: torch.Tensor

    @classmethod
    def of(cls, weights: Weights, stream: Stream, context: int) -> Constants:
        """Return the constants for sequences of up to ``context`` positions."""
        return cls(weights, stream, norms_of(weights), rotations_of(weights, context))

    def renew(self, plan: Plan) -> None:
        """Make them again from what the weights hold now, at the same addresses."""
        pack(self.weights, plan, self.stream)
        self.norms.copy_(norms_of(self.weights))


class Memory:
    """Buffers of one plan, which hold one sequence at a time."""

    def __init__(self, plan: Plan, constants: Constants, context: int, *, stamps: bool = False) -> None:
        device = constants.weights.device
        arrivals = arrivals_table(plan)
        self.plan, self.constants, self.context = plan, constants, context
        self.shares = torch.tensor(shares_table(plan), dtype=torch.int32, device=device)
        self.arrivals = torch.tensor(arrivals or [0], dtype=torch.int32, device=device)
        self.tokens = torch.zeros(context + 1, dtype=torch.int32, device=device)
        """Tokens by position; the kernel reads the one at its position and writes the next."""
        self.words = torch.zeros(word_offsets(plan)["end"], dtype=torch.float32, device=device)
        self.best = torch.zeros(3 * plan.ctas, dtype=torch.int64, device=device)
        """Candidates of each CTA: two sets that alternate, and the sampled ones."""
        self.tallies = torch.zeros(ROUNDS * BINS, dtype=torch.int64, device=device)
        self.counters = torch.zeros(COUNTER_WORDS * (1 + len(arrivals)), dtype=torch.int32, device=device)
        """Counters of grid barriers, then those of key heads."""
        self.state = torch.zeros(STATE_WORDS + stamps * plan.ctas * marker_words(plan), dtype=torch.int32, device=device)

    def reset(self) -> None:
        """Clear the buffers after an error, since some count on over launches."""
        for tensor in (self.words, self.best, self.tallies, self.counters, self.state):
            tensor.zero_()

    def arguments(
        self, cache: KVCache, logits: torch.Tensor, token: torch.Tensor | None = None, sampler: Sampler | None = None
    ) -> list[torch.Tensor | None]:
        """Return the tensors in the order of the kernel's arguments.

        Args:
            cache: Cache with room for the tokens that are made.
            logits: Logits to write, ``[V]`` float32.
            token: First token, ``[1]`` int64; ``None`` for the one that :attr:`tokens` has at the position.
            sampler: Rules for new tokens, with the tokens seen so far, to which the launch adds its own; ``None`` takes the
                largest logit.
        """
        constants = self.constants
        chosen = (None, None) if sampler is None else (sampler.choices, sampler.seen)
        return [
            constants.stream.data, constants.stream.starts, self.shares, self.arrivals, constants.weights.embed_tokens,
            constants.norms, constants.rotations, cache.keys, cache.values, token, self.tokens, self.words, self.best,
            self.counters, self.state, logits, *chosen, self.tallies,
        ]  # fmt: skip
