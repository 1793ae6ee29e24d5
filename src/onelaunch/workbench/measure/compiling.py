"""Make every call of a study once, in several processes at the same time, so that the measuring process need not compile.

The calls at the probes of operations come first. The measuring process then judges variants on the probes, while the others go on
with the calls that will be measured.

Triton, NVRTC and torch.compile cache compiled code on disk, where the measuring process finds it. Autotuning is left to the
measuring process, because processes that share a device disturb each other's times. But the configurations that an autotuner will
try can be compiled: each process compiles a part of them. ``running.py`` calls :func:`compile_ahead` with the calls of
:func:`calls_to_compile` and of ``probing.py``. Without processes it calls :func:`compile_probes` before variants are judged.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch

from onelaunch.cuda.compiler import compile_source
from onelaunch.device import hardware
from onelaunch.device.architectures import ARCHITECTURES, architecture_of
from onelaunch.device.tools import package_installed
from onelaunch.launch.build import Build, CudaBuild
from onelaunch.launch.side_by_side import compile_builds, current_architecture, jobs
from onelaunch.operation import Case, Direction, Operation, Variant
from onelaunch.operation.examples import builds_for_case
from onelaunch.wording import in_a_line
from onelaunch.workbench.measure.cores import give_way
from onelaunch.workbench.study import Study
from onelaunch.workbench.study.plan import PlannedCell
from onelaunch.workbench.verify.calls import Candidate, Inputs, draw_gradients, make_inputs
from onelaunch.workbench.verify.probes import Prepared
from onelaunch.workbench.verify.views import slices


class CompileCall(NamedTuple):
    """A call of a study that a process makes once, so that its kernels are compiled."""

    shape: str
    direction: Direction
    variant: str
    part: int = 0
    parts: int = 1
    """Number of parts of the configurations of Triton's autotuner; ``part`` is the index of the part for this call."""


class ProbeCall(NamedTuple):
    """Calls of a variant at one probe of its operation that a process makes once, so that their kernels are compiled."""

    shape: str
    """First shape at which the variant is measured."""
    direction: Direction
    """Direction of the calls. One with gradients includes the forward call without gradients."""
    variant: str
    probe: int
    """Index of the probe among those of the operation."""


PATIENCE = 300.0
"""Seconds without a finished call after which all processes are killed, and the remaining calls given up."""


def calls_to_compile(study: Study, cells: Iterable[PlannedCell], processes: int) -> Iterator[CompileCall]:
    """Yield the calls of variants that can run here; controls are left out. A variant that autotunes has one for each process.

    Variants that ``torch.compile`` compiles for each set of sizes come first. They take the longest, and the last call of all
    keeps one process busy while the others have nothing left to do. Of several cases for which a smaller one stands, only the
    first has a call.
    """
    later = []
    stood_for: set[tuple[str, Direction, str]] = set()
    for cell in cells:
        if cell.status is None and not cell.control:
            variant = study.operation_at(cell.shape).variants.get(cell.variant)  # none for auto
            if variant is not None and (smaller := variant.smaller_case(case := study.case(cell.shape))) is not case:
                same = cell.variant, cell.direction, str(smaller)
                if same in stood_for:
                    continue
                stood_for.add(same)
            parts = processes if variant is not None and variant.capabilities.tunes else 1
            calls = [CompileCall(cell.shape.name, cell.direction, cell.variant, part, parts) for part in range(parts)]
            if variant is not None and variant.capabilities.recompiles:
                yield from calls
            else:
                later += calls
    yield from later


def compile_ahead(
    study: Study,
    calls: Iterable[CompileCall | ProbeCall],
    device: str,
    processes: int,
    report: Callable[[CompileCall | ProbeCall, int, int], None],
    judge: Callable[[], None] = lambda: None,
) -> list[str]:
    """Make calls of a study in several processes, and report the progress after each.

    Args:
        study: Study of the calls. Each process receives a copy.
        calls: Calls to make, in this order, those at probes first.
        device: Device of all processes. Each process makes one call at a time, so the device needs memory for as many calls as
            there are processes.
        processes: Number of processes.
        report: Callback in this process, with the call, the number of calls that are done, and the number of all calls.
        judge: Callback in this process that judges variants on probes. It is called once the calls at probes are made, and other
            processes make the rest meanwhile.

    Returns:
        One line for each call that failed. These are no errors, because the call is made again when it is measured. Calls at
        probes are left out, because many are refused.
    """
    waiting = list(calls)
    failed: list[str] = []
    if not waiting:
        judge()
        return failed
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    pool = ProcessPoolExecutor(min(processes, len(waiting)), mp_context=context, initializer=give_way)
    try:
        futures = {pool.submit(call_once, study, call, device): call for call in waiting}
        workers = set(multiprocessing.active_children()) - before
        done, given_up = 0, ""
        for at_probes in (True, False):
            group = [future for future, call in futures.items() if isinstance(call, ProbeCall) is at_probes and not given_up]
            try:
                for future in _ended(group):
                    done += 1
                    call = futures[future]
                    if problem := future.result():
                        failed.append(f"Not compiled ahead: {call.variant} at {call.shape}: {problem}")
                    report(call, done, len(futures))
            except BrokenProcessPool:
                given_up = "A process died while it compiled."
            except TimeoutError as stuck:
                given_up = str(stuck)
                for worker in workers:
                    worker.kill()
            if at_probes:
                judge()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # so that Ctrl-C need not wait for a compiler
    return [*failed, f"{given_up} The calls that were left are compiled when they are measured."] if given_up else failed


