"""Parts of a call that modules of ``onelaunch.nn`` and of fla take alike, for the variants that call a module.

These are in ``variants/module.py`` and ``variants/peers.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.ops.gla_layer.contract import GlaLayerCall, LayerSizes


def filter_size(call: GlaLayerCall) -> int | None:
    """Return the number of steps of the short convolutions; ``None`` without them."""
    return None if call.conv_weight is None else call.conv_weight.shape[1]


def filters_of(call: GlaLayerCall) -> tuple[torch.Tensor, ...]:
    """Return the filters of the convolutions of q, k and v, ``[channels, 1, W]``; none without convolutions."""
    if call.conv_weight is None:
        return ()
    heads, keys, values, *_ = call.sizes
    return call.conv_weight[:, None].split([heads * keys, heads * keys, heads * values])


def layer_arguments(width: int, sizes: LayerSizes, eps: float, conv_size: int | None) -> dict[str, Any]:
    """Return the constructor's arguments that all layers have, ours and fla's."""
    return {
        "hidden_size": width,
        "expand_k": sizes.heads * sizes.keys / width,
        "expand_v": sizes.heads * sizes.values / width,
        "num_heads": sizes.heads,
        "norm_eps": eps,
        "gate_logit_normalizer": sizes.normalizer,
        "use_short_conv": conv_size is not None,
        "conv_size": 4 if conv_size is None else conv_size,
    }
