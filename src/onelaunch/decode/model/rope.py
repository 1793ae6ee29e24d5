"""Rotary position embeddings (RoPE): the rotation of each pair of channels per position, with the scalings for long contexts.

The forward pass rotates by it. The variants of ``decode_step`` in PyTorch take the rotation of a position, and the decode runtime
stores those of all positions for the kernels.

Source: Su et al. (2021), RoFormer; :mod:`onelaunch.decode.model.config` gives the sources of the scalings.
"""

from __future__ import annotations

import functools
import math

import torch

from onelaunch.decode.model.config import LinearScaling, Llama3Scaling, ModelConfig, YarnScaling


def frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Return the frequency of each channel pair, and the factor by which cosine and sine are multiplied (1 except for YaRN).

    Frequencies are in radians per position, ``[D / 2]`` float64 on the CPU, for ``D`` channels of a head. Channel ``i`` forms a
    pair with channel ``i + D / 2``.
    """
    plain = config.rope_theta ** -(torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu") / config.head_dim)
    scaling = config.rope_scaling
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor, 1.0
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)  # rotations over the original context
        unscaled = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        return _blend(plain, plain / scaling.factor, unscaled.clamp(0, 1)), 1.0
    if isinstance(scaling, YarnScaling):
        factor = scaling.attention_factor
        if factor is None:
            factor = 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
        return _blend(plain, plain / scaling.factor, _yarn_unscaled(config, scaling)), factor
    return plain, 1.0


def rotation(config: ModelConfig, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine, ``[T, D / 2]`` each, in ``dtype`` at integer positions ``[T]``, on their device.

    Angles are computed in float64: in float32 they would be off by a thousandth of a radian at position 16,000.
    """
    radians, factor = _on_device(config, positions.device)
    angles = positions.double()[:, None] * radians
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def layer_rotations(config: ModelConfig, positions: torch.Tensor, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return :func:`rotation` once per layer; that of an unrotated layer is the identity, cosine 1 and sine 0."""
    rotated = rotation(config, positions, dtype)
    if not config.unrotated_layers:
        return [rotated] * config.num_hidden_layers
    unrotated = frozenset(config.unrotated_layers)
    identity = torch.ones_like(rotated[0]), torch.zeros_like(rotated[1])
    return [identity if number in unrotated else rotated for number in range(config.num_hidden_layers)]


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Return heads ``[T, N, D]`` rotated by their positions' cosine and sine ``[T, D / 2]``."""
    first, second = heads.chunk(2, -1)
    cosine, sine = cosine[:, None], sine[:, None]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def _blend(unscaled: torch.Tensor, interpolated: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean of two sets of frequencies; ``weight``, from 0 to 1 per pair, is that of the unscaled ones."""
    return unscaled * weight + interpolated * (1 - weight)


def _yarn_unscaled(config: ModelConfig, scaling: YarnScaling) -> torch.Tensor:
    """Return the weight of each pair's unscaled frequency, ``[D / 2]``.

    It is 1 for pairs that make many rotations over the original context, 0 for pairs that make few, and linear between.
    """

    def channel(turns: float) -> float:
        """Return the fractional index of the pair that makes ``turns`` rotations over the original context."""
        longest = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return config.head_dim * math.log(longest) / (2 * math.log(config.rope_theta))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The bound is head_dim - 1, as in transformers, though the last pair has the index head_dim / 2 - 1.
    first, last = max(first, 0), min(last, config.head_dim - 1)
    if first == last:
        last += 0.001  # the ramp becomes a step, without a division by zero
    ramp = (torch.arange(config.head_dim // 2, dtype=torch.float64, device="cpu") - first) / (last - first)
    return 1 - ramp.clamp(0, 1)


@functools.lru_cache(maxsize=64)
def _on_device(config: ModelConfig, device: torch.device) -> tuple[torch.Tensor, float]:
    """Return :func:`frequencies` on a device."""
    radians, factor = frequencies(config)
    return radians.to(device), factor
