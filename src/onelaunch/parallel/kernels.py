"""Exchange of messages between GPUs by stores to the memory of peers: a kernel that sends a message, and one that gathers all.

Computes   for an all-gather, gathered[r] = message of rank r, the same bits (``receive_kernel``). In an exchange with readers a
           rank sends its message only to the ranks that read it. Their kernels call ``wait_for_message`` and read the message in
           its slot, as in ops/gla/kernels/fold.py. There another kernel sends as ``send_kernel`` does a message that it computes:
           by ``next_epoch``, ``slot_at`` and ``set_flags``. What is said of ``send_kernel`` below is true of it too, but for the
           parts of the message that a CTA stores. A message is a sequence of 32-bit words.
Launched   by peer_stores.py, where all GPUs of a group can write each other's memory.
Grid       ``send_kernel`` one dimension of CTAs; ``receive_kernel`` the same CTAs by the ranks that have sent. CTA i of a
           sender stores blocks i, i + CTAs, ... of its message, and CTA (i, r) of a receiver copies the same blocks of rank r
           when all flags of rank r are set, since a kernel that computes its message may give CTAs other parts of it. No CTA
           waits for another of its own launch.
Memory     a channel, at every rank: an int64 flag for each rank and CTA, an int64 epoch for each CTA (of the exchange last
           sent), and two slots for the messages of all ranks, of which exchange e uses slot e mod 2. A word of a message is
           stored once at every rank that reads it.
Epochs     Exchanges of a channel are counted from 1 by all ranks alike. A CTA of ``send_kernel`` reads its own epoch from
           memory and adds 1, so that a captured graph can be replayed. A flag holds the epoch of the last exchange that its CTA
           has sent, in bits 24 to 63, and the number of words of its message, in bits 0 to 23. Epochs of 31 bits would overflow
           after a day and a half at 15,000 exchanges a second. Every rank gets all flags, also of messages that it does not read.
Ordering   The first reader, which is the nearest rank, is served before the others, since with strong decay it alone matters. All
           threads of a CTA store for it, meet at a barrier, and then one thread sets the flag by an exchange with release
           semantics at system scope. The same follows for all others together, since a release waits for all stores. The
           reader loads the flag with acquire semantics at system scope, and its threads meet at a barrier before they read the
           slot, past L1.
Two slots  suffice if the launches of a rank on a channel follow one another, and a rank reads the messages of an exchange
           before it sends the next one, or does not read them at all. Let rank p store exchange e + 2 into its slot at rank r,
           where e was. By then p has seen r's flags of e + 1, at the beginning of this send_kernel. The CTAs of r set these
           flags in the send_kernel of e + 1, which began after r had read e. One slot would not suffice: r may not have read e
           when p sends e + 1. For the same reason a reader that waits for e may find flags of e + 1, so it waits for an epoch of
           at least e.
Progress   A send_kernel waits for all ranks' send_kernels of the exchange before. A kernel that reads an exchange waits for the
           send_kernels of that exchange. If a flag does not come within ``limit`` ns, or its message has another size, the
           kernel ends by a trap, an error of the CUDA context: a rank that died ends the others.
           Waiting CTAs of one launch may occupy all SMs and leave too few registers for a large CTA, such as those of NCCL. So
           there is a deadlock if a rank sends only after a kernel that also has to run on its readers, while they wait for its
           message. Such kernels are collectives of NCCL on another stream and send_kernels of another channel. The readers must
           wait for that kernel before they launch the one that reads, as in passes.py.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

_EPOCH = tl.constexpr(24)
"""Lowest bit of the epoch in a flag. The bits below it hold the number of words of a message, at most 2^20."""

_COUNT = tl.constexpr((1 << 24) - 1)
"""Mask of the number of words in a flag."""


@triton.jit
def send_kernel(
    message, flags, epochs, addresses, rank, readers, count, capacity, limit,
    SLOTS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Store ``message``, ``count`` 32-bit words, into this rank's slot at its readers, and set this rank's flags at every rank.

    Args:
        message: Pointer to 32-bit words.
        flags: Pointer to the flags of this rank's channel, int64 [RANKS, CTAs].
        epochs: Pointer to the epochs of this rank's CTAs, int64 [CTAs].
        addresses: Addresses of the channel at all ranks as integers, in the order in which they are written.
        rank: This rank.
        readers: Number of ranks, the first ones in that order, that read the message.
        count: Number of words.
        capacity: Number of words that a slot holds for a rank, a multiple of 4.
        limit: Nanoseconds to wait for the flags of the previous exchange; a number of polls without ``TIMED``.
        SLOTS: Distance in bytes of the slots from the beginning of the channel, where the flags are.
        RANKS: Number of ranks.
        BLOCK: Words that a CTA loads at once.
        TIMED: Flag that the kernel is compiled; False in Triton's interpreter, which has no timer.
    """
    cta, ctas = tl.program_id(0), tl.num_programs(0)
    epoch = next_epoch(flags, epochs, limit, RANKS, TIMED)
    for i in tl.static_range(RANKS):
        if i < readers:
            slot = slot_at(addresses[i], rank, epoch, capacity, SLOTS, RANKS)
            for start in range(cta * BLOCK, count, ctas * BLOCK):
                at = start + tl.arange(0, BLOCK)
                words = tl.load(message + at, mask=at < count)
                tl.store(slot + at, words, mask=at < count)
            if i == 0:
                set_flags(addresses, rank, epoch, count, 0, 1, RANKS)
    set_flags(addresses, rank, epoch, count, tl.minimum(readers, 1), RANKS, RANKS)
    tl.store(epochs + cta, epoch)


