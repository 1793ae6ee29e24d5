"""Tests of what only the layers of HGRN and HGRN2 have: the lower bound of the forget gate, and fla's constructor arguments.

The tests of all layers run with them too, without a bound. ``make(name)`` returns a small layer and its definition in plain
PyTorch, which takes the bound as its last argument. ``error`` is the norm of a difference, relative to that of the true values.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt.
"""

from __future__ import annotations

import pytest
import torch

from onelaunch.errors import ArgumentError, DTypeError, ShapeError
from onelaunch.nn import Cache, HGRN2Attention, HGRNAttention
from onelaunch.nn.forget import forget
from tests.nn.definitions import each_sequence, error, weights_of
from tests.nn.layers import HGRN, HGRN2, D, make

each_layer = pytest.mark.parametrize("name", [*HGRN, *HGRN2])


def bounded(name):
    """Return a layer that is not the first of its model, its definition, and a bound, 0 for one channel and 1 for another."""
    layer, definition = make(name)
    layer.layer_idx = 1
    bound = torch.rand(layer.o_proj.in_features if name in HGRN else layer.forget_dim)
    bound[0], bound[1] = 0, 1
    return layer, definition, bound


@each_layer
def test_a_lower_bound_and_its_gradient_match_the_definition(name):
    layer, definition, bound = bounded(name)
    x, bound = torch.randn(2, 21, D, requires_grad=True), bound.requires_grad_()
    o = layer(x, lower_bound=bound)[0]
    direction = torch.randn_like(o)
    (o * direction).sum().backward()
    true_x, true_bound = (each.detach().double().requires_grad_() for each in (x, bound))
    weights = weights_of(layer)
    true = each_sequence(definition, layer, weights, true_x, true_bound)
    (true * direction.double()).sum().backward()
    assert error(o, true) < 2e-6
    assert error(x.grad, true_x.grad) < 1e-5
    assert error(bound.grad, true_bound.grad) < 1e-5
    rows = len(bound)
    first = rows  # f is the second projection of both, after one of as many rows
    assert error(layer.in_proj_weight.grad[first : first + rows], weights["f_proj.weight"].grad) < 2e-5


@each_layer
def test_bounds_of_16_bits_padding_and_packed_sequences(name):
    layer, definition, bound = bounded(name)
    x, mask = torch.randn(2, 9, D), torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    weights, true_bound = weights_of(layer), bound.bfloat16().double()
    expected = [definition(layer, weights, x[0, 3:].double(), true_bound), definition(layer, weights, x[1].double(), true_bound)]
    o = layer(x, attention_mask=mask, lower_bound=bound.bfloat16())[0]
    packed = layer(torch.cat([x[0, 3:], x[1]])[None], lower_bound=bound.bfloat16(), cu_seqlens=torch.tensor([0, 6, 15]))[0][0]
    for row, begin in ((0, 3), (1, 0)):
        assert error(o[row, begin:], expected[row]) < 5e-6
        assert error(packed.split([6, 9])[row], expected[row]) < 5e-6
    assert not o[0, :3].any()


@pytest.mark.parametrize("name", ["hgrn-conv", "hgrn2-conv"])
@torch.no_grad()
def test_decoding_with_a_bound_equals_one_call(name):
    layer, definition, bound = bounded(name)
    x, cache = torch.randn(2, 12, D), Cache()
    parts = [layer(part, past_key_values=cache, use_cache=True, lower_bound=bound)[0] for part in x.split([7, 1, 1, 3], 1)]
    assert error(torch.cat(parts, 1), each_sequence(definition, layer, weights_of(layer), x.double(), bound.double())) < 3e-6


@pytest.mark.parametrize("name", ["hgrn", "hgrn2"])
def test_the_first_layer_ignores_the_bound(name):
    layer, _, bound = bounded(name)
    x = torch.randn(1, 4, D)
    with_bound, without = layer(x, lower_bound=bound)[0], layer(x)[0]
    assert not torch.equal(with_bound, without)
    layer.layer_idx = 0
    assert torch.equal(layer(x, lower_bound=bound)[0], without)


def test_shares_keep_their_digits():
    """Decays next to 1 and next to 0, which ``1 - exp(log_decay)`` and ``log`` in float32 round to 0 and to minus infinity."""
    log_forget = torch.tensor([-1e-12, -1e-4, -1.0, -50.0, -300.0])
    for bound in (0.0, 0.25, 1 - 2**-20):
        log_decay, share = forget(log_forget, torch.full((5,), bound))
        true = (1 - bound) * -torch.expm1(log_forget.double())
        torch.testing.assert_close(share.double(), true, rtol=1e-6, atol=0)  # a few roundings of float32, 6e-8 each
        assert bool((log_decay <= 0).all())
        assert bool(log_decay.isfinite().all())
        # A decay next to 1 is off by a rounding of float32, 6e-8; one next to 0 keeps its relative error.
        torch.testing.assert_close(log_decay.double().exp(), 1 - true, rtol=1e-6, atol=1e-7)


REFUSED = {  # invalid arguments of each class
    "mode": (HGRNAttention, {"mode": "fused_chunk"}),
    "hidden_size": (HGRNAttention, {"hidden_size": 0}),
    "expand_ratio": (HGRNAttention, {"hidden_size": 64, "expand_ratio": 0.3}),
    "conv_size": (HGRNAttention, {"hidden_size": 64, "use_short_conv": True, "conv_size": 0}),
    "norm_eps": (HGRNAttention, {"hidden_size": 64, "norm_eps": -1}),
    "neither": (HGRN2Attention, {"expand_ratio": None}),
    "no head": (HGRN2Attention, {"hidden_size": 64, "expand_ratio": 128}),
    "heads": (HGRN2Attention, {"hidden_size": 64, "expand_ratio": 20}),
    "small heads": (HGRN2Attention, {"hidden_size": 64, "expand_ratio": None, "num_heads": 8}),
    "large heads": (HGRN2Attention, {"hidden_size": 1024, "expand_ratio": 1024}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_argument_is_named(name, prose):
    kind, given = REFUSED[name]
    with prose.raises(ArgumentError):
        kind(**given)


def test_a_bound_that_is_none_is_refused(prose):
    layer, _, bound = bounded("hgrn")
    x = torch.randn(1, 4, D)
    with prose.raises(ShapeError):
        layer(x, lower_bound=bound[1:])
    with prose.raises(DTypeError):
        layer(x, lower_bound=bound.long())
    with pytest.raises(ArgumentError, match="lower_bound"):
        layer(x, lower_bound=0.5)
