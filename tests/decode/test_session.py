"""Tests of sessions whose launches PyTorch emulates: prompts, sequences that take turns, timed loops, and errors.

A session owns the buffers of a loaded kernel, which requests share in turns. The fixture ``played`` lets PyTorch emulate the
launches of the variant ``streaming``, and ``weights`` are those of its small model ``MODEL``. ``alone`` returns the tokens of a
request by the eager PyTorch engine, as the reference. ``GREEDY`` holds a request with a prompt of 3 tokens and one of 40;
``SAMPLED`` is greedy too, unless a test gives it sampling parameters. ``CHOICES`` are sampling parameters. ``Pending`` is a
deferred copy to the host; its ``wait`` raises the error of a launch. A kernel stalls if one of its waits times out. ``prose``
and ``prose.raises`` compare wording with the test's entries in ``tests/snapshots/prose.txt``. A test fails if it does not
compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
"""

from __future__ import annotations

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from onelaunch.decode import KVCache, ModelConfig, decode_step, megakernel, random_weights, torch_variants
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.model.sampling import Sampler, Sampling
from onelaunch.decode.runtime import kernels as kernels_file
from onelaunch.decode.runtime import proofs
from onelaunch.decode.runtime.engines import TOKENS_PER_LAUNCH, KernelEngine, Request, TorchEngine
from onelaunch.decode.runtime.kernels import session_for
from onelaunch.decode.runtime.memory import ERROR, OUT_OF_RANGE
from onelaunch.decode.runtime.models import MODELS
from onelaunch.decode.runtime.order import StreamOrder
from onelaunch.decode.runtime.session import Pending, Session
from onelaunch.decode.step import capabilities
from onelaunch.errors import (
    ArgumentError,
    DecodeOverflow,
    DecodeStalled,
    LogitsNotFinite,
)
from tests.decode.played import CHOICES, GREEDY, MODEL, SAMPLED, Launch, alone

# Prompts


def test_the_kernel_reads_shorter_prompts_of_larger_models():
    """PyTorch reads the weights once per prompt, the kernel once per token.

    On an H200 they are equally fast at some 60 tokens for 0.6B, 25 for 1.7B and 12 for 4B; ``prompt_steps`` is a little less.
    """
    sizes = ((28, 1024, 3072, 16), (28, 2048, 6144, 16), (36, 2560, 9728, 32))
    configs = [
        ModelConfig(151_936, hidden, intermediate, layers, heads, 8, 128, tie_word_embeddings=True)
        for layers, hidden, intermediate, heads in sizes
    ]
    most = [megakernel.prompt_steps("streaming", config) for config in configs]
    assert most == sorted(most, reverse=True)
    assert all(1 < tokens < 64 for tokens in most)
    assert not any(megakernel.prompt_steps("graph", config) for config in configs)


@pytest.mark.parametrize("make", [TorchEngine, KernelEngine])
def test_the_kernel_reads_prompts_up_to_its_limit(make, weights, played, monkeypatch):
    most, prefilled = megakernel.prompt_steps("streaming", MODEL), []
    monkeypatch.setattr("onelaunch.decode.runtime.engines.prefill", lambda *given: prefilled.append(given) or prefill(*given))
    for tokens, launches in ((most, most), (most + 1, 0)):
        request = Request(tuple(range(tokens)), 1)
        before = played.launches
        assert list(make(weights, "streaming").run(request)) == alone(weights, request)
        assert played.launches - before == launches
    assert len(prefilled) == 1 + 2, "one by the tested engine, for the longer prompt, and two by the reference"


@pytest.mark.parametrize("make", [TorchEngine, KernelEngine])
def test_pytorchs_default_dtype_and_device_do_not_matter(make, weights, played):
    """With buffers of the default dtype, a kernel would write logits beyond their memory."""
    expected = [alone(weights, request) for request in GREEDY.values()]
    for default, usual, other in (
        (torch.set_default_dtype, torch.float32, torch.bfloat16), (torch.set_default_dtype, torch.float32, torch.float64),
        (torch.set_default_device, None, "meta"),
    ):  # fmt: skip
        MODELS.discard(weights)
        default(other)
        try:
            assert [list(make(weights, "streaming").run(request)) for request in GREEDY.values()] == expected
        finally:
            default(usual)


