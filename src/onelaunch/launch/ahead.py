"""Compile many kernels at the same time, into the caches on disk in which launches look for them.

Triton and NVRTC each compile one kernel after the other within a thread, and large kernels take seconds. Kernels of Triton lie in
Triton's cache folder, those in CUDA C++ in ours. Both are found by content, so a launch finds what was compiled here.

Command ``onelaunch prebuild`` calls :func:`compile_all`.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any, NamedTuple

from onelaunch.cuda.compiler import compile_source, compiled_before
from onelaunch.device.architectures import find_architecture
from onelaunch.errors import CompileError, CompilerMissing, InspectionError
from onelaunch.launch.build import Build, CudaBuild
from onelaunch.launch.compile import compile_triton


class Compilation(NamedTuple):
    """Result of compiling one build ahead of its launches."""

    build: Build
    seconds: float
    """Duration in seconds, which is short for a kernel that was in the cache."""
    cached: bool
    """Flag that the kernel was in the cache already."""
    problem: str | None = None
    """Message of the error if the kernel did not compile."""


def compile_into_cache(build: Build, architecture: str) -> Compilation:
    """Compile one build for an architecture, unless its cache has the kernel already."""
    target = find_architecture(architecture)
    begin = time.perf_counter()
    cached, problem = False, None
    try:
        if isinstance(build, CudaBuild):
            if target.backend != "cuda":
                raise InspectionError(f"Kernel {build.name!r} is CUDA C++ and cannot be compiled for {target.name}.")
            cached = compiled_before(build.source, target.name)
            compile_source(build.source, target.name)
        else:
            with _cache_hits() as hits:
                compile_triton(build, target)
            cached = hits == [True]
    except (CompileError, CompilerMissing, InspectionError) as error:
        problem = str(error)
    return Compilation(build, time.perf_counter() - begin, cached, problem)


def compile_all(
    builds: Sequence[Build], architecture: str, processes: int, report: Callable[[Compilation, int, int], None]
) -> list[Compilation]:
    """Compile builds for an architecture in several processes, and report the progress after each.

    Args:
        builds: Builds to compile. Equal builds are compiled once.
        architecture: Name of the architecture, such as ``sm_90a``.
        processes: Number of processes.
        report: Callback in this process, with the compilation, the number of those that are done, and the number of all.

    Returns:
        One compilation for each distinct build, in the order of the builds.
    """
    first: dict[object, Build] = {}
    for build in builds:
        first.setdefault(build.key, build)
    distinct = list(first.values())
    done: dict[int, Compilation] = {}
    if processes < 2 or len(distinct) < 2:
        for index, build in enumerate(distinct):
            done[index] = compile_into_cache(build, architecture)
            report(done[index], len(done), len(distinct))
        return list(done.values())
    pool = ProcessPoolExecutor(min(processes, len(distinct)), mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(_compile_packed, *_packed(build), architecture): index for index, build in enumerate(distinct)}
        for future in as_completed(futures):
            index = futures[future]
            done[index] = _result(future.result, distinct[index])
            report(done[index], len(done), len(distinct))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # so that Ctrl-C need not wait for a compiler
    return [done[index] for index in range(len(distinct))]


def _result(compiled: Callable[[], Compilation], build: Build) -> Compilation:
    """Return what a process returned, with this process's build; a problem if the process died."""
    try:
        return compiled()._replace(build=build)
    except BrokenProcessPool:
        return Compilation(
            build, 0.0, cached=False, problem="a process died while kernels were compiled, perhaps for lack of memory"
        )


def _packed(build: Build) -> tuple[Build, str, str]:
    """Return a build that can be sent to another process, and the module and the name of its kernel (empty for CUDA C++)."""
    if isinstance(build, CudaBuild):
        return build, "", ""
    return replace(build, kernel=None), build.kernel.__module__, build.kernel.__name__


def _compile_packed(build: Build, module: str, kernel: str, architecture: str) -> Compilation:
    """Compile a packed build in another process; the compilation that it returns has no kernel, which could not be sent."""
    if isinstance(build, CudaBuild):
        return compile_into_cache(build, architecture)
    whole = replace(build, kernel=getattr(importlib.import_module(module), kernel))
    return compile_into_cache(whole, architecture)._replace(build=build)


@contextlib.contextmanager
def _cache_hits() -> Iterator[list[bool]]:
    """Yield a list to which each compilation by Triton in the block adds whether its kernel came from the cache."""
    from triton import knobs

    hits: list[bool] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        hits.append(cache_hit)

    before = knobs.compilation.listener
    knobs.compilation.listener = listen
    try:
        yield hits
    finally:
        knobs.compilation.listener = before
