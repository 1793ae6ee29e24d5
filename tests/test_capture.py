"""Tests of CUDA graph captures: garbage collection during a capture, and errors of the captured code."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap

import pytest
import torch

from onelaunch import cuda


@pytest.fixture
def graphs_without_a_gpu(monkeypatch):
    """Replace PyTorch's captures and devices by ones that do nothing, except that leaving a broken capture raises.

    PyTorch raises such an error too, in place of the captured code's own error. ``cuda.capture`` must raise the latter.
    """

    @contextlib.contextmanager
    def capture(graph, *, pool, stream, capture_error_mode):
        try:
            yield
        except BaseException:  # noqa: BLE001
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


class Stream:
    """Stand-in for a CUDA stream, of which ``cuda.capture`` reads only the device."""

    device = torch.device("cpu")


@pytest.mark.parametrize("error", [ValueError("of the step"), KeyboardInterrupt()])
def test_an_error_of_the_captured_code_is_raised(error, graphs_without_a_gpu):
    def step():
        raise error

    with pytest.raises(type(error)) as raised:
        cuda.capture(step, None, Stream())
    assert raised.value is error


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_during_a_capture(enabled, graphs_without_a_gpu):
    (gc.enable if enabled else gc.disable)()
    try:
        assert cuda.capture(gc.isenabled, None, Stream()) is False
        assert gc.isenabled() is enabled
        with pytest.raises(ZeroDivisionError):
            cuda.capture(lambda: 1 / 0, None, Stream())
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


@pytest.mark.gpu
def test_a_graph_that_is_garbage_does_not_break_a_capture():
    """Collecting such a graph within a plain capture fails.

    The test runs in a process of its own, because the capture stays broken.
    """
    program = """
        import gc
        import torch
        from onelaunch import cuda

        x = torch.zeros(1 << 20, device="cuda")

        def garbage():
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            cuda.capture(lambda: x.add_(1).clone(), graph, stream)
            circle = [graph]  # a reference cycle, which only the garbage collector frees
            circle.append(circle)

        def step():
            held = [[number] for number in range(100_000)]  # enough for several collections
            return x.add_(len(held))

        garbage()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        result = cuda.capture(step, graph, torch.cuda.Stream())
        x.zero_()
        graph.replay()
        assert int(result[0]) == 100_000
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


@pytest.mark.gpu
def test_a_capture_that_cuda_cannot_end_leaves_no_trace():
    """Reading a value waits for the device, which no capture allows. A block that two streams have used is free again later."""
    x, graph, stream = torch.ones(1 << 20, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with pytest.raises(RuntimeError, match="captur"):
        cuda.capture(lambda: float(x.add(1).sum()), graph, stream)
    torch.cuda.synchronize()
    assert torch.rand(4, device="cuda").isfinite().all()
    before = torch.cuda.memory_reserved()
    for _ in range(20):
        block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        block.record_stream(stream)
        del block
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before < 10 * (64 << 20)
    again = torch.cuda.CUDAGraph()
    doubled = cuda.capture(lambda: x * 2, again, stream)
    again.replay()
    torch.cuda.synchronize()
    assert doubled.eq(2).all()
