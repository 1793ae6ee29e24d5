"""Tests of token sampling in the decode kernels: their source on the CPU against PyTorch's Sampler on the kernels' logits.

Both do the same float32 operations, except for the last bit of exponentials and logarithms and for top-p's sums, which the
kernels make in fixed point. Tokens are therefore equal unless two scores, or a sum and top-p, agree to six digits. The seeds
are fixed, and none is such a case.

``libraries`` is a folder in which a test run compiles each library once. ``MODELS`` are small models by name. ``TINY`` is the
first of ``MODELS``. ``packed`` packs weights for a plan. ``weights_and_caches`` returns weights and a KV cache, in bfloat16 and
in float64. ``HostKernel`` launches a plan's kernel on the emulated GPU. ``set_position`` puts a sequence at a position.
``thorough_but`` marks all parameters but the named ones ``thorough``: they do not run in ``make test``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch.decode.model.sampling import Sampler, Sampling
from onelaunch.decode.plan.levels import LEVELS, plan_for
from onelaunch.decode.runtime.memory import ERROR, Constants, Memory
from tests.decode.host_machine import HostKernel, needs_compiler, set_position
from tests.decode.plans import MODELS, TINY, packed, weights_and_caches
from tests.thorough import thorough_but

pytestmark = needs_compiler

MODEL = replace(TINY, num_hidden_layers=1)
POSITION, FIRST = 20, 9
"""Position of the first token of a launch, and that token."""
CHOICES = {
    "temperature": Sampling(temperature=0.7, seed=1),
    "another seed": Sampling(temperature=0.7, seed=2**62 + 5),
    "hot": Sampling(temperature=30.0, seed=3),
    "cold": Sampling(temperature=1e-30, seed=3),
    "top_k": Sampling(temperature=9.0, top_k=3, seed=4),
    "top_k of one": Sampling(temperature=5.0, top_k=1, seed=5),
    "top_k of more than there are": Sampling(temperature=2.0, top_k=10_000, seed=6),
    "top_p": Sampling(temperature=2.0, top_p=0.7, seed=7),
    "top_p of hardly any": Sampling(temperature=5.0, top_p=1e-6, seed=8),
    "top_p of nothing": Sampling(temperature=5.0, top_p=0.0, seed=8),
    "min_p": Sampling(temperature=3.0, min_p=0.3, seed=9),
    "min_p of one": Sampling(temperature=3.0, min_p=1.0, seed=9),
    "penalty": Sampling(repetition_penalty=3.0),
    "reward": Sampling(temperature=1.0, repetition_penalty=0.5, seed=10),
    "all": Sampling(temperature=1.5, top_k=40, top_p=0.8, min_p=0.05, repetition_penalty=1.3, seed=11),
}


def kernel_and_memory(weights, plan, libraries):
    """Return a plan's kernel for the CPU, and its buffers, for sequences of up to 512 positions."""
    return HostKernel(plan, libraries), Memory(plan, Constants.of(weights, packed(weights, plan), 512), 512)


def sampler_of(sampling, config):
    """Return the sampler of a sequence that holds some tokens twice."""
    return Sampler(sampling, torch.tensor([1, FIRST, 70, 70, FIRST]), config.vocab_size)


def step_by_step(kernel, memory, cache, sampling, count):
    """Return the tokens that PyTorch draws from the logits of the kernel's single steps, the last logits, and the sampler."""
    sampler, cache, tokens = sampler_of(sampling, kernel.plan.config), cache.map(torch.clone), [FIRST]
    for position in range(POSITION, POSITION + count):
        logits = kernel(memory, cache.with_length(position), token=torch.tensor(tokens[-1:]), position=position, seed=position)
        tokens.append(int(sampler(logits, position + 1)))
    return tokens, logits, sampler


def at_once(kernel, memory, cache, sampling, count, seed=0):
    """Return the tokens that one launch draws, its last logits, and the sampler. ``seed`` is that of the machine's delays."""
    sampler = sampler_of(sampling, kernel.plan.config)
    set_position(memory, POSITION, FIRST)
    logits = kernel(memory, cache.map(torch.clone), count, seed=seed, sampler=sampler)
    assert int(memory.state[ERROR]) == 0
    assert not memory.histograms.any(), "histograms are cleared"
    return memory.tokens[POSITION : POSITION + count + 1].tolist(), logits, sampler


@pytest.mark.parametrize("name", thorough_but("temperature", "cold", "top_k", "top_p", "min_p", "penalty", "all", of=CHOICES))
def test_tokens_of_one_launch_are_the_samplers(name, libraries):
    weights, cache, _, _ = weights_and_caches(MODEL, POSITION)
    kernel, memory = kernel_and_memory(weights, plan_for(MODEL, "streaming", 4), libraries)
    expected, logits, sampler = step_by_step(kernel, memory, cache, CHOICES[name], 6)
    found, last, mine = at_once(kernel, memory, cache, CHOICES[name], 6)
    assert found == expected
    assert torch.equal(last, logits), "returned logits are the model's, without the penalty"
    if sampler.seen is not None:
        assert torch.equal(mine.seen, sampler.seen)


