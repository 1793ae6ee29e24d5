"""Time the configurations that swiglu's Hopper kernel has for few rows of x and NVFP4 weights, beside bfloat16 weights.

    python tools/time_nvfp4_choices.py --rows 64 --rows 48

Needs a Hopper GPU. For each number of rows it prints the times of ``auto`` with bfloat16 and with NVFP4 weights, then a line for
each configuration, the fastest first: its median time over a flushed L2 cache; how many times as fast as bfloat16 it is; the
columns of a tile, the warpgroups that share its rows (split), the chunks of a k-block, and whether codes are looked up or decoded
by arithmetic. ``narrow_config`` of ``ops/swiglu/configure_hopper.py`` should return the first one. All configurations are
compiled in parallel before anything is timed, and then timed in turn. The script is run by hand, and exits with 1 if a result is
wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

from onelaunch.cuda.compiler import compile_source
from onelaunch.kernels.gemm_sm90.config import GemmConfig
from onelaunch.operation import find_operation
from onelaunch.ops.swiglu import configure_hopper, launch_hopper
from onelaunch.ops.swiglu.launch_hopper import Scales

SWIGLU = find_operation("swiglu")

COLUMNS, CHANNELS = 4096, 7168
"""N and K of the calls, those of the study dual-gemm-swiglu."""

FLUSHED_BYTES = 256 << 20
"""Bytes that are written before each call, several L2 caches."""

LARGEST_DIFFERENCE = 5e-3
"""Largest norm-wise difference of a right result from that of ``auto``; each rounds h to bfloat16 once, 1.7e-3 by norm."""

SHARED_BYTES = 232448
"""Shared memory that a CTA can have on Hopper."""

Timed = Callable[[], float]


def configurations(rows: int) -> Iterator[tuple[str, GemmConfig]]:
    """Yield the configurations that a call can have, with their names: 2 to 4 consumer warpgroups and two stages or more."""
    formats = configure_hopper.Formats(torch.bfloat16, torch.bfloat16, nvfp4=True)
    first = configure_hopper.narrow_config(rows, CHANNELS, formats)
    for columns, split, chunks in product((32, 64), (1, 2, 3, 4), (1, 2, 4)):
        config = formats.config(first.b_rows, columns, split, chunks=chunks)
        if not 2 <= columns // 32 * split <= 4:
            continue
        try:
            fits = config.stages >= 2 and config.shared_bytes <= SHARED_BYTES
        except ValueError:  # no stage fits
            continue
        if fits:
            yield f"{columns} columns, split {split}, {chunks} chunks", config


def compiled(config: GemmConfig) -> str:
    """Compile the kernel of a configuration into the cache, and return the reason if that failed."""
    try:
        compile_source(launch_hopper.gemm_for(config, scaled=True, keep=False).kernel.source, "sm_90a")
    except Exception as error:  # noqa: BLE001 - such as too many registers
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


def timed(call: Callable[[], object], flushed: torch.Tensor) -> Timed:
    """Return a function that calls once over a flushed L2 cache, and returns the microseconds."""
    for _ in range(3):
        call()

    def once() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flushed.zero_()
        torch.cuda._sleep(1_000_000)  # noqa: SLF001 - gives the host time to enqueue the launch before the GPU reaches it
        start.record()
        call()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    return once


def arguments_of(rows: int, form: str) -> dict[str, Any]:
    """Return the arguments of a call with weights of a format, which the kernel may read before earlier launches end."""
    case = SWIGLU.case("bfloat16", M=rows, N=COLUMNS, K=CHANNELS, format=form, stacked=True, constant_weights=True)
    return dict(SWIGLU.make_inputs(case, torch.device("cuda"), 0).arguments)


def report(rows: int, found: dict[str, GemmConfig], rounds: int) -> int:
    """Print the lines of a number of rows, and return the number of wrong results."""
    dense, packed = arguments_of(rows, "dense"), arguments_of(rows, "nvfp4_weights")
    weights, x, wrong = packed["w_gate"], packed["x"], 0
    codes, blocks = weights.codes.chunk(2), weights.scales.chunk(2)
    scale = torch.ones((), device=x.device) if weights.global_scale is None else weights.global_scale
    scales = Scales.of(None, scale, scale, x.device)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=x.device)
    calls: dict[str, Timed] = {
        "bfloat16": timed(lambda: SWIGLU(**dense), flushed),
        "auto": timed(lambda: SWIGLU(**packed), flushed),
    }
    right = SWIGLU(**packed).float()
    for name, config in found.items():

        def call(config: GemmConfig = config) -> torch.Tensor:
            return launch_hopper.dual_gemm(config, x, codes, blocks, scales, constant_weights=True)[0]

        difference = float((call().float() - right).norm() / right.norm())
        if not difference <= LARGEST_DIFFERENCE:
            sys.stdout.write(f"M={rows}: {name} is WRONG, {difference:.1e} off\n")
            wrong += 1
            continue
        calls[name] = timed(call, flushed)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, once in calls.items():
            times[name].append(once())
    medians = {name: statistics.median(each) for name, each in times.items()}
    base = medians["bfloat16"]
    sys.stdout.write(f"M={rows}: bfloat16 {base:.2f} us, NVFP4 by auto {medians['auto']:.2f} us, {base / medians['auto']:.2f}x\n")
    for name in sorted(found.keys() & medians.keys(), key=lambda name: medians[name]):
        sys.stdout.write(f"    {medians[name]:7.2f} us {base / medians[name]:5.2f}x  {name}\n")
    sys.stdout.flush()
    return wrong


def main(argv: list[str] | None = None) -> int:
    """Time configurations, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, action="append", help="rows of x, at most 128 (64, 48, 32, 128, 16)")
    parser.add_argument("--rounds", type=int, default=15, help="number of times that each configuration is timed")
    parser.add_argument("--processes", type=int, default=8, help="number of processes that compile")
    asked = parser.parse_args(argv)
    every = {rows: dict(configurations(rows)) for rows in asked.rows or (64, 48, 32, 128, 16)}
    distinct = list(dict.fromkeys(config for each in every.values() for config in each.values()))
    with ProcessPoolExecutor(asked.processes, mp_context=get_context("spawn")) as pool:
        problems = dict(zip(distinct, pool.map(compiled, distinct), strict=True))
    wrong = 0
    for rows, found in every.items():
        wrong += report(rows, {name: config for name, config in found.items() if not problems[config]}, asked.rounds)
    for config, problem in problems.items():
        if problem:
            sys.stdout.write(f"not compiled: {config}: {problem}\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
