"""Tests of the repair of machine code that reads a result too early. All other code stays unchanged.

A ``CS2R`` sets two registers, and needs 6 clock cycles on Hopper before they may be read. Each instruction has 16 bytes and a
stall count, the cycles that the next one waits. ``StallHazard(at, cycles)`` is a ``CS2R`` at byte ``at`` of the file that waits
``cycles`` too few. In files that :func:`cubin` makes, code begins at byte 64, behind the header. ``prose.raises`` compares the
message with the test's entry in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and
``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``device`` is the first GPU, or the CPU.
"""

from __future__ import annotations

import struct

import pytest
import torch

from onelaunch import cuda
from onelaunch.cuda import Source, module, sass
from onelaunch.cuda.sass import StallHazard, patched, stall_hazards

# Code that CUDA 13.0's assembler emitted for a decode kernel. It made the kernel's rows of keys wrong.
ZERO = bytes.fromhex("057808000000000000ff010000c40f04")  # CS2R R8, SRZ
UNDER_A_PREDICATE = 0x000FC600078E0254_0000100057089825  # @!P1 IMAD.WIDE R8, R87, 0x1000, R84
COMPARE = 0x000FC80003F25070_000000FF0800720C  # ISETP.NE.U32.AND P1, PT, R8, RZ, PT

# Instructions without a stall count. Register 255 (RZ) reads as zero and stands for no operand.
NOTHING = 0x7918  # NOP
ADD = 0x224 | 0x7 << 12 | 20 << 16 | 255 << 24 | 255 << 32 | 255 << 64  # IMAD R20, RZ, RZ, RZ
STORE = 0x986 | 0x7 << 12 | 40 << 24 | 255 << 64  # STG [R40], R0
LOAD = 0x981 | 0x7 << 12 | 20 << 16 | 40 << 24 | 255 << 64  # LDG R20, [R40]
SPARSE = 1 << 73  # bit of a sparse HMMA, whose second operand is 4 registers wide
BITS_OF_A_STORE = {32: 4, 64: 5, 128: 6}
"""Size code of a store, by the bits that a thread stores."""


def zero(register: int, cycles: int) -> bytes:
    """Return a ``CS2R`` that sets a register and the next one to zero, with a stall count."""
    return waiting(int.from_bytes(ZERO, "little") & ~(0xFF << 16) | register << 16, cycles)


def waiting(instruction: int, cycles: int) -> bytes:
    """Return the bytes of an instruction with a stall count."""
    return (instruction & ~(15 << 105) | cycles << 105).to_bytes(16, "little")


def add(first=255, second=255, third=255) -> int:
    """Return an ``IMAD`` that reads three registers."""
    return ADD & ~(0xFF << 24 | 0xFF << 32 | 0xFF << 64) | first << 24 | second << 32 | third << 64


def hmma(first: int, second: int, third: int) -> int:
    """Return an ``HMMA.16816.F32.BF16 R48``, which reads 4 registers from ``first``, 2 from ``second`` and 4 from ``third``."""
    return 0x0000000000041800_000000000030723C | first << 24 | second << 32 | third << 64


def store(address: int, stored: int, bits: int) -> int:
    """Return an ``STG`` that reads the address and the data of ``bits`` bits from these first registers."""
    return STORE & ~(0xFF << 24) | address << 24 | stored << 32 | BITS_OF_A_STORE[bits] << 73


def cubin(*kernels: bytes, before: str = ".text.") -> bytes:
    """Return a 64-bit ELF file with one section per kernel, whose name begins with ``before``, as a kernel's with ``.text.``."""
    names = b"\0" + b"".join(f"{before}kernel{i}".encode() + b"\0" for i in range(len(kernels))) + b".shstrtab\0"
    starts = [names.index(b"kernel%d" % i) - len(before) for i in range(len(kernels))] + [names.index(b".shstrtab")]
    body, sections = b"", [struct.pack("<2I4Q2I2Q", *[0] * 10)]
    for name, data in zip(starts, [*kernels, names], strict=True):
        sections.append(struct.pack("<2I4Q2I2Q", name, 1, 0, 0, 64 + len(body), len(data), 0, 0, 16, 0))
        body += data
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<2HI3QI6H", 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64,
                                                                  len(sections), len(sections) - 1)  # fmt: skip
    return head + body + b"".join(sections)


