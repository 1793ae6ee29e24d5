"""CUDA C++: compiled without a GPU, kept on disk, launched on one; what cannot be compiled or addressed says why."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from onelaunch import nvrtc
from onelaunch.errors import CompileError, CompilerMissing, DriverError
from onelaunch.nvrtc import Source, compile_now, compile_source, load, make_context_current, tensor_map

compiled = pytest.mark.skipif(nvrtc.missing() is not None, reason=f"{nvrtc.missing()}")

SCALE = Source(
    "scale.cu",
    """
    #include "twice.cuh"
    extern "C" __global__ void scale(const float* x, float* y, long long count, int offset, float factor, const float* shift) {
        const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
        if (i < count) y[i] = twice(x[i]) * factor * TIMES + offset + (shift ? *shift : 0.0f);
    }
    """,
    "scale",
    headers=(("twice.cuh", "__device__ float twice(float value) { return 2 * value; }"),),
    defines=(("TIMES", 3),),
)
SCALE_KINDS: tuple[nvrtc.Kind, ...] = ("pointer", "pointer", "i64", "i32", "f32", "pointer")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and nothing remembered by this process."""
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))
    compile_source.cache_clear()
    yield tmp_path
    compile_source.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    """The architectures that the compiler was called for."""
    asked = []

    def compile_and_count(source, architecture):
        asked.append(architecture)
        return compile_now(source, architecture)

    monkeypatch.setattr(nvrtc, "compile_now", compile_and_count)
    return asked


def as_another_process(architecture="sm_90a"):
    compile_source.cache_clear()
    return compile_source(SCALE, architecture)


# Compiling


@compiled
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_a_kernel_compiles_without_a_gpu(architecture):
    found = compile_now(SCALE, architecture)
    assert found.cubin.startswith(b"\x7fELF")
    assert f".target {architecture}" in found.ptx
    assert ".entry scale(" in found.ptx
    assert found.log == ""


@compiled
def test_the_second_process_reads_what_the_first_compiled(cache, compilations):
    first = as_another_process()
    assert as_another_process() == first
    assert compile_source(SCALE, "sm_90a") is compile_source(SCALE, "sm_90a")
    assert compilations == ["sm_90a"]


@compiled
def test_whatever_decides_the_code_decides_its_place(cache, compilations, monkeypatch):
    as_another_process()
    as_another_process("sm_100a")
    others = [
        replace(SCALE, text=SCALE.text + "\n"),
        replace(SCALE, defines=(("TIMES", 4),)),
        replace(SCALE, headers=(("twice.cuh", "__device__ float twice(float value) { return value + value; }"),)),
    ]
    for other in others:
        compile_source(other, "sm_90a")
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 9))
    as_another_process()
    assert len(compilations) == 6
    assert len(list((cache / "cubins").iterdir())) == 6


@compiled
@pytest.mark.parametrize("harm", [lambda data: b"", lambda data: data[:-40], lambda data: b"\x7fELF" + b"\0" * len(data)])
def test_a_file_that_is_not_whole_is_compiled_again(harm, cache, compilations):
    whole = as_another_process()
    (path,) = (cache / "cubins").iterdir()
    kept = path.read_bytes()
    path.write_bytes(harm(kept))
    assert as_another_process() == whole
    assert compilations == ["sm_90a"] * 2
    assert path.read_bytes() == kept


@compiled
def test_a_folder_that_cannot_be_written_is_done_without(cache, compilations, monkeypatch):
    (cache / "file").write_text("where the folder would be")
    monkeypatch.setenv("ONELAUNCH_CACHE", str(cache / "file"))
    assert as_another_process() == as_another_process()
    assert compilations == ["sm_90a"] * 2


