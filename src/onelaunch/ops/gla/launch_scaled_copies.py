"""Launches that copy the float32 tensors of a call as float16 times powers of 2, for the variant ``hopper_tf32``.

``launch_hopper_tf32.py`` calls :func:`scaled_copies`, and ``launch_hopper.py`` hands :class:`Powers` to its kernels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv, inner_contiguous, power_of_2
from onelaunch.launch.launch import Launch
from onelaunch.ops.gla.launch import Attention, strides

_TILE = 4096
"""Elements that a CTA takes at a time; not measured yet."""

_CTAS_PER_SM = 16
"""CTAs of a launch per SM that are aimed at, two waves of them; not measured yet."""

_FEWEST_ROWS = 64
"""Fewest steps of a CTA, if sequences have as many."""

_MOST_PARTS = 256
"""Most parts of a sequence, whose maxima one CTA reads."""

_PACKED_PARTS = 4
"""Fewest parts of packed sequences: one of them may have most of the steps."""


class Powers(NamedTuple):
    """Powers of 2 that undo the scaling of copies, float32; kernels/scaled_copies.py says what is multiplied by which."""

    forward: torch.Tensor
    """``[N, H, 8]``, for each head of the output."""
    backward: torch.Tensor | None
    """``[N, H, 16]``, or ``None`` in a forward pass."""


class ScaledCopies(NamedTuple):
    """Scaled copies of the tensors of a call, and what undoes the scaling."""

    call: Attention
    """The call with float16 copies of q, k and v, contiguous, and with a scale of magnitude below 1."""
    do: torch.Tensor | None
    """Float16 copy of the gradient of o, ``[B, T, H, V]``, contiguous; ``None`` in a forward pass."""
    powers: Powers
    """Powers by which results are multiplied."""


def part_count(call: Attention, heads: int, multiprocessors: int) -> int:
    """Return the number of parts into which each sequence is cut, so that CTAs for so many heads fill the SMs."""
    length, sequences = call.q.shape[1], call.sequence_count
    least = 1 if call.sequences.offsets is None else _PACKED_PARTS
    wanted = max(cdiv(_CTAS_PER_SM * multiprocessors, max(sequences * heads, 1)), least)
    return min(wanted, max(cdiv(length, _FEWEST_ROWS), 1), _MOST_PARTS)


def scaled_copies(call: Attention, do: torch.Tensor | None = None, dfinal: torch.Tensor | None = None) -> ScaledCopies:
    """Copy q, k, v and the gradient of o as float16 times powers of 2; see kernels/scaled_copies.py.

    Args:
        call: Tensors of the forward pass, float32.
        do: Gradient of o, ``[B, T, H, V]`` float32; ``None`` in a forward pass.
        dfinal: Gradient of the final state, float32, which bounds the powers but is not scaled here; ``None`` for zeros.
    """
    from onelaunch.ops.gla.kernels import scaled_copies as kernels

    _, length, heads, keys, values = call.sizes
    counts, sequences, initial, offsets = call.heads, call.sequence_count, call.sequences.initial, call.sequences.offsets
    device = call.q.device
    do = None if do is None else inner_contiguous(do)
    dfinal = None if dfinal is None else dfinal.contiguous()
    copied = counts.q + counts.k + counts.v + (0 if do is None else heads)
    every = copied + sum(counts.state for each in (initial, dfinal) if each is not None)
    parts = part_count(call, copied, processors(device))
    mantissa, shift = math.frexp(call.scale)

    q, k, v = (torch.empty(each.shape, dtype=torch.float16, device=device) for each in call[:3])
    do_copy = None if do is None else torch.empty(do.shape, dtype=torch.float16, device=device)
    largest = torch.empty((every, sequences, parts), dtype=torch.float32, device=device)
    forward = torch.empty((sequences, heads, kernels.FORWARD.value), dtype=torch.float32, device=device)
    backward = None if do is None else forward.new_empty((sequences, heads, kernels.BACKWARD.value))
    key_block, value_block = power_of_2(keys), power_of_2(values)
    sizes = (*counts[:3], heads, counts.state, keys, values)
    along = strides(call.q, call.k, call.v, call.q if do is None else do)
    options = {
        "BLOCK": max(_TILE // max(key_block, value_block), 1), "BK": key_block, "BV": value_block, "PACKED": offsets is not None,
        "num_warps": 4,
    }  # fmt: skip
    Launch(
        kernels.head_largest_kernel, (every * sequences * parts,),
        call.q, call.k, call.v, do, initial, dfinal, offsets, largest, length, sequences, parts, *sizes, *along, **options,
    ).run()  # fmt: skip
    Launch(
        kernels.scaled_copies_kernel, (sequences * (heads + copied * parts),),
        call.q, call.k, call.v, do, initial, dfinal, offsets, largest, q, k, v, do_copy, forward, backward, length, sequences,
        parts, *sizes, *along, shift,
        BP=power_of_2(parts), LOG_K=key_block.bit_length() - 1, LOG_V=value_block.bit_length() - 1, **options,
    ).run()  # fmt: skip
    return ScaledCopies(call._replace(q=q, k=k, v=v, scale=mantissa), do_copy, Powers(forward, backward))
