"""Wrap functions that launch kernels: as registered operators for compiled code, as autograd functions for eager code.

``autograd.py`` of each operation that trains by kernels of its own makes operators with it, and so do ``gla_layer``, the chunked
scan in PyTorch (``kernels/scan``) and the short convolution (``kernels/convolution``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import library

from onelaunch.errors import TransformUnsupported
from onelaunch.launch.imitation import imitate, recorded
from onelaunch.launch.planned import Planned
from onelaunch.launch.side_by_side import Launching
from onelaunch.launch.sites import CallSite
from onelaunch.launch.tape import active_tape
from onelaunch.tracing import is_traced, is_transformed

Gradients = tuple[torch.Tensor | None, ...]
"""Gradient, or ``None``, for every input of a function."""


class Operator:
    """Function from tensors to new tensors that PyTorch can trace, and differentiate if ``gradients`` is given.

    Compiled code calls the registered operator ``onelaunch::NAME``, into which Dynamo does not trace. Eager code calls the
    function itself, inside an autograd function if a gradient is needed, since calling the operator costs the host several
    times as much. Both forms are built from the same parts::

        backward = Operator("scan_backward", run_backward, fake=...)
        forward = Operator("scan_forward", run_forward, fake=..., save=..., gradients=..., backward=backward, outputs=2)
        y, final_state, *_ = forward(*inputs, grad=call.query().grad)

    Args:
        name: Name of the operator, without the namespace.
        run: Function to wrap. PyTorch reads the operator's schema from its annotations. It must return new
            tensors, never an input or a view of one.
        fake: Function from the same inputs to empty tensors with the shapes, dtypes and strides of the results of ``run``. Sizes
            may be symbolic in it, so it must neither compare them nor look them up in a cache: a comparison would be a guard of
            the compiled code. The default, which only tests use, is ``run`` itself with its launches imitated, for operators of
            fixed sizes.
        save: Function ``save(ctx, inputs, output)`` that saves what ``gradients`` needs, like ``setup_context`` of an autograd
            function.
        gradients: Function ``gradients(ctx, backward, *grad_outputs)`` that returns a gradient, or ``None``, for every input of
            ``run``. It may call the given ``backward`` and PyTorch functions. Its results are not differentiable. The gradient of
            an unused output is zeros, or ``None`` if ``save`` called ``ctx.set_materialize_grads(False)``.
        backward: Operator that is passed to ``gradients``: its registered form in compiled code, its function in eager code. The
            default is this operator itself, for a function whose gradient consists of calls of the same function.
        outputs: Number of leading outputs that are differentiable and whose gradients are passed to ``gradients``. The other
            outputs exist only for ``save``; a call of eager code that takes gradients does not return them.
        views: Function ``views(inputs, output)`` that splits the only output, or the first of several, into views. It may use
            only those inputs that are not tensors (the others may be ``None``). Callers then get only the views, and
            ``gradients`` gets one gradient for each view. Compiled code concatenates these gradients, since an operator may not
            return views; eager code does not.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        *,
        fake: Callable[..., Any] | None = None,
        save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
        gradients: Callable[..., Gradients] | None = None,
        backward: Operator | None = None,
        outputs: int = 1,
        views: Callable[[tuple[Any, ...], torch.Tensor], tuple[torch.Tensor, ...]] | None = None,
    ) -> None:
        self.name = name
        self.run = run
        launch = _launching(run)
        self.planned: Planned[Any] = Planned(launch)
        self.views = views
        self._outputs = outputs
        # Three forms of the function: for compiled code, for eager code with a gradient, and for recorded launches (_recorded).
        self.registered = library.custom_op(
            f"onelaunch::{name}", launch, mutates_args=(), schema=library.infer_schema(run, mutates_args=())
        )
        self.fake: Callable[..., Any] = fake or partial(_imitated, run)
        self.registered.register_fake(self.fake)
        self.eager: Callable[..., Any] = self.planned
        self._recorded: Callable[..., Any] | None = None
        self._apply: Callable[..., Any] | None = None
        if save is None or gradients is None:
            return
        inner = backward or self

        def save_all(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            save(ctx, inputs, output)
            if views is not None:  # for the backward pass; tensors are not kept, since ``views`` may not use them
                ctx.split_gradient = partial(views, tuple(None if isinstance(each, torch.Tensor) else each for each in inputs))

        def differentiate_registered(ctx: Any, *grad_outputs: Any) -> Gradients:
            given = grad_outputs[:outputs] if views is None else ctx.split_gradient(grad_outputs[0])
            return gradients(ctx, inner.registered, *given)

        self.registered.register_autograd(differentiate_registered, setup_context=save_all)

        def forward_and_save(ctx: Any, *inputs_and_site: Any) -> Any:
            inputs, site = inputs_and_site[:-1], inputs_and_site[-1]
            output = self.planned(*inputs) if site is None else site.forward(inputs)
            save(ctx, inputs, output)
            if views is not None:
                return views(inputs, _first(output))
            # What exists for ``save`` alone is kept by it, and autograd need not know it as an output.
            return output[:outputs] if isinstance(output, tuple) else output

        def differentiate(ctx: Any, *grad_outputs: Any) -> Gradients:
            found = gradients(ctx, inner.planned, *(grad_outputs[:outputs] if views is None else grad_outputs))
            return (*found, None)  # None for the call site

        self._recorded = _both_passes(run, save, gradients, inner, views, outputs)
        once = torch.autograd.function.once_differentiable(differentiate)

        def differentiate_once(ctx: Any, *grad_outputs: Any) -> Gradients:
            # Without ``create_graph`` the mode is off already, and nothing has to be marked.
            run = once if torch.is_grad_enabled() else differentiate
            # ``backward()`` may be called under autocast, which would lower products that the gradients have, and their plans.
            for each in grad_outputs:
                if each is not None and torch.is_autocast_enabled(each.device.type):
                    with torch.autocast(each.device.type, enabled=False):
                        return run(ctx, *grad_outputs)
            return run(ctx, *grad_outputs)

        methods = {"forward": staticmethod(forward_and_save), "backward": staticmethod(differentiate_once)}
        function: Any = type(name, (torch.autograd.Function,), methods)  # profilers show this name
        # ``Function.apply`` looks for transforms of torch.func, which a call refuses, and then calls this method.
        self._apply = apply = super(torch.autograd.Function, function).apply
        self.eager = lambda *inputs: apply(*inputs, None)

    def __call__(self, *inputs: Any, grad: bool) -> Any:
        """Return the function's results; ``grad`` says whether the call may be differentiated later.

        Raises:
            TransformUnsupported: The call is inside a transform of ``torch.func``.
        """
        tape = active_tape()
        if tape is None:
            return self._call(inputs, grad)
        repeated: Callable[..., Any] = self.eager if grad else self._without_gradients
        if grad and self._apply is not None and tape.holds(inputs):
            repeated = CallSite(self._apply, self.planned, inputs)
        return tape.operated(repeated, lambda: self._call(inputs, grad), inputs)

    def _without_gradients(self, *inputs: Any) -> Any:
        """Return the function's results in eager code."""
        output = self.planned(*inputs)
        return output if self.views is None else self.views(inputs, _first(output))

    def _call(self, inputs: tuple[Any, ...], grad: bool) -> Any:
        """Return the function's results in the form that the present mode of PyTorch and of launches needs."""
        if is_transformed():
            raise TransformUnsupported(self.name)
        if recorded():
            with torch.no_grad():  # as the forward of an autograd function would run
                output = self._recorded(*inputs) if grad and self._recorded else self.run(*inputs)
            if grad and torch.is_grad_enabled():  # so that later parts of the recorded call take gradients too
                for each in (output if isinstance(output, tuple) else (output,))[: self._outputs]:
                    each.requires_grad_(each.is_floating_point())
            return output if self.views is None else self.views(inputs, _first(output))
        traced = is_traced(inputs[0])  # one tensor of the call is enough, see is_traced
        if grad and not traced:
            return self.eager(*inputs)
        if not traced:
            return self._without_gradients(*inputs)
        output = self.registered(*inputs)
        return output if self.views is None else self.views(inputs, _first(output))


def _first(output: Any) -> torch.Tensor:
    """Return the only output of a function, or the first of several."""
    return output if isinstance(output, torch.Tensor) else output[0]


def _both_passes(
    run: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], Any], None],
    gradients: Callable[..., Gradients],
    backward: Operator,
    views: Callable[[tuple[Any, ...], torch.Tensor], tuple[torch.Tensor, ...]] | None,
    outputs: int,
) -> Callable[..., Any]:
    """Return a function that launches the kernels of both passes, so that both are recorded, and returns the output of ``run``.

    PyTorch builds no autograd graph on a pretended device. So ``gradients`` is called here, with empty tensors as the gradients
    of the outputs. The arguments are those of :class:`Operator`.
    """

    def run_forward_and_backward(*inputs: Any) -> Any:
        output = run(*inputs)
        ctx = _Context(inputs)
        save(ctx, inputs, output)
        results = views(inputs, _first(output)) if views is not None else output
        all_results = results if isinstance(results, tuple) else (results,)
        differentiable = all_results if views is not None else all_results[:outputs]
        gradients(ctx, backward.run, *(torch.empty_like(each) for each in differentiable))
        return output

    return run_forward_and_backward


def _launching(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the signature of ``run`` that runs it, and compiles its kernels side by side if one is missing."""

    @functools.wraps(run)
    def launch(*inputs: Any) -> Any:
        with Launching(run, *inputs):
            return run(*inputs)

    return launch


def _imitated(run: Callable[..., Any], *inputs: Any) -> Any:
    """Return the results of a function on fake tensors, with its launches imitated."""
    with imitate():
        return run(*inputs)


class _Context:
    """Context of an autograd function for a recorded backward pass.

    Gradients are asked for by the inputs that require them, or by all floating-point inputs if none does.
    """

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        required = tuple(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs)
        floating = tuple(isinstance(each, torch.Tensor) and each.is_floating_point() for each in inputs)
        self.needs_input_grad = required if any(required) else floating
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing, since a recorded pass gets a gradient for every output."""
