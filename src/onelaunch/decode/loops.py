"""Tokens in a row, as studies time them: on the device alone, and through the public loop.

A launch of one token pays for being launched, and a kernel whose weights stream into the next token begins it with an empty ring.
Times of single steps have that in them; these tell what a text costs.
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

FEWEST, MOST = 16, 128
"""Tokens of a run."""

SECONDS = 50e-3
"""Of a run, about: the first and the last token's share of it is then below a part in a thousand."""

AHEAD = 400_000
"""Cycles that the host is given to be ahead: 0.2 ms."""

SAME = 1e-3
"""Norm-wise, logits of the last token against those of single steps: the same sums in float32, whose order may differ."""


@decode_step.loop("running")
class Running:
    """Tokens of which each is made from the one before, with none handed to the host, from the text's position on.

    A variant that can make many in a row does so (:func:`onelaunch.decode.step.capabilities.in_a_row`); others make single steps,
    each followed by ``argmax``.
    """

    def __init__(self, variant: Variant, arguments: Mapping[str, Any]) -> None:
        self.variant = variant
        self.given = bind(**arguments)
        room = self.given.config.max_position_embeddings - self.given.position
        self.call = self._fresh(min(MOST, room))
        self.count = min(FEWEST, room)
        self._made = self._make()  # compiles and captures
        self.count = enough(self.seconds(), room)

    def seconds(self) -> float:
        """See :class:`onelaunch.operation.Loop`: by events on a GPU, else by the host's clock."""
        if self.given.token.device.type != "cuda":
            begin = time.perf_counter()
            self._made = self._make()
            return (time.perf_counter() - begin) / self.count
        with torch.cuda.device(self.given.token.device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(AHEAD)  # noqa: SLF001 - the device waits for the first launch, and its time is none of the loop's
            start.record()
            self._made = self._make()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1e3 / self.count

    def problem(self) -> str | None:
        """See :class:`onelaunch.operation.Loop`: another text than that of single steps, or other logits at its end."""
        if capabilities.in_a_row(self.variant) is None:
            return None
        (tokens, logits), (right, expected) = self._made, self._single_steps(self._fresh(self.count))
        if (wrong := first_difference(tokens.tolist(), right.tolist())) is not None:
            return wrong
        error = float((logits - expected).norm() / expected.norm())
        return None if error <= SAME else f"logits behind {self.count} tokens are {error:.1e} off those of single steps."

    def _fresh(self, count: int) -> DecodeCall:
        """The call with a cache of its own, with room for so many tokens."""
        given = self.given.cache
        cache = KVCache.empty(self.given.config, given.length + count, given.keys.device, given.keys.dtype)
        for mine, theirs in ((cache.keys, given.keys), (cache.values, given.values)):
            mine[:, :, : given.length] = theirs[:, :, : given.length]
        return self.given._replace(cache=cache.with_length(given.length))

    @torch.no_grad()
    def _make(self) -> tuple[torch.Tensor, torch.Tensor]:
        if (in_a_row := capabilities.in_a_row(self.variant)) is not None:
            return in_a_row(self.call, self.count)
        return self._single_steps(self.call)

    @torch.no_grad()
    def _single_steps(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, cache, logits = [call.token], call.cache, call.token
        for _ in range(self.count):
            logits, _, _ = decode_step(tokens[-1], call.weights, cache, variant=self.variant.name)
            tokens.append(logits.argmax(keepdim=True))
            cache = cache.with_length(cache.length + 1)
        return torch.cat(tokens[1:]), logits


@decode_step.loop("served")
class Served:
    """Tokens as the reader of :meth:`onelaunch.decode.Model.stream` gets them, one by one, from the first to the last.

    The text is one of random tokens, as long as the position asks, and the likeliest continue it. Reading the prompt and the
    first token do not count, and there is no tokenizer: tokens come as numbers.
    """

    def __init__(self, variant: Variant, arguments: Mapping[str, Any]) -> None:
        call = bind(**arguments)
        self.variant, self.weights = variant, call.weights
        self.model = Model(make_engine(call.weights, variant.name))
        generator = torch.Generator().manual_seed(0)
        self.prompt = tuple(torch.randint(call.config.vocab_size, (max(call.position, 1),), generator=generator).tolist())
        room = call.config.max_position_embeddings - len(self.prompt) - 1
        self.tokens: tuple[int, ...] = ()
        self.count = max(min(FEWEST, room), 1)
        self.seconds()  # compiles and captures
        self.count = enough(self.seconds(), room)

    def seconds(self) -> float:
        """See :class:`onelaunch.operation.Loop`: by the host's clock."""
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
        """See :class:`onelaunch.operation.Loop`: another text than that of single steps behind the same prompt."""
        if capabilities.engine(self.variant) is None:
            return None
        right = TorchEngine(self.weights, self.variant.name).run(Request(self.prompt, len(self.tokens)))
        return first_difference(self.tokens, tuple(right))


def enough(seconds: float, room: int) -> int:
    """Tokens of a run, where one takes so long: a multiple of the fewest, as far as the context has room."""
    wanted = round(SECONDS / max(seconds, 1e-9) / FEWEST) * FEWEST
    return max(min(max(wanted, FEWEST), MOST, room), 1)


def first_difference(found: tuple[int, ...] | list[int], right: tuple[int, ...] | list[int]) -> str | None:
    """Where a text is not the right one, in a sentence."""
    pairs = enumerate(zip(found, right, strict=True))
    differs = next(((place, one, other) for place, (one, other) in pairs if one != other), None)
    if differs is None:
        return None
    place, one, other = differs
    return f"token {place + 1} of {len(found)} is {one}; single steps make {other}."