# Sequences that take turns


def test_interleaved_sequences_equal_those_generated_alone(weights, played):
    engine = KernelEngine(weights, "streaming")
    texts = [engine.run(request) for request in GREEDY.values()]
    found = [[], []]
    for _ in range(3 * TOKENS_PER_LAUNCH + 5):
        for text, tokens in zip(texts, found, strict=True):
            tokens += [token for token in (next(text, None),) if token is not None]
    assert found == [alone(weights, request) for request in GREEDY.values()]


@pytest.mark.parametrize("every", [1, 5])
def test_a_step_of_another_sequence_changes_nothing(every, weights, played):
    other, tokens = KVCache.empty(MODEL, 300).with_length(200), []
    for number, token in enumerate(KernelEngine(weights, "streaming").run(GREEDY["first"])):
        tokens.append(token)
        if number % every == 0:
            decode_step(torch.tensor([7]), weights, other, variant="streaming")
    assert tokens == alone(weights, GREEDY["first"])


@pytest.mark.parametrize("name", CHOICES)
def test_sampled_sequences_take_turns_with_many_tokens_per_launch(name, weights, played):
    requests = [replace(GREEDY["first"], sampling=CHOICES[name]), replace(GREEDY["second"], sampling=CHOICES[name])]
    engine = KernelEngine(weights, "streaming")
    texts = [engine.run(request) for request in requests]
    found = [[], []]
    for _ in range(3 * TOKENS_PER_LAUNCH + 5):
        for text, tokens in zip(texts, found, strict=True):
            tokens += [token for token in (next(text, None),) if token is not None]
    assert found == [alone(weights, request) for request in requests]
    assert found[0] != alone(weights, GREEDY["first"])
    (short, long), most = (len(request.prompt) for request in requests), megakernel.prompt_steps("streaming", MODEL)
    assert short < most < long
    assert played.launches == short + sum(-(-(request.max_new_tokens - 1) // TOKENS_PER_LAUNCH) for request in requests)


def test_the_plan_of_the_first_sampled_sequence_is_proved(weights, played, monkeypatch, tmp_path):
    checked = []
    proofs._check_sampling.cache_clear()
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))
    monkeypatch.setattr(proofs, "check", lambda *plans: checked.append([len(plan.tail) for plan in plans]))
    session = session_for(weights, "streaming")
    for sampling in (Sampling(), CHOICES["penalty"], CHOICES["drawn"], CHOICES["all"]):
        sampler = Sampler(sampling, torch.tensor([1]), MODEL.vocab_size)
        with session.sequence(KVCache.empty(MODEL, 4), torch.tensor([1]), sampler) as sequence:
            sequence.step(2)
    # The tail of such a plan has the LM head, the radix-select passes, the draw and the next token.
    assert checked == [[3 + rounds for rounds in proofs.SAMPLED]]
    proofs._check_sampling.cache_clear()


def test_one_launch_per_phase_supports_only_greedy_decoding(weights, played, monkeypatch, prose):
    """Sampled sequences then run step by step in PyTorch, with the same tokens."""
    monkeypatch.setattr(decode_step.get("graph"), "_supports", [])
    steps = []
    monkeypatch.setattr(decode_step.get("graph"), "run", lambda call: steps.append(call) or torch_variants.eager(call))
    request = replace(SAMPLED, sampling=CHOICES["drawn"])
    assert list(KernelEngine(weights, "graph").run(request)) == alone(weights, request)
    assert len(steps) == request.max_new_tokens - 1
    sampler = Sampler(CHOICES["penalty"], torch.tensor([1]), MODEL.vocab_size)
    sequence = session_for(weights, "graph").sequence(KVCache.empty(MODEL, 4), torch.tensor([1]), sampler)
    with prose.raises(ArgumentError, match="'graph'"), sequence:
        sequence.step(1)