def test_the_faulty_code_is_found_and_waits_one_more_cycle():
    code = cubin(ZERO + waiting(UNDER_A_PREDICATE, 3) + waiting(COMPARE, 4))
    assert stall_hazards(code) == [StallHazard(64, 1)]
    better = patched(code)
    assert stall_hazards(better) == []
    assert better[64:80] == waiting(int.from_bytes(ZERO, "little"), 3), "only the cycles differ"
    assert better[80:] == code[80:]
    assert patched(better) == better


@pytest.mark.parametrize(
    ("reader", "found"),
    [
        (add(first=8), True),
        (add(second=9), True),
        (add(third=8), True),
        (add(first=10, second=7, third=6), False),
        (add(second=8) & ~(7 << 9) | 4 << 9, False),  # an immediate number in place of the register
        (store(address=8, stored=20, bits=32), True),
        (store(address=40, stored=7, bits=32), False),
        (store(address=40, stored=9, bits=32), True),
        (store(address=40, stored=6, bits=64), False),
        (store(address=40, stored=8, bits=64), True),
        (0x844 | 0x7 << 12 | 40 << 24 | 6 << 32 | 255 << 64, True),  # STSM [R40], R6 to R9: four registers are assumed
        (0x1F0 | 0x7 << 12 | 0 << 16 | 255 << 24, True),  # HGMMA R0, of sums up to R31 at least
        (0x1F0 | 0x7 << 12 | 24 << 16 | 255 << 24, False),  # HGMMA R24
        (0x9F0 | 0x7 << 12 | 40 << 16 | 8 << 24, False),  # HGMMA R40, gdesc[UR8]: both operands are in shared memory
        (0xDF0 | 0x7 << 12 | 40 << 16 | 8 << 24, True),  # HGMMA R40, R8, gdesc[UR0]
        (hmma(first=5, second=20, third=24), True),
        (hmma(first=12, second=8, third=24), True),
        (hmma(first=12, second=6, third=24), False),  # R6 and R7 alone
        (hmma(first=12, second=6, third=24) | SPARSE, True),  # R6 to R9
        (hmma(first=12, second=20, third=8), True),
        (0x00000018080075B4, False),  # UTMALDG.2D [UR24], [UR8]
        (0x00000006080075B2, False),  # SYNCS.EXCH.64 URZ, [UR8], UR6
        (0x00000008060073B5, False),  # UTMASTG.2D [UR8], [UR6]
        (0x00000004080073BA | 0x8000209 << 64, False),  # UBLKCP.S.G [UR4], [UR8], UR9
        (0x3A9 | 0x7 << 12 | 40 << 24 | 20 << 32 | 9 << 64, True),  # ATOMG.CAS [R40], R20, R9
        (0xFAE | 0x7 << 12 | 8 << 16 | 40 << 24 | 255 << 64, True),  # LDGSTS [R8], [R40]
        (LOAD | 8 << 32, False),
        (LOAD & ~(0xFF << 24) | 8 << 24, True),
    ],
)
def test_instructions_that_read_a_result_are_recognized(reader, found):
    """The reader comes 2 cycles after a ``CS2R`` of registers 8 and 9."""
    assert stall_hazards(cubin(zero(8, 2) + waiting(reader, 1))) == ([StallHazard(64, 4)] if found else [])


def test_code_that_triton_emits_for_tma_is_not_reported():
    """The code is that of Triton 3.7.1 for a Hopper kernel of ``gla``, ``CS2R R4`` and ``UTMALDG [UR16], [UR4]``."""
    code = zero(4, 1) + waiting(0x00000010040005B4, 1) + waiting(NOTHING, 1)
    assert stall_hazards(cubin(code + waiting(add(first=6), 1))) == []
    assert stall_hazards(cubin(code + waiting(add(first=5), 1))) == [StallHazard(64, 3)], "the search goes on behind it"


def test_a_128_bit_store_reads_four_registers():
    assert stall_hazards(cubin(zero(10, 1) + waiting(store(40, 8, 128), 1))) == [StallHazard(64, 5)]
    assert not stall_hazards(cubin(zero(10, 1) + waiting(store(40, 8, 64), 1)))


@pytest.mark.parametrize("cycles", range(1, 9))
def test_stall_cycles_of_instructions_in_between_count(cycles):
    code = cubin(zero(8, cycles) + waiting(NOTHING, 0) + waiting(NOTHING, 2) + waiting(add(first=8), 1))
    missing = sass.CYCLES - (cycles + 1 + 2)
    assert stall_hazards(code) == ([StallHazard(64, missing)] if missing > 0 else [])


