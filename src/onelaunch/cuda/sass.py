"""Find and patch a stall-count hazard that NVIDIA's assembler leaves in Hopper machine code (SASS).

Each fixed-latency instruction encodes its stall count: how many cycles the next instruction waits. The hardware has no other
interlock for such results. ``CS2R`` copies a special register, such as the zero ``SRZ`` or a clock, to a register or a pair. It
needs 6 cycles on Hopper before its result may be read. The assembler of CUDA 13.0 leaves only 5 when a predicated instruction
that may write the same register comes between::

    CS2R R8, SRZ                            stall count 2
    @!P1 IMAD.WIDE R8, R87, 0x1000, R84     stall count 3
    ISETP.NE.U32.AND P1, PT, R8, RZ, PT     where P1 is true, this may read the old value of R8

Any edit of a kernel's source can add or remove such a place. Whether the old value is read also depends on what else the SM
executes at that moment. docs/notebook/decode.md says how the fault was found and what was measured.

``compiler.py`` patches the CUDA C++ kernels that it compiles with :func:`patched`. The inspector (``workbench/inspection.py``)
reports the hazards of Triton kernels, which nothing patches.

Encoding: Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018, chapter 2 (unchanged since).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from onelaunch.moved import renamed

__getattr__ = renamed(__name__, {"Hurried": "StallHazard", "hurried": "stall_hazards", "mended": "patched"})

ARCHITECTURES = ("sm_90", "sm_90a")
"""Architectures for which the latency :data:`CYCLES` is known."""

RULES = 3
"""Version of the patching rules. It is part of the key of cached cubins, so that a change of the rules compiles them again."""

CYCLES = 6
"""Cycles from a ``CS2R`` to the first instruction that may read its result."""

_BYTES = 16
"""Size of an instruction in bytes."""
_CS2R = 0x805
"""Opcode of ``CS2R`` in the lowest 12 bits. Bits 16 to 23 hold the destination register, or the first of two."""
_LOADS, _STORES, _CONTROL = range(0x180, 0x185), range(0x185, 0x1B0), range(0x140, 0x160)
"""Opcodes of groups of instructions, in the lowest 9 bits, like all opcodes below."""
_UNIFORM = frozenset((*range(0x080, 0x0C0), 0x1B2, *range(0x1B4, 0x1BD)))
"""Opcodes of instructions that name uniform registers only, which are not the general registers of the same numbers.