@triton.jit
def next_epoch(flags, epochs, limit, RANKS: tl.constexpr, TIMED: tl.constexpr):
    """Wait until all ranks have sent in the exchange before, and return the epoch of the one that this CTA begins.

    ``send_kernel`` explains the arguments. The CTA stores the epoch to ``epochs`` when it has set its flags.
    """
    cta, ctas = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs + cta) + 1
    lane = tl.arange(0, triton.next_power_of_2(RANKS))
    wait_for_all(flags + tl.minimum(lane, RANKS - 1) * ctas + cta, epoch - 1, limit, TIMED)
    tl.debug_barrier()  # Each thread has waited for one flag only.
    return epoch


@triton.jit
def slot_at(address, rank, epoch, capacity, SLOTS: tl.constexpr, RANKS: tl.constexpr):
    """Return a pointer to 32-bit words: the slot for the messages of ``rank`` in the channel at an address."""
    slots = tl.multiple_of((address + SLOTS).to(tl.pointer_type(tl.int32)), 16)
    return slots + ((epoch & 1) * RANKS + rank) * capacity


@triton.jit
def set_flags(addresses, rank, epoch, count, first, stop, RANKS: tl.constexpr):
    """Set this CTA's flags at the ranks ``addresses[first:stop]``, when all its threads have stored what they send there."""
    cta, ctas = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, triton.next_power_of_2(RANKS))
    targets = tl.zeros_like(lane).to(tl.int64)
    for i in tl.static_range(RANKS):
        targets = tl.where(lane == i, addresses[i], targets)
    targets = (targets + (rank * ctas + cta).to(tl.int64) * 8).to(tl.pointer_type(tl.int64))
    flag = tl.zeros_like(lane).to(tl.int64) + (epoch << _EPOCH | count)
    tl.debug_barrier()
    tl.atomic_xchg(targets, flag, mask=(lane >= first) & (lane < stop), sem="release", scope="sys")


@triton.jit
def receive_kernel(
    gathered, flags, epochs, slots, count, capacity, limit,
    RANKS: tl.constexpr, CTAS: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Wait until all ranks have sent, and copy their messages to ``gathered`` [RANKS, count] of 32-bit words.

    Args:
        gathered: Pointer to the results.
        flags: Pointer to the flags of this rank's channel, int64 [RANKS, CTAs].
        epochs: Pointer to the epochs of this rank's CTAs, int64 [CTAs], as ``send_kernel`` of the same exchange left them.
        slots: Pointer to the slots of this rank's channel, 32-bit words [2, RANKS, capacity].
        count: Number of words of a message.
        capacity: Number of words that a slot holds for a rank.
        limit: Nanoseconds after which the kernel ends by a trap; a number of polls without ``TIMED``.
        RANKS: Number of ranks.
        CTAS: Number of CTAs that send a message, and that copy it.
        BLOCK: Words that a CTA copies at once.
        TIMED: Flag that the kernel is compiled; False in Triton's interpreter, which has no timer.
    """
    cta, sender = tl.program_id(0), tl.program_id(1).to(tl.int64)
    epoch = tl.load(epochs + cta)
    each = tl.minimum(tl.arange(0, triton.next_power_of_2(CTAS)), CTAS - 1)
    wait_for_message(flags + sender * CTAS + each, epoch, count, limit, TIMED)
    source = slots + ((epoch & 1) * RANKS + sender) * capacity
    target = gathered + sender * count
    for start in range(cta * BLOCK, count, CTAS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        words = tl.load(source + at, mask=at < count, cache_modifier=".cg")
        tl.store(target + at, words, mask=at < count)


@triton.jit
def wait_for_message(flags, epoch, count, limit, TIMED: tl.constexpr):
    """Wait until flags of a message in exchange ``epoch`` are set, after which the blocks that they stand for can be read.

    ``flags`` is a tensor of pointers. A message that has not ``count`` words ends the kernel by a trap.
    """
    seen = wait_for_all(flags, epoch, limit, TIMED)
    wrong = ((seen >> _EPOCH) == epoch) & ((seen & _COUNT) != count)  # The size in a later flag is another message's.
    end_unless(tl.max(wrong.to(tl.int32), 0) == 0, TIMED)
    tl.debug_barrier()


@triton.jit
def wait_for_all(flags, epoch, limit, TIMED: tl.constexpr):
    """Spin until the epochs of all ``flags``, a tensor of pointers, are at least ``epoch``, and return the flags.

    The kernel ends by a trap after ``limit`` ns.
    """
    begun = globaltimer() if TIMED else 0
    seen = acquired(flags, TIMED)
    polls = 0
    while tl.min(seen >> _EPOCH, 0) < epoch:
        polls += 1
        end_unless((globaltimer() - begun if TIMED else polls) <= limit, TIMED)
        seen = acquired(flags, TIMED)
    return seen


@triton.jit
def acquired(pointers, TIMED: tl.constexpr):
    """Load int64 numbers with acquire semantics at system scope, which ``tl.load`` does not offer."""
    if TIMED:
        loaded = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [pointers.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        loaded = tl.load(pointers)
    return loaded


@triton.jit
def end_unless(condition, TIMED: tl.constexpr):
    """End the kernel by a trap unless a condition holds. In Triton's interpreter, an assumption that is wrong raises an error."""
    if TIMED:
        if not condition:
            tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.assume(condition)