def _ended(futures: Collection[Future[str | None]]) -> Iterator[Future[str | None]]:
    """Yield the futures of calls as they end.

    The waits are short, since Ctrl-C is raised in this thread by another one, and not before a wait is over.

    Raises:
        TimeoutError: No call ended for :data:`PATIENCE`.
    """
    waiting, latest = set(futures), time.monotonic()
    while waiting:
        done, waiting = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
        if done:
            latest = time.monotonic()
        elif time.monotonic() - latest > PATIENCE:
            raise TimeoutError(f"Processes that compile were ended, since none was done with its call within {PATIENCE:g} s.")
        yield from done


def compile_probes(asked: Iterable[tuple[Operation[..., Any], str, Sequence[Direction]]], device: torch.device) -> int:
    """Compile the kernels that the probes of operations need on a GPU, on threads, into the caches of Triton and of NVRTC.

    Each probe has another dtype, other flags or sizes that divide otherwise, so that one variant has dozens of kernels. What is
    not foreseen, such as kernels for a probe with transposed tensors, is compiled when the probe is judged.

    Args:
        asked: Operations, each with the name of a variant and the directions in which it will be judged.
        device: Device on which the probes will run. Nothing is compiled for a CPU.

    Returns:
        The number of distinct kernels that were asked for, which only tests read.
    """
    if device.type != "cuda" or not package_installed("triton"):
        return 0
    target = architecture_of(device) or current_architecture(by_triton=True)
    if target.name not in ARCHITECTURES:
        return 0
    found: dict[object, Build] = {}
    for operation, name, directions in asked:
        for probe in operation.listed_probes():
            if probe.refused:
                continue
            variant = operation.get(name)
            with contextlib.suppress(Exception):  # any code of a variant may fail on tensors without memory
                if variant.lists_kernels:
                    builds: list[Build] = [*_listed(variant, probe.case, directions[-1], device)]
                else:
                    builds = builds_for_case(probe.case, target.name, directions, [name])
                for build in builds:
                    found.setdefault(build.key, build)
    compile_builds(list(found.values()), target, jobs())
    return len(found)


class _TunedBefore(Exception):
    """Raised out of an autotuner whose choice is stored on disk, in all parts but the first: one process compiles that choice."""


