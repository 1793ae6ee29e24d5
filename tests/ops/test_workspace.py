"""Tests of the workspace of kernels: zero when allocated, separate for each stream, and separate for each captured call.

The workspace is int64 words through which the CTAs of a launch communicate. A call that is captured into a CUDA graph takes
words of its own from a reserve of ``RESERVE`` zeroed words, which eager calls fill. If it needs more than ``LARGE`` words or
than are left, the graph clears other memory. ``counters`` are further words, for kernels that reset them.
"""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from onelaunch.launch import workspace as module
from onelaunch.launch.workspace import LARGE, RESERVE, Reserve, counters, workspace

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh():
    """Discard the workspaces of other tests before a test, and its own after it."""
    caches = (module._shared, module._counters, module._reserve)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def overlap(one, other):
    """Return whether two tensors share memory."""
    starts = one.data_ptr(), other.data_ptr()
    ends = starts[0] + one.nbytes, starts[1] + other.nbytes
    return max(starts) < min(ends)


def test_words_are_zero_and_as_many_as_asked_for():
    for words in (1, 7, 4096):
        memory = workspace(CPU, words)
        assert memory.dtype is torch.int64
        assert memory.shape == (words,)
        assert not memory.any()


def test_only_calls_of_one_size_share_workspaces():
    """Each launch flips a phase bit in all of its words, which replaces clearing them.

    A launch of another size would leave some words with the wrong phase.
    """
    first = workspace(CPU, 100)
    first.fill_(-1)
    assert workspace(CPU, 100).data_ptr() == first.data_ptr()
    for words in (99, 101):
        other = workspace(CPU, words)
        assert not other.any()
        assert not overlap(first, other)


def test_workspaces_in_use_survive_their_eviction():
    """With more sizes than the cache holds, a launch's own tensor keeps its memory alive."""
    kept = workspace(CPU, 3)
    kept.fill_(5)
    for words in range(4, 80):
        workspace(CPU, words).fill_(-1)
    assert (kept == 5).all()
    assert not workspace(CPU, 3).any()


def test_an_empty_reserve_returns_nothing():
    assert Reserve().take(1) is None


def test_a_reserve_allocates_every_word_once(monkeypatch):
    monkeypatch.setattr(module, "RESERVE", 1000)
    monkeypatch.setattr(module, "LARGE", 250)
    reserve = Reserve()
    reserve.fill(CPU)
    taken = []
    while (words := reserve.take(101)) is not None:
        assert words.shape[0] >= 101
        assert words.data_ptr() % 16 == 0
        assert not words.any()
        assert not any(overlap(words, other) for other in taken)
        taken.append(words)
    assert len(taken) == 1000 // 102  # words are rounded up to an even number, for the alignment
    for index, words in enumerate(taken):
        words.fill_(index)
    assert all((words == index).all() for index, words in enumerate(taken))


def test_a_reserve_is_refilled_before_it_runs_dry(monkeypatch):
    monkeypatch.setattr(module, "RESERVE", 1000)
    monkeypatch.setattr(module, "LARGE", 250)
    reserve = Reserve()
    reserve.fill(CPU)
    first = reserve.take(250)
    assert first is not None
    first.fill_(-1)
    reserve.fill(CPU)  # more than half is left: nothing changes
    second = reserve.take(250)
    third = reserve.take(250)
    assert second is not None
    assert third is not None
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert not overlap(second, third)
    reserve.fill(CPU)
    fourth = reserve.take(250)
    assert fourth is not None
    assert not any(overlap(fourth, other) for other in (first, second, third))
    assert not fourth.any()
    assert (first == -1).all()


def test_large_calls_do_not_empty_the_reserve():
    reserve = Reserve()
    reserve.fill(CPU)
    assert reserve.take(LARGE + 1) is None
    assert reserve.take(LARGE) is not None
    assert RESERVE >= 2 * LARGE