@compiled
def test_a_source_that_does_not_compile_shows_file_line_and_log(cache):
    broken = replace(SCALE, name="broken.cu", text='extern "C" __global__ void scale() {\n  int x = unknown;\n}')
    with pytest.raises(
        CompileError, match=r'(?s)broken.cu does not compile for sm_90a:\nbroken.cu\(2\): error: .*"unknown"'
    ) as raised:
        compile_source(broken, "sm_90a")
    assert "1 error detected" in raised.value.log
    assert not list(cache.iterdir())


@compiled
def test_an_architecture_that_nvrtc_does_not_know_is_named():
    with pytest.raises(CompileError, match=r"scale.cu does not compile for sm_1a:\n.*gpu-architecture"):
        compile_now(SCALE, "sm_1a")


def test_the_compiler_is_found_where_its_bindings_are():
    """Else all tests of CUDA C++ would be skipped, here and among the kernels, and nobody would notice."""
    pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")
    assert nvrtc.missing() is None


@pytest.fixture
def forgotten():
    """What was found out about the packages is found out again, during the test and after it."""
    for answer in (nvrtc.version, nvrtc.missing):
        answer.cache_clear()
    yield
    for answer in (nvrtc.version, nvrtc.missing):
        answer.cache_clear()


@pytest.mark.parametrize("name", ["cuda", "cuda.bindings", "cuda.bindings.nvrtc"])
def test_without_the_packages_the_message_says_what_to_install(name, forgotten, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CompilerMissing, match=r"cuda-bindings is not installed. Do: pip install 'onelaunch\[cuda\]'"):
        compile_now(SCALE, "sm_90a")
    assert nvrtc.missing() == "needs cuda-bindings and NVRTC: pip install 'onelaunch[cuda]'"


def test_bindings_without_their_library_are_reported(forgotten, monkeypatch):
    def absent():
        raise RuntimeError("libnvrtc.so: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", SimpleNamespace(nvrtcVersion=absent))
    with pytest.raises(CompilerMissing, match="cuda-bindings finds no NVRTC"):
        nvrtc.version()
    assert nvrtc.missing() is not None


def test_a_packaged_file_is_read():
    assert nvrtc.read("onelaunch.workbench.report", "page.css").strip()


# Tensor maps

MAP = {"dtype": torch.bfloat16, "address": 4096, "sizes": (256, 100), "strides": (512,), "box": (64, 100)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"dtype": torch.float64},
            "dtype is torch.float64; it must be one of uint8, float8_e4m3fn, int32, float16, float32, bfloat16",
        ),
        ({"sizes": (256,)}, "it has 1 sizes, 1 strides and 2 sides of a box"),
        ({"strides": (512, 512)}, "it has 2 sizes, 2 strides and 2 sides of a box"),
        ({"address": 4100}, "its address 0x1004 must be a multiple of 16"),
        ({"strides": (520,)}, r"strides are \(520,\) bytes; each must be a positive multiple of 16 below 2\^40"),
        ({"strides": (-512,)}, r"strides are \(-512,\) bytes"),
        ({"sizes": (256, 0)}, r"sizes are \(256, 0\); each must be 1 to 2\^32"),
        ({"box": (64, 257)}, r"the box is \(64, 257\); each side must be 1 to 256"),
        ({"swizzle": 16}, "the swizzle is 16; it must be one of 0, 32, 64, 128"),
        ({"box": (128, 100)}, "the box is 256 bytes wide; it must be a multiple of 16, at most the swizzle's 128"),
        ({"box": (4, 100), "swizzle": 0}, r"the box is 8 bytes wide; it must be a multiple of 16\."),
    ],
)
def test_what_the_copy_engine_cannot_address_says_why(wrong, message):
    with pytest.raises(ValueError, match=message):
        tensor_map(**MAP | wrong)


def test_arguments_lie_where_the_kernel_expects_them():
    layout, offsets = nvrtc._layout(("i32", "pointer", "f32", "map", "i32", "i64"))
    assert offsets == [0, 8, 16, 128, 256, 264]
    assert layout.size == 272
    packed = layout.pack(-1, 1 << 63, 1.0, b"\xab" * 128, 7, -2)
    assert packed[8:16] == (1 << 63).to_bytes(8, "little")
    assert packed[128:256] == b"\xab" * 128
    assert packed[264:] == (-2).to_bytes(8, "little", signed=True)


