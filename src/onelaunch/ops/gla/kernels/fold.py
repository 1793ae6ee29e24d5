"""Combine local states of a recurrence: the state after segments of T, or after the slices of several ranks, in one launch.

``fold_kernel`` reads tensors and writes a tensor. ``fold_and_send_kernel`` makes a rank's message from the sums of its segments
and stores it to the memory of other ranks. ``fold_in_place_kernel`` waits for messages of other ranks and reads them where they
are stored.

Computes   state = initial or 0, then state = state * decay[i] + added[i] for i = 0, 1, ..., with BACK from the last i down;
           factors = decay[0] * decay[1] * ...
           With GROUP > 1 heads of ``added`` share a state: the results of GROUP neighbouring heads are added up.
           The other two kernels go from the last i to the first: state = added[n] + decay[n] * (added[n - 1] + ...). A CTA
           stops where the product of the decays so far is 0 in all channels of its block, as with decays of trained models
           after one segment or slice. It neither waits for further messages nor reads them. So a NaN in one of these does not
           reach the result, whereas ``fold_kernel`` multiplies it by 0, which is NaN.
Launched   by launch_slices.py: with the segment states of ``segment_sum_kernel`` to make a rank's message, and with messages of
           other ranks to make the state before its slice. The messages are in a tensor, or peers store them in this rank's
           memory (parallel/kernels.py).
Grid       one CTA per head of the result, block of BK keys and block of BV values. ``fold_and_send_kernel`` has the CTAs that
           send in a channel, which take the heads and blocks of BK keys in turn.
Memory     reads ``added`` and ``decays`` once. Elements of ``added`` have any strides: segments store [V, K], messages [K, V].
           ``fold_and_send_kernel`` stores a message to its first reader from registers, and to a tensor from which it copies it
           to the others, after the flags of the first are set.
Numerics   float32.
"""

import triton
import triton.language as tl

from onelaunch.parallel.kernels import next_epoch, set_flags, slot_at, wait_for_message


