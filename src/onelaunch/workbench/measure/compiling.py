"""Every call of a study once, in several processes side by side, so that what is timed afterwards need not wait for compilers.

Triton, NVRTC and torch.compile keep what they compiled on disk, where the process that measures finds it. What a call tunes
itself to while others use the same device is not worth keeping; but the configurations that it tries can be compiled, a part of
them by each process.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch

from onelaunch.device.tools import package_installed
from onelaunch.operation import Direction, find_operation
from onelaunch.wording import in_a_line
from onelaunch.workbench.study import Study
from onelaunch.workbench.study.plan import PlannedCell
from onelaunch.workbench.verify.calls import Callee, Inputs, draw_gradients, make_inputs


class Place(NamedTuple):
    """A call of a study."""

    shape: str
    direction: Direction
    variant: str
    part: int = 0
    parts: int = 1
    """Number of parts of the configurations that Triton's autotuner would try; ``part`` is the one that is compiled."""


def places_to_compile(study: Study, cells: Iterable[PlannedCell], processes: int) -> Iterator[Place]:
    """Calls that can run here; one that tunes itself once for each process."""
    operation = find_operation(study.operation)
    for cell in cells:
        if cell.status is None and not cell.control:
            parts = processes if operation.get(cell.variant).capabilities.tunes else 1
            yield from (Place(cell.shape.name, cell.direction, cell.variant, part, parts) for part in range(parts))


def compile_ahead(
    study: Study, places: Iterable[Place], device: str, processes: int, tell: Callable[[Place, int, int], None]
) -> list[str]:
    """Make these calls, and tell after each how many of how many are done.

    Args:
        study: as it was loaded here; other processes receive a copy.
        places: calls of it.
        device: on which each process makes its calls, one at a time; it needs memory for as many as there are processes.
        processes: how many.
        tell: is called in this process.

    Returns:
        What could not be done, a line each. It is no error: the call is made again where it is measured.
    """
    waiting = list(places)
    failed: list[str] = []
    if not waiting:
        return failed
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    pool = ProcessPoolExecutor(min(processes, len(waiting)), mp_context=context)
    try:
        calls = {pool.submit(call_once, study, place, device): place for place in waiting}
        for done, call in enumerate(as_completed(calls), 1):
            if problem := call.result():
                failed.append(f"Not compiled ahead: {calls[call].variant} at {calls[call].shape}: {problem}")
            tell(calls[call], done, len(calls))
    except BrokenProcessPool:
        failed.append("A process ended while it compiled; what it and the others had left is compiled where it is measured.")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C waits for no compiler
    return failed


@contextlib.contextmanager
def part_of_tuning(part: int, parts: int) -> Iterator[None]:
    """Let Triton's autotuner try one of so many parts of each kernel's configurations, whatever it has tried before."""
    if parts == 1 or not package_installed("triton"):
        yield
        return
    from triton.runtime.autotuner import Autotuner

    prune, run, begun = Autotuner.prune_configs, Autotuner.run, set()

    def fewer(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        found = prune(self, *args, **kwargs)
        return found[part::parts] or found[:1]

    def anew(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in begun:
            begun.add(id(self))
            self.cache.clear()
        return run(self, *args, **kwargs)

    Autotuner.prune_configs, Autotuner.run = fewer, anew
    try:
        yield
    finally:
        Autotuner.prune_configs, Autotuner.run = prune, run


def call_once(study: Study, place: Place, device: str) -> str | None:
    """Make a call as it will be measured; what was wrong with it, or ``None``."""
    with part_of_tuning(place.part, place.parts):
        problem = _call(study, place, device)
    return problem if place.parts == 1 else None  # a part of the configurations may have none that can be launched


def _call(study: Study, place: Place, device: str) -> str | None:
    try:
        _make(study, place, torch.device(device))
    except Exception as error:  # noqa: BLE001 - whatever a variant raises is told where it is measured
        problem = f"{type(error).__name__}: {in_a_line(error)}"
    else:
        problem = None
    gc.collect()  # a process may have to make room for the others, and graphs are kept in cycles
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    return problem


def _make(study: Study, place: Place, device: torch.device) -> None:
    operation = find_operation(study.operation)
    case = study.case(study.shape(place.shape))
    inputs = make_inputs(operation, case, device, 0, place.direction)
    callee = Callee.variant(operation, place.variant)
    if inputs.differentiable:
        inputs.output_gradients = draw_gradients(callee(Inputs(inputs.arguments)), case.dtype, 0)
    callee(inputs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