# On a GPU

BOX = Source(
    "box.cu",
    """
    struct alignas(64) TensorMap { char bytes[128]; };
    // One box of [ROWS, COLUMNS] floats by the copy engine, written out as it lies in shared memory.
    extern "C" __global__ void box(const __grid_constant__ TensorMap map, float* y, int column, int row) {
        extern __shared__ __align__(128) float tile[];
        __shared__ alignas(8) unsigned long long full;
        const unsigned int barrier = (unsigned int)__cvta_generic_to_shared(&full);
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier));
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(ROWS * COLUMNS * 4)
                : "memory");
            const unsigned int to = (unsigned int)__cvta_generic_to_shared(tile);
            asm volatile(
                "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
        }
        __syncthreads();
        unsigned int done = 0;
        while (!done)
            asm volatile(
                "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                : "=r"(done) : "r"(barrier) : "memory");
        for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) y[i] = tile[i];
    }
    """,
    "box",
    defines=(("ROWS", 4), ("COLUMNS", 8)),
)

BOX_OF_FOUR = replace(BOX, text=BOX.text.replace("tensor.2d", "tensor.4d").replace("{%2, %3}", "{%2, %3, %2, %2}"))
"""Of a tensor of four dimensions, the last two coordinates as the first."""

CLUSTER = Source(
    "cluster.cu",
    """
    extern "C" __global__ void cluster(int* y) {
        unsigned int size;
        asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
        if (threadIdx.x == 0) y[blockIdx.x] = size;
    }
    """,
    "cluster",
)
GRID = Source("grid.cu", 'extern "C" __global__ void grid(int* y) { if (threadIdx.x == 0) y[blockIdx.x] = 7; }', "grid")

SHIFT = Source(
    "shift.cu",
    """
    extern "C" __global__ void shift(const int* x, int* y, int count) {
      asm volatile("griddepcontrol.launch_dependents;");
      asm volatile("griddepcontrol.wait;" ::: "memory");
      if (threadIdx.x == 0) {
        __nanosleep(blockIdx.x % 7 * 100);
        y[blockIdx.x] = __ldcg(x + (blockIdx.x + 1) % count);
      }
    }
    """,
    "shift",
)


@compiled
@pytest.mark.parametrize(
    "source", [BOX, BOX_OF_FOUR, CLUSTER, GRID, SHIFT], ids=["box", "box of four", "cluster", "grid", "shift"]
)
def test_the_kernels_of_the_tests_on_a_gpu_compile(source):
    assert compile_now(source, "sm_90a").log == ""


@pytest.fixture
def launched(device):
    """``scale`` with its arguments: x, y, a tensor of one shift, and the function."""
    x = torch.randn(1000, device=device)
    return x, torch.full_like(x, torch.nan), torch.ones(1, device=device), load(SCALE, device, SCALE_KINDS, threads=128)


def scaled(x, *, offset=0, factor=1.0, shift=0.0):
    return 2 * x * factor * 3 + offset + shift


@compiled
@pytest.mark.gpu
def test_pointers_and_numbers_arrive(launched):
    x, y, shift, scale = launched
    scale((8, 1, 1), x, y, x.numel(), -5, 0.5, shift)
    torch.testing.assert_close(y, scaled(x, offset=-5, factor=0.5, shift=1.0))
    y.fill_(torch.nan)
    scale((8, 1, 1), x, y, x.numel() - 1, 2, 1.0, None)
    torch.testing.assert_close(y[:-1], scaled(x, offset=2)[:-1])
    assert y[-1].isnan()


@compiled
@pytest.mark.gpu
def test_a_source_is_loaded_once_for_a_device(device, launched):
    assert load(SCALE, device, SCALE_KINDS, threads=128) is launched[-1]
    assert load(SCALE, device, SCALE_KINDS, threads=256) is not launched[-1]


