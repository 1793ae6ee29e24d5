"""Samples of one subject's time: plain calls on a CPU, CUDA-graph replay on a GPU.

A sampler is prepared once (compile, warm up, capture) and then asked for samples, one per regime and round. What the timed calls
left in their outputs can be taken afterwards, to be verified.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from onelaunch import cuda
from onelaunch.device.hardware import describe, free_memory
from onelaunch.wording import in_a_line
from onelaunch.workbench.result import Regime, Status
from onelaunch.workbench.verify.calls import Answer, Callee, Inputs, status_of
from onelaunch.workbench.verify.poison import poison
from onelaunch.workbench.verify.truth import Truth

CACHES = 3.0
"""The rotated inputs are larger than so many last-level caches."""

GPU_SAMPLE_SECONDS = 2e-3
"""A GPU sample takes at least this long: an event's resolution and the gaps round a graph are then below 0.1 %."""

CPU_SAMPLE_SECONDS = 5e-3

LONG_SAMPLE_SECONDS = 50e-3
"""A sample is never made longer than this by more calls: slow variants are called once."""

MOST_CALLS = 4096

SHARE_OF_MEMORY = 0.25

WARM_UP_CALLS = 3


class Sampler(Protocol):
    """Times one subject."""

    peak_bytes: int | None
    """Most memory in use above the inputs during one call; ``None`` where it is not measured."""
    refused: dict[Regime, tuple[Status, str]]
    """Regimes that the subject cannot be timed in, after :meth:`prepare`."""

    def prepare(self, regimes: Sequence[Regime]) -> None:
        """Do everything that must not be timed."""
        ...

    def sample(self, regime: Regime) -> float:
        """Return the microseconds of one call, over as many calls as the sample needs."""
        ...

    def answers(self, regime: Regime) -> Iterator[Answer]:
        """Yield the results of timed calls."""
        ...


@dataclass
class Rotation:
    """Input sets of the same contents in different storage, shared by all subjects of a measurement.

    The same contents, so that the outputs of any of them can be verified against one oracle.
    """

    truth: Truth
    sets: list[Inputs]
    full: bool
    """True if the sets together are larger than three caches; memory may be too small for it, or the sets too tiny."""
    stream: torch.cuda.Stream | None = None
    """On a GPU: where everything is captured, replayed and timed."""
    _next: int = field(default=0, init=False)

    def next(self) -> Inputs:
        """Return the set that was used longest ago, whoever used it."""
        self._next = (self._next + 1) % len(self.sets)
        return self.sets[self._next]

    @property
    def note(self) -> str:
        """How the rotation came out, in a sentence."""
        size = sum(one.nbytes for one in self.sets) / 2**20
        short = "" if self.full else f"; too few to exceed {CACHES:g} last-level caches"
        return f"{len(self.sets)} input sets rotated, {size:.0f} MiB in all{short}"


def rotate(truth: Truth, device: torch.device) -> Rotation:
    """Make as many input sets as exceed three last-level caches, as far as memory allows."""
    results = sum(value.numel() * truth.case.dtype.itemsize for value in truth.expected.values() if value is not None)
    count, full = count_sets(truth.inputs.nbytes, results, device)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    return Rotation(truth, [truth.inputs.clone() for _ in range(count)], full, stream)


def count_sets(input_bytes: int, result_bytes: int, device: torch.device) -> tuple[int, bool]:
    """Return how many input sets to rotate through, and whether their inputs exceed three last-level caches.

    Each set's results are kept too; all together take at most a quarter of the free memory.
    """
    one = max(input_bytes, 1)
    wanted = int(CACHES * describe(str(device)).cache_bytes) // one + 2
    fit = int(SHARE_OF_MEMORY * free_memory(device)) // (one + result_bytes)
    count = max(1, min(wanted, fit, MOST_CALLS))
    return count, count == wanted


def make_sampler(callee: Callee, rotation: Rotation, device: torch.device) -> Sampler:
    """Return the sampler for a device."""
    if rotation.stream is None:
        return CpuSampler(callee, rotation)
    return GpuSampler(callee, rotation, device, rotation.stream)


