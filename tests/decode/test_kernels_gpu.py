"""Tests of the decode kernels on a GPU: every variant against the float64 oracle, repeatability, and many tokens per launch.

Each optimization level of the decode megakernel (``level``) is a variant of ``decode_step``.
A session owns the buffers of a loaded kernel. A sequence is the decoding state of one request; its ``step(n)`` launches n tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from onelaunch.decode import KVCache, ModelConfig, decode_step, random_weights
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.model.sampling import Sampler, Sampling
from onelaunch.decode.plan.levels import LEVELS
from onelaunch.decode.runtime.engines import Request, TorchEngine, make_engine
from onelaunch.device.hardware import is_hopper
from onelaunch.workbench.verify import Judge

pytestmark = pytest.mark.gpu

# Sizes of models. Those of Qwen3 models have fewer layers and tokens than the original.
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
    "1.7B": {"layers": 3, "hidden": 2048, "intermediate": 6144, "heads": 16, "kv_heads": 8, "head_dim": 128, "vocabulary": 5000},
    "4B": {"layers": 2, "hidden": 2560, "intermediate": 9728, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocabulary": 5000},
}
POSITIONS = (0, 1, 2, 63, 64, 65, 1000)
"""Positions of the tested tokens. From position 64 on there is more than one KV split in the levels that split."""

# Model of the tests that generate sequences.
GENERATED = ModelConfig(2000, 256, 768, 4, 8, 4, 64, tie_word_embeddings=True, max_position_embeddings=2048)

LADDER = {"eight_barriers": (8, 2), "redundant_norm": (6, 2), "head_local": (4, 2), "fused_phases": (4, 2)}
"""Grid barriers per layer and after the last layer, by variant. The other variants have none."""

each_level = pytest.mark.parametrize("level", LEVELS)


@pytest.fixture(autouse=True)
def runs_here(request, device):
    """Skip without a Hopper GPU, and on one require that the test's level is supported."""
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    level = request.node.callspec.params["level"] if hasattr(request.node, "callspec") else "streaming"
    case = decode_step.case("bfloat16", **MODELS["small"], position=1)
    assert decode_step.get(level).why_not(decode_step.query(case, str(device))) is None


@each_level
@pytest.mark.parametrize("model", MODELS)
def test_logits_keys_and_values(level, model, device):
    judge = Judge()
    for position in POSITIONS:
        case = decode_step.case("bfloat16", **MODELS[model], position=position, tied=model != "untied")
        verdict = judge.judge(decode_step, case, variant=level, device=device)
        assert verdict.ok, (position, verdict.problems)


@each_level
@pytest.mark.parametrize(("model", "position"), [("0.6B", 700), ("1.7B", 1), ("1.7B", 1000)])
def test_results_are_repeatable(level, model, position, device):
    case = decode_step.case("bfloat16", **MODELS[model], position=position)
    reading = decode_step.make_inputs(case, device, 3)
    first = [each.clone() for each in decode_step(**reading.arguments, variant=level)]
    for _ in range(50):
        for one, other in zip(first, decode_step(**reading.arguments, variant=level), strict=True):
            assert torch.equal(one, other)


@each_level
def test_a_captured_step_follows_new_contents_of_the_weights(level, device):
    """A CUDA graph stays valid when the weights are written to, and then gives the new weights' results.

    It also stays valid beside other variants, whose kernels are packed from the same weights.
    """
    case = decode_step.case("bfloat16", **MODELS["untied"], position=70, tied=False)
    arguments = decode_step.make_inputs(case, device, 3).arguments
    other = decode_step.make_inputs(case, device, 4).arguments["weights"]
    decode_step(**arguments, variant=level)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = decode_step(**arguments, variant=level)[0]
    for mine, theirs in zip(arguments["weights"].tensors().values(), other.tensors().values(), strict=True):
        mine.copy_(theirs)
    decode_step(**arguments, variant="streaming")
    expected = decode_step(**{**arguments, "weights": other}, variant=level)[0]
    torch.cuda.empty_cache()  # gives back memory that the graph reads but nothing keeps; its replay would fail
    logits.zero_()
    graph.replay()
    torch.cuda.synchronize(device)
    assert torch.equal(logits, expected)


@each_level
def test_barriers_per_token_of_each_variant(level, device):
    from onelaunch.decode.runtime.kernels import session_for

    weights = random_weights(GENERATED, 1, device)
    session, cache = session_for(weights, level), KVCache.empty(GENERATED, 100, device).with_length(70)
    layers, tail = LADDER.get(level, (0, 0))
    for _ in range(2):
        assert session.barriers(torch.tensor([3], device=device), cache) == layers * GENERATED.num_hidden_layers + tail


