"""Endpoint of completions: it reads a request, waits for the device, and answers whole or by server-sent events.

A request ends early if its client hangs up, or when its time is over. Both cancel the task that answers it, and with it the
generation on the device.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from onelaunch.decode.generate import Stream
from onelaunch.decode.serve.api import Chat, Completion, parse
from onelaunch.decode.serve.metrics import Metrics
from onelaunch.decode.serve.problems import ClientGone, RequestError, of_generation, to_json
from onelaunch.decode.serve.queue import Place
from onelaunch.decode.serve.replies import ChatReply, CompletionReply, Content, Part, Usage
from onelaunch.decode.serve.service import Limits, Service
from onelaunch.errors import OneLaunchError

LOG = logging.getLogger("onelaunch.decode.serve")
"""Log of failures that clients are not told about."""

_LARGE_BODY = 100_000
"""Bytes of a body from which on it is parsed in a thread, so that other requests are not held up."""

_MOST_DRAINED = 64 * 2**20
"""Largest number of bytes of a refused body that are read, so that the client gets to read the answer."""

_EVENT_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
"""Headers of an answer by server-sent events."""

_LAST_WORDS_SECONDS = 5.0
"""Longest time to send the error of a request whose time is over, to a client that may have stopped reading."""

Result = TypeVar("Result")


class Endpoint:
    """ASGI application for one path.

    Args:
        service: Service that generates the answers.
        kind: Kind of completions.
    """

    def __init__(self, service: Service, kind: Literal["chat", "completions"]) -> None:
        self._service, self._kind = service, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, sender = self._service, Sender(send)
        try:
            body = await read_body(scope, receive, service.limits)
        except RequestError as problem:
            await self._fail(sender, problem)
            return
        work = _begun(self._work(body, sender))
        watcher = _begun(_hung_up(receive))
        try:
            done, _ = await asyncio.wait({work, watcher}, timeout=service.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Also if the server shuts down and cancels this task: the device's thread has stopped when the work is done.
            watcher.cancel()
            if not work.done():
                work.cancel()
            await _settle(work)
        if not done:
            problem = RequestError(504, f"The request took longer than {service.limits.seconds:g} s.", code="timeout")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._fail(sender, problem), _LAST_WORDS_SECONDS)

    async def _work(self, body: bytes, sender: Sender) -> None:
        """Answer a request, with an error if it fails."""
        try:
            await self._answer(body, sender)
        except ClientGone:
            return
        except RequestError as problem:
            await self._fail(sender, problem)
        except Exception as problem:
            if not isinstance(problem, OneLaunchError):
                LOG.exception("a request failed")
            await self._fail(sender, self._service.without_paths(of_generation(problem)))

    async def _answer(self, body: bytes, sender: Sender) -> None:
        """Answer a request.

        Raises:
            RequestError: it is refused.
            OneLaunchError: the generation failed.
        """
        service, started = self._service, time.perf_counter()
        kind: type[Chat | Completion] = Chat if self._kind == "chat" else Completion
        request = await asyncio.to_thread(parse, body, kind) if len(body) > _LARGE_BODY else parse(body, kind)
        service.check_model(request.model)
        async with service.queue.place() as place:
            streams = await service.streams(request)
            usage = Usage(prompt=sum(len(stream.prompt) for stream in streams[:: request.n]))
            reply = self._reply(request, streams)
            parts: asyncio.Queue[tuple[int, Part] | None] = asyncio.Queue()
            generation = _begun(self._generate(place, streams, parts, started))
            try:
                choices = await self._forward(request, reply, parts, sender, len(streams))
                await generation  # raises the error with which it ended
            finally:
                generation.cancel()
                await _settle(generation)
        usage.new = sum(len(stream.tokens) for stream in streams)
        service.metrics.request_seconds.observe(time.perf_counter() - started)
        if not request.stream:
            # Twenty log-probabilities of each of many tokens are megabytes, so a thread makes the answer.
            await sender.json(200, await asyncio.to_thread(lambda: to_json(reply.whole(choices, usage))))
            return
        if request.usage_wanted:
            await sender.event(reply.last(usage))
        await sender.end("[DONE]")

    async def _generate(
        self, place: Place, streams: Sequence[Stream], parts: asyncio.Queue[tuple[int, Part] | None], started: float
    ) -> None:
        """Generate all choices of a request one after the other, once it has its turn.

        The parts, each with the index of its choice, are put into a queue, and ``None`` at the end. A client that reads slowly
        therefore does not keep the device from other requests.
        """
        metrics, loop = self._service.metrics, asyncio.get_running_loop()
        try:
            async with place.turn():
                # Metrics are noted once the device's thread has begun, or a part is sent: neither need wait for them. uvloop
                # writes at the end of a turn of the loop, so those of a part are noted in the turn after that which sends it.
                loop.call_soon(metrics.queue_seconds.observe, time.perf_counter() - started)
                clock = _Clock(metrics, started)
                for index, stream in enumerate(streams):
                    loop.call_soon(metrics.prompt_sizes.observe, len(stream.prompt))
                    loop.call_soon(metrics.prompt_tokens.inc, len(stream.prompt))
                    clock.begin()
                    ended = "abort"

                    def take(part: Part, index: int = index) -> None:
                        nonlocal ended
                        ended = part.reason or ended
                        parts.put_nowait((index, part))
                        loop.call_soon(loop.call_soon, clock.tick, len(part.tokens), time.perf_counter())

                    try:
                        await self._service.run(stream, take)
                    finally:
                        metrics.new_tokens.inc(len(stream.tokens))
                        metrics.text_sizes.observe(len(stream.tokens))
                        metrics.finished(ended)
        finally:
            parts.put_nowait(None)

    async def _forward(
        self,
        request: Chat | Completion,
        reply: ChatReply | CompletionReply,
        parts: asyncio.Queue[tuple[int, Part] | None],
        sender: Sender,
        count: int,
    ) -> list[Part]:
        """Send each part at once if they are to be streamed, else return the choices that they make up."""
        made: list[list[Part]] = [[] for _ in range(count)]
        every = self._service.event_per_token or request.logprobs_wanted is not None
        begun: set[int] = set()
        while (item := await parts.get()) is not None:
            index, part = item
            if not request.stream:
                made[index].append(part)
                continue
            if index not in begun and (begin := reply.first(index)) is not None:
                await sender.event(begin)
            begun.add(index)
            if part.text or part.finish or every:
                await sender.event(reply.chunk(index, part))
        return [Part.merged(each) for each in made]

    def _reply(self, request: Chat | Completion, streams: Sequence[Stream]) -> ChatReply | CompletionReply:
        """Return the maker of a request's answers."""
        if isinstance(request, Chat):
            return ChatReply(request, self._service.token_text)
        echoed: list[str] = []
        for prompt in request.prompts() if request.echo else ():
            text = prompt if isinstance(prompt, str) else self._service.codec.decode(prompt)
            echoed += [text] * request.n
        return CompletionReply(request, self._service.token_text, echoed)

    async def _fail(self, sender: Sender, problem: RequestError) -> None:
        """Answer with an error: by status and JSON, or as an event if a stream has begun."""
        self._service.metrics.refused(problem.status)
        if sender.started:
            await sender.event(problem.content())
            await sender.end()
        else:
            await sender.json(problem.status, to_json(problem.content()), problem.headers())


