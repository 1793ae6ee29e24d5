"""Examine a candidate on one case in one direction, with the calls that a model makes and those that reveal a cheat.

Memory that the candidate allocates is poisoned, the contents of its inputs change between calls, the last contents arrive late,
inputs are slices of larger tensors, and another call comes between a call and its backward pass. After the last call, inputs and
all results that were handed out must still be what they were. ``gate.py`` calls :func:`examine`, and ``repeated.py`` makes
single checks of it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onelaunch.errors import ArgumentError, VariantResultError, VariantUnsupported
from onelaunch.operation import Bundle
from onelaunch.wording import in_a_line
from onelaunch.workbench.result import ComponentError
from onelaunch.workbench.verify.calls import Candidate, Inputs, OutputTensors, duplicate
from onelaunch.workbench.verify.memory import layout_problems, odd_results, reused
from onelaunch.workbench.verify.poison import poisoned
from onelaunch.workbench.verify.reference import Reference
from onelaunch.workbench.verify.views import slices

STALE_SEED = 7919
"""Offset of the seed for the stale contents, which the inputs hold before those that are judged."""

_LATE_CYCLES = 20_000_000
"""Clock cycles for which a GPU's stream is blocked before the inputs arrive: about 10 ms."""

SETTLE_SECONDS = 0.02
"""Seconds after the return of a call during which its outputs must not change."""

CONSTANT = "It returned the same outputs when the same storage held other contents: they are constant, or cached by address."
"""Problem of a candidate that does not read its inputs."""

REFUSALS = (ArgumentError, VariantUnsupported)
"""Errors with which a variant refuses inputs that its contract excludes."""


@dataclass
class Findings:
    """Findings of an examination: errors, problems, and notes that are no problems."""

    components: tuple[ComponentError, ...] = ()
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, note: str) -> None:
        """Add a note that is not known yet."""
        if note not in self.notes:
            self.notes.append(note)

    def add(self, problems: Sequence[str], introduction: str = "") -> None:
        """Add problems that are not known yet, each after an introduction such as "With inputs that are slices: "."""
        for problem in problems:
            if problem not in self.problems and introduction + problem not in self.problems:
                self.problems.append(introduction + problem)


@dataclass
class _Taken:
    """Results of a call, with the copies that were taken at once."""

    outputs: OutputTensors
    copies: OutputTensors


def examine(
    candidate: Candidate, reference: Reference, stale: Inputs, device: torch.device, settle_seconds: float | None = None
) -> Findings:
    """Call a candidate as a model does, and return the errors of one call and every problem found, in sentences.

    Args:
        candidate: Variant or control to examine.
        reference: Reference outputs of the case, with the inputs to judge.
        stale: Inputs of other contents. They stay as they are.
        device: Device of the inputs.
        settle_seconds: Seconds for which the results must not change after the last call; by default :data:`SETTLE_SECONDS`.
    """
    found = Findings()
    context, finish = own_stream(device)
    with context:
        live = reference.inputs.clone()
        live.load(stale)
        first = candidate(live)  # this call also compiles, so that no checked call has to
        if odd := odd_results(first):
            found.add(odd)
            return found
        stale_outputs = duplicate(first)
        finish()
        found.add(changed_inputs(live, stale))

        live.load(reference.inputs)
        with poisoned():
            outputs = candidate(live)
        if odd := odd_results(outputs):
            found.add(odd)
            return found
        taken = duplicate(outputs)
        finish()
        found.components, problems = reference.compare(taken)
        found.add(problems)
        if problems and same_bits(taken, stale_outputs):
            found.add([CONSTANT])
        found.add(changed_inputs(live, reference.inputs))
        found.add(layout_problems(outputs, live, reference.strides))
        found.add(reused([first], outputs, [live]))

        held = [_Taken(first, stale_outputs), _Taken(outputs, taken)]
        shared = _call_late(candidate, reference, stale, device, live, held, found, finish)
        if not problems:  # what is wrong already would be wrong again
            true = replace(reference.inputs, arguments={**reference.inputs.arguments, **bundles_of(live)})
            check_slices(candidate, reference, slices(true), found, finish)
            _check_some_gradients(candidate, reference, live, found, finish)
        _settle(device, SETTLE_SECONDS if settle_seconds is None else settle_seconds)
        found.add(changed_inputs(live, reference.inputs))
        if not shared and any(_changed_later(each.outputs, each.copies, live) for each in held):
            found.add(["Its results changed after the call: it computes in another thread or on another stream."])
    return found


