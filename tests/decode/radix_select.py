"""Radix selection of the sampler's limits, as the decode kernels do it: keys of tokens, passes, and digits of the limit.

The interpreter of plans draws tokens with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from onelaunch.decode.codegen.layout import BINS
from onelaunch.decode.model.sampling import Sampling

DIGIT = BINS.bit_length() - 1
"""Bits of a radix-select digit."""

NEAREST, FARTHEST = 100 << 23, 0x41FFFFFF
"""Bit patterns of the smallest and the largest distance in a key, in float32.

A token's distance is (largest logit - its logit) / temperature. Its key has 60 bits: 28 for the distance, then 32 for the token.
"""


@dataclass(slots=True)
class Search:
    """Radix-select state of one CTA: the key limit of tokens that may still be drawn, and the digits found so far."""

    largest: float = math.nan
    limit: int = 1 << 60
    prefix: int = 0
    target: int = 0  # tokens, or probability in units of 2**-38, that are kept of the keys that begin with ``prefix``


def digits(sampling: Sampling) -> list[tuple[bool, int]]:
    """Return for each radix-select pass whether it sums probabilities (top-p) or counts tokens (top-k), and its lowest key bit.

    These are all passes that can be needed, and ``plan_for`` is given their number as ``rounds``. The kernel ends sooner where
    nothing is left to decide. Top-k looks at the distance only, since it keeps all tokens with equal logits; top-p does not.
    """
    counted = [(False, at) for at in (50, 40, 30)] if sampling.top_k else []
    return counted + ([(True, at) for at in (50, 40, 30, 20, 10, 0)] if sampling.top_p < 1 else [])


def keys_of(distances: torch.Tensor) -> torch.Tensor:
    """Return the keys of tokens at these distances, without the 32 bits that hold the token."""
    bits = distances.float().view(torch.int32).clamp(NEAREST, FARTHEST)
    return (bits - NEAREST).long() << 32


def narrow(sampling: Sampling, search: Search, by_probability: bool, at: int, sums: torch.Tensor) -> None:
    """Find the next digit of the limit in a pass's histogram, and after the last digit lower the limit to it."""
    total = sums.cumsum(0)
    if at == 50:
        search.target = max(int(sampling.top_p * int(total[-1])), 1) if by_probability else min(sampling.top_k, int(total[-1]))
        search.prefix = 0
    digit = int((total < search.target).sum())
    search.target -= int(total[digit] - sums[digit]) if digit < BINS else 0
    search.prefix = search.prefix << DIGIT | digit
    if at == (0 if by_probability else 30):
        search.limit = min(search.limit, (search.prefix + 1 << at) - 1)
