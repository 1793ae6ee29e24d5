"""Text generation with a model, in the style of ``transformers``: complete, streamed, or asynchronous.

:class:`Model` checks a call's arguments, turns the prompt into a :class:`~onelaunch.decode.Request`, and gives it to its engine.
:class:`Stream` reads the engine's tokens one by one, decodes them to text, and ends at a stop string or an end token. The
command ``onelaunch generate`` and the timing loop ``served`` of studies call :class:`Model`, as users do. ``onelaunch.decode``
exports it with the classes that it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from onelaunch import dispatch
from onelaunch.decode.model.arguments import flag, instance, integer, positive, string
from onelaunch.decode.model.config import DTYPES, ModelConfig, read_generation
from onelaunch.decode.model.hub import find_model
from onelaunch.decode.model.prompts import Prompt, tokens_of
from onelaunch.decode.model.request import Engine, Request
from onelaunch.decode.model.sampling import Choices, recommended, sampling_of
from onelaunch.decode.model.tokenizer import Detokenizer, StopStrings, TextCodec
from onelaunch.decode.model.weights import check_header
from onelaunch.decode.runtime.engines import engine_that_fits, load, load_bytes, make_engine, typical_query
from onelaunch.decode.step.contract import decode_step
from onelaunch.device.hardware import free_memory, resolve
from onelaunch.dispatch import AUTO
from onelaunch.errors import ArgumentError, CheckpointError, ContextExceeded, DeviceMemoryError, DTypeError, TokenizerMissing
from onelaunch.operation import parse_dtype
from onelaunch.wording import in_a_line, listing, shown

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # in typing from Python 3.11 on

    from onelaunch.decode.transformers_model import TransformersModel

Finish = Literal["end", "stop", "length", "context", "closed"]
"""Reason why a sequence ended: end token, stop string, ``max_new_tokens``, end of the model's context, or a call of ``close``."""

OPTIONS = ("prompt", "max_new_tokens", "stop", "ignore_end")
"""Arguments of :meth:`Model.generate` and :meth:`Model.stream` besides the fields of :class:`Sampling`, for error messages."""


