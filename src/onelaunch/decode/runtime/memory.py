"""Device memory of the decode kernels: repacked weights, tables, and the buffers through which CTAs exchange data.

``kernels.py`` allocates it, and ``session.py`` passes it to each launch. After a write to the weights, ``models.py`` rewrites
the repacked ones by :meth:`Constants.renew`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onelaunch.decode.codegen.layout import BINS, arrivals_table, assignments_table, marker_words, word_offsets
from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.rope import rotation
from onelaunch.decode.model.sampling import Sampler
from onelaunch.decode.model.weights import ModelWeights
from onelaunch.decode.plan.packing import Stream, pack, row_order
from onelaunch.decode.plan.phases import ROUNDS, Plan
from onelaunch.decode.runtime.packed import PackedWeights

STATE_WORDS, ERROR = 4, 3
"""Number of words of the kernel's state (position, tokens, barriers, error), and the index of the error word.

The enumerations in ``codegen/kernels/step.cu`` have the same values.
"""

OUT_OF_RANGE = 2
"""Error code of a fixed-point sum that left its range. The only other code means that a wait timed out."""

_COUNTER_WORDS = 32
"""Distance between two counters in 32-bit words, so that each counter has 128 bytes to itself."""


def _parameters_of(weights: ModelWeights) -> torch.Tensor:
    """Return the factors of all norms and all biases in one row, in the order of ``codegen/layout.py``, ``parameter_offsets``.

    The factors of the norm before the LM head come last.
    """
    order = row_order(weights.config, "qkv").flatten().to(weights.device)
    parts = []
    for number in range(weights.config.num_hidden_layers):
        vectors = weights.vectors(number)
        names = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
        parts += [vectors[name] for name in names if name in vectors]
        biases = [vectors[name] for name in ("q_bias", "k_bias", "v_bias") if name in vectors]
        parts += [torch.cat(biases)[order]] if biases else []
        parts += [vectors["o_bias"]] if "o_bias" in vectors else []
    return torch.cat([*parts, weights.norm])


def _rotations_of(weights: ModelWeights, positions: int) -> torch.Tensor:
    """Return the RoPE table, ``[positions, D]`` float32: cosines, then sines, of each position's angles.

    If some layers do not rotate, a row of the identity precedes it: ``[1 + positions, D]``.
    """
    config, numbers = weights.config, torch.arange(positions, device=weights.device)
    table = torch.cat(rotation(config, numbers, torch.float32), -1)
    if config.unrotated_layers:
        identity = table.new_zeros(1, config.head_dim)
        identity[:, : config.head_dim // 2] = 1
        table = torch.cat([identity, table])
    return table.contiguous()


@dataclass(frozen=True, eq=False)
class Constants:
    """Tensors of a model that kernels only read, for one division of its matrices among CTAs. All sequences share them."""

    weights: ModelWeights
    stream: Stream
    """Repacked weights: one contiguous stream per CTA."""
    parameters: torch.Tensor
    """Factors of all norms, and all biases, see :func:`_parameters_of`."""
    rotations: torch.Tensor
    """RoPE table, see :func:`_rotations_of`."""

    @classmethod
    def of(cls, weights: ModelWeights, stream: Stream, context: int) -> Constants:
        """Return the constants for sequences of up to ``context`` positions."""
        return cls(weights, stream, _parameters_of(weights), _rotations_of(weights, context))

    def renew(self, plan: Plan) -> None:
        """Rewrite the stream, norms and biases in place from the current weights; CUDA graphs may hold their addresses.

        ``plan`` is any plan with the division of matrices that the stream has.
        """
        if not (isinstance(self.weights, PackedWeights) and self.stream is self.weights.stream):
            pack(self.weights, plan, self.stream)
        self.parameters.copy_(_parameters_of(self.weights))


class Memory:
    """Buffers of one plan. They hold the state of one sequence at a time.

    Args:
        plan: Plan whose kernel uses the buffers.
        constants: Repacked weights and tables.
        context: Largest number of positions of a sequence.
        markers: Flag to add room for profile markers to :attr:`state`.
    """

    def __init__(self, plan: Plan, constants: Constants, context: int, *, markers: bool = False) -> None:
        device = constants.weights.device
        arrivals = arrivals_table(plan)
        self.constants = constants
        self.assignments = torch.tensor(assignments_table(plan), dtype=torch.int32, device=device)
        """Work assignment of each CTA in each phase: first unit and one past the last."""
        self.arrivals = torch.tensor(arrivals or [0], dtype=torch.int32, device=device)
        """Number of CTAs that increment each semaphore per use; one zero for a plan without semaphores."""
        self.tokens = torch.zeros(context + 1, dtype=torch.int32, device=device)
        """Tokens by position; the kernel reads the token at its position and writes the next one."""
        self.words = torch.zeros(word_offsets(plan)["end"], dtype=torch.float32, device=device)
        """Float32 words through which CTAs exchange vectors; some plans use them as flag-in-data words."""
        self.best = torch.zeros(3 * plan.ctas, dtype=torch.int64, device=device)
        """Best token candidate of each CTA: two sets that alternate from token to token, then the set for sampled tokens."""
        self.histograms = torch.zeros(ROUNDS * BINS, dtype=torch.int64, device=device)
        """Histogram of each radix-select pass, ``[ROUNDS][BINS]``; zero between tokens."""
        self.counters = torch.zeros(_COUNTER_WORDS * (1 + len(arrivals)), dtype=torch.int32, device=device)
        """Counter of the grid barrier, then the semaphores of key heads."""
        self.state = torch.zeros(STATE_WORDS + markers * plan.ctas * marker_words(plan), dtype=torch.int32, device=device)
        """State of the kernel: position, tokens so far, grid barriers so far, error; then profile markers, if there are any."""

    def reset(self) -> None:
        """Clear the buffers after an error, since counters and tags continue from launch to launch."""
        for tensor in (self.words, self.best, self.histograms, self.counters, self.state):
            tensor.zero_()

    def arguments(
        self, cache: KVCache, logits: torch.Tensor, token: torch.Tensor | None = None, sampler: Sampler | None = None
    ) -> list[torch.Tensor | None]:
        """Return the tensors in the order of the kernel's arguments.

        Args:
            cache: Cache with room for the tokens that the launch generates.
            logits: Output for the last token's logits, ``[V]`` float32.
            token: First token, ``[1]`` int64; ``None`` for the token that :attr:`tokens` has at the position.
            sampler: Sampling parameters and the tokens seen so far, to which the launch adds its own; ``None`` takes the
                largest logit.
        """
        constants = self.constants
        sampling = (None, None) if sampler is None else (sampler.choices, sampler.seen)
        return [
            constants.stream.data, constants.stream.starts, self.assignments, self.arrivals, constants.weights.embed_tokens,
            constants.parameters, constants.rotations, cache.keys, cache.values, token, self.tokens, self.words, self.best,
            self.counters, self.state, logits, *sampling, self.histograms,
        ]  # fmt: skip