@contextlib.contextmanager
def part_of_tuning(part: int, parts: int) -> Iterator[None]:
    """Let Triton's autotuner compile part number ``part`` of ``parts`` of each kernel's configurations, and time none of them.

    Times that are taken while several processes use the device would be useless, and take longer than the compilation. The first
    configuration that compiles runs, unless it needs more shared memory than the device has: then the results of the call hold no
    values, and the kernels after it are compiled all the same. The choices that each autotuner cached before are dropped at its
    first run in the block, so that it does compile this part, and no choice that is made here is stored on disk. Where one is
    stored already, such as by an earlier run of the study, it alone is compiled.
    """
    if parts == 1 or not package_installed("triton"):
        yield
        return
    from triton.runtime.autotuner import Autotuner

    replaced = _methods_for_a_part(part, parts)
    before = {name: getattr(Autotuner, name) for name in replaced}
    for name, function in replaced.items():
        setattr(Autotuner, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(Autotuner, name, function)


def _methods_for_a_part(part: int, parts: int) -> dict[str, Callable[..., Any]]:
    """Return replacements of methods of Triton's autotuner, by name, with which it compiles one part of the configurations."""
    from triton.runtime.autotuner import Autotuner, OutOfResources

    prune, look_up, run = Autotuner.prune_configs, Autotuner.check_disk_cache, Autotuner.run
    everything: dict[int, Any] = {}
    cleared: set[int] = set()

    def prune_to_part(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        everything[id(self)] = prune(self, *args, **kwargs)
        return everything[id(self)][part::parts] or everything[id(self)][:1]  # the autotuner needs at least one

    def look_up_everything(self: Autotuner, tuning_key: Any, configurations: Any, compile_them: Callable[[], None]) -> bool:
        try:
            look_up(self, tuning_key, everything[id(self)], _not_stored)
        except LookupError:
            compile_them()
            return False
        if part:
            raise _TunedBefore
        return True

    def compile_alone(self: Autotuner, *args: Any, config: Any, **kwargs: Any) -> list[float]:
        try:
            self.fn.run(*args, **{**kwargs, **config.all_kwargs(), "warmup": True})
        except Exception:  # noqa: BLE001 - the compiler refuses it, and the autotuner that measures sees that again
            return [float("inf")] * 3
        return [1.0] * 3

    def run_from_scratch(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in cleared:
            cleared.add(id(self))
            self.cache.clear()
        try:
            return run(self, *args, **kwargs)
        except (OutOfResources, _TunedBefore):
            return None

    return {
        "prune_configs": prune_to_part,
        "check_disk_cache": look_up_everything,
        "_bench": compile_alone,
        "run": run_from_scratch,
    }


def _not_stored() -> None:
    """Raise an error: no choice of the autotuner is stored on disk. Triton calls this in place of timing configurations."""
    raise LookupError


def call_once(study: Study, call: CompileCall | ProbeCall, device: str) -> str | None:
    """Make a call as it will be measured or judged, and return the problem if it failed, else ``None``."""
    if isinstance(call, ProbeCall):
        _call(study, call, device)
        return None  # the judge meets the problem again
    with part_of_tuning(call.part, call.parts):
        problem = _call(study, call, device)
    return problem if call.parts == 1 else None  # a part of the configurations may hold none that can be launched


def _call(study: Study, call: CompileCall | ProbeCall, device: str) -> str | None:
    """Make a call, free its memory, and return the first error that one of the two raised."""
    where = torch.device(device)
    problems: list[str | None] = []

    def make() -> None:
        with hardware.current(where):
            problems.append(_problem(lambda: _make(study, call, where)))

    # In a process whose GPU has met an illegal access, for example, making a GPU current may fail, before the call or after it,
    # and so may freeing memory. This run needs such a process no more.
    problems.append(_problem(make))
    gc.collect()  # the other processes need the memory, and CUDA graphs are held by reference cycles
    if where.type == "cuda":
        problems.append(_problem(torch.cuda.empty_cache))
    return next(filter(None, problems), None)


def _problem(function: Callable[[], object]) -> str | None:
    """Call a function, and return the error if it raised. It is reported again when the variant is measured."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - any code of a variant may fail
        return f"{type(error).__name__}: {in_a_line(error)}"
    return None


def _make(study: Study, call: CompileCall | ProbeCall, device: torch.device) -> None:
    """Make one call of a variant, with its backward pass if the direction asks for it. Its device is current.

    If the variant lists the kernels of its calls, they are compiled, and no call is made. If it names a smaller case that
    compiles the same, that one is called, with the loops that the study times.
    """
    shape = study.shape(call.shape)
    operation, case = study.operation_at(shape), study.case(shape)
    candidate = Candidate.variant(operation, call.variant)
    variant = operation.variants.get(call.variant)  # none for auto
    probe = operation.listed_probes()[call.probe] if isinstance(call, ProbeCall) else None
    if variant is not None and variant.lists_kernels:
        if builds := _listed(variant, case if probe is None else probe.case, call.direction, device):
            target = current_architecture(by_triton=False)
            for build in builds:
                compile_source(build.source, target.name)
        return
    if probe is not None:
        inputs = make_inputs(Prepared(operation, probe), probe.case, device, 0, call.direction)
        # As examine.py judges it: in both directions, then with slices, whose strides may need kernels of their own.
        candidate(Inputs(inputs.arguments))
        _call_with_gradients(candidate, inputs, probe.case)
        candidate(slices(inputs))
    else:
        smaller = case if variant is None else variant.smaller_case(case)
        inputs = make_inputs(operation, smaller, device, 0, call.direction)
        _call_with_gradients(candidate, inputs, smaller)
        if variant is not None and smaller is not case and call.direction == "forward":
            for regime in study.regimes:
                if regime in operation.loops:
                    operation.loops[regime](variant, inputs.arguments)  # making a loop runs it
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _listed(variant: Variant, case: Case, direction: Direction, device: torch.device) -> list[CudaBuild]:
    """Return the kernels that a variant lists for a call of a case; none if it cannot run that call."""
    query = variant.operation.query(case, str(device), grad=direction == "forward_backward")
    return [] if variant.why_not(query) is not None else variant.builds_of_case(case, device) or []


def _call_with_gradients(candidate: Candidate, inputs: Inputs, case: Case) -> None:
    """Call once and, if the inputs are differentiable, run the backward pass with gradients that the inputs then hold."""
    outputs = candidate.forward(inputs)
    if inputs.differentiable:
        inputs.output_gradients = draw_gradients(outputs, case.dtype, 0, inputs.through)
        candidate.backward(outputs, inputs)
