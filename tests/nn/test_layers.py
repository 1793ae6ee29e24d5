"""Tests of layers against their definitions: results, gradients, packed sequences, padding, and refused calls.

``make(name)`` returns a small layer and its definition in plain PyTorch, which is given x ``[T, D]``. ``error`` is the norm of
a difference, relative to that of the true values.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``each_sequence`` applies a definition to each batch entry. ``weights_of`` returns a module's state dict in float64. ``NAMES`` are
the names of all small layers of the tests. ``thorough_but`` marks all parameters but the named ones ``thorough``: they do not run
in ``make test``.
"""

from __future__ import annotations

import copy

import pytest
import torch

from onelaunch.errors import ArgumentError, DTypeError, OneLaunchError, PackingError, ShapeError
from onelaunch.nn import Cache, GatedLinearAttention, LinearRNN, SimpleGatedLinearAttention
from tests.nn.definitions import each_sequence, error, weights_of
from tests.nn.layers import NAMES, D, make
from tests.thorough import thorough_but

each_layer = pytest.mark.parametrize("name", NAMES)


def in_state_dict_order(layer, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return gradients by state-dict name.

    ``whole`` has them by parameter name, where weights are packed. They become the parameters of a copy of the layer.
    """
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for key, parameter in twin.named_parameters():
            parameter.copy_(whole[key])
    return dict(twin.state_dict())


@each_layer
def test_results_and_gradients_match_the_definition(name):
    layer, definition = make(name)
    x = torch.randn(2, 21, D, requires_grad=True)
    o, weights, past = layer(x)
    assert weights is None
    assert past is None
    direction = torch.randn_like(o)
    (o * direction).sum().backward()

    true_weights, true_x = weights_of(layer), x.detach().double().requires_grad_()
    true = each_sequence(definition, layer, true_weights, true_x)
    (true * direction.double()).sum().backward()
    assert error(o, true) < 2e-6
    assert error(x.grad, true_x.grad) < 1e-5
    grads = in_state_dict_order(layer, {key: parameter.grad for key, parameter in layer.named_parameters()})
    assert grads.keys() == true_weights.keys()
    for key, weight in true_weights.items():
        assert error(grads[key], weight.grad) < 2e-5, key


@each_layer
def test_16_bit_results_are_near_the_definition(name):
    layer, definition = make(name)
    layer = layer.to(torch.bfloat16)
    x = torch.randn(1, 40, D).bfloat16()
    o = layer(x)[0]
    assert o.dtype is torch.bfloat16
    assert error(o, each_sequence(definition, layer, weights_of(layer), x.double())) < 2e-2


@each_layer
@pytest.mark.parametrize("lengths", [(5, 0, 1, 9), (17,)], ids=str)
def test_packed_sequences_equal_separate_calls(name, lengths):
    layer, definition = make(name)
    sequences = [torch.randn(length, D) for length in lengths]
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    o = layer(torch.cat(sequences)[None], cu_seqlens=cu_seqlens)[0][0]
    for found, sequence in zip(o.split(list(lengths)), sequences, strict=True):
        if len(sequence):
            assert error(found, definition(layer, weights_of(layer), sequence.double())) < 5e-6


@each_layer
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_results(name, side):
    layer, definition = make(name)
    lengths, length = (3, 12, 0), 12
    x, mask = torch.full((3, length, D), float("nan")), torch.zeros(3, length, dtype=torch.int64)
    for row, count in enumerate(lengths):
        there = slice(length - count, length) if side == "left" else slice(0, count)
        x[row, there], mask[row, there] = torch.randn(count, D), 1
    o = layer(x, attention_mask=mask)[0]
    assert bool((o[mask == 0] == 0).all())
    for row, count in enumerate(lengths):
        if count:
            tokens = mask[row] == 1
            assert error(o[row, tokens], definition(layer, weights_of(layer), x[row, tokens].double())) < 5e-6


@pytest.mark.parametrize("name", ["gla", "simple", "linear_rnn", "hgrn", "hgrn2"])
def test_padding_between_tokens_is_left_out(name):
    layer, definition = make(name)
    x, mask = torch.randn(1, 10, D), torch.tensor([[1, 1, 0, 0, 1, 0, 1, 1, 1, 1]], dtype=torch.bool)
    o = layer(x, attention_mask=mask)[0]
    assert error(o[mask], definition(layer, weights_of(layer), x[mask].double())) < 5e-6


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", ["gla-conv", "simple-conv"])
def test_convolutions_take_no_steps(name, cached):
    """PyTorch's convolution refuses fewer inputs than taps. A parameter has a gradient of zeros."""
    layer, _ = make(name)
    o = layer(torch.randn(2, 0, D), use_cache=cached)[0]
    assert o.shape == (2, 0, D)
    o.sum().backward()
    assert not any(each.grad.any() for each in layer.parameters() if each.grad is not None)


@pytest.mark.parametrize("name", ["gla-conv", "simple-conv"])
def test_convolutions_refuse_padding_that_would_count_as_steps(name, prose):
    layer, _ = make(name)
    x = torch.randn(1, 4, D)
    with prose.raises(ArgumentError, match="attention_mask"):
        layer(x, attention_mask=torch.tensor([[1, 0, 0, 1]]))
    with prose.raises(ArgumentError, match="attention_mask"):
        layer(x, attention_mask=torch.tensor([[1, 1, 1, 0]]), use_cache=True)


@pytest.mark.parametrize(
    "name",
    thorough_but(
        "gla-no-gate",
        "linear_rnn",
        of=[
            "gla-conv-bias",
            "gla-no-gate",
            "gla-gelu",
            "gla-clamped",
            "gla-plain-norm",
            "simple-conv",
            "linear_rnn",
            "hgrn-conv",
            "hgrn2-conv",
        ],
    ),
)
def test_layers_compile_in_one_graph(name):
    """The chosen layers cover every branch. Others differ only in numbers and elementwise functions."""
    layer, _ = make(name)
    x = torch.randn(2, 9, D, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    o = compiled(x)[0]
    o.sum().backward()
    found, x.grad = x.grad, None
    expected = layer(x)[0]
    expected.sum().backward()
    assert error(o, expected.double()) < 1e-6
    assert error(found, x.grad.double()) < 1e-6  # the compiler sums in another order


@each_layer
def test_autocast_gives_results_in_its_dtype(name):
    layer, definition = make(name)
    x = torch.randn(1, 12, D)
    with torch.autocast("cpu", torch.bfloat16):
        o, _, cache = layer(x, use_cache=True)
    assert o.dtype is torch.bfloat16
    assert cache[0].recurrent_state.dtype is torch.float32
    assert error(o, each_sequence(definition, layer, weights_of(layer), x.double())) < 3e-2


REFUSED = {  # an invalid value of each argument
    "mode": "flash",
    "hidden_size": 0,
    "expand_k": 0.3,
    "expand_v": -1,
    "num_heads": 3,
    "num_kv_heads": 3,
    "feature_map": "elu",
    "gate_fn": "bias_gelu",
    "norm_eps": -1e-5,
    "gate_logit_normalizer": 0,
    "layer_idx": -1,
}


@pytest.mark.parametrize("value", [10**400, 1e308, float("inf"), float("nan")], ids=["integer", "product", "inf", "nan"])
def test_numbers_beyond_those_of_a_float_are_refused(value):
    """No float holds the integer, nor the product of the second number and the hidden size."""
    with pytest.raises(ArgumentError, match="expand_k is"):
        GatedLinearAttention(hidden_size=1024, expand_k=value, num_heads=4)


@pytest.mark.parametrize("kind", [GatedLinearAttention, SimpleGatedLinearAttention])
@pytest.mark.parametrize(("argument", "value"), REFUSED.items(), ids=REFUSED)
def test_an_invalid_argument_is_named(kind, argument, value, prose):
    given = {"hidden_size": 128, "num_heads": 4, "expand_k": 1.0, argument: value}
    with prose.raises(ArgumentError, match=argument):
        kind(**given)


def test_invalid_arguments_of_a_single_layer_are_named(prose):
    with prose.raises(ArgumentError, match="gate_low_rank_dim"):
        GatedLinearAttention(gate_low_rank_dim=0)
    with prose.raises(ArgumentError, match="clamp_min"):
        GatedLinearAttention(clamp_min=0.5)
    with prose.raises(ArgumentError, match="conv_size"):
        SimpleGatedLinearAttention(conv_size=0)
    with prose.raises(ArgumentError, match="onelaunch.ops.gla"):
        GatedLinearAttention(hidden_size=64, num_heads=4)
    with prose.raises(ArgumentError, match="1024"):
        GatedLinearAttention(hidden_size=1024, expand_k=1.0, num_heads=1)
    with prose.raises(ArgumentError, match="'swich'"):
        GatedLinearAttention(gate_fn="swich")
    with pytest.raises(ArgumentError, match="expand_v"):
        LinearRNN(10, expand_v=0.33)


@pytest.mark.parametrize("name", ["gla", "simple", "linear_rnn"])
def test_errors_of_invalid_calls_name_the_argument(name, prose):
    layer, _ = make(name)
    x = torch.randn(2, 5, D)
    with prose.raises(ShapeError, match="hidden_states"):
        layer(x[..., 1:])
    with pytest.raises(ShapeError, match="hidden_states"):
        layer(x[0])
    with prose.raises(DTypeError, match="hidden_states"):
        layer(x.double())
    with prose.raises(ShapeError, match="attention_mask"):
        layer(x, attention_mask=torch.ones(2, 4))
    with prose.raises(ShapeError, match="attention_mask"):
        layer(x, attention_mask=torch.ones(2, 5, 5))
    with prose.raises(ArgumentError, match="attention_mask"):
        layer(x[:1], attention_mask=torch.ones(1, 5), cu_seqlens=torch.tensor([0, 5]))
    with prose.raises(PackingError):
        layer(x, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ArgumentError, match="output_attentions"):
        layer(x, output_attentions=True)
    with prose.raises(ArgumentError, match="past_key_values"):
        layer(x, past_key_values={})
    layer.layer_idx = None
    with prose.raises(ArgumentError, match="past_key_values"):
        layer(x, past_key_values=Cache())
    with prose.raises(OneLaunchError, match="use_cache"):
        layer(x, use_cache=True)
