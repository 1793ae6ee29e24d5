"""Reference outputs of a case, and the error that a variant's outputs may have against them.

The oracle runs in float64 on the upcast inputs. The PyTorch baseline, which is plain PyTorch in the call's own dtype, shows how
much error the dtype alone causes, and thereby sets the tolerance. ``gate.py`` calls :func:`compute_reference`. The other checks
that judge outputs, and the timing in ``measure``, are given its :class:`Reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onelaunch.errors import OneLaunchError
from onelaunch.moved import renamed
from onelaunch.operation import Case, Control, Direction, Operation, StatedErrors, Variant
from onelaunch.operation.accuracy import stated_error
from onelaunch.workbench.result import ComponentError
from onelaunch.workbench.verify.bounds import (
    SLACK,
    Bound,
    bound_of,
    difference,
    errors_by_position,
    largest_error,
    norm_error,
    scale_of,
)
from onelaunch.workbench.verify.calls import Candidate, Inputs, OutputTensors, draw_gradients, make_inputs

CAPS = {torch.float32: (1e-4, 1e-4), torch.float16: (5e-3, 1e-2), torch.bfloat16: (5e-3, 1e-2)}
"""Caps of the norm-wise error by dtype, for an output and for a gradient, of an operation of one stage.

They are multiplied by the square root of the operation's number of stages.
"""

_CAP_ALONE = "PyTorch's form of the operation could not run at this case, so that only the cap of the dtype was asked."
"""Note of every verdict on a case without the PyTorch baseline."""

# Names that were renamed; each still works, with a DeprecationWarning.
__getattr__ = renamed(__name__, {"Truth": "Reference", "find_truth": "compute_reference", "yardstick": "pytorch_baseline"})


@dataclass
class Rounded:
    """Errors that plain PyTorch makes at contents other than those of a reference."""

    errors: dict[str, float] = field(default_factory=dict)
    """Largest norm of the error by the name of the output or gradient."""
    scales: dict[str, float] = field(default_factory=dict)
    """Norm of the exact result at the first contents, by name."""
    failure: str = ""
    """Reason why not all contents were tried; empty if they were."""


@dataclass(frozen=True)
class Reference:
    """Reference outputs of one case in one direction, with the tolerances and dtypes that judging needs."""

    case: Case
    inputs: Inputs
    """Inputs whose copies the variants get. No variant gets these tensors themselves, so that none can change them."""
    expected: OutputTensors
    """Outputs and gradients of the oracle, in float64."""
    allowed: dict[str, float]
    """Largest norm-wise error by the name of the output or gradient."""
    dtypes: dict[str, torch.dtype]
    """Required dtypes by name; only those of gradients if the PyTorch baseline could not run."""
    bounds: dict[str, Bound] = field(default_factory=dict)
    """Bounds of the largest error and of the parts along time, by name; empty if the PyTorch baseline could not run."""
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Strides of the results of the PyTorch baseline by name; empty if it could not run."""
    notes: tuple[str, ...] = ()
    """Limits of every verdict on this case, in sentences."""
    times_gate: dict[str, float] = field(default_factory=dict)
    """How many times the gate's tolerance ``allowed`` is, by name, for a peer with a tolerance of its own; else empty."""
    rounded: dict[str | None, Rounded] = field(default_factory=dict, compare=False)
    """Errors of the PyTorch baseline for expanded inputs, by the input that is expanded alone, or ``None`` for all together.

    ``repeated.py`` adds them when the first candidate needs them, for those that follow.
    """

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return self.inputs.nbytes + sum(value.nbytes for value in self.expected.values() if value is not None)

    def only(self, name: str) -> Reference:
        """Return this reference for one output or gradient; :meth:`compare` then ignores all others."""
        return replace(self, expected={name: self.expected[name]})

    def within(self, tolerance: float | None) -> Reference:
        """Return this reference with a norm-wise error allowed for every result, and bounds that rest on it, where it is larger.

        It is the tolerance of the tests of a peer's own project; ``None`` changes nothing.
        """
        if tolerance is None:
            return self
        allowed = {name: max(value, tolerance) for name, value in self.allowed.items()}
        bounds = {name: bound.of_a_peer(tolerance) for name, bound in self.bounds.items()}
        times = {name: value / self.allowed[name] for name, value in allowed.items() if self.allowed[name] > 0}
        return replace(self, allowed=allowed, bounds=bounds, times_gate=times)

    def loosened(self, factor: float) -> Reference:
        """Return this reference for float64 sums of gradients, with tolerances and bounds multiplied by a factor."""
        bounds = {name: bound.times(factor) for name, bound in self.bounds.items()}
        allowed = {name: factor * value for name, value in self.allowed.items()}
        exact = {name: torch.float64 for name in self.dtypes if name.startswith("grad ")}
        return replace(self, allowed=allowed, bounds=bounds, dtypes=self.dtypes | exact)

    def compare(self, outputs: OutputTensors) -> tuple[tuple[ComponentError, ...], tuple[str, ...]]:
        """Return the error of each output and gradient, and the problems in sentences, which are none if the outputs pass."""
        errors, problems = [], []
        for name, expected in self.expected.items():
            given = outputs.get(name)
            if expected is None:
                continue
            if given is None:
                if name.startswith("grad ") and not expected.any():
                    continue  # a missing gradient counts as a gradient of zeros
                problems.append(f"{name} is missing.")
                continue
            if (problem := self._mismatch(name, given, expected)) is not None:
                problems.append(problem)
                if given.shape != expected.shape:
                    continue
            error = self._error(name, given, expected)
            errors.append(error)
            if not error.error <= error.allowed:
                fault = "is not finite everywhere" if math.isinf(error.error) else f"is off by {error.error:.2e}"
                problems.append(f"{name} {fault}; {error.allowed:.2e} is allowed (norm-wise, against the float64 oracle).")
            elif (bound := self.bounds.get(name)) is not None:
                problems += bound.problems(error)
        return tuple(errors), tuple(problems)

    def _mismatch(self, name: str, given: torch.Tensor, expected: torch.Tensor) -> str | None:
        """Return the problem if shape, dtype or device of an output are wrong."""
        if given.shape != expected.shape:
            return f"{name} has shape {tuple(given.shape)}; it must be {tuple(expected.shape)}."
        if given.dtype != self.dtypes.get(name, given.dtype):
            return f"{name} is {given.dtype}; it must be {self.dtypes[name]}."
        # Without the PyTorch baseline, the dtype of a result is not known. States are float32 in calls of 16-bit dtypes.
        known = {self.case.dtype, torch.float32}
        if name not in self.dtypes and given.is_floating_point() and given.dtype not in known:
            return f"{name} is {given.dtype}; it must be {' or '.join(sorted(map(str, known)))}."
        if given.device != expected.device:
            return f"{name} is on {given.device}; it must be on {expected.device}."
        return None

    def _error(self, name: str, given: torch.Tensor, expected: torch.Tensor) -> ComponentError:
        exact = given.to(device=expected.device, dtype=torch.float64)
        return ComponentError(
            name=name,
            error=norm_error(exact, expected, given.dtype),
            max_error=largest_error(exact, expected),
            allowed=self.allowed[name],
            error_by_position=errors_by_position(exact, expected, given.dtype, self.case.sizes.get("T", 0)),
        )


