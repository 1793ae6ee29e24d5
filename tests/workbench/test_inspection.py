"""Tests of kernels that are compiled for other GPUs and disassembled, without a GPU.

The kernels here are only compiled. ``KernelBuild`` (Triton) and ``CudaBuild`` (CUDA C++) describe one kernel with its launch;
with ``matrix=True`` its products have to become the architecture's matrix instructions, such as WGMMA (HGMMA in SASS) on
sm_90a. ``prose`` compares a message with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test
fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

A test marked ``thorough`` does not run in ``make test``. ``thorough_but`` marks all parameters but the named ones ``thorough``.
"""

from __future__ import annotations

import functools
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
from tests.thorough import thorough_but

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
    # does not compile: 2 * BM values for BM addresses
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
    """Return the build of a matrix product with a tile (BM, BN, BK). ``i32:16`` is an integer that 16 divides."""
    signature = dict.fromkeys(("a", "b", "c"), "*fp16") | dict.fromkeys(("M", "N", "K"), "i32:16")
    signature |= dict.fromkeys(("BM", "BN", "BK"), "constexpr")
    build = KernelBuild("matmul", matmul_kernel, signature, dict(zip(("BM", "BN", "BK"), tile, strict=True)), matrix=True)
    return replace(build, **facts)


@functools.cache
def inspected(architecture: str) -> Any:
    """Return the inspection of the default matrix product, which several tests share."""
    return inspect_build(matmul(), architecture, variant="three")


@pytest.mark.parametrize("architecture", thorough_but("sm_80", "sm_90a", of=CHECKED))
def test_a_matrix_product_has_the_intended_instructions(architecture):
    found = inspected(architecture)
    assert found.ok, found.problems
    assert any(name.startswith(ARCHITECTURES[architecture].matrix) for name in found.matrix)
    assert all(count > 0 for count in found.matrix.values())
    assert found.spills == 0
    assert 16 <= found.registers <= 512  # an AMD thread has at most 512, an NVIDIA one 255
    assert found.shared_bytes > 0
    assert found.instructions > 100
    assert (found.variant, found.kernel, found.architecture) == ("three", "matmul", architecture)


@pytest.mark.parametrize(
    ("architecture", "stage", "text"),
    [
        ("sm_80", "ptx", "mma.sync"),
        ("sm_90a", "ptx", "wgmma.mma_async"),
        ("sm_90a", "sass", "HGMMA"),
        pytest.param("sm_100a", "ptx", "tcgen05.mma", marks=pytest.mark.thorough),
        pytest.param("gfx942", "amdgcn", "v_mfma", marks=pytest.mark.thorough),
    ],
)
def test_the_assembly_is_available(architecture, stage, text):
    assert text in inspected(architecture).assembly[stage]


@pytest.mark.parametrize(("architecture", "columns"), [("sm_90a", 128), pytest.param("gfx942", 256, marks=pytest.mark.thorough)])
def test_a_tile_too_large_for_the_registers_spills(architecture, columns):
    found = inspect_build(matmul((256, columns, 64)), architecture)
    assert found.spills > 0
    assert found.stack_bytes > 0
    assert not found.ok
    assert "spills registers" in found.problems[0]


def test_a_product_without_the_intended_instruction_is_a_problem():
    """A tile of 16 rows is too small for WGMMA, so that it becomes ``mma.sync`` (HMMA in SASS)."""
    found = inspect_build(matmul((16, 64, 64)), "sm_90a")
    assert list(found.matrix) == ["HMMA"]
    assert any("HGMMA" in problem for problem in found.problems)
    assert inspect_build(matmul((16, 64, 64), matrix=False), "sm_90a").ok


def test_too_much_shared_memory_is_a_problem():
    found = inspect_build(matmul((128, 128, 64), num_stages=8, num_warps=8), "sm_80")
    assert found.shared_bytes > ARCHITECTURES["sm_80"].shared_bytes
    assert any("shared memory" in problem for problem in found.problems)


def test_sm_90_is_understood_as_hopper():
    assert find_architecture("sm_90").name == "sm_90a"


def test_an_unknown_architecture_names_the_known_ones(prose):
    with prose.raises(InspectionError, match="'sm_90b'"):
        inspect_build(matmul(), "sm_90b")


def test_a_kernel_that_does_not_compile_is_named(prose):
    build = KernelBuild("broken", broken_kernel, {"a": "*fp32", "BM": "constexpr"}, {"BM": 16})
    with prose.raises(InspectionError, match="'broken'", mask={r"CompilationError: [^.]*": "<reason>"}):
        inspect_build(build, "sm_80")


def test_a_kernel_with_a_tuple_of_optional_tensors():
    signature = {"parts": ("*fp16", "constexpr", "*fp32"), "strides": ("i32:16", "i32", "i32"), "out": "*fp32", "BM": "constexpr"}
    found = inspect_build(KernelBuild("sum", sum_kernel, signature, {"BM": 128}), "sm_90a")
    assert found.ok, found.problems
    ptx = found.assembly["ptx"]
    assert ptx.count("ld.global.b16") == ptx.count("ld.global.b32") == 1


