"""Variants of ``gla_layer`` that are made of the operations: which variants of those they run is all that they differ in.

The tag ``parts`` names them: of both calls of ``projections``, of ``gla``, and of ``output_chain``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from onelaunch.dispatch import AUTO
from onelaunch.dispatch.capture import compile_static, compiler_missing
from onelaunch.operation import Query
from onelaunch.operation.requirements import no_steps
from onelaunch.ops.gla.variants.torch import short_enough
from onelaunch.ops.gla_layer import autograd as layer
from onelaunch.ops.gla_layer.composition import Parts, Results, Tensors, compose
from onelaunch.ops.gla_layer.contract import GlaLayerCall, LayerSizes, gla_layer


@functools.lru_cache(maxsize=256)
def composed_of(sizes: LayerSizes, eps: float, output_final_state: bool, parts: Parts) -> Callable[[Tensors], Results]:
    """:func:`compose` of one kind, so that what is compiled sees all but the tensors as constants."""
    return lambda tensors: compose(tensors, sizes, eps, output_final_state, parts)


def tensors_of(call: GlaLayerCall) -> Tensors:
    """The first argument of :func:`compose`."""
    return (call.x, call.in_proj_weight, call.gk_weight, call.gk_bias, call.norm_weight, call.w_out, call.initial_state)


def run(call: GlaLayerCall, parts: Parts) -> Results:
    """By variants of these names."""
    return compose(tensors_of(call), call.sizes, call.eps, call.output_final_state, parts)


STEPWISE: Parts = ("unfused", "recurrent", "unfused")
EAGER: Parts = ("unfused", AUTO, "unfused")
DISPATCHED: Parts = (AUTO, AUTO, AUTO)


@gla_layer.variant("stepwise", launches=None, fuses=(), parts=STEPWISE, maker="pytorch", yardstick=True)
def stepwise(call: GlaLayerCall) -> Results:
    """All in PyTorch, the recurrence step by step: what the other variants are measured against for accuracy."""
    return run(call, STEPWISE)


@gla_layer.variant("unfused", launches=None, fuses=(), parts=EAGER)
def unfused(call: GlaLayerCall) -> Results:
    """A product for each projection, PyTorch's activations, norm and gate; the recurrence as the dispatcher runs it.

    The eager layer of experiment 058, and the baseline for time. With a recurrence of PyTorch's own it would be several times
    slower, and the gain over it would be that of ``gla``, which has a study of its own. Its parts are called as users call
    them, so that eager times count the checks and the dispatch of four operations here as in ``composed``.
    """
    return run(call, EAGER)


@gla_layer.variant("compiled", launches=None, fuses=(), parts=EAGER)
def compiled(call: GlaLayerCall) -> Results:
    """torch.compile of the unfused layer, in one graph with the recurrence as an operator in it."""
    if torch.compiler.is_compiling():
        return run(call, EAGER)
    return compile_static(composed_of(call.sizes, call.eps, call.output_final_state, EAGER))(tensors_of(call))


compiled.supports(compiler_missing)
compiled.supports(no_steps)


@compiled.supports
def short_enough_on_a_cpu(query: Query) -> str | None:
    """There the recurrence is PyTorch's loop over chunks, which is unrolled."""
    return short_enough(query) if query.device_type == "cpu" else None


@gla_layer.variant("composed", launches=None, fuses=(), parts=DISPATCHED)
def composed(call: GlaLayerCall) -> Results:
    """``projections`` twice, ``gla`` and ``output_chain``, each by the variant that the dispatcher chooses: what modules run."""
    return run(call, DISPATCHED)


@gla_layer.variant("packed", launches=None, fuses=("gradients",), parts=DISPATCHED)
def packed(call: GlaLayerCall) -> Results:
    """One function with a backward pass of its own: gradients of all projections are written into one matrix.

    See ``autograd.py``. Its parts run by kernels of ours, the one that the dispatcher chooses where it is one of them; what reads
    x is a product of PyTorch's alone, since no activation follows it. Without a backward pass it would be ``composed``.
    """
    return layer.compute(call)


@gla_layer.variant("packed_states", launches=None, fuses=("gradients",), parts=DISPATCHED)
def packed_states(call: GlaLayerCall) -> Results:
    """The same, and the forward pass keeps the state that enters each chunk of 64 steps, in 16 bits, for the backward pass.

    That saves one of its two walks for ``B * T * H * K * V / 32`` bytes between the passes. The dispatcher chooses it where
    it was measured to be faster by more than what counts as equal.
    """
    return layer.compute(call, keep_states=True)


packed.supports(layer.why_not)
packed_states.supports(layer.why_not)


@packed_states.supports
def walks(query: Query) -> str | None:
    """Only that recurrence makes all of the states where outputs are read from them."""
    _, recurrence, _ = layer.parts_of(query, layer.ALIGNMENT, 1.0)
    return None if layer.own_kernel(recurrence, ("hopper",)) else "keeps states of the recurrence hopper alone"
