"""Tests of the order of requests, of clients that hang up, of times that are over, and of the end of the server.

``scripted`` serves an engine that makes prescribed letters. Its ``gate`` lets a test decide when each launch happens.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from onelaunch.decode.model import forward as forward_file
from onelaunch.decode.serve import endpoint, service
from onelaunch.decode.serve.service import Limits
from tests.decode.serve.driver import App, events_of, scripted

COMPLETIONS = "/v1/completions"


def fields(prompt="a", **more):
    return {"model": "tiny", "prompt": prompt, "max_tokens": 30} | more


def until(condition):
    """Wait until a condition holds."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def held():
    """Return an application whose queue has two places, and whose device is held by a request for the prompt ``a``."""
    with scripted(limits=Limits(waiting=2)) as app:
        app.ready().engine.prompts.clear()
        app.engine.gate = threading.Semaphore(0)
        app.first = app.start(COMPLETIONS, fields("a"))
        until(lambda: app.engine.prompts)
        yield app
        app.engine.gate.release(1000)


def waiting(app):
    return app.number("vllm:num_requests_waiting")


def test_requests_run_in_the_order_of_their_arrival(held):
    others = []
    for count, prompt in enumerate("bc", 1):
        others.append(held.start(COMPLETIONS, fields(prompt)))
        until(lambda count=count: waiting(held) == count)
    assert held.number("vllm:num_requests_running") == 1
    held.engine.gate.release(1000)
    for answer in (held.first, *others):
        assert answer.result(20).json["choices"][0]["text"] == "abcdefgh"
    assert held.engine.prompts == [(1,), (2,), (3,)]
    assert (waiting(held), held.number("vllm:num_requests_running")) == (0, 0)


