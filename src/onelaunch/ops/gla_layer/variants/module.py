"""The variant ``module`` of ``gla_layer``: the layer as people call it, through the classes of :mod:`onelaunch.nn`.

Studies time it, since the checks of a module and PyTorch's own of every ``nn.Module`` are a part of what a small model waits for.

The dispatcher, studies and tests find registered variants by name. The tag ``parts`` names the variants of ``projections``,
``gla`` and ``output_chain`` that run, here those that the dispatcher chooses; ``cost.py`` adds up their costs. ``fuses``, the
steps that share a kernel, is left empty. ``auto`` never chooses this variant (``by_name_only``).
"""

from __future__ import annotations

import functools
import importlib
import threading

import torch
from torch import nn

from onelaunch import dispatch
from onelaunch.dispatch import AUTO
from onelaunch.launch.imitation import imitated
from onelaunch.operation import Query
from onelaunch.ops.gla_layer.composition import Results
from onelaunch.ops.gla_layer.contract import GlaLayerCall, LayerSizes, gla_layer
from onelaunch.ops.gla_layer.modules import filter_size, filters_of, layer_arguments

ONE_AT_A_TIME = threading.Lock()
"""Lock of the cached modules, which threads share and which hold the tensors of one call at a time."""


@gla_layer.variant("module", launches=None, fuses=(), parts=(AUTO, AUTO, AUTO), by_name_only=True)
def module(call: GlaLayerCall) -> Results:
    """Call a layer of ``onelaunch.nn`` with the tensors of the call as its parameters.

    It is ``GatedLinearAttention``, or ``SimpleGatedLinearAttention`` for one decay per head. A first call is run once more for
    its launches while it holds the lock (:mod:`onelaunch.launch.side_by_side`). That run calls the operation, which launches
    the same kernels.
    """
    if imitated():
        return dispatch.run(gla_layer, call, AUTO)
    layer, places = module_of(call.x.shape[2], call.sizes, call.eps, filter_size(call))
    given = (call.in_proj_weight, call.gk_weight, call.gk_bias, call.norm_weight, call.w_out, *filters_of(call))
    tensors = [each for each in given if each is not None]
    with ONE_AT_A_TIME:
        for (owner, name), tensor in zip(places, tensors, strict=True):
            vars(owner)[name] = tensor  # setattr would register a Parameter in the module
        try:
            out, _, _ = layer(call.x)
        finally:
            for owner, name in places:
                vars(owner).pop(name, None)
    return out, None


Place = tuple[nn.Module, str]
"""A module and the name of its parameter."""


@functools.lru_cache(maxsize=64)
def module_of(width: int, sizes: LayerSizes, eps: float, conv_size: int | None) -> tuple[nn.Module, tuple[Place, ...]]:
    """Return a module of these sizes without its parameters, and their places in the order of the call's tensors.

    A call sets its tensors as plain attributes instead. ``torch.func.functional_call`` would do the same, but takes longer than
    what is timed.
    """
    modules = importlib.import_module("onelaunch.nn")  # by name, since modules are a higher layer than operations
    given = layer_arguments(width, sizes, eps, conv_size)
    with torch.device("meta"):
        if sizes.rank is None:
            layer = modules.SimpleGatedLinearAttention(**given)
            decays = ("in_proj_weight", "in_proj_bias")
        else:
            layer = modules.GatedLinearAttention(**given, gate_low_rank_dim=sizes.rank)
            decays = ("in_proj_weight", "gk_proj_weight", "gk_proj_bias")
    filters = () if conv_size is None else ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
    names = (*decays, f"{layer.norm_name}.weight", "o_proj.weight", *filters)
    places = tuple((layer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names)
    for owner, name in places:
        delattr(owner, name)
    return layer, places


@module.supports
def has_no_states(query: Query) -> str | None:
    """Return why the module cannot take a call, or ``None``."""
    return "keeps states in a cache of its own" if {"initial_state", "final_state"} & set(query.flags) else None
