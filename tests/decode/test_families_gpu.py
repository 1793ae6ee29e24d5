"""Tests of the decode kernels on a GPU with models of the families Llama, Qwen2, Mistral and SmolLM3.

``FAMILIES`` are configurations of public models, which the tests use with few layers and a small vocabulary. ``MODELS`` are small
models. Each optimization level of the decode megakernel (``level``) is a variant of ``decode_step``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch.decode import KVCache, decode_step, random_weights
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.plan.levels import LEVELS
from onelaunch.decode.runtime.engines import Request, TorchEngine, make_engine
from onelaunch.device.hardware import is_hopper
from onelaunch.workbench.verify import Judge
from tests.decode.plans import FAMILIES, MODELS, weights_and_caches

pytestmark = pytest.mark.gpu

POSITIONS = (0, 1, 63, 64, 200, 1300)
"""Positions of the tested tokens: up to 63 there is one KV split, and from 1280 on query splits may be merged."""

FEATURES = ("llama", "qwen2", "biases everywhere", "smollm3")
"""Small models with other features than Qwen3. The first has frequencies that are scaled as Llama 3's."""

each_level = pytest.mark.parametrize("level", LEVELS)


@pytest.fixture(autouse=True)
def runs_here(device):
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")


@each_level
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_public_models_match_the_oracle(name, level, device):
    config, judge = FAMILIES[name], Judge()
    sizes = {
        "layers": 4 if config.unrotated_layers else 2, "hidden": config.hidden_size, "intermediate": config.intermediate_size,
        "heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim,
        "vocabulary": 5003,
    }  # fmt: skip
    options = {
        "tied": config.tie_word_embeddings, "bias": config.attention_bias, "rope_theta": config.rope_theta, "no_qk_norm": True,
        "no_output_bias": config.attention_bias, "unrotated": 4 if config.unrotated_layers else 0,
    }  # fmt: skip
    for position in POSITIONS:
        case = decode_step.case("bfloat16", **sizes, **options, position=position)
        assert decode_step.get(level).why_not(decode_step.query(case, str(device))) is None
        verdict = judge.judge(decode_step, case, variant=level, device=device)
        assert verdict.ok, (position, verdict.problems)


@each_level
@pytest.mark.parametrize("name", FEATURES)
def test_small_models_match_the_oracle(name, level, device):
    weights, cache, exact, reference = weights_and_caches(MODELS[name], 129)
    on_device = weights.map(lambda tensor: tensor.to(device))
    for position in (129, 64, 63, 1, 0):
        token = torch.tensor([position % 100])
        want, after = prefill(exact, token, reference.map(torch.clone).with_length(position))
        plain, _ = prefill(weights, token, cache.map(torch.clone).with_length(position))
        mine = cache.map(lambda tensor: tensor.to(device)).with_length(position)
        found, keys, values = decode_step(token.to(device), on_device, mine, variant=level)
        assert (found.cpu() - want).norm() <= (plain - want).norm(), "activations have more bits than PyTorch's bfloat16"
        for row, right in ((keys, after.keys), (values, after.values)):
            true = right[:, :, position]
            assert (row.cpu().double() - true).norm() <= 2**-8 * true.norm()


@pytest.mark.parametrize("level", ["streaming", "tagged_words", "graph"])
@pytest.mark.parametrize("name", FEATURES)
def test_tokens_of_many_launches_are_those_of_single_steps(name, level, device):
    """The sequences cross position 64, from which on attention has several KV splits."""
    weights = random_weights(replace(MODELS[name], eos_token_ids=()), 3, device)
    request = Request(tuple(range(1, 20)), 200)
    assert list(make_engine(weights, level).run(request)) == list(TorchEngine(weights, level).run(request))


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen2.5-0.5B", "SmolLM2-135M", "SmolLM3-3B"])
def test_results_are_repeatable(name, device):
    config = replace(FAMILIES[name], num_hidden_layers=4, vocab_size=5003, unrotated_layers=(3,) * (name == "SmolLM3-3B"))
    weights, cache = random_weights(config, 1, device), KVCache.empty(config, 1100, device).with_length(1000)
    for tensor in (cache.keys, cache.values):
        tensor.normal_()
    token = torch.tensor([7], device=device)
    first = [each.clone() for each in decode_step(token, weights, cache, variant="streaming")]
    for _ in range(50):
        for one, other in zip(first, decode_step(token, weights, cache, variant="streaming"), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", FAMILIES)
def test_auto_takes_the_kernels(name, device):
    from onelaunch import dispatch
    from onelaunch.decode.runtime.engines import typical_query

    assert dispatch.pick("auto", typical_query(FAMILIES[name], device)).name == "streaming"
