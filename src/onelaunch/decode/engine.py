"""Engines: what makes tokens from a prompt. PyTorch's works everywhere; a variant of ``decode_step`` may bring its own."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from onelaunch import dispatch
from onelaunch.decode.cache import KVCache
from onelaunch.decode.config import ModelConfig
from onelaunch.decode.contract import decode_step, key_of
from onelaunch.decode.model import prefill
from onelaunch.decode.sampling import Sampler, Sampling
from onelaunch.decode.weights import Weights
from onelaunch.dispatch import AUTO
from onelaunch.errors import DeviceMemoryError, FallbackNotice

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
    """Makes tokens. One text at a time: a second :meth:`run` before the first is closed may disturb it."""

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

    @torch.no_grad()
    def run(self, request: Request) -> Generator[int, None, None]:
        """See :class:`Engine`."""
        device = self.weights.device
        prompt = torch.tensor(request.prompt, device=device)
        cache = self._room(KVCache.empty(self.config, len(prompt), device), len(prompt))
        sampler = Sampler(request.sampling, prompt, self.config.vocab_size)
        logits, cache = prefill(self.weights, prompt, cache)
        token = sampler(logits, cache.length)
        for made in range(1, request.max_new_tokens + 1):
            arriving = _Arriving(token)
            if made < request.max_new_tokens:
                cache = self._room(cache, cache.length + 1)
                logits, _, _ = decode_step(token, self.weights, cache, variant=self.variant)
                cache = cache.with_length(cache.length + 1)
                token = sampler(logits, cache.length)
            known = arriving.wait()
            yield known
            if known in request.ends:
                return

    def _room(self, cache: KVCache, positions: int) -> KVCache:
        try:
            return cache.grown(self.config, positions)
        except torch.OutOfMemoryError as problem:
            raise DeviceMemoryError(f"a cache of {positions} positions", device=self.weights.device) from problem


class _Arriving:
    """A token on its way to the host, behind what was enqueued before it and not what comes after."""

    def __init__(self, token: torch.Tensor) -> None:
        self._copy, self._there = token, None
        if token.device.type == "cuda":
            self._copy = torch.empty(1, dtype=token.dtype, pin_memory=True)
            self._copy.copy_(token, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record(torch.cuda.current_stream(token.device))

    def wait(self) -> int:
        if self._there is not None:
            self._there.synchronize()
        return int(self._copy)


def make_engine(weights: Weights, variant: str = AUTO) -> Engine:
    """The engine of a variant of ``decode_step``: the callable in its tag ``engine`` applied to the weights, else PyTorch's.

    On a GPU, a :class:`~onelaunch.errors.FallbackNotice` says why the engine that ``"auto"`` would prefer cannot run there.

    Raises:
        UnknownVariant, VariantUnsupported: as :func:`decode_step`.
    """
    query = key_of(weights.config, min(TYPICAL_POSITION, weights.config.max_position_embeddings - 1), str(weights.device))
    chosen = dispatch.pick(variant, query)
    if (maker := chosen.tags.get("engine")) is not None:
        return maker(weights)
    if variant == AUTO and query.device_type != "cpu":
        wanted = next((name for name in decode_step.preference(query) if "engine" in decode_step.variants[name].tags), None)
        if wanted is not None and (reason := decode_step.variants[wanted].why_not(query)) is not None:
            warnings.warn(f"{wanted} cannot run here: it {reason}; {chosen.name} runs instead.", FallbackNotice, stacklevel=3)
    return TorchEngine(weights, variant)
