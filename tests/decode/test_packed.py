"""Tests of weights that exist once, as a kernel's stream: matrices that are copied out of it, prompts, and memory.

``MODELS`` are small models of all families by name. ``packed_of`` packs random weights of a model tensor by tensor, as a load of
a file does, and returns both forms. A test marked ``interpret`` runs the kernel that copies matrices in Triton's interpreter; the
others copy by PyTorch.
"""

from __future__ import annotations

import itertools
import math
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from onelaunch.decode import KVCache, Model, ModelConfig, decode_step, random_weights
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.model.weights import elements, load_weights
from onelaunch.decode.plan import packing
from onelaunch.decode.plan.levels import plan_for
from onelaunch.decode.plan.packing import BATCH_BYTES, layout_of_stream, pack, piece_bytes
from onelaunch.decode.runtime import engines, kernels
from onelaunch.decode.runtime import packed as packed_file
from onelaunch.decode.runtime.models import MODELS as REGISTRY
from onelaunch.decode.runtime.packed import (
    LAYERS_HELD,
    LayerBuffer,
    Matrices,
    PackedWeights,
    load_packed,
    packed_bytes,
    packed_from,
)
from onelaunch.decode.runtime.unpacking import Unpacker
from onelaunch.decode.step.contract import bind
from onelaunch.dispatch import AUTO
from onelaunch.errors import FallbackNotice
from tests.decode.models import write
from tests.decode.plans import FAMILIES, MODELS
from tests.thorough import thorough_but
from tools import measure_memory

CPU = torch.device("cpu")
QWEN_8B = ModelConfig(151_936, 4096, 12_288, 36, 32, 8, 128)

BRIEF = [("odd sizes", "streaming"), ("qwen2", "tagged_words"), ("biases everywhere", "streaming")]
"""Models and levels that run in every run of the tests."""


def packed_of(config, level="streaming", ctas=7, seed=1):
    """Return random weights, and the same packed for a plan of a level."""
    weights = random_weights(config, seed)
    tensors = weights.tensors()
    return weights, packed_from(lambda name, begin=0, end=None: tensors[name][begin:end], plan_for(config, level, ctas), CPU)


def assert_same_layers(packed, weights):
    for number, layer in enumerate(weights.layers):
        found = packed.layer(number).tensors()
        assert found.keys() == layer.tensors().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in layer.tensors().items())


@pytest.mark.parametrize(
    ("model", "level"), thorough_but(*BRIEF, of=[(model, level) for model in MODELS for level in ("streaming", "tagged_words")])
)
@torch.no_grad()
def test_matrices_and_prompts_are_the_same_bit_for_bit(model, level):
    config = MODELS[model]
    weights, packed = packed_of(config, level)
    assert torch.equal(packed.stream.data, pack(weights, packed.plan).data)
    assert torch.equal(pack(packed, packed.plan).data, packed.stream.data)
    assert_same_layers(packed, weights)
    head = weights.lm_head
    for first in range(0, len(head), 40):
        rows = head.new_full((min(40, len(head) - first), head.shape[1]), math.nan)
        packed.unpacker.copy_head(first, rows)
        assert torch.equal(rows, head[first : first + 40])
    plain, same = KVCache.empty(config, 30), KVCache.empty(config, 30)
    for tokens in (torch.arange(20), torch.arange(5, 10)):  # the second piece of a prompt follows the first
        (expected, plain), (logits, same) = prefill(weights, tokens, plain), prefill(packed, tokens, same)
        assert torch.equal(logits, expected)
    assert torch.equal(same.keys, plain.keys)
    assert torch.equal(same.values, plain.values)


