"""Tests of the token loops that studies time in PyTorch's variants.

They check the number of tokens, the first position, and that the tokens of ``Running`` equal those of ``TorchEngine``.
``Running`` times tokens that stay on the device; ``Served`` times tokens that arrive on the host. ``prose`` compares wording
with the test's entry in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and
``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``SMALL`` is a small float32 model.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch.decode import KVCache, decode_step, random_weights
from onelaunch.decode.loops import MAX_TOKENS, MIN_TOKENS, Running, Served, first_difference, tokens_per_run
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.runtime.engines import Request, TorchEngine
from onelaunch.errors import ContextExceeded
from tests.decode.models import SMALL

EAGER = decode_step.get("eager")


def arguments(config, prompt):
    """Return the arguments of the step after a prompt, with random weights."""
    weights = random_weights(config, 4)
    logits, cache = prefill(weights, torch.tensor(prompt), KVCache.empty(config, len(prompt)))
    return {"token": logits.argmax(keepdim=True), "weights": weights, "cache": cache}


def test_consecutive_steps_make_the_tokens_of_an_engine():
    given = arguments(SMALL, [3, 4, 5])
    running = Running(EAGER, given)
    assert running.seconds() > 0
    (tokens, logits) = running._made
    first, *rest = TorchEngine(given["weights"], "eager").run(Request((3, 4, 5), running.count + 1))
    assert (first, rest) == (int(given["token"]), tokens.tolist())
    assert int(logits.argmax()) == rest[-1]
    assert running.problem() is None


@pytest.mark.parametrize("position", [0, 1, 40])
def test_a_served_run_begins_at_the_position_and_is_read_to_its_end(position):
    cache = KVCache.empty(SMALL).with_length(position)
    served = Served(EAGER, {"token": torch.tensor([1]), "weights": random_weights(SMALL), "cache": cache})
    assert len(served.prompt) == max(position, 1)
    assert served.seconds() > 0
    assert len(served.tokens) == served.count + 1
    assert served.problem() is None


def test_the_context_length_bounds_a_run():
    short = replace(SMALL, max_position_embeddings=20)
    running = Running(EAGER, arguments(short, list(range(12))))
    assert running.count == 8
    full = KVCache.empty(short, 20).with_length(19)
    assert Running(EAGER, {"token": torch.tensor([1]), "weights": random_weights(short), "cache": full}).count == 1
    with pytest.raises(ContextExceeded):
        Running(EAGER, {"token": torch.tensor([1]), "weights": random_weights(short), "cache": full.with_length(20)})


# Seconds of a token, positions left in the context, and tokens of a run of some 50 ms: a multiple of 16 if the context has room.
@pytest.mark.parametrize(
    ("seconds", "room", "count"),
    [(1e-9, 10**6, MAX_TOKENS), (1.0, 10**6, MIN_TOKENS), (1e-3, 10**6, 48), (1e-3, 20, 20), (0.0, 3, 3)],
)
def test_runs_are_long_enough_to_be_timed(seconds, room, count):
    assert tokens_per_run(seconds, room) == count


def test_the_first_differing_token_is_reported(prose):
    assert first_difference((1, 2, 3), [1, 2, 3]) is None
    prose(first_difference((1, 2, 3), [1, 5, 4]))