def test_an_undisturbed_sequence_is_bound_once(weights, played, monkeypatch):
    session, bound = session_for(weights, "streaming"), []
    bind = session.bind
    monkeypatch.setattr(session, "bind", lambda *given: bound.append(given) or bind(*given))
    assert list(KernelEngine(weights, "streaming").run(GREEDY["first"])) == alone(weights, GREEDY["first"])
    assert len(bound) == 1


def test_sequences_read_by_several_threads_are_correct(weights, played, monkeypatch):
    pack, packed = kernels_file.pack, []
    # The pause lets the other threads come while the first one packs.
    monkeypatch.setattr(kernels_file, "pack", lambda *given: time.sleep(0.02) or packed.append(given) or pack(*given))
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

    waits, order = [], StreamOrder(torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for name, captured in (("a", False), ("a", False), ("b", False), ("c", True), ("b", False), ("a", False)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, name=name: Stream(name=name))
        order.join()
    assert waits == [("b", "a"), ("a", "b")]


@pytest.fixture
def watched(weights, played, monkeypatch):
    """Return a session, and the recorded order of its operations on the device."""
    MODELS.discard(weights)
    session, done = session_for(weights, "streaming"), []

    def watch(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: done.append(name) or real(*given))

    for owner, name in ((session.order, "join"), (session, "bind"), (session.kernel, "launch"), (session.memory, "reset")):
        watch(owner, name)
    return session, done


def test_streams_are_synchronized_before_the_buffers_are_touched(watched):
    """Without that, a launch on one stream would read words that a launch on another stream is still writing."""
    session, done = watched
    first, second = (session.sequence(KVCache.empty(MODEL, 8), torch.tensor([token])) for token in (1, 2))
    for sequence in (first, first, second):
        with sequence:
            sequence.step(2)
    assert done == ["join", "bind", "launch", "join", "launch", "join", "bind", "launch"]
    done.clear()
    session.step(torch.tensor([3]), KVCache.empty(MODEL, 8))
    assert done == ["join", "launch"]
    assert session.active is None, "a single step is not bound to a sequence"
    done.clear()
    session.memory.state[ERROR] = 1
    with pytest.raises(DecodeStalled):
        session.check()
    assert done == ["join", "reset"]


def test_a_session_is_freed_with_its_model_without_garbage_collection(played):
    """A reference cycle would keep gigabytes of buffers, and CUDA graphs that a collection could destroy during a capture."""
    weights = random_weights(MODEL)
    step = {"token": torch.tensor([1]), "weights": weights, "cache": KVCache.empty(MODEL, 8)}
    gc.collect()
    gc.disable()
    try:
        decode_step(**step, variant="streaming")
        list(KernelEngine(weights, "streaming").run(GREEDY["first"]))
        session = weakref.ref(session_for(weights, "streaming"))
        assert session() is not None
        del weights, step
        assert session() is None
    finally:
        gc.enable()


def test_the_error_of_a_step_outlives_its_session(played):
    session = session_for(weights := random_weights(MODEL), "streaming")
    session.memory.state[ERROR] = 1
    pending = Pending(session.device, session=session)
    del weights, session
    with pytest.raises(DecodeStalled):
        pending.wait()


def test_a_finished_sequence_frees_its_cache(weights, played):
    """A session outlives its sequences, whose caches may take gigabytes."""
    cache = KVCache.empty(MODEL, 8)
    keys = weakref.ref(cache.keys)
    with session_for(weights, "streaming").sequence(cache, torch.tensor([1])) as sequence:
        sequence.step(2)
        pending = sequence.copy_tokens()
    del cache, sequence
    gc.collect()
    assert keys() is None
    assert len(pending.wait()) == 2


def test_a_failed_turn_releases_the_session(watched):
    """A turn that failed must not lock other threads out of the session."""
    session, _ = watched
    sequence = session.sequence(KVCache.empty(MODEL, 8), torch.tensor([1]))
    with pytest.raises(ZeroDivisionError), sequence:
        raise ZeroDivisionError
    session.order.join = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError), sequence:
        pass
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(session.lock.acquire, timeout=5).result(10)


