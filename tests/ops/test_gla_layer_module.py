"""Tests of the variant ``module`` of ``gla_layer``, which calls the layer as people do."""

from __future__ import annotations

import pytest

from onelaunch.dispatch.choice import held_back
from onelaunch.errors import VariantUnsupported
from onelaunch.ops import gla_layer
from onelaunch.ops.gla_layer.variants.module import module_of
from onelaunch.workbench.verify import judge
from tests.ops.gla_layer_cases import GLA_LAYER, made

CASE = GLA_LAYER.case("float32", B=2, T=9, D=40, H=2, K=16, V=20)


def test_the_module_computes_the_layer_with_gradients():
    verdict = judge(GLA_LAYER, CASE, variant="module", directions=("forward", "forward_backward"))
    assert verdict.ok, verdict.explain()


def test_the_module_keeps_no_tensor_of_a_call():
    given = made()
    gla_layer(**given, variant="module")
    call = GLA_LAYER.bind(**given)
    layer, places = module_of(40, call.sizes, call.eps)
    assert list(layer.parameters()) == []
    assert all(name not in vars(owner) for owner, name in places)


def test_states_are_refused():
    with pytest.raises(VariantUnsupported, match="a cache of its own"):
        gla_layer(**made(initial_state=True, final_state=True), variant="module")


def test_auto_never_chooses_the_module():
    variant = GLA_LAYER.get("module")
    assert held_back(variant, GLA_LAYER.query(CASE, "cpu"), None) == "runs only by name"