@compiled
@pytest.mark.gpu
def test_a_launch_runs_on_the_current_stream(launched):
    x, y, _, scale = launched
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(torch.ones_like(x))  # a launch on another stream would read what was there before
        scale((8, 1, 1), x, y, x.numel(), 0, 1.0, None)
    stream.synchronize()
    torch.testing.assert_close(y, torch.full_like(y, 6.0))


@compiled
@pytest.mark.gpu
def test_a_launch_is_captured_in_a_graph(launched):
    x, y, shift, scale = launched
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale((8, 1, 1), x, y, x.numel(), 1, 1.0, shift)
    x.fill_(2.0)
    shift.fill_(10.0)
    graph.replay()
    torch.testing.assert_close(y, torch.full_like(y, 23.0))


@compiled
@pytest.mark.gpu
def test_threads_share_a_function(launched):
    x, _, _, scale = launched
    results = [torch.full_like(x, torch.nan) for _ in range(8)]
    torch.cuda.synchronize()

    def run(at):
        for _ in range(200):
            scale((8, 1, 1), x, results[at], x.numel(), at, 1.0, None)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for at, result in enumerate(results):
        torch.testing.assert_close(result, scaled(x, offset=at))


@compiled
@pytest.mark.gpu
def test_wrong_arguments_name_those_that_the_kernel_takes(launched):
    x, y, _, scale = launched
    for arguments in [(x, y), (x, y, 1.5, 0, 1.0, None), (7, y, 1, 0, 1.0, None)]:
        with pytest.raises(TypeError, match="scale takes pointer, pointer, i64, i32, f32, pointer"):
            scale((1, 1, 1), *arguments)
    with pytest.raises(DriverError, match=r"cuLaunchKernelEx returned CUDA_ERROR_INVALID_VALUE for scale, grid \(0, 1, 1\)"):
        scale((0, 1, 1), x, y, 1, 0, 1.0, None)


@compiled
@pytest.mark.gpu
def test_more_shared_memory_than_there_is_is_refused(device):
    with pytest.raises(DriverError, match="scale, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 1048576"):
        load(SCALE, device, SCALE_KINDS, threads=128, shared_bytes=1 << 20)


@pytest.fixture
def hopper(device):
    if torch.version.hip or torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("needs the copy engine and clusters of Hopper")
    return device


class Driver:
    """The driver's calls of contexts, for one thread."""

    def __init__(self, current, refuses=None):
        self.current, self.refuses, self.called = current, refuses, []

    def __getattr__(self, call):
        def answer(*given):
            self.called.append(call)
            if call == "cuCtxGetCurrent":
                given[0]._obj.value = self.current
            if call == "cuDevicePrimaryCtxRetain":
                assert given[1].value == 7  # the device, not PyTorch's number of it
                given[0]._obj.value = 64
            if call == "cuDeviceGet":
                assert given[1] == 3
                given[0]._obj.value = 7
            if call == "cuCtxSetCurrent":
                self.current = given[0].value
            return 201 * (call == self.refuses)

        return answer


def test_a_thread_without_a_context_is_given_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    driver = Driver(current=None)
    monkeypatch.setattr(nvrtc, "_libcuda", lambda: driver)
    make_context_current()
    assert driver.current == 64
    driver.called.clear()
    make_context_current()
    assert driver.called == ["cuCtxGetCurrent"]