class _Clock:
    """Times of a request's tokens, for the metrics.

    Args:
        metrics: Metrics.
        started: Host time, in seconds, of the request's arrival.
    """

    def __init__(self, metrics: Metrics, started: float) -> None:
        self._metrics, self._started, self._first = metrics, started, True
        self._last: float | None = None

    def begin(self) -> None:
        """Note that a choice begins: the time to its first tokens is no time between tokens."""
        self._last = None

    def tick(self, tokens: int, now: float) -> None:
        """Note that so many tokens have arrived, at a time of the host's clock in seconds."""
        if not tokens:
            return
        if self._first:
            self._metrics.first_token_seconds.observe(now - self._started)
            self._first = False
        elif self._last is not None:
            for _ in range(tokens):
                self._metrics.token_seconds.observe((now - self._last) / tokens)
        self._last = now


class Sender:
    """Sender of an answer: one JSON text, or server-sent events.

    Attributes:
        started: Flag of an answer whose status was sent.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def json(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send a whole answer."""
        fields = {"content-type": "application/json", "content-length": str(len(body))} | (headers or {})
        await self._start(status, [(name.encode(), value.encode()) for name, value in fields.items()])
        await self._send({"type": "http.response.body", "body": body})

    async def event(self, content: Content) -> None:
        """Send an event, and the status before the first."""
        if not self.started:
            await self._start(200, _EVENT_HEADERS)
        await self._send({"type": "http.response.body", "body": b"data: " + to_json(content) + b"\n\n", "more_body": True})

    async def end(self, word: str = "") -> None:
        """End a stream of events, with a word as the last one."""
        body = f"data: {word}\n\n".encode() if word else b""
        await self._send({"type": "http.response.body", "body": body})

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Return the body of a request.

    Raises:
        RequestError: it is no JSON by its media type, too large, or does not arrive in time.
        ClientGone: the client hung up.
    """
    headers = Headers(scope=scope)
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError(415, "The header Content-Type must be application/json.", code="invalid_content_type")
    try:
        return await asyncio.wait_for(_whole_body(receive, limits.body_bytes), limits.body_seconds)
    except asyncio.TimeoutError:
        raise RequestError(408, f"The body did not arrive within {limits.body_seconds:g} s.", code="timeout") from None


async def _whole_body(receive: Receive, most: int) -> bytes:
    """Return the body. One that is too large is read on, but not kept."""
    body, size = bytearray(), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        if size <= most:
            body += piece
        else:
            body.clear()
        if not message.get("more_body", False) or size > _MOST_DRAINED:
            break
    if size > most:
        raise RequestError(413, f"The body has more than {most} bytes, the limit of this server.", code="request_too_large")
    return bytes(body)


async def _hung_up(receive: Receive) -> None:
    """Return when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _begun(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Return a task that has run up to where it waits first, on Python 3.12 or newer; earlier ones begin it later.

    Each task on a request's way to the device would otherwise wait for a turn of the event loop.
    """
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=loop, eager_start=True)
    return loop.create_task(work)


async def _settle(task: asyncio.Task[Any]) -> None:
    """Wait until a task is done, even if the waiting task is cancelled meanwhile; its exception is ignored."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as signal:  # noqa: PERF203 - at most once per shutdown
            cancelled = signal
    if not task.cancelled():
        task.exception()  # marks it as seen
    if cancelled is not None:
        raise cancelled