0x1B2 is ``SYNCS.EXCH``, which initializes mbarriers. The last range is TMA, from ``UTMALDG`` to ``UBLKPF``.
"""
_HMMA, _MATRICES, _WARPGROUP = 0x03C, (0x037, 0x03C, 0x03D, 0x03F), range(0x1F0, 0x1F4)
"""Opcodes of ``HMMA``, of all warp-level matrix instructions, and of WGMMA, which reads its accumulators from its destination
registers."""
_SPARSE = 1 << 73 - 64
"""Bit of a sparse ``HMMA`` in the upper 64 bits of an instruction."""
_COMPARISONS = (0x00B, 0x00C, 0x01C, 0x02A, 0x034)
"""Opcodes of comparisons. They have at most two operands; the bits of a third operand hold flags."""
_SECOND_ALONE = (0x002, 0x108)
"""Opcodes of ``MOV`` and ``MUFU``, whose only operand is encoded as the second."""
_WITHOUT = (0x118, 0x119, 0x11D, 0x1C3)
"""Opcodes of ``NOP``, ``S2R``, ``BAR`` and ``S2UR``, which read no register."""
_SWAPS, _SHUFFLE, _STORE_MATRIX, _COPY = (0x18D, 0x1A9), 0x189, 0x044, 0x1AE
"""Opcodes of atomics with two values (compare-and-swap), of ``SHFL``, of ``STSM`` and of ``LDGSTS``."""
_STALL = 105 - 64
"""Lowest bit of the 4-bit stall count in the upper 64 bits of an instruction."""
_NONE = 255
"""Number of ``RZ``, the zero register. A result written to it is discarded, so it cannot be read too early."""


class StallHazard(NamedTuple):
    """A ``CS2R`` whose result may be read too early."""

    at: int
    """Offset of the ``CS2R`` in the file, in bytes."""
    cycles: int
    """Stall cycles missing before the first read."""


def stall_hazards(cubin: bytes) -> list[StallHazard]:
    """Return the hazards of all kernels in a cubin for one of :data:`ARCHITECTURES`, in the order of their offsets in a kernel.

    Instructions are read in the order of their addresses. Jumps are not followed: a taken jump lasts longer than the hazard.

    Raises:
        ValueError: The bytes are not a cubin.
    """
    return [found for begin, end in _kernels(cubin) for at in range(begin, end, _BYTES) if (found := _missing(cubin, at, end))]


def patched(cubin: bytes) -> bytes:
    """Return the cubin with each hazard patched: the stall count of its ``CS2R`` is raised by the missing cycles."""
    code = bytearray(cubin)
    for at, cycles in stall_hazards(cubin):
        (upper,) = struct.unpack_from("<Q", code, at + 8)
        others = upper & ~(15 << _STALL)
        struct.pack_into("<Q", code, at + 8, others | _stall(cubin, at) + cycles << _STALL)
    return bytes(code)


def _missing(code: bytes, at: int, end: int) -> StallHazard | None:
    """Return the hazard of the instruction at an offset, or ``None`` if it is no ``CS2R`` or is read late enough."""
    if struct.unpack_from("<H", code, at)[0] & 0xFFF != _CS2R or code[at + 2] == _NONE:
        return None
    first, waited = code[at + 2], _stall(code, at)
    for later in range(at + _BYTES, end, _BYTES):
        if waited >= CYCLES:
            return None
        if any(register < first + 2 and first < register + count for register, count in _read(code[later : later + _BYTES])):
            return StallHazard(at, CYCLES - waited)
        waited += _stall(code, later)
    return None


def _read(instruction: bytes) -> Iterator[tuple[int, int]]:
    """Yield the first register of each source operand, and how many registers the operand reads.

    The count is 1 for an operand of a register pair too: such a pair begins at an even register, as the pair of ``CS2R`` does.
    Where the true count is not known, a larger one is given: an unneeded patch costs only a few cycles. The accumulators of WGMMA
    are the exception: of more than 32 registers, only the first 32 are given.
    """
    low, high = struct.unpack("<2Q", instruction)
    operation, form = low & 0x1FF, low >> 9 & 7
    first, second, third = instruction[3], instruction[4], instruction[8]
    if operation in _WARPGROUP:
        yield instruction[2], 32  # accumulators of 64 columns in float32; the first ones of a wider tile
        if form != 4:  # otherwise both operands are in shared memory, and uniform registers hold their descriptors
            yield first, 4
    elif operation in _LOADS:
        yield first, 1
    elif operation in _STORES or operation == _STORE_MATRIX:
        yield first, 1
        # The size code of a store is 4 for 32 bits, 5 for 64 bits and 6 for 128 bits: 1, 2 and 4 registers of data.
        yield second, 4 if operation == _STORE_MATRIX else max(1, 1 << (high >> 9 & 7) >> 4)
        # The third operand is a register in a compare-and-swap, and in forms 1 and 4 of SHFL.
        if operation in _SWAPS or (operation == _SHUFFLE and form in (1, 4)):
            yield third, 2
        if operation == _COPY:
            yield instruction[2], 1
    elif not (operation in _UNIFORM or operation in _CONTROL or operation in _WITHOUT or low & 0xFFF == _CS2R):
        count = 4 if operation in _MATRICES else 1
        if form < 2:  # otherwise the operand is an immediate, a constant or a uniform register
            yield second, 2 if operation == _HMMA and not high & _SPARSE else count
        if operation not in _SECOND_ALONE:
            yield first, count
            if operation not in _COMPARISONS:
                yield third, count


def _stall(code: bytes, at: int) -> int:
    """Return the stall count of an instruction in cycles, at least 1."""
    return max(1, struct.unpack_from("<Q", code, at + 8)[0] >> _STALL & 15)


def _kernels(cubin: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each kernel's instructions: the sections of the ELF file whose names begin with ``.text.``."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("This is not a cubin: it is not a 64-bit ELF file.")
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<2I4Q", cubin, table + size * i) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, begin, length in headers:
        if cubin[strings + name :].startswith(b".text."):
            yield begin, begin + length
