"""Timing loops over many tokens in a row, for studies: on the device alone, and through the public generation loop.

The time of a single step includes one launch, and the time to fill the ring of weight chunks of a kernel that otherwise
prefetches the next token's first weights. A long sequence pays for both once per launch of many tokens. The loops here measure
the time per token of such a sequence. They are the regimes ``running`` and ``served`` of studies: the workbench makes a loop
from a variant and the arguments of a ``decode_step`` call, takes each sample by ``seconds()``, and asks ``problem()`` whether
the tokens were those of single steps, which the oracle has judged.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from onelaunch.decode.generate import Model
from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.request import Request
from onelaunch.decode.runtime.engines import TorchEngine, make_engine
from onelaunch.decode.step import capabilities
from onelaunch.decode.step.contract import DecodeCall, bind, decode_step
from onelaunch.operation import Variant

MIN_TOKENS, MAX_TOKENS = 16, 128
"""Smallest and largest number of tokens in a timed run, if the model's context has as many positions left."""

_RUN_SECONDS = 50e-3
"""Duration that a run aims at, in seconds. The extra time of its first and last token is then below a thousandth of it."""

_SLEEP_CYCLES = 400_000
"""Clock cycles (0.2 ms) that the device sleeps before a timed run. The host enqueues the first launch meanwhile."""

TOLERANCE = 1e-3
"""Largest norm-wise difference between the last token's logits and those of single steps.

Both are the same float32 sums, whose order may differ.
"""


@decode_step.loop("running")
class Running:
    """Greedy decoding on the device: each token feeds the next step, and none is copied to the host.

    A variant that registers a function for many tokens (:func:`onelaunch.decode.step.capabilities.in_a_row`) makes a run by one
    call of it. Other variants make single steps, each followed by ``argmax``.
    """

    def __init__(self, variant: Variant, arguments: Mapping[str, Any]) -> None:
        self.variant = variant
        self.given = bind(**arguments)
        positions_left = self.given.config.max_position_embeddings - self.given.position
        self.call = self._with_own_cache(min(MAX_TOKENS, positions_left))
        self.count = min(MIN_TOKENS, positions_left)
        self._made = self._make()  # the first run compiles and captures
        self.count = tokens_per_run(self.seconds(), positions_left)

    def seconds(self) -> float:
        """Return the seconds per token of one run, by CUDA events on a GPU, else by the host's clock."""
        if self.given.token.device.type != "cuda":
            begin = time.perf_counter()
            self._made = self._make()
            return (time.perf_counter() - begin) / self.count
        with torch.cuda.device(self.given.token.device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(_SLEEP_CYCLES)  # noqa: SLF001 - the host's time for the first launch is not the loop's
            start.record()
            self._made = self._make()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1e3 / self.count

    def problem(self) -> str | None:
        """Return how the last run's tokens or last logits differ from those of single steps, or ``None`` if they agree."""
        if capabilities.in_a_row(self.variant) is None:
            return None  # the run was made of single steps
        (tokens, logits), (right, expected) = self._made, self._single_steps(self._with_own_cache(self.count))
        if (wrong := first_difference(tokens.tolist(), right.tolist())) is not None:
            return wrong
        error = float((logits - expected).norm() / expected.norm())
        return None if error <= TOLERANCE else f"logits after {self.count} tokens are {error:.1e} off those of single steps."

    def _with_own_cache(self, count: int) -> DecodeCall:
        """Return the call with a copy of its cache that has room for ``count`` more tokens; the caller's stays as it is."""
        given = self.given.cache
        cache = KVCache.empty(self.given.config, given.length + count, given.keys.device, given.keys.dtype)
        for mine, theirs in ((cache.keys, given.keys), (cache.values, given.values)):
            mine[:, :, : given.length] = theirs[:, :, : given.length]
        return self.given._replace(cache=cache.with_length(given.length))

    @torch.no_grad()
    def _make(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of a run, ``[count]``, and the logits ``[V]`` of the last one."""
        if (in_a_row := capabilities.in_a_row(self.variant)) is not None:
            return in_a_row(self.call, self.count)
        return self._single_steps(self.call)

    @torch.no_grad()
    def _single_steps(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of ``count`` single steps, ``[count]``, and the logits ``[V]`` of the last one."""
        tokens, cache, logits = [call.token], call.cache, call.token
        for _ in range(self.count):
            logits, _, _ = decode_step(tokens[-1], call.weights, cache, variant=self.variant.name)
            tokens.append(logits.argmax(keepdim=True))
            cache = cache.with_length(cache.length + 1)
        return torch.cat(tokens[1:]), logits


@decode_step.loop("served")
class Served:
    """Greedy decoding as a caller of :meth:`onelaunch.decode.Model.stream` sees it: tokens arrive on the host one by one.

    The prompt is random and as long as the call's position, at least one token. Neither prefill nor the first token is timed.
    There is no tokenizer, so the stream yields no characters.
    """

    def __init__(self, variant: Variant, arguments: Mapping[str, Any]) -> None:
        call = bind(**arguments)
        self.variant, self.weights = variant, call.weights
        self.model = Model(make_engine(call.weights, variant.name))
        generator = torch.Generator().manual_seed(0)
        self.prompt = tuple(torch.randint(call.config.vocab_size, (max(call.position, 1),), generator=generator).tolist())
        positions_left = call.config.max_position_embeddings - len(self.prompt) - 1
        self.tokens: tuple[int, ...] = ()
        self.count = max(min(MIN_TOKENS, positions_left), 1)
        self.seconds()  # the first run compiles and captures
        self.count = tokens_per_run(self.seconds(), positions_left)

    def seconds(self) -> float:
        """Return the seconds per token of one run, by the host's clock."""
        stream = self.model.stream(self.prompt, max_new_tokens=self.count + 1, ignore_end=True, temperature=0)
        with stream:
            stream.step()
            begin = time.perf_counter()
            while stream.step() is not None:
                pass
            spent = time.perf_counter() - begin
        self.tokens = tuple(stream.tokens)
        return spent / self.count

    def problem(self) -> str | None:
        """Return how the tokens differ from those of single steps after the same prompt, or ``None`` if they agree."""
        if capabilities.engine(self.variant) is None:
            return None  # the stream's engine was TorchEngine, which makes single steps
        expected = TorchEngine(self.weights, self.variant.name).run(Request(self.prompt, len(self.tokens)))
        return first_difference(self.tokens, tuple(expected))


def tokens_per_run(seconds: float, positions_left: int) -> int:
    """Return the number of tokens of a run whose tokens take ``seconds`` each.

    It is a multiple of ``MIN_TOKENS`` unless the context has fewer positions left.
    """
    wanted = round(_RUN_SECONDS / max(seconds, 1e-9) / MIN_TOKENS) * MIN_TOKENS
    return max(min(max(wanted, MIN_TOKENS), MAX_TOKENS, positions_left), 1)


def first_difference(tokens: tuple[int, ...] | list[int], expected: tuple[int, ...] | list[int]) -> str | None:
    """Return a sentence that names the first token that is not the expected one, or ``None`` if all are."""
    pairs = enumerate(zip(tokens, expected, strict=True))
    differs = next(((index, one, other) for index, (one, other) in pairs if one != other), None)
    if differs is None:
        return None
    index, one, other = differs
    return f"token {index + 1} of {len(tokens)} is {one}; single steps make {other}."