@pytest.mark.parametrize(
    "level",
    thorough_but("eight_barriers", "streaming", of=[level for level, options in LEVELS.items() if not options.separate]),
)
def test_all_variants_draw_the_same_tokens_in_any_timing(level, libraries):
    """The number of tokens per launch does not matter either.

    Drawn and greedy tokens alternate, because state left by one sequence must not disturb the next.
    """
    weights, cache, _, _ = weights_and_caches(MODEL, POSITION)
    kernel, memory = kernel_and_memory(weights, plan_for(MODEL, level, 4), libraries)
    expected, _, _ = step_by_step(kernel, memory, cache, CHOICES["all"], 4)
    likeliest, _, _ = step_by_step(kernel, memory, cache, Sampling(), 2)
    assert expected[1:3] != likeliest[1:3]
    for seed in (1, 2):
        assert at_once(kernel, memory, cache, CHOICES["all"], 4, seed)[0] == expected
        assert at_once(kernel, memory, cache, Sampling(), 2, seed)[0] == likeliest
    sampler, mine = sampler_of(CHOICES["all"], MODEL), cache.map(torch.clone)
    set_position(memory, POSITION, FIRST)
    for at, count in ((0, 1), (1, 3)):
        kernel(memory, mine.with_length(POSITION + at), count, seed=at, sampler=sampler)
    assert memory.tokens[POSITION : POSITION + 5].tolist() == expected


@pytest.mark.parametrize(
    ("model", "ctas"),
    thorough_but(("tied", 1), of=[("odd sizes", 3), ("untied, a key head", 9), ("tied", 1), ("few tokens", 20)]),
)
def test_other_models_and_ctas_without_tokens_draw_the_samplers_tokens(model, ctas, libraries):
    config = MODELS[model] if model in MODELS else replace(MODELS["tied"], vocab_size=100)
    weights, cache, _, _ = weights_and_caches(config, POSITION)
    kernel, memory = kernel_and_memory(weights, plan_for(config, "streaming", ctas), libraries)
    expected, _, _ = step_by_step(kernel, memory, cache, CHOICES["all"], 3)
    assert at_once(kernel, memory, cache, CHOICES["all"], 3)[0] == expected


# Sampling parameters for logits of which many are equal, named by the tokens that are kept.
TIES = {
    "the first of two": Sampling(temperature=0.01, top_p=0.3, seed=7),
    "all": Sampling(temperature=0.5, seed=1),
    "none is left out by top_k": Sampling(temperature=0.5, top_k=4, seed=2),
    "top_k of one": Sampling(temperature=0.5, top_k=1, seed=3),
    "top_p among the first": Sampling(temperature=0.5, top_p=0.02, seed=4),
    "top_p later": Sampling(temperature=0.5, top_p=0.93, seed=5),
    "both": Sampling(temperature=0.9, top_k=9, top_p=0.6, min_p=0.9, seed=6),
}


@pytest.mark.parametrize("name", thorough_but("the first of two", "none is left out by top_k", "top_p later", "both", of=TIES))
def test_of_equal_logits_top_k_keeps_all_and_top_p_the_first(name, libraries):
    """Twelve tokens in all CTAs, or two in two, have equal logits. Top-p ends in the middle of a group, far from its ends."""
    weights, cache, _, _ = weights_and_caches(MODEL, POSITION)
    table, different = weights.embed_tokens, 150 if name == "the first of two" else 25
    table.copy_(table[torch.arange(len(table)) % different])
    kernel, memory = kernel_and_memory(weights, plan_for(MODEL, "streaming", 4), libraries)
    expected, logits, _ = step_by_step(kernel, memory, cache, TIES[name], 6)
    assert len(logits.unique()) == different
    assert at_once(kernel, memory, cache, TIES[name], 6)[0] == expected


def test_a_draw_that_waits_forever_is_abandoned_and_the_next_succeeds(libraries):
    weights, cache, _, _ = weights_and_caches(MODEL, POSITION)
    kernel, memory = kernel_and_memory(weights, plan_for(MODEL, "streaming", 2), libraries)
    expected = at_once(kernel, memory, cache, CHOICES["all"], 2)
    set_position(memory, POSITION, FIRST)
    logits = torch.zeros(MODEL.vocab_size)
    sampler = sampler_of(CHOICES["all"], MODEL)
    # One CTA is missing, so the others wait in vain.
    kernel.launch(memory, cache.map(torch.clone), logits, None, (2, -1, 0, 0, kernel.plan.ctas - 1), 0, sampler)
    assert int(memory.state[ERROR]) == 1
    memory.reset()
    found = at_once(kernel, memory, cache, CHOICES["all"], 2)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])