def compute_reference(
    operation: Operation[..., Any],
    case: Case,
    device: torch.device,
    seed: int,
    direction: Direction,
    control: Control | None,
    stated: StatedErrors | None = None,
) -> Reference:
    """Run the oracle and the PyTorch baseline on one case.

    Args:
        operation: Operation to compute.
        case: Sizes, dtype and options.
        device: Device to run on.
        seed: Seed of the inputs.
        direction: Direction of the call.
        control: Control to compute instead of the operation, or ``None``.
        stated: Errors to allow in place of those that the operation states. A control has none: its oracle computes its product
            in the dtype of the call.
    """
    inputs = make_inputs(operation, case, device, seed, direction)
    if direction == "forward_backward":
        plain, expected = _outputs_and_gradients(operation, control, case, inputs, seed)
    else:
        plain = _baseline_outputs(operation, control, inputs.clone())
        expected = _visible(_oracle(operation, control)(upcast(inputs)), plain)
    stages = operation.stages if control is None else 1
    length = case.sizes.get("T", 0)
    dtypes = {f"grad {name}": inputs.arguments[name].dtype for name in inputs.differentiable}
    dtypes |= {name: value.dtype for name, value in (plain or {}).items() if value is not None}
    if stated is None:
        stated = operation.stated_errors if control is None else {}
    errors = {name: stated_error(stated, name, case.dtype, dtypes.get(name)) for name in expected}
    bounds = {
        name: bound_of(got, value, length).raised(errors[name])
        for name, value in expected.items()
        if value is not None and (got := (plain or {}).get(name)) is not None and got.shape == value.shape
    }
    return Reference(
        case=case,
        inputs=inputs,
        expected=expected,
        allowed={
            name: _allowed(name, value, (plain or {}).get(name), case.dtype, stages, errors[name])
            for name, value in expected.items()
        },
        dtypes=dtypes,
        bounds=bounds,
        strides={name: value.stride() for name, value in (plain or {}).items() if value is not None},
        notes=() if plain is not None else (_CAP_ALONE,),
    )


