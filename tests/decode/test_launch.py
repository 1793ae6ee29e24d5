"""What surrounds the kernels' launches, with a launch played by PyTorch: texts that take turns, stalls, memory, what is kept."""

from __future__ import annotations

import importlib.util
import math
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from onelaunch import dispatch
from onelaunch.decode import KVCache, ModelConfig, decode_step, launch, megakernel, random_weights, torch_variants
from onelaunch.decode.contract import key_of
from onelaunch.decode.engine import Arriving, InTurn, Request, TorchEngine
from onelaunch.decode.megakernel import BATCH, KernelEngine
from onelaunch.decode.memory import ERROR, OUT_OF_RANGE
from onelaunch.decode.model import prefill
from onelaunch.decode.rungs import RUNGS
from onelaunch.decode.sampling import Sampler, Sampling
from onelaunch.decode.weights import from_tensors
from onelaunch.errors import (
    ArgumentError,
    DecodeOverflow,
    DecodeStalled,
    DeviceError,
    DeviceMemoryError,
    DTypeError,
    LogitsNotFinite,
    PlanError,
    ShapeError,
)
from tests.decode.models import SMALL

MODEL = replace(SMALL, eos_token_ids=())
GREEDY = {"first": Request((3, 4, 5), 3 * BATCH + 5), "second": Request(tuple(range(10, 50)), 2 * BATCH + 1)}
SAMPLED = Request((9, 8), 20)


def chosen(words) -> Sampling:
    """What the kernel makes of a text's choices."""
    if words is None:
        return Sampling()
    packed = struct.pack("<7i", *words.tolist())
    temperature, top_k, top_p, farthest, penalty, low, high = struct.unpack("<fIfffII", packed)
    return Sampling(temperature, top_k, top_p, math.exp(-farthest), penalty, high << 32 | low)


class Launch:
    """What a launch of one kernel does to its arguments, in PyTorch; the one whose number is ``stalls`` gives up."""

    def __init__(self, weights) -> None:
        self.weights, self.launches, self.stalls, self.error = weights, 0, -1, 1

    def __call__(self, grid, *arguments) -> None:
        *_, keys, values, first, tokens, _, _, _, state, logits, choices, seen, _, capacity, count, position, _ = arguments
        self.launches += 1
        assert logits.dtype is torch.float32
        if self.launches == self.stalls:
            state[ERROR] = self.error
        if state[ERROR]:
            logits.fill_(torch.nan)
            return
        at = int(state[0]) if position < 0 else position
        token = tokens[at : at + 1].long() if first is None else first
        sampler = Sampler(chosen(choices), token, MODEL.vocab_size)
        sampler.seen = seen
        for _ in range(count):
            assert at < capacity == keys.shape[2]
            found, _ = prefill(self.weights, token, KVCache(keys, values, at))
            token, at = sampler(found, at + 1), at + 1
            tokens[at] = int(token)
        logits.copy_(found)
        state[0] = at


@pytest.fixture(scope="module")
def weights():
    return random_weights(MODEL, 4)


@pytest.fixture
def played(weights, monkeypatch):
    """The kernels of ``streaming`` on this machine; they are made anew for each test."""
    played = Launch(weights)
    monkeypatch.setattr(launch, "processors", lambda device: 5)
    monkeypatch.setattr(launch.nvrtc, "load", lambda *_, **__: played)
    monkeypatch.setattr(decode_step.get("streaming"), "_supports", [])
    launch._MADE.pop(weights, None)
    yield played
    dispatch._checked.cache_clear()
    dispatch.choose.cache_clear()


def alone(weights, request):
    return list(TorchEngine(weights, "eager").run(request))


# Prompts


@pytest.mark.parametrize(
    ("layers", "hidden", "intermediate", "heads", "tokens"),
    [(28, 1024, 3072, 16, 49), (28, 2048, 6144, 16, 20), (36, 2560, 9728, 32, 11)],
)
def test_the_kernel_reads_prompts_that_pytorch_reads_later(layers, hidden, intermediate, heads, tokens):
    """0.6B, 1.7B and 4B: on an H200, both take as long at about 60, 25 and 12 tokens."""
    config = ModelConfig(151_936, hidden, intermediate, layers, heads, 8, 128, tie_word_embeddings=True)
    assert megakernel.prompt_steps("streaming", config) == tokens
    assert megakernel.prompt_steps("graph", config) == 0


