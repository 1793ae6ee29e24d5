"""Tests of captured passes for prompts: sizes, padding, graphs, and when a prompt is read by one.

On a CPU a capture is replaced by one that keeps the function and calls it at each replay, with the same memory as a graph.
``test_prompts_gpu.py`` captures CUDA graphs. ``prefill`` reads a prompt op by op and is the reference.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.model.request import Request
from onelaunch.decode.model.weights import random_weights
from onelaunch.decode.runtime import engines, prompts
from onelaunch.decode.runtime.models import MODELS
from onelaunch.decode.runtime.pace import Stopped
from onelaunch.decode.step.variants import megakernel
from onelaunch.errors import FallbackNotice
from tools import measure_prompts

MODEL = ModelConfig(300, 64, 160, 4, 4, 2, 16, max_position_embeddings=600, dtype=torch.float32)
QWEN = {
    "0.6B": ModelConfig(151_936, 1024, 3072, 28, 16, 8, 128, tie_word_embeddings=True),
    "8B": ModelConfig(151_936, 4096, 12288, 36, 32, 8, 128),
}


class Replayed:
    """Stand-in for a CUDA graph: its replay calls the captured function and writes the results where the capture left them."""

    def __init__(self, step):
        self.step, self.made = step, step()

    def replay(self):
        (hidden, _), logits = self.step()
        self.made[0].hidden.copy_(hidden)
        self.made[1].copy_(logits)


@pytest.fixture
def captures(monkeypatch):
    """Let captures keep functions, and return the list of all that were made."""
    made, sites = [], {}

    def capture(step, device, *, warm_up, site):
        assert warm_up
        assert site is sites.setdefault(device, site), "all passes share a stream and a memory pool"
        made.append(Replayed(step))
        return made[-1], made[-1].made

    monkeypatch.setattr(prompts, "capture_on_new_stream", capture)
    return made


@pytest.fixture
def weights():
    return random_weights(MODEL, seed=1)


def tokens_of(count, seed=0):
    return torch.randint(0, MODEL.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def read(passes, weights, tokens, pace=lambda: None, captured=True):
    """Prefill a prompt by a pass, which is captured unless the test wants it so, and return the logits and the filled cache."""
    if captured:
        passes._steps.seen[prompts.size_of(MODEL, len(tokens))] += 1
    with torch.no_grad():
        logits, cache = passes.prefill(weights, tokens, KVCache.empty(MODEL, len(tokens)), pace)
    return logits, cache.tensors()


def expected_of(weights, tokens):
    with torch.no_grad():
        logits, cache = prefill(weights, tokens, KVCache.empty(MODEL, len(tokens)))
    return logits, cache.tensors()


@pytest.mark.parametrize("count", [1, 15, 16, 17, 50, 130])
def test_a_padded_pass_gives_what_the_prompt_alone_gives(weights, captures, count):
    passes = prompts.PromptPasses(weights)
    for seed in range(2):  # the second prompt finds the first one's tokens, keys and values in memory
        tokens = tokens_of(count, seed)
        logits, cache = read(passes, weights, tokens)
        want, filled = expected_of(weights, tokens)
        torch.testing.assert_close(logits, want)
        for name, tensor in filled.items():
            assert cache[name].shape == tensor.shape
            torch.testing.assert_close(cache[name], tensor)
    assert len(captures) == 1


def test_prompts_of_other_lengths_share_a_pass_and_its_memory(weights, captures):
    passes = prompts.PromptPasses(weights)
    longer, shorter = tokens_of(48), tokens_of(33, 1)
    read(passes, weights, longer)
    torch.testing.assert_close(read(passes, weights, shorter)[0], expected_of(weights, shorter)[0])
    torch.testing.assert_close(read(passes, weights, longer)[0], expected_of(weights, longer)[0])
    assert len(captures) == 1
    results = read(passes, weights, shorter)[0]
    kept = results.clone()
    read(passes, weights, longer)
    assert torch.equal(results, kept), "logits are a copy"


def test_a_pass_of_several_graphs_gives_the_same_and_ends_between_them(weights, captures, monkeypatch):
    monkeypatch.setattr(prompts, "_GRAPH_FLOPS", prompts._flops(MODEL, 64) / 3)
    assert [list(layers) for layers in prompts.graphs_of(MODEL, 64)] == [[0], [1], [2, 3]]
    passes, tokens, asked = prompts.PromptPasses(weights), tokens_of(60), []
    torch.testing.assert_close(read(passes, weights, tokens, lambda: asked.append(1))[0], expected_of(weights, tokens)[0])
    assert len(captures) == len(asked) == 3

    def stop():
        asked.append(1)
        if len(asked) == 5:
            raise Stopped

    with pytest.raises(Stopped):
        read(passes, weights, tokens_of(60, 1), stop)
    torch.testing.assert_close(read(passes, weights, tokens)[0], expected_of(weights, tokens)[0])


def test_sizes_waste_little_and_end_where_the_device_is_the_bound():
    for config in QWEN.values():
        sizes = [prompts.size_of(config, tokens) for tokens in range(1, 3000)]
        for tokens, size in enumerate(sizes, 1):
            assert size is None or size >= tokens
            assert size is None or tokens <= 256 or size <= 1.25 * tokens
    assert prompts.size_of(QWEN["0.6B"], 500) == prompts.size_of(QWEN["0.6B"], 512) == 512
    assert prompts.size_of(QWEN["8B"], 500) is not None
    assert prompts.size_of(QWEN["8B"], 1000) is None
    assert prompts.size_of(QWEN["0.6B"], 2049) is None
    assert prompts.size_of(MODEL, 600) is None, "a pass of 640 tokens would leave the model's context"


def test_no_graph_takes_longer_than_a_few_milliseconds():
    for config in QWEN.values():
        for size in prompts.SIZES:
            if prompts.size_of(config, size) is None:
                continue
            layers = prompts.graphs_of(config, size)
            assert [number for part in layers for number in part] == list(range(config.num_hidden_layers))
            of_a_layer = prompts._flops(config, size) / config.num_hidden_layers
            assert max(map(len, layers)) * of_a_layer <= 1.5 * max(prompts._GRAPH_FLOPS, of_a_layer)


def test_the_second_prompt_of_a_size_is_captured_and_gives_the_same(weights, captures):
    passes, tokens = prompts.PromptPasses(weights), tokens_of(50)
    found = [read(passes, weights, tokens, captured=False) for _ in range(3)]
    assert len(captures) == 1
    for logits, filled in found[1:]:
        assert torch.equal(logits, found[0][0])
        for name, tensor in filled.items():
            assert torch.equal(tensor, found[0][1][name])
    read(prompts.PromptPasses(weights), weights, tokens_of(33), captured=False)
    assert len(captures) == 1
    read(prompts.PromptPasses(weights), weights, tokens_of(40), captured=False)
    assert len(captures) == 2, "engines of the same weights share passes"


def test_prompts_are_prefilled_by_passes_by_their_length_alone(weights, captures):
    passes = prompts.PromptPasses(weights)
    lengths = [1, 20, 50, 512, 513, 600]
    taken = [passes.take(MODEL, length) for length in lengths]
    assert taken == [True, True, True, True, False, False]
    for length in (20, 50):
        read(passes, weights, tokens_of(length))
    assert [passes.take(MODEL, length) for length in lengths] == taken


def test_a_pass_in_eager_mode_ends_between_halves_of_layers(weights):
    asked = []

    def stop():
        asked.append(1)
        if len(asked) == 4:
            raise Stopped

    with pytest.raises(Stopped):
        read(prompts.PromptPasses(weights), weights, tokens_of(50), stop, captured=False)
    assert len(asked) == 4


def test_prepared_sizes_wait_for_no_capture(weights, captures):
    passes = prompts.PromptPasses(weights)
    passes.prepare(weights, most=64)
    made = len(captures)
    assert made == len([size for size in prompts.SIZES if size <= 64])
    read(passes, weights, tokens_of(50), captured=False)
    assert len(captures) == made


def test_a_pass_that_does_not_fit_into_memory_stays_in_eager_mode(weights, monkeypatch):
    tries = []

    def exhausted(*_, **__):
        tries.append(1)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(prompts, "capture_on_new_stream", exhausted)
    passes, tokens = prompts.PromptPasses(weights), tokens_of(20)
    first = read(passes, weights, tokens, captured=False)[0]
    with pytest.warns(FallbackNotice, match="too little memory to capture the prefill of 32 tokens"):
        assert torch.equal(read(passes, weights, tokens, captured=False)[0], first)
    for _ in range(2):
        assert torch.equal(read(passes, weights, tokens, captured=False)[0], first)
    assert len(tries) == 1


@pytest.mark.parametrize("variant", ["captured", "eager"])
def test_engines_read_prompts_by_passes_except_for_the_baseline(weights, captures, monkeypatch, variant):
    """On a CPU engines have no passes, so the test gives them some; ``captured`` is replaced too, since it needs a GPU."""
    made = engines.TorchEngine(weights, "eager")
    made._passes = prompts.PromptPasses(weights)
    monkeypatch.setattr(made, "_captures", lambda: variant != "eager")
    request = Request(tuple(tokens_of(20).tolist()), 5)
    texts = [list(made.run(request)) for _ in range(3)]
    assert texts[0] == texts[1] == texts[2] == list(engines.TorchEngine(weights, "eager").run(request))
    assert len(captures) == (variant == "captured")


def test_the_baseline_alone_reads_op_by_op(weights):
    assert not engines.TorchEngine(weights, "eager")._captures()
    assert engines.TorchEngine(weights, "compiled")._captures()


def test_steps_read_only_very_short_prompts_where_a_pass_is_captured():
    for name, config in QWEN.items():
        eager, captured = (megakernel.prompt_steps("streaming", config, captured=each) for each in (False, True))
        assert 1 <= captured <= eager / 3, name


@pytest.mark.parametrize("packed", [False, True])
def test_the_measurement_of_prompts_lists_what_it_measured(monkeypatch, packed):
    monkeypatch.setattr(measure_prompts, "LENGTHS", (16, 20))
    monkeypatch.setattr(measure_prompts, "processors", lambda device: 5)
    found = measure_prompts.measure("small", torch.device("cpu"), packed=packed)
    assert [each["tokens"] for each in found] == [16, 20]
    assert all(each["op_by_op_ms"] > 0 for each in found)
    assert "small              20" in measure_prompts.listing(found)


def test_passes_do_not_keep_weights_alive(captures):
    import gc
    import weakref

    weights = random_weights(replace(MODEL, num_hidden_layers=1))
    prompts.PromptPasses(weights)
    gone = weakref.ref(weights)
    del weights
    gc.collect()
    assert gone() is None
    assert not any(each is None for each in MODELS._captured)
