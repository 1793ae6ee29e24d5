"""Tests of the variant ``module`` of ``gla_layer``, which calls the layer as people do.

``differentiable`` returns the arguments that take gradients. ``made`` makes small random arguments, with
D = 40.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from onelaunch.dispatch.choice import held_back
from onelaunch.errors import VariantUnsupported
from onelaunch.launch.imitation import imitate
from onelaunch.nn import GatedLinearAttention, SimpleGatedLinearAttention
from onelaunch.ops import gla_layer
from onelaunch.ops.gla_layer.modules import filter_size
from onelaunch.ops.gla_layer.variants.module import module_of
from onelaunch.workbench.verify import judge
from tests.ops.cases import differentiable
from tests.ops.gla_layer_cases import GLA_LAYER, made

SIZES = {"B": 2, "T": 9, "D": 40, "H": 2, "K": 16, "V": 20}
CASE = GLA_LAYER.case("float32", **SIZES)

each_kind = pytest.mark.parametrize(
    "options", [{}, {"decay_per": "head"}, {"decay_per": "head", "conv_size": 4}, {"conv_size": 3}], ids=str
)
"""Parametrization over the layers of ``onelaunch.nn``: a decay per channel or head, without and with short convolutions."""


@each_kind
def test_the_module_computes_the_layer_with_gradients(options):
    case = GLA_LAYER.case("float32", **SIZES, **options)
    verdict = judge(GLA_LAYER, case, variant="module", directions=("forward", "forward_backward"))
    assert verdict.ok, verdict.explain()


@each_kind
def test_the_module_gives_the_bits_of_the_composed_variant(options):
    given = made(grad=True, **options)
    (found, _), (expected, _) = (gla_layer(**given, variant=name) for name in ("module", "composed"))
    assert torch.equal(found, expected)
    leaves = differentiable(given)
    seed = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad(each, list(leaves.values()), seed) for each in (found, expected))
    for name, one, other in zip(leaves, ours, theirs, strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(("per", "kind"), [("channel", GatedLinearAttention), ("head", SimpleGatedLinearAttention)])
def test_the_module_is_the_layer_of_that_decay(per, kind):
    call = GLA_LAYER.bind(**made(decay_per=per))
    layer, _ = module_of(40, call.sizes, call.eps, None)
    assert type(layer) is kind


@each_kind
def test_the_module_keeps_no_tensor_of_a_call(options):
    """``module_of`` caches modules, so that it returns the one that the call has used."""
    given = made(**options)
    gla_layer(**given, variant="module")
    call = GLA_LAYER.bind(**given)
    layer, places = module_of(40, call.sizes, call.eps, filter_size(call))
    assert list(layer.parameters()) == []
    assert all(name not in vars(owner) for owner, name in places)


@each_kind
def test_a_run_for_the_launches_of_a_call_does_not_enter_the_module(options, monkeypatch):
    """It happens inside the call, which holds the lock, and whose tensors are in the module."""
    variants = importlib.import_module("onelaunch.ops.gla_layer.variants.module")
    monkeypatch.setattr(variants, "ONE_AT_A_TIME", None)  # to enter it would raise an error
    given = made(**options)
    with imitate():
        out, _ = GLA_LAYER.get("module")(GLA_LAYER.bind(**given))
    assert torch.equal(out, gla_layer(**given)[0])


def test_states_are_refused():
    with pytest.raises(VariantUnsupported, match="a cache of its own"):
        gla_layer(**made(initial_state=True, final_state=True), variant="module")


def test_auto_never_chooses_the_module():
    variant = GLA_LAYER.get("module")
    assert held_back(variant, GLA_LAYER.query(CASE, "cpu"), None) == "runs only by name"
