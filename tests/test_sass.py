"""Machine code whose results are read too early is found and waits longer; all other code stays as it is."""

from __future__ import annotations

import struct

import pytest
import torch

from onelaunch import cuda
from onelaunch.cuda import Source, module, sass
from onelaunch.cuda.sass import Hurried, hurried, mended

# As the assembler of CUDA 13.0 wrote it for a decode kernel, whose rows of keys were wrong.
ZERO = bytes.fromhex("057808000000000000ff010000c40f04")  # CS2R R8, SRZ
UNDER_A_PREDICATE = 0x000FC600078E0254_0000100057089825  # @!P1 IMAD.WIDE R8, R87, 0x1000, R84
COMPARE = 0x000FC80003F25070_000000FF0800720C  # ISETP.NE.U32.AND P1, PT, R8, RZ, PT

NOTHING = 0x7918  # NOP
ADD = 0x224 | 0x7 << 12 | 20 << 16 | 255 << 24 | 255 << 32 | 255 << 64  # IMAD R20, RZ, RZ, RZ
STORE = 0x986 | 0x7 << 12 | 40 << 24 | 255 << 64  # STG [R40], R0
LOAD = 0x981 | 0x7 << 12 | 20 << 16 | 40 << 24 | 255 << 64  # LDG R20, [R40]
BITS_OF_A_STORE = {32: 4, 64: 5, 128: 6}


def zero(register: int, cycles: int) -> bytes:
    return waiting(int.from_bytes(ZERO, "little") & ~(0xFF << 16) | register << 16, cycles)


def waiting(instruction: int, cycles: int) -> bytes:
    return (instruction & ~(15 << 105) | cycles << 105).to_bytes(16, "little")


def add(first=255, second=255, third=255) -> int:
    return ADD & ~(0xFF << 24 | 0xFF << 32 | 0xFF << 64) | first << 24 | second << 32 | third << 64


def store(address: int, stored: int, bits: int) -> int:
    return STORE & ~(0xFF << 24) | address << 24 | stored << 32 | BITS_OF_A_STORE[bits] << 73


def cubin(*kernels: bytes, before: str = ".text.") -> bytes:
    """An ELF file of 64 bits with a section for each, named like a kernel's."""
    names = b"\0" + b"".join(f"{before}kernel{i}".encode() + b"\0" for i in range(len(kernels))) + b".shstrtab\0"
    starts = [names.index(b"kernel%d" % i) - len(before) for i in range(len(kernels))] + [names.index(b".shstrtab")]
    body, sections = b"", [struct.pack("<2I4Q2I2Q", *[0] * 10)]
    for name, data in zip(starts, [*kernels, names], strict=True):
        sections.append(struct.pack("<2I4Q2I2Q", name, 1, 0, 0, 64 + len(body), len(data), 0, 0, 16, 0))
        body += data
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<2HI3QI6H", 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64,
                                                                  len(sections), len(sections) - 1)  # fmt: skip
    return head + body + b"".join(sections)


def test_the_code_that_was_wrong_is_found_and_waits_a_cycle_more():
    code = cubin(ZERO + waiting(UNDER_A_PREDICATE, 3) + waiting(COMPARE, 4))
    assert hurried(code) == [Hurried(64, 1)]
    better = mended(code)
    assert hurried(better) == []
    assert better[64:80] == waiting(int.from_bytes(ZERO, "little"), 3), "only the cycles differ"
    assert better[80:] == code[80:]
    assert mended(better) == better


@pytest.mark.parametrize(
    ("reader", "found"),
    [
        (add(first=8), True),
        (add(second=9), True),
        (add(third=8), True),
        (add(first=10, second=7, third=6), False),
        (add(second=8) & ~(7 << 9) | 4 << 9, False),  # a number is there
        (store(address=8, stored=20, bits=32), True),
        (store(address=40, stored=7, bits=32), False),
        (store(address=40, stored=9, bits=32), True),
        (store(address=40, stored=6, bits=64), False),
        (store(address=40, stored=8, bits=64), True),
        (0x844 | 0x7 << 12 | 40 << 24 | 6 << 32 | 255 << 64, True),  # STSM [R40], R6 and the next
        (0x1F0 | 0x7 << 12 | 0 << 16 | 255 << 24, True),  # HGMMA R0, of sums up to R31 at least
        (0x1F0 | 0x7 << 12 | 24 << 16 | 255 << 24, False),  # HGMMA R24
        (0x3A9 | 0x7 << 12 | 40 << 24 | 20 << 32 | 9 << 64, True),  # ATOMG.CAS [R40], R20, R9
        (0xFAE | 0x7 << 12 | 8 << 16 | 40 << 24 | 255 << 64, True),  # LDGSTS [R8], [R40]
        (LOAD | 8 << 32, False),
        (LOAD & ~(0xFF << 24) | 8 << 24, True),
    ],
)
def test_who_reads_a_result(reader, found):
    assert hurried(cubin(zero(8, 2) + waiting(reader, 1))) == ([Hurried(64, 4)] if found else [])


