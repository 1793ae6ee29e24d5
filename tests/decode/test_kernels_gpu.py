"""The decode kernels on a GPU: every rung against the float64 oracle, again and again the same, many tokens in a launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch.decode import KVCache, ModelConfig, decode_step, random_weights
from onelaunch.decode.model import prefill
from onelaunch.decode.rungs import RUNGS
from onelaunch.hardware import is_hopper
from onelaunch.workbench.verify import Judge

pytestmark = pytest.mark.gpu

MODELS = {
    "small": {"layers": 2, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocabulary": 300},
    "0.6B": {
        "layers": 2,
        "hidden": 1024,
        "intermediate": 3072,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "vocabulary": 20_000,
    },
    "untied": {"layers": 3, "hidden": 512, "intermediate": 1536, "heads": 8, "kv_heads": 2, "head_dim": 64, "vocabulary": 5003},
    "1.7B": {"layers": 1, "hidden": 2048, "intermediate": 6144, "heads": 16, "kv_heads": 8, "head_dim": 128, "vocabulary": 5000},
    "4B": {"layers": 1, "hidden": 2560, "intermediate": 9728, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocabulary": 5000},
}
POSITIONS = (0, 1, 2, 63, 64, 65, 1000)

GENERATED = ModelConfig(2000, 256, 768, 4, 8, 4, 64, tie_word_embeddings=True, max_position_embeddings=2048)

LADDER = {"eight_barriers": (8, 2), "redundant_norm": (6, 2), "head_local": (4, 2), "fused_phases": (4, 2)}
"""Barriers over the grid of a layer, and of what comes behind the last one; the other rungs have none."""

each_rung = pytest.mark.parametrize("rung", RUNGS)


@pytest.fixture(autouse=True)
def runs_here(request, device):
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    rung = request.node.callspec.params["rung"] if hasattr(request.node, "callspec") else "streaming"
    case = decode_step.case("bfloat16", **MODELS["small"], position=1)
    assert decode_step.get(rung).why_not(decode_step.query(case, str(device))) is None


@each_rung
@pytest.mark.parametrize("model", MODELS)
def test_logits_keys_and_values(rung, model, device):
    judge = Judge()
    for position in POSITIONS:
        case = decode_step.case("bfloat16", **MODELS[model], position=position, tied=model != "untied")
        verdict = judge.judge(decode_step, case, variant=rung, device=device)
        assert verdict.ok, (position, verdict.problems)


@each_rung
def test_the_same_again(rung, device):
    case = decode_step.case("bfloat16", **MODELS["0.6B"], position=700)
    reading = decode_step.make_inputs(case, device, 3)
    first = [each.clone() for each in decode_step(**reading.arguments, variant=rung)]
    for _ in range(50):
        for one, other in zip(first, decode_step(**reading.arguments, variant=rung), strict=True):
            assert torch.equal(one, other)


@each_rung
def test_barriers_are_those_of_the_ladder(rung, device):
    from onelaunch.decode.launch import kernels_for

    weights = random_weights(GENERATED, 1, device)
    kernels, cache = kernels_for(weights, rung), KVCache.empty(GENERATED, 100, device).with_length(70)
    layers, tail = LADDER.get(rung, (0, 0))
    for _ in range(2):
        assert kernels.barriers(torch.tensor([3], device=device), cache) == layers * GENERATED.num_hidden_layers + tail


@each_rung
def test_many_tokens_of_a_launch_are_those_of_single_steps(rung, device):
    from onelaunch.decode.launch import kernels_for

    weights = random_weights(GENERATED, 1, device)
    prompt = torch.randint(GENERATED.vocab_size, (50,), device=device)
    logits, cache = prefill(weights, prompt, KVCache.empty(GENERATED, 512, device))
    token = logits.argmax()[None]
    count, kernels = 300, kernels_for(weights, rung)
    kernels.place(cache.length, token)
    for _ in range(count // 30):
        kernels.tokens(cache, 30)
    kernels.check()
    made = kernels.memory.tokens[cache.length + 1 : cache.length + 1 + count].tolist()
    fresh = replace(cache, keys=cache.keys.clone(), values=cache.values.clone())
    for expected in made:
        logits, _, _ = decode_step(token, weights, fresh, variant=rung)
        fresh = fresh.with_length(fresh.length + 1)
        token = logits.argmax()[None]
        assert int(token) == expected


def test_streaming_does_not_hang(device):
    from onelaunch.decode.launch import kernels_for

    weights = random_weights(GENERATED, 2, device)
    kernels = kernels_for(weights, "streaming")
    cache = KVCache.empty(GENERATED, 2048, device)
    for _ in range(5):
        kernels.place(0, torch.tensor([1], device=device))
        for _ in range(20):
            kernels.tokens(cache, 100)
        kernels.check()