def test_a_full_queue_refuses_with_a_time_to_retry(held):
    others = [held.start(COMPLETIONS, fields(prompt)) for prompt in "bc"]
    until(lambda: waiting(held) == 2)
    answer = held.ask(COMPLETIONS, fields("d"))
    assert (answer.status, answer.error["type"], answer.error["code"]) == (429, "rate_limit_error", "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    held.engine.gate.release(1000)
    assert all(other.result(20).status == 200 for other in others)
    assert held.ask(COMPLETIONS, fields("e")).status == 200


def test_a_client_that_hangs_up_leaves_the_queue(held):
    gone = asyncio.Event()
    second = held.start(COMPLETIONS, fields("b"), hang_up=gone)
    third = held.start(COMPLETIONS, fields("c"))
    until(lambda: waiting(held) == 2)
    held.loop.call_soon_threadsafe(gone.set)
    assert second.result(20).status is None
    until(lambda: waiting(held) == 1)
    held.engine.gate.release(1000)
    assert third.result(20).status == 200
    assert held.engine.prompts == [(1,), (3,)]


@pytest.mark.parametrize("stream", [True, False])
def test_the_device_stops_when_the_client_hangs_up(stream):
    """The client hangs up after the second launch, or, without a stream, while the device makes the third."""
    gone = asyncio.Event()
    with scripted("abcdefghabcdefgh") as app:
        app.ready().engine.gate = threading.Semaphore(2)
        before = app.engine.launched
        answer = app.start(COMPLETIONS, fields(stream=stream), hang_up=gone)
        until(lambda: app.engine.launched == before + 2)
        app.loop.call_soon_threadsafe(gone.set)
        answer = answer.result(20)
        assert app.engine.launched == before + 2
        assert app.number("vllm:num_requests_running") == 0
        assert 'finished_reason="abort"' in app.ask("/metrics").body.decode()
        app.engine.gate.release(1000)
        assert app.ask(COMPLETIONS, fields(max_tokens=3)).json["choices"][0]["text"] == "abc"
    if stream:
        assert len(events_of(answer.body)) <= 2
        assert b"[DONE]" not in answer.body
    else:
        assert answer.status is None


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_keeps_nobody_waiting(stream):
    reads = asyncio.Event()
    with scripted() as app:
        slow = app.ready().start(COMPLETIONS, fields(stream=stream), reads=reads)
        assert app.ask(COMPLETIONS, fields("b")).json["choices"][0]["text"] == "abcdefgh"
        assert not slow.done()
        app.loop.call_soon_threadsafe(reads.set)
        assert slow.result(20).status == 200


def test_a_client_that_never_reads_is_left_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr(endpoint, "_LAST_WORDS_SECONDS", 0.01)
    with scripted(limits=Limits(seconds=0.5)) as app:
        answer = app.ready().ask(COMPLETIONS, fields(stream=True), reads=asyncio.Event())
        assert answer.status is None
        assert app.ask(COMPLETIONS, fields()).status == 200


def test_the_device_stops_within_a_prompt(model, monkeypatch):
    entered, leave, halves, mlp = threading.Event(), threading.Event(), [], forward_file.swiglu_mlp
    with App(model) as app:
        app.ready()

        def slow(*given):
            halves.append(1)
            entered.set()
            leave.wait(5)
            return mlp(*given)

        monkeypatch.setattr(forward_file, "swiglu_mlp", slow)
        gone = asyncio.Event()
        answer = app.start(COMPLETIONS, fields([1] * 300), hang_up=gone)
        assert entered.wait(5)
        app.loop.call_soon_threadsafe(gone.set)
        time.sleep(0.05)
        leave.set()
        assert answer.result(20).status is None
        assert len(halves) == 1, "the model has four layers"
        assert app.number("vllm:num_requests_running") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_time_is_over_ends_with_an_error(stream):
    with scripted(limits=Limits(seconds=1.0)) as app:
        app.ready().engine.gate = threading.Semaphore(1)
        answer = app.ask(COMPLETIONS, fields(stream=stream))
        if stream:
            first, last = events_of(answer.body)
            assert '"text":"a"' in first
            assert '"code":"timeout"' in last
        else:
            assert (answer.status, answer.error["code"]) == (504, "timeout")
        app.engine.gate.release(1000)
        assert app.ask(COMPLETIONS, fields()).status == 200


def test_a_body_that_does_not_arrive_is_refused():
    """Its last part is missing."""
    with scripted(limits=Limits(body_seconds=0.3)) as app:
        app.ready()

        async def incomplete():
            sent = []
            scope = {"type": "http", "headers": [(b"content-type", b"application/json")], "path": COMPLETIONS, "method": "POST"}
            parts = [{"type": "http.request", "body": b"{", "more_body": True}]

            async def receive():
                return parts.pop() if parts else await asyncio.sleep(60)

            async def send(message):
                sent.append(message)

            await app.app(scope, receive, send)
            return sent[0]["status"]

        assert app.call(incomplete()) == 408
        assert app.ask(COMPLETIONS, fields()).status == 200


def test_at_the_end_waiting_requests_are_refused_and_the_running_one_ends(held):
    second = held.start(COMPLETIONS, fields("b"))
    until(lambda: waiting(held) == 1)
    held.loop.call_soon_threadsafe(held.service.queue.close)
    assert (second.result(20).status, second.result().error["code"]) == (503, "shutting_down")
    assert held.ask(COMPLETIONS, fields("c")).status == 503
    held.engine.gate.release(1000)
    assert held.first.result(20).json["choices"][0]["text"] == "abcdefgh"


def test_without_places_a_request_runs_only_if_the_device_is_idle():
    with scripted(limits=Limits(waiting=0)) as app:
        app.ready().engine.prompts.clear()
        app.engine.gate = threading.Semaphore(0)
        first = app.start(COMPLETIONS, fields("a"))
        until(lambda: app.engine.prompts)
        assert app.ask(COMPLETIONS, fields("b")).status == 429
        app.engine.gate.release(1000)
        assert first.result(20).status == 200


def test_a_flood_of_requests_gets_answers_or_refusals(held):
    answers = [held.start(COMPLETIONS, fields("b")) for _ in range(200)]
    held.engine.gate.release(10_000)
    found = [answer.result(30) for answer in answers]
    assert {answer.status for answer in found} <= {200, 429}
    assert sum(answer.status == 200 for answer in found) >= 2
    assert all(answer.json["choices"][0]["text"] == "abcdefgh" for answer in found if answer.status == 200)
    assert held.first.result(20).status == 200
    assert waiting(held) == 0


# First texts


def test_the_first_part_is_sent_before_the_next_launch_is_enqueued(monkeypatch):
    """Without a wait the device's thread would enqueue it while the event loop waits for Python's lock."""
    monkeypatch.setattr(service, "HANDOVER_SECONDS", 20)
    sent, event = [], endpoint.Sender.event

    async def recorded(sender, content):
        # Before it is awaited: uvicorn writes at once, where ``App`` lets others run first.
        sent.append(content["choices"][0]["text"])
        await event(sender, content)

    monkeypatch.setattr(endpoint.Sender, "event", recorded)
    with scripted("abc.", per_launch=2) as app:
        launches, found = app.ready().engine.launches, []

        def watched(request):
            for launch in launches(request):
                found.append(list(sent))
                yield launch

        app.engine.launches = watched
        answer = app.ask(COMPLETIONS, fields(stream=True))
    assert [event["choices"][0]["text"] for event in answer.events] == ["ab", "c"]
    assert found == [[], ["ab"]]


def test_only_long_prompts_are_tokenized_in_threads(monkeypatch):
    """The event loop would be held up by them, and a switch to a thread takes longer than to tokenize a short one."""
    with scripted() as app:
        threads, encode = [], app.ready().service.codec.encode

        def recorded(text):
            threads.append(threading.current_thread().name)
            return encode(text)

        monkeypatch.setattr(app.service.codec, "encode", recorded)
        for prompt, status in (("a", 200), ("a" * 5000, 400), (["a"] * 60, 200)):
            assert app.ask(COMPLETIONS, fields(prompt)).status == status
        assert app.ask(COMPLETIONS, fields(["a"], n=3)).status == 200
    loop = app._thread.name
    assert [name == loop for name in threads] == [True, False, *[False] * 60, True]
