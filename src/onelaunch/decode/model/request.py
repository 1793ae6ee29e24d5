"""Generation requests, and the protocol of the engines that run them.

``decode/generate.py`` and ``decode/loops.py`` make the requests; the engines in ``decode/runtime/engines.py`` run them.
``onelaunch.decode`` exports both classes, for variants of other packages that register an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.sampling import Sampling


class ScoredToken(int):
    """Token with log-probabilities, in nats, by the model's logits before penalty, temperature and truncation.

    Attributes:
        logprob: Log-probability of the token.
        top: Likeliest tokens with their log-probabilities, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, token: int, logprob: float, top: tuple[tuple[int, float], ...]) -> ScoredToken:
        """Return a token with its log-probabilities."""
        found = cls(token)
        found.logprob, found.top = logprob, top
        return found


def _never() -> bool:
    """Return False: the request is not cancelled."""
    return False


@dataclass(frozen=True)
class Request:
    """Prompt to continue, with its limits and sampling. :class:`onelaunch.decode.Model` checks the fields."""

    prompt: tuple[int, ...]
    """Tokens of the prompt, at least one."""
    max_new_tokens: int
    """Largest number of new tokens, at least 1; prompt and new tokens together fit the context."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling parameters of the new tokens."""
    ends: tuple[int, ...] = ()
    """End tokens: the sequence ends after the first of them."""
    logprobs: int | None = None
    """Number of likeliest tokens to report with each token, which is then a :class:`ScoredToken`; ``None`` for none."""
    cancelled: Callable[[], bool] = _never
    """Function that returns whether the request was cancelled. Any thread may cancel it."""
    max_enqueued_seconds: float | None = None
    """Longest work, in seconds, to have enqueued on the device at a time; ``None`` for no bound."""


class Engine(Protocol):
    """Generator of tokens. Several requests may run at once, interleaved in one thread or from several threads."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        ...

    def run(self, request: Request) -> Generator[int, None, None]:
        """Yield new tokens as they are generated, at most ``max_new_tokens``, up to and including the first of ``request.ends``.

        Closing the generator, or an exception in its consumer, ends the work on the device. An engine may generate any number
        of tokens before it yields the first. Once ``request.cancelled()`` is true, it enqueues nothing more and ends; it asks
        before each piece of work.

        An engine may also have a method ``launches(request)`` that yields the same tokens in lists: those of one launch, which
        reach the host together. A method ``prepare()`` may do ahead what the first requests of a size would wait for.
        """
        ...
