"""Checks of a variant that are made once per study, since they take many calls: races, views, single gradients, torch.compile.

``measure/timing.py`` calls :func:`examine_once` at the first case of a variant in each direction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from onelaunch.errors import OneLaunchError, VariantResultError
from onelaunch.operation import AUTO, Case, Direction, Operation
from onelaunch.wording import in_a_line
from onelaunch.workbench.result import Verdict
from onelaunch.workbench.verify.bounds import SLACK, norm_error, scale_of
from onelaunch.workbench.verify.calls import Candidate, Inputs, OutputTensors, duplicate
from onelaunch.workbench.verify.examine import (
    Findings,
    bundles_of,
    call_with_views,
    changed_inputs,
    check_groups,
    check_slices,
    own_stream,
    same_bits,
)
from onelaunch.workbench.verify.gate import Judge, with_tolerances
from onelaunch.workbench.verify.memory import odd_results, reused
from onelaunch.workbench.verify.reference import Reference, Rounded, baseline_differences, oracle_results
from onelaunch.workbench.verify.switches import unchanged_switches
from onelaunch.workbench.verify.views import expandable, expanded, moved, slices

CALLS = 20
"""Number of calls with equal inputs.

They find a race that is wrong in one call of 5 with a chance of 99 %, in one of 20 with 64 %, and in one of 100 with 18 %. To
find the last one with a chance of 98 %, 390 calls would be needed, nearly 20 times as many; see :func:`calls_needed`.
"""

SECONDS = 2.0
"""Seconds in one direction after which no more calls with equal inputs are made, and a note says how many there were."""

ROUNDINGS = 8
"""Number of contents at which PyTorch's rounding errors are taken if results for expanded inputs differ by more than is usual.

With rows that are all alike, a single sum may decide all elements of a result, and PyTorch may round it well by chance. The
largest error of 8 is smaller than half of their root mean square with a chance of 0.05 %, if errors are normally distributed.
"""

_ODD = 3
"""Elements beside a slice, so that it is not aligned to 16 bytes. The gate itself uses slices that are aligned."""

SHAPES = 256
"""Largest number of times that PyTorch compiles the same function.

Beyond its own limit of 8, a function that must be traced as a whole raises an error, which would count against the variant.
"""


_MOST_OF_A_PEER = 0.45
"""Largest error of a peer in each of two calls with alike rows, in parts of the result: zeros in its place are then found."""

_MOSTLY_ROUNDED = 0.1
"""Allowed error of PyTorch's form, in parts of the result, above which a peer's is not held to :data:`_MOST_OF_A_PEER`.

