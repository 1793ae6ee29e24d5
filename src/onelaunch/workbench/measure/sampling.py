"""Samplers of one candidate's time: plain calls on a CPU, CUDA-graph replay on a GPU.

``timing.py`` makes a candidate's sampler, keeps it in its ``Entry``, prepares it once (compile, warm up, capture) and asks it for
samples, one per regime and round. The contents of inputs change outside of what is timed. At the end it takes one more sample, in
which outputs of random calls are copied at once. ``launches.py`` calls :func:`capture`.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from onelaunch import cuda
from onelaunch.device.hardware import describe
from onelaunch.wording import in_a_line
from onelaunch.workbench.measure.contents import poison_outputs
from onelaunch.workbench.measure.cores import one_core
from onelaunch.workbench.measure.rotation import CACHES, MOST_CALLS, Rotation
from onelaunch.workbench.result import Regime, Status
from onelaunch.workbench.verify.calls import Candidate, Inputs, OutputTensors, duplicate, status_of

GPU_SAMPLE_SECONDS = 2e-3
"""Least length of a GPU sample. The resolution of events and the gaps before and after a graph are then below 0.1 % of it."""

EAGER_SAMPLE_SECONDS = 20e-3
"""Least length of a GPU sample of calls from Python. Where the host decides, single calls differ by a tenth and more."""

EAGER_CALLS = 8
"""Most calls of a part of a GPU sample of calls from Python.

