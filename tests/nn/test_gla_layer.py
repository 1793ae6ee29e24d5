"""Tests that the module and the operation ``gla_layer`` give the same bits from the same weights.

Without a cache the module calls ``gla_layer``, for which the dispatcher chooses "composed" on a CPU. With a cache it calls
``projections`` twice, ``gla`` and ``output_chain`` one by one, as "composed" does.

``make`` returns a small layer, and its definition. ``D`` is the number of columns of x.
"""

from __future__ import annotations

import pytest
import torch

from onelaunch.nn import Cache, GatedLinearAttention
from onelaunch.ops import gla_layer
from tests.nn.layers import D, make


def weights_of(layer: GatedLinearAttention) -> dict[str, torch.Tensor]:
    """Return the operation's arguments for a module."""
    return {
        "in_proj_weight": layer.in_proj_weight,
        "gk_weight": layer.gk_proj_weight,
        "gk_bias": layer.gk_proj_bias,
        "norm_weight": layer.g_norm_swish_gate.weight,
        "w_out": layer.o_proj.weight,
    }


def numbers_of(layer: GatedLinearAttention) -> dict[str, float]:
    """Return the operation's arguments that are numbers, for a module."""
    return {"heads": layer.num_heads, "normalizer": layer.gate_logit_normalizer, "eps": layer.norm_eps}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_and_its_gradients(dtype):
    layer, _ = make("gla")
    layer.to(dtype)
    given = {"x": torch.randn(2, 70, D, dtype=dtype, requires_grad=True), **weights_of(layer)}
    (out, _), (expected, _, _) = gla_layer(**given, **numbers_of(layer), variant="composed"), layer(given["x"])
    assert torch.equal(out, expected)
    seed = torch.randn_like(out)
    found, true = (torch.autograd.grad(each, list(given.values()), seed) for each in (out, expected))
    for name, ours, theirs in zip(given, found, true, strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("length", [1, 5])
def test_a_step_from_a_cache(length):
    layer, _ = make("gla")
    with torch.no_grad():
        cache = layer(torch.randn(2, 9, D), past_key_values=Cache(), use_cache=True)[2]
        x, state = torch.randn(2, length, D), cache[0].recurrent_state
        out, final_state = gla_layer(
            x,
            **weights_of(layer),
            **numbers_of(layer),
            initial_state=state,
            output_final_state=True,
            variant="composed",
        )
        expected = layer(x, past_key_values=cache, use_cache=True)[0]
    assert torch.equal(out, expected)
    assert torch.equal(final_state, cache[0].recurrent_state)