What such a call returns is a rounding of terms that cancel, and that of a peer that is several times less accurate may be larger
than the result. (With expanded inputs the gradient of a decay's bias in fla's chunked layer is off by 1.1 times the result, where
0.47 times the result is PyTorch's allowed error.)
"""


def calls_needed(rate: float, chance: float) -> int:
    """Return how many calls find, with a chance, a variant that is wrong at a rate: ``calls_needed(0.01, 0.98)`` is 390.

    Only tests call it; they check the chances that :data:`CALLS` states.
    """
    return math.ceil(math.log1p(-chance) / math.log1p(-rate))


def examine_once(
    judge: Judge,
    operation: Operation[..., Any],
    case: Case,
    *,
    variant: str,
    device: torch.device | str = "cpu",
    directions: Sequence[Direction] = ("forward",),
    seed: int = 0,
    calls: int = CALLS,
) -> Verdict:
    """Judge what takes too many calls to be asked at every case, at one case of a variant, usually the first of a study.

    - Calls with equal inputs return equal bits, or each of them passes.
    - Inputs that are slices without alignment, or expanded, give the right results. A refusal (an
      :class:`~onelaunch.errors.ArgumentError` or :class:`~onelaunch.errors.VariantUnsupported`) is a note.
    - Gradients are right if they come in through each of several results alone, and if only one input asks for one.
    - A variant with the capability ``compiles`` is right in a function that ``torch.compile`` compiles.

    Args:
        judge: Judge whose cache of oracle outputs is used.
        operation: Operation to compute.
        case: Sizes, dtype and options.
        variant: Name of the variant. It should have passed :func:`~onelaunch.workbench.verify.judge` at this case.
        device: Device to run on.
        directions: Directions to examine.
        seed: Seed of the inputs.
        calls: Number of calls with equal inputs.

    Raises:
        Exception: Any exception of the variant. :func:`onelaunch.workbench.verify.calls.status_of` classifies it.
    """
    facts = None if variant == AUTO else operation.get(variant).capabilities
    candidate, compiles = Candidate.variant(operation, variant), facts is not None and facts.compiles
    alone = facts is None or not facts.recompiles  # each set of strides would be compiled anew, which takes seconds

    def judged(tolerance: float | None) -> Verdict:
        references = (
            judge.reference(operation, case, device=device, direction=direction, seed=seed).within(tolerance)
            for direction in directions
        )
        return _examined_once(operation, candidate, references, torch.device(device), calls, compiles=compiles, alone=alone)

    return with_tolerances(judged, judge.tolerances_of(operation, variant))


def _examined_once(
    operation: Operation[..., Any],
    candidate: Candidate,
    references: Iterable[Reference],
    device: torch.device,
    calls: int,
    *,
    compiles: bool,
    alone: bool,
) -> Verdict:
    """Make the checks with the reference of each direction, until one of them finds a problem."""
    found = Findings()
    notes: list[str] = []
    with unchanged_switches() as switched:
        for reference in references:
            notes += [note for note in reference.notes if note not in notes]
            context, finish = own_stream(device)
            try:
                with context:
                    _examine_direction(operation, candidate, reference, found, finish, calls, compiles=compiles, alone=alone)
            except VariantResultError as error:  # the call itself found its outputs to be wrong, so this is no failure to run
                found.add([str(error)])
            if found.problems:
                break
    found.add(switched.problems)
    notes += [note for note in (*found.notes, *switched.notes) if note not in notes]
    return Verdict(ok=not found.problems, problems=tuple(found.problems), notes=tuple(notes))


def _examine_direction(
    operation: Operation[..., Any],
    candidate: Candidate,
    reference: Reference,
    found: Findings,
    finish: Callable[[], None],
    calls: int,
    *,
    compiles: bool,
    alone: bool,
) -> None:
    """Make all checks in one direction, or only the first if it finds a problem, which the others would meet again.

    With ``alone``, each input is expanded alone too.
    """
    _check_repetition(candidate, reference, found, finish, calls)
    if found.problems:
        return
    inputs = reference.inputs.clone()
    # A contract may exclude slices for bundles alone.
    for bundles in (True, False) if bundles_of(inputs) else (False,):
        if check_slices(candidate, reference, slices(inputs, _ODD, bundles=bundles), found, finish):
            break
    names = expandable(inputs) if alone else ()
    for only in (None, *(names if len(names) > 1 else ())):
        _check_expanded(operation, candidate, reference, found, finish, only)
        if found.problems:
            break
    _check_gradients_one_by_one(candidate, reference, found, finish)
    if compiles:
        _check_compiled(candidate, reference, found, finish)


def _check_repetition(
    candidate: Candidate, reference: Reference, found: Findings, finish: Callable[[], None], calls: int = CALLS
) -> None:
    """Call several times with equal inputs. Calls whose bits differ from those of the first are judged."""
    inputs = reference.inputs.clone()
    first: OutputTensors = {}
    copies: OutputTensors = {}
    differing = 0
    start = time.perf_counter()
    for index in range(1, calls + 1):
        outputs = candidate(inputs)
        finish()
        if odd := odd_results(outputs):
            found.add(odd)
            return
        if index == 1:
            first, copies = outputs, duplicate(outputs)
        else:
            found.add(reused([first], outputs, [inputs]))
        if index == 1 or not same_bits(outputs, copies):
            differing += index > 1
            if problems := reference.compare(outputs)[1]:
                found.add(changed_inputs(inputs, reference.inputs))  # which would explain it
                found.add(problems, f"In call {index} of {calls} with equal inputs: ")
                return
        if index == 1:
            start = time.perf_counter()  # the first call may compile
        elif index < calls and time.perf_counter() - start > SECONDS:
            found.note(f"Only {index} of {calls} calls with equal inputs were made, since they took {SECONDS:g} s.")
            break
    if differing:
        found.note(f"{differing} calls with equal inputs returned other bits than the first; each of them passed.")
    found.add(changed_inputs(inputs, reference.inputs))


def _check_expanded(
    operation: Operation[..., Any],
    candidate: Candidate,
    reference: Reference,
    found: Findings,
    finish: Callable[[], None],
    only: str | None = None,
) -> None:
    """Call with expanded inputs, and with contiguous inputs of the same contents, and compare the results.

    With ``only``, one argument alone is expanded. Where all rows of all inputs are alike, a result may not depend on how an input
    is read: if all channels of a head are equal, its norm takes away all that decays do. It does depend on it where the rows of
    the other inputs differ.

    The results for contiguous inputs count as right, since the gate has judged such a call. Each of the two calls may have the
    error that the reference allows, or the one that :func:`_errors_where_rows_are_alike` returns if that is larger. A peer with a
    tolerance of its own may have as many times the latter as that tolerance is of the gate's, up to :data:`_MOST_OF_A_PEER` where
    PyTorch's is below :data:`_MOSTLY_ROUNDED`.
    """
    given, expected = call_with_views(candidate, expanded(reference.inputs, only), "expanded tensors", found)
    if given is None or expected is None:
        return
    finish()
    said = "With expanded inputs" if only is None else f"With {only} expanded"
    suspects: dict[str, tuple[float, float]] = {}
    for name, value in expected.items():
        view = given.get(name)
        if value is None or view is None or name not in reference.allowed:
            if (value is None) != (view is None):
                found.add([f"{said}: {name} is {'missing' if view is None else 'there'}, unlike with contiguous inputs."])
            continue
        error = norm_error(view.double(), value.double(), value.dtype) if view.shape == value.shape else math.inf
        if not error <= 2 * reference.allowed[name]:
            suspects[name] = error, scale_of(value.double(), value.dtype) if value.numel() else 1.0
    given = expected = None  # the memory may be needed to judge them
    alike: dict[str, float] = {}
    if any(math.isfinite(error) for error, _ in suspects.values()):
        alike = _errors_where_rows_are_alike(operation, reference, only, found)
    for name, (error, scale) in suspects.items():
        rounded = alike.get(name, 0.0) / scale
        peers = min(reference.times_gate.get(name, 1.0) * rounded, _MOST_OF_A_PEER if rounded < _MOSTLY_ROUNDED else math.inf)
        allowed = 2 * max(reference.allowed[name], rounded, peers)
        if not error <= allowed:
            against = "norm-wise, against contiguous inputs of the same contents"
            found.add([f"{said}: {name} is off by {error:.2e}; {allowed:.2e} is allowed ({against})."])


def _errors_where_rows_are_alike(
    operation: Operation[..., Any], reference: Reference, only: str | None, found: Findings
) -> dict[str, float]:
    """Return by name the largest norm that the error of a call with expanded inputs may have.

    The tolerances of the reference hold for its own inputs, whose rows are independent. The rows of expanded inputs are all
    alike, so that the terms of a sum may cancel, by chance or because they must: if all channels of a head are equal, its norm
    takes away what the head has in common, and the gradients of queries, keys and decays are zero but for the norm's epsilon.
    Roundings of the terms are then large against the result, or all that is left of it. They do not become smaller with it, so
    errors are compared as they are, not as fractions of a result that says nothing about them. The rule is that of the gate, at
    such contents: twice the error of plain PyTorch in the same dtype, plus the slack. The error is the largest of calls with
    expanded inputs and with contiguous ones, at these contents and at others that differ from them by the last bit of every
    number, where roundings are others: see :data:`ROUNDINGS`. Contents do not count if they make the exact result more than twice
    as large as at first, or as PyTorch's first error, since more may be rounded there.

    If PyTorch's form cannot run, such as for lack of memory, the error is the largest that the reference allows to a result of
    its own inputs, whose terms are about as large.

    A wrong result stays apart from a rounded one: roundings of a relative size u make an error of about u of the terms that are
    summed, and terms from wrong places one about as large as the terms. No cap applies, since it is one for results about as
    large as their terms. A result of zeros in the place of one that is not small is found where PyTorch's error is below a
    quarter of it.

    Args:
        operation: Operation that is computed.
        reference: Reference whose inputs are expanded; they stay as they are.
        only: Name of the argument that is expanded alone; ``None`` for all together.
        found: Findings, which get a note if PyTorch's form cannot run.
    """
    if only not in reference.rounded:
        reference.rounded[only] = _rounded(operation, reference.inputs, only)
    rounded = reference.rounded[only]
    if rounded.failure:
        found.note(f"PyTorch's own results for expanded tensors are not fully known, since it failed: {rounded.failure}")
    return {
        name: 2 * rounded.errors[name] + SLACK * rounded.scales[name]
        if name in rounded.errors
        else reference.allowed[name] * float(torch.linalg.vector_norm(expected))
        for name, expected in reference.expected.items()
        if expected is not None
    }


def _rounded(operation: Operation[..., Any], inputs: Inputs, only: str | None) -> Rounded:
    """Return the errors of PyTorch's form for expanded inputs; see :func:`_errors_where_rows_are_alike`."""
    rounded = Rounded()
    most: dict[str, float] = {}
    try:
        for index in range(ROUNDINGS):
            forms = expanded(inputs if index == 0 else moved(inputs, index), only)
            exact = oracle_results(operation, forms[0])
            for form in forms:
                for name, (error, scale) in baseline_differences(operation, form, exact).items():
                    rounded.scales.setdefault(name, scale)
                    most.setdefault(name, 2 * max(scale, error if math.isfinite(error) else 0.0))
                    if math.isfinite(error) and scale <= most[name]:  # an overflow must not allow everything
                        rounded.errors[name] = max(rounded.errors.get(name, 0.0), error)
    except (OneLaunchError, RuntimeError) as failure:
        rounded.failure = in_a_line(failure)
    return rounded


def _check_gradients_one_by_one(candidate: Candidate, reference: Reference, found: Findings, finish: Callable[[], None]) -> None:
    """Let gradients come in through each result alone, and ask for the gradient of each input alone."""
    names = list(reference.inputs.output_gradients)
    differentiable = reference.inputs.differentiable
    if not differentiable:
        return
    if len(names) > 1:
        check_groups(candidate, reference, reference.inputs.clone(), [[name] for name in names], found, finish)
    for name in differentiable if len(differentiable) > 1 else ():
        with torch.compiler.set_stance("eager_on_recompile"):
            outputs = candidate(reference.inputs.wanting(name))
        finish()
        found.add(reference.only(f"grad {name}").compare(outputs)[1], f"With a gradient asked for {name} alone: ")


def _check_compiled(candidate: Candidate, reference: Reference, found: Findings, finish: Callable[[], None]) -> None:
    """Call in a function that ``torch.compile`` traces as a whole, and judge the results. No code is generated for the graph."""
    from torch._dynamo import config as dynamo  # slow to import

    compiled = replace(candidate, call=torch.compile(candidate.call, backend="aot_eager", fullgraph=True))
    try:
        with dynamo.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES):
            outputs = compiled(reference.inputs.clone())
        finish()
    except Exception as error:  # noqa: BLE001 - the variant said that it can, so any exception is a problem with it
        found.add([f"Under torch.compile: it raised {type(error).__name__}: {in_a_line(error)}"])
        return
    found.add(odd_results(outputs) or reference.compare(outputs)[1], "Under torch.compile: ")