@pytest.mark.parametrize("nothing", [0x7918, 0x7802 | 5 << 16 | 1 << 32, 0x7919 | 9 << 16, 0x7947, 0x7B1D])
def test_missing_operands_are_not_read_as_register_0(nothing):
    """The instructions are NOP, MOV R5, 1, S2R R9, BRA and BAR."""
    assert not stall_hazards(cubin(zero(0, 1) + waiting(nothing, 1) * 3))


def test_a_count_of_zero_is_one_cycle():
    code = cubin(zero(8, 0) + waiting(add(first=8), 1))
    assert stall_hazards(code) == [StallHazard(64, 5)]
    assert stall_hazards(patched(code)) == []


def test_every_kernel_of_a_file_is_read_and_nothing_else():
    bad, good = zero(8, 5) + waiting(add(first=8), 1), zero(8, 6) + waiting(add(first=8), 1)
    assert stall_hazards(cubin(good, bad, bad)) == [StallHazard(64 + 32, 1), StallHazard(64 + 64, 1)]
    assert stall_hazards(cubin(bad, before=".data.")) == []


def test_old_names_still_work():
    with pytest.warns(DeprecationWarning, match="hurried is now stall_hazards"):
        assert sass.hurried is stall_hazards


def test_files_other_than_cubins_are_refused(prose):
    for other in (b"", b".version 8.0", b"\x7fELF\x01" + bytes(100)):
        with prose.raises(ValueError):
            stall_hazards(other)


# Behaviour of the hardware

# Kernel that writes two readings of the clock, the first increased by 1. A clock is read by CS2R too.
CLOCK = Source(
    "clock.cu",
    """
    extern "C" __global__ void clock(long long* out) {
        const long long earlier = clock64() + 1;
        out[2 * threadIdx.x] = earlier;
        __syncthreads();
        out[2 * threadIdx.x + 1] = clock64();
    }
    """,
    "clock",
)
compiled = pytest.mark.skipif(cuda.missing() is not None, reason=f"{cuda.missing()}")


def with_cycles(code: bytes, cycles: int) -> bytes:
    """Return the code with each ``CS2R`` waiting for ``cycles`` clock cycles."""
    found = bytearray(code)
    for begin, end in sass._kernels(code):
        for at in range(begin, end, 16):
            if struct.unpack_from("<H", code, at)[0] & 0xFFF == 0x805:
                found[at : at + 16] = waiting(int.from_bytes(code[at : at + 16], "little"), cycles)
    return bytes(found)


@compiled
def test_compiled_code_is_patched(monkeypatch):
    as_compiled = cuda.compile_now(CLOCK, "sm_90a").cubin
    assert stall_hazards(with_cycles(as_compiled, 1)), "the kernel reads a clock and adds at once"
    monkeypatch.setattr(sass, "patched", lambda code: with_cycles(code, 9))
    assert cuda.compile_now(CLOCK, "sm_90a").cubin == with_cycles(as_compiled, 9)
    assert cuda.compile_now(CLOCK, "sm_80").cubin != with_cycles(cuda.compile_now(CLOCK, "sm_80").cubin, 9), "not for others"


@pytest.mark.gpu
@compiled
def test_hopper_has_no_interlock_for_the_clock(device):
    """With 1 to 3 stall cycles, a warp that is alone on its SM reads the register's old value; with 4 it reads the clock.

    On a busy SM, warps have read too early even with 5 cycles.
    """
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the stall cycles are known only for Hopper")
    as_compiled = cuda.compile_now(CLOCK, "sm_90a").cubin
    assert right(as_compiled, device)
    for cycles in (1, 2, 3):
        early = with_cycles(as_compiled, cycles)
        assert not right(early, device), cycles
        assert right(patched(early), device), cycles


def right(code: bytes, device: torch.device) -> bool:
    """Return whether both values of each thread of a warp are of the clock: the second is later, by less than 100,000 cycles."""
    out = torch.zeros(32, 2, dtype=torch.int64, device=device)
    function = cuda.Function(
        code, CLOCK.entry, torch.cuda.current_device(), ("pointer",), module._Shape(32, 0, 1, cooperative=False, overlap=False)
    )
    function((1, 1, 1), out)
    earlier, later = out.cpu().unbind(1)
    return bool(((later > earlier) & (later - earlier < 100_000)).all())
