"""Tests of sampling: against plain definitions and ``transformers``, and draws against their probabilities.

``warp`` subtracts the largest logit, divides by the temperature, and excludes tokens (-inf) by top-k, top-p and min-p. The
token with the largest sum of warped logit and Gumbel noise is drawn. The noise is computed from a hash of seed, position and
token. ``Sampler`` does both for one sequence: ``sampler(logits, position)`` returns the token ``[1]`` at that position.
``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in
``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test
or the parameter of an entry is gone.
"""

from __future__ import annotations

import math
import struct

import pytest
import torch

from onelaunch.decode.model.sampling import WORD, Sampler, Sampling, gumbel, keys, penalise, recommended, warp
from onelaunch.errors import ArgumentError

# Sampling parameters. "more_than_there_are" has a top_k above the number of tokens.
CHOICES = {
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(temperature=1.0, top_k=5),
    "more_than_there_are": Sampling(temperature=1.0, top_k=1000),
    "top_p": Sampling(temperature=1.3, top_p=0.8),
    "hardly_any": Sampling(temperature=1.0, top_p=0.0),
    "min_p": Sampling(temperature=1.0, min_p=0.1),
    "all_of_them": Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.05),
}


def drawn_logits(seed: int, count: int = 100) -> torch.Tensor:
    """Return ``count`` random logits with a standard deviation of 3."""
    return 3 * torch.randn(count, generator=torch.Generator().manual_seed(seed))


def plainly_warped(logits: list[float], sampling: Sampling) -> list[float]:
    """Apply the definition of sampling parameters, one token after another. Excluded tokens get ``-inf``."""
    logits = [value / sampling.temperature for value in logits]
    if sampling.top_k:
        least = sorted(logits, reverse=True)[: sampling.top_k][-1]
        logits = [value if value >= least else -math.inf for value in logits]

    def chances() -> list[float]:
        weights = [math.exp(value - max(logits)) for value in logits]
        return [weight / sum(weights) for weight in weights]

    likely, total, kept = chances(), 0.0, set()
    for token in sorted(range(len(logits)), key=lambda token: -likely[token]):
        if kept and total >= sampling.top_p:
            break
        kept.add(token)
        total += likely[token]
    if sampling.top_p < 1:
        logits = [value if token in kept else -math.inf for token, value in enumerate(logits)]
    likely = chances()
    return [value if likely[token] >= sampling.min_p * max(likely) else -math.inf for token, value in enumerate(logits)]


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("seed", range(3))
def test_kept_tokens_match_the_definition(name, seed):
    logits = drawn_logits(seed)
    expected = torch.tensor(plainly_warped(logits.tolist(), CHOICES[name]))
    found = warp(logits, CHOICES[name])
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.allclose(found, expected - expected.max())


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "hardly_any"])
@pytest.mark.parametrize("seed", range(3))
def test_kept_tokens_match_transformers(name, seed):
    theirs = pytest.importorskip("transformers", reason="needs the extra decode")
    sampling, logits = CHOICES[name], drawn_logits(seed)[None]
    warpers = [theirs.TemperatureLogitsWarper(sampling.temperature)]
    warpers += [theirs.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [theirs.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    warpers += [theirs.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    expected = logits
    for each in warpers:
        expected = each(torch.zeros(1, 1, dtype=torch.int64), expected)
    assert torch.allclose(warp(logits[0], sampling), expected[0] - expected.max())


@pytest.mark.parametrize("temperature", [1e-20, 1e-40, 1e-300])
def test_at_the_lowest_temperatures_the_likeliest_token_is_drawn(temperature):
    logits = drawn_logits(1) - 50
    for kept in ({}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}):
        drawn = Sampler(Sampling(temperature=temperature, seed=3, **kept), torch.tensor([0]), 100)(logits, 7)
        assert drawn.tolist() == [int(logits.argmax())]


def test_the_repetition_penalty_matches_transformers():
    theirs = pytest.importorskip("transformers", reason="needs the extra decode")
    logits, tokens = drawn_logits(1), torch.tensor([[3, 50, 50, 7]])
    seen = torch.zeros(100, dtype=torch.bool).index_fill(0, tokens[0], 1)
    expected = theirs.RepetitionPenaltyLogitsProcessor(1.3)(tokens, logits[None].clone())[0]
    assert torch.allclose(penalise(logits, seen, 1.3), expected)


def test_the_likeliest_token_is_never_excluded():
    logits = torch.tensor([0.0, 5.0, 5.0, -2.0])
    for sampling in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=0.0), Sampling(1.0, min_p=1.0), Sampling(1e-4)):
        assert not warp(logits, sampling)[1].isinf()
        token = Sampler(sampling, torch.tensor([0]), 4)(logits, 9)
        assert token.item() in (1, 2)


def test_greedy_takes_the_largest_and_the_first_of_equals():
    token = Sampler(Sampling(), torch.tensor([0]), 4)(torch.tensor([0.0, 5.0, 5.0, -2.0]), 1)
    assert token.tolist() == [1]
    assert token.dtype == torch.int64


def test_the_repetition_penalty_covers_prompt_and_new_tokens():
    sampler = Sampler(Sampling(repetition_penalty=10.0), torch.tensor([1]), 4)
    logits = torch.tensor([3.0, 5.0, 4.0, -1.0])
    assert [sampler(logits, at).item() for at in range(4)] == [2, 0, 1, 1]
    assert logits.tolist() == [3.0, 5.0, 4.0, -1.0]


