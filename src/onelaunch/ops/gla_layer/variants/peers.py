"""The peers of ``gla_layer``: layers of fla (flash-linear-attention) with the weights of the call.

The dispatcher, studies and tests find registered variants by name. The tag ``parts`` names the variants of ``projections``,
``gla`` and ``output_chain`` that do as these layers do; ``cost.py`` adds up their costs. ``fuses``, the steps that share a
kernel, is left empty. ``maker`` is the author, and ``usual`` is false for the form that fla's layer does not have; studies select
variants by tags. Other keywords are capabilities, which the class ``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from onelaunch.device.tools import package_installed
from onelaunch.operation import Query
from onelaunch.operation.requirements import not_installed
from onelaunch.ops.gla.variants.peers import FEW_STEPS, chunk_backward
from onelaunch.ops.gla_layer.composition import Results, segments_of
from onelaunch.ops.gla_layer.contract import GlaLayerCall, LayerSizes, gla_layer
from onelaunch.ops.gla_layer.modules import filter_size, filters_of, layer_arguments

ONE_AT_A_TIME = threading.Lock()
"""Lock of the cached layers, which threads share and which hold the tensors of one call at a time."""


@gla_layer.variant(
    "fla", launches=None, fuses=(), parts=("unfused", "fla", "norm_gate"), maker="fla", requires="fla", usual=True, tunes=True,
)  # fmt: skip
def fla(call: GlaLayerCall) -> Results:
    """Run fla's layer as its users call it: ``GatedLinearAttention``, or ``SimpleGatedLinearAttention`` for a decay per head.

    Its weights are views of the packed weight. So the backward pass concatenates their gradients by one copy of the weight's
    size, which fla's own layer does not need.
    """
    return _run_layer(call), None


@gla_layer.variant(
    "fla_fused_chunk", launches=None, fuses=(), parts=("unfused", "fla_fused_chunk", "norm_gate"), maker="fla", requires="fla",
    usual=False, tunes=True,
)  # fmt: skip
def fla_fused_chunk(call: GlaLayerCall) -> Results:
    """Run fla's ``SimpleGatedLinearAttention`` with ``fused_chunk_simple_gla``, which trains on Hopper too.

    The layer itself calls ``chunk_simple_gla``.
    """
    from fla.layers import simple_gla  # pyrefly: ignore[missing-import]
    from fla.ops.simple_gla import fused_chunk_simple_gla  # pyrefly: ignore[missing-import]

    def chunk_simple_gla(*, state_v_first: bool, **given: Any) -> Results:
        assert state_v_first  # noqa: S101 - of the states, and the call has none
        return fused_chunk_simple_gla(**given)

    return _run_layer(call, _replaced(simple_gla, "chunk_simple_gla", chunk_simple_gla)), None


@contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Put a function in the place of one of a module's, for all threads: it is entered under :data:`ONE_AT_A_TIME`."""
    usual = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, usual)


def _run_layer(call: GlaLayerCall, inside: AbstractContextManager[None] | None = None) -> torch.Tensor:
    """Return the result of fla's layer with the tensors of a call without states, called inside a context if one is given."""
    layer = layer_of(call.x.shape[2], call.sizes, call.eps, filter_size(call))
    given = _parameters_of(call)
    # torch.func.functional_call would do the same, but its host time is a tenth of a decoding step. With setattr in place of
    # vars, a Parameter would be registered in the module.
    places = [(vars(layer.get_submodule(name.rpartition(".")[0])), name.rpartition(".")[2]) for name in given]
    with ONE_AT_A_TIME:
        for (module, name), tensor in zip(places, given.values(), strict=True):
            module[name] = tensor
        try:
            with inside or nullcontext():
                out, _, _ = layer(call.x)
        finally:
            for module, name in places:
                del module[name]
    return out


def _parameters_of(call: GlaLayerCall) -> dict[str, torch.Tensor]:
    """Return the tensors of a call by the names that they have as parameters of fla's layer."""
    rows = call.in_proj_weight.split_with_sizes([segment.width for segment in segments_of(call.sizes)])
    of_decays = "gk_proj" if call.gk_weight is None else "gk_proj.0"
    names = [f"{place}.weight" for place in ("q_proj", "k_proj", "v_proj", "g_proj", of_decays)]
    given = dict(zip(names, rows, strict=True))
    if call.gk_weight is None:
        given["gk_proj.bias"] = call.gk_bias
    else:
        given |= {"gk_proj.1.weight": call.gk_weight, "gk_proj.1.bias": call.gk_bias}
    filters = zip(("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"), filters_of(call), strict=False)
    return given | {"g_norm_swish_gate.weight": call.norm_weight, "o_proj.weight": call.w_out} | dict(filters)


@functools.lru_cache(maxsize=64)
def layer_of(width: int, sizes: LayerSizes, eps: float, conv_size: int | None) -> nn.Module:
    """Return fla's layer of these sizes without its parameters; a call sets its tensors as plain attributes instead."""
    from fla.layers.gla import GatedLinearAttention  # pyrefly: ignore[missing-import]
    from fla.layers.simple_gla import SimpleGatedLinearAttention  # pyrefly: ignore[missing-import]

    given = layer_arguments(width, sizes, eps, conv_size)
    with torch.device("meta"):
        if sizes.rank is None:
            layer = SimpleGatedLinearAttention(**given)
        else:
            layer = GatedLinearAttention(**given, gate_low_rank_dim=sizes.rank)
    for name, _ in list(layer.named_parameters()):
        place, _, attribute = name.rpartition(".")
        delattr(layer.get_submodule(place), attribute)
    return layer


@fla.supports
@fla_fused_chunk.supports
def why_fla_cannot_run(query: Query) -> str | None:
    """Return why fla 0.6.0 cannot run a call, or ``None``."""
    if query.device_type != "cuda":
        return "needs a CUDA or ROCm device"
    for package, named in (("fla", "fla"), ("fla.layers", "flash-linear-attention"), ("transformers", "transformers")):
        if not package_installed(package):
            return f"needs {named}, which is not installed"
    if (reason := not_installed("fla")) is not None:
        return reason
    if 0 in query.sizes:
        return "needs at least one element in every dimension"
    if {"initial_state", "final_state"} & set(query.flags):
        return "keeps states in a cache of its own, values first: they would have to be copied for every call"
    return None


@fla.supports
def trains(query: Query) -> str | None:
    """Return why the layer has no backward pass here, or ``None``. In training it calls the chunk functions whatever T is."""
    return chunk_backward(query)


@fla_fused_chunk.supports
def calls_chunk_simple_gla(query: Query) -> str | None:
    """Return why the layer would not call ``chunk_simple_gla``, or ``None``."""
    if "scalar_decay" not in query.flags:
        return "needs one decay per head"
    few = not query.grad and query.sizes[1] <= FEW_STEPS
    return f"needs more than {FEW_STEPS} steps without gradients: for fewer, the layer calls another function" if few else None