All candidates of a case have as many calls in a part, since a part also takes what the device has to do after the last call:
with fewer calls, more of it is counted for each.
"""

EAGER_PARTS = (3, 40)
"""Least and largest number of parts of a GPU sample of calls from Python."""

CPU_SAMPLE_SECONDS = 5e-3
"""Least length of a CPU sample."""

LONG_SAMPLE_SECONDS = 50e-3
"""Length beyond which no more calls are added to a sample. A variant that is slower than this is called once."""

WARM_UP_CALLS = 3
"""Number of untimed calls that come first, and then of calls of which the shortest decides how many a sample needs."""

CALLED = 5
"""Calls of a cold sample of a candidate that no CUDA graph can capture, each over flushed caches."""

_CHANGED_SETS = 16
"""Number of input sets whose contents change before a sample that replays a graph, in which no Python runs that could look."""


class Sampler(Protocol):
    """Sampler of the time of one candidate."""

    peak_bytes: int | None
    """Peak memory of one call in bytes, without the inputs; ``None`` where it is not measured."""
    refused: dict[Regime, tuple[Status, str]]
    """Regimes in which the candidate cannot be timed, each with status and reason; known after :meth:`prepare`."""
    note: str
    """Limit of its times, in a sentence for the result; empty if there is none. Known after :meth:`prepare`."""

    def prepare(self, regimes: Sequence[Regime]) -> None:
        """Compile, warm up and capture, so that none of this is timed."""
        ...

    def sample(self, regime: Regime) -> float:
        """Return the mean microseconds of a call over the calls of one sample."""
        ...

    def parts(self, regime: Regime) -> Iterator[float | None]:
        """Take one sample part by part: yield ``None`` after each part, and at last what :meth:`sample` returns.

        Between the parts the caller may take parts of other candidates' samples, so that all see what else the host does then.
        """
        ...

    def outputs(self, regime: Regime) -> Iterator[OutputTensors]:
        """Take one more sample, and yield the outputs of random calls of it, whose inputs held the contents of the reference.

        Raises:
            InputsChanged: The candidate changed inputs.
        """
        ...


def make_sampler(candidate: Candidate, rotation: Rotation, device: torch.device) -> Sampler:
    """Return the sampler for a device."""
    if rotation.stream is None:
        return CpuSampler(candidate, rotation)
    return GpuSampler(candidate, rotation, device, rotation.stream)


class CpuSampler:
    """Sampler that times plain calls by the host's clock."""

    def __init__(self, candidate: Candidate, rotation: Rotation) -> None:
        self.peak_bytes: int | None = None
        self.refused: dict[Regime, tuple[Status, str]] = {}
        self.note = ""
        self._candidate = candidate
        self._rotation = rotation
        self._calls = 1
        self._made = 1
        """Number of calls that the latest sample made, which is smaller than the chosen one for a candidate that became slow."""
        self._sampled: set[Regime] = set()

    def prepare(self, regimes: Sequence[Regime]) -> None:
        """Warm up, and choose the number of calls in a sample."""
        self._rotation.begin()
        seconds = math.inf
        for call in range(WARM_UP_CALLS):
            inputs = self._rotation.next()
            start = time.perf_counter()
            self._candidate(inputs)
            seconds = min(seconds, abs(time.perf_counter() - start))  # the difference is negative if the clock went backwards
            self._rotation.contents.renew([inputs])
            if call and seconds > LONG_SAMPLE_SECONDS:  # the first call alone may be slow because it compiles
                break
        self._calls = max(1, min(MOST_CALLS, round(CPU_SAMPLE_SECONDS / max(seconds, 1e-9))))

    def sample(self, regime: Regime) -> float:
        """Return the mean microseconds of a call. In the warm regime one untimed call comes first, which fills the caches."""
        if regime == "warm":
            inputs = self._rotation.sets[0]
            self._rotation.contents.renew([inputs], all_of_it=True)
            self._candidate(inputs)
            self._rotation.check([inputs])
        self._sampled.add(regime)
        spent, self._made, _ = self._call_and_time(regime, frozenset())
        return 1e6 * spent / self._made

    def parts(self, regime: Regime) -> Iterator[float | None]:
        """Take one sample in one part."""
        yield self.sample(regime)

    def outputs(self, regime: Regime) -> Iterator[OutputTensors]:
        """Take one more sample, and yield the outputs of random calls of it, copied as soon as each returned."""
        if regime not in self._sampled:
            return
        watched = self._rotation.watch_some()
        _, _, taken = self._call_and_time(regime, self._rotation.judge_some(self._made))
        self._rotation.check(watched)
        yield from taken

    def _call_and_time(self, regime: Regime, judged: frozenset[int]) -> tuple[float, int, list[OutputTensors]]:
        """Make the calls of a sample. The inputs get new contents after each call, outside of the timed part.

        Args:
            regime: ``warm`` calls on one set, all others rotate.
            judged: Indices of the calls whose inputs hold the judged contents and whose outputs are copied. If there are any, the
                outputs of all calls are poisoned after they are read, so that none can serve as those of a later call.

        Returns:
            The seconds of all calls, their number, and the copied outputs.
        """
        rotation, spent, taken = self._rotation, 0.0, []
        outputs: OutputTensors = {}
        for call in range(self._calls):
            inputs = rotation.sets[0] if regime == "warm" else rotation.next()
            if call in judged:
                rotation.contents.load(inputs, rotation.reference.inputs)
            start = time.perf_counter()
            outputs = self._candidate(inputs)
            elapsed = time.perf_counter() - start
            spent += elapsed if elapsed >= 0 else math.nan  # no sum of times in which the clock went backwards is a time
            if call in judged:
                taken.append(duplicate(outputs))
                rotation.check([inputs])
            if judged or call == self._calls - 1:
                poison_outputs(outputs, inputs)
            rotation.contents.renew([inputs])
            # A candidate that is slower than when the number of calls was chosen must not take the time of all others.
            if spent > LONG_SAMPLE_SECONDS and call >= max(judged, default=0):
                return spent, call + 1, taken
        return spent, self._calls, taken


class CaptureFailed(RuntimeError):
    """Error of calls that cannot be captured in a CUDA graph, such as those that synchronise or read a value on the host."""


@dataclass
class Capture:
    """Calls captured in a CUDA graph."""

    graph: torch.cuda.CUDAGraph
    calls: int
    sets: list[Inputs]
    outputs: list[OutputTensors]
    """Outputs of the last call on every set. Each call writes to memory of its own, as in a model, whose next layer reads it."""
    launch_seconds: float = 0.0
    """Host time of launching the graph. The stream is first blocked for longer than this, so that a sample times the device."""


