"""Tests of cancelled requests, and of the bound on the work that a request has enqueued on the device.

A ``Device`` imitates a GPU with a clock of its own: work that is enqueued takes time after the work before it, and the host
enqueues in no time. The fixture ``played`` lets PyTorch emulate the launches of the variant ``streaming``; ``weights`` are those
of its small model ``MODEL``.
"""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from onelaunch.decode import KVCache, Model, Request, Sampling, ScoredToken, random_weights
from onelaunch.decode.model import forward as forward_file
from onelaunch.decode.model.forward import chunk_tokens, forward, logits_of, prefill
from onelaunch.decode.runtime import engines, pace, session
from onelaunch.decode.runtime.engines import TOKENS_PER_LAUNCH, KernelEngine, TorchEngine
from onelaunch.decode.runtime.pace import Pace, Stopped, TokenTimes
from onelaunch.errors import ArgumentError
from tests.decode.models import SMALL
from tests.decode.played import CHOICES, GREEDY, MODEL, alone

BOUND = 8e-3


class Device:
    """Device that does one piece of work after the other, in seconds of its own time.

    Attributes:
        longest: Longest work that was enqueued at a time.
    """

    def __init__(self) -> None:
        self.now = self.ends = self.longest = 0.0

    def work(self, seconds: float) -> None:
        self.ends = max(self.ends, self.now) + seconds
        self.longest = max(self.longest, self.ends - self.now)

    def mark(self, _) -> Mark:
        return Mark(self)


