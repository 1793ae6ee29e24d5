"""Tests of the passes of ``gla`` that compute states alone: portable kernels in Triton's interpreter against ordinary calls."""

from __future__ import annotations

import pytest
import torch

from onelaunch.ops.gla.contract import bind, gla
from onelaunch.ops.gla.slices import GlaRules
from tests.parallel.cases import close, gla_tensors


@pytest.mark.interpret
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(
    ("heads", "states"), [((2, 2, 2, 2), None), ((4, 2, 2, 2), None), ((2, 2, 4, 4), None), ((4, 2, 2, 2), 4)]
)
def test_states_alone_are_those_of_ordinary_calls(heads, states, per_head):
    random = torch.Generator().manual_seed(5)
    tensors = [None if each is None else each.detach() for each in gla_tensors(random, 2, 70, heads=heads, per_head=per_head)]
    initial = None if states is None else torch.zeros(2, states, 16, 20)
    call = bind(*tensors[:4], initial_state=initial)
    kernels, plain = GlaRules(gla, call, "fused"), GlaRules(gla, call, "chunked")
    assert (kernels.states_alone, plain.states_alone) == (True, False)
    dy = torch.randn(2, 70, max(heads), 20, generator=random)
    close(kernels.local_state(tensors, 3), plain.local_state(tensors, 3), torch.float32, "added")
    found, wanted = (rules.initial_gradient(rules.saved(tensors), dy, 66) for rules in (kernels, plain))
    close(found, wanted, torch.float32, "gradient of the initial state")
