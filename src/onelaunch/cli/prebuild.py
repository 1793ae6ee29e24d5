"""Command ``onelaunch prebuild``: compile kernels ahead of their first launch, without a GPU, for containers and clusters."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from onelaunch import folders
from onelaunch.cli import output
from onelaunch.cli.arguments import parse_case
from onelaunch.device.architectures import find_architecture
from onelaunch.errors import ArgumentError, InspectionError
from onelaunch.launch.ahead import Compilation, compile_all
from onelaunch.launch.build import Build
from onelaunch.operation import DIRECTIONS, Operation, find_operation, operations
from onelaunch.operation.examples import builds_for_case, builds_of_examples
from onelaunch.workbench import quantities as q


def prebuild(
    operation: Annotated[
        str | None, typer.Argument(metavar="OPERATION", help="Name of the operation, such as gla.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Compile the kernels of all operations.")] = False,
    architecture: Annotated[
        list[str] | None,
        typer.Option("--arch", help="Architecture, such as sm_80, sm_90a or sm_100a. May be repeated.", show_default="sm_90a"),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="B=4,T=2048,...",
            help="Sizes and options of a call, whose kernels are compiled instead of those of the examples. May be repeated.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Dtype of the calls of --shape.")] = "bfloat16",
    variant: Annotated[
        list[str] | None,
        typer.Option("--variant", help="Compile only the kernels of this variant. May be repeated.", show_default=False),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Processes that compile.", show_default="one for each core")
    ] = None,
) -> None:
    """Compile kernels ahead of their first launch; no GPU is needed.

    The kernels lie in the cache folders of Triton and onelaunch afterwards, where the first call finds them. Without --shape the
    kernels of each variant's example calls are compiled. Copy the folders into a container, or run this command when it is built.
    Both machines need the same versions of onelaunch, PyTorch, Triton and NVRTC. The exit code is 1 if a kernel does not compile.

    Example: onelaunch prebuild gla --arch sm_90a --shape B=4,T=2048,H=16,K=128,V=128
    """
    if everything == (operation is not None):
        raise ArgumentError("Name one operation, as in onelaunch prebuild gla --arch sm_90a, or give --all for all of them.")
    if everything and (shape or variant):
        raise ArgumentError("--shape and --variant belong to one operation; name it in place of --all.")
    chosen = list(operations()) if operation is None else [find_operation(operation)]
    architectures = list(dict.fromkeys(find_architecture(name).name for name in architecture or ("sm_90a",)))
    for each in chosen:  # errors that name what is known, before the long part
        _ = [each.get(name) for name in variant or ()], [parse_case(each, text, dtype) for text in shape or ()]
    _check_compilers()
    console, failed = output.stdout(), 0
    for name in architectures:
        begin = time.perf_counter()
        with output.busy(f"Listing kernels for {name}"):
            builds = [build for each in chosen for build in _builds(each, name, shape or (), dtype, variant or ())]
        if not builds:
            raise ArgumentError(f"No variant that could run these calls on {name} has kernels of its own.")
        done = compile_all(builds, name, jobs or _cores(), _report)
        new = [each for each in done if not each.cached and each.problem is None]
        broken = [each for each in done if each.problem is not None]
        failed += len(broken)
        seconds = time.perf_counter() - begin
        there = sum(each.cached for each in done)
        console.print(f"{name}: compiled {q.plural(len(new), 'kernel')} in {seconds:.0f} s; in the cache already: {there}.")
        for each in broken:
            console.print(f"{each.build.name}: {each.problem}", markup=False)
    for folder in _cache_folders():
        console.print(f"cache: {folder}", soft_wrap=True, markup=False)
    if failed:
        raise typer.Exit(1)


def _builds(
    operation: Operation[..., Any], architecture: str, shapes: Sequence[str], dtype: str, variants: Sequence[str]
) -> Iterable[Build]:
    """Return the kernels of the calls that the options name, or of all examples."""
    if not shapes:
        return builds_of_examples(operation, architecture, variants)
    cases = [parse_case(operation, shape, dtype) for shape in shapes]
    return [build for case in cases for build in builds_for_case(case, architecture, DIRECTIONS, variants)]


def _check_compilers() -> None:
    """Raise an error if Triton only interprets kernels, since each kernel would then fail with the same message."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise InspectionError(
            "TRITON_INTERPRET=1 is set, so Triton interprets kernels and cannot compile them. Unset this environment variable."
        )


def _report(compilation: Compilation, done: int, total: int) -> None:
    """Print one line for a kernel on stderr: its place in the count, its name, and its duration."""
    state = "failed" if compilation.problem else "in the cache" if compilation.cached else f"{compilation.seconds:.1f} s"
    output.stderr().print(f"[{done}/{total}] {compilation.build.name}  {state}", markup=False, soft_wrap=True)


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cache_folders() -> list[str]:
    """Return the folders that hold compiled kernels: Triton's, and ours for CUDA C++."""
    from triton import knobs

    return [str(knobs.cache.dir), str(folders.cache_folder() / "cubins")]
