"""Engines, which run requests and yield their tokens.

:class:`TorchEngine` works on every device. A variant of ``decode_step`` may register an engine of its own, as the megakernel's
variants do with :class:`KernelEngine`. :func:`make_engine` chooses. ``Model.from_pretrained`` and the timing loops of studies
call it.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING

import torch

from onelaunch import dispatch
from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.model.request import Engine, Request
from onelaunch.decode.model.sampling import Sampler
from onelaunch.decode.model.weights import Weights
from onelaunch.decode.plan.levels import LEVELS
from onelaunch.decode.runtime.session import Pending
from onelaunch.decode.step import capabilities
from onelaunch.decode.step.contract import decode_step, key_of
from onelaunch.device.hardware import room_for
from onelaunch.dispatch import AUTO
from onelaunch.errors import FallbackNotice
from onelaunch.operation import Query

if TYPE_CHECKING:
    from onelaunch.decode.runtime.session import Session

TOKENS_PER_LAUNCH = 16
"""Tokens generated per launch. The host then has to act only every few milliseconds."""

_TYPICAL_POSITION = 256
"""Position for which the dispatcher chooses the variant whose engine runs a model's requests."""


class TorchEngine:
    """Engine that prefills with PyTorch, then calls ``decode_step`` token by token; the device runs one step ahead of the host.

    A short prompt is read by ``decode_step`` too. The variant gives the longest such prompt
    (:func:`onelaunch.decode.step.capabilities.prompt_steps`).

    Args:
        weights: Weights of the model.
        variant: Variant of ``decode_step``.
    """

    def __init__(self, weights: Weights, variant: str = AUTO) -> None:
        self.weights = weights
        self.variant = variant

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return self.weights.config

    @torch.inference_mode(mode=False)  # cached tensors must be usable outside of inference mode too
    @torch.no_grad()
    def run(self, request: Request) -> Generator[int, None, None]:
        """Yield the tokens of a request as :class:`onelaunch.decode.Engine` specifies."""
        device = self.weights.device
        prompt = torch.tensor(request.prompt, device=device)
        sampler = Sampler(request.sampling, prompt, self.config.vocab_size)
        logits, cache = self._read(prompt)
        token, step = sampler(logits, cache.length), None
        for made in range(1, request.max_new_tokens + 1):
            pending = Pending(device, token, logits, step=step)
            if made < request.max_new_tokens:
                cache = self._grown(cache, cache.length + 1)
                logits, _, _ = decode_step(token, self.weights, cache, variant=self.variant)
                cache = cache.with_length(cache.length + 1)
                token, step = sampler(logits, cache.length), self._last_step()
            (token_on_host,) = pending.wait()
            yield token_on_host
            if token_on_host in request.ends:
                return

    def _read(self, prompt: torch.Tensor) -> tuple[torch.Tensor, KVCache]:
        """Read a prompt ``[T]``, and return the logits ``[V]`` after it and its cache."""
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
        """Return the longest prompt, in tokens, that single steps read sooner than PyTorch's prefill."""
        chosen = dispatch.pick(self.variant, typical_query(self.config, self.weights.device))
        return capabilities.prompt_steps(chosen, self.config)

    def _grown(self, cache: KVCache, positions: int) -> KVCache:
        """Return a cache with room for ``positions`` positions and the same contents."""
        with room_for(f"a cache of {positions} positions", self.weights.device):
            return cache.grown(self.config, positions)

    def _last_step(self) -> Pending | None:
        """Return the pending state of the last step, which raises the step's error; ``None`` if steps leave none."""
        return None


