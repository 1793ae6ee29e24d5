"""Sizes to which ``hopper``'s kernels pad the channels of a head, in shared memory, in registers and in stored states.

Tiles of Gluon are powers of 2, and a warpgroup holds 64 values of a state, so K becomes 64, 128 or 256 and V a multiple of 64
or 128. Tensors of the call are not copied: TMA fills the channels beyond a head with zeros when it loads them, and drops them
when it stores. Only states that the kernels pass to each other are stored padded. launch_hopper.py and cost.py call
these functions; variants/hopper.py checks the sizes of a call against :data:`KEYS`, and calls :func:`aligned` where they are no
multiples of :data:`STEP`.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

PANEL = 64
"""Channels of one TMA box, and values that one warpgroup holds."""

KEYS = (64, 128, 256)
"""Padded sizes K. A warpgroup's registers hold at most 64 values of 256 channels."""

STEP = 8
"""Sizes K and V of tensors that the kernels read are multiples of it: TMA requires that heads of 16-bit numbers begin at
multiples of 16 bytes. :func:`aligned` copies heads of other sizes."""


def padded_keys(keys: int) -> int:
    """Return the smallest size of :data:`KEYS` that holds ``keys`` channels; ``keys`` beyond them, which no kernel takes."""
    return next((each for each in KEYS if keys <= each), keys)


def value_groups(keys: int, values: int) -> int:
    """Return the warpgroups of a pass that multiply, each for 64 values: two where V and the registers allow.

    Two groups share the decayed keys and the scores, whose making takes most of the time. So V of 192 takes two CTAs of two
    groups, with a quarter of their products in vain, rather than three CTAs of one. With K beyond 128 the registers hold one
    group.
    """
    return 2 if values > PANEL and keys <= 2 * PANEL else 1


def padded_values(keys: int, values: int) -> int:
    """Return the values of a padded state, a multiple of those that a CTA of a pass holds."""
    held = PANEL * value_groups(keys, values)
    return -(-values // held) * held


def key_panels(keys: int) -> int:
    """Return the panels of 64 channels that hold ``keys`` channels."""
    return -(-keys // PANEL)


def aligned_size(size: int) -> int:
    """Return the smallest multiple of :data:`STEP` that is at least ``size``."""
    return -(-size // STEP) * STEP


def aligned(tensor: torch.Tensor, *, states: bool = False) -> torch.Tensor:
    """Return a tensor whose last dimension has an aligned size, with zeros behind; of ``states`` the last two dimensions.

    The tensor itself is returned where its size is aligned already.
    """
    missing = [0, aligned_size(tensor.shape[-1]) - tensor.shape[-1]]
    if states:
        missing += [0, aligned_size(tensor.shape[-2]) - tensor.shape[-2]]
    return F.pad(tensor, missing) if any(missing) else tensor
