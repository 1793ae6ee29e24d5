"""Judge whether a variant is correct. Tests and studies share this check.

Every output and every gradient must be as near to the float64 oracle as plain PyTorch in the same dtype
(:mod:`onelaunch.workbench.verify.reference`). The check is adversarial, so that a wrong variant cannot pass by luck: memory that
the variant allocates is poisoned, the contents of its inputs change between calls, and the last contents arrive late.
"""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from onelaunch.errors import VariantResultError
from onelaunch.operation import Case, Control, Direction, Operation
from onelaunch.workbench.result import ComponentError, Verdict
from onelaunch.workbench.verify.calls import Candidate, Inputs, OutputTensors, duplicate, make_inputs
from onelaunch.workbench.verify.poison import poisoned
from onelaunch.workbench.verify.reference import Reference, compute_reference

STALE_SEED = 7919
"""Offset of the seed for the stale contents, which the inputs hold before those that are judged."""

LATE_CYCLES = 20_000_000
"""Clock cycles for which a GPU's stream is blocked before the inputs arrive: about 10 ms."""

SETTLE_SECONDS = 0.02
"""Seconds after the return of a call during which its outputs must not change."""

ALWAYS_CACHED = 3
"""Number of references that a :class:`Judge` caches whatever their size: those of the operation and its controls at one case."""


class Judge:
    """Judge of variants that caches the oracle's outputs, so that the variants of a case share them.

    Args:
        keep_bytes: Most bytes that cached references may take. The least recently used are dropped first; the newest three, which
            belong to the current case, always stay.
    """

    def __init__(self, keep_bytes: int = 1 << 30) -> None:
        self._keep_bytes = keep_bytes
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
        described = (case.dtype, *sorted(case.sizes.items()), repr(sorted(case.options.items())))
        key = (operation.name, control and control.name, str(device), direction, seed, *described)
        if key in self._references:
            self._references.move_to_end(key)
            return self._references[key]
        found = compute_reference(operation, case, device, seed, direction, control)
        self._references[key] = found
        while (
            len(self._references) > ALWAYS_CACHED
            and sum(reference.nbytes for reference in self._references.values()) > self._keep_bytes
        ):
            self._references.popitem(last=False)
        return found

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
        return self._judge(operation, case, candidate, None, device, directions, seed)

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
    ) -> Verdict:
        """Judge a candidate in each direction, and merge the verdicts with the worst error of each output."""
        device = torch.device(device)
        components: dict[str, ComponentError] = {}
        problems: list[str] = []
        for direction in directions:
            reference = self.reference(operation, case, device=device, direction=direction, seed=seed, control=control)
            stale = make_inputs(operation, case, device, seed + STALE_SEED, direction)
            try:
                found, wrong = _examine(candidate, reference, stale, device)
            except VariantResultError as error:  # the call itself found its outputs to be wrong, so this is no failure to run
                found, wrong = (), [str(error)]
            for component in found:
                known = components.get(component.name)
                if known is None or component.error / component.allowed > known.error / known.allowed:
                    components[component.name] = component
            problems += [problem for problem in wrong if problem not in problems]
        return Verdict(ok=not problems, components=tuple(components.values()), problems=tuple(problems))


_judge = Judge()


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
    operation's number of stages. Further requirements:

    - Shapes, dtypes and device are right, every element is written, and the inputs are unchanged.
    - New contents in the same storage give new outputs.
    - The call waits for inputs that arrive late on the caller's stream.
    - Nothing is still being computed when the call returns. On a GPU this means: outside of the caller's stream.

    Args:
        operation: Operation to compute.
        case: Sizes, dtype and options.
        variant: Name of the variant to judge.
        device: Device to run on.
        directions: ``"forward"`` calls without gradients. ``"forward_backward"`` adds the gradients of all differentiable inputs,
            with random gradients coming in through every floating-point output.
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


def judge_outputs(reference: Reference, outputs: OutputTensors) -> Verdict:
    """Judge outputs that a call has left, such as a timed one, by the error limits of :func:`judge`."""
    components, problems = reference.compare(outputs)
    return Verdict(ok=not problems, components=components, problems=problems)