@pytest.mark.parametrize("make", [TorchEngine, KernelEngine])
def test_a_prompt_goes_through_the_kernel_up_to_so_many_tokens(make, weights, played, monkeypatch):
    most, prefilled = megakernel.prompt_steps("streaming", MODEL), []
    monkeypatch.setattr("onelaunch.decode.engine.prefill", lambda *given: prefilled.append(given) or prefill(*given))
    for tokens, launches in ((most, most), (most + 1, 0)):
        request = Request(tuple(range(tokens)), 1)
        before = played.launches
        assert list(make(weights, "streaming").run(request)) == alone(weights, request)
        assert played.launches - before == launches
    assert len(prefilled) == 1 + 2, "that of the kernel's engine, and two of the engine without one"


@pytest.mark.parametrize("make", [TorchEngine, KernelEngine])
def test_pytorchs_default_dtype_and_device_change_nothing(make, weights, played):
    """Else a kernel would write logits beyond their memory."""
    expected = [alone(weights, request) for request in GREEDY.values()]
    for default, usual, other in (
        (torch.set_default_dtype, torch.float32, torch.bfloat16), (torch.set_default_dtype, torch.float32, torch.float64),
        (torch.set_default_device, None, "meta"),
    ):  # fmt: skip
        launch._MADE.pop(weights, None)
        default(other)
        try:
            assert [list(make(weights, "streaming").run(request)) for request in GREEDY.values()] == expected
        finally:
            default(usual)


# Texts that take turns


def test_texts_that_take_turns_are_those_that_come_alone(weights, played):
    engine = KernelEngine(weights, "streaming")
    texts = [engine.run(request) for request in GREEDY.values()]
    found = [[], []]
    for _ in range(3 * BATCH + 5):
        for text, tokens in zip(texts, found, strict=True):
            tokens += [token for token in (next(text, None),) if token is not None]
    assert found == [alone(weights, request) for request in GREEDY.values()]


@pytest.mark.parametrize("every", [1, 5])
def test_a_step_of_another_text_disturbs_none(every, weights, played):
    other, tokens = KVCache.empty(MODEL, 300).with_length(200), []
    for number, token in enumerate(KernelEngine(weights, "streaming").run(GREEDY["first"])):
        tokens.append(token)
        if number % every == 0:
            decode_step(torch.tensor([7]), weights, other, variant="streaming")
    assert tokens == alone(weights, GREEDY["first"])


CHOICES = {
    "penalty": Sampling(repetition_penalty=1.7),
    "drawn": Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2**40 + 3),
    "all": Sampling(temperature=1.5, top_k=100, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=5),
}


@pytest.mark.parametrize("name", CHOICES)
def test_texts_of_any_choices_are_made_many_tokens_a_launch_and_take_turns(name, weights, played):
    requests = [replace(GREEDY["first"], sampling=CHOICES[name]), replace(GREEDY["second"], sampling=CHOICES[name])]
    engine = KernelEngine(weights, "streaming")
    texts = [engine.run(request) for request in requests]
    found = [[], []]
    for _ in range(3 * BATCH + 5):
        for text, tokens in zip(texts, found, strict=True):
            tokens += [token for token in (next(text, None),) if token is not None]
    assert found == [alone(weights, request) for request in requests]
    assert found[0] != alone(weights, GREEDY["first"])
    (short, long), most = (len(request.prompt) for request in requests), megakernel.prompt_steps("streaming", MODEL)
    assert short < most < long
    assert played.launches == short + sum(-(-(request.max_new_tokens - 1) // BATCH) for request in requests)


def test_the_first_text_that_is_drawn_has_its_plan_checked(weights, played, monkeypatch, tmp_path):
    checked = []
    launch._check_drawn.cache_clear()
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))
    monkeypatch.setattr(launch, "check", lambda *plans: checked.append([len(plan.tail) for plan in plans]))
    kernels = launch.kernels_for(weights, "streaming")
    for sampling in (Sampling(), CHOICES["penalty"], CHOICES["drawn"], CHOICES["all"]):
        kernels.place(0, torch.tensor([1]))
        kernels.tokens(KVCache.empty(MODEL, 4), 2, Sampler(sampling, torch.tensor([1]), MODEL.vocab_size))
    assert checked == [[3 + rounds for rounds in launch.DRAWN]]
    launch._check_drawn.cache_clear()


def test_a_launch_for_each_phase_takes_the_likeliest_only(weights, played, monkeypatch):
    """Else it goes step by step, with the same tokens."""
    monkeypatch.setattr(decode_step.get("graph"), "_supports", [])
    steps = []
    monkeypatch.setattr(decode_step.get("graph"), "run", lambda call: steps.append(call) or torch_variants.eager(call))
    request = replace(SAMPLED, sampling=CHOICES["drawn"])
    assert list(KernelEngine(weights, "graph").run(request)) == alone(weights, request)
    assert len(steps) == request.max_new_tokens - 1
    with pytest.raises(ArgumentError, match="'graph' takes the likeliest token only"):
        launch.kernels_for(weights, "graph").tokens(
            KVCache.empty(MODEL, 4), 1, Sampler(CHOICES["penalty"], torch.tensor([1]), MODEL.vocab_size)
        )