def _call_late(
    candidate: Candidate,
    reference: Reference,
    stale: Inputs,
    device: torch.device,
    live: Inputs,
    held: list[_Taken],
    found: Findings,
    finish: Callable[[], None],
) -> bool:
    """Call while the inputs are still being copied, and call with other contents before the backward pass of that call.

    On a GPU everything is enqueued behind a sleeping kernel, so that work on another stream would read the stale contents. On a
    CPU the inputs have arrived. Unlike in the call before, memory is not poisoned, as in real use.

    Returns:
        Whether a call returned memory that an earlier one had returned.
    """
    right = not found.problems
    between = Inputs({**plain_tensors(stale.clone()), **bundles_of(live)}, stale.differentiable)
    if device.type == "cuda":
        live.load(stale)
        finish()
        torch.cuda._sleep(_LATE_CYCLES)  # noqa: SLF001 - the only kernel that waits without accessing memory
    live.load(reference.inputs)
    graph = candidate.forward(live)
    early = duplicate({name: None if value is None else value.detach() for name, value in graph.items()})
    other = candidate.forward(between)
    late = candidate.backward(graph, live)
    taken = duplicate({name: value for name, value in late.items() if name not in early})
    finish()
    shared = reused((each.outputs for each in held), late, [live]) + reused([late], other, [live, between])
    found.add(shared)
    held.append(_Taken(late, early | taken))
    if right:
        problems = reference.compare(early | taken)[1]
        # Wrong outputs were computed too early. If only gradients are wrong, the call in between may be the cause.
        only_gradients = bool(live.differentiable) and all(problem.startswith("grad ") for problem in problems)
        between_too = " and another call before the backward pass" if only_gradients else ""
        found.add(problems, f"With inputs that arrive at the last moment{between_too}: ")
    found.add(changed_inputs(Inputs(plain_tensors(between)), stale))
    return bool(shared)


def check_slices(candidate: Candidate, reference: Reference, inputs: Inputs, found: Findings, finish: Callable[[], None]) -> bool:
    """Call with inputs that are slices of larger tensors, and return whether the call takes them."""
    (outputs,) = call_with_views(candidate, [inputs], "slices of larger tensors", found)
    if outputs is None:
        return False
    finish()
    introduction = "With inputs that are slices of larger tensors: "
    found.add(odd_results(outputs) or reference.compare(outputs)[1], introduction)
    found.add(changed_inputs(inputs, reference.inputs), introduction)
    return True


def call_with_views(
    candidate: Candidate, inputs: Sequence[Inputs], views: str, found: Findings
) -> list[OutputTensors] | list[None]:
    """Call once for each inputs, and return the outputs, or ``None`` for each if a call raises.

    A refusal is a note: an error of the contract, or any error of another project's package, which makes contracts of its own.
    Any other error is a problem. Compiled functions run eagerly here, since each would be compiled again for these strides.
    """
    try:
        with torch.compiler.set_stance("eager_on_recompile"):
            return [candidate(each) for each in inputs]
    except VariantResultError:
        raise
    except torch.OutOfMemoryError:
        found.note(f"There is too little memory for {views} as inputs.")
    except Exception as error:  # noqa: BLE001 - any exception of a variant is a finding
        if isinstance(error, REFUSALS) or candidate.foreign:
            found.note(f"It refuses {views}: {in_a_line(error)}")
        else:
            found.add([f"With inputs that are {views}: it raised {type(error).__name__}: {in_a_line(error)}"])
    return [None] * len(inputs)


def _check_some_gradients(
    candidate: Candidate, reference: Reference, live: Inputs, found: Findings, finish: Callable[[], None]
) -> None:
    """Let gradients come in through one half of the results, then through the other; both together give the expected ones."""
    names = list(live.output_gradients)
    if not live.differentiable or len(names) < 2:
        return
    check_groups(candidate, reference, live, [names[::2], names[1::2]], found, finish)


