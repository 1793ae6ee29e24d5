"""Launches of the decode kernels emulated (played) in PyTorch, and requests that tests run with them on any machine.

``conftest.py`` makes its fixtures with :data:`MODEL` and :class:`Launch`. ``test_runtime.py`` and ``test_session.py`` run
requests.
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import torch

from onelaunch.decode import KVCache
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.model.sampling import Sampler, Sampling
from onelaunch.decode.runtime.engines import TOKENS_PER_LAUNCH, Request, TorchEngine
from onelaunch.decode.runtime.memory import ERROR
from tests.decode.models import SMALL

MODEL = replace(SMALL, eos_token_ids=())
"""Model whose sequences end only by their number of tokens."""

# A request is a prompt and the number of tokens to generate. The kernel's engine reads the short prompt of the first request by
# single launches, and the 40 tokens of the second by PyTorch's prefill. ``SAMPLED`` is greedy too, unless a test gives it
# sampling parameters.
GREEDY = {
    "first": Request((3, 4, 5), 3 * TOKENS_PER_LAUNCH + 5),
    "second": Request(tuple(range(10, 50)), 2 * TOKENS_PER_LAUNCH + 1),
}
SAMPLED = Request((9, 8), 20)

# Sampling parameters; "penalty" alone is still greedy.
CHOICES = {
    "penalty": Sampling(repetition_penalty=1.7),
    "drawn": Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2**40 + 3),
    "all": Sampling(temperature=1.5, top_k=100, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=5),
}


def chosen(words) -> Sampling:
    """Decode the kernel's packed sampling parameters, seven 32-bit words; ``None`` stands for greedy decoding.

    The fourth word is the largest distance of a logit from the largest one that min-p allows, in units of the temperature.
    """
    if words is None:
        return Sampling()
    packed = struct.pack("<7i", *words.tolist())
    temperature, top_k, top_p, farthest, penalty, low, high = struct.unpack("<fIfffII", packed)
    return Sampling(temperature, top_k, top_p, math.exp(-farthest), penalty, high << 32 | low)


class Launch:
    """Emulation of one kernel's launches in PyTorch, including their effect on its arguments.

    The fixture ``played`` of ``conftest.py`` lets variants load an instance instead of a compiled kernel.

    A test that expects an error sets ``stalls`` to the number of a launch, counted from 1. That launch reports ``error`` (by
    default 1, a wait that timed out) in the state, and logits of NaN, as do all later ones until the error is cleared.
    """

    def __init__(self, weights) -> None:
        self.weights, self.launches, self.stalls, self.error = weights, 0, -1, 1

    def __call__(self, grid, *arguments) -> None:
        # Those of Memory.arguments(), then the cache's capacity, tokens of the launch, position (-1: in the state), and a layer.
        *_, keys, values, first, tokens, _, _, _, state, logits, choices, seen, _, capacity, count, position, _ = arguments
        self.launches += 1
        assert logits.dtype is torch.float32
        if self.launches == self.stalls:
            state[ERROR] = self.error
        if state[ERROR]:
            logits.fill_(torch.nan)
            return
        at = int(state[0]) if position < 0 else position
        token = tokens[at : at + 1].long() if first is None else first
        sampler = Sampler(chosen(choices), token, MODEL.vocab_size)
        sampler.seen = seen
        for _ in range(count):
            assert at < capacity == keys.shape[2]
            found, _ = prefill(self.weights, token, KVCache(keys, values, at))
            token, at = sampler(found, at + 1), at + 1
            tokens[at] = int(token)
        logits.copy_(found)
        state[0] = at


def alone(weights, request):
    """Generate a request's tokens with the eager PyTorch engine, as the reference."""
    return list(TorchEngine(weights, "eager").run(request))
