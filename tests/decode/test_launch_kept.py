"""What is kept for a model's launches, which PyTorch plays: memory, graphs, proofs, and when it is made anew."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from onelaunch.decode import KVCache, decode_step, megakernel, random_weights, torch_variants
from onelaunch.decode.model.weights import from_tensors
from onelaunch.decode.plan.rungs import RUNGS
from onelaunch.decode.runtime import kernels as launch
from onelaunch.decode.runtime.engines import TorchEngine
from onelaunch.decode.step.contract import key_of
from onelaunch.decode.step.variants.megakernel import KernelEngine
from onelaunch.errors import (
    ArgumentError,
    DeviceError,
    DeviceMemoryError,
    DTypeError,
    PlanError,
    ShapeError,
)
from tests.decode.models import SMALL
from tests.decode.played import GREEDY, MODEL, SAMPLED, alone

# What is kept for a model


@pytest.mark.parametrize("first", [True, False])
def test_what_one_text_keeps_serves_the_next_in_and_out_of_inference_mode(first, played):
    weights = random_weights(MODEL, 4)  # of its own: they are written to
    played.weights = weights
    for inference in (first, not first):
        with torch.inference_mode(inference):
            assert list(KernelEngine(weights, "streaming").run(SAMPLED)) == alone(weights, SAMPLED)
        weights.norm.mul_(1.01)
    assert list(KernelEngine(weights, "streaming").run(SAMPLED)) == alone(weights, SAMPLED)


def test_a_text_may_be_read_on_outside_of_inference_mode(weights, played):
    for engine in (KernelEngine(weights, "streaming"), TorchEngine(weights, "eager")):
        with torch.inference_mode():
            text = engine.run(GREEDY["second"])
            tokens = [next(text) for _ in range(3)]
        assert tokens + list(text) == alone(weights, GREEDY["second"])


@pytest.mark.parametrize("variant", ["eager", "streaming"])
def test_weights_that_can_be_trained_decode_without_a_graph(variant, weights, played):
    trainable = weights.map(lambda tensor: torch.nn.Parameter(tensor.clone()))
    played.weights = trainable
    given = {"token": torch.tensor([5]), "weights": trainable}
    for cache in (KVCache.empty(MODEL), KVCache.empty(MODEL)):
        logits, _, _ = decode_step(**given, cache=cache, variant=variant)
        assert not logits.requires_grad
        assert torch.equal(logits, decode_step(**given | {"weights": weights}, cache=KVCache.empty(MODEL), variant="eager")[0])


def wrong(weights, name, change):
    tensors = weights.tensors()
    return from_tensors(weights.config, tensors | {name: change(tensors[name])})


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("norm", torch.Tensor.float, DTypeError, "weights.norm .*float32.* bfloat16, the dtype of their configuration"),
        ("layers.1.q_norm", lambda x: x.to("meta"), DeviceError, "weights.layers.1.q_norm .*meta"),
        ("layers.0.o_proj", lambda x: x[:-1], ShapeError, r"weights.layers.0.o_proj has shape \(63, 128\)"),
        ("embed_tokens", lambda x: x.T.contiguous().T, ArgumentError, "weights.embed_tokens is not contiguous"),
    ],
)  # fmt: skip
def test_weights_that_kernels_would_misread_are_refused(name, change, error, message, played):
    other = wrong(random_weights(replace(MODEL, dtype=torch.bfloat16), 1), name, change)
    with pytest.raises(error, match=message):
        decode_step(torch.tensor([5]), other, KVCache.empty(other.config), variant="streaming")


def test_a_proof_is_of_the_room_that_there_is(weights, played, monkeypatch, tmp_path):
    checked = []
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))
    monkeypatch.setattr(launch, "check", lambda *plans, room: checked.append(room))
    for limit in (launch.HOPPER_SHARED_BYTES, launch.HOPPER_SHARED_BYTES, 1024):
        launch._check.cache_clear()
        monkeypatch.setattr(launch, "HOPPER_SHARED_BYTES", limit)
        launch.checked_plan(MODEL, "streaming", 5, launch.Tuning())
    assert len(checked) == 2
    launch._check.cache_clear()


# Memory


def test_no_room_for_the_weights_a_second_time_or_for_a_prompt(weights, played, monkeypatch):
    def exhausted(*_, **__):
        raise torch.OutOfMemoryError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(launch, "pack", exhausted)
        with pytest.raises(DeviceMemoryError, match="no room on cpu for the weights in the order of their use"):
            list(KernelEngine(weights, "streaming").run(SAMPLED))
    for place, what in ((KVCache, "a cache of 40 positions"), (None, "the activations of a prompt of 40 tokens")):
        with monkeypatch.context() as patched:
            patched.setattr(*((KVCache, "empty") if place else ("onelaunch.decode.runtime.engines.prefill",)), exhausted)
            for engine in (TorchEngine(weights), KernelEngine(weights, "streaming")):
                with pytest.raises(DeviceMemoryError, match=f"no room on cpu for {what}"):
                    list(engine.run(GREEDY["second"]))


# Graphs


@pytest.mark.parametrize("captures", ["rung", "captured"])
def test_graphs_are_captured_on_the_weights_device_beside_other_threads(captures, weights, played, monkeypatch):
    """With what PyTorch does for a GPU played: a second one has streams of its own."""
    seen = []

    @contextmanager
    def entered(*given, **named):
        seen.append((given, named))
        yield

    class Stream:
        def __init__(self, device=None):
            self.device = device

        def wait_stream(self, other):
            pass

    for name, value in {
        "graph": entered, "device": entered, "stream": entered, "Stream": Stream, "current_stream": Stream, "CUDAGraph": object,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    cache = KVCache.empty(MODEL)
    if captures == "rung":
        monkeypatch.setattr(launch.Kernels, "_launch", lambda *_: None)
        launch.Kernels(weights, "graph")._captured(cache)
    else:
        call = decode_step.bind(torch.tensor([1]), weights, cache)
        torch_variants._Captured.of(call, torch_variants.layer_step, torch_variants.head_step, 256)
    assert ((weights.device,), {}) in seen
    (named,) = [named for _, named in seen if named]
    assert named["stream"].device == weights.device
    assert named["capture_error_mode"] == "thread_local"


# What a start costs, and needs


def query_of(config, device="cuda:0"):
    return key_of(replace(config, dtype=torch.bfloat16, attention_bias=False), 100, device)


def test_only_the_rung_that_is_asked_for_is_checked_and_once_with_these_files(weights, played, monkeypatch, tmp_path):
    checked = []
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))
    launch._check.cache_clear()
    monkeypatch.setattr(launch, "check", lambda *plans, room: checked.append(plans[0].rung))
    monkeypatch.setattr(megakernel, "processors", lambda device: 132)
    for rung in RUNGS:
        assert megakernel.has_a_plan(rung, query_of(weights.config)) is None
    assert checked == []
    for config in (weights.config, replace(weights.config, rope_theta=5e5, max_position_embeddings=64)):
        launch.Kernels(random_weights(config), "streaming")
    assert checked == ["streaming"]
    launch._check.cache_clear()  # as another process
    launch.Kernels(random_weights(weights.config), "streaming")
    assert checked == ["streaming"]
    read = launch.nvrtc.read
    monkeypatch.setattr(launch.nvrtc, "read", lambda package, file: read(package, file) + "#" * (file == "plan/check.py"))
    launch._check.cache_clear()
    launch.Kernels(random_weights(weights.config), "streaming")
    assert checked == 2 * ["streaming"]
    launch._check.cache_clear()


def test_a_plan_that_is_not_sound_is_refused_every_time(weights, played, monkeypatch, tmp_path):
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))

    def refuse(*plans, room):
        raise PlanError("streaming", "it is not sound")

    monkeypatch.setattr(launch, "check", refuse)
    for _ in range(2):
        launch._check.cache_clear()
        with pytest.raises(PlanError, match="it is not sound"):
            launch.Kernels(random_weights(weights.config), "streaming")
    launch._check.cache_clear()


def test_ctas_that_cannot_all_be_resident_are_a_reason(monkeypatch):
    monkeypatch.setattr(megakernel, "processors", lambda device: 132)
    wide = replace(SMALL, intermediate_size=200_000)
    assert "sound plan here: a CTA needs" in (megakernel.has_a_plan("streaming", query_of(wide)) or "")


@pytest.mark.parametrize("rung", RUNGS)
def test_without_numpy_kernels_say_so(rung, monkeypatch):
    """In a process that has not loaded what imports it."""
    monkeypatch.setattr(decode_step.get(rung), "_supports", decode_step.get(rung)._supports[1:])  # as on a Hopper GPU
    for name in ("numpy", "onelaunch.decode.plan.check", "onelaunch.decode.runtime.kernels"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert decode_step.get(rung).why_not(query_of(SMALL)) == "needs numpy: pip install 'onelaunch[decode]'"


# Weights that are written to


def addresses(kernels):
    """All that a launch is given of a model, as a CUDA graph would hold it."""
    memory, cache = kernels.memory, KVCache.empty(MODEL)
    return [tensor is not None and tensor.data_ptr() for tensor in memory.arguments(cache, torch.empty(1))[:7]]


@pytest.mark.parametrize("name", ["embed_tokens", "layers.1.q_norm", "layers.0.o_proj", "norm"])
def test_what_was_made_of_weights_is_made_anew_where_it_lies_once_they_are_written_to(name, played):
    weights = random_weights(MODEL, 5)
    rungs = ("streaming", "tagged_words", "eight_barriers")  # the last two share a stream
    before = {rung: launch.kernels_for(weights, rung) for rung in rungs}
    held = {rung: addresses(kernels) for rung, kernels in before.items()}
    weights.tensors()[name].mul_(2)
    fresh = weights.map(torch.clone)
    for rung, kernels in before.items():
        assert launch.kernels_for(weights, rung) is kernels
        assert addresses(kernels) == held[rung]
        mine, other = kernels.memory.constants, launch.kernels_for(fresh, rung).memory.constants
        assert torch.equal(mine.stream.data, other.stream.data)
        assert torch.equal(mine.norms, other.norms)
        assert torch.equal(mine.weights.embed_tokens, other.weights.embed_tokens)


def test_other_weights_have_their_own():
    assert launch._made(random_weights(SMALL, 0, "cpu")) is not launch._made(random_weights(SMALL, 0, "cpu"))
