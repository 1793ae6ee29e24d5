"""Text generation with a model, in the style of ``transformers``: at once, piece by piece, or awaited."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from onelaunch import dispatch
from onelaunch.decode.model.arguments import flag, instance, integer, string
from onelaunch.decode.model.config import DTYPES, ModelConfig, read_generation
from onelaunch.decode.model.hub import find_model
from onelaunch.decode.model.prompts import Prompt, tokens_of
from onelaunch.decode.model.request import Engine, Request
from onelaunch.decode.model.sampling import Choices, recommended, sampling_of
from onelaunch.decode.model.tokenizer import Detokenizer, StopStrings, TextCodec
from onelaunch.decode.model.weights import check_header, elements, load_weights
from onelaunch.decode.runtime.engines import engine_bytes, engine_that_fits, make_engine, typical_query
from onelaunch.decode.step.contract import decode_step
from onelaunch.device.hardware import free_memory, resolve
from onelaunch.dispatch import AUTO
from onelaunch.errors import ArgumentError, CheckpointError, ContextExceeded, DeviceMemoryError, DTypeError, TokenizerMissing
from onelaunch.operation import parse_dtype
from onelaunch.wording import in_a_line, listing, shown

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # in typing from Python 3.11 on

Finish = Literal["end", "stop", "length", "context", "closed"]
"""Reason why a text ended: an end token, a stop string, ``max_new_tokens``, the model's context, or that it was closed."""

OPTIONS = ("prompt", "max_new_tokens", "stop", "ignore_end")
"""Arguments of :meth:`Model.stream` in addition to the fields of :class:`~onelaunch.decode.Sampling`."""


class Streamer(Protocol):
    """Streamer as ``transformers`` defines it: gets the prompt ``[1, T]``, then every token ``[1]``, on the CPU."""

    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class Generation:
    """Generated text, complete."""

    prompt: tuple[int, ...]
    """Tokens of the prompt."""
    tokens: tuple[int, ...]
    """New tokens, all that were made: also an end token, and those of a stop string."""
    text: str | None
    """Text of the new tokens, up to a stop string; ``None`` without a tokenizer."""
    finish: Finish
    """Reason why the text ended."""

    @property
    def sequences(self) -> torch.Tensor:
        """Tokens of prompt and text, ``[1, T + N]`` int64, as ``transformers`` returns them."""
        return torch.tensor([self.prompt + self.tokens], device="cpu")


class Stream:
    """Text while it is generated: an iterator over pieces of text, made by :meth:`Model.stream`.

    Attributes:
        prompt: Tokens of the prompt.
        tokens: New tokens so far.
        text: Text so far, as it was handed out; ``None`` without a tokenizer.
        finish: Reason why the text ended; ``None`` before it has.

    :meth:`close`, the end of a ``with`` block and any exception, Ctrl-C too, end the work on the device. Tokens and text that
    came before stay.
    """

    def __init__(self, engine: Engine, request: Request, codec: TextCodec | None, stops: Sequence[str], limit: Finish) -> None:
        self.prompt = request.prompt
        self.tokens: list[int] = []
        self.text: str | None = None if codec is None else ""
        self.finish: Finish | None = None
        self._ends = request.ends
        self._limit: Finish = limit
        self._detokenizer = None if codec is None else Detokenizer(codec)
        self._stops = StopStrings(stops)
        self._made = engine.run(request)
        self._turn = threading.RLock()

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

    def close(self) -> None:
        """End the text here, unless it has ended. A call from another thread waits for the token that is being made."""
        self.finish = self.finish or "closed"
        with self._turn:
            self.finish = self.finish or "closed"
            self._made.close()

    def step(self) -> str | None:
        """Generate one more token and return the text that it completed, which may be empty; ``None`` after the last one."""
        with self._turn:
            if self.finish is not None:
                return None
            try:
                token = next(self._made, None)
                if self.finish is not None:  # closed meanwhile
                    return None
                if token is None:
                    return self._finish(self._limit)
                self.tokens.append(token)
                return self._finish("end") if token in self._ends else self._emit(token)
            except BaseException:
                self.close()
                raise

    def result(self) -> Generation:
        """Generate the rest and return the whole text."""
        while self.step() is not None:
            pass
        assert self.finish is not None  # noqa: S101 - step has said so
        return Generation(self.prompt, tuple(self.tokens), self.text, self.finish)

    def _emit(self, token: int) -> str:
        """Return the text that a token completed. A stop string in it ends the text."""
        if self._detokenizer is None:
            return self._handed_out("", None)
        return self._handed_out(self._stops.push(self._detokenizer.push(token)), None)

    def _finish(self, reason: Finish) -> str:
        """End the text for a reason, unless what was held back has a stop string, and return what was held back."""
        if self._detokenizer is None:
            return self._handed_out("", reason)
        return self._handed_out(self._stops.push(self._detokenizer.finish()) + self._stops.finish(), reason)

    def _handed_out(self, piece: str, reason: Finish | None) -> str:
        """Append a piece to the text, end it if there is a reason or a stop string, and return the piece."""
        if self.text is not None:
            self.text += piece
        self.finish = self.finish or ("stop" if self._stops.found is not None else reason)
        if self.finish is not None:
            self.close()
        return piece


