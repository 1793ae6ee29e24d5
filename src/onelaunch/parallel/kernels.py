"""All-gather by stores to the memory of peers: a kernel that sends a rank's message to all ranks, and one that receives all.

Computes   gathered[r] = message of rank r, the same bits. A message is a number of 32-bit words.
Launched   by peer_stores.py, where all GPUs of a group can write each other's memory.
Grid       ``send_kernel`` one dimension of CTAs; ``receive_kernel`` the same CTAs by the ranks that have sent. CTA i of a
           sender stores blocks i, i + CTAs, ... of its message, and CTA (i, r) of a receiver copies the same blocks of rank r.
           So it waits for one flag, and no CTA waits for another of its own launch.
Memory     a channel, at every rank: an int64 flag for each rank and CTA, two int64 epochs for each CTA (of the exchange last
           sent and of the one last received), and two slots for the messages of all ranks, of which exchange e uses slot e mod
           2. A word of a message is stored once at every rank.
Epochs     Exchanges of a channel are counted from 1 by all ranks alike. A CTA of ``send_kernel`` reads its own epoch from
           memory and adds 1, so that a captured graph can be replayed. A flag holds the epoch of the last exchange that its CTA
           has sent, in bits 32 to 63, and the number of words of its message, in bits 0 to 31.
Ordering   All threads of a CTA store, meet at a barrier, and then one thread for each peer sets the flag by an exchange with
           release semantics at system scope. The receiver reads the flag with acquire semantics at system scope, and its
           threads meet at a barrier before they read the slot, past L1.
Two slots  suffice if the launches of a rank on a channel follow one another, and a rank receives an exchange before it sends
           the next one, or never. Let p store exchange e + 2 into its slot at r, where e was. By then p has seen r's flags of e
           + 1: in the receive_kernel of e + 1, or else at the beginning of the send_kernel of e + 2. The CTAs of r set these
           flags in the send_kernel of e + 1. It began after the receive_kernel of e at r had ended, that is, after r had read
           the slot. One slot would not do: p may send e + 1 as soon as it has received e, for which r need only have sent e. So
           a receiver that waits for e may find flags of e + 1; it waits for at least e.
Progress   A send_kernel waits for nothing if the exchange before was received. A receive_kernel waits only for the send_kernels
           of its exchange. If a flag does not come within ``limit`` ns, or its message has another size, the kernel ends by a
           trap, an error of the CUDA context: a rank that died ends the others.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def send_kernel(
    message, flags, epochs, addresses, rank, count, capacity, limit,
    SLOTS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Store ``message``, ``count`` 32-bit words, into this rank's slot at every rank, then set this rank's flags there.

    Args:
        message: Pointer to 32-bit words.
        flags: Pointer to the flags of this rank's channel, int64 [RANKS, CTAs].
        epochs: Pointer to the epochs of this rank's CTAs, int64 [2, CTAs]: of the exchange last sent, and of that last received.
        addresses: Addresses of the channel at all ranks as integers, in the order in which they are written.
        rank: This rank.
        count: Number of words.
        capacity: Number of words that a slot holds for a rank, a multiple of 4.
        limit: Nanoseconds to wait for a flag of the exchange before, if it was not received; a number of polls without ``TIMED``.
        SLOTS: Distance in bytes of the slots from the beginning of the channel, where the flags are.
        RANKS: Number of ranks.
        BLOCK: Words that a CTA loads at once.
        TIMED: Flag that the kernel is compiled; False in Triton's interpreter, which has no timer.
    """
    cta, ctas = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs + cta) + 1
    if tl.load(epochs + ctas + cta) < epoch - 1:  # as of a captured exchange whose result nothing asked for
        for i in range(RANKS):
            wait_for(flags + i * ctas + cta, epoch - 1, limit, TIMED)
    place = ((epoch & 1) * RANKS + rank) * capacity
    for start in range(cta * BLOCK, count, ctas * BLOCK):
        at = start + tl.arange(0, BLOCK)
        words = tl.load(message + at, mask=at < count)
        for i in tl.static_range(RANKS):
            slots = (addresses[i] + SLOTS).to(tl.pointer_type(tl.int32))
            tl.store(tl.multiple_of(slots, 16) + place + at, words, mask=at < count)
    lane = tl.arange(0, triton.next_power_of_2(RANKS))
    targets = tl.zeros_like(lane).to(tl.int64)
    for i in tl.static_range(RANKS):
        targets = tl.where(lane == i, addresses[i], targets)
    targets += (rank * ctas + cta).to(tl.int64) * 8
    tl.debug_barrier()
    tl.atomic_xchg(
        targets.to(tl.pointer_type(tl.int64)),
        tl.zeros_like(targets) + (epoch << 32 | count),
        mask=lane < RANKS,
        sem="release",
        scope="sys",
    )
    tl.store(epochs + cta, epoch)


@triton.jit
def receive_kernel(
    gathered, flags, epochs, slots, count, capacity, limit,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Wait until all ranks have sent, and copy their messages to ``gathered`` [RANKS, count] of 32-bit words.

    Args:
        gathered: Pointer to the results.
        flags: Pointer to the flags of this rank's channel, int64 [RANKS, CTAs].
        epochs: Pointer to the epochs of this rank's CTAs, int64 [2, CTAs], as ``send_kernel`` of the same exchange left them.
        slots: Pointer to the slots of this rank's channel, 32-bit words [2, RANKS, capacity].
        count: Number of words of a message.
        capacity: Number of words that a slot holds for a rank.
        limit: Nanoseconds after which the kernel ends by a trap; a number of polls without ``TIMED``.
        RANKS: Number of ranks.
        BLOCK: Words that a CTA copies at once.
        TIMED: Flag that the kernel is compiled; False in Triton's interpreter, which has no timer.
    """
    cta, ctas, sender = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    epoch = tl.load(epochs + cta)
    seen = wait_for(flags + sender * ctas + cta, epoch, limit, TIMED)
    end_unless(((seen >> 32) != epoch) | ((seen & 0x7FFFFFFF) == count), TIMED)  # a message of another size is not this one
    source = slots + ((epoch & 1) * RANKS + sender) * capacity
    target = gathered + sender * count
    if sender == 0:  # all other CTAs have ended too before the next launch reads it
        tl.store(epochs + ctas + cta, epoch)
    for start in range(cta * BLOCK, count, ctas * BLOCK):
        at = start + tl.arange(0, BLOCK)
        words = tl.load(source + at, mask=at < count, cache_modifier=".cg")
        tl.store(target + at, words, mask=at < count)


@triton.jit
def wait_for(flag, epoch, limit, TIMED: tl.constexpr):
    """Spin on a flag until its epoch is at least ``epoch``, and return it; end the kernel by a trap after ``limit`` ns.

    The loads are atomic additions of 0, whose order Triton lets us choose.
    """
    begun = globaltimer() if TIMED else 0
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    polls = 0
    while (seen >> 32) < epoch:
        polls += 1
        end_unless((globaltimer() - begun if TIMED else polls) <= limit, TIMED)
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    return seen


@triton.jit
def end_unless(condition, TIMED: tl.constexpr):
    """End the kernel by a trap unless a condition holds. In Triton's interpreter, an assumption that is wrong raises an error."""
    if TIMED:
        if not condition:
            tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.assume(condition)
