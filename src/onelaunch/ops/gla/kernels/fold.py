"""Combine local states of a recurrence: the state after segments of T, or after the slices of several ranks, in one launch.

Computes   state = initial or 0, then state = state * decay[i] + added[i] for i = 0, 1, ..., with BACK from the last i down;
           factors = decay[0] * decay[1] * ...
           With GROUP > 1 heads of ``added`` share a state: the results of GROUP neighbouring heads are added up.
Launched   by launch_slices.py: with the segment states of ``segment_sum_kernel`` to make a rank's message, and with messages of
           other ranks to make the state before its slice.
Grid       one CTA per head of the result, block of BK keys and block of BV values.
Memory     reads ``added`` and ``decays`` once. Elements of ``added`` have any strides: segments store [V, K], messages [K, V].
Numerics   float32.
"""

import triton
import triton.language as tl


@triton.jit
def fold_kernel(
    added, decays, initial, state, factors, count, keys, values,
    added_head, added_item, added_key, added_value, decays_head, decays_item, decays_key, factor_channels,
    GROUP: tl.constexpr, BACK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Store ``state`` [heads, keys, values] and, if it is not None, ``factors`` [heads, factor_channels], 1 or keys.

    ``added`` and ``decays`` are float32 with strides in elements by head, item and channel; ``count`` is the number of items, and
    ``initial`` [heads, keys, values] or None. All tensors are float32.
    """
    head = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    inside = (k < keys)[:, None] & (v < values)[None, :]
    place = (head * keys + k[:, None]) * values + v[None, :]
    total = tl.zeros([BK, BV], tl.float32)
    factor = tl.full([BK], 1.0, tl.float32)
    for each in tl.static_range(GROUP):
        of = head * GROUP + each
        p_added = added + of * added_head + k[:, None] * added_key + v[None, :] * added_value
        p_decays = decays + of * decays_head + k * decays_key
        if BACK:
            p_added += (count - 1) * added_item
            p_decays += (count - 1) * decays_item
        folded = tl.zeros([BK, BV], tl.float32)
        if initial is not None:
            if each == 0:  # the sum of the group starts from it once
                folded = tl.load(initial + place, mask=inside, other=0.0)
        for _ in range(count):
            decay = tl.load(p_decays, mask=k < keys, other=0.0)
            folded = folded * decay[:, None] + tl.load(p_added, mask=inside, other=0.0)
            if each == 0:
                factor *= decay
            p_added += -added_item if BACK else added_item
            p_decays += -decays_item if BACK else decays_item
        total += folded
    tl.store(state + place, total, mask=inside)
    if factors is not None:
        tl.store(factors + head * factor_channels + k, factor, mask=(k < factor_channels) & (tl.program_id(2) == 0))
