"""Tests of the server with OpenAI's own client, whose transport calls the application in this process."""

from __future__ import annotations

import sys
import threading

import pytest

from onelaunch.decode.serve.service import Limits
from tests.decode.serve.driver import App, scripted

openai = pytest.importorskip("openai", reason="needs OpenAI's client")
HTTP_CLIENT = openai.DefaultAsyncHttpxClient
"""Class derived from that of the package httpx, or httpx2 in later versions."""

MESSAGES = [{"role": "user", "content": "write a class"}]


def client_of(app: App, **options):
    """Return a client of an application."""
    module = next(each.__module__ for each in HTTP_CLIENT.__mro__ if each.__module__.startswith("httpx"))
    http = sys.modules[module.partition(".")[0]]
    transport = http.ASGITransport(app.app)
    return openai.AsyncOpenAI(
        api_key="key", base_url="http://localhost:8000/v1", http_client=http.AsyncClient(transport=transport), max_retries=0,
        **options,
    )  # fmt: skip


def test_the_client_reads_whole_answers(app, model):
    client = client_of(app)
    chat = app.call(
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=5, temperature=0, logprobs=True)
    )
    expected = model.generate(model.chat(MESSAGES), max_new_tokens=5, temperature=0)
    assert chat.choices[0].message.content == expected.text
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage.completion_tokens == len(chat.choices[0].logprobs.content) == 5
    done = app.call(client.completions.create(model="tiny", prompt="def", max_tokens=4, temperature=0, extra_body={"top_k": 5}))
    assert done.choices[0].text == model.generate("def", max_new_tokens=4, temperature=0).text
    assert [each.id for each in app.call(client.models.list()).data] == ["tiny"]
    assert app.call(client.models.retrieve("tiny")).id == "tiny"


def test_the_client_reads_streams(app, model):
    async def read():
        stream = await client_of(app).chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=6,
            seed=2,
            temperature=1,
            stream=True,
            stream_options={"include_usage": True},
        )
        return [chunk async for chunk in stream]

    *chunks, last = app.call(read())
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == model.generate(model.chat(MESSAGES), max_new_tokens=6, seed=2, temperature=1).text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert last.usage.completion_tokens == 6


def test_the_client_raises_its_own_errors(app):
    client = client_of(app)
    for error, fields in {
        openai.NotFoundError: {"model": "other", "messages": MESSAGES},
        openai.BadRequestError: {"model": "tiny", "messages": MESSAGES, "frequency_penalty": 1},
    }.items():
        with pytest.raises(error) as caught:
            app.call(client.chat.completions.create(**fields))
        assert caught.value.param in ("model", "frequency_penalty")
    with scripted(api_key="other") as locked, pytest.raises(openai.AuthenticationError):
        locked.call(client_of(locked).models.list())
    with scripted(limits=Limits(waiting=0)) as busy:
        busy.ready().engine.gate = threading.Semaphore(0)
        running = busy.start("/v1/completions", {"model": "tiny", "prompt": "a"})
        busy.engine.waiting.wait(5)
        with pytest.raises(openai.RateLimitError):
            busy.call(client_of(busy).completions.create(model="tiny", prompt="a"))
        busy.engine.gate.release(100)
        assert running.result(10).status == 200


def test_the_client_raises_the_error_of_a_broken_stream():
    async def read(app):
        stream = await client_of(app).completions.create(model="tiny", prompt="a", stream=True)
        return [chunk async for chunk in stream]

    with scripted("ab", then=ZeroDivisionError()) as app:
        app.ready().engine.gate = threading.Semaphore(100)
        with pytest.raises(openai.APIError):
            app.call(read(app))