@pytest.mark.parametrize("call", ["cuCtxGetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"])
def test_a_driver_that_gives_no_context_is_told_of(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(nvrtc, "_libcuda", lambda: Driver(current=None, refuses=call))
    with pytest.raises(DriverError, match=f"{call} returned error 201 for the context of device 3"):
        make_context_current()


@pytest.mark.gpu
def test_a_new_thread_makes_tensor_maps(hopper):
    """As a backward pass does whose memory and kernels are there already: nothing before gave the thread a context."""
    x = torch.zeros(16, 32, device=hopper)
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(tensor_map, x.dtype, x.data_ptr(), (32, 16), (128,), (8, 4), swizzle=32)
    assert len(made.result()) == 128


@compiled
@pytest.mark.gpu
def test_the_copy_engine_reads_a_box_and_zeros_outside(hopper):
    x = torch.randn(10, 24, device=hopper)[:, :20]  # rows of 96 bytes, of which 80 are the tensor's
    described = tensor_map(x.dtype, x.data_ptr(), (20, 10), (x.stride(0) * 4,), (8, 4), swizzle=32)
    assert len(described) == 128
    plain = tensor_map(x.dtype, x.data_ptr(), (20, 10), (x.stride(0) * 4,), (8, 4), swizzle=0)
    box = load(BOX, hopper, ("map", "pointer", "i32", "i32"), threads=64, shared_bytes=4 * 8 * 4)
    y = torch.full((4, 8), torch.nan, device=hopper)
    box((1, 1, 1), plain, y, 8, 2)
    assert torch.equal(y, x[2:6, 8:16])
    box((1, 1, 1), plain, y, 16, 8)
    assert torch.equal(y[:2, :4], x[8:, 16:])
    assert not y[:2, 4:].any()
    assert not y[2:].any()
    box((1, 1, 1), described, y, 0, 0)
    assert torch.equal(y.sort().values, x[:4, :8].sort().values)  # swizzled: the same elements of each row, in another order


@compiled
@pytest.mark.gpu
def test_two_tensors_are_one_by_the_distance_of_their_addresses(hopper):
    both = torch.randn(2, 100, 4, 8, device=hopper)
    first, second = both[0, 0], both[1, 50]
    apart = second.data_ptr() - first.data_ptr()
    described = tensor_map(both.dtype, first.data_ptr(), (8, 4, 1, 2), (32, 128, apart), (8, 2, 1, 2), swizzle=0)
    box = load(BOX_OF_FOUR, hopper, ("map", "pointer", "i32", "i32"), threads=64, shared_bytes=4 * 8 * 4)
    y = torch.full((2, 2, 8), torch.nan, device=hopper)
    box((1, 1, 1), described, y, 0, 1)
    assert torch.equal(y, torch.stack([first[1:3], second[1:3]]))


@compiled
@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2, 8, 16])
def test_blocks_come_in_clusters(cluster, hopper):
    y = torch.zeros(32, dtype=torch.int32, device=hopper)
    load(CLUSTER, hopper, ("pointer",), threads=32, cluster=cluster)((32, 1, 1), y)
    assert (y == cluster).all()


@compiled
@pytest.mark.gpu
def test_launches_overlap_and_wait_for_each_other(hopper):
    """Each block needs what another one wrote in the launch before, after a while."""
    y = torch.arange(1024, dtype=torch.int32, device=hopper)
    shift = load(SHIFT, hopper, ("pointer", "pointer", "i32"), threads=32, overlap=True)
    other = torch.empty_like(y)

    def launches():
        for _ in range(50):
            shift((1024, 1, 1), y, other, 1024)
            shift((1024, 1, 1), other, y, 1024)

    launches()
    assert torch.equal(y, torch.arange(1024, device=hopper, dtype=torch.int32).roll(-100))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    for _ in range(3):
        graph.replay()
    assert torch.equal(y, torch.arange(1024, device=hopper, dtype=torch.int32).roll(-400))


@compiled
@pytest.mark.gpu
def test_a_cooperative_launch_refuses_blocks_that_cannot_be_resident(device):
    y = torch.zeros(1 << 20, dtype=torch.int32, device=device)
    together = load(GRID, device, ("pointer",), threads=32, cooperative=True)
    together((4, 1, 1), y)
    assert y[:5].tolist() == [7] * 4 + [0]
    with pytest.raises(DriverError, match="CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"):
        together((1 << 20, 1, 1), y)
