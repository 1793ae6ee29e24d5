"""Sampling: a token from logits, in tensors on their device. Nothing here waits for the device.

The random numbers are a function of seed, position and token (:func:`gumbel`), not of a generator's state: any device draws the
same ones, and so do kernels of our own that make many tokens in a launch (``codegen/kernels/sampling.cuh``).
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import torch

from onelaunch.errors import ArgumentError, UnknownKeyword
from onelaunch.wording import shown

LARGEST_SEED = 2**63 - 1

LARGEST = torch.finfo(torch.float32).max
"""Largest temperature and penalty: kernels take them in float32."""

USUAL_TOP_K = 50
"""Value of ``top_k`` where a model's file asks for sampling without giving one: the default of ``transformers``."""

COLDEST = 1e-30
"""Temperature below which nothing changes: 1 over it is still finite in float32, and only the likeliest token is left."""

Word = TypeVar("Word", int, torch.Tensor)
"""Unsigned 32-bit word: a number on the host, or integers of a tensor on a device."""


class Choices(TypedDict, total=False):
    """Fields of :class:`Sampling`, as functions take them."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int


@dataclass(frozen=True)
class Sampling:
    """Rules by which a token is drawn: penalty, temperature, top-k, top-p and min-p, in this order, as in ``transformers``.

    Raises:
        ArgumentError: naming the field, what it is and what it has to be.
    """

    temperature: float = 0.0
    """Divisor of the logits; 0 takes the largest logit, and nothing but ``repetition_penalty`` matters then."""
    top_k: int = 0
    """Number of the largest logits to keep, with all that equal the last of them; 0 keeps all."""
    top_p: float = 1.0
    """Probability to keep: the fewest of the likeliest tokens whose probabilities add up to it."""
    min_p: float = 0.0
    """Least probability to keep, as a multiple of the largest one."""
    repetition_penalty: float = 1.0
    """Divisor of the positive logits of tokens that occur in prompt or text so far, and factor of their negative ones."""
    seed: int = 0
    """Seed of the noise; the same seed draws the same tokens."""

    def __post_init__(self) -> None:
        for name in Choices.__annotations__:  # numbers of other classes, such as NumPy's, become Python's
            if not isinstance(value := getattr(self, name), bool) and isinstance(value, numbers.Real):
                whole = isinstance(value, numbers.Integral)
                with contextlib.suppress(OverflowError):  # what no float holds is refused below
                    object.__setattr__(self, name, int(value) if whole else float(value))
        for name, low, high in (("temperature", 0.0, LARGEST), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
            value = getattr(self, name)
            if not (_is_number(value) and low <= value <= high and math.isfinite(value)):
                want = f"a number from 0 to {high:.3g}"
                raise ArgumentError(f"{name} is {shown(value)}; it must be {want}.")
        if not (_is_number(self.repetition_penalty) and 1 / LARGEST <= self.repetition_penalty <= LARGEST):
            want = f"a number above 0, at most {LARGEST:.3g}, 1 for none"
            raise ArgumentError(f"repetition_penalty is {shown(self.repetition_penalty)}; it must be {want}.")
        for name, high in (("top_k", None), ("seed", LARGEST_SEED)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (high is not None and value > high):
                raise ArgumentError(
                    f"{name} is {shown(value)}; it must be an integer of at least 0{'' if high is None else ', below 2**63'}."
                )

    @property
    def greedy(self) -> bool:
        """Flag of sampling that takes the largest logit."""
        return self.temperature == 0

    @property
    def plain(self) -> bool:
        """Flag of sampling that takes the largest of the logits as they are, without a penalty."""
        return self.greedy and self.repetition_penalty == 1

    def words(self, vocabulary: int) -> list[int]:
        """Return the rules as seven signed 32-bit words for a kernel.

        Numbers are float32. Top-k is 0 where it leaves out none of ``vocabulary`` tokens. In place of min-p stands how far a
        logit over the temperature may be below the largest.
        """
        coldest = 0.0 if self.greedy else max(self.temperature, COLDEST)
        top_k = self.top_k if self.top_k < vocabulary else 0
        farthest = -math.log(self.min_p) if self.min_p > 0 else math.inf
        packed = struct.pack(
            "<fIfffII", coldest, top_k, self.top_p, abs(farthest), self.repetition_penalty, self.seed & WORD, self.seed >> 32
        )
        return list(struct.unpack("<7i", packed))


def sampling_of(choices: Mapping[str, Any], others: Iterable[str] = ()) -> Sampling:
    """Return the sampling that keyword arguments describe.

    Args:
        choices: Fields of :class:`Sampling` by name.
        others: Names of the function's other arguments, which a wrong name may have meant.

    Raises:
        UnknownKeyword: a name is none of these fields.
        ArgumentError: a value is wrong; the message names it.
    """
    if unknown := [name for name in choices if name not in Choices.__annotations__]:
        raise UnknownKeyword(unknown[0], (*Choices.__annotations__, *others))
    return Sampling(**choices)


def recommended(generation: Mapping[str, Any]) -> Choices:
    """Return how a ``generation_config.json`` says to draw tokens; without ``do_sample``, only its penalty counts."""
    drawn = bool(generation.get("do_sample"))
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty") if drawn else ("repetition_penalty",)
    found: Any = {"temperature": 1.0, "top_k": USUAL_TOP_K} if drawn else {}
    return found | {name: generation[name] for name in names if generation.get(name) is not None}


class Sampler:
    """Sampler of one request's tokens.

    Args:
        sampling: Rules by which tokens are drawn.
        prompt: Tokens so far, ``[T]`` int64, on the device of the logits to come.
        vocabulary: Number of tokens that there are.

    Attributes:
        seen: Flags of the tokens that occurred so far, ``[V]`` bool; ``None`` without a penalty.
    """

    def __init__(self, sampling: Sampling, prompt: torch.Tensor, vocabulary: int) -> None:
        self.sampling, self._vocabulary, self._device = sampling, vocabulary, prompt.device
        self.seen: torch.Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(vocabulary, dtype=torch.bool, device=prompt.device)
            self.seen.index_fill_(0, prompt, 1)

    @functools.cached_property
    def choices(self) -> torch.Tensor | None:
        """Words of :meth:`Sampling.words` on the device, int32; ``None`` where the largest of the plain logits is taken."""
        if self.sampling.plain:
            return None
        return torch.tensor(self.sampling.words(self._vocabulary), dtype=torch.int32, device=self._device)

    def __call__(self, logits: torch.Tensor, position: Word) -> torch.Tensor:
        """Draw the token ``[1]`` int64 at ``position`` from the logits ``[V]`` float32 before it, and count it as seen."""
        if self.seen is not None:
            logits = penalise(logits, self.seen, self.sampling.repetition_penalty)
        if not self.sampling.greedy:
            logits = warp(logits, self.sampling) + gumbel(self.sampling.seed, position, len(logits), logits.device)
        token = logits.argmax(keepdim=True)
        if self.seen is not None:
            self.seen.index_fill_(0, token, 1)
        return token


def penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Return logits ``[V]`` with the tokens in ``seen [V]`` made less likely. Source: Keskar et al. (2019), CTRL."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def warp(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return logits ``[V]`` over the temperature, ``-inf`` where top-k, top-p or min-p leave a token out.

    The likeliest token always stays. The largest logit is subtracted first, so that none overflows at a low temperature.
    """
    logits = (logits - logits.max()) / max(sampling.temperature, COLDEST)
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -math.inf)
    if sampling.top_p < 1:
        ordered, tokens = logits.sort(descending=True, stable=True)
        chances = ordered.softmax(0)
        before = chances.cumsum(0) - chances
        out = before >= sampling.top_p
        out[:1].zero_()
        logits = logits.masked_fill(torch.empty_like(out).scatter_(0, tokens, out), -math.inf)
    if sampling.min_p > 0:
        logits = logits.masked_fill(logits < logits.max() + math.log(sampling.min_p), -math.inf)
    return logits