def test_four_registers_are_stored_by_the_name_of_the_first():
    assert hurried(cubin(zero(10, 1) + waiting(store(40, 8, 128), 1))) == [Hurried(64, 5)]
    assert not hurried(cubin(zero(10, 1) + waiting(store(40, 8, 64), 1)))


@pytest.mark.parametrize("cycles", range(1, 9))
def test_cycles_of_all_that_comes_between_count(cycles):
    code = cubin(zero(8, cycles) + waiting(NOTHING, 0) + waiting(NOTHING, 2) + waiting(add(first=8), 1))
    missing = sass.CYCLES - (cycles + 1 + 2)
    assert hurried(code) == ([Hurried(64, missing)] if missing > 0 else [])


@pytest.mark.parametrize("nothing", [0x7918, 0x7802 | 5 << 16 | 1 << 32, 0x7919 | 9 << 16, 0x7947, 0x7B1D])
def test_operands_that_are_not_there_are_no_register_0(nothing):
    """NOP, MOV R5, 1, S2R R9, BRA, BAR."""
    assert not hurried(cubin(zero(0, 1) + waiting(nothing, 1) * 3))


def test_a_count_of_zero_is_one_cycle():
    code = cubin(zero(8, 0) + waiting(add(first=8), 1))
    assert hurried(code) == [Hurried(64, 5)]
    assert hurried(mended(code)) == []


def test_every_kernel_of_a_file_is_read_and_nothing_else():
    bad, good = zero(8, 5) + waiting(add(first=8), 1), zero(8, 6) + waiting(add(first=8), 1)
    assert hurried(cubin(good, bad, bad)) == [Hurried(64 + 32, 1), Hurried(64 + 64, 1)]
    assert hurried(cubin(bad, before=".data.")) == []


def test_what_is_no_cubin_is_refused(prose):
    for other in (b"", b".version 8.0", b"\x7fELF\x01" + bytes(100)):
        with prose.raises(ValueError):
            hurried(other)


# What the hardware does.

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
    """The same, where each ``CS2R`` waits for so many."""
    found = bytearray(code)
    for begin, end in sass._kernels(code):
        for at in range(begin, end, 16):
            if struct.unpack_from("<H", code, at)[0] & 0xFFF == 0x805:
                found[at : at + 16] = waiting(int.from_bytes(code[at : at + 16], "little"), cycles)
    return bytes(found)


@compiled
def test_code_that_is_compiled_is_mended(monkeypatch):
    as_compiled = cuda.compile_now(CLOCK, "sm_90a").cubin
    assert hurried(with_cycles(as_compiled, 1)), "the kernel reads a clock and adds at once"
    monkeypatch.setattr(sass, "mended", lambda code: with_cycles(code, 9))
    assert cuda.compile_now(CLOCK, "sm_90a").cubin == with_cycles(as_compiled, 9)
    assert cuda.compile_now(CLOCK, "sm_80").cubin != with_cycles(cuda.compile_now(CLOCK, "sm_80").cubin, 9), "not where unknown"


@pytest.mark.gpu
@compiled
def test_hopper_does_not_wait_by_itself(device):
    """Given 1 to 3 cycles, a warp that is alone reads what was there before. It reads the clock after 4; others, in a busy
    multiprocessor, have read too early after 5.
    """
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("The cycles are known for Hopper.")
    as_compiled = cuda.compile_now(CLOCK, "sm_90a").cubin
    assert right(as_compiled, device)
    for cycles in (1, 2, 3):
        early = with_cycles(as_compiled, cycles)
        assert not right(early, device), cycles
        assert right(mended(early), device), cycles


def right(code: bytes, device: torch.device) -> bool:
    """Whether each thread of a warp read its clock before it read it again, and not long before."""
    out = torch.zeros(32, 2, dtype=torch.int64, device=device)
    function = cuda.Function(
        code, CLOCK.entry, torch.cuda.current_device(), ("pointer",), module._Shape(32, 0, 1, cooperative=False, overlap=False)
    )
    function((1, 1, 1), out)
    earlier, later = out.cpu().unbind(1)
    return bool(((later > earlier) & (later - earlier < 100_000)).all())
