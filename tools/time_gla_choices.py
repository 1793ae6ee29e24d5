"""Time the choices that gla's Hopper forward pass has for a call: warpgroups, segments, recomputed states and stages.

    ONELAUNCH_REPLAY=0 python tools/time_gla_choices.py --only "K=V=64 head" --sweep

Needs a Hopper GPU. For each call of :data:`CALLS` it prints one line for each choice: the median and the least time of a CUDA
graph over a flushed L2 cache (events included), the CTAs, the error against the float64 reference, and whether the bits are
those of the pass that does not cut T. The times in ``ops/gla/configure_hopper.py`` come from such lines. ``ONELAUNCH_REPLAY=0``
is needed because a replayed call would keep the first choice. The script exits with 1 if a result is wrong, and is run by hand.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from onelaunch import cuda
from onelaunch.operation import find_operation
from onelaunch.ops.gla import configure_hopper, launch_hopper
from onelaunch.ops.gla.configure_hopper import RecomputedChunk, Segments

GLA = find_operation("gla")

_LARGE = [{"B": 4, "T": 2048, "H": 16, "K": size, "V": size} for size in (32, 64, 128)]
_OTHERS = [
    {"B": 1, "T": 512, "H": 16, "K": 128, "V": 128}, {"B": 1, "T": 4096, "H": 16, "K": 128, "V": 128, "final_state": True},
    {"B": 2, "T": 2048, "H": 8, "K": 256, "V": 256},
]  # fmt: skip
_DECAYS = {"head": {"decay_per": "head"}, "channel": {}, "float32 channel": {"log_decay_dtype": "float32"}}

CALLS = {
    f"{call['B']}x{call['T']}x{call['H']} K=V={call['K']} {per}": {**call, **decay}
    for call in (*_LARGE, *_OTHERS)
    for per, decay in _DECAYS.items()
}
"""Options of the cases by name, which says what has a decay."""

FLUSHED_BYTES = 256 << 20
"""Bytes that are written before each replay, several L2 caches."""

LARGEST_ERROR = 6e-3
"""Largest norm-wise error of a right bfloat16 result."""


class Choice(NamedTuple):
    """Choice to force; ``None`` leaves it to the package."""

    name: str
    segments: int | None = None
    recompute: bool = True
    """Whether states at the starts of segments may be recomputed, in place of a launch that sums what segments add."""
    groups: int | None = None
    stages: int | None = None


def choices(*, sweep: bool) -> list[Choice]:
    """Return the choices to time: those before and since states are recomputed, or all numbers of segments, groups and stages."""
    found = [Choice("whole", segments=1), Choice("summed", recompute=False), Choice("chosen")]
    if sweep:
        for groups in (1, 2):
            found += [Choice(f"recomputed {n}, {groups} groups", n, groups=groups) for n in (2, 3, 4, 8)]
            found += [Choice(f"summed {n}, {groups} groups", n, recompute=False, groups=groups) for n in (2, 4, 8)]
        found += [Choice(f"whole, {n} stages", segments=1, stages=n) for n in (3, 4, 5, 6)]
    return found


@contextmanager
def forced(choice: Choice) -> Iterator[dict[str, int]]:
    """Force a choice in the ``with`` block, and yield a dictionary that will hold what a call took."""
    taken: dict[str, int] = {}
    pass_groups, pass_segments, pass_tiles = launch_hopper.pass_groups, launch_hopper.pass_segments, launch_hopper.pass_tiles

    def groups_of(ctas: int, chunks: int, sms: int, times: Any, recomputed: RecomputedChunk) -> int:
        allowed = recomputed if choice.recompute else configure_hopper.NOT_RECOMPUTED
        return choice.groups or pass_groups(ctas, chunks, sms, times, allowed)

    def segments_of(ctas: int, chunks: int, sms: int, chunk: float, recompute: int = 0) -> Segments:
        allowed = recompute if choice.recompute else 0
        if choice.segments is None:
            found = pass_segments(ctas, chunks, sms, chunk, allowed)
        elif allowed and choice.segments > 1:
            found = configure_hopper.recomputed_segments(chunks, choice.segments, allowed)[1]
        else:
            found = Segments(choice.segments)
        taken.update(ctas=ctas * found.count, segments=found.count, recompute=found.recompute)
        return found

    def tiles_of(*given: Any, **options: Any) -> Any:
        found = pass_tiles(*given, **options)
        return replace(found, stages=choice.stages, scores=choice.stages) if choice.stages else found

    with mock.patch.multiple(launch_hopper, pass_groups=groups_of, pass_segments=segments_of, pass_tiles=tiles_of):
        yield taken


def cold_times(call: Callable[[], object], rounds: int) -> list[float]:
    """Return the microseconds of replays of a captured call, each after the L2 cache was flushed."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    kept = cuda.capture(call, graph, stream)
    torch.cuda.synchronize()
    found = []
    for _ in range(rounds):
        flushed.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end))
    del kept
    return found


def report(name: str, options: dict[str, Any], asked: list[Choice], rounds: int) -> int:
    """Print a line for each choice at a call, and return the number of wrong results."""
    arguments = GLA.make_inputs(GLA.case("bfloat16", **options), torch.device("cuda"), 0).arguments
    right = GLA.reference(**{key: _exact(value) for key, value in arguments.items()})[0]
    whole: torch.Tensor | None = None
    wrong = 0
    for choice in asked:
        with forced(choice) as taken:
            try:
                first, second = GLA(**arguments, variant="hopper")[0], GLA(**arguments, variant="hopper")[0]
                times = cold_times(lambda: GLA(**arguments, variant="hopper"), rounds)
            except Exception as error:  # noqa: BLE001 - such as too few registers or too little shared memory for this choice
                sys.stdout.write(f"{name:38} {choice.name:24} {type(error).__name__}: {str(error)[:100]}\n")
                continue
        whole = first if whole is None else whole
        error = float((first.double() - right).norm() / right.norm())  # pyrefly: ignore[missing-attribute]
        same = torch.equal(first, whole)
        bad = error > LARGEST_ERROR or not torch.equal(first, second) or (taken.get("recompute", 0) > 0 and not same)
        wrong += bad
        said = f"{'equal' if same else 'other'} bits{'  WRONG' if bad else ''}"
        took = f"{statistics.median(times):7.1f} us, least {min(times):7.1f}"
        sys.stdout.write(f"{name:38} {choice.name:24} {took}  {taken}  error {error:.1e}  {said}\n")
        sys.stdout.flush()
    return wrong


def _exact(value: Any) -> Any:
    """Return a floating-point tensor in float64, and anything else as it is."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def main() -> None:
    """Time the choices of all calls whose names contain the given text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="text that the name of a call must contain")
    parser.add_argument("--sweep", action="store_true", help="time all numbers of segments, groups and stages")
    parser.add_argument("--rounds", type=int, default=17, help="number of replays of each choice")
    given = parser.parse_args()
    if os.environ.get("ONELAUNCH_REPLAY") != "0":
        sys.exit("Set ONELAUNCH_REPLAY=0: a replayed call would keep the first choice.")
    sys.stdout.write(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}\n")
    wrong = [
        report(name, options, choices(sweep=given.sweep), given.rounds) for name, options in CALLS.items() if given.only in name
    ]
    sys.exit(bool(sum(wrong)))


if __name__ == "__main__":
    main()