def test_a_turn_excludes_other_threads(watched):
    """Between the check of the buffers' owner and the launch, no other sequence may bind them."""
    session, done = watched
    first, second = (session.sequence(KVCache.empty(MODEL, 8), torch.tensor([token])) for token in (1, 2))

    def other():
        with second:
            done.append("other's turn")

    with ThreadPoolExecutor(1) as pool:
        with first:
            waiting = pool.submit(other)
            time.sleep(0.05)  # the other turn would begin now if nothing kept it out
            first.step(2)
            pending = first.copy_tokens()
            done.append("turn ends")
        waiting.result(10)
    assert done.index("turn ends") < done.index("other's turn")
    assert len(pending.wait()) == 2


# Barriers and loops that studies measure


# Value of the 32-bit counter before the step, to which each CTA adds one per barrier.
@pytest.mark.parametrize("before", [0, 2**31 - 20, -7])
def test_barriers_are_counted_across_a_wraparound_of_the_counter(before, step, weights, played, monkeypatch):
    session, run = session_for(weights, "streaming"), Launch.__call__

    def bumping(self, grid, *arguments):
        """Launch as before, and count nine barriers of each CTA."""
        counters = arguments[13]
        assert counters is session.memory.counters
        counters[0] = (int(counters[0]) + 9 * grid[0] + 2**31) % 2**32 - 2**31
        run(self, grid, *arguments)

    monkeypatch.setattr(Launch, "__call__", bumping)
    session.memory.counters[0] = before
    assert capabilities.barriers(decode_step.get("streaming"))(decode_step.bind(**step)) == 9
    played.stalls = played.launches + 1
    with pytest.raises(DecodeStalled):
        session.barriers(step["token"], step["cache"])


@pytest.fixture
def step(weights):
    """Return the arguments of a step at position 3."""
    cache = prefill(weights, torch.tensor([1, 2, 3]), KVCache.empty(MODEL))[1]
    return {"token": torch.tensor([5]), "weights": weights, "cache": cache}


@pytest.mark.parametrize("loop", ["running", "served"])
def test_consecutive_tokens_are_those_of_single_steps(loop, step, weights, played, monkeypatch, prose):
    made = decode_step.loops[loop](decode_step.get("streaming"), step)
    assert 0 < made.seconds() < 1
    assert made.count % 16 == 0  # a loop takes a multiple of 16 tokens while the context has room for them
    assert made.problem() is None
    launch = Session.launch

    def other(self, cache, count, *sampler):
        found = launch(self, cache, count, *sampler)
        self.memory.tokens[8] += 1  # another token than the launch has made at position 8
        return found

    monkeypatch.setattr(Session, "launch", other)
    made.seconds()
    prose(made.problem(), mask={r"token \d+ of \d+": "token <number> of <number>"})  # as many tokens as a fixed time takes


def test_consecutive_steps_keep_their_inputs_and_share_a_launch(step, played):
    before = step["cache"].keys.clone()
    running = decode_step.loops["running"](decode_step.get("streaming"), step)
    launches = played.launches
    running.seconds()
    assert played.launches == launches + 1
    assert torch.equal(step["cache"].keys, before)


def test_other_logits_after_the_same_tokens_are_reported(step, played, monkeypatch, prose):
    running = decode_step.loops["running"](decode_step.get("streaming"), step)
    launch = Session.launch
    monkeypatch.setattr(Session, "launch", lambda *given: 1.01 * launch(*given))
    running.seconds()
    prose(running.problem(), mask={r"after \d+ tokens": "after <number> tokens"})  # as many tokens as a fixed time takes


