"""Judge whether a variant is correct. Tests and studies share this check.

Users and tests call :func:`judge` and :func:`judge_control`. A study's run (``running.py``, ``measure/timing.py``) has a
:class:`Judge` of its own, as many tests have, and ``probes.py`` and ``repeated.py`` are given one. The timing judges timed
outputs by :func:`judge_outputs`, and tests judge outputs of their own calls by it.

Every output and every gradient must be as near to the float64 oracle as plain PyTorch in the same dtype
(:mod:`onelaunch.workbench.verify.reference`). The check is adversarial, so that a wrong variant cannot pass by luck: memory that
the variant allocates is poisoned, the contents of its inputs change between calls, and the last contents arrive late.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from onelaunch.device.hardware import free_memory
from onelaunch.errors import VariantResultError
from onelaunch.operation import Case, Control, Direction, Operation
from onelaunch.workbench.result import ComponentError, Verdict
from onelaunch.workbench.verify.calls import Candidate, Inputs, OutputTensors, make_inputs
from onelaunch.workbench.verify.examine import STALE_SEED, Findings, examine
from onelaunch.workbench.verify.memory import odd_results
from onelaunch.workbench.verify.reference import Reference, compute_reference
from onelaunch.workbench.verify.switches import unchanged_switches

_ALWAYS_CACHED = 3
"""Number of references that a :class:`Judge` caches whatever their size: those of the operation and its controls at one case."""


_PART_OF_FREE = 16
"""Share of the free memory, one part in so many, that references may take after :meth:`Judge.make_room`."""


class Tolerances(NamedTuple):
    """Norm-wise errors that are allowed a peer outside the gate: the fields of :class:`onelaunch.workbench.result.Verdict`."""

    own_tolerance: float | None = None
    timed_up_to: float | None = None


class Judge:
    """Judge of variants that caches the oracle's outputs, so that the variants of a case share them.

    Args:
        timed_up_to: Errors up to which incorrect variants of other projects are timed, by their names: the study's key of this
            name.
        keep_bytes: Most bytes that cached references may take. The least recently used are dropped first. The three used last
            always stay, as many as a case with its controls may need at a time.
        settle_seconds: Seconds for which the results of a candidate must not change after its last call; by default those of
            :func:`~onelaunch.workbench.verify.examine.examine`.
    """

    def __init__(
        self,
        keep_bytes: int = 1 << 30,
        settle_seconds: float | None = None,
        timed_up_to: Mapping[str, float] | None = None,
    ) -> None:
        self._timed_up_to = {} if timed_up_to is None else timed_up_to
        self._keep_bytes = keep_bytes
        self._settle_seconds = settle_seconds
        self._references: OrderedDict[tuple[Any, ...], Reference] = OrderedDict()

    def reference(
        self,
        operation: Operation[..., Any],
        case: Case,
        *,
        device: torch.device | str = "cpu",
        direction: Direction = "forward",
        seed: int = 0,
        control: Control | None = None,
    ) -> Reference:
        """Return the reference of a case, from the cache or computed by the oracle."""
        device = torch.device(device)
        # The options as a string, since a value may be a list, which cannot be hashed.
        described = (case.dtype, *sorted(case.sizes.items()), repr(sorted(case.options.items())))
        key = (operation.name, control and control.name, str(device), direction, seed, *described)
        if key in self._references:
            self._references.move_to_end(key)
            return self._references[key]
        found = compute_reference(operation, case, device, seed, direction, control)
        self._references[key] = found
        self._drop(self._keep_bytes, _ALWAYS_CACHED)
        return found

    def make_room(self, device: torch.device) -> None:
        """Drop the least recently used references, all if need be, until the others take a small part of what is free.

        ``measure/timing.py`` calls it between the verification and the captures, which are of other contents.
        """
        self._drop(free_memory(device) // _PART_OF_FREE, 0)

    def _drop(self, keep_bytes: int, always: int) -> None:
        """Drop references until they take ``keep_bytes``, but for the ``always`` that were used last."""
        while len(self._references) > always and sum(each.nbytes for each in self._references.values()) > keep_bytes:
            self._references.popitem(last=False)

    def truth(self, *arguments: Any, **options: Any) -> Reference:
        """Return what :meth:`reference` returns, which is the new name of this method, after a warning."""
        warnings.warn("Judge.truth is now Judge.reference; the old name will go away.", DeprecationWarning, stacklevel=2)
        return self.reference(*arguments, **options)

    def judge(
        self,
        operation: Operation[..., Any],
        case: Case,
        *,
        variant: str,
        device: torch.device | str = "cpu",
        directions: Sequence[Direction] = ("forward",),
        seed: int = 0,
    ) -> Verdict:
        """Judge a variant as :func:`judge` does."""
        candidate = Candidate.variant(operation, variant)
        return with_tolerances(
            lambda tolerance: self._judge(operation, case, candidate, None, device, directions, seed, tolerance),
            self.tolerances_of(operation, variant),
        )

    def tolerances_of(self, operation: Operation[..., Any], variant: str) -> Tolerances:
        """Return the tolerances for a peer outside the gate; ``None`` for other variants, controls and ``auto``."""
        found = operation.variants.get(variant)
        if found is None or (found.capabilities.requires is None and found.capabilities.own_tolerance is None):
            return Tolerances(None, None)
        return Tolerances(found.capabilities.own_tolerance, self._timed_up_to.get(variant))

    def judge_control(
        self,
        operation: Operation[..., Any],
        case: Case,
        control: str,
        *,
        device: torch.device | str = "cpu",
        directions: Sequence[Direction] = ("forward",),
        seed: int = 0,
    ) -> Verdict:
        """Judge a control as :func:`judge_control` does."""
        part = operation.controls[control]
        return self._judge(operation, case, Candidate.control(operation, part), part, device, directions, seed)

    def _judge(
        self,
        operation: Operation[..., Any],
        case: Case,
        candidate: Candidate,
        control: Control | None,
        device: torch.device | str,
        directions: Sequence[Direction],
        seed: int,
        tolerance: float | None = None,
    ) -> Verdict:
        """Judge a candidate in each direction, and merge the verdicts with the worst error of each output.

        With a tolerance, larger errors are allowed, as in :meth:`Reference.within`.
        """
        device = torch.device(device)
        components: dict[str, ComponentError] = {}
        problems: list[str] = []
        notes: list[str] = []
        for direction in directions:
            reference = self.reference(operation, case, device=device, direction=direction, seed=seed, control=control)
            stale = make_inputs(operation, case, device, seed + STALE_SEED, direction)
            with unchanged_switches() as switched:
                found = _examined(candidate, reference.within(tolerance), stale, device, self._settle_seconds)
            for component in found.components:
                known = components.get(component.name)
                if known is None or component.error / component.allowed > known.error / known.allowed:
                    components[component.name] = component
            problems += [problem for problem in (*found.problems, *switched.problems) if problem not in problems]
            notes += [note for note in (*reference.notes, *found.notes, *switched.notes) if note not in notes]
        return Verdict(ok=not problems, components=tuple(components.values()), problems=tuple(problems), notes=tuple(notes))


def with_tolerances(judged: Callable[[float | None], Verdict], tolerances: Tolerances) -> Verdict:
    """Return a verdict by the gate. If it fails, and another one with a tolerance for peers passes, it names the tolerance.

    A problem says why one with a tolerance failed.

    Args:
        judged: Function that judges, with ``None`` by the gate, or with a norm-wise error to allow in addition.
        tolerances: Tolerances that are tried, in this order.
    """
    verdict = judged(None)
    if verdict.ok:
        return verdict
    for name, tolerance in tolerances._asdict().items():
        if tolerance is None or any(not part.error <= max(part.allowed, tolerance) for part in verdict.components):
            continue  # the comparison saves the second time
        tolerant = judged(tolerance)
        if tolerant.ok:
            return verdict.model_copy(update={name: tolerance})
        still = f"It fails with errors of up to {tolerance:g} allowed too: {' '.join(tolerant.problems)}"
        verdict = verdict.model_copy(update={"problems": (*verdict.problems, still)})
    return verdict


def _examined(
    candidate: Candidate, reference: Reference, stale: Inputs, device: torch.device, settle_seconds: float | None
) -> Findings:
    """Return what :func:`examine` finds, or the problem with a result that a call itself found to be wrong."""
    try:
        return examine(candidate, reference, stale, device, settle_seconds)
    except VariantResultError as error:
        return Findings(problems=[str(error)])


_judge = Judge()
"""Judge of :func:`judge` and :func:`judge_control`. Its cached references stay until the process ends or others replace them."""


def judge(
    operation: Operation[..., Any],
    case: Case,
    *,
    variant: str,
    device: torch.device | str = "cpu",
    directions: Sequence[Direction] = ("forward",),
    seed: int = 0,
) -> Verdict:
    """Judge whether a variant computes the operation at a case.

    The norm-wise error of each output and gradient must be at most twice that of plain PyTorch in the same dtype, plus 2^-21
    (four times the machine epsilon of float32). It must also be at most the dtype's cap, which grows with the square root of the
    operation's number of stages. The largest error of an element may be 8 times PyTorch's, and the error of each eighth of the
    sequence 4 times. Where PyTorch's form cannot run, only the cap is asked, and a note of the verdict says so.

    A float32 result of a call whose inputs have 16 bits, such as a final state, may be a sum of products of 16-bit numbers. The
    operation then states the error of such a sum (:attr:`~onelaunch.operation.Operation.stated_errors`), which is allowed where
    twice PyTorch's is less. The errors of an element and of an eighth of the sequence have bounds of 8 times and 4 times the
    stated error where that is larger than PyTorch's, for an element times the root mean square of the expected values. Further
    requirements:

    - Shapes, dtypes and device are right, every element is written, and the inputs are unchanged, also after the last call.
    - Results are plain tensors in row-major order, or in the order of plain PyTorch's. They lie in memory of their own, which no
      later call writes to, or in that of a bundle such as a cache.
    - New contents in the same storage give new outputs, and inputs that are slices of larger tensors give right ones. An
      :class:`~onelaunch.errors.ArgumentError` or :class:`~onelaunch.errors.VariantUnsupported` for slices is only a note, as is
      any error of another project's variant.
    - Gradients are right if another call comes between a call and its backward pass, and if they come in through some of the
      results only.
    - The call waits for inputs that arrive late on the caller's stream.
    - Nothing is still being computed when the call returns. On a GPU this means: outside of the caller's stream.
    - Global switches of PyTorch (default dtype, precision, determinism, grad mode, autocast, cuDNN, anomaly detection, current
      GPU) are as before. A changed number of threads is a note, since ``torch.compile`` changes it.

    A variant of another project may state the tolerance of that project's tests (``own_tolerance``). If it fails the gate, it is
    judged by this tolerance too. The verdict stays a failed one, and its attribute ``own_tolerance`` says that nothing is wrong
    but errors that these tests allow.

    Args:
        operation: Operation to compute.
        case: Sizes, dtype and options.
        variant: Name of the variant to judge.
        device: Device to run on.
        directions: ``"forward"`` calls without gradients. ``"forward_backward"`` adds the gradients of all differentiable inputs,
            with random gradients coming in through every floating-point output, or those that the input maker names.
        seed: Seed of the inputs.

    Raises:
        Exception: Any exception of the variant. :func:`onelaunch.workbench.verify.calls.status_of` classifies it.
    """
    return _judge.judge(operation, case, variant=variant, device=device, directions=directions, seed=seed)


def judge_control(
    operation: Operation[..., Any],
    case: Case,
    control: str,
    *,
    device: torch.device | str = "cpu",
    directions: Sequence[Direction] = ("forward",),
    seed: int = 0,
) -> Verdict:
    """Judge whether a control computes its part of the operation, as :func:`judge` does, against the control's own oracle."""
    return _judge.judge_control(operation, case, control, device=device, directions=directions, seed=seed)


def judge_outputs(
    reference: Reference, outputs: OutputTensors, own_tolerance: float | None = None, timed_up_to: float | None = None
) -> Verdict:
    """Judge outputs that a call has left, such as a timed one, by the error limits of :func:`judge`.

    The tolerances are those for a peer outside the gate, see :func:`with_tolerances`.
    """
    if odd := odd_results(outputs):
        return Verdict(ok=False, problems=tuple(odd), notes=reference.notes)

    def judged(tolerance: float | None) -> Verdict:
        components, problems = reference.within(tolerance).compare(outputs)
        return Verdict(ok=not problems, components=components, problems=problems, notes=reference.notes)

    return with_tolerances(judged, Tolerances(own_tolerance, timed_up_to))