class CpuSampler:
    """Plain calls between two readings of the clock."""

    def __init__(self, callee: Callee, rotation: Rotation) -> None:
        self.peak_bytes: int | None = None
        self.refused: dict[Regime, tuple[Status, str]] = {}
        self._callee = callee
        self._rotation = rotation
        self._calls = 1
        self._last: dict[Regime, Answer] = {}

    def prepare(self, regimes: Sequence[Regime]) -> None:
        """Warm up, and decide how many calls make a sample."""
        seconds = math.inf
        for call in range(WARM_UP_CALLS):
            start = time.perf_counter()
            self._callee(self._rotation.next())
            seconds = min(seconds, time.perf_counter() - start)
            if call and seconds > LONG_SAMPLE_SECONDS:
                break
        self._calls = max(1, min(MOST_CALLS, round(CPU_SAMPLE_SECONDS / max(seconds, 1e-9))))

    def sample(self, regime: Regime) -> float:
        """Return the mean over the calls of one sample; the warm regime first calls once untimed."""
        if regime == "warm":
            self._callee(self._rotation.sets[0])
        spent = 0.0
        for _ in range(self._calls):
            inputs = self._rotation.sets[0] if regime == "warm" else self._rotation.next()
            start = time.perf_counter()
            answer = self._callee(inputs)
            spent += time.perf_counter() - start
            self._last[regime] = answer
        return 1e6 * spent / self._calls

    def answers(self, regime: Regime) -> Iterator[Answer]:
        """Yield the results of the last timed call."""
        if regime in self._last:
            yield self._last[regime]


class CaptureFailed(RuntimeError):
    """Calls that no CUDA graph can hold: they synchronise, or read on the host."""


@dataclass
class Capture:
    """Calls captured in a CUDA graph."""

    graph: torch.cuda.CUDAGraph
    calls: int
    sets: list[Inputs]
    answers: list[Answer]
    """Results of the last call on every set: each writes to its own memory, as the next layer of a model would find it."""
    launch_seconds: float = 0.0
    """Host time of one replay: how long the stream is held up so that the host cannot be what is timed."""