class Mark:
    """Point behind the work that was enqueued on a ``Device``."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, max(device.ends, device.now)

    def query(self) -> bool:
        return self.at <= self.device.now

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end: Mark) -> float:
        assert self.query()
        assert end.query()
        return 1e3 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(pace, "mark", device.mark)
    monkeypatch.setattr(engines, "mark", device.mark)
    return device


# The bound


@pytest.mark.parametrize("halves", [(0.4e-3, 0.7e-3), (3e-3, 1e-3), (1e-5, 1e-5)])
def test_enqueued_units_stay_below_the_bound(halves, device):
    wait = Pace(torch.device("cuda"), BOUND, lambda: False)
    for number in range(60):
        wait()
        device.work(halves[number % 2])
    assert device.longest <= BOUND + 1e-12
    # The host runs ahead of the device, which is never idle.
    assert device.ends == pytest.approx(30 * sum(halves))
    assert device.longest > min(BOUND / 2, 20 * sum(halves))
    wait.drain()
    assert device.now == device.ends


def test_a_unit_that_exceeds_the_bound_is_enqueued_alone(device):
    wait = Pace(torch.device("cuda"), BOUND, lambda: False)
    for _ in range(5):
        wait()
        device.work(2 * BOUND)
    assert device.longest == pytest.approx(2 * BOUND)


def test_units_that_become_longer_are_noticed(device):
    wait = Pace(torch.device("cuda"), BOUND, lambda: False)
    lengths = [1e-3] * 20 + [4e-3] * 20
    for seconds in lengths:
        wait()
        device.work(seconds)
    device.longest = 0.0
    for _ in range(10):
        wait()
        device.work(4e-3)
    assert device.longest <= BOUND + 1e-12


def test_without_a_bound_nothing_waits(device):
    wait = Pace(torch.device("cuda"), None, lambda: False)
    for _ in range(5):
        wait()
        device.work(1.0)
    wait.drain()
    assert device.now == 0


@pytest.mark.parametrize("seconds", [1e-5, 0.32e-3, 0.8e-3, 3.3e-3, 4.1e-3, 9e-3])
def test_launches_have_as_many_tokens_as_the_bound_allows(seconds):
    times = TokenTimes(10**9, 0, TOKENS_PER_LAUNCH)
    assert times.launches(None, 0, sampled=False) == (2, TOKENS_PER_LAUNCH)
    assert times.launches(BOUND, 0, sampled=False) == (1, 1), "nothing is known yet"
    times.add(5 * seconds, 5, 0, sampled=False)
    many, each = times.launches(BOUND, 0, sampled=False)
    assert many * each * seconds <= BOUND or (many, each) == (1, 1)
    assert each == TOKENS_PER_LAUNCH or (many * each + many) * seconds > BOUND or many == 1
    assert times.launches(BOUND, 0, sampled=True) == (1, 1), "drawing takes longer, and was not measured"


def test_later_positions_are_expected_to_take_longer():
    times = TokenTimes(10**9, 10**6, TOKENS_PER_LAUNCH)
    times.add(0.3e-3, 1, 0, sampled=False)
    assert times.launches(BOUND, 0, sampled=False)[1] > times.launches(BOUND, 1000, sampled=False)[1] >= 5


@pytest.fixture
def timed(played, device, monkeypatch):
    """Let a token take 1 ms of the imitated device, let the host wait for it, and return the numbers of tokens per launch."""
    counts = []

    class Timed(engines.Pending):
        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            self.end = device.mark(None)

        def wait(self):
            self.end.synchronize()
            return super().wait()

    run = type(played).__call__

    def launch(self, grid, *arguments):
        run(self, grid, *arguments)
        counts.append(arguments[-3])
        device.work(1e-3 * arguments[-3])

    monkeypatch.setattr(type(played), "__call__", launch)
    monkeypatch.setattr(engines, "Pending", Timed)
    monkeypatch.setattr(session, "Pending", Timed)
    return counts


@pytest.mark.parametrize("name", ["greedy", "all"])
def test_a_bound_changes_no_token(name, weights, timed, device):
    """Two launches of 4 tokens take as long as the bound of 8 ms."""
    engine = KernelEngine(weights, "streaming")
    for request in GREEDY.values():
        request = replace(request, sampling=CHOICES.get(name, request.sampling))
        bounded = replace(request, max_enqueued_seconds=BOUND)
        assert list(engine.run(bounded)) == alone(weights, request)
    assert BOUND / 2 < device.longest <= BOUND + 1e-12
    assert max(timed) in (3, 4)  # later tokens are expected to take a little longer
    timed.clear()
    assert list(engine.run(GREEDY["first"])) == alone(weights, GREEDY["first"])
    assert max(timed) == TOKENS_PER_LAUNCH


@pytest.mark.parametrize("name", GREEDY)
def test_with_a_bound_the_first_token_comes_before_the_next_launch_is_enqueued(name, weights, timed):
    """The device is done with the prompt then, so the token would only wait for the host."""
    launches = KernelEngine(weights, "streaming").launches(replace(GREEDY[name], max_enqueued_seconds=BOUND))
    assert next(launches) == alone(weights, GREEDY[name])[:1]
    of_prompt = len(timed)
    next(launches)
    assert (of_prompt, timed[of_prompt:]) == (sum(timed[:of_prompt]), [1, 1]), "the times of tokens are not known yet"


def test_a_bound_of_less_than_two_tokens_leaves_one_at_a_time(weights, timed, device):
    request = replace(GREEDY["second"], max_enqueued_seconds=1.5e-3)
    assert list(KernelEngine(weights, "streaming").run(request)) == alone(weights, GREEDY["second"])
    assert set(timed) == {1}
    assert device.longest == pytest.approx(1e-3)


def test_the_chunks_of_a_prompt_depend_on_sizes_alone():
    large = replace(SMALL, num_attention_heads=32, head_dim=128, max_position_embeddings=2**17)
    chunks = [chunk_tokens(large, position) for position in (0, 4096, 8192, 16_384, 32_768, 2**17)]
    assert chunks == [4096, 4096, 2048, 1024, 512, 256]
    assert chunk_tokens(SMALL, 0) == forward_file.PREFILL_CHUNK


# Cancelling


class Counter:
    """Function that is true from a call on, counted from 1."""

    def __init__(self, last: float) -> None:
        self.calls, self.last = 0, last

    def __call__(self) -> bool:
        self.calls += 1
        return self.calls > self.last


@pytest.mark.parametrize("make", [TorchEngine, KernelEngine])
@pytest.mark.parametrize("name", GREEDY)
def test_a_cancelled_request_ends_wherever_it_is(make, name, weights, played):
    """It is cancelled at each question in turn; the session works for the next request."""
    engine, whole = make(weights, "streaming"), alone(weights, GREEDY[name])
    counter = Counter(math.inf)
    assert list(engine.run(replace(GREEDY[name], cancelled=counter))) == whole
    assert counter.calls > 2
    for last in {0, 1, 2, counter.calls // 2, counter.calls - 1}:
        asked = Counter(last)
        found = list(engine.run(replace(GREEDY[name], cancelled=asked)))
        assert found == whole[: len(found)]
        assert len(found) < len(whole)
        assert asked.calls == last + 1, "nothing happens after the answer"
    assert list(engine.run(GREEDY[name])) == whole


def test_a_prompt_is_cancelled_between_the_halves_of_layers():
    weights = random_weights(SMALL)
    wait, layers = Counter(math.inf), SMALL.num_hidden_layers
    prompt = torch.arange(10)
    expected = logits_of(weights, forward(weights, prompt, KVCache.empty(SMALL))[-1])
    assert torch.equal(prefill(weights, prompt, KVCache.empty(SMALL), wait)[0], expected)
    assert wait.calls == 2 * layers
    wait = Pace(torch.device("cpu"), BOUND, Counter(3))
    with pytest.raises(Stopped):
        prefill(weights, prompt, KVCache.empty(SMALL), wait)


def test_a_stream_is_cancelled_from_another_thread_while_it_reads_the_prompt(monkeypatch):
    model, entered, leave = Model(TorchEngine(random_weights(SMALL))), threading.Event(), threading.Event()
    halves, mlp = [], forward_file.swiglu_mlp

    def slow(*given):
        halves.append(1)
        entered.set()
        leave.wait(5)
        return mlp(*given)

    monkeypatch.setattr(forward_file, "swiglu_mlp", slow)
    stream = model.stream([1, 2, 3])
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(stream.step)
        assert entered.wait(5)
        stream.cancel()  # does not wait for the step
        assert not step.done()
        leave.set()
        assert step.result(5) is None
    assert (stream.finish, stream.tokens, halves) == ("closed", [], [1])
    assert model.generate([1, 2, 3], max_new_tokens=3).finish == "length"


def test_leaving_an_asynchronous_stream_stops_the_prompt(monkeypatch):
    model, entered, halves, mlp = Model(TorchEngine(random_weights(SMALL))), threading.Event(), [], forward_file.swiglu_mlp

    def slow(*given):
        halves.append(1)
        entered.set()
        threading.Event().wait(0.2)
        return mlp(*given)

    monkeypatch.setattr(forward_file, "swiglu_mlp", slow)

    async def leave() -> None:
        async def read() -> None:
            async for _ in model.astream([1, 2, 3]):
                pass

        task = asyncio.create_task(read())
        await asyncio.to_thread(entered.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert halves == [1]


# What a stream tells


def test_tokens_of_a_launch_are_ready_together(weights, played):
    stream = Model(KernelEngine(weights, "streaming")).stream(GREEDY["second"].prompt, max_new_tokens=2 * TOKENS_PER_LAUNCH + 1)
    ready = []
    while stream.step() is not None:
        ready.append(stream.ready)
    launch = list(range(TOKENS_PER_LAUNCH))[::-1]
    assert ready[:-1] == [0, *launch, *launch]
    assert tuple(stream.tokens) == tuple(alone(weights, GREEDY["second"]))


@pytest.mark.parametrize("make", [TorchEngine, KernelEngine])
def test_log_probabilities_are_those_of_the_logits(make, weights, played):
    model, prompt, choices = Model(make(weights, "streaming")), [5, 6, 7], {"temperature": 0.9, "repetition_penalty": 1.3}
    stream = model.stream(prompt, max_new_tokens=6, logprobs=3, seed=1, **choices)
    found = stream.result()
    assert found.tokens == model.generate(prompt, max_new_tokens=6, seed=1, **choices).tokens
    text = torch.tensor([*prompt, *found.tokens])
    expected = logits_of(weights, forward(weights, text, KVCache.empty(MODEL))).log_softmax(1)[len(prompt) - 1 : -1]
    for row, token in zip(expected, stream.tokens, strict=True):
        assert isinstance(token, ScoredToken)
        assert token.logprob == pytest.approx(float(row[token]), abs=1e-4)
        values = row.topk(3).values
        assert [logprob for _, logprob in token.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert [float(row[other]) for other, _ in token.top] == pytest.approx(values.tolist(), abs=1e-4)
    none = model.stream(prompt, max_new_tokens=1, logprobs=0).result()
    assert none.tokens[0].top == ()


@pytest.mark.parametrize(
    "options", [{"logprobs": 101}, {"logprobs": True}, {"max_enqueued_seconds": 0}, {"max_enqueued_seconds": "1"}]
)
def test_wrong_options_are_named(options):
    with pytest.raises(ArgumentError, match=next(iter(options))):
        Model(TorchEngine(random_weights(SMALL))).stream([1], **options)


def test_the_server_runs_the_kernels_engine(weights, played):
    """It is emulated, in the server's own thread; every second client hangs up."""
    for package in ("prometheus_client", "starlette", "uvicorn"):
        pytest.importorskip(package, reason="needs the extra serve")
    from tests.decode.serve.driver import App

    class Codec:
        """Tokenizer that writes a token as a character."""

        def encode(self, text):
            return tuple(map(ord, text))

        def decode(self, tokens):
            return "".join(map(self.token, tokens))

        def token(self, token):
            return chr(256 + token)

    engine, fields = KernelEngine(weights, "streaming"), {"model": "tiny", "max_tokens": 30, "stream": True, "temperature": 1}
    with App(Model(engine, Codec())) as app:  # pyrefly: ignore[bad-argument-type]
        app.ready()
        for seed in range(6):
            prompt = GREEDY["first" if seed % 3 else "second"].prompt
            gone = asyncio.Event()
            # One that hangs up asks for more tokens than it gets, so that it does not end before it is seen to run.
            count = 100 if seed % 2 else 30
            answer = app.start("/v1/completions", fields | {"prompt": prompt, "seed": seed, "max_tokens": count}, hang_up=gone)
            if seed % 2:
                while not app.number("vllm:num_requests_running"):
                    assert not answer.done()
                app.loop.call_soon_threadsafe(gone.set)
                answer.result(20)
                continue
            text = "".join(event["choices"][0]["text"] for event in answer.result(20).events)
            expected = alone(weights, Request(prompt, 30, Sampling(temperature=1.0, seed=seed)))
            assert text == Codec().decode(expected)