@pytest.mark.parametrize("name", ["temperature", "all_of_them"])
def test_tokens_are_drawn_as_often_as_they_are_likely(name):
    """Compare 20,000 draws by chi squared: more than 5 standard deviations would be a wrong distribution. The seed is fixed."""
    sampling, logits, draws = CHOICES[name], drawn_logits(5, 40), 20_000
    warped = warp(logits, sampling)
    a, b = keys(11, torch.arange(draws))
    noise = torch.stack([gumbel(11, at, 40, "cpu") for at in range(3)])
    assert torch.equal(noise, gumbel(11, torch.arange(3)[:, None], 40, "cpu"))
    assert a.unique().numel() == b.unique().numel() == draws
    counts = torch.bincount((warped + gumbel(11, torch.arange(draws)[:, None], 40, "cpu")).argmax(1), minlength=40)
    expected = warped.softmax(0) * draws
    assert (counts[expected == 0] == 0).all()
    tested = expected > 5
    chi_squared = ((counts - expected).square() / expected)[tested].sum().item()
    degrees = int(tested.sum()) - 1
    assert abs(chi_squared - degrees) < 5 * math.sqrt(2 * degrees)


def test_noise_is_gumbel_and_independent_between_positions_and_tokens():
    noise = gumbel(3, torch.arange(200)[:, None], 1000, "cpu").double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    for one, other in (
        (noise[1:], noise[:-1]),
        (noise[:, 1:], noise[:, :-1]),
        (noise, gumbel(4, torch.arange(200)[:, None], 1000, "cpu")),
    ):
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.double().flatten()]))[0, 1].item()
        assert abs(correlation) < 0.012  # five standard deviations of 200,000 independent pairs


def test_noise_follows_the_documented_hash():
    """Compute the noise in plain integers, as a kernel in another language does."""

    def mix(word: int) -> int:
        word ^= word >> 16
        word = word * 0x7FEB352D & WORD
        word ^= word >> 15
        word = word * 0x846CA68B & WORD
        return word ^ word >> 16

    seed, position, token = 2**40 + 17, 1234, 567
    first = mix(mix(seed & WORD) ^ seed >> 32)
    a, b = mix(position ^ first), mix((position + mix((first + 0x9E3779B9) & WORD)) & WORD)
    v = (mix(mix((token + a) & WORD) ^ b) + 0.5) / 2**32
    expected = -math.log(-math.log1p(-v))
    assert gumbel(seed, position, 600, "cpu")[token].item() == pytest.approx(expected, rel=1e-5)


def test_packed_parameters_hold_every_choice():
    sampling = Sampling(0.5, top_k=7, top_p=0.25, min_p=0.1, repetition_penalty=2.0, seed=2**62 + 2**31 + 9)
    packed = struct.pack("<7i", *sampling.words(100))
    temperature, top_k, top_p, farthest, penalty, low, high = struct.unpack("<fIfffII", packed)
    assert (temperature, top_k, top_p, penalty, high << 32 | low) == (0.5, 7, 0.25, 2.0, sampling.seed)
    assert farthest == pytest.approx(-math.log(0.1))
    assert Sampling(0.5, top_k=100).words(100)[1] == 0
    assert struct.unpack("<f", struct.pack("<i", Sampling(0.5).words(100)[3])) == (math.inf,)
    assert Sampling(0.5, min_p=1.0).words(100)[3] == 0
    assert struct.unpack("<f", struct.pack("<i", Sampling(1e-300).words(100)[0]))[0] == pytest.approx(1e-30)
    assert [Sampling().plain, Sampling(top_k=3).plain, Sampling(0.1).plain, Sampling(repetition_penalty=2.0).plain] == [
        True, True, False, False,
    ]  # fmt: skip
    prompt = torch.tensor([1])
    assert Sampler(Sampling(), prompt, 4).choices is None
    assert Sampler(sampling, prompt, 100).choices.tolist() == sampling.words(100)


def test_the_seed_decides():
    def text(seed: int) -> list[int]:
        sampler = Sampler(Sampling(1.0, seed=seed), torch.tensor([0]), 100)
        return [sampler(drawn_logits(at) / 3, at).item() for at in range(30)]

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(1) != text(1 + 2**32)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1e39}, "temperature"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"repetition_penalty": 1e-60}, "repetition_penalty is 1e-60"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -1}, "min_p is -1"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -1}, "seed"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
)  # fmt: skip
def test_errors_name_the_wrong_choice(choice, message, prose):
    with prose.raises(ArgumentError, match=message):
        Sampling(**choice)


def test_recommended_settings_of_a_model():
    qwen3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "pad_token_id": 1}
    assert recommended(qwen3) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert recommended({"do_sample": True, "min_p": None, "top_k": None}) == {"temperature": 1.0, "top_k": 50}
    assert recommended({"temperature": 0.6, "repetition_penalty": 1.1}) == {"repetition_penalty": 1.1}
    assert recommended({}) == {}


@pytest.mark.gpu
def test_a_gpu_draws_the_tokens_of_a_cpu_without_synchronizing():
    logits, sampling = drawn_logits(2, 5000), Sampling(0.9, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=7)
    on_gpu, on_cpu = logits.cuda(), Sampler(sampling, torch.tensor([1, 2]), 5000)
    sampler = Sampler(sampling, torch.tensor([1, 2], device="cuda"), 5000)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = [sampler(on_gpu, at) for at in range(50)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cat(tokens).tolist() == [on_cpu(logits, at).item() for at in range(50)]
