"""Sampling of a token from logits, in PyTorch on the logits' device. Nothing here waits for the device.

The random numbers are a function of seed, position and token (:func:`gumbel`), not of a generator's state. Every device therefore
draws the same ones, and so do the kernels that generate many tokens per launch (``codegen/kernels/sampling.cuh``).
``decode/generate.py`` reads a call's options into a :class:`Sampling`, which ``onelaunch.decode`` exports and ``onelaunch
generate`` makes to check its options early. Engines and sessions draw with a :class:`Sampler`. ``weights.py`` takes the largest
seed.
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
"""Largest seed: the largest signed 64-bit integer."""

_LARGEST = torch.finfo(torch.float32).max
"""Largest temperature and penalty, since kernels take them in float32."""

_USUAL_TOP_K = 50
"""Value of ``top_k`` if a model's ``generation_config.json`` samples without giving one: the default of ``transformers``."""

COLDEST = 1e-30
"""Temperature to which smaller ones are raised. It leaves only the likeliest token, and its reciprocal is finite in float32."""

Word = TypeVar("Word", int, torch.Tensor)
"""Type of an unsigned 32-bit word: an integer on the host, or an int64 tensor of such integers on a device."""


class Choices(TypedDict, total=False):
    """Fields of :class:`Sampling`, as keyword arguments of generating functions."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters: penalty, temperature, top-k, top-p and min-p, applied in this order, as in ``transformers``.

    Raises:
        ArgumentError: a field is wrong; the message names it, its value and what it must be.
    """

    temperature: float = 0.0
    """Divisor of the logits. With 0, the largest logit is taken, and only ``repetition_penalty`` still has an effect."""
    top_k: int = 0
    """Number of largest logits to keep, plus all that equal the smallest of these; 0 keeps all."""
    top_p: float = 1.0
    """Total probability to keep: sampling is restricted to the smallest set of likeliest tokens that reaches it."""
    min_p: float = 0.0
    """Smallest probability to keep, as a fraction of the largest one."""
    repetition_penalty: float = 1.0
    """Penalty on tokens that occurred before: it divides their positive logits and multiplies their negative ones."""
    seed: int = 0
    """Seed of the noise; the same seed draws the same tokens."""

    def __post_init__(self) -> None:
        for name in Choices.__annotations__:  # converts numbers of other classes, such as NumPy's, to Python's
            if not isinstance(value := getattr(self, name), bool) and isinstance(value, numbers.Real):
                whole = isinstance(value, numbers.Integral)
                with contextlib.suppress(OverflowError):  # a number beyond the range of float is refused below
                    object.__setattr__(self, name, int(value) if whole else float(value))
        for name, low, high in (("temperature", 0.0, _LARGEST), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
            value = getattr(self, name)
            if not (_is_number(value) and low <= value <= high and math.isfinite(value)):
                want = f"a number from 0 to {high:.3g}"
                raise ArgumentError(f"{name} is {shown(value)}; it must be {want}.")
        if not (_is_number(self.repetition_penalty) and 1 / _LARGEST <= self.repetition_penalty <= _LARGEST):
            want = f"a number above 0, at most {_LARGEST:.3g}, 1 for none"
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
        """Flag of sampling that takes the largest of the unchanged logits: greedy, without a penalty."""
        return self.greedy and self.repetition_penalty == 1

    def words(self, vocabulary: int) -> list[int]:
        """Return the parameters as seven signed 32-bit words for a kernel.

        Real numbers are stored as float32. Top-k is 0 if it excludes none of ``vocabulary`` tokens. Min-p is stored as
        ``-log(min_p)``: the largest distance between a logit divided by the temperature and the largest such logit.
        """
        temperature = 0.0 if self.greedy else max(self.temperature, COLDEST)
        top_k = self.top_k if self.top_k < vocabulary else 0
        farthest = -math.log(self.min_p) if self.min_p > 0 else math.inf  # -0.0 for min_p = 1, hence ``abs`` below
        packed = struct.pack(
            "<fIfffII", temperature, top_k, self.top_p, abs(farthest), self.repetition_penalty, self.seed & WORD, self.seed >> 32
        )
        return list(struct.unpack("<7i", packed))


def sampling_of(choices: Mapping[str, Any], others: Iterable[str] = ()) -> Sampling:
    """Return the sampling that keyword arguments describe.

    Args:
        choices: Fields of :class:`Sampling` by name.
        others: Names of the function's other arguments, for the suggestion in the error message.

    Raises:
        UnknownKeyword: a name is not a field of :class:`Sampling`.
        ArgumentError: a value is wrong; the message names it.
    """
    if unknown := [name for name in choices if name not in Choices.__annotations__]:
        raise UnknownKeyword(unknown[0], (*Choices.__annotations__, *others))
    return Sampling(**choices)


def recommended(generation: Mapping[str, Any]) -> Choices:
    """Return the sampling parameters of a ``generation_config.json``; without ``do_sample``, only its penalty counts."""
    drawn = bool(generation.get("do_sample"))
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty") if drawn else ("repetition_penalty",)
    found: Any = {"temperature": 1.0, "top_k": _USUAL_TOP_K} if drawn else {}
    return found | {name: generation[name] for name in names if generation.get(name) is not None}


class Sampler:
    """Sampler of one request's tokens.

    Args:
        sampling: Sampling parameters.
        prompt: Tokens of the prompt, ``[T]`` int64, on the device of the logits to come.
        vocabulary: Number of tokens in the vocabulary.

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
        """Words of :meth:`Sampling.words` on the device, int32; ``None`` if the largest of the unchanged logits is taken."""
        if self.sampling.plain:
            return None
        return torch.tensor(self.sampling.words(self._vocabulary), dtype=torch.int32, device=self._device)

    def __call__(self, logits: torch.Tensor, position: Word) -> torch.Tensor:
        """Return the token ``[1]`` int64 drawn for ``position`` from its logits ``[V]`` float32, and mark it as seen."""
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
    """Return logits ``[V]`` divided by the temperature, with ``-inf`` for tokens that top-k, top-p or min-p exclude.

    The likeliest token always stays. The largest logit is subtracted first, so that none overflows at a low temperature.
    """
    logits = (logits - logits.max()) / max(sampling.temperature, COLDEST)
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -math.inf)
    if sampling.top_p < 1:
        # A stable sort puts the smaller of two tokens of equal logits first, as the kernel's keys do.
        ordered, tokens = logits.sort(descending=True, stable=True)
        probabilities = ordered.softmax(0)
        before = probabilities.cumsum(0) - probabilities
        excluded = before >= sampling.top_p
        excluded[:1].zero_()  # keeps the likeliest token, also for top_p = 0
        logits = logits.masked_fill(torch.empty_like(excluded).scatter_(0, tokens, excluded), -math.inf)
    if sampling.min_p > 0:
        logits = logits.masked_fill(logits < logits.max() + math.log(sampling.min_p), -math.inf)
    return logits


# Noise

WORD = 0xFFFFFFFF
"""Mask of a 32-bit word."""

_GOLDEN = 0x9E3779B9
"""2^32 divided by the golden ratio. Added to a seed's first hash, it gives the input of its second one (:func:`keys`)."""


def gumbel(seed: int, position: Word, vocabulary: int, device: torch.device | str) -> torch.Tensor:
    """Return Gumbel noise ``[V]`` float32: the argmax of logits plus noise is a sample from their softmax.

    The noise is ``-log(-log1p(-v))`` with ``v = (h + 0.5) / 2^32``, kept below 1. The hash ``h = mix(mix(token + a) ^ b)`` is
    computed in 32-bit words; ``a`` and ``b`` depend on seed and position (:func:`keys`). Source: Maddison et al. (2014); the
    constants of ``mix`` are from Wellons (2018).
    """
    a, b = keys(seed, position)
    words = _mix(_mix(torch.arange(vocabulary, device=device) + a & WORD) ^ b)
    v = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -(-torch.log1p(-v)).log()


def keys(seed: int, position: Word) -> tuple[Word, Word]:
    """Return the two hash keys of a position, made from it and the two halves of the seed."""
    first = _mix(_mix(seed & WORD) ^ (seed >> 32))
    second = _mix(first + _GOLDEN & WORD)
    return _mix(position ^ first), _mix(position + second & WORD)


def _mix(word: Word) -> Word:
    """Return the hash of a 32-bit word, a permutation of all words; tensors hold their words in int64."""
    word = word ^ word >> 16
    word = word * 0x7FEB352D & WORD
    word = word ^ word >> 15
    word = word * 0x846CA68B & WORD
    return word ^ word >> 16


def _is_number(value: object) -> bool:
    """Return whether a value is an integer or a float; a ``bool`` is neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
