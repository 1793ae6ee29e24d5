"""Text from a model, in the style of ``transformers``: at once, piece by piece, or awaited."""

from __future__ import annotations

import asyncio
import contextlib
import math
import operator
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch

from onelaunch import dispatch
from onelaunch.decode.config import ModelConfig, read_generation
from onelaunch.decode.engine import Engine, Request, engine_bytes, engine_that_fits, make_engine, typical_query
from onelaunch.decode.hub import find_model
from onelaunch.decode.sampling import Choices, Sampling, recommended
from onelaunch.decode.text import Detokenizer, StopStrings, TextCodec
from onelaunch.decode.weights import load_weights, parts
from onelaunch.dispatch import AUTO
from onelaunch.errors import (
    ArgumentError,
    CheckpointError,
    ContextExceeded,
    DeviceMemoryError,
    TokenizerMissing,
    ValueRangeError,
    in_a_line,
)
from onelaunch.hardware import free_memory, resolve
from onelaunch.operation import parse_dtype

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # in typing from Python 3.11 on

Prompt: TypeAlias = str | Sequence[int] | torch.Tensor
"""Text, or token ids: a sequence, or a tensor ``[T]`` or ``[1, T]``."""

Finish = Literal["end", "stop", "length", "context", "closed"]
"""Why a text ended: its end token, a stop string, ``max_new_tokens``, the model's context, or whoever read it."""


class Streamer(Protocol):
    """What ``transformers`` calls a streamer: gets the prompt ``[1, T]``, then every token ``[1]``, on the CPU."""

    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class Generation:
    """A text that has ended."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """The new ones, all that were made: also an end token, and those of a stop string."""
    text: str | None
    """Of the new tokens, up to a stop string; ``None`` without a tokenizer."""
    finish: Finish

    @property
    def sequences(self) -> torch.Tensor:
        """Prompt and new tokens, ``[1, T + N]`` int64, as ``transformers`` returns them."""
        return torch.tensor([self.prompt + self.tokens], device="cpu")


class Stream:
    """A text while it comes: an iterator over pieces of text. Made by :meth:`Model.stream`.

    Attributes:
        prompt: its tokens.
        tokens: the new tokens so far.
        text: so far, as it was handed out; ``None`` without a tokenizer.
        finish: why it ended; ``None`` before.

    :meth:`close`, the end of a ``with`` block and any exception, Ctrl-C too, end the work on the device; what came stays.
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
        """End it here, unless it has ended; from another thread, behind the token that is being made."""
        self.finish = self.finish or "closed"
        with self._turn:
            self.finish = self.finish or "closed"
            self._made.close()

    def step(self) -> str | None:
        """The text that came with one more token, which may be empty; ``None`` when there is no more."""
        with self._turn:
            if self.finish is not None:
                return None
            try:
                token = next(self._made, None)
                if self.finish is not None:  # closed meanwhile
                    return None
                if token is None:
                    return self._hand_out(None, self._limit)
                self.tokens.append(token)
                return self._hand_out(None, "end") if token in self._ends else self._hand_out(token, None)
            except BaseException:
                self.close()
                raise

    def result(self) -> Generation:
        """The whole text; runs to its end first."""
        while self.step() is not None:
            pass
        assert self.finish is not None  # noqa: S101 - step has said so
        return Generation(self.prompt, tuple(self.tokens), self.text, self.finish)

    def _hand_out(self, token: int | None, end: Finish | None) -> str:
        """The text that came with a token, with everything that was held back where the text ends."""
        piece = ""
        if self._detokenizer is not None:
            piece = "" if token is None else self._stops.push(self._detokenizer.push(token))
            if end is not None:
                piece += self._stops.push(self._detokenizer.finish()) + self._stops.finish()
            self.text = f"{self.text}{piece}"
        self.finish = self.finish or ("stop" if self._stops.found is not None else end)
        if self.finish is not None:
            self.close()
        return piece