@torch.no_grad()
def test_an_lm_head_larger_than_the_buffer_is_read_in_pieces():
    config = replace(MODELS["untied, a key head"], vocab_size=1203)
    weights, packed = packed_of(config)
    firsts = [first for first, _ in packed.head_rows()]
    assert len(firsts) > 1
    assert all(first % 8 == 0 for first in firsts)
    assert torch.equal(torch.cat([rows.clone() for _, rows in packed.head_rows()]), weights.lm_head)
    tokens = torch.arange(9)
    expected, logits = (prefill(each, tokens, KVCache.empty(config, 9))[0] for each in (weights, packed))
    torch.testing.assert_close(logits, expected)


@torch.no_grad()
def test_all_variants_read_packed_weights():
    weights, packed = packed_of(replace(MODELS["biases everywhere"], vocab_size=1203))
    cache = KVCache.empty(weights.config, 4)
    for variant in ("eager", "captured"):  # a CPU runs the step of ``captured`` without a capture
        run = decode_step.get(variant)
        expected, found = (run(bind(torch.tensor([5]), each, cache))[0] for each in (weights, packed))
        torch.testing.assert_close(found, expected)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("model", "level"),
    thorough_but(
        ("qwen2", "streaming"),
        ("biases everywhere", "streaming"),
        ("biases everywhere", "tagged_words"),
        of=[
            (model, level)
            for model in ("odd sizes", "qwen2", "biases everywhere", "half chunks", "three blocks")
            for level in ("streaming", "tagged_words")
        ],
    ),
)
def test_the_kernel_copies_what_pytorch_does(model, level, monkeypatch):
    config = replace(MODELS[model], num_hidden_layers=2)
    weights, packed = packed_of(config, level)
    monkeypatch.setattr(Unpacker, "_copy", lambda self, op, *rest: self._launch(op, *rest))
    for matrix in packed.buffer.places[0].phases.values():
        matrix.fill_(math.nan)
    assert_same_layers(packed, weights)
    rows = weights.lm_head.new_full((len(weights.lm_head) - 16, config.hidden_size), math.nan)
    packed.unpacker.copy_head(16, rows)
    assert torch.equal(rows, weights.lm_head[16:])


# Files


@pytest.mark.parametrize("shards", [1, 3])
def test_a_file_is_packed_as_its_loaded_weights_are(tmp_path, shards):
    weights = random_weights(MODELS["biases everywhere"], 2)
    folder = write(tmp_path, weights, shards)
    plan = plan_for(weights.config, "streaming", 5)
    packed = load_packed(folder, weights.config, CPU, plan)
    assert torch.equal(packed.stream.data, pack(load_weights(folder, weights.config), plan).data)
    assert torch.equal(packed.embed_tokens, weights.embed_tokens)
    assert torch.equal(packed.norm, weights.norm)
    assert_same_layers(packed, weights)


def test_a_file_in_float32_is_rounded_as_loaded_weights_are(tmp_path):
    config = MODELS["tied"]
    folder = write(tmp_path, random_weights(replace(config, dtype=torch.float32), 2))
    packed = load_packed(folder, config, CPU, plan_for(config, "streaming", 5))
    assert_same_layers(packed, load_weights(folder, config))


# Sessions


def test_a_session_uses_the_stream_that_there_is(played, monkeypatch):
    from tests.decode.played import MODEL

    plan = plan_for(MODEL, "streaming", 5)
    tensors = random_weights(MODEL, 4).tensors()
    packed = packed_from(lambda name, begin=0, end=None: tensors[name][begin:end], plan, CPU)
    monkeypatch.setattr(kernels, "pack", lambda *_: pytest.fail("the weights are packed already"))
    constants = kernels.session_for(packed, "streaming").memory.constants
    assert constants.stream is packed.stream
    before = packed.stream.data.clone()
    packed.norm.mul_(2)  # the parameters are made anew, and the stream stays
    assert kernels.session_for(packed, "streaming").memory.constants is constants
    assert torch.equal(constants.parameters[-len(packed.norm) :], packed.norm)
    assert torch.equal(packed.stream.data, before)
    REGISTRY.discard(packed)


