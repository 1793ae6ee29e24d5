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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from onelaunch import dispatch
from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.model.request import Engine, Request, ScoredToken
from onelaunch.decode.model.sampling import Sampler
from onelaunch.decode.model.weights import ModelWeights
from onelaunch.decode.plan.levels import LEVELS
from onelaunch.decode.runtime.pace import Mark, Pace, Stopped, TokenTimes, mark
from onelaunch.decode.runtime.prompts import PromptPasses
from onelaunch.decode.runtime.session import Pending, to_host
from onelaunch.decode.step import capabilities
from onelaunch.decode.step.contract import decode_step, key_of
from onelaunch.device.hardware import room_for
from onelaunch.dispatch import AUTO
from onelaunch.errors import FallbackNotice
from onelaunch.operation import Query, Variant

if TYPE_CHECKING:
    from onelaunch.decode.runtime.session import Session

TOKENS_PER_LAUNCH = 16
"""Most tokens generated per launch. The host then has to act only every few milliseconds."""

_TYPICAL_POSITION = 256
"""Position for which the dispatcher chooses the variant whose engine runs a model's requests."""


class _Scores:
    """Log-probabilities of a token, copied to the host along with it.

    Args:
        logits: Logits ``[V]`` of the token's position, as the model computes them.
        token: Token ``[1]`` int64.
        count: Number of likeliest tokens to report.
    """

    def __init__(self, logits: torch.Tensor, token: torch.Tensor, count: int) -> None:
        logprobs = logits.float().log_softmax(0)
        likeliest = logprobs.topk(min(count, len(logprobs)))
        self._logprobs, self._tokens = to_host(torch.cat([logprobs[token], likeliest.values])), to_host(likeliest.indices)

    def of(self, token: int) -> ScoredToken:
        """Return the token with its log-probabilities. The copy of the token has arrived, which was enqueued later."""
        own, *rest = self._logprobs.tolist()
        return ScoredToken.of(token, own, tuple(zip(self._tokens.tolist(), rest, strict=True)))


class TorchEngine:
    """Engine that prefills with PyTorch, then calls ``decode_step`` token by token; the device runs one step ahead of the host.

    A short prompt is read by ``decode_step`` too. The variant gives the longest such prompt
    (:func:`onelaunch.decode.step.capabilities.prompt_steps`). On a GPU, prompts are read by passes (``prompts.py``), except for
    the PyTorch baseline. How a prompt is read depends on its length alone, so that equal requests have equal results.

    Args:
        weights: Weights of the model.
        variant: Variant of ``decode_step``.
    """

    def __init__(self, weights: ModelWeights, variant: str = AUTO) -> None:
        self.weights = weights
        self.variant = variant
        self._passes = PromptPasses(weights) if weights.device.type == "cuda" else None

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def prepare(self) -> None:
        """Capture the passes of short prompts ahead, so that none waits for it; a server calls it before it is ready."""
        if self._passes is not None and self._captures():
            with room_for("captured passes for prompts", self.weights.device):
                self._passes.prepare(self.weights)

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return self.weights.config

    @torch.inference_mode(mode=False)  # cached tensors must be usable outside of inference mode too
    @torch.no_grad()
    def run(self, request: Request) -> Generator[int, None, None]:
        """Yield the tokens of a request as :class:`onelaunch.decode.Engine` specifies."""
        with contextlib.suppress(Stopped):
            yield from self._steps(request)

    def _steps(self, request: Request) -> Generator[int, None, None]:
        """Yield the tokens of a request, made step by step.

        Raises:
            Stopped: the request was cancelled.
        """
        device, pace = self.weights.device, self._pace(request)
        prompt = torch.tensor(request.prompt, device=device)
        sampler = Sampler(request.sampling, prompt, self.config.vocab_size)
        logits, cache = self._read(prompt, pace, *self._ways(len(prompt)))
        pace.drain()
        token, step = sampler(logits, cache.length), None
        for made in range(1, request.max_new_tokens + 1):
            scores = None if request.logprobs is None else _Scores(logits, token, request.logprobs)
            pending = Pending(device, token, logits, step=step)
            if made < request.max_new_tokens:
                pace()
                cache = self._grown(cache, cache.length + 1)
                logits, _, _ = decode_step(token, self.weights, cache, variant=self.variant)
                cache = cache.with_length(cache.length + 1)
                token, step = sampler(logits, cache.length), self._last_step()
            (token_on_host,) = pending.wait()
            yield token_on_host if scores is None else scores.of(token_on_host)
            if token_on_host in request.ends:
                return

    def _pace(self, request: Request) -> Pace:
        """Return the pace of a request's work on the device."""
        return Pace(self.weights.device, request.max_enqueued_seconds, request.cancelled)

    def _read(self, prompt: torch.Tensor, pace: Pace, by_steps: bool, by_pass: bool) -> tuple[torch.Tensor, KVCache]:
        """Read a prompt ``[T]`` in one of :meth:`_ways`, and return the logits ``[V]`` after it and its cache.

        Raises:
            Stopped: the request was cancelled.
        """
        pace.check()
        with room_for(f"a cache of {len(prompt)} positions", self.weights.device):
            cache = KVCache.empty(self.config, len(prompt), self.weights.device)
        if not by_steps:
            with room_for(f"the activations of a prompt of {len(prompt)} tokens", self.weights.device):
                prefilled = self._passes.prefill if by_pass and self._passes else prefill
                return prefilled(self.weights, prompt, cache, pace)
        logits = prompt.new_empty(0)
        for token in prompt.split(1):
            pace()
            logits, _, _ = decode_step(token, self.weights, cache, variant=self.variant)
            cache = cache.with_length(cache.length + 1)
        return logits, cache

    def _ways(self, tokens: int) -> tuple[bool, bool]:
        """Return whether single steps read a prompt of ``tokens`` tokens sooner than PyTorch, else whether a pass may."""
        by_pass = self._passes is not None and self._captures() and self._passes.take(self.config, tokens)
        unpacked = self._passes.copies_matrices(self.weights, tokens) if by_pass and self._passes else self.weights.unpacks
        return tokens <= capabilities.prompt_steps(self._chosen(), self.config, captured=by_pass, unpacked=unpacked), by_pass

    def _captures(self) -> bool:
        """Return whether prompts may be read by captured passes: not for the PyTorch baseline, which runs op by op."""
        return not self._chosen().tags.get("yardstick")

    def _chosen(self) -> Variant:
        """Return the variant that the dispatcher takes at a typical position."""
        return dispatch.pick(self.variant, typical_query(self.config, self.weights.device))

    def _grown(self, cache: KVCache, positions: int) -> KVCache:
        """Return a cache with room for ``positions`` positions and the same contents."""
        with room_for(f"a cache of {positions} positions", self.weights.device):
            return cache.grown(self.config, positions)

    def _last_step(self) -> Pending | None:
        """Return the pending state of the last step, which raises the step's error; ``None`` if steps leave none."""
        return None