class KernelEngine(TorchEngine):
    """Engine of the megakernel: it reads the prompt like :class:`TorchEngine`, then generates many tokens per launch.

    Its variant is the name of an optimization level in :data:`~onelaunch.decode.plan.levels.LEVELS`. A plan with a launch per
    phase (``graph``; ``separate``) can only take the largest logit (``plain`` sampling). With other sampling it runs step by
    step.
    """

    @torch.inference_mode(mode=False)  # cached tensors must be usable outside of inference mode too
    @torch.no_grad()
    def run(self, request: Request) -> Generator[int, None, None]:
        """Yield the tokens of a request as :class:`onelaunch.decode.Engine` specifies."""
        if LEVELS[self.variant].separate and not request.sampling.plain:
            yield from super().run(request)
            return
        session, device = self._session(), self.weights.device
        prompt = torch.tensor(request.prompt, device=device)
        sampler = Sampler(request.sampling, prompt, self.config.vocab_size)
        by_steps = len(prompt) <= self._prompt_steps()
        # The lock keeps other requests from clearing an error of these steps before its copy to the host is enqueued.
        with session.lock if by_steps else contextlib.nullcontext():
            logits, cache = self._read(prompt)
            sequence, made = session.sequence(cache, sampler(logits, cache.length), sampler), 1
            launches = deque([Pending(device, sequence.token, logits, session if by_steps else None)])
        while launches:
            # The device runs one launch while the host yields the tokens of another.
            while len(launches) < 2 and made < request.max_new_tokens:
                count = min(TOKENS_PER_LAUNCH, request.max_new_tokens - made)
                sequence.cache = self._grown(sequence.cache, sequence.cache.length + count)
                with sequence:
                    sequence.step(count)
                    launches.append(sequence.copy_tokens())
                made += count
            for token in launches.popleft().wait():
                yield token
                if token in request.ends:
                    return

    def _session(self) -> Session:
        """Return the session of this engine's variant and weights."""
        from onelaunch.decode.runtime.kernels import session_for  # imports NumPy, which importing engines does not need

        return session_for(self.weights, self.variant)

    def _last_step(self) -> Pending | None:
        return self._session().last_step


def typical_query(config: ModelConfig, device: torch.device) -> Query:
    """Return the query by which the dispatcher chooses the variant whose engine runs a model's requests."""
    return key_of(config, min(_TYPICAL_POSITION, config.max_position_embeddings - 1), str(device))


def engine_bytes(config: ModelConfig, device: torch.device, variant: str = AUTO) -> int:
    """Return the most bytes that a variant's engine takes on the device in addition to the weights."""
    return capabilities.engine_bytes(dispatch.pick(variant, typical_query(config, device)), config)


def engine_that_fits(config: ModelConfig, device: torch.device, room: int) -> str:
    """Return ``"auto"`` if its engine needs at most ``room`` bytes in addition to the weights, else the next variant that fits.

    Only variants that ``"auto"`` may choose are tried, in the order of preference for a typical position. A
    :class:`~onelaunch.errors.FallbackNotice` reports the second case. If no variant fits, the result is ``"auto"``, so that
    the caller's error is about the preferred variant.
    """
    need, query = engine_bytes(config, device), typical_query(config, device)
    if need <= room:
        return AUTO
    chosen = dispatch.pick(AUTO, query).name
    for name in decode_step.preference(query):
        variant = decode_step.variants[name]
        able = name != chosen and variant.why_not(query) is None and variant.capabilities.automatic
        if able and engine_bytes(config, device, name) <= room:
            reason = (
                f"{chosen} keeps the weights a second time, {need / 1e9:.1f} GB, and there is room for {max(room, 0) / 1e9:.1f}"
            )
            warnings.warn(f"{reason}; {name} runs instead.", FallbackNotice, stacklevel=3)
            return name
    return AUTO


def make_engine(weights: Weights, variant: str = AUTO) -> Engine:
    """Return the engine of a variant of ``decode_step``: the one that the variant registers, else :class:`TorchEngine`.

    On a GPU, a :class:`~onelaunch.errors.FallbackNotice` says why the engine that ``"auto"`` would prefer cannot run there.

    Raises:
        UnknownVariant, VariantUnsupported: there is no such variant, or it cannot run this model on this device.
    """
    query = typical_query(weights.config, weights.device)
    chosen = dispatch.pick(variant, query)
    if (maker := capabilities.engine(chosen)) is not None:
        return maker(weights)
    if variant == AUTO and query.device_type != "cpu":
        for name in itertools.takewhile(lambda name: name != chosen.name, decode_step.preference(query)):
            preferred = decode_step.variants[name]
            if capabilities.engine(preferred) is not None and (reason := preferred.why_not(query)) is not None:
                warnings.warn(f"{name} cannot run here: it {reason}; {chosen.name} runs instead.", FallbackNotice, stacklevel=3)
                break
    return TorchEngine(weights, variant)
