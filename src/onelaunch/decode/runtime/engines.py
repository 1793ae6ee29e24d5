"""Engines: what makes tokens from a prompt. PyTorch's works everywhere; a variant of ``decode_step`` may bring its own."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from onelaunch import dispatch
from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.model.sampling import Sampler, Sampling
from onelaunch.decode.model.weights import Weights
from onelaunch.decode.step.contract import decode_step, key_of
from onelaunch.dispatch import AUTO
from onelaunch.errors import FallbackNotice, LogitsNotFinite
from onelaunch.hardware import room_for
from onelaunch.operation import Query

TYPICAL_POSITION = 256
"""Where the variant is chosen that decides which engine runs a text."""


@dataclass(frozen=True)
class Request:
    """A text to be continued; checked by :class:`onelaunch.decode.generate.Model`."""

    prompt: tuple[int, ...]
    """At least one token."""
    max_new_tokens: int
    """At least 1; prompt and new tokens together fit the context."""
    sampling: Sampling = field(default_factory=Sampling)
    ends: tuple[int, ...] = ()
    """Tokens after which nothing comes."""


class Engine(Protocol):
    """Makes tokens. Several texts may be under way at once, by turns or from several threads."""

    @property
    def config(self) -> ModelConfig: ...

    def run(self, request: Request) -> Generator[int, None, None]:
        """The new tokens as they come, up to and with the first of ``request.ends``, at most ``max_new_tokens``.

        Closing it, or an exception in the consumer, ends the work on the device. How many tokens an engine makes
        before it hands out the first is its own affair.
        """
        ...


class TorchEngine:
    """Prefill by PyTorch, then ``decode_step`` token by token; the device is one step ahead of the host.

    A short prompt goes through ``decode_step`` too, where the variant's tag ``prompt_steps`` says so: up to how many tokens, of a
    configuration.

    Args:
        weights: of the model.
        variant: of ``decode_step``.
    """

    def __init__(self, weights: Weights, variant: str = AUTO) -> None:
        self.weights = weights
        self.variant = variant

    @property
    def config(self) -> ModelConfig:
        return self.weights.config

    @torch.inference_mode(mode=False)  # what is kept for the next text must be of use to it too
    @torch.no_grad()
    def run(self, request: Request) -> Generator[int, None, None]:
        """See :class:`Engine`."""
        device = self.weights.device
        prompt = torch.tensor(request.prompt, device=device)
        sampler = Sampler(request.sampling, prompt, self.config.vocab_size)
        logits, cache = self._read(prompt)
        token, sound, went_well = sampler(logits, cache.length), witness(logits), None
        for made in range(1, request.max_new_tokens + 1):
            arriving, heed = Arriving(token, sound), went_well
            if made < request.max_new_tokens:
                cache = self._room(cache, cache.length + 1)
                logits, _, _ = decode_step(token, self.weights, cache, variant=self.variant)
                cache = cache.with_length(cache.length + 1)
                token, sound, went_well = sampler(logits, cache.length), witness(logits), self._note()
            made_token, number = arriving.wait()
            if heed is not None:
                heed()
            check_witness(number)
            known = int(made_token)
            yield known
            if known in request.ends:
                return

    def _read(self, prompt: torch.Tensor) -> tuple[torch.Tensor, KVCache]:
        """Logits ``[V]`` after a prompt ``[T]``, and its cache."""
        with room_for(f"a cache of {len(prompt)} positions", self.weights.device):
            cache = KVCache.empty(self.config, len(prompt), self.weights.device)
        if len(prompt) > self._prompt_steps():
            with room_for(f"the activations of a prompt of {len(prompt)} tokens", self.weights.device):
                return prefill(self.weights, prompt, cache)
        logits = prompt.new_empty(0)
        for token in prompt.split(1):
            logits, _, _ = decode_step(token, self.weights, cache, variant=self.variant)
            cache = cache.with_length(cache.length + 1)
        return logits, cache

    def _prompt_steps(self) -> int:
        """Tokens of a prompt, at most, that single steps read sooner than PyTorch all at once."""
        chosen = dispatch.pick(self.variant, typical_query(self.config, self.weights.device))
        return chosen.tags["prompt_steps"](self.config) if "prompt_steps" in chosen.tags else 0

    def _room(self, cache: KVCache, positions: int) -> KVCache:
        with room_for(f"a cache of {positions} positions", self.weights.device):
            return cache.grown(self.config, positions)

    def _note(self) -> Callable[[], None] | None:
        """What raises, once the last step is done, if it went wrong; ``None`` where steps cannot."""
        return None


def witness(logits: torch.Tensor) -> torch.Tensor:
    """A number on their device that is none where some of the logits are: one kernel, and :func:`check_witness` on the host."""
    return logits.sum()


def check_witness(number: torch.Tensor) -> None:
    """Raise :class:`~onelaunch.errors.LogitsNotFinite` if it is none: any token would be as good, and may end the text."""
    if not math.isfinite(number):
        raise LogitsNotFinite


class Arriving:
    """Copies of tensors on their way to the host, behind what was enqueued before and not what comes after."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        device, self._there = tensors[0].device, None
        self.copies = tuple(
            torch.empty(each.shape, dtype=each.dtype, device="cpu", pin_memory=device.type == "cuda").copy_(
                each, non_blocking=True
            )
            for each in tensors
        )
        if device.type == "cuda":
            self._there = torch.cuda.Event()
            self._there.record(torch.cuda.current_stream(device))

    def arrived(self) -> bool:
        """Whether they are there."""
        return self._there is None or self._there.query()

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The copies, once they are there."""
        if self._there is not None:
            self._there.synchronize()
        return self.copies


class InTurn:
    """Puts work on the same memory one after another, whichever stream it comes from.

    Args:
        device: of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None

    def take(self) -> None:
        """What comes on the current stream from now on waits for what came on another; with a lock held, until it is enqueued.

        Nothing happens while that stream is captured: a graph is replayed where it pleases whoever has it.
        """
        if self._device.type != "cuda":
            return
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current