def check_groups(
    candidate: Candidate,
    reference: Reference,
    inputs: Inputs,
    groups: Sequence[Sequence[str]],
    found: Findings,
    finish: Callable[[], None],
) -> None:
    """Call once for each group of results, with gradients that come in through these only; the sum of the gradients is judged.

    A backward pass is linear in the gradients that come in, so the sum needs no further reference outputs.
    """
    sums: OutputTensors = {}
    outputs: OutputTensors = {}
    for group in groups:
        outputs = candidate.backward(candidate.forward(inputs), inputs, group)
        for name in inputs.differentiable:
            gradient, known = outputs[f"grad {name}"], sums.get(f"grad {name}")
            if gradient is not None:  # a missing gradient counts as a gradient of zeros
                sums[f"grad {name}"] = gradient.double() if known is None else known + gradient.double()
    finish()
    dtypes = {f"grad {name}": inputs.arguments[name].dtype for name in inputs.differentiable}
    # Each group rounds its gradients, where a single call rounds once: the sum may have as many times the error.
    problems = reference.loosened(len(groups)).compare({name: outputs[name] for name in outputs if name not in dtypes} | sums)[1]
    shown = ", then ".join(" and ".join(group) for group in groups)
    found.add(problems, f"With gradients that come in through {shown}: ")


def plain_tensors(inputs: Inputs) -> dict[str, Any]:
    """Return the arguments that are no bundles."""
    return {name: value for name, value in inputs.arguments.items() if not isinstance(value, Bundle)}


def bundles_of(inputs: Inputs) -> dict[str, Bundle]:
    """Return the arguments that consist of several tensors, such as weights. A variant may prepare them once per object."""
    return {name: value for name, value in inputs.arguments.items() if isinstance(value, Bundle)}


def own_stream(device: torch.device) -> tuple[AbstractContextManager[Any], Callable[[], None]]:
    """Return a context that makes a new stream current, and a function that waits for that stream alone.

    Work that a variant wrongly puts on the default stream then runs unordered with the caller's, and shows.
    """
    if device.type != "cuda":
        return nullcontext(), lambda: None
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    return torch.cuda.stream(stream), stream.synchronize


def _settle(device: torch.device, seconds: float) -> None:
    """Give work in other threads and on other streams the time to overwrite the outputs and the inputs."""
    time.sleep(seconds)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _changed_later(outputs: OutputTensors, at_once: OutputTensors, live: Inputs) -> bool:
    """Return whether outputs differ from the copies taken right after the call.

    An output that shares its storage with an input is left out, because the next call reloads the inputs.
    """
    inputs = {tensor.untyped_storage().data_ptr() for _, tensor in live.named_tensors()}
    own = {name for name, value in outputs.items() if value is not None and value.untyped_storage().data_ptr() not in inputs}
    return not same_bits({name: outputs[name] for name in own}, {name: at_once[name] for name in own})


def changed_inputs(live: Inputs, true: Inputs) -> list[str]:
    """Return a sentence for each input that a call has changed, given inputs of the contents that it had before."""
    before = dict(true.named_tensors())
    same = {
        name: torch.equal(bits(tensor), bits(before[name])) for name, tensor in live.named_tensors() if name in before
    }  # stale inputs have no incoming gradients
    return [f"It changed its input {name}." for name, unchanged in same.items() if not unchanged]


def same_bits(one: OutputTensors, other: OutputTensors) -> bool:
    """Return whether two sets of outputs are bitwise equal, NaN included."""
    if one.keys() != other.keys():
        return False
    for name, value in one.items():
        against = other[name]
        if (value is None) != (against is None):
            return False
        if value is not None and against is not None and not torch.equal(bits(value), bits(against)):
            return False
    return True


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a floating-point tensor viewed as integers, in which equal NaN compare equal; other tensors as they are."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(integers[tensor.dtype.itemsize]) if tensor.is_floating_point() else tensor.detach()
