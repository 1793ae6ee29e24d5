"""Reference outputs of a case, and how far outputs may lie from them.

The oracle runs in float64 on the low-precision inputs upcast; plain PyTorch in the call's own dtype (the yardstick) says how much
of the distance is the dtype's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from onelaunch.errors import OneLaunchError
from onelaunch.operation import Case, Control, Direction, Operation, Variant
from onelaunch.workbench.result import ComponentError
from onelaunch.workbench.verify.calls import Answer, Callee, Inputs, draw_gradients, make_inputs

CAPS = {torch.float32: (1e-4, 1e-4), torch.float16: (5e-3, 1e-2), torch.bfloat16: (5e-3, 1e-2)}
"""By dtype of the call: the largest norm-wise error of a result, and of a gradient, of an operation of one stage."""

SLACK = 2.0**-21
"""Added to twice the yardstick's error: four roundings of float32, so that a yardstick that rounds nothing (one step, one
channel, no decay) does not ask for exactness. Only such float32 cases need it; the most that one needs is 3.2e-7."""

PARTS = 8
"""Into how many successive parts of the sequence an error is broken down."""


@dataclass(frozen=True)
class Truth:
    """The oracle's answer to one case in one direction, with what judging by it needs."""

    case: Case
    inputs: Inputs
    """Inputs as the variants get them; never handed out themselves, so that nobody can change them."""
    expected: Answer
    """float64."""
    allowed: dict[str, float]
    """Norm-wise error per component."""
    dtypes: dict[str, torch.dtype]
    """Per component; only where plain PyTorch could say."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.inputs.nbytes + sum(value.nbytes for value in self.expected.values() if value is not None)

    def compare(self, answer: Answer) -> tuple[tuple[ComponentError, ...], tuple[str, ...]]:
        """Every component's error, and what is wrong in sentences (empty when the answer passes)."""
        errors, problems = [], []
        for name, expected in self.expected.items():
            given = answer.get(name)
            if expected is None:
                continue
            if given is None:
                if name.startswith("grad ") and not expected.any():
                    continue  # no gradient is a zero gradient
                problems.append(f"{name} is missing.")
                continue
            if (problem := self._mismatch(name, given, expected)) is not None:
                problems.append(problem)
                if given.shape != expected.shape:
                    continue
            error = self._error(name, given, expected)
            errors.append(error)
            if not error.error <= error.allowed:
                said = "is not finite everywhere" if math.isinf(error.error) else f"is off by {error.error:.2e}"
                problems.append(f"{name} {said}; {error.allowed:.2e} is allowed (norm-wise, against the float64 oracle).")
        return tuple(errors), tuple(problems)

    def _mismatch(self, name: str, given: torch.Tensor, expected: torch.Tensor) -> str | None:
        if given.shape != expected.shape:
            return f"{name} has shape {tuple(given.shape)}; it must be {tuple(expected.shape)}."
        if given.dtype != self.dtypes.get(name, given.dtype):
            return f"{name} is {given.dtype}; it must be {self.dtypes[name]}."
        if given.device != expected.device:
            return f"{name} is on {given.device}; it must be on {expected.device}."
        return None

    def _error(self, name: str, given: torch.Tensor, expected: torch.Tensor) -> ComponentError:
        exact = given.to(device=expected.device, dtype=torch.float64)
        largest = float((exact - expected).abs().max()) if exact.numel() else 0.0
        return ComponentError(
            name=name,
            error=norm_error(exact, expected, given.dtype),
            max_error=largest if math.isfinite(largest) else math.inf,
            allowed=self.allowed[name],
            error_by_position=self._by_position(exact, expected, given.dtype),
        )

    def _by_position(self, exact: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> tuple[float, ...]:
        length = self.case.sizes.get("T", 0)
        # The batch comes first everywhere: a size that equals T by chance is looked for there last.
        along = next((axis for axis in (*range(1, exact.ndim), 0) if exact.ndim and exact.shape[axis] == length), None)
        if length < 2 or along is None or not exact.numel():
            return ()
        parts = zip(exact.tensor_split(min(PARTS, length), along), expected.tensor_split(min(PARTS, length), along), strict=True)
        return tuple(norm_error(part, truth, dtype) for part, truth in parts)


def norm_error(given: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    """``||given - expected|| / ||expected||`` of float64 tensors; infinity where anything is not finite.

    Where the oracle has nothing but zeros (or what ``dtype`` cannot tell from zero), the root mean square of the difference:
    inputs are of unit scale.
    """
    if not expected.numel():
        return 0.0
    root = math.sqrt(expected.numel())
    scale = float(torch.linalg.vector_norm(expected))
    facts = torch.finfo(dtype) if dtype.is_floating_point else torch.finfo(torch.float64)
    if scale / root < max(1e-12, facts.tiny * facts.eps):
        scale = root
    error = float(torch.linalg.vector_norm(given - expected)) / scale
    return error if math.isfinite(error) else math.inf


def find_truth(
    operation: Operation[..., Any], case: Case, device: torch.device, seed: int, direction: Direction, control: Control | None
) -> Truth:
    """Run the oracle and the yardstick on one case."""
    inputs = make_inputs(operation, case, device, seed, direction)
    oracle = operation.reference if control is None else control.oracle
    names = operation.outputs if control is None else (control.name,)
    # Forward first: the results' shapes and dtypes say which gradients come in.
    forward = Inputs(inputs.arguments)
    plain = _yardstick(operation, control, forward)
    shapes = Callee("oracle", oracle, names)(upcast(forward))
    visible = {name: shapes[name] for name in (plain or shapes) if shapes.get(name) is not None}
    if direction == "forward_backward":
        typed: Answer = {name: value.to(_dtype(plain, name, case)) for name, value in visible.items() if value is not None}
        inputs.output_gradients = draw_gradients(typed, case.dtype, seed)
        expected = Callee("oracle", oracle, names)(upcast(inputs))
        expected = {name: value for name, value in expected.items() if name in visible or name.startswith("grad ")}
        plain = _yardstick(operation, control, inputs)
    else:
        expected = visible
    stages = operation.stages if control is None else 1
    return Truth(
        case=case,
        inputs=inputs,
        expected=expected,
        allowed={name: _allowed(name, value, (plain or {}).get(name), case.dtype, stages) for name, value in expected.items()},
        dtypes={name: value.dtype for name, value in (plain or {}).items() if value is not None},
    )


def upcast(inputs: Inputs) -> Inputs:
    """Return the same values in float64; integers and what is no tensor stay as they are."""

    def up(value: torch.Tensor) -> torch.Tensor:
        return value.detach().double() if value.is_floating_point() else value

    return Inputs(inputs.map(up), inputs.differentiable, {name: g.double() for name, g in inputs.output_gradients.items()})


def yardstick(operation: Operation[..., Any]) -> Variant | None:
    """The plain same-dtype PyTorch variant: the one tagged ``yardstick``, else the one named ``eager``."""
    tagged = (variant for variant in operation.variants.values() if variant.tags.get("yardstick"))
    return next(tagged, operation.variants.get("eager"))


def _yardstick(operation: Operation[..., Any], control: Control | None, inputs: Inputs) -> Answer | None:
    """Plain PyTorch's answer, or ``None`` where it cannot run: then the dtype's cap alone decides."""
    plain = yardstick(operation)
    if control is not None:  # the control's oracle in the call's own dtype is plain PyTorch too
        callee = Callee("yardstick", control.oracle, (control.name,))
    elif plain is not None:
        callee = Callee.variant(operation, plain.name)
    else:
        return None
    try:
        return callee(inputs.clone())
    except (OneLaunchError, RuntimeError):  # unsupported, out of memory: other variants may still run
        return None


def _dtype(plain: Answer | None, name: str, case: Case) -> torch.dtype:
    value = (plain or {}).get(name)
    return case.dtype if value is None else value.dtype


def _allowed(name: str, expected: torch.Tensor | None, plain: torch.Tensor | None, dtype: torch.dtype, stages: int) -> float:
    cap = math.sqrt(stages) * CAPS.get(dtype, CAPS[torch.float32])[name.startswith("grad ")]
    if expected is None or plain is None or plain.shape != expected.shape:
        return cap
    return min(cap, 2 * norm_error(plain.double(), expected, plain.dtype) + SLACK)
