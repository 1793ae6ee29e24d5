"""Driver of the server's ASGI application in this process, and engines that tests control.

An :class:`App` runs the application in an event loop of a thread, so that a test may call it from several threads.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from typing_extensions import Self

from onelaunch.decode import Model, Request
from onelaunch.decode.serve.app import make_app
from onelaunch.decode.serve.service import Limits, Service
from tests.decode.models import SMALL

SECONDS = 60
"""Longest time of a call, after which a test fails."""


class Answer:
    """Answer to a request.

    Attributes:
        status: HTTP status; ``None`` if the request ended without one.
        headers: Headers by lower-case name.
        pieces: Pieces of the body as they were sent.
    """

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.status = messages[0]["status"] if messages else None
        self.headers = {name.decode(): value.decode() for name, value in (messages[0]["headers"] if messages else ())}
        self.pieces = [message["body"] for message in messages[1:] if message.get("body")]

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Contents of the server-sent events; the last one must be ``[DONE]``, and is left out."""
        assert self.status == 200
        assert self.headers["content-type"].startswith("text/event-stream")
        *events, last = events_of(self.body)
        assert last == "[DONE]"
        return [json.loads(event) for event in events]


def events_of(body: bytes) -> list[str]:
    """Return the data of each server-sent event."""
    *events, rest = body.decode().split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


class App:
    """Application in an event loop of its own thread.

    Args:
        model: Model, or a function that loads it.
        limits: Limits on requests.
        event_per_token: Flag to send each token by itself.
        options: Further arguments of :func:`onelaunch.decode.serve.app.make_app`.
    """

    def __init__(
        self, model: Model | Callable[[], Model], limits: Limits | None = None, *, event_per_token: bool = False, **options: Any
    ) -> None:
        loader = model if callable(model) else lambda: model
        self.service = Service("tiny", loader, limits, event_per_token=event_per_token)
        self.app = make_app(self.service, **options)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._lifespan = self.app.router.lifespan_context(self.app)

    def __enter__(self) -> Self:
        self._thread.start()
        self.call(self._lifespan.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._lifespan.__aexit__(None, None, None))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS)
        self.loop.close()

    def ready(self) -> App:
        """Wait until the model is loaded."""

        async def wait() -> None:
            while not self.service.loaded and self.service.failure is None:
                await asyncio.sleep(0.001)

        self.call(wait())
        return self

    def call(self, work: Any) -> Any:
        """Await something in the application's loop and return its result."""

        async def awaited() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result(SECONDS)

    def start(self, path: str, content: Any = None, **how: Any) -> Future[Answer]:
        """Send a request, and return its future answer; the arguments are those of :meth:`ask`."""
        return asyncio.run_coroutine_threadsafe(self._ask(path, content, **how), self.loop)

    def ask(self, path: str, content: Any = None, **how: Any) -> Answer:
        """Send a request and return its answer.

        Args:
            path: Path.
            content: Body, as bytes, or as an object that becomes JSON; without one the method is GET.
            how: ``headers`` in addition, ``method``, and two events: the client hangs up at ``hang_up``, and reads nothing before
                ``reads``.
        """
        return self.start(path, content, **how).result(SECONDS)

    def number(self, name: str) -> float:
        """Return the value of a metric, summed over its labels."""
        lines = self.ask("/metrics").body.decode().splitlines()
        found = [float(line.split()[-1]) for line in lines if line.partition("{")[0] == name]
        return sum(found)

    async def _ask(
        self,
        path: str,
        content: Any,
        *,
        headers: dict[str, str] | None = None,
        method: str | None = None,
        hang_up: asyncio.Event | None = None,
        reads: asyncio.Event | None = None,
    ) -> Answer:
        body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
        given = {"content-type": "application/json", "host": "localhost:8000"} | (headers or {})
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "query_string": b"",
            "method": method or ("GET" if content is None else "POST"), "path": path, "raw_path": path.encode(), "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()], "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }  # fmt: skip
        messages: list[dict[str, Any]] = []
        requests = [
            {"type": "http.request", "body": body[at : at + 65_536], "more_body": True} for at in range(0, len(body), 65_536)
        ]
        requests.append({"type": "http.request", "body": b"", "more_body": False})
        gone = hang_up or asyncio.Event()

        async def receive() -> dict[str, Any]:
            if requests:
                return requests.pop(0)
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if reads is not None:
                await reads.wait()
            messages.append(message)
            await asyncio.sleep(0)

        await self.app(scope, receive, send)
        return Answer(messages)


# Engines


class Letters:
    """Tokenizer of letters: 1 is a, 2 is b, and 0 ends a sequence."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(ord(letter) - 96 for letter in text)

    def decode(self, tokens) -> str:
        return "".join(chr(token + 96) for token in tokens if token)

    def token(self, token: int) -> str:
        return chr(token + 96) if token else "<end>"


class Script:
    """Engine that makes the tokens of a text, some per launch, once the test allows each launch.

    The first requests warm the server up, and are not held.

    Args:
        text: Letters; ``.`` ends the sequence.
        per_launch: Number of tokens per launch.
        then: Exception to raise behind the last token.

    Attributes:
        gate: Semaphore that a launch takes; ``None`` for no limit.
        prompts: Prompts in the order in which they were begun.
        launched: Number of launches so far.
        waiting: Event that is set while a launch waits for the gate.
    """

    def __init__(self, text: str = "abcdefgh.", per_launch: int = 1, then: BaseException | None = None) -> None:
        self.config = replace(SMALL, max_position_embeddings=40)
        self.text, self.per_launch, self.then = text, per_launch, then
        self.gate: threading.Semaphore | None = None
        self.prompts: list[tuple[int, ...]] = []
        self.launched = 0
        self.waiting = threading.Event()

    def launches(self, request: Request) -> Generator[list[int], None, None]:
        self.prompts.append(request.prompt)
        tokens = [0 if letter == "." else ord(letter) - 96 for letter in self.text[: request.max_new_tokens]]
        for at in range(0, len(tokens), self.per_launch):
            if self.gate is not None:
                self.waiting.set()
                while not self.gate.acquire(timeout=0.002):
                    if request.cancelled():
                        return
            if request.cancelled():
                return
            self.launched += 1
            launch = tokens[at : at + self.per_launch]
            yield launch
            if set(launch) & set(request.ends):
                return
        if self.then is not None and self.gate is not None:
            raise self.then

    def run(self, request: Request) -> Generator[int, None, None]:
        for launch in self.launches(request):
            yield from launch


def scripted(*arguments: Any, **options: Any) -> App:
    """Return an application whose engine is a :class:`Script`: its attribute ``engine``."""
    script = {name: options.pop(name) for name in ("per_launch", "then") if name in options}
    engine = Script(*arguments, **script)
    app = App(Model(engine, Letters()), **options)  # pyrefly: ignore[bad-argument-type]
    app.engine = engine
    return app