def test_a_loaded_model_has_the_stream_alone_and_makes_the_same_texts(played, weights, tmp_path, monkeypatch):
    """The fixture emulates the launches of ``streaming``; the longer prompt is read by PyTorch, from the stream."""
    from onelaunch.decode.step.variants import megakernel

    monkeypatch.setattr(megakernel, "processors", lambda device: 5)
    monkeypatch.setattr(kernels, "pack", lambda *_: pytest.fail("the weights are packed already"))
    folder = write(tmp_path, weights)
    model, plain = (Model.from_pretrained(folder, device="cpu", variant=name) for name in ("streaming", "eager"))
    assert isinstance(model.engine.weights, PackedWeights)
    for prompt in (range(3), range(10, 60)):
        found, expected = (each.generate(list(prompt), max_new_tokens=20, temperature=0) for each in (model, plain))
        assert found.tokens == expected.tokens
    assert played.launches > 3, "the kernel made the tokens"
    REGISTRY.discard(model.engine.weights)


def test_a_plan_that_divides_matrices_otherwise_packs_a_stream_of_its_own():
    weights, packed = packed_of(MODELS["llama"], "tagged_words", 7)
    other = kernels._constants(packed, plan_for(weights.config, "tagged_words", 5))
    assert other.stream is not packed.stream
    assert torch.equal(other.stream.data, pack(weights, plan_for(weights.config, "tagged_words", 5)).data)
    REGISTRY.discard(packed)


@torch.no_grad()
def test_threads_take_turns_at_the_buffer():
    """Each prompt is paced, so that another thread comes in between two of its layers."""
    config = MODELS["smollm3"]
    weights, packed = packed_of(config)
    prompts = [torch.arange(start, start + 12) for start in range(4)]
    expected = [prefill(weights, tokens, KVCache.empty(config, 12))[0] for tokens in prompts]
    found = {}

    def read(index):
        with torch.no_grad():
            pace = threading.Event()
            found[index] = prefill(packed, prompts[index], KVCache.empty(config, 12), lambda: pace.wait(0.002))[0]

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[index], expected[index]) for index in range(len(prompts)))


class Clock:
    """Stream that knows which work precedes what is enqueued on it next."""

    def __init__(self):
        self.before = frozenset()

    def wait_stream(self, other):
        self.before |= other.before


