"""Calls of an operation as tests, timings and profilers make them: generated inputs, one call, and its outputs by name.

The modules of ``verify`` and ``measure`` make inputs and call variants with it. ``running.py`` and ``measures/host.py`` take
:func:`status_of`, as modules of both do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from onelaunch.errors import OneLaunchError, VariantResultError, VariantUnsupported
from onelaunch.moved import renamed
from onelaunch.operation import AUTO, Bundle, Case, Control, Direction, Operation, Outputs, names_of
from onelaunch.wording import in_a_line, listing
from onelaunch.workbench.result import Status

OutputTensors = dict[str, torch.Tensor | None]
"""Outputs of one call by name, then the gradient of each differentiable input as ``grad NAME``.

A value is ``None`` if the call returned ``None``, or if no gradient reaches the input.
"""

# Names that were renamed; each still works, with a DeprecationWarning.
__getattr__ = renamed(__name__, {"Answer": "OutputTensors", "Callee": "Candidate"})


@dataclass
class Inputs:
    """Arguments of one call. For a call with its backward pass, also the gradients that come in through its outputs."""

    arguments: dict[str, Any]
    differentiable: tuple[str, ...] = ()
    """Names of the inputs whose gradients are computed; empty for a forward call."""
    output_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Incoming gradients by the name of the output, each in the dtype of the output."""
    through: tuple[str, ...] | None = None
    """Names of the outputs through which gradients come in; ``None`` for all that have floating-point numbers."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the tensor of everything that the call may read and must not change."""
        for name, value in self.arguments.items():
            if isinstance(value, torch.Tensor):
                yield name, value
            elif isinstance(value, Bundle):
                yield from ((f"{name}.{part}", tensor) for part, tensor in value.tensors().items())
        for name, value in self.output_gradients.items():
            yield f"gradient of {name}", value

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for _, tensor in self.named_tensors())

    def clone(self) -> Inputs:
        """Return a copy of all tensors in new storage."""
        gradients = {name: gradient.clone() for name, gradient in self.output_gradients.items()}
        return Inputs(self.map(lambda tensor: tensor.detach().clone()), self.differentiable, gradients, self.through)

    def wanting(self, *names: str) -> Inputs:
        """Return a copy in which only the named inputs take gradients."""
        gradients = {name: gradient.clone() for name, gradient in self.output_gradients.items()}
        copy = Inputs(self.arguments, names, gradients, self.through)
        copy.arguments = copy.map(lambda tensor: tensor.detach().clone())
        return copy

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Return the arguments with a function applied to each tensor; differentiable ones require gradients again."""

        def each(name: str, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return function(value).requires_grad_(name in self.differentiable)
            return value.map(function) if isinstance(value, Bundle) else value

        return {name: each(name, value) for name, value in self.arguments.items()}

    @torch.no_grad()
    def load(self, other: Inputs) -> None:
        """Copy the contents of other inputs into this storage. A tensor whose shape differs keeps its contents."""
        contents = dict(other.named_tensors())
        for name, tensor in self.named_tensors():
            if name in contents and contents[name].shape == tensor.shape:
                tensor.copy_(contents[name])


def make_inputs(operation: Operation[..., Any], case: Case, device: torch.device, seed: int, direction: Direction) -> Inputs:
    """Return the operation's inputs for a case and direction. Gradients of the outputs are not in them yet."""
    made = operation.make_inputs(case, device, seed)
    backward = direction == "forward_backward"
    # The clone also makes the differentiable tensors require gradients.
    return Inputs(made.arguments, made.differentiable if backward else (), through=made.through).clone()


