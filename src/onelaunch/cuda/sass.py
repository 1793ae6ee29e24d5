"""A fault of NVIDIA's assembler in machine code for Hopper (SASS): found, and mended.

An instruction of constant latency says itself how many cycles the next one waits; nothing else keeps that one from reading too
early. A ``CS2R``, with which registers are set to zero by pairs, takes 6 cycles on Hopper before its result may be read. The
assembler of CUDA 13.0 gives it 5 where an instruction under a predicate, which may write the same register, comes between::

    CS2R R8, SRZ                            2 cycles
    @!P1 IMAD.WIDE R8, R87, 0x1000, R84     3 cycles
    ISETP.NE.U32.AND P1, PT, R8, RZ, PT     where P1 holds: what R8 was before

Which code has that changes with every line of a kernel; whether it reads the old value, with what else the multiprocessor does
then. How it was found, and what was measured: the notebook of the decode kernels.

Encoding: Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018, chapter 2 (unchanged since).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

ARCHITECTURES = ("sm_90", "sm_90a")
"""For which the cycles are known."""

RULES = 2
"""Version of what is patched: with another one, code that was kept before is compiled again."""

CYCLES = 6
"""Cycles from a ``CS2R`` to the first instruction that may read its result."""

_BYTES = 16
"""Bytes of an instruction."""
_CS2R = 0x805
"""Opcode of ``CS2R``, in the lowest 12 bits. From bit 16 on is the register, or the first of two, that is written."""
_LOADS, _STORES, _UNIFORM, _CONTROL = range(0x180, 0x185), range(0x185, 0x1B0), range(0x080, 0x0C0), range(0x140, 0x160)
"""Opcodes of groups of instructions, in the lowest 9 bits, as all below. The third group works on uniform registers alone."""
_MATRICES, _WARPGROUP = (0x037, 0x03C, 0x03D, 0x03F), range(0x1F0, 0x1F4)
"""Opcodes of products of a warp, and of WGMMA, whose sums are read where they are written."""
_COMPARISONS = (0x00B, 0x00C, 0x01C, 0x02A, 0x034)
"""Opcodes of comparisons: two operands at most, and flags where others have a third."""
_SECOND_ALONE = (0x002, 0x108)
"""Opcodes of ``MOV`` and ``MUFU``, which have a second operand alone."""
_WITHOUT = (0x118, 0x119, 0x11D, 0x1C3)
"""Opcodes of ``NOP``, ``S2R``, ``BAR`` and ``S2UR``, which have no operand in a register."""
_SWAPS, _SHUFFLE, _STORE_MATRIX, _COPY = (0x18D, 0x1A9), 0x189, 0x044, 0x1AE
"""Opcodes of atomics with two values, ``SHFL``, ``STSM`` and ``LDGSTS``."""
_STALL = 105 - 64
"""Position of the stall count in the upper half: its first bit of four."""
_NONE = 255
"""``RZ``, which is no register: as a result, it is read by nobody."""


class Hurried(NamedTuple):
    """A ``CS2R`` whose result may be read too early."""

    at: int
    """Offset of the instruction in the file."""
    cycles: int
    """Stall cycles missing before the first read."""


def hurried(cubin: bytes) -> list[Hurried]:
    """Return the hazards of all kernels in a cubin for one of :data:`ARCHITECTURES`, in their order.

    Jumps are not followed: they take longer.

    Raises:
        ValueError: it is not a cubin.
    """
    return [found for begin, end in _kernels(cubin) for at in range(begin, end, _BYTES) if (found := _missing(cubin, at, end))]


def mended(cubin: bytes) -> bytes:
    """Return the code with each hazard patched: the instruction waits for as many cycles more."""
    code = bytearray(cubin)
    for at, cycles in hurried(cubin):
        (upper,) = struct.unpack_from("<Q", code, at + 8)
        kept = upper & ~(15 << _STALL)
        struct.pack_into("<Q", code, at + 8, kept | _stall(cubin, at) + cycles << _STALL)
    return bytes(code)


def _missing(code: bytes, at: int, end: int) -> Hurried | None:
    if struct.unpack_from("<H", code, at)[0] & 0xFFF != _CS2R or code[at + 2] == _NONE:
        return None
    first, waited = code[at + 2], _stall(code, at)
    for later in range(at + _BYTES, end, _BYTES):
        if waited >= CYCLES:
            return None
        if any(name < first + 2 and first < name + count for name, count in _read(code[later : later + _BYTES])):
            return Hurried(at, CYCLES - waited)
        waited += _stall(code, later)
    return None


def _read(instruction: bytes) -> Iterator[tuple[int, int]]:
    """Yield the first register of each source operand, and how many are read by its name.

    It is 1 for a pair too, as that of ``CS2R`` is, and more where the number is not known: waiting too long costs a few cycles.
    """
    low, high = struct.unpack("<2Q", instruction)
    operation, form = low & 0x1FF, low >> 9 & 7
    first, second, third = instruction[3], instruction[4], instruction[8]
    if operation in _WARPGROUP:
        yield instruction[2], 32  # sums of 64 columns; those of more begin there too
        yield first, 4
    elif operation in _LOADS:
        yield first, 1
    elif operation in _STORES or operation == _STORE_MATRIX:
        yield first, 1
        yield second, 4 if operation == _STORE_MATRIX else max(1, 1 << (high >> 9 & 7) >> 4)  # 4 for 32 bits, 5 for 64, 6 for 128
        if operation in _SWAPS or (operation == _SHUFFLE and form in (1, 4)):
            yield third, 2
        if operation == _COPY:
            yield instruction[2], 1
    elif not (operation in _UNIFORM or operation in _CONTROL or operation in _WITHOUT or low & 0xFFF == _CS2R):
        count = 4 if operation in _MATRICES else 1
        if form < 2:  # else a number, a constant or a uniform register is there
            yield second, count
        if operation not in _SECOND_ALONE:
            yield first, count
            if operation not in _COMPARISONS:
                yield third, count


def _stall(code: bytes, at: int) -> int:
    """Return the stall cycles of an instruction, at least one."""
    return max(1, struct.unpack_from("<Q", code, at + 8)[0] >> _STALL & 15)


def _kernels(cubin: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each kernel's instructions: sections of an ELF file that are named ``.text`` and the kernel."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a cubin: no ELF file of 64 bits")
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<2I4Q", cubin, table + size * i) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, begin, length in headers:
        if cubin[strings + name :].startswith(b".text."):
            yield begin, begin + length