class Streamer(Protocol):
    """Streamer as ``transformers`` defines it."""

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt ``[1, T]``, and later every new token ``[1]``, on the CPU."""
        ...

    def end(self) -> None:
        """Receive the end of the sequence."""
        ...


@dataclass(frozen=True)
class Generation:
    """Result of a complete generation."""

    prompt: tuple[int, ...]
    """Tokens of the prompt."""
    tokens: tuple[int, ...]
    """All new tokens, including an end token and the tokens of a stop string."""
    text: str | None
    """Text of the new tokens, up to a stop string; ``None`` without a tokenizer."""
    finish: Finish
    """Reason why the sequence ended."""

    @property
    def sequences(self) -> torch.Tensor:
        """Prompt and new tokens, ``[1, T + N]`` int64, as ``transformers`` returns them."""
        return torch.tensor([self.prompt + self.tokens], device="cpu")


class Stream:
    """Generation in progress: an iterator over pieces of text, returned by :meth:`Model.stream`.

    Attributes:
        prompt: Tokens of the prompt.
        tokens: New tokens so far.
        text: Text returned so far; ``None`` without a tokenizer.
        finish: Reason why the sequence ended; ``None`` while it has not.

    The work on the device ends with :meth:`close` or :meth:`cancel`, at the end of a ``with`` block, and with any exception,
    including Ctrl-C. Work that is enqueued already is completed. Tokens and text generated before stay available.
    """

    def __init__(self, engine: Engine, request: Request, codec: TextCodec | None, stops: Sequence[str], limit: Finish) -> None:
        self.prompt = request.prompt
        self.tokens: list[int] = []
        self.text: str | None = None if codec is None else ""
        self.finish: Finish | None = None
        self._ends = request.ends
        self._limit: Finish = limit  # reason if the engine has made all tokens that were requested: "length" or "context"
        self._detokenizer = None if codec is None else Detokenizer(codec)
        self._stops = StopStrings(stops)
        self._cancelled = threading.Event()
        self._ready: deque[int] = deque()  # tokens that reached the host together with one that was returned
        self._launches = _launches(engine, replace(request, cancelled=self._cancelled.is_set))
        self._turn = threading.RLock()  # held while a token is generated; re-entrant, since ``step`` may call ``close``

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while (piece := self.step()) is not None:
            if piece:
                return piece
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ready(self) -> int:
        """Number of tokens of the last launch that :meth:`step` has not returned yet."""
        return len(self._ready)

    def cancel(self) -> None:
        """End the sequence soon, unless it has ended, and return at once. Any thread may call it.

        The engine enqueues nothing more, also while it reads the prompt. A :meth:`step` that runs in another thread returns
        ``None``.
        """
        self.finish = self.finish or "closed"  # tells a step that runs in another thread to drop its token
        self._cancelled.set()

    def close(self) -> None:
        """End the sequence here, unless it has ended. A call from another thread waits for the token that is being generated."""
        self.cancel()
        with self._turn:
            self.finish = self.finish or "closed"  # again: that step may have overwritten it with ``None``
            self._ready.clear()
            self._launches.close()

    def step(self) -> str | None:
        """Generate one more token and return the text that it completes, which may be empty; ``None`` after the last token."""
        with self._turn:
            if self.finish is not None:
                return None
            try:
                if not self._ready:
                    self._ready.extend(next(self._launches, ()))
                token = self._ready.popleft() if self._ready else None
                if self.finish is not None:  # closed by another thread in the meantime
                    return None
                if token is None:
                    return self._finish(self._limit)
                self.tokens.append(token)
                return self._finish("end") if token in self._ends else self._emit(token)
            except BaseException:
                self.close()
                raise

    def result(self) -> Generation:
        """Generate the remaining tokens and return the complete result."""
        while self.step() is not None:
            pass
        assert self.finish is not None  # noqa: S101 - step returns None only once it is set
        return Generation(self.prompt, tuple(self.tokens), self.text, self.finish)

    def _emit(self, token: int) -> str:
        """Return the characters that a token completes. A stop string in them ends the sequence."""
        if self._detokenizer is None:
            return self._release("", None)
        return self._release(self._stops.push(self._detokenizer.push(token)), None)

    def _finish(self, reason: Finish) -> str:
        """End the sequence, and return the withheld characters. If they hold a stop string, that is the reason."""
        if self._detokenizer is None:
            return self._release("", reason)
        return self._release(self._stops.push(self._detokenizer.finish()) + self._stops.finish(), reason)

    def _release(self, piece: str, reason: Finish | None) -> str:
        """Append characters to the text and return them. End the sequence if there is a reason or a stop string was found."""
        if self.text is not None:
            self.text += piece
        self.finish = self.finish or ("stop" if self._stops.found is not None else reason)
        if self.finish is not None:
            self.close()
        return piece


def _launches(engine: Engine, request: Request) -> Generator[Sequence[int], None, None]:
    """Yield the tokens of each launch, or one at a time for an engine without the method ``launches``."""
    if callable(launches := getattr(engine, "launches", None)):
        yield from launches(request)
        return
    tokens = engine.run(request)
    try:
        for token in tokens:
            yield (token,)
    finally:
        tokens.close()


class Model:
    """Language model that generates text, one token at a time.

    Args:
        engine: Engine that generates the tokens.
        codec: Tokenizer. Without one, prompts must be token ids, and results have no text.
        defaults: Default sampling parameters: fields of :class:`~onelaunch.decode.Sampling` by name.

    Attributes:
        engine: Engine that generates the tokens.
        codec: Tokenizer, or ``None``.
        defaults: Default sampling parameters; for a model folder, those of its ``generation_config.json``.

    Raises:
        ArgumentError: an argument is of the wrong type, or a default is wrong.
    """

    def __init__(self, engine: Engine, codec: TextCodec | None = None, defaults: Choices | None = None) -> None:
        if not callable(getattr(engine, "run", None)) or not isinstance(getattr(engine, "config", None), ModelConfig):
            raise ArgumentError(f"engine is {shown(engine)}; it must be an engine, such as make_engine returns.")
        if codec is not None and not all(callable(getattr(codec, name, None)) for name in ("encode", "decode")):
            raise ArgumentError(f"codec is {shown(codec)}; it must be an onelaunch.decode.TextCodec, or None.")
        if defaults is not None:
            sampling_of(instance("defaults", defaults, Mapping))
        self.engine = engine
        self.codec = codec
        self._codec_missing: tuple[str, str] | None = None
        self.defaults: Choices = defaults or {}

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return self.engine.config

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        device: str = "auto",
        dtype: torch.dtype | str | None = None,
        variant: str = AUTO,
    ) -> Model:
        """Load a dense model: Qwen3, Qwen2, Llama, Mistral or SmolLM3.

        Args:
            name: Model folder in Hugging Face's format, ``"owner/name"`` on its hub, or ``"tiny"``, the bundled model. Folders,
                models in the hub's local cache, and ``"tiny"`` work without a network.
            device: Device to run on; ``"auto"`` is the first GPU, or the CPU.
            dtype: Dtype of weights, cache and activations; by default that of the configuration, or float32 if it gives none.
            variant: Variant of ``decode_step``; the fastest by default.

        Raises:
            ArgumentError: an argument is of the wrong type, or no such dtype is supported.
            UnknownModel: there is no such folder, and the name is not valid on the hub.
            CheckpointError: the hub has no such model or cannot be reached; a file is missing, damaged or outside the folder; a
                tensor is missing or of the wrong shape.
            UnsupportedModel, ModelConfigError: the architecture is not supported, or the configuration is wrong.
            NoDeviceError, DeviceMemoryError: there is no such device, or too little memory on it. If only the fastest variant
                needs too much memory, the next one runs, with a :class:`~onelaunch.errors.FallbackNotice`.
            UnknownVariant, VariantUnsupported: there is no such variant, or it cannot run this model on this device.
        """
        variant = string("variant", variant, f"{AUTO!r} or a name from decode_step.variants")
        where = resolve(str(device) if isinstance(device, torch.device) else string("device", device, "'auto', 'cpu' or 'cuda'"))
        chosen_dtype = None if dtype is None else _dtype(dtype)
        folder = find_model(name)
        config = ModelConfig.from_pretrained(folder)
        if chosen_dtype is not None:
            config = replace(config, dtype=chosen_dtype)
        defaults = recommended(read_generation(folder))
        try:
            sampling_of(defaults)
        except ArgumentError as problem:
            raise CheckpointError(f"{folder / 'generation_config.json'}: {in_a_line(problem)}") from None
        if variant != AUTO:
            decode_step.get(variant)  # raises for a wrong name before any weight file is opened
        check_header(folder, config)  # before anything is computed from sizes in an untrusted file
        dispatch.pick(variant, typical_query(config, where))  # raises, before the weights are read, if the variant cannot run
        if where.type == "cuda":
            free = free_memory(where)
            if variant == AUTO:
                variant = engine_that_fits(config, where, free, loaded=True)
            if (need := load_bytes(config, where, variant)) > free:
                raise DeviceMemoryError(f"the weights of {name}", device=where, need=need, free=free)
        codec, missing = None, None
        try:
            codec = TextCodec(folder)
        except TokenizerMissing as problem:
            missing = (problem.reason, problem.remedy)  # token ids still work; a prompt of text raises this error
        model = cls(make_engine(load(folder, config, where, variant), variant), codec, defaults)
        model._codec_missing = missing
        return model

    @classmethod
    def from_transformers(cls, hf_model: Any, *, variant: str = AUTO) -> TransformersModel:
        """Return a model that shares the weights of a model of ``transformers`` in memory.

        Its ``generate`` takes the arguments of ``hf_model.generate`` and returns its result. Changes of the shared weights count
        from the next call on; a variant whose kernel reads a copy of its own packs them again.

        Args:
            hf_model: ``Qwen3ForCausalLM``, ``Qwen2ForCausalLM``, ``LlamaForCausalLM``, ``MistralForCausalLM`` or
                ``SmolLM3ForCausalLM`` with plain parameters of one dtype on one device.
            variant: Variant of ``decode_step``; by default the fastest one that fits into the device's memory. The bytes that it
                allocates in addition to the shared weights are the attribute ``packed_bytes``.

        Raises:
            ArgumentError: it is no such model, or its parameters are not as described.
            UnsupportedModel, ModelConfigError, DTypeError, ShapeError, DeviceError: an architecture, feature, dtype or parameter
                is not supported; the message names it.
            DeviceMemoryError, UnknownVariant, VariantUnsupported: as :meth:`from_pretrained`.
        """
        from onelaunch.decode.transformers_model import TransformersModel

        return TransformersModel(hf_model, string("variant", variant, f"{AUTO!r} or a name from decode_step.variants"))

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        ignore_end: bool = False,
        streamer: Streamer | None = None,
        **choices: Unpack[Choices],
    ) -> Generation:
        """Generate the continuation of a prompt and return it complete.

        Args:
            prompt: Text, or token ids: a sequence, or a tensor ``[T]`` or ``[1, T]`` on any device.
            max_new_tokens: Largest number of new tokens, at least 1. The model's context limits it too.
            stop: Stop string, or several. The text ends before the first that occurs.
            ignore_end: Flag to continue after an end token.
            streamer: Object that receives the prompt and then every token, such as a ``transformers.TextStreamer``.
            **choices: Sampling parameters: ``temperature`` (0 always takes the likeliest token), ``top_k``, ``top_p``,
                ``min_p``, ``repetition_penalty`` and ``seed``, see :class:`~onelaunch.decode.Sampling`. The defaults are those
                of the model's ``generation_config.json``. The same seed, model and prompt give the same text.

        Raises:
            ArgumentError, ValueRangeError: an argument is wrong; the message names it, its value and what it must be.
            UnknownKeyword: there is no argument of that name; the message gives the nearest one.
            ContextExceeded: the prompt leaves no room in the model's context.
            TokenizerMissing: text or stop strings were given, and there is no tokenizer.
            CheckpointError: the tokenizer fails, or returns a token that the model does not have.
            LogitsNotFinite: the model computes NaN or infinite logits.
            DeviceMemoryError: the device has too little memory for the cache of the sequence or for reading the prompt.
            CompileError, DriverError, DecodeStalled, DecodeOverflow: a decode kernel cannot be compiled or loaded, or fails.
        """
        sampling_of(choices, (*OPTIONS, "streamer"))
        if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
            want = "it must have methods put and end, as a transformers.TextStreamer has"
            raise ArgumentError(f"streamer is {shown(streamer)}; {want}.")
        stream = self.stream(prompt, max_new_tokens=max_new_tokens, stop=stop, ignore_end=ignore_end, **choices)
        if streamer is None:
            return stream.result()
        with stream:
            try:
                streamer.put(torch.tensor([stream.prompt], device="cpu"))
                while True:
                    before = len(stream.tokens)
                    piece = stream.step()
                    if len(stream.tokens) > before:
                        streamer.put(torch.tensor(stream.tokens[-1:], device="cpu"))
                    if piece is None:
                        return stream.result()
            finally:
                streamer.end()

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        ignore_end: bool = False,
        logprobs: int | None = None,
        max_enqueued_seconds: float | None = None,
        **choices: Unpack[Choices],
    ) -> Stream:
        """Generate the continuation of a prompt piece by piece.

        Arguments and errors are those of :meth:`generate`. A wrong argument raises its error here, not with the first piece.

        Args:
            prompt: Prompt, as for :meth:`generate`.
            max_new_tokens: Largest number of new tokens.
            stop: Stop string, or several.
            ignore_end: Flag to continue after an end token.
            logprobs: Number of likeliest tokens, 0 to 100, that are reported with each token: the stream's ``tokens`` are then
                :class:`~onelaunch.decode.ScoredToken`. The tokens are generated one per launch.
            max_enqueued_seconds: Longest work, in seconds, that may be enqueued on the device at a time, by the times measured so
                far. It bounds how long the device works after :meth:`Stream.cancel`. Without it, up to 32 tokens are enqueued,
                or a whole prompt. A single token, or half a layer of a piece of the prompt, is enqueued in any case.
            **choices: Sampling parameters, as for :meth:`generate`.

        Returns:
            Iterator over pieces of text, whose attributes hold the tokens so far and the reason why the sequence ended.
        """
        sampling = sampling_of({**self.defaults, **choices}, (*OPTIONS, "logprobs", "max_enqueued_seconds"))
        max_new_tokens = integer("max_new_tokens", max_new_tokens, 1)
        ignore_end = flag("ignore_end", ignore_end)
        logprobs = None if logprobs is None else integer("logprobs", logprobs, 0, 100)
        bound = None if max_enqueued_seconds is None else positive("max_enqueued_seconds", max_enqueued_seconds)
        # A value of another type becomes an empty stop string, which the next line refuses.
        stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Collection) else ("",)
        if not all(isinstance(each, str) and each for each in stops):
            raise ArgumentError(f"stop is {shown(stop)}; it must be a string, or several, none of them empty.")
        if stops:
            self.require_text("a stop string")
        tokens = tokens_of(prompt, self.config, self.require_text)
        positions_left = self.config.max_position_embeddings - len(tokens)
        if positions_left < 1:
            raise ContextExceeded(
                len(tokens) + 1, context=self.config.max_position_embeddings, said="The prompt with one new token"
            )
        ends = () if ignore_end else self.config.eos_token_ids
        most = min(max_new_tokens, positions_left)
        request = Request(tokens, most, sampling, ends, logprobs=logprobs, max_enqueued_seconds=bound)
        return Stream(self.engine, request, self.codec, stops, "length" if max_new_tokens <= positions_left else "context")

    async def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[str]:
        """Generate the continuation of a prompt for ``async for``.

        The model runs in a thread, one token at a time, and stops when the loop is left.

        Args:
            prompt: Prompt, as for :meth:`generate`.
            **options: Arguments of :meth:`stream`.

        Yields:
            Pieces of text.
        """
        with self.stream(prompt, **options) as stream:
            running: asyncio.Future[str | None] | None = None
            try:
                while True:
                    running = asyncio.ensure_future(asyncio.to_thread(stream.step))
                    if (piece := await asyncio.shield(running)) is None:
                        return
                    if piece:
                        yield piece
            finally:
                stream.cancel()
                while running is not None and not running.done():  # cancelled; the thread's current token cannot be interrupted
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([running])

    def chat(self, messages: Sequence[Mapping[str, Any]], **choices: Any) -> str:
        """Return the prompt of a conversation, made by the chat template, see :meth:`onelaunch.decode.TextCodec.chat`."""
        return self.require_text("a conversation").chat(messages, **choices)

    def require_text(self, what: str) -> TextCodec:
        """Return the tokenizer, or raise :class:`TokenizerMissing` saying that ``what`` needs one, and why there is none."""
        if self.codec is None:
            reason, *remedy = self._codec_missing or ("this model was made without one",)
            raise TokenizerMissing(f"{what} needs a tokenizer, and {reason}", *remedy)
        return self.codec


def _dtype(value: torch.dtype | str) -> torch.dtype:
    """Return ``value`` as a dtype, and raise unless weights may have it."""
    dtype = parse_dtype(value)
    if dtype not in DTYPES.values():
        raise DTypeError("dtype", got=dtype, want=f"one of {listing(DTYPES)}")
    return dtype
