"""The gate that tests and studies share: whether a variant is right.

A variant passes when every result and every gradient is as near to the float64 oracle as plain PyTorch in the same dtype is (see
:mod:`onelaunch.workbench.verify.truth`), while what it allocates is poisoned, its inputs change under it and arrive late.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from onelaunch.errors import VariantResultError
from onelaunch.operation import Case, Control, Direction, Operation
from onelaunch.workbench.result import ComponentError, Verdict
from onelaunch.workbench.verify.calls import Answer, Callee, Inputs, duplicate, make_inputs
from onelaunch.workbench.verify.poison import poisoned
from onelaunch.workbench.verify.truth import Truth, find_truth

DECOY_SEED = 7919
"""Added to the seed for the contents that the inputs hold before the ones that are judged."""

LATE_CYCLES = 20_000_000
"""Cycles for which a GPU's stream is held up before the inputs arrive: about 10 ms."""

SETTLE_SECONDS = 0.02
"""Seconds for which answers are watched for changes after the call returned."""


KEPT_ALWAYS = 3
"""Answers that a :class:`Judge` keeps whatever their size: those of one case, for the operation and its controls."""


class Judge:
    """Judges variants, and keeps the oracle's answers for the next one.

    Args:
        keep_bytes: how much memory the kept answers may take; the oldest go first, the newest few (of the case at hand) never.
    """

    def __init__(self, keep_bytes: int = 1 << 30) -> None:
        self._keep_bytes = keep_bytes
        self._truths: OrderedDict[tuple[Any, ...], Truth] = OrderedDict()

    def truth(
        self,
        operation: Operation[..., Any],
        case: Case,
        *,
        device: torch.device | str = "cpu",
        direction: Direction = "forward",
        seed: int = 0,
        control: Control | None = None,
    ) -> Truth:
        """The right answer to a case, from the oracle or as kept."""
        device = torch.device(device)
        described = (case.dtype, *sorted(case.sizes.items()), repr(sorted(case.options.items())))
        key = (operation.name, control and control.name, str(device), direction, seed, *described)
        if key in self._truths:
            self._truths.move_to_end(key)
            return self._truths[key]
        found = find_truth(operation, case, device, seed, direction, control)
        self._truths[key] = found
        while len(self._truths) > KEPT_ALWAYS and sum(truth.nbytes for truth in self._truths.values()) > self._keep_bytes:
            self._truths.popitem(last=False)
        return found

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
        """See :func:`judge`."""
        callee = Callee.variant(operation, variant)
        return self._judge(operation, case, callee, None, device, directions, seed)

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
        """See :func:`judge_control`."""
        part = operation.controls[control]
        return self._judge(operation, case, Callee.control(operation, part), part, device, directions, seed)

    def _judge(
        self,
        operation: Operation[..., Any],
        case: Case,
        callee: Callee,
        control: Control | None,
        device: torch.device | str,
        directions: Sequence[Direction],
        seed: int,
    ) -> Verdict:
        device = torch.device(device)
        components: dict[str, ComponentError] = {}
        problems: list[str] = []
        for direction in directions:
            truth = self.truth(operation, case, device=device, direction=direction, seed=seed, control=control)
            decoy = make_inputs(operation, case, device, seed + DECOY_SEED, direction)
            try:
                found, wrong = _examine(callee, truth, decoy, device)
            except VariantResultError as error:  # what a call refuses to hand out is a wrong answer, not an accident
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

    Gate per result and gradient: norm-wise error at most twice that of plain PyTorch in the same dtype (plus four roundings of
    float32), and at most the dtype's cap, which grows with the root of an operation's stages. Also required: the right shapes,
    dtypes and device; no element left unwritten; inputs unchanged; new contents in the same storage give the new answer;
    inputs that arrive late on the caller's stream are waited for; nothing is still being computed when the call returns (on a
    GPU: on the caller's stream).

    Args:
        operation: what is computed.
        case: at which sizes, dtype and options.
        variant: which way of computing it.
        device: where.
        directions: ``"forward"`` calls without gradients; ``"forward_backward"`` adds the gradients of all differentiable inputs,
            with random gradients coming in through every floating-point result.
        seed: of the inputs.

    Raises:
        Exception: whatever the variant raises; see :func:`onelaunch.workbench.verify.calls.status_of`.
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
    """Judge whether a control computes its part of the operation: the gate of :func:`judge` with the control's own oracle."""
    return _judge.judge_control(operation, case, control, device=device, directions=directions, seed=seed)


