"""Variants of ``gla_layer`` that call other operations, and ``packed`` and ``packed_states``, which launch their kernels.

The dispatcher, studies and tests find registered variants by name. The tag ``parts`` names the variants of these operations that
run: of ``projections`` (both calls), ``gla`` and ``output_chain``. ``cost.py`` adds up the costs of these; ``"auto"`` leaves one
to the dispatcher. ``fuses`` names what shares a kernel or a matrix: ``gradients`` are those of all projections, in one matrix.
``yardstick`` marks the PyTorch baseline, whose error sets the tolerance, and ``maker`` says who made the code. Other keywords are
capabilities, which the class ``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from onelaunch.device.architectures import find_architecture
from onelaunch.dispatch import AUTO
from onelaunch.dispatch.capture import compile_static, compiler_missing
from onelaunch.launch.build import Build, builds_of
from onelaunch.launch.imitation import record
from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import no_steps
from onelaunch.ops.gla.variants.torch import short_enough
from onelaunch.ops.gla_layer import autograd as layer
from onelaunch.ops.gla_layer.composition import Parts, Results, Tensors, compose
from onelaunch.ops.gla_layer.contract import GlaLayerCall, LayerSizes, gla_layer


@functools.lru_cache(maxsize=256)
def _composed_of(sizes: LayerSizes, eps: float, output_final_state: bool, parts: Parts) -> Callable[[Tensors], Results]:
    """Return :func:`compose` for these options, which the compiled code sees as constants.

    Equal options give the same function, which :func:`compile_static` compiles once.
    """
    return lambda tensors: compose(tensors, sizes, eps, output_final_state, parts)


def tensors_of(call: GlaLayerCall) -> Tensors:
    """Return the first argument of :func:`compose`."""
    weights = (call.in_proj_weight, call.gk_weight, call.gk_bias, call.norm_weight, call.w_out)
    return (call.x, *weights, call.initial_state, call.conv_weight)


def _run(call: GlaLayerCall, parts: Parts) -> Results:
    """Compute the layer by the operations' variants of these names."""
    return compose(tensors_of(call), call.sizes, call.eps, call.output_final_state, parts)


_STEPWISE: Parts = ("unfused", "recurrent", "unfused")
"""Variants of the parts in plain PyTorch."""
_EAGER: Parts = ("unfused", AUTO, "unfused")
"""Variants of the parts in plain PyTorch, but the recurrence by the dispatcher's choice."""
_DISPATCHED: Parts = (AUTO, AUTO, AUTO)
"""Variants of the parts, all by the dispatcher's choice."""


@gla_layer.variant("stepwise", launches=None, fuses=(), parts=_STEPWISE, maker="pytorch", yardstick=True)
def stepwise(call: GlaLayerCall) -> Results:
    """Run everything in PyTorch, the recurrence step by step: the PyTorch baseline that sets the tolerance."""
    return _run(call, _STEPWISE)


@gla_layer.variant("unfused", launches=None, fuses=(), parts=_EAGER)
def unfused(call: GlaLayerCall) -> Results:
    """Run a product for each projection, PyTorch's activations, norm and gate; the dispatcher chooses the recurrence.

    It is the eager layer of experiment 058, and the baseline for time. With a recurrence in PyTorch it would be several times
    slower, and the speedup over it would be that of ``gla``, which has a study of its own. Its parts are called as users call
    them, so that eager times include the checks and the dispatch of each call, as those of ``composed`` do.
    """
    return _run(call, _EAGER)


@gla_layer.variant("compiled", launches=None, recompiles=True, fuses=(), parts=_EAGER)
def compiled(call: GlaLayerCall) -> Results:
    """Run the unfused layer, compiled by torch.compile in one graph that has the recurrence as an operator."""
    if torch.compiler.is_compiling():
        return _run(call, _EAGER)
    return compile_static(_composed_of(call.sizes, call.eps, call.output_final_state, _EAGER))(tensors_of(call))