class _Launch(NamedTuple):
    """Launch that is enqueued, and the copy of its tokens."""

    pending: Pending
    position: int = 0
    """Position of its first token."""
    start: Mark | None = None
    """Mark before the launch; ``None`` if its time does not matter."""
    end: Mark | None = None
    """Mark behind the launch."""

    def seconds(self) -> float | None:
        """Return the time of the launch, whose copy has arrived; ``None`` without marks."""
        return None if self.start is None or self.end is None else self.start.elapsed_time(self.end) / 1e3


class KernelEngine(TorchEngine):
    """Engine of the megakernel: it reads the prompt like :class:`TorchEngine`, then generates many tokens per launch.

    Its variant is the name of an optimization level in :data:`~onelaunch.decode.plan.levels.LEVELS`. A plan with a launch per
    phase (``graph``; ``separate``) can only take the largest logit (``plain`` sampling). With other sampling it runs step by
    step, and so does every plan if log-probabilities are to be reported, since a launch returns only its last logits.

    Args:
        weights: Weights of the model.
        variant: Name of the optimization level.
    """

    def __init__(self, weights: ModelWeights, variant: str) -> None:
        super().__init__(weights, variant)
        config = weights.config
        position_bytes = 2 * config.num_hidden_layers * config.key_value_size * config.dtype.itemsize
        self._times = TokenTimes(weights.nbytes, position_bytes, TOKENS_PER_LAUNCH)

    @torch.inference_mode(mode=False)  # cached tensors must be usable outside of inference mode too
    @torch.no_grad()
    def run(self, request: Request) -> Generator[int, None, None]:
        """Yield the tokens of a request as :class:`onelaunch.decode.Engine` specifies."""
        for tokens in self.launches(request):
            yield from tokens

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def launches(self, request: Request) -> Generator[list[int], None, None]:
        """Yield the tokens of a request in lists, each with the tokens of one launch up to the first end token."""
        with contextlib.suppress(Stopped):
            if request.logprobs is not None or (LEVELS[self.variant].separate and not request.sampling.plain):
                for token in self._steps(request):
                    yield [token]
                return
            for tokens in self._many_per_launch(request):
                end = next((index for index, token in enumerate(tokens, 1) if token in request.ends), None)
                yield tokens[:end]
                if end is not None:
                    return

    def _many_per_launch(self, request: Request) -> Generator[list[int], None, None]:
        """Yield the tokens of each launch, the prompt's token first, and continue behind end tokens.

        Raises:
            Stopped: the request was cancelled.
        """
        session, device, pace = self._session(), self.weights.device, self._pace(request)
        prompt = torch.tensor(request.prompt, device=device)
        sampler = Sampler(request.sampling, prompt, self.config.vocab_size)
        bound, sampled = request.max_enqueued_seconds, not request.sampling.greedy
        by_steps, by_pass = self._ways(len(prompt))
        # The lock keeps other requests from clearing an error of these steps before its copy to the host is enqueued.
        with session.lock if by_steps else contextlib.nullcontext():
            logits, cache = self._read(prompt, pace, by_steps, by_pass)
            sequence, made = session.sequence(cache, sampler(logits, cache.length), sampler), 1
            launches = deque([_Launch(Pending(device, sequence.token, logits, session if by_steps else None))])
        pace.drain()
        if bound is not None:  # the token is on the host already, and need not wait until the next launch is enqueued
            yield launches.popleft().pending.wait()
        while launches or made < request.max_new_tokens:
            # The device runs one launch while the host yields the tokens of another, unless the bound is that of one launch.
            many, each = self._times.launches(bound, sequence.cache.length, sampled=sampled)
            while len(launches) < 2 and made < request.max_new_tokens:
                if many == 1 and launches:
                    launches[0].pending.wait()
                pace.check()
                count, position = min(each, request.max_new_tokens - made), sequence.cache.length
                sequence.cache = self._grown(sequence.cache, position + count)
                with sequence:
                    start = None if bound is None else mark(device)
                    sequence.step(count)
                    end = None if bound is None else mark(device)
                    launches.append(_Launch(sequence.copy_tokens(), position, start, end))
                made += count
            launch = launches.popleft()
            tokens = launch.pending.wait()
            if (seconds := launch.seconds()) is not None:
                self._times.add(seconds, len(tokens), launch.position, sampled=sampled)
            yield tokens

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
    """Return the most bytes that a variant's engine takes on the device in addition to plain weights."""
    return capabilities.engine_bytes(dispatch.pick(variant, typical_query(config, device)), config)