def judge_answer(truth: Truth, answer: Answer) -> Verdict:
    """Judge an answer that is there already, such as that of a timed call, by the gate of :func:`judge`."""
    components, problems = truth.compare(answer)
    return Verdict(ok=not problems, components=components, problems=problems)


def _examine(callee: Callee, truth: Truth, decoy: Inputs, device: torch.device) -> tuple[tuple[ComponentError, ...], list[str]]:
    """Run the callee on the truth's inputs in every way that a wrong one may not survive."""
    context, finish = _own_stream(device)
    with context:
        live = truth.inputs.clone()
        live.load(decoy)
        stale = duplicate(callee(live))  # also compiles, outside of everything that is watched
        finish()

        live.load(truth.inputs)
        with poisoned():
            kept = callee(live)
        taken = duplicate(kept)
        finish()
        components, problems = truth.compare(taken)
        wrong = list(problems)
        if problems and same_bits(taken, stale):
            wrong.append("It gave the same answer when the same storage held other contents: constant, or remembered by address.")
        wrong += _changed(live, truth.inputs)

        live.load(truth.inputs)
        late, late_taken = _late(callee, live, truth.inputs, decoy, device, finish)
        if not problems:
            wrong += [f"With inputs that arrive at the last moment: {problem}" for problem in truth.compare(late_taken)[1]]
        _settle(device)
        if any(_moved(answer, at_once, live) for answer, at_once in ((kept, taken), (late, late_taken))):
            wrong.append("Its results changed after the call: it computes in another thread or on another stream.")
    return components, wrong


def _late(
    callee: Callee, live: Inputs, true: Inputs, decoy: Inputs, device: torch.device, finish: Callable[[], None]
) -> tuple[Answer, Answer]:
    """Call with the inputs still on their way, and take the results as soon as the caller's stream may.

    On a GPU everything is enqueued behind a sleeping kernel: work on another stream would read the decoy. On a CPU the inputs are
    there, but memory is not poisoned, as in real use.
    """
    if device.type == "cuda":
        live.load(decoy)
        finish()
        torch.cuda._sleep(LATE_CYCLES)  # noqa: SLF001 - the only kernel that waits without memory
    live.load(true)
    answer = callee(live)
    taken = duplicate(answer)
    finish()
    return answer, taken


def _own_stream(device: torch.device) -> tuple[AbstractContextManager[Any], Callable[[], None]]:
    """A context that makes a new stream current (work on the default stream then shows), and the wait for that stream alone."""
    if device.type != "cuda":
        return nullcontext(), lambda: None
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    return torch.cuda.stream(stream), stream.synchronize


def _settle(device: torch.device) -> None:
    time.sleep(SETTLE_SECONDS)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _moved(answer: Answer, at_once: Answer, live: Inputs) -> bool:
    """Return whether results differ from copies taken at once; a result that is (part of) an input is left out."""
    inputs = {tensor.untyped_storage().data_ptr() for _, tensor in live.named_tensors()}
    own = {name for name, value in answer.items() if value is not None and value.untyped_storage().data_ptr() not in inputs}
    return not same_bits({name: answer[name] for name in own}, {name: at_once[name] for name in own})


def _changed(live: Inputs, true: Inputs) -> list[str]:
    before = dict(true.named_tensors())
    same = {name: torch.equal(_bits(tensor), _bits(before[name])) for name, tensor in live.named_tensors()}
    return [f"It changed its input {name}." for name, unchanged in same.items() if not unchanged]


def same_bits(one: Answer, other: Answer) -> bool:
    """Return whether two answers are the same to the last bit, NaN included."""
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
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(integers[tensor.dtype.itemsize]) if tensor.is_floating_point() else tensor.detach()