class Capture:
    """Fake of the GPU's state: the current stream, and whether it captures a graph.

    ``cleared_in_graph`` counts the allocations of zeros during a capture.
    """

    def __init__(self, monkeypatch):
        self.capturing = False
        self.stream = 1
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(module, "_stream", lambda device: self.stream)
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *sizes, dtype, device: self.zeros(zeros, *sizes, dtype=dtype))
        self.cleared_in_graph = 0

    def zeros(self, zeros, *sizes, dtype):
        """Allocate on the CPU, whatever device was asked for."""
        self.cleared_in_graph += self.capturing
        return zeros(*sizes, dtype=dtype)


@pytest.fixture
def gpu(monkeypatch):
    """Return a fake GPU, with a reserve of 1000 words of which a call takes at most 250."""
    monkeypatch.setattr(module, "RESERVE", 1000)
    monkeypatch.setattr(module, "LARGE", 250)
    return Capture(monkeypatch)


def test_streams_do_not_share_workspaces(gpu):
    device = torch.device("cuda", 0)
    first = workspace(device, 100)
    gpu.stream = 2
    second = workspace(device, 100)
    assert not overlap(first, second)
    gpu.stream = 1
    assert workspace(device, 100).data_ptr() == first.data_ptr()


def test_captured_calls_have_their_own_words_and_clear_nothing(gpu):
    device = torch.device("cuda", 0)
    eager = workspace(device, 100)
    gpu.capturing = True
    captured = [workspace(device, 100) for _ in range(4)]
    gpu.capturing = False
    later = workspace(device, 100)
    assert not gpu.cleared_in_graph
    every = [eager, *captured]
    assert not any(overlap(one, other) for n, one in enumerate(every) for other in every[:n])
    assert later.data_ptr() == eager.data_ptr()


def test_captured_calls_beyond_the_reserve_clear_their_own_words(gpu):
    device = torch.device("cuda", 0)
    workspace(device, 100)
    gpu.capturing = True
    captured = [workspace(device, 200) for _ in range(8)]
    assert gpu.cleared_in_graph == 3  # five calls find words in the reserve
    assert not any(overlap(one, other) for n, one in enumerate(captured) for other in captured[:n])
    assert all(words.shape == (200,) and not words.any() for words in captured)


def test_a_capture_without_an_earlier_call_clears_its_own_words(gpu):
    gpu.capturing = True
    assert not workspace(torch.device("cuda", 0), 100).any()
    assert gpu.cleared_in_graph == 1


def test_large_captured_calls_clear_their_own_words(gpu):
    device = torch.device("cuda", 0)
    workspace(device, 10)
    gpu.capturing = True
    workspace(device, 251)
    assert gpu.cleared_in_graph == 1
    workspace(device, 249)
    assert gpu.cleared_in_graph == 1


def test_a_graph_keeps_its_words_when_the_reserve_is_replaced(gpu):
    """The graph holds an address, not a tensor. If the memory were freed, other tensors could use it at the next replay."""
    device = torch.device("cuda", 0)
    workspace(device, 10)
    gpu.capturing = True
    held = [StorageWeakRef(workspace(device, 200).untyped_storage()) for _ in range(3)]
    gpu.capturing = False
    workspace(device, 10)  # more than half of the reserve is used, so a new one replaces it
    gpu.capturing = True
    assert StorageWeakRef(workspace(device, 200).untyped_storage()).cdata != held[0].cdata
    assert not any(reference.expired() for reference in held)


@pytest.mark.gpu
def test_counters_are_not_shared(device):
    words = workspace(device, 50)
    words.fill_(-1)
    first = counters(device, 50)
    assert not first.any()
    assert counters(device, 50).data_ptr() == first.data_ptr()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert not overlap(counters(device, 50), first)
    captured = []
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured = [counters(device, 50) for _ in range(2)]
    assert not overlap(*captured)
    assert not any(overlap(each, other) for each in captured for other in (words, first))
