"""Kernels compiled for other chips and taken apart, without a GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from onelaunch.errors import InspectionError, UnknownVariant
from onelaunch.operation import KernelBuild, Operation
from onelaunch.workbench import inspection
from onelaunch.workbench.inspection import ARCHITECTURES, CHECKED, find_architecture, inspect_build, inspect_operation

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def matmul_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)  # [BM]
    columns = tl.program_id(1) * BN + tl.arange(0, BN)  # [BN]
    inner = tl.arange(0, BK)  # [BK]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        left = tl.load(a + rows[:, None] * K + (k + inner)[None, :])  # [BM, BK]
        right = tl.load(b + (k + inner)[:, None] * N + columns[None, :])  # [BK, BN]
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(tl.float16))


@triton.jit
def broken_kernel(a, BM: tl.constexpr):
    tl.store(a + tl.arange(0, BM), tl.arange(0, 2 * BM))


def matmul(tile: tuple[int, int, int] = (64, 64, 64), **facts: Any) -> KernelBuild:
    signature = dict.fromkeys(("a", "b", "c"), "*fp16") | dict.fromkeys(("M", "N", "K"), "i32:16")
    signature |= dict.fromkeys(("BM", "BN", "BK"), "constexpr")
    build = KernelBuild("matmul", matmul_kernel, signature, dict(zip(("BM", "BN", "BK"), tile, strict=True)), matrix=True)
    return replace(build, **facts)


@pytest.mark.parametrize("architecture", CHECKED)
def test_a_matrix_product_shows_the_instructions_that_were_meant(architecture):
    found = inspect_build(matmul(), architecture, variant="three")
    assert found.ok, found.problems
    assert any(name.startswith(ARCHITECTURES[architecture].matrix) for name in found.matrix)
    assert all(count > 0 for count in found.matrix.values())
    assert found.spills == 0
    assert 16 <= found.registers <= 512
    assert found.shared_bytes > 0
    assert found.instructions > 100
    assert (found.variant, found.kernel, found.architecture) == ("three", "matmul", architecture)


@pytest.mark.parametrize(
    ("architecture", "stage", "text"),
    [
        ("sm_80", "ptx", "mma.sync"),
        ("sm_90a", "ptx", "wgmma.mma_async"),
        ("sm_90a", "sass", "HGMMA"),
        ("sm_100a", "ptx", "tcgen05.mma"),
        ("gfx942", "amdgcn", "v_mfma"),
    ],
)
def test_the_assembly_is_at_hand(architecture, stage, text):
    assert text in inspect_build(matmul(), architecture).assembly[stage]


@pytest.mark.parametrize("architecture", ["sm_90a", "gfx942"])
def test_a_tile_too_large_for_the_registers_spills(architecture):
    found = inspect_build(matmul((256, 256, 64)), architecture)
    assert found.spills > 0
    assert found.stack_bytes > 0
    assert not found.ok
    assert "spills registers" in found.problems[0]


def test_a_product_that_missed_the_matrix_unit_meant_is_a_problem():
    """A tile of 16 rows is too small for the warpgroup instruction."""
    found = inspect_build(matmul((16, 64, 64)), "sm_90a")
    assert list(found.matrix) == ["HMMA"]
    assert any("HGMMA" in problem for problem in found.problems)
    assert inspect_build(matmul((16, 64, 64), matrix=False), "sm_90a").ok


def test_more_shared_memory_than_there_is_is_a_problem():
    found = inspect_build(matmul((128, 128, 64), num_stages=8, num_warps=8), "sm_80")
    assert found.shared_bytes > ARCHITECTURES["sm_80"].shared_bytes
    assert any("shared memory" in problem for problem in found.problems)


def test_a_device_calls_hopper_sm_90():
    assert find_architecture("sm_90").name == "sm_90a"


def test_an_unknown_architecture_names_the_known_ones():
    with pytest.raises(InspectionError, match=r"no architecture 'sm_90b'. Did you mean 'sm_90a'\? Known: sm_80"):
        inspect_build(matmul(), "sm_90b")


def test_a_kernel_that_does_not_compile_is_named():
    build = KernelBuild("broken", broken_kernel, {"a": "*fp32", "BM": "constexpr"}, {"BM": 16})
    with pytest.raises(InspectionError, match=r"'broken' does not compile for sm_80: .*'BM': 16"):
        inspect_build(build, "sm_80")


def test_interpreted_kernels_cannot_be_inspected(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(InspectionError, match="TRITON_INTERPRET=1 is set"):
        inspect_build(matmul(), "sm_80")


def test_without_triton_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(InspectionError, match=r"pip install 'onelaunch\[triton\]'"):
        inspect_build(matmul(), "sm_80")


def test_a_failing_disassembler_is_reported(monkeypatch):
    def fail(*_args, **_kwargs):
        raise subprocess.CalledProcessError(1, "cuobjdump")

    only_ours = SimpleNamespace(run=fail, SubprocessError=subprocess.SubprocessError)  # Triton starts ptxas by the same module
    monkeypatch.setattr(inspection, "subprocess", only_ours)
    with pytest.raises(InspectionError, match="'matmul' compiled, but cuobjdump cannot"):
        inspect_build(matmul(), "sm_80")


def test_an_operation_lists_the_kernels_of_its_variants():
    toy = Operation(lambda: None, dimensions=(), outputs=(), bind=lambda: None, options={}, defaults={})  # type: ignore[arg-type]

    @toy.variant("library", launches=1)
    def _(call):
        return call

    @toy.variant("ours", launches=1)
    def ours(call):
        return call

    asked = []

    @ours.kernels
    def _(architecture):
        asked.append(architecture)
        return [matmul()]

    assert [(found.variant, found.kernel) for found in inspect_operation(toy, "sm_90")] == [("ours", "matmul")]
    assert asked == ["sm_90a"]
    assert inspect_operation(toy, "sm_80", ["library"]) == []
    with pytest.raises(UnknownVariant):
        inspect_operation(toy, "sm_80", ["theirs"])
