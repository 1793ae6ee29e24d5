"""Make a call of a study once, in a process beside the one that measures, so that the measuring process need not compile.

Triton, NVRTC and torch.compile cache compiled code on disk, where the measuring process finds it. Autotuning is left to the
measuring process, because processes that share a device disturb each other's times. But the configurations that an autotuner will
try can be compiled: each process compiles a part of them. ``running.py`` passes the calls of :func:`calls_to_compile` to
``ahead.py``, whose processes make each by :func:`call_once`. Without processes it calls :func:`compile_probes` before variants
are judged on probes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from onelaunch.workbench.study import Study
from onelaunch.workbench.study.plan import PlannedCell
from onelaunch.workbench.verify.calls import Candidate, draw_gradients, make_inputs


class CompileCall(NamedTuple):
    """A call of a study that a process makes once, so that its kernels are compiled."""

    shape: str
    direction: Direction
    variant: str
    part: int = 0
    parts: int = 1
    """Most parts of the configurations of Triton's autotuner; ``part`` is the index of the part for this call."""

    @property
    def step(self) -> str:
        """The step in reports of the progress."""
        return "compile"


class Called(NamedTuple):
    """Outcome of a call."""

    problem: str | None = None
    """Error of a call that failed."""
    parts: int = 1
    """Number of parts into which the autotuner's configurations are to be divided; 1 if all its choices are stored."""


def calls_to_compile(
    study: Study, cells: Iterable[PlannedCell], processes: int, before: Iterable[PlannedCell] = ()
) -> tuple[list[CompileCall], list[CompileCall]]:
    """Return the calls of variants that can run here, those that take long and the others; controls are left out.

    Of a variant that autotunes it is the first part, which other parts may follow, as many as there are processes. Variants that
    ``torch.compile`` compiles for each set of sizes take the longest. If the last call of all were of them, it would keep one
    process busy while the others have nothing left to do.

    Args:
        study: Study of the cases.
        cells: Measurements of the cases that are compiled now.
        processes: Number of processes.
        before: Measurements of the cases that were compiled before. Of several cases for which the same smaller one is called,
            only the first has a call.
    """
    tuned, recompiled, others = [], [], []
    stood_for = {_smaller_call(study, cell) for cell in before if _runs(cell)}
    for cell in filter(_runs, cells):
        if (smaller := _smaller_call(study, cell)) is not None:
            if smaller in stood_for:
                continue
            stood_for.add(smaller)
        variant = study.operation_at(cell.shape).variants.get(cell.variant)  # none for auto
        facts = None if variant is None else variant.capabilities
        parts = processes if facts is not None and facts.tunes else 1
        group = tuned if parts > 1 else recompiled if facts is not None and facts.recompiles else others
        group.append(CompileCall(cell.shape.name, cell.direction, cell.variant, 0, parts))
    return [*tuned, *recompiled], others


def _runs(cell: PlannedCell) -> bool:
    """Return whether a planned measurement is one of a variant that can run here."""
    return cell.status is None and not cell.control


def _smaller_call(study: Study, cell: PlannedCell) -> tuple[str, str, Direction, str] | None:
    """Return a key of the call at a smaller case that is made ahead of a measurement; ``None`` if none stands for its case."""
    operation, case = study.operation_at(cell.shape), study.case(cell.shape)
    variant = operation.variants.get(cell.variant)  # none for auto
    if variant is None or variant.lists_kernels or (smaller := variant.smaller_case(case)) is case:
        return None
    return operation.name, cell.variant, cell.direction, str(smaller)


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
def part_of_tuning(part: int, parts: int) -> Iterator[set[int]]:
    """Let Triton's autotuner compile part number ``part`` of ``parts`` of each kernel's configurations, and time none of them.

    Times that are taken while several processes use the device would be useless, and take longer than the compilation. The first
    configuration that compiles runs, unless it needs more shared memory than the device has: then the results of the call hold no
    values, and the kernels after it are compiled all the same. The choices that each autotuner cached before are dropped at its
    first run in the block, so that it does compile this part, and no choice that is made here is stored on disk. Where one is
    stored already, such as by an earlier run of the study, it alone is compiled.

    Yields:
        A set that gets the number of configurations of each kernel whose choice is not stored.
    """
    counts: set[int] = set()
    if parts == 1 or not package_installed("triton"):
        yield counts
        return
    from triton.runtime.autotuner import Autotuner

    replaced = _methods_for_a_part(part, parts, counts)
    before = {name: getattr(Autotuner, name) for name in replaced}
    for name, function in replaced.items():
        setattr(Autotuner, name, function)
    try:
        yield counts
    finally:
        for name, function in before.items():
            setattr(Autotuner, name, function)


def _methods_for_a_part(part: int, parts: int, counts: set[int]) -> dict[str, Callable[..., Any]]:
    """Return replacements of methods of Triton's autotuner, by name, with which it compiles one part of the configurations.

    The number of configurations of each kernel that has no stored choice is added to ``counts``.
    """
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
        counts.add(len(everything[id(self)]))
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


def call_once(study: Study, call: CompileCall, device: str) -> Called:
    """Make a call as it will be measured. The problem of a part of a tuning is left out, and met again at the measurement."""
    with part_of_tuning(call.part, call.parts) as counts:
        problem = on_device(torch.device(device), lambda: _make(study, call, torch.device(device)))
    if call.parts == 1:
        return Called(problem)
    # A part may hold no configuration that can be launched. The call then ends there, and other parts may get further.
    return Called(parts=call.parts if problem else min(call.parts, max(counts, default=1)))


def on_device(device: torch.device, function: Callable[[], object]) -> str | None:
    """Call a function with its device as the current one, free its memory, and return the first error that one of them raised."""
    problems: list[str | None] = []

    def make() -> None:
        with hardware.current(device):
            problems.append(_problem(function))

    # In a process whose GPU has met an illegal access, for example, making a GPU current may fail, before the call or after it,
    # and so may freeing memory. This run needs such a process no more.
    problems.append(_problem(make))
    gc.collect()  # the other processes need the memory, and CUDA graphs are held by reference cycles
    if device.type == "cuda":
        problems.append(_problem(torch.cuda.empty_cache))
    return next(filter(None, problems), None)


def _problem(function: Callable[[], object]) -> str | None:
    """Call a function, and return the error if it raised. It is reported again when the variant is measured."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - any code of a variant may fail
        return f"{type(error).__name__}: {in_a_line(error)}"
    return None


def _make(study: Study, call: CompileCall, device: torch.device) -> None:
    """Make one call of a variant, with its backward pass if the direction asks for it. Its device is current.

    If the variant lists the kernels of its calls, they are compiled, and no call is made. If it names a smaller case that
    compiles the same, that one is called, with the loops that the study times.
    """
    shape = study.shape(call.shape)
    operation, case = study.operation_at(shape), study.case(shape)
    candidate = Candidate.variant(operation, call.variant)
    variant = operation.variants.get(call.variant)  # none for auto
    if variant is not None and variant.lists_kernels:
        if builds := _listed(variant, case, call.direction, device):
            target = current_architecture(by_triton=False)
            for build in builds:
                compile_source(build.source, target.name)
        return
    smaller = case if variant is None else variant.smaller_case(case)
    inputs = make_inputs(operation, smaller, device, 0, call.direction)
    outputs = candidate.forward(inputs)
    if inputs.differentiable:
        inputs.output_gradients = draw_gradients(outputs, smaller.dtype, 0, inputs.through)
        candidate.backward(outputs, inputs)
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