def test_a_text_that_nobody_disturbs_is_placed_once(weights, played, monkeypatch):
    kernels, places = launch.kernels_for(weights, "streaming"), []
    place = kernels.place
    monkeypatch.setattr(kernels, "place", lambda *given: places.append(given) or place(*given))
    assert list(KernelEngine(weights, "streaming").run(GREEDY["first"])) == alone(weights, GREEDY["first"])
    assert len(places) == 1


def test_texts_that_threads_read_at_once_are_whole(weights, played, monkeypatch):
    pack, packed = launch.pack, []
    monkeypatch.setattr(launch, "pack", lambda *given: time.sleep(0.02) or packed.append(given) or pack(*given))
    engine = KernelEngine(weights, "streaming")
    requests = [GREEDY["first"], replace(SAMPLED, sampling=Sampling(temperature=1.0)), GREEDY["second"]]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda request: list(engine.run(request)), requests))
    assert found == [alone(weights, request) for request in requests]
    assert len(packed) == 1, "weights are repacked once"


def test_streams_take_turns(monkeypatch):
    class Stream(SimpleNamespace):
        def wait_stream(self, other):
            waits.append((self.name, other.name))

    waits, turns = [], InTurn(torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for name, captured in (("a", False), ("a", False), ("b", False), ("c", True), ("b", False), ("a", False)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, name=name: Stream(name=name))
        turns.take()
    assert waits == [("b", "a"), ("a", "b")]


# What studies count and time


@pytest.mark.parametrize("before", [0, 2**31 - 20, -7])
def test_barriers_are_the_bumps_of_all_ctas_also_around(before, step, weights, played, monkeypatch):
    kernels, run = launch.kernels_for(weights, "streaming"), Launch.__call__

    def bumping(self, grid, *arguments):
        counters = arguments[13]
        assert counters is kernels.memory.counters
        counters[0] = (int(counters[0]) + 9 * grid[0] + 2**31) % 2**32 - 2**31
        run(self, grid, *arguments)

    monkeypatch.setattr(Launch, "__call__", bumping)
    kernels.memory.counters[0] = before
    assert decode_step.get("streaming").tags["barriers"](decode_step.bind(**step)) == 9
    played.stalls = played.launches + 1
    with pytest.raises(DecodeStalled):
        kernels.barriers(step["token"], step["cache"])


@pytest.fixture
def step(weights):
    cache = prefill(weights, torch.tensor([1, 2, 3]), KVCache.empty(MODEL))[1]
    return {"token": torch.tensor([5]), "weights": weights, "cache": cache}


@pytest.mark.parametrize("loop", ["running", "served"])
def test_tokens_in_a_row_are_those_of_single_steps(loop, step, weights, played, monkeypatch):
    made = decode_step.loops[loop](decode_step.get("streaming"), step)
    assert 0 < made.seconds() < 1
    assert made.count % 16 == 0
    assert made.problem() is None
    tokens = launch.Kernels.tokens

    def other(self, cache, count, *drawn):
        found = tokens(self, cache, count, *drawn)
        self.memory.tokens[8] += 1
        return found

    monkeypatch.setattr(launch.Kernels, "tokens", other)
    made.seconds()
    assert "single steps make" in made.problem()


def test_running_steps_leave_the_inputs_as_they_were_and_many_are_one_launch(step, played):
    before = step["cache"].keys.clone()
    running = decode_step.loops["running"](decode_step.get("streaming"), step)
    launches = played.launches
    running.seconds()
    assert played.launches == launches + 1
    assert torch.equal(step["cache"].keys, before)


def test_other_logits_behind_the_same_text_are_wrong(step, played, monkeypatch):
    running = decode_step.loops["running"](decode_step.get("streaming"), step)
    tokens = launch.Kernels.tokens
    monkeypatch.setattr(launch.Kernels, "tokens", lambda *given: 1.01 * tokens(*given))
    running.seconds()
    assert "are 1.0e-02 off those of single steps" in running.problem()


# Stalls


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_launch_that_gave_up_is_said_and_the_next_text_is_whole(temperature, weights, played, monkeypatch):
    monkeypatch.setattr(Arriving, "arrived", lambda _: False)  # the host is ahead: no step finds the news of the one before
    request = replace(GREEDY["first"], sampling=replace(GREEDY["first"].sampling, temperature=temperature))
    engine, expected = KernelEngine(weights, "streaming"), alone(weights, request)
    assert list(engine.run(request)) == expected
    played.stalls, got = played.launches + len(request.prompt) + 2, []
    with pytest.raises(DecodeStalled, match="'streaming' waited for seconds and gave up"):
        got.extend(token for token in engine.run(request))
    assert 0 < len(got) < len(expected)
    assert got == expected[: len(got)]
    assert list(engine.run(request)) == expected


def test_a_step_that_gave_up_is_said_by_the_next_and_cleared(weights, played):
    cache = prefill(weights, torch.tensor([1, 2, 3]), KVCache.empty(MODEL))[1]
    step = {"token": torch.tensor([5]), "weights": weights, "cache": cache}
    played.stalls = 1
    assert decode_step(**step, variant="streaming")[0].isnan().all()
    with pytest.raises(DecodeStalled):
        decode_step(**step, variant="streaming")
    assert torch.allclose(decode_step(**step, variant="streaming")[0], decode_step(**step, variant="eager")[0])


def test_a_prompt_that_gave_up_makes_no_token(weights, played, monkeypatch):
    monkeypatch.setattr(Arriving, "arrived", lambda _: False)
    engine, expected = KernelEngine(weights, "streaming"), alone(weights, SAMPLED)
    played.stalls = len(SAMPLED.prompt)
    with pytest.raises(DecodeStalled):
        next(engine.run(SAMPLED))
    assert list(engine.run(SAMPLED)) == expected


def test_an_error_amid_a_prompt_is_not_cleared_by_another_text(weights, played, monkeypatch):
    """Else later steps would read rows of the cache that earlier ones never wrote."""
    kernels, step, others, pool = launch.kernels_for(weights, "streaming"), launch.Kernels.step, [], ThreadPoolExecutor(1)

    def beside_another(self, *given):
        logits = step(self, *given)
        if played.launches == played.stalls:
            others.append(pool.submit(kernels.check))
        time.sleep(0.02)
        return logits

    monkeypatch.setattr(launch.Kernels, "step", beside_another)
    monkeypatch.setattr(Arriving, "arrived", lambda _: False)
    played.stalls = 1
    with pytest.raises(DecodeStalled):
        list(KernelEngine(weights, "streaming").run(GREEDY["first"]))
    with pytest.raises(DecodeStalled):
        others[0].result(5)
    assert list(KernelEngine(weights, "streaming").run(GREEDY["first"])) == alone(weights, GREEDY["first"])


def test_a_text_whose_prompt_pytorch_reads_is_not_blamed_for_the_one_before(weights, played, monkeypatch):
    monkeypatch.setattr(Arriving, "arrived", lambda _: False)
    left = KernelEngine(weights, "streaming").run(GREEDY["first"])
    next(left)
    played.stalls = played.launches + 1
    next(left)
    left.close()
    assert next(KernelEngine(weights, "streaming").run(GREEDY["second"])) == alone(weights, GREEDY["second"])[0]


def test_a_sum_out_of_range_is_said_and_the_next_text_is_whole(weights, played):
    engine, expected = KernelEngine(weights, "streaming"), alone(weights, GREEDY["first"])
    played.stalls, played.error = 2, OUT_OF_RANGE
    with pytest.raises(DecodeOverflow, match=r"'streaming' adds in integers of 2\^-28 and holds up to 67108864"):
        list(engine.run(GREEDY["first"]))
    assert list(engine.run(GREEDY["first"])) == expected


def test_logits_that_are_no_numbers_end_a_text_wherever_they_come(weights, played, monkeypatch):
    tokens = launch.Kernels.tokens
    monkeypatch.setattr(launch.Kernels, "tokens", lambda *given: tokens(*given).index_fill(0, torch.tensor([5]), torch.nan))
    made = KernelEngine(weights, "streaming").run(GREEDY["second"])
    assert next(made) == alone(weights, GREEDY["second"])[0]
    with pytest.raises(LogitsNotFinite):
        next(made)


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
            patched.setattr(*((KVCache, "empty") if place else ("onelaunch.decode.engine.prefill",)), exhausted)
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
    monkeypatch.setattr(launch.nvrtc, "read", lambda package, file: read(package, file) + "#" * (file == "check.py"))
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
    for name in ("numpy", "onelaunch.decode.check", "onelaunch.decode.launch"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert decode_step.get(rung).why_not(query_of(SMALL)) == "needs numpy: pip install 'onelaunch[decode]'"


# What is kept


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