class GpuSampler:
    """Sampler for a GPU: CUDA-graph replay (cold, warm) and calls from Python (eager), timed by events on a side stream.

    A variant of another project that no graph can capture, such as one that reads values on the host, is called from Python in
    the cold regime too. The device then waits for the host within a call, as it does for users of that project.
    """

    def __init__(self, candidate: Candidate, rotation: Rotation, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.peak_bytes: int | None = None
        self.refused: dict[Regime, tuple[Status, str]] = {}
        self.note = ""
        self._candidate = candidate
        self._rotation = rotation
        self._device = device
        self._stream = stream
        self._flush: torch.Tensor | None = None
        self._captures: dict[Regime, Capture] = {}
        self._eager_calls = self._eager_part = 1
        self._eager_sampled = False
        self._host_seconds = 0.0
        """Time of a call from Python until the device has finished."""

    def prepare(self, regimes: Sequence[Regime]) -> None:
        """Compile and warm up on the stream that captures, measure the peak memory, and capture the graphs."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # on which the inputs were drawn
        with torch.cuda.stream(self._stream):
            self._rotation.begin()
            for _ in range(WARM_UP_CALLS):
                self._candidate(self._rotation.next())
            self._stream.synchronize()
            self.peak_bytes = self._measure_peak()
            seconds = min(self._waited_seconds() for _ in range(WARM_UP_CALLS))
        self._host_seconds = seconds
        self._choose_eager_calls(seconds, EAGER_SAMPLE_SECONDS)
        most = max(1, min(MOST_CALLS, int(LONG_SAMPLE_SECONDS / seconds)))
        for regime, sets in (("cold", self._rotation.sets), ("warm", self._rotation.sets[:1])):
            if regime not in regimes:
                continue
            try:
                self._captures[regime] = self._prepare_capture(sets, most)
            except CaptureFailed as error:
                failure = status_of(error)  # not the error itself, whose traceback would hold the capture's memory
                if regime == "cold" and self._candidate.foreign:
                    self.note = f"It was called from Python in the cold regime too, since it {failure[1].partition(': ')[2]}."
                else:
                    self.refused[regime] = failure
        with torch.cuda.stream(self._stream):
            self._rotation.contents.renew(self._rotation.sets)  # this candidate has seen the contents

    def sample(self, regime: Regime) -> float:
        """Return the mean microseconds of a call over one replay, or over the eager calls of one sample."""
        contents = self._rotation.contents
        if regime == "eager":
            *_, last = self.parts(regime)
            return cast("float", last)
        with torch.cuda.stream(self._stream):
            if regime not in self._captures:
                return 1e6 * self._called_seconds()
            capture = self._captures[regime]
            # Changed before the caches are flushed, so that the calls find their inputs as in any other sample.
            first = contents.random.randrange(len(capture.sets))
            contents.renew(capture.sets[first : first + _CHANGED_SETS])
            if regime == "warm":
                capture.graph.replay()
            elif capture.calls < len(self._rotation.sets) or not self._rotation.full:
                self._flush_caches()  # these calls are too few to evict each other's data
            return 1e6 * self._replay_seconds(capture) / capture.calls

    def outputs(self, regime: Regime) -> Iterator[OutputTensors]:
        """Take one more sample over poisoned memory, and yield the outputs of random calls, copied on the stream at once."""
        if regime == "eager" and not self._eager_sampled:
            return
        with torch.cuda.stream(self._stream):
            watched = self._rotation.watch_some()
            capture = self._captures.get(regime)
            taken = self._judged_calls() if capture is None else self._judged_replay(capture)
            self._stream.synchronize()
            self._rotation.check(watched)
        yield from taken

    def _judged_replay(self, capture: Capture) -> list[OutputTensors]:
        """Replay a graph whose outputs are poisoned, and return copies of the last outputs of random sets."""
        for outputs, inputs in zip(capture.outputs, capture.sets, strict=True):
            poison_outputs(outputs, inputs)
        self._rotation.contents.renew(capture.sets, all_of_it=True)  # an output may be a view of an input, which is poisoned then
        judged = sorted(self._rotation.judge_some(len(capture.sets)))
        for index in judged:
            self._rotation.contents.load(capture.sets[index], self._rotation.reference.inputs)
        capture.graph.replay()
        taken = [duplicate(capture.outputs[index]) for index in judged]
        self._rotation.check([capture.sets[index] for index in judged])
        return taken

    def _judged_calls(self) -> list[OutputTensors]:
        """Make the eager calls of a sample, poison the outputs of each, and return copies of those of random calls."""
        judged, taken = self._rotation.judge_some(self._eager_calls), []
        for call in range(self._eager_calls):
            inputs = self._rotation.next()
            if call in judged:
                self._rotation.contents.load(inputs, self._rotation.reference.inputs)
            outputs = self._candidate(inputs)
            if call in judged:
                taken.append(duplicate(outputs))
                self._rotation.check([inputs])
            poison_outputs(outputs, inputs)
            self._rotation.contents.renew([inputs])
        return taken

    def _prepare_capture(self, sets: list[Inputs], most: int) -> Capture:
        """Capture one rotation (at most ``most`` calls), and capture again with more calls if its replay is too short to time."""
        capture = self._capture(sets, min(len(sets), most))
        self._replay_seconds(capture)  # the first replay also uploads the graph
        needed = _calls(self._replay_seconds(capture) / capture.calls, GPU_SAMPLE_SECONDS)
        if len(sets) > 1 and (not self._rotation.full or needed <= len(sets)):
            needed = min(needed, len(sets))  # a second pass over so few sets would find them in the cache
        elif len(sets) > 1:
            needed = min(math.ceil(needed / len(sets)), max(1, MOST_CALLS // len(sets))) * len(sets)  # whole passes
        if needed > capture.calls:
            del capture  # two graphs would take twice the memory
            capture = self._capture(sets, needed)
            self._replay_seconds(capture)
        return capture

    def _capture(self, sets: list[Inputs], calls: int) -> Capture:
        used = sets[: min(calls, len(sets))]
        graph = torch.cuda.CUDAGraph()
        return Capture(graph, calls, used, capture(self._candidate, used, calls, graph, self._stream))

    def _replay_seconds(self, capture: Capture) -> float:
        """Return the device time of one replay in seconds."""
        with torch.cuda.stream(self._stream):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(int(2e9 * (50e-6 + 2 * capture.launch_seconds)))  # noqa: SLF001 - cycles, at about 2 GHz
            start.record()
            began = time.perf_counter()
            capture.graph.replay()
            # Capped, because one slow launch must not block the stream for long at the next sample.
            capture.launch_seconds = min(time.perf_counter() - began, 5e-3)
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _called_seconds(self) -> float:
        """Return the median time of a few calls from Python in seconds, each over flushed caches.

        A sleeping kernel comes first, so that what the host enqueues before it waits for the device takes no time on the device.
        """
        found = []
        for _ in range(CALLED):
            inputs = self._rotation.next()
            self._flush_caches()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(int(2e9 * min(self._host_seconds, 5e-3)))  # noqa: SLF001 - cycles, at about 2 GHz
            outputs = self._timed_calls([inputs], start, end)
            self._stream.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
            poison_outputs(outputs, inputs)
            self._rotation.contents.renew([inputs])
        return statistics.median(found)

    def parts(self, regime: Regime) -> Iterator[float | None]:
        """Take one sample, of calls from Python part by part.

        Each part is timed, and the contents change between parts. The sample counts as all parts taking the median time: what
        else the host does then slows some parts down, not the sample. The outputs of the last call are poisoned. The device is
        awaited before each part, since otherwise the host would make its calls while the device still changes contents, and host
        time would not be seen.
        """
        if regime != "eager":
            yield self.sample(regime)
            return
        self._eager_sampled = True
        timed, calls = [], self._eager_calls
        left = calls
        while left:
            # Garbage collection would charge one call with the garbage of all others.
            with one_core(), torch.cuda.stream(self._stream), cuda.no_garbage_collection():
                sets = [self._rotation.next() for _ in range(min(left, self._eager_part))]
                self._stream.synchronize()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                outputs = self._timed_calls(sets, start, end)
                left -= len(sets)
                if not left:
                    poison_outputs(outputs, sets[-1])
                outputs = {}  # not held while the other candidates take their parts
                self._rotation.contents.renew(sets)
                self._stream.synchronize()
            timed.append(start.elapsed_time(end) / 1e3 / len(sets))
            yield None
        seconds = statistics.median(timed)
        if calls * seconds > LONG_SAMPLE_SECONDS:  # slower than when the number of calls was chosen
            self._choose_eager_calls(seconds, LONG_SAMPLE_SECONDS)
        yield 1e6 * seconds

    def _waited_seconds(self) -> float:
        """Return the seconds of a call until the device has finished."""
        start = time.perf_counter()
        self._candidate(self._rotation.next())
        self._stream.synchronize()
        return time.perf_counter() - start

    def _choose_eager_calls(self, seconds: float, sample_seconds: float) -> None:
        """Choose the number of calls of a part and of a sample from Python, from the time of a call and of a sample."""
        slow = seconds >= LONG_SAMPLE_SECONDS
        self._eager_part = 1 if slow else min(len(self._rotation.sets), EAGER_CALLS)
        least, largest = (1, 1) if slow else EAGER_PARTS
        self._eager_calls = self._eager_part * min(largest, max(least, _calls(self._eager_part * seconds, sample_seconds)))

    def _timed_calls(self, sets: Sequence[Inputs], start: torch.cuda.Event, end: torch.cuda.Event) -> OutputTensors:
        """Call once on each set between two events, and return the outputs of the last call."""
        if sets[0].differentiable:
            outputs: OutputTensors = {}
            start.record()
            for inputs in sets:
                outputs = self._candidate(inputs)
            end.record()
            return outputs
        # The timed loop calls the public function directly, without code of the workbench in between.
        call, result = self._candidate.call, None
        with torch.no_grad():
            start.record()
            for inputs in sets:
                result = call(**inputs.arguments)
            end.record()
        return self._candidate.name_outputs(result, sets[-1].arguments)

    def _flush_caches(self) -> None:
        """Evict everything from the last-level cache by writing a buffer of three times its size."""
        if self._flush is None:
            size = int(CACHES * describe(str(self._device)).cache_bytes)
            self._flush = torch.empty(size, dtype=torch.int8, device=self._device)
        self._flush.zero_()

    def _measure_peak(self) -> int:
        """Return the peak of PyTorch's allocated bytes during one call, minus the bytes that were allocated before it.

        The call is made from Python after warming up, outside of any graph. Inputs and incoming gradients are allocated before
        it and do not count. Everything that the call allocates counts: outputs, workspaces, and with a backward pass the saved
        tensors and the gradients of the inputs. Memory that a variant caches between calls does not count, nor does memory that a
        library allocates without PyTorch's allocator.
        """
        gc.collect()  # if garbage of earlier calls were freed during this call, the peak would come out too low
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        outputs = self._candidate(self._rotation.next())
        self._stream.synchronize()
        peak = torch.cuda.max_memory_allocated(self._device) - before
        del outputs
        return peak


def capture(
    candidate: Candidate, sets: Sequence[Inputs], calls: int, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream
) -> list[OutputTensors]:
    """Capture ``calls`` calls in a graph, on the sets in turn, and return the outputs of the last call on every set.

    Raises:
        CaptureFailed: The candidate raised during the capture. The message holds its error.
    """
    outputs: list[OutputTensors] = [{} for _ in sets]

    def call_all() -> None:
        for call in range(calls):
            outputs[call % len(sets)] = candidate(sets[call % len(sets)])

    gc.collect()  # frees the memory that garbage holds, so that every candidate finds the same free memory
    try:
        cuda.capture(call_all, graph, stream)
    except Exception as error:
        raise CaptureFailed(f"cannot be captured in a CUDA graph: {in_a_line(error)}") from error
    return outputs


def _calls(seconds: float, sample_seconds: float) -> int:
    """Return the number of calls of this length that fill a sample."""
    return max(1, min(MOST_CALLS, math.ceil(sample_seconds / max(seconds, 1e-9))))
