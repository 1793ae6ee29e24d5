"""Variants of ``toy_sum`` that pass verification, and then cheat, overwrite inputs or become slow while they are timed.

Tests of timing (``test_timing_contents.py`` and ``test_timing_replayed.py``) check that the workbench rejects or limits them.
Tests of supervised processes (``test_supervise.py`` and ``tests/cli/test_study_supervised.py``) use :func:`at_count`, whose
variants end or block the process in a chosen call. An instance of each class is a function of the checked call;
:func:`registered` makes it a variant for the length of a test.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onelaunch.workbench.verify.calls import make_inputs
from tests.workbench.toy import ToyCall, parallel, toy_case, toy_sum

Outputs = tuple[torch.Tensor, torch.Tensor]

VERIFYING_CALLS = 60
"""Number of calls after which a variant may think that it is timed: more than verification makes, fewer than timing does."""


@contextmanager
def registered(**variants: Callable[[ToyCall], Outputs]) -> Iterator[None]:
    """Register functions as variants of ``toy_sum`` under the given names, with hyphens for their underscores."""
    for name, function in variants.items():
        toy_sum.variant(name.replace("_", "-"))(function)
    try:
        yield
    finally:
        for name in variants:
            del toy_sum.variants[name.replace("_", "-")]


class ContentMemo:
    """Outputs kept by four numbers of ``x``. ``hits`` counts the calls that found theirs."""

    def __init__(self) -> None:
        self.kept: dict[tuple[float, ...], Outputs] = {}
        self.hits = 0

    def __call__(self, call: ToyCall) -> Outputs:
        flat = call.x.flatten()
        key = tuple(float(flat[at]) for at in (0, len(flat) // 3, len(flat) // 2, -1))
        if key in self.kept:
            self.hits += 1
        else:
            self.kept[key] = parallel(call)
        return tuple(part.clone() for part in self.kept[key])


class CountThenStash:
    """Outputs of an early call, returned for every call once there were so many that timing must have begun."""

    def __init__(self) -> None:
        self.calls = 0
        self.stash: Outputs | None = None

    def __call__(self, call: ToyCall) -> Outputs:
        self.calls += 1
        if self.calls <= VERIFYING_CALLS or self.stash is None:
            self.stash = tuple(part.clone() for part in parallel(call))
        return tuple(part.clone() for part in self.stash)


class StackInspection:
    """Outputs of the last verified call, returned wherever no function of the gate is among the callers."""

    def __init__(self) -> None:
        self.stash: Outputs | None = None

    def __call__(self, call: ToyCall) -> Outputs:
        frame = sys._getframe()
        while frame is not None and "workbench/verify/" not in frame.f_code.co_filename:
            frame = frame.f_back
        # Candidate.__call__ lies in verify/calls.py too; the gate itself is further out.
        gate = frame
        while gate is not None and not gate.f_code.co_filename.endswith("verify/gate.py"):
            gate = gate.f_back
        if gate is not None or self.stash is None:
            self.stash = tuple(part.clone() for part in parallel(call))
            return tuple(part.clone() for part in self.stash)
        return tuple(part.clone() for part in self.stash)


class EveryTenth:
    """Outputs that are computed in one call of ten once timing has begun, and returned again by the other nine."""

    def __init__(self) -> None:
        self.calls = 0
        self.kept: Outputs | None = None

    def __call__(self, call: ToyCall) -> Outputs:
        self.calls += 1
        if self.calls <= VERIFYING_CALLS or self.calls % 10 == 0 or self.kept is None:
            self.kept = parallel(call)
        return tuple(part.clone() for part in self.kept)


class NewestOnly:
    """Outputs that a thread computes after the call, which drops all work but the newest.

    While it is verified, the call computes them itself.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.work: tuple[ToyCall, Outputs] | None = None
        self.ready = threading.Event()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            self.ready.wait()
            self.ready.clear()
            if (work := self.work) is not None:
                time.sleep(0.001)  # later calls replace the work that waits meanwhile
                with torch.no_grad():
                    for into, part in zip(work[1], parallel(work[0]), strict=True):
                        into.copy_(part)

    def __call__(self, call: ToyCall) -> Outputs:
        self.calls += 1
        if self.calls <= VERIFYING_CALLS:
            return parallel(call)
        outputs = torch.empty_like(call.x), torch.empty_like(call.x[:, 0], dtype=torch.float32)
        self.work = (call, outputs)
        self.ready.set()
        return outputs


class SeedZeroOnly:
    """Correct outputs only for contents that seed 0, or the stale contents of the gate, give; zeros for all others."""

    def __init__(self, **sizes: int) -> None:
        self.known = [
            make_inputs(toy_sum, toy_case(**sizes), torch.device("cpu"), seed, "forward").arguments["x"] for seed in (0, 7919)
        ]

    def __call__(self, call: ToyCall) -> Outputs:
        if any(call.x.shape == known.shape and torch.equal(call.x, known) for known in self.known):
            return parallel(call)
        return torch.zeros_like(call.x), torch.zeros_like(call.x[:, 0], dtype=torch.float32)


class CarelessMutation:
    """A fast path that works in place, taken once the variant is warm."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: ToyCall) -> Outputs:
        self.calls += 1
        result = parallel(call)
        if self.calls > VERIFYING_CALLS:
            call.x.mul_(call.weight)
        return result


class Sabotage:
    """Correct outputs from a variant that, once timing has begun, overwrites the inputs of earlier calls, which others share."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: dict[int, torch.Tensor] = {}

    def __call__(self, call: ToyCall) -> Outputs:
        self.calls += 1
        result = parallel(call)
        if self.calls > VERIFYING_CALLS:
            for address, x in self.seen.items():
                if address != call.x.data_ptr():
                    x.zero_()
            self.seen[call.x.data_ptr()] = call.x
        return result


class SlowStart:
    """A correct variant that is fast for :data:`VERIFYING_CALLS` calls, and then takes a tenth of a second a call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: ToyCall) -> Outputs:
        self.calls += 1
        if self.calls > VERIFYING_CALLS:
            time.sleep(0.1)
        return parallel(call)


def at_count(count: int, act: Callable[[], Any]) -> Callable[[ToyCall], Outputs]:
    """Return a correct variant that calls ``act`` in its call number ``count``, for example to end or to block the process."""
    calls = []

    def variant(call: ToyCall) -> Outputs:
        calls.append(1)
        if len(calls) == count:
            act()
        return parallel(call)

    return variant