def run_launches_back_to_back(sequence, count, each):
    """Return ``count`` tokens of a sequence, ``each`` per launch, and wait for none before all launches are queued."""
    pending = []
    for _ in range(count // each):
        with sequence:
            sequence.step(each)
            pending.append(sequence.copy_tokens())
    return [token for copy in pending for token in copy.wait()]


@each_level
def test_tokens_of_one_launch_are_those_of_single_steps(level, device):
    from onelaunch.decode.runtime.kernels import session_for

    weights = random_weights(GENERATED, 1, device)
    prompt = torch.randint(GENERATED.vocab_size, (50,), device=device)
    logits, cache = prefill(weights, prompt, KVCache.empty(GENERATED, 512, device))
    token = logits.argmax()[None]
    count, session = 300, session_for(weights, level)
    made = run_launches_back_to_back(session.sequence(cache, token), count, 30)
    session.check()
    fresh = replace(cache, keys=cache.keys.clone(), values=cache.values.clone())
    for expected in made:
        logits, _, _ = decode_step(token, weights, fresh, variant=level)
        fresh = fresh.with_length(fresh.length + 1)
        token = logits.argmax()[None]
        assert int(token) == expected


# Sampling parameters, which the kernels apply on the device.
CHOICES = {
    "temperature": Sampling(temperature=0.9, seed=1),
    "top_k": Sampling(temperature=1.5, top_k=20, seed=2),
    "top_p": Sampling(temperature=1.2, top_p=0.8, seed=3),
    "min_p": Sampling(temperature=1.5, min_p=0.1, seed=4),
    "penalty": Sampling(repetition_penalty=1.5),
    "all": Sampling(temperature=1.3, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=2**40 + 5),
}
IN_ONE_LAUNCH = [level for level, options in LEVELS.items() if not options.separate]


@pytest.mark.parametrize("level", IN_ONE_LAUNCH)
@pytest.mark.parametrize("name", CHOICES)
def test_drawn_tokens_are_the_samplers_on_the_same_logits(level, name, device):
    """The sampler runs on the CPU, which divides as the kernels do; on a GPU, PyTorch multiplies instead.

    Two scores, or a sum and top-p, that agree to six digits could change places. The seeds are fixed, so that none does.
    """
    from onelaunch.decode.runtime.kernels import session_for

    weights, sampling, count = random_weights(GENERATED, 1, device), CHOICES[name], 200
    prompt = torch.randint(GENERATED.vocab_size, (50,), device=device, generator=torch.Generator(device).manual_seed(3))
    logits, cache = prefill(weights, prompt, KVCache.empty(GENERATED, 512, device))
    session, texts = session_for(weights, level), []
    for _ in range(2):
        sampler = Sampler(sampling, prompt, GENERATED.vocab_size)
        token = sampler(logits, cache.length)
        sequence = session.sequence(cache, token, sampler)
        texts.append(run_launches_back_to_back(sequence, count - 25, 25))
        with sequence:
            last = sequence.step(25)
            texts[-1] += sequence.copy_tokens().wait()
        session.check()
    assert texts[0] == texts[1], "equal seeds give equal tokens"
    assert not session.memory.histograms.any()
    on_host = Sampler(sampling, torch.cat([prompt, token]).cpu(), GENERATED.vocab_size)
    fresh = replace(cache, keys=cache.keys.clone(), values=cache.values.clone())
    for known in texts[0]:
        logits, _, _ = decode_step(token, weights, fresh, variant=level)
        fresh = fresh.with_length(fresh.length + 1)
        assert int(on_host(logits.cpu(), fresh.length)) == known, fresh.length
        token = torch.tensor([known], device=device)
    assert torch.equal(last, logits), "returned logits are the model's, without the penalty"


@pytest.mark.parametrize("level", IN_ONE_LAUNCH)
def test_tokens_are_drawn_as_often_as_they_are_likely(level, device):
    """Compare 4000 draws after one token, with as many seeds, by chi squared: five standard deviations off would be wrong."""
    from onelaunch.decode.runtime.kernels import session_for

    config = replace(GENERATED, vocab_size=64, num_hidden_layers=1)
    weights, draws, position = random_weights(config, 1, device), 4000, 5
    session, cache = session_for(weights, level), KVCache.empty(config, 16, device).with_length(position)
    token, found = torch.tensor([3], device=device), []
    for seed in range(draws):
        with session.sequence(cache, token, Sampler(Sampling(temperature=0.8, seed=seed), token, 64)) as sequence:
            logits = sequence.step(1)
            found.append(sequence.tokens()[0].clone())
    session.check()
    counts = torch.bincount(torch.stack(found).cpu(), minlength=64)
    expected = (logits.double() / 0.8).softmax(0).cpu() * draws
    tested = expected > 5
    assert tested.sum() > 10
    chi_squared = ((counts - expected).square() / expected)[tested].sum().item()
    degrees = int(tested.sum()) - 1
    assert abs(chi_squared - degrees) < 5 * math.sqrt(2 * degrees)


@each_level
@pytest.mark.parametrize("name", ["temperature", "all"])
def test_engines_draw_the_tokens_of_single_steps(level, name, device):
    weights, request = random_weights(GENERATED, 3, device), Request(tuple(range(1, 20)), 60, CHOICES[name])
    assert list(make_engine(weights, level).run(request)) == list(TorchEngine(weights, level).run(request))


def test_streaming_does_not_hang(device):
    from onelaunch.decode.runtime.kernels import session_for

    weights = random_weights(GENERATED, 2, device)
    session = session_for(weights, "streaming")
    cache, token = KVCache.empty(GENERATED, 2048, device), torch.tensor([1], device=device)
    samplers = [None] * 5 + [Sampler(sampling, token, GENERATED.vocab_size) for sampling in CHOICES.values()]
    for sampler in samplers:
        assert len(run_launches_back_to_back(session.sequence(cache, token, sampler), 2000, 100)) == 2000
        session.check()
