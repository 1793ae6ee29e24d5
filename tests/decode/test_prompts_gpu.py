"""Tests of captured passes for prompts with real CUDA graphs. ``test_prompts.py`` has those that need no GPU.

``prefill`` reads a prompt op by op, in the same dtype; the float64 oracle is ``prefill`` with upcast weights. ``device`` is the
first GPU.
"""

from __future__ import annotations

import threading

import pytest
import torch

from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.model.request import Request
from onelaunch.decode.model.weights import random_weights
from onelaunch.decode.runtime import prompts
from onelaunch.decode.runtime.engines import TorchEngine

pytestmark = pytest.mark.gpu

MODELS = {
    "norms": ModelConfig(3000, 512, 1536, 3, 8, 4, 64, tie_word_embeddings=True),
    "biases": ModelConfig(3000, 448, 1216, 3, 7, 1, 64, qk_norm=False, attention_bias=True, output_bias=False),
}


@pytest.fixture(params=MODELS)
def weights(request, device):
    return random_weights(MODELS[request.param], 3, device)


def error(given, exact):
    return float((given.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("parts", [1, 3])
@torch.no_grad()
def test_a_pass_is_as_exact_as_launches_op_by_op(weights, device, monkeypatch, parts):
    monkeypatch.setattr(prompts, "_GRAPH_FLOPS", prompts._flops(weights.config, 128) / parts)
    passes, exact_weights = prompts.PromptPasses(weights), weights.map(torch.Tensor.double)
    for count, seed in ((100, 0), (128, 1), (97, 2)):
        tokens = torch.randint(0, 3000, (count,), generator=torch.Generator().manual_seed(seed)).to(device)
        exact, exact_cache = prefill(exact_weights, tokens, KVCache.empty(weights.config, count, device, torch.float64))
        plain, plain_cache = prefill(weights, tokens, KVCache.empty(weights.config, count, device))
        logits, cache = passes.prefill(weights, tokens, KVCache.empty(weights.config, count, device), lambda: None)
        again, _ = passes.prefill(weights, tokens, KVCache.empty(weights.config, count, device), lambda: None)
        assert torch.equal(again, logits), "a captured pass gives what it gives in eager mode"
        assert error(logits, exact) < 1.5 * error(plain, exact)
        for name, filled in cache.tensors().items():
            want = exact_cache.tensors()[name]
            assert error(filled, want) < 1.5 * error(plain_cache.tensors()[name], want)


def test_streams_and_threads_share_a_pass(weights, device):
    """Each thread reads prompts of its own on its own stream; every text must be the one that it is alone."""
    requests = [Request(tuple((7 * index + step) % 3000 for step in range(60 + index)), 4) for index in range(6)]
    engine = TorchEngine(weights, "captured")
    engine.prepare()
    alone = [list(engine.run(request)) for request in requests]
    found = []

    def read_often(index):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            found.extend((index, list(engine.run(requests[index]))) for _ in range(10))

    threads = [threading.Thread(target=read_often, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert all(tokens == alone[index] for index, tokens in found)


def test_changed_weights_are_read_in_place(device):
    weights = random_weights(MODELS["norms"], 3, device)
    passes, tokens = prompts.PromptPasses(weights), torch.arange(50, device=device)

    @torch.no_grad()
    def read():
        return passes.prefill(weights, tokens, KVCache.empty(weights.config, 50, device), lambda: None)[0]

    read()
    before = read()
    with torch.no_grad():
        weights.layers[1].down_proj.zero_()
    assert not torch.equal(read(), before)
    with torch.no_grad():
        expected = prefill(weights, tokens, KVCache.empty(weights.config, 50, device))[0]
    assert error(read(), expected.double()) < 2e-2