# Noise

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def gumbel(seed: int, position: Word, vocabulary: int, device: torch.device | str) -> torch.Tensor:
    """Return noise ``[V]`` float32 of Gumbel's distribution: the largest of logits plus noise is a draw from their softmax.

    ``-log(-log1p(-v))`` of ``v = (h + 0.5) / 2^32``, kept below 1, where ``h = mix(mix(token + a) ^ b)`` in words of 32 bits, and
    ``a`` and ``b`` come of seed and position (:func:`keys`). Source: Maddison et al. (2014); the constants of ``mix`` are
    Wellons's (2018).
    """
    a, b = keys(seed, position)
    words = _mix(_mix(torch.arange(vocabulary, device=device) + a & WORD) ^ b)
    v = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -(-torch.log1p(-v)).log()


def keys(seed: int, position: Word) -> tuple[Word, Word]:
    """Return two words for a position, mixed from the halves of the seed and the position."""
    first = _mix(_mix(seed & WORD) ^ (seed >> 32))
    second = _mix(first + GOLDEN & WORD)
    return _mix(position ^ first), _mix(position + second & WORD)


def _mix(word: Word) -> Word:
    """Apply a permutation of 32-bit words that leaves no pattern; words in tensors lie in int64."""
    word = word ^ word >> 16
    word = word * 0x7FEB352D & WORD
    word = word ^ word >> 15
    word = word * 0x846CA68B & WORD
    return word ^ word >> 16


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
