"""Tests of ``tools/hash_kernels.py``, which proves machine code unchanged: names do not count, all executed code does.

``prose`` and ``prose.raises`` compare wording with the test's entries in ``tests/snapshots/prose.txt``. A test fails if it does
not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tools import hash_kernels

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

# CUDA kernels: one to be formatted with its name and a factor, and one that needs 256 bytes of local memory.
SCALE = 'extern "C" __global__ void {name}(float* x) {{ x[threadIdx.x] *= {factor}; }}'
STACK = """extern "C" __global__ void deep(int* x, int n) {
    int a[64];
    for (int i = 0; i < n; ++i) a[i % 64] += x[i];
    x[0] = a[n];
}"""


# Triton kernels that differ only in names.


def scale(x, factor: tl.constexpr):
    at = tl.arange(0, 128)
    tl.store(x + at, tl.load(x + at) * factor)


def triple(y, factor: tl.constexpr):
    places = tl.arange(0, 128)
    tl.store(y + places, tl.load(y + places) * factor)


def machine_of_triton(function: Any, factor: float, architecture: str) -> hash_kernels.Machine:
    """Compile a Triton kernel for a factor, and return the properties of its machine code."""
    from onelaunch.launch.build import KernelBuild

    kernel = triton.jit(function)
    pointer = kernel.arg_names[0]
    build = KernelBuild(function.__name__, kernel, {pointer: "*fp32", "factor": "constexpr"}, {"factor": factor})
    return hash_kernels.read_machine(hash_kernels.compile_build(build, architecture))


def machine_of_cuda(text: str, entry: str, threads: int = 32) -> hash_kernels.Machine:
    """Compile the kernel ``entry`` of a CUDA source for Hopper, and return the properties of its machine code."""
    from onelaunch import cuda
    from onelaunch.launch.build import CudaBuild

    if reason := cuda.missing():
        pytest.skip(reason)
    build = CudaBuild(entry, cuda.Source(f"{entry}.cu", text, entry), threads)
    return hash_kernels.read_machine(hash_kernels.compile_build(build, "sm_90a"))


@pytest.mark.parametrize("architecture", ["sm_90a", "gfx942"])
def test_a_triton_digest_ignores_names_and_covers_every_constant(architecture):
    first = machine_of_triton(scale, 2.0, architecture)
    assert first.instruction_bytes > 0
    assert min(first.registers) > 0
    assert machine_of_triton(triple, 2.0, architecture).digest == first.digest
    assert machine_of_triton(scale, 3.0, architecture).digest != first.digest


def test_a_cuda_digest_ignores_names_and_covers_instructions_and_threads():
    first = machine_of_cuda(SCALE.format(name="scale", factor="2.5f"), "scale")
    renamed = "constexpr int UNUSED = 7;\n" + SCALE.format(name="a_much_longer_name", factor="2.5f")
    assert machine_of_cuda(renamed, "a_much_longer_name").digest == first.digest
    assert machine_of_cuda(SCALE.format(name="scale", factor="3.5f"), "scale").digest != first.digest
    assert machine_of_cuda(SCALE.format(name="scale", factor="2.5f"), "scale", threads=64).digest != first.digest


def test_local_memory_is_read():
    machine = machine_of_cuda(STACK, "deep")
    assert max(machine.stack_bytes) >= 256
    assert machine.constants, "the constant bank of the arguments"


def test_files_without_machine_code_are_refused(prose):
    with prose.raises(ValueError, match="ELF"):
        hash_kernels.sections(b"MZ" * 100)


@pytest.mark.parametrize("number", [0, 127, 128, 255, 256, 65535, 65536])
def test_integers_in_amds_metadata_are_decoded(number):
    """The metadata is MessagePack: a number below 128 is one byte, larger ones follow a byte that says their length.

    The name ``.vgpr_other`` before it must not be taken for ``.vgpr_count``.
    """
    packed = bytes([number]) if number < 128 else None
    for kind, size in ((0xCC, 1), (0xCD, 2), (0xCE, 4)):
        if packed is None and number < 1 << 8 * size:
            packed = bytes([kind]) + number.to_bytes(size, "big")
    assert packed is not None
    assert hash_kernels._noted(b"\x82\xab.vgpr_other\x01\xab.vgpr_count" + packed + b"\xa1.", ".vgpr_count") == number


# Comparison


# Made-up properties: digest of the instructions, bytes of them, registers, stack, static and dynamic shared memory (bytes),
# threads, and a bank of constants as name, bytes and digest.
MACHINE = hash_kernels.Machine(("a1",), 1024, (32,), (0, 0), 0, 4096, 128, (("0", 8, "b2"),))


def entry(variant: str, build: str, **changes: Any) -> dict[str, Any]:
    """Return an entry of a file of digests: the kernel ``build`` of a variant, with some properties of ``MACHINE`` changed."""
    machine = dataclasses.replace(MACHINE, **changes)
    stored = {"digest": machine.digest, "operation": "toy", "variant": variant, "build": build, **dataclasses.asdict(machine)}
    return json.loads(json.dumps(stored))


OLD = [entry("one", "scan"), entry("two", "scan"), entry("two", "gate", instructions=("c3",))]


def compared(new: list[dict[str, Any]]) -> tuple[str, bool]:
    """Compare ``OLD`` with other entries for one architecture; return the report, and whether the kernels are the same."""
    lines, same = hash_kernels.compare({"sm_90a": OLD}, {"sm_90a": new})
    return "\n".join(lines), same


def test_names_and_order_of_builds_do_not_matter(prose):
    text, same = compared([{**each, "build": f"new {each['build']}"} for each in reversed(OLD)])
    assert same
    prose(text)


def test_a_changed_kernel_is_shown_with_both_digests_and_the_change(prose):
    text, same = compared([*OLD[:2], entry("two", "gate", instructions=("c3",), registers=(40,))])
    assert not same
    prose(text)
    assert "registers [40] here, [32] there" in text


def test_a_kernel_that_moves_to_another_variant_is_a_difference(prose):
    text, same = compared([OLD[0], OLD[1], {**OLD[2], "variant": "one"}])
    assert not same
    prose(text)


def test_kernels_of_equal_ptx_are_equal_whatever_ptxas_made_of_it(prose):
    """Kernels are matched by their digests first. Only where those differ are kernels of equal PTX and launch equal too.

    The key ``ptx`` is the digest of the PTX, and is empty where there is none, as for AMD.
    """
    old, new = [entry("one", "scan")], [entry("one", "scan", instructions=("c3",))]
    lines, same = hash_kernels.compare({"sm_100a": [{**old[0], "ptx": "p"}]}, {"sm_100a": [{**new[0], "ptx": "p"}]})
    assert same
    prose(lines)
    for one, other in (("p", "q"), ("", ""), ("p", "")):
        assert not hash_kernels.compare({"sm_100a": [{**old[0], "ptx": one}]}, {"sm_100a": [{**new[0], "ptx": other}]})[1]
    more = {**entry("one", "scan", shared_bytes=8192), "ptx": "p"}
    assert not hash_kernels.compare({"sm_100a": [{**old[0], "ptx": "p"}]}, {"sm_100a": [more]})[1], "a launch with more memory"


def test_a_digest_of_ptx_ignores_names_and_lines_alone():
    ptx = """// made by a compiler
.visible .entry {name}(.param .u64 {name}_param_0)
{{
  .loc 1 {line} 5
  ld.param.u64 %rd1, [{name}_param_0]; // a comment
  add.s64 %rd2, %rd1, {number};
}}
.section .debug_str
{{
  .b8 {line}
}}
"""
    digest = hash_kernels.ptx_digest(ptx.format(name="walk", line=3, number=8))
    assert digest == hash_kernels.ptx_digest(ptx.format(name="chunk_state", line=70, number=8))
    assert digest != hash_kernels.ptx_digest(ptx.format(name="walk", line=3, number=16))
    assert hash_kernels.ptx_digest("") == ""


def test_a_missing_architecture_is_a_difference(prose):
    lines, same = hash_kernels.compare({"sm_90a": OLD}, {})
    assert not same
    prose(lines)


def test_the_command_compares_two_files(tmp_path, capsys):
    stored = {"versions": {"triton": "1"}, "architectures": {"sm_90a": OLD}}
    for name, versions in (("old", "1"), ("new", "2")):
        (tmp_path / name).write_text(json.dumps({**stored, "versions": {"triton": versions}}))
    assert hash_kernels.main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert "different versions" in capsys.readouterr().out