def typical_query(config: ModelConfig, device: torch.device) -> Query:
    """The step that decides which engine runs a model's texts."""
    return key_of(config, min(TYPICAL_POSITION, config.max_position_embeddings - 1), str(device))


def engine_bytes(config: ModelConfig, device: torch.device, variant: str = AUTO) -> int:
    """Bytes that the engine of a variant takes on the device beside the weights, at most: as its tag ``engine_bytes`` says."""
    tags = dispatch.pick(variant, typical_query(config, device)).tags
    return tags["engine_bytes"](config) if "engine_bytes" in tags else 0


def engine_that_fits(config: ModelConfig, device: torch.device, room: int) -> str:
    """``"auto"`` where what its engine takes beside the weights fits into so many bytes, else the next variant whose engine does.

    Then a :class:`~onelaunch.errors.FallbackNotice` says so. Where none fits it is ``"auto"`` again, for its error.
    """
    need, query = engine_bytes(config, device), typical_query(config, device)
    if need <= room:
        return AUTO
    chosen = dispatch.pick(AUTO, query).name
    for name in decode_step.preference(query):
        variant = decode_step.variants[name]
        able = name != chosen and variant.why_not(query) is None and "requires" not in variant.tags
        if able and engine_bytes(config, device, name) <= room:
            said = (
                f"{chosen} keeps the weights a second time, {need / 1e9:.1f} GB, and there is room for {max(room, 0) / 1e9:.1f}"
            )
            warnings.warn(f"{said}; {name} runs instead.", FallbackNotice, stacklevel=3)
            return name
    return AUTO


def make_engine(weights: Weights, variant: str = AUTO) -> Engine:
    """The engine of a variant of ``decode_step``: the callable in its tag ``engine`` applied to the weights, else PyTorch's.

    On a GPU, a :class:`~onelaunch.errors.FallbackNotice` says why the engine that ``"auto"`` would prefer cannot run there.

    Raises:
        UnknownVariant, VariantUnsupported: as :func:`decode_step`.
    """
    query = typical_query(weights.config, weights.device)
    chosen = dispatch.pick(variant, query)
    if (maker := chosen.tags.get("engine")) is not None:
        return maker(weights)
    if variant == AUTO and query.device_type != "cpu":
        for name in itertools.takewhile(lambda name: name != chosen.name, decode_step.preference(query)):
            preferred = decode_step.variants[name]
            if "engine" in preferred.tags and (reason := preferred.why_not(query)) is not None:
                warnings.warn(f"{name} cannot run here: it {reason}; {chosen.name} runs instead.", FallbackNotice, stacklevel=3)
                break
    return TorchEngine(weights, variant)
