"""Requests, and the protocol of the engines that carry them out."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Protocol

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """A prompt to be continued. Its fields are checked by :class:`onelaunch.decode.Model`."""

    prompt: tuple[int, ...]
    """Tokens of the prompt, at least one."""
    max_new_tokens: int
    """Largest number of new tokens, at least 1; prompt and new tokens together fit the context."""
    sampling: Sampling = field(default_factory=Sampling)
    """Rules by which new tokens are chosen."""
    ends: tuple[int, ...] = ()
    """End tokens: nothing comes after one of them."""


class Engine(Protocol):
    """Maker of tokens. Several requests may be under way at once, by turns or from several threads."""

    @property
    def config(self) -> ModelConfig: ...

    def run(self, request: Request) -> Generator[int, None, None]:
        """Yield the new tokens as they come, up to and with the first of ``request.ends``, at most ``max_new_tokens``.

        Closing the generator, or an exception in its consumer, ends the work on the device. How many tokens an engine makes
        before it yields the first is its own affair.
        """
        ...
