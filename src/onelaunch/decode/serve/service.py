"""Model behind the server: loading, tokenizing, and generation in the one thread that uses the device."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from onelaunch.decode.generate import Model, Stream
from onelaunch.decode.model.prompts import Prompt
from onelaunch.decode.model.sampling import LARGEST_SEED
from onelaunch.decode.model.tokenizer import Templated, TextCodec
from onelaunch.decode.serve.api import Chat, Completion, Message, Tokenize
from onelaunch.decode.serve.metrics import Metrics
from onelaunch.decode.serve.problems import RequestError, of_prompt, to_json
from onelaunch.decode.serve.queue import Queue
from onelaunch.decode.serve.replies import Part
from onelaunch.errors import OneLaunchError

ENQUEUED_SECONDS = 8e-3
"""Most work in seconds that a request enqueues on the device. It is completed even if the client hangs up."""

HANDOVER_SECONDS = 2e-3
"""Longest time, in seconds, that the event loop and the device's thread wait for each other to take over a choice."""

_WARM_UP = (128, 1), (8, 36)
"""Numbers of tokens of prompts and of new tokens to generate after loading. PyTorch's prefill and the kernels are then ready."""

_TOKENIZER_THREADS = 4
"""Threads that tokenize prompts, so that a long one does not hold up the others."""

Result = TypeVar("Result")