def _outputs_and_gradients(
    operation: Operation[..., Any], control: Control | None, case: Case, inputs: Inputs, seed: int
) -> tuple[OutputTensors | None, OutputTensors]:
    """Return the outputs and gradients of the PyTorch baseline, if it can run, and those of the oracle.

    The inputs get random incoming gradients, of the shapes and dtypes of the outputs. Each of the two is called once, and its
    backward pass comes when the other's outputs are known too. If the baseline fails so, it is called again when the oracle's
    graph takes no more memory.
    """
    oracle, exact_inputs = _oracle(operation, control), upcast(inputs)
    exact = oracle.forward(exact_inputs)
    baseline, plain_inputs = _baseline(operation, control), inputs.clone()
    plain = graph = None if baseline is None else _unless_it_fails(baseline.forward, plain_inputs)
    if plain is None:  # without gradients it may run, and tells the dtypes
        plain = _baseline_outputs(operation, control, Inputs(inputs.arguments).clone())
    visible = _visible(exact, plain)
    typed: OutputTensors = {
        name: value.detach().to(_dtype(plain, name, case)) for name, value in visible.items() if value is not None
    }
    inputs.output_gradients = draw_gradients(typed, case.dtype, seed, inputs.through)
    complete = None
    if baseline is not None and graph is not None:
        plain_inputs.output_gradients = {name: value.clone() for name, value in inputs.output_gradients.items()}
        complete = _unless_it_fails(baseline.backward, graph, plain_inputs)
    plain = graph = None  # so that its memory is free in the oracle's backward pass
    exact_inputs.output_gradients = {name: value.double() for name, value in inputs.output_gradients.items()}
    expected = oracle.backward(exact, exact_inputs)
    expected = {name: value for name, value in expected.items() if name in visible or name.startswith("grad ")}
    return complete or _baseline_outputs(operation, control, inputs.clone()), expected


def _visible(exact: OutputTensors, plain: OutputTensors | None) -> OutputTensors:
    """Return the oracle's outputs that the baseline returns too, since the oracle may return more than the call does."""
    return {name: exact[name] for name in (plain or exact) if exact.get(name) is not None}


def oracle_results(operation: Operation[..., Any], inputs: Inputs) -> OutputTensors:
    """Return the outputs and gradients of the oracle for the upcast inputs, in float64."""
    return _oracle(operation, None)(upcast(inputs))


