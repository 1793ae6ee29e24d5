"""Calls of an operation as tests, timings and profiles make them: made inputs, one call, and the results by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from onelaunch.errors import OneLaunchError, VariantUnsupported
from onelaunch.operation import Bundle, Case, Control, Direction, Operation, Outputs, names_of
from onelaunch.wording import in_a_line
from onelaunch.workbench.result import Status

Answer = dict[str, torch.Tensor | None]
"""Results of one call by name, then ``grad NAME`` for every differentiable input (``None`` where there is none)."""


@dataclass
class Inputs:
    """The arguments of one call, and, when it is followed by its backward pass, the gradients of its results."""

    arguments: dict[str, Any]
    differentiable: tuple[str, ...] = ()
    """Empty for a forward call."""
    output_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """By result name, in the dtype of the result."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor that the call may read and must not change."""
        for name, value in self.arguments.items():
            if isinstance(value, torch.Tensor):
                yield name, value
            elif isinstance(value, Bundle):
                yield from ((f"{name}.{part}", tensor) for part, tensor in value.tensors().items())
        for name, value in self.output_gradients.items():
            yield f"gradient of {name}", value

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for _, tensor in self.named_tensors())

    def clone(self) -> Inputs:
        """Return the same contents in new storage."""
        gradients = {name: gradient.clone() for name, gradient in self.output_gradients.items()}
        return Inputs(self.map(lambda tensor: tensor.detach().clone()), self.differentiable, gradients)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Return the arguments with a function applied to each tensor; differentiable ones require gradients again."""

        def each(name: str, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return function(value).requires_grad_(name in self.differentiable)
            return value.map(function) if isinstance(value, Bundle) else value

        return {name: each(name, value) for name, value in self.arguments.items()}

    @torch.no_grad()
    def load(self, other: Inputs) -> None:
        """Copy another's contents into this storage; a tensor whose shape differs is left as it is."""
        contents = dict(other.named_tensors())
        for name, tensor in self.named_tensors():
            if name in contents and contents[name].shape == tensor.shape:
                tensor.copy_(contents[name])


def make_inputs(operation: Operation[..., Any], case: Case, device: torch.device, seed: int, direction: Direction) -> Inputs:
    """Return the operation's inputs for a case, ready for the direction, but for the gradients of the results."""
    reading = operation.make_inputs(case, device, seed)
    return Inputs(reading.arguments, reading.differentiable if direction == "forward_backward" else ()).clone()


def draw_gradients(outputs: Answer, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Random gradients for every floating-point result, with values that ``dtype`` holds exactly, in the dtype of the result."""
    drawn = {}
    for name, output in outputs.items():
        if output is not None and output.is_floating_point():
            generator = torch.Generator(device=output.device).manual_seed(seed + 1 + len(drawn))
            values = torch.randn(output.shape, device=output.device, generator=generator)
            drawn[name] = values.to(dtype).to(output.dtype)
    return drawn


@dataclass(frozen=True)
class Callee:
    """Target of a call: a variant through the public function, a control, or the oracle."""

    name: str
    call: Callable[..., Any]
    outputs: Outputs

    @classmethod
    def variant(cls, operation: Operation[..., Any], name: str) -> Callee:
        """A variant as a user calls it, checks and dispatch included."""
        operation.get(name)
        return cls(name, lambda **arguments: operation(**arguments, variant=name), operation.outputs)

    @classmethod
    def control(cls, operation: Operation[..., Any], control: Control) -> Callee:
        """A control on the operation's checked call; its result goes by the control's name."""
        return cls(control.name, lambda **arguments: control.run(operation.bind(**arguments)), (control.name,))

    def __call__(self, inputs: Inputs) -> Answer:
        """Call once, with the backward pass when the inputs ask for gradients."""
        if not inputs.differentiable:
            with torch.no_grad():
                return self.name_results(self.call(**inputs.arguments), inputs.arguments)
        with torch.enable_grad():
            outputs = self.name_results(self.call(**inputs.arguments), inputs.arguments)
            reached = {name: outputs[name] for name in inputs.output_gradients if name in outputs}
            reached = {
                name: output
                for name, output in reached.items()  # a result of a wrong shape takes no gradient; the verdict names the shape
                if output is not None and output.requires_grad and output.shape == inputs.output_gradients[name].shape
            }
            leaves = [inputs.arguments[name] for name in inputs.differentiable]
            gradients: tuple[torch.Tensor | None, ...] = (None,) * len(leaves)
            if reached:
                seeds = [inputs.output_gradients[name].to(output.dtype) for name, output in reached.items()]
                gradients = torch.autograd.grad(list(reached.values()), leaves, seeds, allow_unused=True)
        answer: Answer = {name: None if output is None else output.detach() for name, output in outputs.items()}
        return answer | {f"grad {name}": gradient for name, gradient in zip(inputs.differentiable, gradients, strict=True)}

    def name_results(self, result: Any, arguments: Mapping[str, Any]) -> Answer:
        """Return what the callee returned for these arguments, by name."""
        results = result if isinstance(result, tuple) else (result,)
        return dict(zip(names_of(self.outputs, arguments), results, strict=False))


def duplicate(answer: Answer) -> Answer:
    """Return copies of the tensors of an answer, taken on the current stream."""
    return {name: None if value is None else value.clone() for name, value in answer.items()}


def status_of(error: BaseException) -> tuple[Status, str]:
    """Return the status that a variant's exception stands for, and the reason in one line."""
    reason = in_a_line(error)
    for link in (error, error.__cause__):
        if isinstance(link, torch.OutOfMemoryError) or "can't allocate memory" in str(link):
            return "out_of_memory", reason
    if isinstance(error, VariantUnsupported):
        return "unsupported", error.reason
    if isinstance(error, ImportError):
        return "not_installed", reason
    return "error", reason if isinstance(error, OneLaunchError) else f"{type(error).__name__}: {reason}"