class Model:
    """A model that makes text, one token at a time.

    Args:
        engine: makes tokens.
        codec: the tokenizer; without one, prompts are token ids and texts ``None``.
        defaults: how tokens are drawn where a call does not say.

    Attributes:
        engine: as given.
        codec: as given.
        defaults: as given, or those of the model's ``generation_config.json``.
    """

    def __init__(self, engine: Engine, codec: TextCodec | None = None, defaults: Choices | None = None) -> None:
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
        """A model of the Qwen3 dense family.

        Args:
            name: a folder as Hugging Face writes it, ``"owner/name"`` on its hub, or ``"tiny"``, which is in the package.
            device: where it runs; ``"auto"`` is the first GPU, or the CPU.
            dtype: of weights, cache and activations; that of the configuration by default, float32 where it says none.
            variant: of ``decode_step``; the fastest by default.

        Raises:
            CheckpointError, ShapeError: a file is missing or damaged, a tensor missing or of the wrong shape.
            UnsupportedModel, ModelConfigError: the model is of another kind, or its configuration wrong.
            NoDeviceError, DeviceMemoryError: there is no such device, or too little memory on it. Where the fastest variant needs
                more than there is, the next one runs, and a :class:`~onelaunch.errors.FallbackNotice` says so.
            UnknownVariant, VariantUnsupported: no such variant, or not for this model on this device.
        """
        folder = find_model(name)
        config = ModelConfig.from_pretrained(folder)
        if dtype is not None:
            config = replace(config, dtype=parse_dtype(dtype))
        where = resolve(device)
        defaults = recommended(read_generation(folder))
        try:
            Sampling(**defaults)
        except (ArgumentError, TypeError) as problem:
            raise CheckpointError(f"{folder / 'generation_config.json'}: {in_a_line(problem)}") from None
        dispatch.pick(variant, typical_query(config, where))  # what cannot run is not read first
        if where.type == "cuda":
            need = sum(math.prod(shape) for _, _, shape in parts(config)) * config.dtype.itemsize
            free = free_memory(where)
            if variant == AUTO:
                variant = engine_that_fits(config, where, free - need)
            need += engine_bytes(config, where, variant)
            if need > free:
                raise DeviceMemoryError(f"the weights of {name}", device=where, need=need, free=free)
        engine = make_engine(load_weights(folder, config, where), variant)
        try:
            codec = TextCodec(folder)
        except TokenizerMissing:
            codec = None  # ids are enough for some; text says then what is missing
        return cls(engine, codec, defaults)

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
            prompt: text, or token ids: a sequence, or a tensor ``[T]`` or ``[1, T]`` on any device.
            max_new_tokens: at least 1; the text also ends where the model's context does.
            stop: strings that end the text, which does not contain them.
            ignore_end: whether to go on after an end token.
            streamer: is given the prompt and every token as it comes, such as a ``transformers.TextStreamer``.
            **choices: ``temperature`` (0 always takes the likeliest token), ``top_k``, ``top_p``, ``min_p``,
                ``repetition_penalty`` and ``seed``: the fields of :class:`~onelaunch.decode.sampling.Sampling`, by default as the
                model's ``generation_config.json`` has them. The same seed, model and prompt give the same text.

        Raises:
            ArgumentError, ValueRangeError: naming the argument, what it was and what it has to be.
            ContextExceeded: the prompt leaves no room in the model's context.
            TokenizerMissing: text or stop strings, and no tokenizer.
        """
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
        """The same piece by piece: an iterator over text, with the tokens so far and the reason of its end as attributes.

        Arguments and errors are those of :meth:`generate`; errors come at once, not with the first piece.
        """
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise ArgumentError(f"max_new_tokens is {max_new_tokens!r}; it must be an integer of at least 1.")
        stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else ("",)
        if not all(isinstance(each, str) and each for each in stops):
            raise ArgumentError(f"stop is {stop!r}; it must be a string, or several, none of them empty.")
        if stops:
            self._text("a stop string")
        tokens = self._tokens(prompt)
        room = self.config.max_position_embeddings - len(tokens)
        if room < 1:
            raise ContextExceeded(
                len(tokens) + 1, context=self.config.max_position_embeddings, said="The prompt with one new token"
            )
        ends = () if ignore_end else self.config.eos_token_ids
        drawn: Choices = {**self.defaults, **choices}
        request = Request(tokens, min(max_new_tokens, room), Sampling(**drawn), ends)
        return Stream(self.engine, request, self.codec, stops, "length" if max_new_tokens <= room else "context")

    async def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[str]:
        """The same for ``async for``: the model runs in a thread, one token at a time, and stops when the loop is left.

        Args:
            prompt: as :meth:`generate`.
            **options: as :meth:`stream`.
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
        """The prompt of a conversation by the model's chat template: see :meth:`onelaunch.decode.text.TextCodec.chat`."""
        return self._text("a conversation").chat(messages, **choices)

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """A prompt's tokens, each checked to be one."""
        if isinstance(prompt, str):
            tokens = self._text("a prompt of text").encode(prompt)
        elif isinstance(prompt, torch.Tensor):
            integers = not (prompt.is_floating_point() or prompt.is_complex() or prompt.dtype is torch.bool)
            if not integers or not (prompt.dim() == 1 or (prompt.dim() == 2 and prompt.shape[0] == 1)):
                got = f"{tuple(prompt.shape)} of {prompt.dtype}"
                raise ArgumentError(f"prompt is a tensor {got}; it must be [T] or [1, T] of integers: one text at a time.")
            tokens = tuple(prompt.flatten().tolist())
        elif isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, bytearray, memoryview)):
            tokens = tuple(map(self._token, prompt))
        else:
            raise ArgumentError(f"prompt is {type(prompt).__name__}; it must be text, or token ids in a sequence or a tensor.")
        if not tokens and self.config.bos_token_id is not None:
            tokens = (self.config.bos_token_id,)
        if not tokens:
            raise ArgumentError("prompt has no tokens; it must have at least one.")
        return tuple(map(self._token, tokens))

    def _token(self, value: object) -> int:
        """A token as an integer, whatever class it came in."""
        try:
            token = -1 if isinstance(value, bool) else operator.index(value)  # pyrefly: ignore[bad-argument-type]
        except TypeError:
            token = -1
        if not 0 <= token < self.config.vocab_size:
            want = f"a token is an integer within 0..{self.config.vocab_size - 1}"
            raise ValueRangeError("prompt", got=f"holds {value!r}", want=want)
        return token

    def _text(self, what: str) -> TextCodec:
        if self.codec is None:
            raise TokenizerMissing(f"{what} needs a tokenizer, which this model was made without")
        return self.codec