def baseline_differences(
    operation: Operation[..., Any], inputs: Inputs, expected: OutputTensors
) -> dict[str, tuple[float, float]]:
    """Return by output or gradient the norm of the PyTorch baseline's error, and the scale in which it would be judged.

    Neither is divided by the other, since the result may be zero but for roundings. The scale is that of ``scale_of``. An output
    is left out that one of the two lacks; all are if the operation has no baseline.

    Args:
        operation: Operation to compute.
        inputs: Inputs to call the baseline with.
        expected: What the oracle returns for inputs of the same contents.

    Raises:
        OneLaunchError: The baseline cannot run this call.
        RuntimeError: PyTorch failed, for instance for lack of memory.
    """
    baseline = _baseline(operation, None)
    found: dict[str, tuple[float, float]] = {}
    for name, value in ({} if baseline is None else baseline(inputs)).items():
        exact = expected.get(name)
        if value is not None and exact is not None and exact.shape == value.shape and exact.numel():
            found[name] = difference(value.double(), exact), scale_of(exact, value.dtype)
    return found


def upcast(inputs: Inputs) -> Inputs:
    """Return the inputs in float64; integer tensors and values that are no tensors are unchanged."""

    def up(value: torch.Tensor) -> torch.Tensor:
        return value.detach().double() if value.is_floating_point() else value

    return Inputs(inputs.map(up), inputs.differentiable, {name: g.double() for name, g in inputs.output_gradients.items()})


def pytorch_baseline(operation: Operation[..., Any]) -> Variant | None:
    """Return the PyTorch baseline: the variant with the tag ``yardstick``, else the one named ``eager``, if any."""
    tagged = (variant for variant in operation.variants.values() if variant.tags.get("yardstick"))
    return next(tagged, operation.variants.get("eager"))


def _oracle(operation: Operation[..., Any], control: Control | None) -> Candidate:
    """Return the oracle of an operation, or of its control."""
    if control is None:
        return Candidate("oracle", operation.reference, operation.outputs)
    return Candidate("oracle", control.oracle, (control.name,))


def _baseline(operation: Operation[..., Any], control: Control | None) -> Candidate | None:
    """Return the PyTorch baseline of an operation, if it has any, or of its control."""
    if control is not None:  # a control's oracle is plain PyTorch, and runs here in the call's own dtype
        return Candidate("PyTorch baseline", control.oracle, (control.name,))
    plain = pytorch_baseline(operation)
    return None if plain is None else Candidate.variant(operation, plain.name)


def _baseline_outputs(operation: Operation[..., Any], control: Control | None, inputs: Inputs) -> OutputTensors | None:
    """Return the outputs of the PyTorch baseline, or ``None`` if it cannot run. The dtype's cap is then the tolerance."""
    baseline = _baseline(operation, control)
    return None if baseline is None else _unless_it_fails(baseline, inputs)


def _unless_it_fails(call: Callable[..., OutputTensors], *arguments: Any) -> OutputTensors | None:
    """Return what a call of the PyTorch baseline returns, or ``None`` if it fails."""
    try:
        return call(*arguments)
    except (OneLaunchError, RuntimeError):  # Unsupported here, or out of memory. Other variants may still run.
        return None


def _dtype(plain: OutputTensors | None, name: str, case: Case) -> torch.dtype:
    value = (plain or {}).get(name)
    return case.dtype if value is None else value.dtype


def _allowed(
    name: str, expected: torch.Tensor | None, plain: torch.Tensor | None, dtype: torch.dtype, stages: int, stated: float
) -> float:
    """Return the largest allowed norm-wise error of an output or gradient, for which the operation may state an error."""
    cap = math.sqrt(stages) * CAPS.get(dtype, CAPS[torch.float32])[name.startswith("grad ")]
    if expected is None or plain is None or plain.shape != expected.shape:
        return cap
    return min(cap, max(stated, 2 * norm_error(plain.double(), expected, plain.dtype) + SLACK))
