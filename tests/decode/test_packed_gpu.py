"""Tests of weights that exist once, as a kernel's stream, on a Hopper GPU. ``test_packed.py`` has those that need no GPU.

``device`` is the first GPU. ``packed_on`` packs random weights of a model tensor by tensor, and returns both forms.
"""

from __future__ import annotations

import gc
import itertools
import threading

import pytest
import torch

from onelaunch.decode import KVCache, ModelConfig, random_weights
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.model.request import Request
from onelaunch.decode.model.weights import elements
from onelaunch.decode.plan.levels import plan_for
from onelaunch.decode.plan.phases import PRODUCTS
from onelaunch.decode.runtime import prompts
from onelaunch.decode.runtime.engines import make_engine
from onelaunch.decode.runtime.packed import packed_from
from onelaunch.decode.runtime.prompts import PromptPasses
from onelaunch.device.hardware import processors
from tests.decode.plans import MODELS
from tests.decode.products import by_matrix, operands
from tools.measure_prompts import random_packed

pytestmark = pytest.mark.gpu

LARGER = {
    "whole chunks": ModelConfig(3000, 1024, 3072, 3, 16, 8, 128, tie_word_embeddings=True),
    "parts": ModelConfig(3001, 896, 4864, 2, 14, 2, 64, qk_norm=False, attention_bias=True, output_bias=False),
    "wide": ModelConfig(40_000, 4096, 12_288, 2, 32, 8, 128),
}
SIZES = {**{name: MODELS[name] for name in ("odd sizes", "llama", "biases everywhere", "smollm3", "half chunks")}, **LARGER}


def packed_on(config, device, level="streaming"):
    weights = random_weights(config, 2, device)
    tensors, plan = weights.tensors(), plan_for(config, level, processors(device))
    return weights, packed_from(lambda name, begin=0, end=None: tensors[name][begin:end], plan, device)


@pytest.mark.parametrize("level", ["streaming", "tagged_words"])
@pytest.mark.parametrize("model", SIZES)
@torch.no_grad()
def test_the_kernel_copies_every_matrix(model, level, device):
    weights, packed = packed_on(SIZES[model], device, level)
    for number, layer in enumerate(weights.layers):
        for place in packed.buffer.places:
            for matrix in place.phases.values():
                matrix.fill_(float("nan"))
        found = packed.layer(number).tensors()
        assert all(torch.equal(found[name], tensor) for name, tensor in layer.tensors().items())
    for first, rows in packed.buffer.rows_of(weights.config.vocab_size):
        packed.unpacker.copy_head(first, rows.fill_(float("nan")))
        assert torch.equal(rows, weights.lm_head[first : first + len(rows)])


@pytest.mark.parametrize("level", ["streaming", "tagged_words"])
@pytest.mark.parametrize("model", ["odd sizes", "half chunks", *LARGER])
@torch.no_grad()
def test_products_are_those_of_plain_matrices(model, level, device):
    """Every matrix is multiplied by 2 to 512 tokens. Results are rounded once, and always have the same bits."""
    weights, packed = packed_on(SIZES[model], device, level)
    for op, tokens in itertools.product(PRODUCTS, (2, 17, 128, 130, 300, 512)):
        layer = 0 if op == "lm_head" else weights.config.num_hidden_layers - 1
        x, bias = operands(packed.products, op, tokens, weights.config.dtype, biased=op in ("qkv", "o"))
        found, again = (packed.products.multiply(op, layer, x, bias) for _ in range(2))
        expected = by_matrix(weights, op, layer, x, bias)
        assert found.shape == expected.shape
        assert (found - expected).norm() < 3e-3 * expected.norm()
        assert torch.equal(found, again)