@triton.jit
def fold_kernel(
    added, decays, initial, state, factors, count, keys, values,
    added_head, added_item, added_key, added_value, decays_head, decays_item, decays_key, factor_channels,
    GROUP: tl.constexpr, BACK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Store ``state`` [heads, keys, values] and, if it is not None, ``factors`` [heads, factor_channels], 1 or keys.

    ``added`` and ``decays`` have strides in elements by head, item and channel. An item is a segment or a slice; ``count`` is the
    number of items. ``initial`` is [heads, keys, values] or None. All tensors are float32.
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
            if each == 0:  # The sum over the group contains it once.
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


@triton.jit(do_not_specialize=["rows"])  # 1 would be a constant, which has no method ``to``
def fold_and_send_kernel(
    added, decays, initial, message, flags, epochs, addresses, rank, readers, words, capacity, limit, rows, items, keys, values,
    added_head, added_item, added_value, decays_head, decays_item, factor_channels,
    GROUP: tl.constexpr, BACK: tl.constexpr, SLOTS: tl.constexpr, RANKS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TIMED: tl.constexpr,
):  # fmt: skip
    """Combine the sums of segments to a rank's message, and send it as ``send_kernel`` of parallel/kernels.py sends a tensor.

    Args:
        added: Sums of segments, float32 [rows GROUP, items, values, keys], padded, with the strides that are given.
        decays: Decays of segments, float32 [rows GROUP, items, keys].
        initial: State before the slice, float32 [rows, keys, values], or ``None`` for zeros.
        message: Pointer to ``words`` 32-bit words of this rank, of which the parts that several ranks read are written: states
            [rows, keys, values], then cumulative decays [rows, factor_channels].
        flags: Pointer to the flags of this rank's channel, and so on to ``limit``: see ``send_kernel``.
        epochs: See ``send_kernel``.
        addresses: See ``send_kernel``.
        rank: See ``send_kernel``.
        readers: See ``send_kernel``; at least 1.
        words: Number of 32-bit words in the message.
        capacity: See ``send_kernel``.
        limit: See ``send_kernel``.
        rows: Number of states.
        items: Number of segments.
        keys: K.
        values: V.
        added_head: Stride of ``added``, in elements, as the next four numbers are; that of keys is 1.
        added_item: Stride of ``added``.
        added_value: Stride of ``added``.
        decays_head: Stride of ``decays``.
        decays_item: Stride of ``decays``.
        factor_channels: Number of cumulative decays of a state, 1 or K.
        GROUP: Heads of ``added`` that share a state.
        BACK: Flag that sums are gradients, so that the first segment is the nearest to the readers.
        SLOTS: See ``send_kernel``.
        RANKS: See ``send_kernel``.
        BK: Keys of a block.
        BV: Values of a block.
        TIMED: See ``send_kernel``.
    """
    cta, ctas = tl.program_id(0), tl.num_programs(0)
    epoch = next_epoch(flags, epochs, limit, RANKS, TIMED)
    blocks = tl.cdiv(keys, BK)
    nearest = slot_at(addresses[0], rank, epoch, capacity, SLOTS, RANKS).to(tl.pointer_type(tl.float32))
    for unit in range(cta, rows * blocks, ctas):
        row = (unit // blocks).to(tl.int64)
        k = unit % blocks * BK + tl.arange(0, BK)
        for start in range(0, values, BV):
            v = start + tl.arange(0, BV)
            inside = (k < keys)[:, None] & (v < values)[None, :]
            place = (row * keys + k[:, None]) * values + v[None, :]
            total = tl.zeros([BK, BV], tl.float32)
            whole = tl.zeros([BK], tl.float32)
            for each in tl.static_range(GROUP):
                of = row * GROUP + each
                factor = tl.where(k < keys, 1.0, 0.0)
                done = 0
                while (done < items) & (tl.sum(factor, 0) != 0.0):  # The sum is NaN, and so not 0, if a decay is NaN.
                    item = done if BACK else items - 1 - done
                    p_added = added + of * added_head + item * added_item + k[:, None] + v[None, :] * added_value
                    decay = tl.load(decays + of * decays_head + item * decays_item + k, mask=k < keys, other=0.0)
                    total += factor[:, None] * tl.load(p_added, mask=inside, other=0.0)
                    factor *= decay
                    done += 1
                if each == 0:  # The sum over the group contains the initial state once, and the decays are those of all.
                    whole = factor
            if initial is not None:
                if tl.sum(whole, 0) != 0.0:
                    total += whole[:, None] * tl.load(initial + place, mask=inside, other=0.0)
            tl.store(nearest + place, total, mask=inside)
            if readers > 1:
                tl.store(message + place, total, mask=inside)
            if start == 0:
                at = rows.to(tl.int64) * keys * values + row * factor_channels + k
                tl.store(nearest + at, whole, mask=k < factor_channels)
                if readers > 1:
                    tl.store(message + at, whole, mask=k < factor_channels)
    set_flags(addresses, rank, epoch, words, 0, 1, RANKS)
    for i in tl.static_range(1, RANKS):
        if i < readers:
            slot = slot_at(addresses[i], rank, epoch, capacity, SLOTS, RANKS).to(tl.pointer_type(tl.float32))
            for unit in range(cta, rows * blocks, ctas):
                row = (unit // blocks).to(tl.int64)
                first = unit % blocks * BK
                states = (row * keys + first) * values  # The states of a block of keys are neighbours.
                count = tl.minimum(keys - first, BK) * values
                for start in range(0, count, BK * BV):
                    at = start + tl.arange(0, BK * BV)
                    tl.store(slot + states + at, tl.load(message + states + at, mask=at < count), mask=at < count)
                k = first + tl.arange(0, BK)
                at = rows.to(tl.int64) * keys * values + row * factor_channels + k
                tl.store(slot + at, tl.load(message + at, mask=k < factor_channels), mask=k < factor_channels)
    set_flags(addresses, rank, epoch, words, 1, RANKS, RANKS)
    tl.store(epochs + cta, epoch)


@triton.jit(do_not_specialize=["rows"])  # 1 would be a constant, which has no method ``to``
def fold_in_place_kernel(
    flags, epochs, slots, state, ranks, rows, words, capacity, limit, keys, values, factor_channels,
    COUNT: tl.constexpr, RANKS: tl.constexpr, CTAS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Wait for the messages of some ranks, and store ``state`` [rows, keys, values], the state after their slices.

    A message is float32: states [rows, keys, values], then cumulative decays [rows, factor_channels].

    Args:
        flags: Pointer to the flags of this rank's channel, int64 [RANKS, CTAS]; see parallel/kernels.py for the channel.
        epochs: Pointer to the epochs of this rank's CTAs, int64 [CTAS], as ``send_kernel`` of the exchange left them.
        slots: Pointer to the slots of this rank's channel, 32-bit words [2, RANKS, capacity].
        state: Pointer to the result, float32.
        ranks: The COUNT ranks whose messages are combined, the nearest one first.
        rows: Number of states in a message.
        words: Number of 32-bit words in a message.
        capacity: Number of words that a slot holds for a rank.
        limit: Nanoseconds after which the kernel ends by a trap; a number of polls without ``TIMED``.
        keys: K.
        values: V.
        factor_channels: Number of cumulative decays of a state, 1 or K.
        COUNT: Number of messages that are combined.
        RANKS: Number of ranks of the group.
        CTAS: Number of CTAs that send a message.
        BK: Keys of a block.
        BV: Values of a block.
        TIMED: Flag that the kernel is compiled; False in Triton's interpreter, which has no timer.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    inside = (k < keys)[:, None] & (v < values)[None, :]
    place = (row * keys + k[:, None]) * values + v[None, :]
    p_factor = rows.to(tl.int64) * keys * values + row * factor_channels + tl.where(factor_channels > 1, k, 0)
    sender = tl.minimum(tl.arange(0, triton.next_power_of_2(CTAS)), CTAS - 1)
    epoch = tl.load(epochs)
    total = tl.zeros([BK, BV], tl.float32)
    factor = tl.where(k < keys, 1.0, 0.0)
    for i in tl.static_range(COUNT):
        if tl.sum(factor, 0) != 0.0:  # The sum is NaN, and so not 0, if a decay is NaN.
            wait_for_message(flags + ranks[i] * CTAS + sender, epoch, words, limit, TIMED)
            message = slots.to(tl.pointer_type(tl.float32)) + ((epoch & 1) * RANKS + ranks[i]) * capacity
            total += factor[:, None] * tl.load(message + place, mask=inside, other=0.0, cache_modifier=".cg")
            factor *= tl.load(message + p_factor, mask=k < keys, other=0.0, cache_modifier=".cg")
    tl.store(state + place, total, mask=inside)