class Model:
    """Language model that generates text, one token at a time.

    Args:
        engine: Engine that makes the tokens.
        codec: Tokenizer; without one, prompts are token ids and texts ``None``.
        defaults: Sampling where a call does not give it: fields of :class:`~onelaunch.decode.Sampling` by name.

    Attributes:
        engine: Engine that makes the tokens.
        codec: Tokenizer, or ``None``.
        defaults: Sampling where a call does not give it; of a model folder, that of its ``generation_config.json``.

    Raises:
        ArgumentError: an argument is of the wrong type, or a default is wrong.
    """

    def __init__(self, engine: Engine, codec: TextCodec | None = None, defaults: Choices | None = None) -> None:
        if not callable(getattr(engine, "run", None)) or not isinstance(getattr(engine, "config", None), ModelConfig):
            raise ArgumentError(
                f"engine is {shown(engine)}; it must be an engine, as Model.from_pretrained or make_engine make it."
            )
        if codec is not None and not all(callable(getattr(codec, name, None)) for name in ("encode", "decode")):
            raise ArgumentError(f"codec is {shown(codec)}; it must be an onelaunch.decode.TextCodec, or None.")
        if defaults is not None:
            sampling_of(instance("defaults", defaults, Mapping))
        self.engine = engine
        self.codec = codec
        self.defaults: Choices = defaults or {}

    @property
    def config(self) -> ModelConfig:
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
        """Load a model of the Qwen3 dense family.

        Args:
            name: A folder as Hugging Face writes it, ``"owner/name"`` on its hub, or ``"tiny"``, which is in the package. Without
                a network, a folder, a model that the hub's cache holds, and ``"tiny"`` work.
            device: Device to run on; ``"auto"`` is the first GPU, or the CPU.
            dtype: Dtype of weights, cache and activations; by default that of the configuration, float32 where it gives none.
            variant: Variant of ``decode_step``; the fastest by default.

        Raises:
            ArgumentError: an argument is of the wrong type, or no such dtype is supported.
            UnknownModel: there is no such folder, and the name is none that the hub could have.
            CheckpointError: the hub has no such model or cannot be reached; a file is missing, damaged or outside the folder; a
                tensor is missing or of the wrong shape.
            UnsupportedModel, ModelConfigError: the model is of another kind, or its configuration wrong.
            NoDeviceError, DeviceMemoryError: there is no such device, or too little memory on it. Where the fastest variant needs
                more than there is, the next one runs, and a :class:`~onelaunch.errors.FallbackNotice` says so.
            UnknownVariant, VariantUnsupported: there is no such variant, or it cannot run this model on this device.
        """
        variant = string("variant", variant, f"{AUTO!r} or a name from decode_step.variants")
        where = resolve(str(device) if isinstance(device, torch.device) else string("device", device, "'auto', 'cpu' or 'cuda'"))
        width = None if dtype is None else _dtype(dtype)
        folder = find_model(name)
        config = ModelConfig.from_pretrained(folder)
        if width is not None:
            config = replace(config, dtype=width)
        defaults = recommended(read_generation(folder))
        try:
            sampling_of(defaults)
        except ArgumentError as problem:
            raise CheckpointError(f"{folder / 'generation_config.json'}: {in_a_line(problem)}") from None
        if variant != AUTO:
            decode_step.get(variant)  # a wrong name is said before any file of weights is opened
        check_header(folder, config)  # before anything is computed from the sizes that a file gives
        dispatch.pick(variant, typical_query(config, where))  # what cannot run is not read first
        if where.type == "cuda":
            need = elements(config) * config.dtype.itemsize
            free = free_memory(where)
            if variant == AUTO:
                variant = engine_that_fits(config, where, free - need)
            need += engine_bytes(config, where, variant)
            if need > free:
                raise DeviceMemoryError(f"the weights of {name}", device=where, need=need, free=free)
        try:
            codec = TextCodec(folder)
        except TokenizerMissing:
            codec = None  # ids are enough for some; text says then what is missing
        return cls(make_engine(load_weights(folder, config, where), variant), codec, defaults)

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
        """Continue a prompt.

        Args:
            prompt: Text, or token ids: a sequence, or a tensor ``[T]`` or ``[1, T]`` on any device.
            max_new_tokens: Largest number of new tokens, at least 1; the text also ends where the model's context does.
            stop: String, or several, that end the text, which does not contain them.
            ignore_end: Flag to go on after an end token.
            streamer: Object that is given the prompt and every token as it comes, such as a ``transformers.TextStreamer``.
            **choices: ``temperature`` (0 always takes the likeliest token), ``top_k``, ``top_p``, ``min_p``,
                ``repetition_penalty`` and ``seed``: the fields of :class:`~onelaunch.decode.Sampling`, by default as the
                model's ``generation_config.json`` has them. The same seed, model and prompt give the same text.

        Raises:
            ArgumentError, ValueRangeError: naming the argument, what it was and what it has to be.
            UnknownKeyword: there is no argument of that name; the message gives the nearest one.
            ContextExceeded: the prompt leaves no room in the model's context.
            TokenizerMissing: text or stop strings were given, and there is no tokenizer.
            CheckpointError: the tokenizer fails, or makes a token that the model does not have.
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
        **choices: Unpack[Choices],
    ) -> Stream:
        """Continue a prompt piece by piece.

        Arguments and errors are those of :meth:`generate`; errors come at once, not with the first piece.

        Returns:
            An iterator over pieces of text, with the tokens so far and the reason of the text's end as attributes.
        """
        drawn = sampling_of({**self.defaults, **choices}, OPTIONS)
        max_new_tokens = integer("max_new_tokens", max_new_tokens, 1)
        ignore_end = flag("ignore_end", ignore_end)
        stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Collection) else ("",)
        if not all(isinstance(each, str) and each for each in stops):
            raise ArgumentError(f"stop is {shown(stop)}; it must be a string, or several, none of them empty.")
        if stops:
            self._text("a stop string")
        tokens = tokens_of(prompt, self.config, self._text)
        room = self.config.max_position_embeddings - len(tokens)
        if room < 1:
            raise ContextExceeded(
                len(tokens) + 1, context=self.config.max_position_embeddings, said="The prompt with one new token"
            )
        ends = () if ignore_end else self.config.eos_token_ids
        request = Request(tokens, min(max_new_tokens, room), drawn, ends)
        return Stream(self.engine, request, self.codec, stops, "length" if max_new_tokens <= room else "context")

    async def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[str]:
        """Continue a prompt for ``async for``: the model runs in a thread, one token at a time, and stops when the loop is left.

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
                while running is not None and not running.done():  # cancelled in the middle of a token, which cannot be
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([running])

    def chat(self, messages: Sequence[Mapping[str, Any]], **choices: Any) -> str:
        """Return the prompt of a conversation by the chat template: see :meth:`onelaunch.decode.TextCodec.chat`."""
        return self._text("a conversation").chat(messages, **choices)

    def _text(self, what: str) -> TextCodec:
        if self.codec is None:
            raise TokenizerMissing(f"{what} needs a tokenizer, which this model was made without")
        return self.codec


def _dtype(value: torch.dtype | str) -> torch.dtype:
    """Return a dtype that weights can have."""
    found = parse_dtype(value)
    if found not in DTYPES.values():
        raise DTypeError("dtype", got=found, want=f"one of {listing(DTYPES)}")
    return found