@pytest.mark.parametrize("model", LARGER)
@torch.no_grad()
def test_passes_by_the_stream_are_as_exact_as_those_by_plain_matrices(model, device, monkeypatch):
    monkeypatch.setattr(prompts, "MOST_TOKENS", 512)
    weights, packed = packed_on(LARGER[model], device)
    exact_weights = weights.map(torch.Tensor.double)
    passes = PromptPasses(packed), PromptPasses(weights)
    for count in (5, 17, 100, 130, 500, 512):
        tokens = torch.arange(count, device=device)
        exact, exact_cache = prefill(exact_weights, tokens, KVCache.empty(weights.config, count, device, torch.float64))
        results, errors = [], []
        for each, given in ((passes[0], packed), (passes[0], packed), (passes[0], packed), (passes[1], weights)):
            logits, cache = each.prefill(given, tokens, KVCache.empty(weights.config, count, device), lambda: None)
            results.append((logits, cache.keys[:, :, :count], cache.values[:, :, :count]))
            pairs = zip(results[-1], (exact, exact_cache.keys[:, :, :count], exact_cache.values[:, :, :count]), strict=True)
            errors.append([float((found.double() - want).norm() / want.norm()) for found, want in pairs])
        assert all(torch.equal(*pair) for each in results[1:3] for pair in zip(results[0], each, strict=True)), (
            "op by op, captured"
        )
        assert all(error < 1.5 * plain for error, plain in zip(errors[0], errors[3], strict=True))


@pytest.mark.parametrize("model", LARGER)
@torch.no_grad()
def test_prompts_and_texts_are_those_of_plain_weights(model, device, monkeypatch):
    """With copied matrices the results have the same bits: the heads of these models fit into the buffer in one piece."""
    monkeypatch.setattr(prompts, "MOST_TOKENS", 0)
    weights, packed = packed_on(LARGER[model], device)
    assert len(list(packed.buffer.rows_of(weights.config.vocab_size))) == 1
    for count in (5, 130, 700):
        tokens = torch.arange(count, device=device)
        expected, plain = prefill(weights, tokens, KVCache.empty(weights.config, count, device))
        logits, cache = prefill(packed, tokens, KVCache.empty(weights.config, count, device))
        assert torch.equal(logits, expected)
        assert torch.equal(cache.keys, plain.keys)
        assert torch.equal(cache.values, plain.values)
        passes = PromptPasses(packed), PromptPasses(weights)
        for _ in range(3):  # op by op, captured, replayed
            logits, plain_logits = (
                each.prefill(given, tokens, KVCache.empty(weights.config, count, device), lambda: None)[0]
                for each, given in zip(passes, (packed, weights), strict=True)
            )
            assert torch.equal(logits, plain_logits)
    requests = [Request(tuple(range(length)), 40) for length in (3, 100, 100, 100)]  # steps, op by op, captured, replayed
    plain_engine, engine = make_engine(weights, "streaming"), make_engine(packed, "streaming")
    for request in requests[:2]:
        assert list(engine.run(request)) == list(plain_engine.run(request))
    assert list(engine.run(requests[2])) == list(engine.run(requests[3]))


@pytest.mark.parametrize("most", [0, 512])
def test_streams_and_threads_share_the_buffer(device, monkeypatch, most):
    """Each thread reads its prompts on a stream of its own, by copied matrices or by the weight stream itself."""
    monkeypatch.setattr(prompts, "MOST_TOKENS", most)
    _, packed = packed_on(LARGER["whole chunks"], device)
    engine = make_engine(packed, "streaming")
    requests = [Request(tuple((7 * index + step) % 3000 for step in range(90 + 40 * index)), 4) for index in range(4)]
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
    assert len(found) == 40
    assert all(tokens == alone[index] for index, tokens in found)


def test_the_weights_are_on_the_device_once_at_any_moment(device):
    """A fifth of Qwen3-8B's layers: 3.2 GB of weights without its vocabulary."""
    config = ModelConfig(8192, 4096, 12_288, 8, 32, 8, 128)
    gc.collect()
    torch.cuda.empty_cache()
    begun, weights_bytes = torch.cuda.memory_allocated(device), 2 * elements(config)
    torch.cuda.reset_peak_memory_stats(device)
    packed = random_packed(config, device)
    torch.cuda.synchronize(device)
    loaded = torch.cuda.max_memory_allocated(device) - begun
    buffer = packed.buffer.nbytes
    # The buffer, a matrix that the host would hold, and the copies of a batch of tiles.
    assert loaded < weights_bytes + buffer + 2 * 4096 * 12_288 + (160 << 20)
    engine = make_engine(packed, "streaming")
    engine.prepare()
    for length in (30, 500, 500, 1500):
        list(engine.run(Request(tuple(range(length)), 40)))
    torch.cuda.synchronize(device)
    position = 2 * config.num_hidden_layers * config.key_value_size * 2
    caches, activations = 2 * 2600 * position, 1500 * 4 * (6 * 4096 + 4 * 12_288)
    most = torch.cuda.max_memory_allocated(device) - begun
    assert most < weights_bytes + buffer + caches + activations + (256 << 20)