def draw_gradients(
    outputs: OutputTensors, dtype: torch.dtype, seed: int, through: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """Draw a random gradient for every floating-point output, or for those in ``through``.

    The values are representable in ``dtype``, so that a cast to it loses nothing. Each gradient has the dtype of its output.
    """
    drawn = {}
    for name, output in outputs.items():
        if output is not None and output.is_floating_point() and (through is None or name in through):
            # A seed of its own for each output, different from the seed of the inputs.
            generator = torch.Generator(device=output.device).manual_seed(seed + 1 + len(drawn))
            values = torch.randn(output.shape, device=output.device, generator=generator)
            drawn[name] = values.to(dtype).to(output.dtype)
    return drawn


@dataclass(frozen=True)
class Candidate:
    """Function that is called and whose outputs are judged: a variant through the public function, a control, or the oracle."""

    name: str
    call: Callable[..., Any]
    outputs: Outputs
    strict: bool = False
    """True for variants and controls, which must return exactly the named results. An oracle may return more."""
    operation: str = ""
    """Name of the operation, for messages."""
    foreign: bool = False
    """True for a variant that calls another project's package."""

    @classmethod
    def variant(cls, operation: Operation[..., Any], name: str) -> Candidate:
        """Return a variant, or ``auto``, as a user calls it, with the checks and the dispatch of the public function."""
        foreign = name != AUTO and operation.get(name).capabilities.requires is not None
        return cls(
            name,
            lambda **arguments: operation(**arguments, variant=name),
            operation.outputs,
            strict=True,
            operation=operation.name,
            foreign=foreign,
        )

    @classmethod
    def control(cls, operation: Operation[..., Any], control: Control) -> Candidate:
        """Return the candidate for a control, whose name its output has. It gets arguments that the operation has checked."""
        return cls(
            control.name,
            lambda **arguments: control.run(operation.bind(**arguments)),
            (control.name,),
            strict=True,
            operation=operation.name,
        )

    def __call__(self, inputs: Inputs) -> OutputTensors:
        """Call once, with the backward pass if the inputs are differentiable, and return all outputs and gradients."""
        return self.backward(self.forward(inputs), inputs)

    def forward(self, inputs: Inputs) -> OutputTensors:
        """Call once without the backward pass. If the inputs are differentiable, :meth:`backward` takes what this returns.

        Raises:
            VariantResultError: A variant or control returned too many results or one that is no tensor, or left gradients
                switched on or off.
        """
        wanted = bool(inputs.differentiable)
        with torch.set_grad_enabled(wanted):
            result = self.call(**inputs.arguments)
            if self.strict and torch.is_grad_enabled() != wanted:  # leaving this block would hide it
                problem = f"left gradients switched {'off' if wanted else 'on'}"
                raise VariantResultError(self.operation, self.name, problem=problem)
        return self.name_outputs(result, inputs.arguments)

    def backward(self, outputs: OutputTensors, inputs: Inputs, through: Collection[str] | None = None) -> OutputTensors:
        """Return the outputs of :meth:`forward` without their graph, and the gradients of the differentiable inputs.

        Args:
            outputs: Outputs of the call.
            inputs: Inputs of the call, with the gradients that come in.
            through: Names of the outputs through which gradients come in; ``None`` for all that have one.
        """
        if not inputs.differentiable:
            return outputs
        names = inputs.output_gradients if through is None else through
        reached = {name: outputs[name] for name in names if name in outputs}
        # An output of a wrong shape cannot take the gradient; it is left out here, and the verdict names its shape. One of a
        # wrong dtype takes the gradient in its own dtype, and the verdict names that.
        reached = {
            name: output
            for name, output in reached.items()
            if output is not None and output.requires_grad and output.shape == inputs.output_gradients[name].shape
        }
        leaves = [inputs.arguments[name] for name in inputs.differentiable]
        gradients: tuple[torch.Tensor | None, ...] = (None,) * len(leaves)
        if reached:
            with torch.enable_grad():
                seeds = [inputs.output_gradients[name].to(output.dtype) for name, output in reached.items()]
                gradients = torch.autograd.grad(list(reached.values()), leaves, seeds, allow_unused=True)
        detached: OutputTensors = {name: None if output is None else output.detach() for name, output in outputs.items()}
        return detached | {f"grad {name}": gradient for name, gradient in zip(inputs.differentiable, gradients, strict=True)}

    def name_outputs(self, result: Any, arguments: Mapping[str, Any]) -> OutputTensors:
        """Return by name what the call with these arguments returned.

        Raises:
            VariantResultError: A variant or control returned more results than it has names for, or one that is no tensor.
        """
        results = result if isinstance(result, tuple) else (result,)
        names = names_of(self.outputs, arguments)
        if self.strict:
            if len(results) > len(names):
                problem = f"returned {len(results)} results; it must return {len(names)} ({listing(names)})"
                raise VariantResultError(self.operation, self.name, problem=problem)
            for name, value in zip(names, results, strict=False):
                if value is not None and not isinstance(value, torch.Tensor):
                    problem = f"returned {name} as {type(value).__name__}; it must be a torch.Tensor"
                    raise VariantResultError(self.operation, self.name, problem=problem)
        # Surplus results of an oracle are dropped. A missing one is reported by the verdict.
        return dict(zip(names, results, strict=False))


def duplicate(outputs: OutputTensors) -> OutputTensors:
    """Return copies of output tensors; the copies are enqueued on the current stream."""
    return {name: None if value is None else value.clone() for name, value in outputs.items()}


def status_of(error: BaseException) -> tuple[Status, str]:
    """Return the status of a measurement whose variant raised this exception, and the reason in one line."""
    reason = in_a_line(error)
    # The cause is examined too, because a failed capture, for example, wraps the error of the call. PyTorch's CPU allocator
    # raises a RuntimeError, which is recognised by its message.
    for link in (error, error.__cause__):
        if isinstance(link, torch.OutOfMemoryError) or "can't allocate memory" in str(link):
            return "out_of_memory", reason
    if isinstance(error, VariantUnsupported):
        return "unsupported", error.reason
    if isinstance(error, ImportError):
        return "not_installed", reason
    return "error", reason if isinstance(error, OneLaunchError) else f"{type(error).__name__}: {reason}"