def load(folder: Path, config: ModelConfig, device: torch.device, variant: str = AUTO) -> ModelWeights:
    """Return the weights of a checkpoint in the form that a variant's engine reads.

    Raises:
        CheckpointError: The same errors as those of :func:`~onelaunch.decode.model.weights.load_weights`.
        UnknownVariant, VariantUnsupported: there is no such variant, or it cannot run this model on this device.
    """
    return capabilities.load(dispatch.pick(variant, typical_query(config, device)), folder, config, device)


def load_bytes(config: ModelConfig, device: torch.device, variant: str = AUTO) -> int:
    """Return the most bytes that loaded weights and a variant's engine take on the device, also while they are loaded."""
    return capabilities.load_bytes(dispatch.pick(variant, typical_query(config, device)), config)


def engine_that_fits(config: ModelConfig, device: torch.device, room: int, *, loaded: bool = False) -> str:
    """Return ``"auto"`` if its engine needs at most ``room`` bytes in addition to plain weights, else the next variant that fits.

    With ``loaded`` the weights are to be loaded in the form that the engine reads, and their bytes count too.

    Only variants that ``"auto"`` may choose are tried, in the order of preference for a typical position. A
    :class:`~onelaunch.errors.FallbackNotice` reports the second case. If no variant fits, the result is ``"auto"``, so that
    the caller's error is about the preferred variant.
    """
    bytes_of = load_bytes if loaded else engine_bytes
    need, query = bytes_of(config, device), typical_query(config, device)
    if need <= room:
        return AUTO
    chosen = dispatch.pick(AUTO, query).name
    for name in decode_step.preference(query):
        variant = decode_step.variants[name]
        able = name != chosen and variant.why_not(query) is None and variant.capabilities.automatic
        if able and bytes_of(config, device, name) <= room:
            takes = f"needs {need / 1e9:.1f} GB" if loaded else f"keeps the weights a second time, {need / 1e9:.1f} GB"
            reason = f"{chosen} {takes}, and there is room for {max(room, 0) / 1e9:.1f}"
            warnings.warn(f"{reason}; {name} runs instead.", FallbackNotice, stacklevel=3)
            return name
    return AUTO


def make_engine(weights: ModelWeights, variant: str = AUTO) -> Engine:
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
