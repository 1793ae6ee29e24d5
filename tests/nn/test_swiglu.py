"""Tests of the SwiGLU module against its definition, of its state dict, and of the arguments it refuses.

``error`` is the norm of a difference, relative to that of the true values.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``weights_of`` returns a module's state dict in float64. ``ACTIVATIONS`` are activations by name, written out.
"""

from __future__ import annotations

import copy

import pytest
import torch

from onelaunch.errors import ArgumentError, DTypeError, ShapeError
from onelaunch.nn import SwiGLU
from tests.nn.definitions import ACTIVATIONS, error, weights_of


def definition(weights, x):
    """Compute the module's result from its weights by state-dict name."""
    gated = ACTIVATIONS["silu"](x @ weights["gate_proj.weight"].T) * (x @ weights["up_proj.weight"].T)
    return gated @ weights["down_proj.weight"].T


@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24), (0, 24)], ids=str)
def test_results_and_gradients_match_the_definition(shape):
    module, x = SwiGLU(24, intermediate_size=40), torch.randn(shape, requires_grad=True)
    y = module(x)
    assert y.shape == shape
    y.square().sum().backward()
    weights, true_x = weights_of(module), x.detach().double().requires_grad_()
    true = definition(weights, true_x)
    true.square().sum().backward()
    assert error(y, true) < 1e-6
    assert error(x.grad, true_x.grad) < 2e-6
    halves = dict(zip(("gate_proj.weight", "up_proj.weight"), module.gate_up_weight.grad.split(40), strict=True))
    for key, grad in {**halves, "down_proj.weight": module.down_proj.weight.grad}.items():
        assert error(grad, weights[key].grad) < 2e-6, key


def test_state_dicts_hold_separate_projections():
    module = SwiGLU(8, intermediate_size=12)
    given = {
        "gate_proj.weight": torch.randn(12, 8),
        "up_proj.weight": torch.randn(12, 8),
        "down_proj.weight": torch.randn(8, 12),
    }
    module.load_state_dict(given)
    x = torch.randn(3, 8)
    assert error(module(x), definition({key: value.double() for key, value in given.items()}, x.double())) < 1e-6
    assert module.state_dict().keys() == given.keys()
    assert error(copy.deepcopy(module)(x), module(x).double()) == 0
    with pytest.raises(RuntimeError, match=r"up_proj\.weight"):
        module.load_state_dict({key: value for key, value in given.items() if key != "up_proj.weight"})
    with pytest.raises(RuntimeError, match=r"up_proj\.bias"):
        module.load_state_dict({**given, "up_proj.bias": torch.zeros(12)})


def test_the_default_intermediate_size_matches_fla():
    assert SwiGLU(1024).intermediate_size == 2816
    assert SwiGLU(1024, hidden_ratio=3).intermediate_size == 2048
    assert SwiGLU(8).intermediate_size == 256
    assert SwiGLU(1024, intermediate_size=1000).intermediate_size == 1000


def test_it_compiles_in_one_graph_and_runs_in_sixteen_bits():
    module, x = SwiGLU(16, intermediate_size=32), torch.randn(3, 16)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    low = copy.deepcopy(module).bfloat16()(x.bfloat16())
    assert low.dtype is torch.bfloat16
    assert error(low, module(x).double()) < 2e-2


def test_invalid_arguments_are_named(prose):
    with prose.raises(ArgumentError, match="'powlu'"):
        SwiGLU(8, hidden_act="powlu")
    with prose.raises(ArgumentError, match="intermediate_size"):
        SwiGLU(8, intermediate_size=0)
    with prose.raises(ArgumentError, match="hidden_ratio"):
        SwiGLU(8, hidden_ratio=-1)
    module = SwiGLU(8)
    with prose.raises(ShapeError, match=r"\bx\b"):
        module(torch.randn(3, 7))
    with prose.raises(DTypeError, match=r"\bx\b"):
        module(torch.randn(3, 8, dtype=torch.float64))
