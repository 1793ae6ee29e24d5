"""The peer variant of ``gla_layer``: ``fla.layers.GatedLinearAttention`` with the weights of the call."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import nn

from onelaunch.device.tools import package_installed
from onelaunch.operation import Query
from onelaunch.ops.gla_layer.composition import Results, segments_of
from onelaunch.ops.gla_layer.contract import GlaLayerCall, LayerSizes, gla_layer

PLACES = ("q_proj", "k_proj", "v_proj", "g_proj", "gk_proj.0")
"""Names of fla's modules whose weights are the segments of ``in_proj_weight``, in order."""

ONE_AT_A_TIME = threading.Lock()
"""Lock of the cached layers, which threads share and which hold the tensors of one call at a time."""


@gla_layer.variant(
    "fla", launches=None, fuses=(), parts=("unfused", "fla", "norm_gate"), maker="fla", requires="fla", usual=True, tunes=True,
)  # fmt: skip
def fla(call: GlaLayerCall) -> Results:
    """Run fla's layer as its users call it.

    Its weights are views of the packed weight. So the backward pass concatenates their gradients by one copy of the weight's
    size, which fla's own layer does not need.
    """
    layer = layer_of(call.x.shape[2], call.sizes, call.eps)
    rows = call.in_proj_weight.split_with_sizes([segment.width for segment in segments_of(call.sizes)])
    given = {f"{place}.weight": weight for place, weight in zip(PLACES, rows, strict=True)}
    given |= {"gk_proj.1.weight": call.gk_weight, "gk_proj.1.bias": call.gk_bias}
    given |= {"g_norm_swish_gate.weight": call.norm_weight, "o_proj.weight": call.w_out}
    # torch.func.functional_call would do the same, but its host time is a tenth of a decoding step. With setattr in place of
    # vars, a Parameter would be registered in the module.
    places = [(vars(layer.get_submodule(name.rpartition(".")[0])), name.rpartition(".")[2]) for name in given]
    with ONE_AT_A_TIME:
        for (module, name), tensor in zip(places, given.values(), strict=True):
            module[name] = tensor
        try:
            out, _, _ = layer(call.x)
        finally:
            for module, name in places:
                del module[name]
    return out, None


@functools.lru_cache(maxsize=64)
def layer_of(width: int, sizes: LayerSizes, eps: float) -> nn.Module:
    """Return fla's layer of these sizes without its parameters; a call sets its tensors as plain attributes instead."""
    from fla.layers import GatedLinearAttention  # pyrefly: ignore[missing-import]

    arguments: dict[str, Any] = {
        "hidden_size": width,
        "expand_k": sizes.heads * sizes.keys / width,
        "expand_v": sizes.heads * sizes.values / width,
        "num_heads": sizes.heads,
        "gate_low_rank_dim": sizes.rank,
        "gate_logit_normalizer": sizes.normalizer,
        "norm_eps": eps,
    }
    with torch.device("meta"):
        layer = GatedLinearAttention(**arguments)
    for name, _ in list(layer.named_parameters()):
        place, _, attribute = name.rpartition(".")
        delattr(layer.get_submodule(place), attribute)
    return layer


@fla.supports
def why_fla_cannot_run(query: Query) -> str | None:
    """Return why fla 0.6.0 cannot run a call, or ``None``."""
    if query.device_type != "cuda":
        return "needs a CUDA or ROCm device"
    for package, named in (("fla", "fla"), ("fla.layers", "flash-linear-attention"), ("transformers", "transformers")):
        if not package_installed(package):
            return f"needs {named}, which is not installed"
    if 0 in query.sizes:
        return "needs at least one element in every dimension"
    if query.flags:
        return "keeps states in a cache of its own, values first: they would have to be copied for every call"
    return None