# Stalls


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stalled_launch_is_reported_and_the_next_sequence_succeeds(temperature, weights, played, monkeypatch, prose):
    # The host runs ahead, so that no step sees the error of the step before.
    monkeypatch.setattr(Pending, "arrived", lambda _: False)
    request = replace(GREEDY["first"], sampling=replace(GREEDY["first"].sampling, temperature=temperature))
    engine, expected = KernelEngine(weights, "streaming"), alone(weights, request)
    assert list(engine.run(request)) == expected
    played.stalls, got = played.launches + len(request.prompt) + 2, []
    with prose.raises(DecodeStalled, match="'streaming'"):
        got.extend(token for token in engine.run(request))
    assert 0 < len(got) < len(expected)
    assert got == expected[: len(got)]
    assert list(engine.run(request)) == expected


def test_a_stalled_step_is_reported_by_the_next_and_cleared(weights, played):
    cache = prefill(weights, torch.tensor([1, 2, 3]), KVCache.empty(MODEL))[1]
    step = {"token": torch.tensor([5]), "weights": weights, "cache": cache}
    played.stalls = 1
    assert decode_step(**step, variant="streaming")[0].isnan().all()
    with pytest.raises(DecodeStalled):
        decode_step(**step, variant="streaming")
    assert torch.allclose(decode_step(**step, variant="streaming")[0], decode_step(**step, variant="eager")[0])


def test_a_stalled_prompt_makes_no_token(weights, played, monkeypatch):
    monkeypatch.setattr(Pending, "arrived", lambda _: False)
    engine, expected = KernelEngine(weights, "streaming"), alone(weights, SAMPLED)
    played.stalls = len(SAMPLED.prompt)
    with pytest.raises(DecodeStalled):
        next(engine.run(SAMPLED))
    assert list(engine.run(SAMPLED)) == expected


def test_an_error_within_a_prompt_is_not_cleared_by_another_sequence(weights, played, monkeypatch):
    """If it were, later steps would read rows of the cache that earlier steps never wrote."""
    session, step, others, pool = session_for(weights, "streaming"), Session.step, [], ThreadPoolExecutor(1)

    def beside_another(self, *given):
        logits = step(self, *given)
        if played.launches == played.stalls:
            others.append(pool.submit(session.check))
        time.sleep(0.02)  # the other thread would clear the error now if nothing kept it out
        return logits

    monkeypatch.setattr(Session, "step", beside_another)
    monkeypatch.setattr(Pending, "arrived", lambda _: False)
    played.stalls = 1
    with pytest.raises(DecodeStalled):
        list(KernelEngine(weights, "streaming").run(GREEDY["first"]))
    with pytest.raises(DecodeStalled):
        others[0].result(5)
    assert list(KernelEngine(weights, "streaming").run(GREEDY["first"])) == alone(weights, GREEDY["first"])


def test_a_sequence_with_a_pytorch_prompt_does_not_report_an_earlier_error(weights, played, monkeypatch):
    monkeypatch.setattr(Pending, "arrived", lambda _: False)
    left = KernelEngine(weights, "streaming").run(GREEDY["first"])
    next(left)
    played.stalls = played.launches + 1
    next(left)
    left.close()
    assert next(KernelEngine(weights, "streaming").run(GREEDY["second"])) == alone(weights, GREEDY["second"])[0]


def test_a_sum_out_of_range_is_reported_and_the_next_sequence_succeeds(weights, played, prose):
    engine, expected = KernelEngine(weights, "streaming"), alone(weights, GREEDY["first"])
    played.stalls, played.error = 2, OUT_OF_RANGE
    with prose.raises(DecodeOverflow, match="'streaming'"):
        list(engine.run(GREEDY["first"]))
    assert list(engine.run(GREEDY["first"])) == expected


def test_logits_that_are_not_finite_end_a_sequence_at_any_step(weights, played, monkeypatch):
    launch = Session.launch
    monkeypatch.setattr(Session, "launch", lambda *given: launch(*given).index_fill(0, torch.tensor([5]), torch.nan))
    made = KernelEngine(weights, "streaming").run(GREEDY["second"])
    assert next(made) == alone(weights, GREEDY["second"])[0]
    with pytest.raises(LogitsNotFinite):
        next(made)