compiled.supports(compiler_missing)
compiled.supports(no_steps)


@compiled.supports
def short_enough_on_a_cpu(query: Query) -> str | None:
    """Return why a sequence is too long to compile on a CPU, or ``None``: the loop over chunks is unrolled there."""
    return short_enough(query) if query.device_type == "cpu" else None


@gla_layer.variant("composed", launches=None, fuses=(), parts=_DISPATCHED)
def composed(call: GlaLayerCall) -> Results:
    """Run ``projections`` twice, ``gla`` and ``output_chain``, each by the dispatcher's choice, as the modules do.

    With one decay per head the first call of ``projections`` computes the decays too, and there is no second one. The short
    convolutions are one launch together where our kernel can run, else PyTorch's functions.
    """
    return _run(call, _DISPATCHED)


@composed.kernels
def convolutions(architecture: str) -> list[Build]:
    """Return the kernels of the short convolutions, forward and backward. Those of the other parts belong to their operations."""
    from onelaunch.kernels.convolution import launch

    with record(architecture) as (device, launches), torch.no_grad():
        x = torch.empty(4, 2048, 1024, dtype=torch.bfloat16, device=device)
        given = launch.Operands.of(x, x.new_empty(1024, 4), None, x.new_empty(4, 1024, 3), None, silu=True)
        launch.backward(given, [launch.forward(given)], (True, True, False, True))
    return builds_of([("convolutions", each) for each in launches], find_architecture(architecture))


@gla_layer.variant("packed", launches=None, fuses=("gradients",), parts=_DISPATCHED)
def packed(call: GlaLayerCall) -> Results:
    """Run the layer as one autograd function: its backward pass writes the gradients of all projections into one matrix.

    See ``autograd.py``. Its parts run our own kernels: the dispatcher's choice if that is one of them. The projection of x is
    PyTorch's product alone, since no activation follows it. Without a backward pass it would equal ``composed``.
    """
    return layer.compute(call)


@gla_layer.variant("packed_states", launches=None, fuses=("gradients",), parts=_DISPATCHED)
def packed_states(call: GlaLayerCall) -> Results:
    """Run ``packed`` with a forward pass that saves the state entering each chunk of 64 steps, in 16 bits.

    This saves one of the two chunk state passes of the backward pass, for ``B * T * H * K * V / 32`` bytes between the passes.
    The dispatcher chooses it where measured times are shorter by more than its limit for equally fast variants.
    """
    return layer.compute(call, keep_states=True)


packed.supports(layer.why_not)
packed_states.supports(layer.why_not)


@packed_states.supports
def saves_states(query: Query) -> str | None:
    """Return why states cannot be saved, or ``None``: only the forward pass of gla's ``hopper`` can leave them in memory."""
    _, recurrence, _ = layer.parts_of(query, layer.ALIGNMENT, 1.0)  # rank and normalizer do not matter to the recurrence
    return None if layer.own_kernel(recurrence, ("hopper",)) else "keeps states of the recurrence hopper alone"


def _training(*heads: tuple[int, int], architectures: tuple[str, ...] | None = None) -> list[Example]:
    """Return training calls to compile and inspect the kernels for: heads of these sizes K and V, so many that T is not cut."""
    return [
        Example(
            gla_layer.case("bfloat16", B=32, T=2048, D=2048, H=12, K=keys, V=values),
            "forward_backward",
            architectures,
            name=f"K = {keys}, V = {values}",
        )
        for keys, values in heads
    ]


@packed.examples
def heads_of_aliased_states() -> list[Example]:
    """Return training calls whose states share memory with dq and dk on Hopper (V = 128), and one whose states do not."""
    return _training((64, 128), (128, 128), (256, 256))


@packed_states.examples
def heads_of_kept_states() -> list[Example]:
    """Return training calls that save the states."""
    return _training((128, 128), (256, 256), architectures=("sm_90a",))
