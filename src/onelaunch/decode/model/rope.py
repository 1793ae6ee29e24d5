"""Rotary position embeddings: the angle by which each pair of channels turns per position, with the scalings of long contexts.

Source: Su et al. (2021), RoFormer; the scalings as :mod:`onelaunch.decode.model.config` names them.
"""

from __future__ import annotations

import functools
import math

import torch

from onelaunch.decode.model.config import LinearScaling, Llama3Scaling, ModelConfig, YarnScaling


def frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of channels, ``[D / 2]`` float64 on the CPU, and the factor of cosine and sine.

    Channel ``i`` is turned with channel ``i + D / 2``.
    """
    plain = config.rope_theta ** -(torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu") / config.head_dim)
    scaling = config.rope_scaling
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor, 1.0
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)  # over the original context
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        return _blend(plain, plain / scaling.factor, kept.clamp(0, 1)), 1.0
    if isinstance(scaling, YarnScaling):
        factor = scaling.attention_factor
        if factor is None:
            factor = 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
        return _blend(plain, plain / scaling.factor, _yarn_kept(config, scaling)), factor
    return plain, 1.0


def rotation(config: ModelConfig, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine ``[T, D / 2]`` in ``dtype`` at integer positions ``[T]``, on their device.

    Angles are made in float64: in float32 they would be off by a thousandth at position 16,000.
    """
    radians, factor = _on_device(config, positions.device)
    angles = positions.double()[:, None] * radians
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Heads ``[T, N, D]`` turned by their positions' cosine and sine ``[T, D / 2]``."""
    first, second = heads.chunk(2, -1)
    cosine, sine = cosine[:, None], sine[:, None]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def _blend(kept: torch.Tensor, interpolated: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    return kept * share + interpolated * (1 - share)


def _yarn_kept(config: ModelConfig, scaling: YarnScaling) -> torch.Tensor:
    """How much stays of each pair's frequency: 1 where it turns often in the original context, 0 where seldom, else between."""

    def channel(turns: float) -> float:
        """The pair, as a number with fractions, that turns so often over the original context."""
        longest = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return config.head_dim * math.log(longest) / (2 * math.log(config.rope_theta))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    if first == last:
        last += 0.001  # a step, without dividing by zero
    ramp = (torch.arange(config.head_dim // 2, dtype=torch.float64, device="cpu") - first) / (last - first)
    return 1 - ramp.clamp(0, 1)


@functools.lru_cache(maxsize=64)
def _on_device(config: ModelConfig, device: torch.device) -> tuple[torch.Tensor, float]:
    radians, factor = frequencies(config)
    return radians.to(device), factor