@pytest.mark.parametrize("cancelled_in", [None, 3])
def test_a_layer_is_copied_beside_the_products_of_the_one_before(monkeypatch, cancelled_in):
    """Emulate two streams, and check which work precedes which; a second prompt on another stream follows the first."""
    buffer, current, previous, work = LayerBuffer(MODELS["tied"], CPU), [Clock()], Clock(), {}
    buffer.places = tuple(Matrices({}, {}) for _ in range(LAYERS_HELD))
    buffer._side = Clock()

    @contextmanager
    def stream(other):
        current.append(other)
        yield
        current.pop()

    def enqueue(*name):
        work[name] = current[-1].before
        current[-1].before |= {name}

    for name, value in {
        "current_stream": lambda: current[-1],
        "stream": stream,
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for prompt, count in (("first", cancelled_in or 6), ("second", 6)):
        with buffer.exclusive():
            current[-1].wait_stream(previous)  # as StreamOrder does on a GPU
            for number in range(count):
                copy = partial(enqueue, "copy", prompt)
                place = buffer.layer(lambda layer, _, copy=copy: copy(layer), number, number + 1 if number < 5 else None)
                assert place is buffer.places[number % LAYERS_HELD]
                enqueue("products", prompt, number)
        previous = current.pop()
        current.append(Clock())
    for (kind, prompt, number), before in work.items():
        if kind == "products":
            assert ("copy", prompt, number) in before
            continue
        same_place = [each for each in work if each[1] == prompt and each[2] in range(number % 2, number, 2)]
        assert before.issuperset(same_place), "all that read or wrote the place before"
        assert ("products", prompt, number - 1) not in before, "both run at the same time"
        assert prompt == "first" or before.issuperset(each for each in work if each[1] == "first")


# Memory


def most_bytes(run):
    """Return the most bytes that a function's tensors took at any time, and its result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    events = profile.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(changes)), result


@pytest.mark.thorough
def test_loading_takes_the_stated_memory_and_no_second_copy(monkeypatch):
    """A tensor of a file is copied to the device, which here is one more tensor, since the device is the host itself."""
    config = ModelConfig(800, 256, 512, 4, 4, 2, 64)
    for module in (packing, packed_file):
        monkeypatch.setattr(module, "BATCH_BYTES", 1 << 17)
    tensors, plan = random_weights(config).tensors(), plan_for(config, "streaming", 7)
    most, packed = most_bytes(lambda: packed_from(lambda name, begin=0, end=None: tensors[name][begin:end].clone(), plan, CPU))
    matrix = 2 * config.intermediate_size * config.hidden_size
    need = packed_bytes(config, summed=True) - packed.buffer.nbytes  # a CPU's buffer holds one layer, and a GPU's two
    assert most <= need + matrix
    assert need + matrix < 1.4 * 2 * elements(config), "a second copy would need twice the weights"
    kept = sum(tensor.nbytes for tensor in packed.tensors().values()) + packed.unpacker.nbytes
    assert 2 * elements(config) <= kept + packed.buffer.nbytes <= need


def test_the_next_engine_runs_if_loaded_weights_do_not_fit(monkeypatch, prose):
    fastest = decode_step.get("eager")
    monkeypatch.setattr(fastest, "capabilities", replace(fastest.capabilities, load_bytes=lambda config: 9_000_000_000))
    assert engines.engine_that_fits(MODELS["tied"], CPU, 9_000_000_000, loaded=True) == AUTO
    with prose.warns(FallbackNotice, match="needs 9.0 GB", mask={r"\w+ runs": "<variant> runs"}):
        assert engines.engine_that_fits(MODELS["tied"], CPU, 8_900_000_000, loaded=True) not in (AUTO, "eager")


@pytest.mark.parametrize("name", ["Qwen3-8B", "Mistral-7B"])
def test_untied_models_need_at_most_a_tenth_more_than_their_weights(name):
    """Sizes of all that lies on the device while a model is loaded and used, on an H200."""
    config = QWEN_8B if name == "Qwen3-8B" else FAMILIES[name]
    weights_bytes = 2 * elements(config)
    need = packed_bytes(config, summed=True)
    assert weights_bytes < need < 1.08 * weights_bytes
    plan = plan_for(config, "streaming", 132)
    stream = layout_of_stream(plan)
    buffer = LAYERS_HELD * LayerBuffer(config, torch.device("meta")).nbytes
    tables = sum(table.nbytes for places in stream.places.values() for table in places)
    vectors = 2 * (elements(config) - elements(config, matrices_only=True))
    kept = stream.pieces * piece_bytes(config) + buffer + tables + vectors
    kept += 2 * config.vocab_size * config.hidden_size
    assert kept + 4 * BATCH_BYTES <= need
    # Beside the weights: the table of rotations, the norms once more, and the buffers of the kernel.
    rotations = 4 * config.head_dim * config.max_position_embeddings
    assert kept + rotations + vectors + (64 << 20) < 1.08 * weights_bytes


def test_the_measurement_of_memory_shows_shares_of_the_weights():
    peaks = {"tensors_bytes": 105, "allocator_bytes": 108}
    lines = measure_memory.listing([{"model": "a model", "weights_bytes": 100, "load": peaks, "passes": peaks}]).splitlines()
    assert [line.split()[-3:] for line in lines[1:]] == [["load", "1.050", "1.080"], ["passes", "1.050", "1.080"]]