class GpuSampler:
    """CUDA-graph replay (cold, warm), and calls from Python (eager), timed by events on one side stream."""

    def __init__(self, callee: Callee, rotation: Rotation, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.peak_bytes: int | None = None
        self.refused: dict[Regime, tuple[Status, str]] = {}
        self._callee = callee
        self._rotation = rotation
        self._device = device
        self._stream = stream
        self._flush: torch.Tensor | None = None
        self._captures: dict[Regime, Capture] = {}
        self._eager_calls = 1
        self._eager_answer: Answer | None = None

    def prepare(self, regimes: Sequence[Regime]) -> None:
        """Compile and warm up on the stream that captures, measure memory, capture the graphs."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_CALLS):
                self._callee(self._rotation.next())
            self._stream.synchronize()
            self.peak_bytes = self._measure_peak()
            start = time.perf_counter()
            self._callee(self._rotation.next())
            self._stream.synchronize()
            seconds = time.perf_counter() - start
        self._eager_calls = _calls(seconds, GPU_SAMPLE_SECONDS)
        most = max(1, min(MOST_CALLS, int(LONG_SAMPLE_SECONDS / seconds)))
        for regime, sets in (("cold", self._rotation.sets), ("warm", self._rotation.sets[:1])):
            if regime not in regimes:
                continue
            try:
                self._captures[regime] = self._prepare_capture(sets, most)
            except CaptureFailed as error:
                self.refused[regime] = status_of(error)  # not the error: its traceback would keep the capture's memory

    def sample(self, regime: Regime) -> float:
        """One replay, or as many eager calls as make a sample."""
        with torch.cuda.stream(self._stream):
            if regime == "eager":
                return 1e6 * self._eager_seconds() / self._eager_calls
            capture = self._captures[regime]
            if regime == "warm":
                capture.graph.replay()
            elif capture.calls < len(self._rotation.sets) or not self._rotation.full:
                self._flush_caches()  # too few calls to displace each other
            return 1e6 * self._replay_seconds(capture) / capture.calls

    def answers(self, regime: Regime) -> Iterator[Answer]:
        """Yield what one more replay writes over poison (first and last set), or what the last eager call returned."""
        if regime == "eager":
            if self._eager_answer is not None:
                torch.cuda.synchronize(self._device)
                yield self._eager_answer
            return
        capture = self._captures[regime]
        with torch.cuda.stream(self._stream):
            for answer in capture.answers:
                for value in answer.values():
                    if value is not None and _own_memory_per_element(value):
                        poison(value)
            for inputs in capture.sets:  # a result may be part of an input
                inputs.load(self._rotation.truth.inputs)
            capture.graph.replay()
            self._stream.synchronize()
        yield capture.answers[0]
        if len(capture.answers) > 1:
            yield capture.answers[-1]

    def _prepare_capture(self, sets: list[Inputs], most: int) -> Capture:
        """Capture one rotation (or fewer calls, at most ``most``), and once more with more calls if that is too short to time."""
        capture = self._capture(sets, min(len(sets), most))
        self._replay_seconds(capture)  # the first replay also uploads the graph
        needed = _calls(self._replay_seconds(capture) / capture.calls, GPU_SAMPLE_SECONDS)
        if len(sets) > 1 and (not self._rotation.full or needed <= len(sets)):
            needed = min(needed, len(sets))  # a second round over too few sets would find them in the cache
        elif len(sets) > 1:
            needed = min(math.ceil(needed / len(sets)), max(1, MOST_CALLS // len(sets))) * len(sets)
        if needed > capture.calls:
            capture = self._capture(sets, needed)
            self._replay_seconds(capture)
        return capture

    def _capture(self, sets: list[Inputs], calls: int) -> Capture:
        used = sets[: min(calls, len(sets))]
        graph = torch.cuda.CUDAGraph()
        return Capture(graph, calls, used, capture(self._callee, used, calls, graph, self._stream))

    def _replay_seconds(self, capture: Capture) -> float:
        with torch.cuda.stream(self._stream):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(int(2e9 * (50e-6 + 2 * capture.launch_seconds)))  # noqa: SLF001 - cycles, at about 2 GHz
            start.record()
            began = time.perf_counter()
            capture.graph.replay()
            capture.launch_seconds = min(time.perf_counter() - began, 5e-3)
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _eager_seconds(self) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._stream.synchronize()
        sets = [self._rotation.next() for _ in range(self._eager_calls)]
        answer: Answer = {}
        if sets[0].differentiable:
            start.record()
            for inputs in sets:
                answer = self._callee(inputs)
            end.record()
        else:  # nothing of ours between the caller and the public function
            call, result = self._callee.call, None
            with torch.no_grad():
                start.record()
                for inputs in sets:
                    result = call(**inputs.arguments)
                end.record()
            answer = self._callee.name_results(result, sets[-1].arguments)
        end.synchronize()
        self._eager_answer = answer
        return start.elapsed_time(end) / 1e3

    def _flush_caches(self) -> None:
        if self._flush is None:
            size = int(CACHES * describe(str(self._device)).cache_bytes)
            self._flush = torch.empty(size, dtype=torch.int8, device=self._device)
        self._flush.zero_()

    def _measure_peak(self) -> int:
        """Return the most that PyTorch's allocator had given out during one call, above what it had given out before.

        One call from Python after warming up, outside of any graph. Inputs and incoming gradients are there before and do not
        count; all that the call makes does: results, and with a backward pass what is kept for it and the gradients of the
        inputs. Nor is counted what a variant keeps between calls, or what a library takes past PyTorch's allocator.
        """
        gc.collect()  # garbage of earlier calls that went during this one would hide some of it
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        answer = self._callee(self._rotation.next())
        self._stream.synchronize()
        peak = torch.cuda.max_memory_allocated(self._device) - before
        del answer
        return peak


def capture(
    callee: Callee, sets: Sequence[Inputs], calls: int, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream
) -> list[Answer]:
    """Capture so many calls in a graph, over the sets in turn, and return the answers of the last call on every set.

    Raises:
        CaptureFailed: with what the callee raised.
    """
    answers: list[Answer] = [{} for _ in sets]

    def call_all() -> None:
        for call in range(calls):
            answers[call % len(sets)] = callee(sets[call % len(sets)])

    gc.collect()  # what garbage holds is given back before, so that the calls find the same room as others did
    try:
        cuda.capture(call_all, graph, stream)
    except Exception as error:
        raise CaptureFailed(f"cannot be captured in a CUDA graph: {in_a_line(error)}") from error
    return answers


def _calls(seconds: float, sample_seconds: float) -> int:
    return max(1, min(MOST_CALLS, math.ceil(sample_seconds / max(seconds, 1e-9))))


def _own_memory_per_element(tensor: torch.Tensor) -> bool:
    return all(step or size < 2 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
