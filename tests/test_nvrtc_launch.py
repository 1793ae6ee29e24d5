"""Tests of CUDA C++ on a GPU: loading, launches, capture, threads, clusters, TMA, and the context of a thread.

The context is also tested without a GPU, by a double of the driver. ``prose.raises`` compares the message with the test's entry
in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the
test or the parameter of an entry is gone.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from onelaunch.cuda import Source, compile_now, load, make_context_current, tensor_map
from onelaunch.cuda import driver as driver_module
from onelaunch.errors import DriverError
from tests.test_nvrtc import SCALE, SCALE_KINDS, compiled

BOX = Source(
    "box.cu",
    """
    struct alignas(64) TensorMap { char bytes[128]; };
    // TMA reads one box of [ROWS, COLUMNS] floats, and the threads write it out as it lies in shared memory.
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
"""Kernel that reads a box of a four-dimensional tensor by TMA, with the last two coordinates equal to the first."""

# Kernel whose thread blocks write the number of blocks in their cluster.
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

# Kernel for overlapping launches: block i writes element i + 1 of x. It lets the next launch begin, waits for the end of the
# launch before it, and only then reads, after up to 600 ns.
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
    """Return x, y (NaN), a one-element tensor with the shift, and the function that launches ``scale``: y = :func:`scaled`."""
    x = torch.randn(1000, device=device)
    return x, torch.full_like(x, torch.nan), torch.ones(1, device=device), load(SCALE, device, SCALE_KINDS, threads=128)


def scaled(x, *, offset=0, factor=1.0, shift=0.0):
    """Return what the kernel ``scale`` computes: it doubles x by a function of its header, and multiplies by a macro of 3."""
    return 2 * x * factor * 3 + offset + shift


@compiled
@pytest.mark.gpu
def test_pointers_and_numbers_are_passed_to_the_kernel(launched):
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
        torch.cuda._sleep(50_000_000)  # clock cycles, some 30 ms
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
        with pytest.raises(TypeError, match="pointer, pointer, i64, i32, f32, pointer"):
            scale((1, 1, 1), *arguments)
    with pytest.raises(DriverError, match=r"CUDA_ERROR_INVALID_VALUE.*scale.*\(0, 1, 1\)"):
        scale((0, 1, 1), x, y, 1, 0, 1.0, None)


@compiled
@pytest.mark.gpu
def test_too_much_shared_memory_is_refused(device):
    with pytest.raises(DriverError, match="scale, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 1048576"):
        load(SCALE, device, SCALE_KINDS, threads=128, shared_bytes=1 << 20)


@pytest.fixture
def hopper(device):
    if torch.version.hip or torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("needs TMA and clusters of a Hopper GPU")
    return device


class Driver:
    """Double of the driver's context calls, for one thread.

    It has the primary context 64 of PyTorch's device 3, which is the driver's device 7.

    Args:
        current: Context of the thread at first, or ``None``.
        refuses: Name of the call that fails.
    """

    def __init__(self, current, refuses=None):
        self.current, self.refuses, self.called = current, refuses, []

    def __getattr__(self, call):
        def answer(*given):
            self.called.append(call)
            if call == "cuCtxGetCurrent":
                given[0]._obj.value = self.current
            if call == "cuDevicePrimaryCtxRetain":
                assert given[1].value == 7  # the driver's device handle, not PyTorch's index
                given[0]._obj.value = 64
            if call == "cuDeviceGet":
                assert given[1] == 3
                given[0]._obj.value = 7
            if call == "cuCtxSetCurrent":
                self.current = given[0].value
            return 201 * (call == self.refuses)  # CUDA_ERROR_INVALID_CONTEXT, or 0 for success

        return answer


def test_a_thread_without_a_context_is_given_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    driver = Driver(current=None)
    monkeypatch.setattr(driver_module, "library", lambda: driver)
    driver_module.primary_context.cache_clear()
    make_context_current()
    assert driver.current == 64
    driver.called.clear()
    make_context_current()
    assert driver.called == ["cuCtxGetCurrent"]
    driver_module.primary_context.cache_clear()


@pytest.mark.parametrize("call", ["cuCtxGetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"])
def test_a_driver_error_without_a_context_is_reported(call, monkeypatch, prose):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(driver_module, "library", lambda: Driver(current=None, refuses=call))
    driver_module.primary_context.cache_clear()
    with prose.raises(DriverError, match=call):
        make_context_current()


@pytest.mark.gpu
def test_a_new_thread_makes_tensor_maps(hopper):
    """A backward pass may run in such a thread, when memory and kernels exist already: nothing gave it a context before."""
    x = torch.zeros(16, 32, device=hopper)
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(tensor_map, x.dtype, x.data_ptr(), (32, 16), (128,), (8, 4), swizzle=32)
    assert len(made.result()) == 128


@compiled
@pytest.mark.gpu
def test_tma_reads_a_box_and_fills_zeros_outside(hopper):
    x = torch.randn(10, 24, device=hopper)[:, :20]  # rows have a pitch of 96 bytes, of which 80 belong to the tensor
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
    # swizzled: the elements of each row are the same, in another order
    assert torch.equal(y.sort().values, x[:4, :8].sort().values)


@compiled
@pytest.mark.gpu
def test_two_tensors_are_described_as_one_by_the_distance_of_their_addresses(hopper):
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
def test_launches_with_clusters(cluster, hopper):
    y = torch.zeros(32, dtype=torch.int32, device=hopper)
    load(CLUSTER, hopper, ("pointer",), threads=32, cluster=cluster)((32, 1, 1), y)
    assert (y == cluster).all()


@compiled
@pytest.mark.gpu
def test_launches_overlap_and_wait_for_each_other(hopper):
    """Each thread block reads, after a delay, what another block wrote in the previous launch."""
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