def _examine(
    candidate: Candidate, reference: Reference, stale: Inputs, device: torch.device
) -> tuple[tuple[ComponentError, ...], list[str]]:
    """Run a candidate three times: on stale inputs, with poisoned memory, and on inputs that arrive late.

    Returns:
        The errors of the second call, and every problem found, in sentences.
    """
    context, finish = _own_stream(device)
    with context:
        live = reference.inputs.clone()
        live.load(stale)
        stale_outputs = duplicate(candidate(live))  # this call also compiles, so that no checked call has to
        finish()

        live.load(reference.inputs)
        with poisoned():
            outputs = candidate(live)
        taken = duplicate(outputs)
        finish()
        components, problems = reference.compare(taken)
        wrong = list(problems)
        if problems and same_bits(taken, stale_outputs):
            wrong.append(
                "It returned the same outputs when the same storage held other contents: they are constant, or cached by address."
            )
        wrong += _changed_inputs(live, reference.inputs)

        live.load(reference.inputs)
        late, late_taken = _late(candidate, live, reference.inputs, stale, device, finish)
        if not problems:
            wrong += [f"With inputs that arrive at the last moment: {problem}" for problem in reference.compare(late_taken)[1]]
        _settle(device)
        if any(_changed_later(each, at_once, live) for each, at_once in ((outputs, taken), (late, late_taken))):
            wrong.append("Its results changed after the call: it computes in another thread or on another stream.")
    return components, wrong


def _late(
    candidate: Candidate, live: Inputs, true: Inputs, stale: Inputs, device: torch.device, finish: Callable[[], None]
) -> tuple[OutputTensors, OutputTensors]:
    """Call while the inputs are still being copied, and copy the outputs as soon as the caller's stream allows.

    On a GPU everything is enqueued behind a sleeping kernel, so that work on another stream would read the stale contents. On a
    CPU the inputs have arrived. Unlike in the call before, memory is not poisoned, as in real use.
    """
    if device.type == "cuda":
        live.load(stale)
        finish()
        torch.cuda._sleep(LATE_CYCLES)  # noqa: SLF001 - the only kernel that waits without accessing memory
    live.load(true)
    outputs = candidate(live)
    taken = duplicate(outputs)
    finish()
    return outputs, taken


def _own_stream(device: torch.device) -> tuple[AbstractContextManager[Any], Callable[[], None]]:
    """Return a context that makes a new stream current, and a function that waits for that stream alone.

    Work that a variant wrongly puts on the default stream then runs unordered with the caller's, and shows.
    """
    if device.type != "cuda":
        return nullcontext(), lambda: None
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    return torch.cuda.stream(stream), stream.synchronize


def _settle(device: torch.device) -> None:
    """Give work in other threads and on other streams the time to overwrite the outputs."""
    time.sleep(SETTLE_SECONDS)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _changed_later(outputs: OutputTensors, at_once: OutputTensors, live: Inputs) -> bool:
    """Return whether outputs differ from the copies taken right after the call.

    An output that shares its storage with an input is left out, because the next call reloads the inputs.
    """
    inputs = {tensor.untyped_storage().data_ptr() for _, tensor in live.named_tensors()}
    own = {name for name, value in outputs.items() if value is not None and value.untyped_storage().data_ptr() not in inputs}
    return not same_bits({name: outputs[name] for name in own}, {name: at_once[name] for name in own})


def _changed_inputs(live: Inputs, true: Inputs) -> list[str]:
    """Return a sentence for each input that the call has changed."""
    before = dict(true.named_tensors())
    same = {name: torch.equal(_bits(tensor), _bits(before[name])) for name, tensor in live.named_tensors()}
    return [f"It changed its input {name}." for name, unchanged in same.items() if not unchanged]


def same_bits(one: OutputTensors, other: OutputTensors) -> bool:
    """Return whether two sets of outputs are bitwise equal, NaN included."""
    if one.keys() != other.keys():
        return False
    for name, value in one.items():
        against = other[name]
        if (value is None) != (against is None):
            return False
        if value is not None and against is not None and not torch.equal(_bits(value), _bits(against)):
            return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a floating-point tensor viewed as integers, in which equal NaN compare equal; other tensors as they are."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(integers[tensor.dtype.itemsize]) if tensor.is_floating_point() else tensor.detach()