class _Handover:
    """Hand-over of a choice: from the event loop to the device's thread, and of its parts back.

    Both threads need Python's lock. The one that has handed something over waits without it until the other has begun. Otherwise
    the other would get the lock only when this one is done with what can wait.

    Args:
        loop: Event loop.
        take: Function that is called with each part, in the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[Part], None]) -> None:
        self._loop, self._take = loop, take
        self._begun, self._sent = threading.Lock(), threading.Lock()
        self._begun.acquire()
        self._sent.acquire()

    def wait(self) -> None:
        """Wait, in the event loop, until the device's thread has begun, which takes it 0.1 ms after a sleep."""
        self._begun.acquire(timeout=HANDOVER_SECONDS)

    def begin(self) -> None:
        """Note that the device's thread has begun."""
        self._begun.release()

    def __call__(self, part: Part, *, first: bool) -> None:
        """Hand a part over, from the device's thread. For the first one, wait until the loop has sent it."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._receive, part, first)
            if first:
                self._sent.acquire(timeout=HANDOVER_SECONDS)

    def _receive(self, part: Part, first: bool) -> None:
        self._take(part)
        if first:
            # The next turn of the loop runs the task that the part has woken, and uvloop writes at its end.
            self._loop.call_soon(self._loop.call_soon, self._sent.release)


_SHORT = 4096
"""Largest :func:`_size` of a request that the event loop tokenizes itself, in 1 to 2 ms: a thread costs two more switches."""


@dataclass(frozen=True)
class Limits:
    """Limits on requests."""

    waiting: int = 16
    """Largest number of requests that wait for the device."""
    seconds: float = 600.0
    """Longest time of a request, from the end of its body to the end of its answer."""
    body_seconds: float = 30.0
    """Longest time for the body of a request to arrive."""
    body_bytes: int = 4 * 2**20
    """Largest body of a request."""


class Service:
    """Model that is loaded after the server has started, with the queue and the metrics of its requests.

    Args:
        name: Name by which requests ask for the model.
        loader: Function that loads the model.
        limits: Limits on requests.
        event_per_token: Flag to send each token by itself. Otherwise the tokens of a launch are sent together.

    Attributes:
        failure: Exception that ended the loading; ``None`` if none did.
    """

    def __init__(
        self, name: str, loader: Callable[[], Model], limits: Limits | None = None, *, event_per_token: bool = False
    ) -> None:
        self.name, self.limits, self.event_per_token = name, limits or Limits(), event_per_token
        self.created = int(time.time())
        self.metrics = Metrics(name)
        self.queue = Queue(self.limits.waiting, self.metrics)
        self.failure: BaseException | None = None
        self._loader = loader
        self._model: Model | None = None
        self._token_texts: dict[int, str] = {}
        self._device = ThreadPoolExecutor(1, "device")
        self._tokenizing = ThreadPoolExecutor(_TOKENIZER_THREADS, "tokenizer")

    # The model

    @property
    def loaded(self) -> bool:
        """Flag of a model that can generate."""
        return self._model is not None

    @property
    def model(self) -> Model:
        """Model.

        Raises:
            RequestError: it is not loaded yet.
        """
        if self._model is None:
            raise self._loading()
        return self._model

    @property
    def codec(self) -> TextCodec:
        """Tokenizer, without which no model is loaded."""
        codec = self.model.codec
        assert codec is not None  # noqa: S101 - _load checks it
        return codec

    async def load(self) -> None:
        """Load the model. An exception is kept in :attr:`failure`."""
        try:
            self._model = await asyncio.get_running_loop().run_in_executor(self._device, self._load)
        except Exception as problem:  # noqa: BLE001 - the server ends, and the command reports it
            self.failure = problem

    def close(self) -> None:
        """Refuse requests from now on, and let the threads end."""
        self.queue.close()
        self._device.shutdown(wait=False, cancel_futures=True)
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str) -> None:
        """Raise :class:`RequestError` unless a request asks for this server's model, and it is loaded."""
        if not self.loaded:
            raise self._loading()
        if name != self.name:
            message = f"There is no model {name[:200]!r} here; this server has {self.name!r}."
            raise RequestError(404, message, param="model", code="model_not_found")

    def _loading(self) -> RequestError:
        return RequestError(503, f"The model {self.name} is being loaded.", code="loading", retry_after=1)

    # Requests

    async def streams(self, request: Chat | Completion) -> list[Stream]:
        """Tokenize the prompts of a request, and return the stream of each choice, which has not begun.

        Raises:
            RequestError: a prompt or a parameter is wrong.
        """
        if isinstance(request, Completion) and _size(request) <= _SHORT:
            with self._errors():
                return self._streams(request)
        return await self._tokenize(self._streams, request)

    async def tokenized(self, request: Tokenize) -> bytes:
        """Return the answer to a request of ``/tokenize``, as JSON. It may have a million tokens, so a thread makes it.

        Raises:
            RequestError: the model has no chat template, or its template refuses the messages.
        """

        def tokenize() -> bytes:
            text = self._prompt(request.messages, {}) if request.messages is not None else request.prompt or ""
            tokens = self.codec.encode(text if request.add_special_tokens else Templated(text))
            length = self.model.config.max_position_embeddings
            content: dict[str, Any] = {"count": len(tokens), "max_model_len": length, "tokens": tokens}
            if request.return_token_strs:
                content["token_strs"] = [self.token_text(token) for token in tokens]
            return to_json(content)

        return await self._tokenize(tokenize)

    def token_text(self, token: int) -> str:
        """Return the text of a single token. It is kept, since log-probabilities name the same tokens again and again."""
        if (found := self._token_texts.get(token)) is None:
            found = self._token_texts[token] = self.codec.token(token)
        return found

    def without_paths(self, problem: RequestError) -> RequestError:
        """Return an error without the path of the model's folder, which is no business of clients."""
        folder = getattr(self.codec, "folder", None)
        if folder is not None:
            problem.message = problem.message.replace(str(folder), self.name)
        return problem

    async def run(self, stream: Stream, take: Callable[[Part], None]) -> None:
        """Generate a choice on the device. The caller must hold the turn that :class:`Queue` grants.

        A cancelled call cancels the generation, and ends once the device's thread has stopped.

        Args:
            stream: Stream of the choice.
            take: Function that is called with each part, in the event loop.

        Raises:
            OneLaunchError: the generation failed.
        """
        loop = asyncio.get_running_loop()
        handover = _Handover(loop, take)
        job = loop.run_in_executor(self._device, self._generate, stream, handover)
        handover.wait()
        try:
            await asyncio.shield(job)
        finally:
            stream.cancel()
            while not job.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([job])
            if not job.cancelled():
                job.exception()  # marks an exception as seen

    def _generate(self, stream: Stream, handover: _Handover) -> None:
        """Generate a choice, in the device's thread."""
        handover.begin()
        text, sent = "", 0
        with stream:
            while (piece := stream.step()) is not None:
                text += piece
                if stream.ready and not self.event_per_token and stream.finish is None:
                    continue  # more tokens of this launch
                handover(Part(text, stream.tokens[sent:], stream.finish), first=not sent)
                text, sent = "", len(stream.tokens)

    def _load(self) -> Model:
        """Load the model, and generate a few tokens, so that the first request compiles nothing and the token time is known."""
        model = self._loader()
        model.require_text("a server")
        for prompt, new in _WARM_UP:
            tokens = [0] * min(prompt, model.config.max_position_embeddings // 2)
            for temperature in (0.0, 1.0):
                options = {"ignore_end": True, "max_enqueued_seconds": ENQUEUED_SECONDS, "temperature": temperature}
                model.stream(tokens, max_new_tokens=new, **options).result()
        if callable(prepare := getattr(model.engine, "prepare", None)):
            prepare()
        return model

    async def _tokenize(self, function: Callable[..., Result], *given: object) -> Result:
        """Run a function in a thread of the tokenizer, and turn its errors into those of a request."""
        with self._errors():
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function, *given)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of the library into those of a request."""
        try:
            yield
        except OneLaunchError as problem:
            raise self.without_paths(of_prompt(problem)) from None

    def _streams(self, request: Chat | Completion) -> list[Stream]:
        """Return the stream of each choice of a request: ``n`` per prompt, with consecutive seeds."""
        prompts: list[Prompt]
        if isinstance(request, Chat):
            prompts = [self._prompt(request.messages, request.chat_template_kwargs)]
        else:
            prompts = list(request.prompts())
        seed = secrets.randbelow(LARGEST_SEED) if request.seed is None else request.seed
        most = request.most_tokens or self.model.config.max_position_embeddings
        streams = []
        for prompt in prompts:
            for number in range(request.n):
                own_seed = seed if number == 0 else (seed + number) % (LARGEST_SEED + 1)
                stream = self.model.stream(
                    prompt, max_new_tokens=most, logprobs=request.logprobs_wanted, max_enqueued_seconds=ENQUEUED_SECONDS,
                    seed=own_seed, **request.choices(),
                )  # fmt: skip
                prompt = stream.prompt  # its tokens, so that it is tokenized once
                streams.append(stream)
        return streams

    def _prompt(self, messages: list[Message], choices: dict[str, Any]) -> str:
        """Return the prompt of a conversation by the model's chat template."""
        return self.codec.chat([message.plain() for message in messages], **choices)


def _size(request: Completion) -> int:
    """Return the characters or tokens of a request's prompts, and 100 for each choice, which takes as long to prepare."""
    return sum(len(prompt) + 100 * request.n for prompt in request.prompts())
