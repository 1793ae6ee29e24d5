"""Tests of the module RMSNorm against its definition, of its state dict, and of the arguments it refuses.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.
"""

from __future__ import annotations

import copy

import pytest
import torch

from onelaunch.errors import ArgumentError, DTypeError, ShapeError
from onelaunch.nn import RMSNorm


@pytest.mark.parametrize("residual", [False, True])
def test_results_are_those_of_pytorchs_module(residual):
    module, theirs = RMSNorm(24), torch.nn.RMSNorm(24, eps=1e-5)
    module.load_state_dict({"weight": torch.rand(24)})
    theirs.load_state_dict(module.state_dict())
    x, added = torch.randn(2, 2, 5, 24)
    total = x + added if residual else x
    y, found = module(x, added if residual else None, prenorm=True)
    assert torch.equal(found, total)
    torch.testing.assert_close(y, theirs(total))
    torch.testing.assert_close(module(x, added if residual else None), y)
    copy.deepcopy(module)(x).sum().backward()


def test_the_sum_may_be_float32():
    module, x = RMSNorm(8, elementwise_affine=False), torch.randn(3, 8).bfloat16()
    assert not [*module.parameters()]
    y, total = module(x, prenorm=True, residual_in_fp32=True)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    y, total = module(x, total, prenorm=True)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert module(x, prenorm=True)[1] is x


def test_reset_and_repr():
    module = RMSNorm(8, dtype=torch.float16)
    module.weight.data.zero_()
    module.reset_parameters()
    assert module.weight.eq(1).all()
    assert module.weight.dtype is torch.float16
    assert repr(module) == "RMSNorm(8, eps=1e-05)"


def test_invalid_arguments_are_named(prose):
    with prose.raises(ArgumentError, match="bias"):
        RMSNorm(8, bias=True)
    with prose.raises(ArgumentError, match="hidden_size"):
        RMSNorm(0)
    with prose.raises(ArgumentError, match="eps"):
        RMSNorm(8, eps=-1)
    with prose.raises(ShapeError, match=r"\bx\b"):
        RMSNorm(8)(torch.randn(3, 7))
    with prose.raises(DTypeError, match="residual"):
        RMSNorm(8)(torch.randn(3, 8), torch.randn(3, 8).half())
