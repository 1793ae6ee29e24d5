"""Kernels compiled for other chips and taken apart, without a GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from onelaunch import cuda
from onelaunch.cuda import Source
from onelaunch.device.architectures import ARCHITECTURES, CHECKED, find_architecture
from onelaunch.errors import InspectionError, UnknownVariant
from onelaunch.launch.build import CudaBuild, KernelBuild
from onelaunch.operation import Operation
from onelaunch.workbench import inspection
from onelaunch.workbench.inspection import inspect_build, inspect_operation

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


@triton.jit
def sum_kernel(parts, strides, out, BM: tl.constexpr):
    at = tl.arange(0, BM)
    total = tl.zeros((BM,), dtype=tl.float32)
    for index in tl.static_range(len(parts)):
        if parts[index] is not None:
            total += tl.load(parts[index] + at * strides[index]).to(tl.float32)
    tl.store(out + at, total)


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
    with pytest.raises(InspectionError, match=r"no architecture 'sm_90b'. Did you mean 'sm_90a'\? Known: .*sm_80"):
        inspect_build(matmul(), "sm_90b")


def test_a_kernel_that_does_not_compile_is_named():
    build = KernelBuild("broken", broken_kernel, {"a": "*fp32", "BM": "constexpr"}, {"BM": 16})
    with pytest.raises(InspectionError, match=r"'broken' does not compile for sm_80: .*'BM': 16"):
        inspect_build(build, "sm_80")


def test_a_kernel_of_a_tuple_of_tensors_some_of_which_there_are():
    signature = {"parts": ("*fp16", "constexpr", "*fp32"), "strides": ("i32:16", "i32", "i32"), "out": "*fp32", "BM": "constexpr"}
    found = inspect_build(KernelBuild("sum", sum_kernel, signature, {"BM": 128}), "sm_90a")
    assert found.ok, found.problems
    ptx = found.assembly["ptx"]
    assert ptx.count("ld.global.b16") == ptx.count("ld.global.b32") == 1


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
    with pytest.raises(InspectionError, match="'matmul' was compiled, but cuobjdump cannot"):
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


# CUDA C++

compiled = pytest.mark.skipif(cuda.missing() is not None, reason=f"{cuda.missing()}")

ROTATE = """
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rotate(float* x, int rounds) {
    __shared__ float shift[256];
    shift[threadIdx.x % 256] = x[threadIdx.x];
    __syncthreads();
    float value[64];
    #pragma unroll
    for (int i = 0; i < 64; i++) value[i] = x[threadIdx.x * 64 + i];
    for (int round = 0; round < rounds; round++) {
        #pragma unroll
        for (int i = 0; i < 64; i++) value[i] = value[i] * value[(i + 17) % 64] + shift[round % 256];
    }
    #pragma unroll
    for (int i = 0; i < 64; i++) x[threadIdx.x * 64 + i] = value[i];
}
extern "C" __global__ void other(float* x) { *x = 0; }
"""
MMA = """
extern "C" __global__ void product(float* y, int a) {
    float d[4] = {};
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a));
    for (int i = 0; i < 4; i++) y[threadIdx.x * 4 + i] = d[i];
}
"""
SERIAL = """
extern "C" __global__ void product(float* y, unsigned long long a, int rounds) {
    float d[4] = {};
    asm volatile("wgmma.fence.sync.aligned;");
    for (int round = 0; round < rounds; round++) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a));
        y[round] = d[0] += 1;  // read while the next product may run
    }
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
    for (int i = 0; i < 4; i++) y[threadIdx.x * 4 + i] = d[i];
}
"""


def rotate(*, blocks: int = 1, **facts: Any) -> CudaBuild:
    source = Source("rotate.cu", ROTATE, "rotate", defines=(("THREADS", 256), ("BLOCKS", blocks)))
    return replace(CudaBuild("rotate, 64 values", source, threads=256, shared_bytes=4096), **facts)


def product(text: str = MMA, **facts: Any) -> CudaBuild:
    return CudaBuild("product", Source("product.cu", text, "product"), threads=128, **facts)


@compiled
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
def test_a_cuda_kernel_is_taken_apart(architecture):
    found = inspect_build(rotate(), architecture, variant="ours")
    assert found.ok, found.problems
    assert (found.variant, found.kernel, found.architecture) == ("ours", "rotate, 64 values", architecture)
    assert 64 <= found.registers <= 255
    assert (found.spills, found.stack_bytes, dict(found.matrix)) == (0, 0, {})
    assert found.shared_bytes == 4096 + 256 * 4
    assert found.instructions > 100
    assert ".entry rotate(" in found.assembly["ptx"]
    assert "FFMA" in found.assembly["sass"]


@compiled
def test_a_cuda_kernel_without_enough_registers_spills():
    found = inspect_build(rotate(blocks=8), "sm_90a")
    assert found.registers == 32
    assert found.spills > 0
    assert found.stack_bytes > 0
    assert "spills registers" in found.problems[0]


@compiled
def test_the_launch_of_a_cuda_kernel_must_fit():
    many = inspect_build(rotate(threads=1024), "sm_90a")
    assert many.problems == (f"needs {many.registers} registers for each of 1024 threads; a block has 65536",)
    large = inspect_build(rotate(shared_bytes=227 * 1024), "sm_90a")
    assert large.problems == (f"needs {228 * 1024} bytes of shared memory; sm_90a has {227 * 1024}",)


@compiled
def test_matrix_instructions_of_a_cuda_kernel_are_those_that_were_meant():
    assert "has no HGMMA, IGMMA, QGMMA; its matrix products became none" in inspect_build(rotate(matrix=True), "sm_90a").problems
    assert "became HMMA" in inspect_build(product(matrix=True), "sm_90a").problems[0]
    assert inspect_build(product(matrix=True, by_warps=True), "sm_90a").ok
    assert inspect_build(product(matrix=True, by_warps=True), "sm_100a").ok


@compiled
def test_products_that_wait_for_one_another_are_a_problem():
    found = inspect_build(product(SERIAL, matrix=True), "sm_90a")
    assert list(found.matrix) == ["HGMMA"]
    assert [problem for problem in found.problems if "wgmma.mma_async instructions are serialized" in problem] == list(
        found.problems
    )


@compiled
def test_a_cuda_kernel_that_does_not_compile_is_named():
    with pytest.raises(InspectionError, match=r"(?s)'product': product.cu does not compile for sm_80:.*wgmma"):
        inspect_build(product(SERIAL), "sm_80")


def test_a_cuda_kernel_has_no_code_for_amd():
    with pytest.raises(InspectionError, match="'product' is CUDA C\\+\\+ and cannot be compiled for gfx942"):
        inspect_build(product(), "gfx942")


def test_without_nvrtc_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    cuda.version.cache_clear()
    with pytest.raises(InspectionError, match=r"'product': .*pip install 'onelaunch\[cuda\]'"):
        inspect_build(product(), "sm_90a")


@compiled
def test_without_triton_a_cuda_kernel_cannot_be_taken_apart(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(InspectionError, match=r"'product' was compiled, .*pip install 'onelaunch\[triton\]'"):
        inspect_build(product(), "sm_90a")


@compiled
def test_a_variant_may_list_kernels_of_both_kinds():
    toy = Operation(lambda: None, dimensions=(), outputs=(), bind=lambda: None, options={}, defaults={})  # type: ignore[arg-type]

    @toy.variant("ours", launches=2)
    def ours(call):
        return call

    @ours.kernels
    def _(architecture):
        return [matmul(), product()]

    assert [found.kernel for found in inspect_operation(toy, "sm_90a")] == ["matmul", "product"]