def test_interpreted_kernels_cannot_be_inspected(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(InspectionError, match="TRITON_INTERPRET=1 is set"):
        inspect_build(matmul(), "sm_80")


def test_without_triton_the_message_says_what_to_install(monkeypatch, prose):
    monkeypatch.setitem(sys.modules, "triton", None)
    with prose.raises(InspectionError, match=r"'onelaunch\[triton\]'"):
        inspect_build(matmul(), "sm_80")


def test_a_failing_disassembler_is_reported(monkeypatch, prose):
    def fail(*_args, **_kwargs):
        raise subprocess.CalledProcessError(1, "cuobjdump")

    # Only the inspection's own use of ``subprocess`` is replaced, because Triton starts ptxas through the same module.
    only_ours = SimpleNamespace(run=fail, SubprocessError=subprocess.SubprocessError)
    monkeypatch.setattr(inspection, "subprocess", only_ours)
    with prose.raises(InspectionError, match="'matmul'"):
        inspect_build(matmul(), "sm_80")


def test_an_operation_lists_the_kernels_of_its_variants():
    """The variant ``library`` has no kernels of its own, and sm_90 stands for sm_90a."""
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

# Marker of tests that need NVRTC.
compiled = pytest.mark.skipif(cuda.missing() is not None, reason=f"{cuda.missing()}")

# 64 values per thread stay in registers, unless the launch bounds allow a thread fewer.
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
# A product by ``mma.sync``, which each warp issues alone.
MMA = """
extern "C" __global__ void product(float* y, int a) {
    float d[4] = {};
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a));
    for (int i = 0; i < 4; i++) y[threadIdx.x * 4 + i] = d[i];
}
"""
# WGMMA products whose accumulators are read in the loop, so that ptxas waits after each product.
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
    """Return the build of ``ROTATE`` for 256 threads, with at least ``blocks`` blocks on an SM."""
    source = Source("rotate.cu", ROTATE, "rotate", defines=(("THREADS", 256), ("BLOCKS", blocks)))
    return replace(CudaBuild("rotate, 64 values", source, threads=256, shared_bytes=4096), **facts)


def product(text: str = MMA, **facts: Any) -> CudaBuild:
    """Return the build of ``MMA`` or ``SERIAL``. With ``by_warps=True``, ``mma.sync`` is the intended instruction."""
    return CudaBuild("product", Source("product.cu", text, "product"), threads=128, **facts)


@compiled
@pytest.mark.parametrize("architecture", thorough_but("sm_90a", of=["sm_80", "sm_90a", "sm_100a"]))
def test_a_cuda_kernel_is_disassembled(architecture):
    found = inspect_build(rotate(), architecture, variant="ours")
    assert found.ok, found.problems
    assert (found.variant, found.kernel, found.architecture) == ("ours", "rotate, 64 values", architecture)
    assert 64 <= found.registers <= 255
    assert (found.spills, found.stack_bytes, dict(found.matrix)) == (0, 0, {})
    assert found.shared_bytes == 4096 + 256 * 4  # dynamic, and the static array of 256 floats
    assert found.instructions > 100
    assert ".entry rotate(" in found.assembly["ptx"]
    assert "FFMA" in found.assembly["sass"]


@compiled
def test_a_cuda_kernel_without_enough_registers_spills():
    found = inspect_build(rotate(blocks=8), "sm_90a")
    assert found.registers == 32  # 65536 of an SM over 8 blocks of 256 threads
    assert found.spills > 0
    assert found.stack_bytes > 0
    assert "spills registers" in found.problems[0]


@compiled
def test_the_launch_of_a_cuda_kernel_must_fit(prose):
    many = inspect_build(rotate(threads=1024), "sm_90a")
    assert [str(many.registers) in problem and "65536" in problem for problem in many.problems] == [True]
    prose(many.problems, mask={rf"\b{many.registers}\b": "<registers>"})
    large = inspect_build(rotate(shared_bytes=227 * 1024), "sm_90a")  # all that a block may have, and the static array
    assert len(large.problems) == 1
    prose(large.problems)


@compiled
def test_a_cuda_kernel_has_the_intended_matrix_instructions(prose):
    prose(inspect_build(rotate(matrix=True), "sm_90a").problems)
    assert "became HMMA" in inspect_build(product(matrix=True), "sm_90a").problems[0]
    assert inspect_build(product(matrix=True, by_warps=True), "sm_90a").ok
    assert inspect_build(product(matrix=True, by_warps=True), "sm_100a").ok


@compiled
def test_serialized_wgmma_products_are_a_problem():
    found = inspect_build(product(SERIAL, matrix=True), "sm_90a")
    assert list(found.matrix) == ["HGMMA"]
    assert [problem for problem in found.problems if "wgmma.mma_async instructions are serialized" in problem] == list(
        found.problems
    )


@compiled
def test_a_cuda_kernel_that_does_not_compile_is_named(prose):
    with prose.raises(InspectionError, match="'product'", mask={r"(?s)\n.*": "\n<log>"}):
        inspect_build(product(SERIAL), "sm_80")


def test_a_cuda_kernel_has_no_code_for_amd(prose):
    with prose.raises(InspectionError, match="'product'"):
        inspect_build(product(), "gfx942")


def test_without_nvrtc_the_message_says_what_to_install(monkeypatch, prose):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    cuda.version.cache_clear()  # it may have found NVRTC in an earlier test
    with prose.raises(InspectionError, match="'product'"):
        inspect_build(product(), "sm_90a")


@compiled
def test_without_triton_a_cuda_kernel_cannot_be_disassembled(monkeypatch, prose):
    monkeypatch.setitem(sys.modules, "triton", None)
    with prose.raises(InspectionError, match="'product'"):
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
