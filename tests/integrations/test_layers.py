"""Tests of fla's layers that ``accelerate`` replaces, with stand-ins of plain PyTorch, since fla's kernels need a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onelaunch import accelerate
from tests.integrations.standins import (
    Cache,
    GatedLinearAttention,
    GatedMLP,
    HGRN2Attention,
    HGRNAttention,
    SimpleGatedLinearAttention,
)
from tests.integrations.test_mlps import assert_same

pytestmark = pytest.mark.usefixtures("fla")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Tolerances of float32 outputs: the stand-ins loop over steps, and ``gla_layer`` adds up the same terms in another order."""

LAYERS = {
    "gla": GatedLinearAttention,
    "gla with convolutions": lambda: GatedLinearAttention(use_short_conv=True),
    "simple gla": SimpleGatedLinearAttention,
    "simple gla without convolutions": lambda: SimpleGatedLinearAttention(use_short_conv=False, fuse_norm=False, norm_eps=0.5),
    "hgrn": HGRNAttention,
    "hgrn with convolutions": lambda: HGRNAttention(use_short_conv=True, conv_bias=True, affine=False),
    "hgrn2": HGRN2Attention,
    "hgrn2 with convolutions": lambda: HGRN2Attention(use_short_conv=True, affine=False),
}
OPERATIONS = {"gla": "gla_layer", "simple": "gla_layer", "hgrn": "gated_scan", "hgrn2": "gla"}
"""Operation that a report names, by the first word of a layer's name."""


def run(layer, x, **arguments):
    """Return the output of a layer, and the gradients of its input and of each parameter by name."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    o, nothing, _ = layer(x, **arguments)
    assert nothing is None
    o.square().sum().backward()
    return o.detach(), {"x": x.grad, **{name: each.grad for name, each in layer.named_parameters()}}


@pytest.mark.parametrize("name", LAYERS)
def test_results_gradients_and_parameters_stay(name):
    layer, x = LAYERS[name](), torch.randn(2, 5, 64)
    before, parameters = run(layer, x), list(layer.parameters())
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    report = accelerate(layer)
    (replaced,) = report.replaced
    assert (replaced.operation, replaced.layout) == (OPERATIONS[name.split()[0]], "as one weight")
    assert_same(run(layer, x), before, 3e-5)
    assert all(new is old for new, old in zip(layer.parameters(), parameters, strict=True))
    assert list(state) == list(layer.state_dict())
    assert all(torch.equal(state[key], value) for key, value in layer.state_dict().items())
    for each in layer.parameters():
        each.data = each.detach().clone()
    assert replaced.layout == "packed in each call, since they are no longer adjacent in memory"
    assert_same(run(layer, x), before, 3e-5)
    assert not report.fallbacks
    report.undo()
    again = run(layer, x)
    assert torch.equal(again[0], before[0])
    assert all(torch.equal(again[1][key], value) for key, value in before[1].items())


def test_frozen_weights_autocast_and_checkpointing():
    layer, x = SimpleGatedLinearAttention(), torch.randn(2, 5, 64)
    for frozen in (layer.k_proj.weight, layer.o_proj.weight):
        frozen.requires_grad_(requires_grad=False)
    before = layer(x)[0]
    accelerate(layer)
    given = x.clone().requires_grad_()
    o = checkpoint(lambda y: layer(y)[0], given, use_reentrant=False)
    torch.testing.assert_close(o, before, **CLOSE)
    o.sum().backward()
    assert layer.k_proj.weight.grad is layer.o_proj.weight.grad is None
    assert layer.q_proj.weight.grad.any()
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x)[0]
    assert low.dtype is torch.bfloat16
    assert (low.float() - before).norm() < 2e-2 * before.norm()


def test_a_whole_graph_is_compiled(monkeypatch):
    """The operation itself, whose tests compile it, takes five seconds to trace; here a product takes its place."""

    def product(x, in_proj_weight, gk_weight, *rest, conv_weight, **options):
        return x @ in_proj_weight.mT[:, :64] * gk_weight.sum(), None

    monkeypatch.setattr("onelaunch.integrations.gla_layers.gla_layer", product)
    layer, x = GatedLinearAttention(), torch.randn(2, 5, 64)
    accelerate(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    layer.q_proj.weight = nn.Parameter(torch.zeros_like(layer.q_proj.weight))  # elsewhere in memory
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])


CALLS = {
    "padding": lambda: {"attention_mask": torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])},
    "packed": lambda: {"cu_seqlens": torch.tensor([0, 5])},
    "cache without use_cache": lambda: {"past_key_values": Cache()},
}


@pytest.mark.parametrize(
    ("call", "layer"), [*itertools.product(CALLS, ["gla", "simple gla"]), ("padding", "hgrn"), ("padding", "hgrn2")]
)
def test_what_the_operation_cannot_do_runs_the_original_forward(layer, call, prose):
    module, x = LAYERS[layer](), torch.randn(2, 5, 64)
    before = module(x, **CALLS[call]())[0]
    report = accelerate(module)
    assert torch.equal(module(x, **CALLS[call]())[0], before)
    assert report.fallbacks.total() == 1
    prose(next(iter(report.fallbacks)))


def test_a_mask_without_padding_needs_no_original():
    layer, x, mask = GatedLinearAttention(), torch.randn(2, 5, 64), torch.ones(2, 7, dtype=torch.long)
    before = layer(x)[0]
    report = accelerate(layer)
    mask[0, 0] = 0  # padding of an earlier call
    torch.testing.assert_close(layer(x, attention_mask=mask, output_attentions=True)[0], before, **CLOSE)
    assert not report.fallbacks
    mask[0, 3] = 0  # the same tensor with other values
    layer(x, attention_mask=mask[:, -5:])
    layer(x, mask[:, -5:])
    assert report.fallbacks == {"attention_mask has padding": 2}


def test_a_call_with_a_cache_stores_the_state_that_fla_goes_on_from():
    layer, x = GatedLinearAttention(), torch.randn(2, 8, 64)
    whole = layer(x)[0]
    report = accelerate(layer)
    cache = Cache()
    first, _, returned = layer(x[:, :7], past_key_values=cache, use_cache=True)
    assert returned is cache
    assert not report.fallbacks
    last, _, _ = layer(x[:, 7:], past_key_values=cache, use_cache=True)
    assert report.fallbacks == {"the call continues from a state in past_key_values": 1}
    torch.testing.assert_close(torch.cat([first, last], 1), whole, **CLOSE)
    assert layer(x, use_cache=True)[2] is None


OPTIONS = {
    "feature_map": lambda: GatedLinearAttention(feature_map="relu"),
    "num_kv_heads": lambda: SimpleGatedLinearAttention(num_kv_heads=1, use_short_conv=False),
    "clamp_min": lambda: GatedLinearAttention(clamp_min=-1.0),
    "gate_fn": lambda: GatedLinearAttention(gate_fn="sigmoid"),
    "use_output_gate": lambda: GatedLinearAttention(use_output_gate=False),
    "elementwise_affine": lambda: GatedLinearAttention(affine=False),
    "conv_bias": lambda: SimpleGatedLinearAttention(conv_bias=True),
    "expand_k": lambda: GatedLinearAttention(head_k_dim=8),
    "expand_ratio": lambda: HGRN2Attention(head_f_dim=8),
    "gate of the norm": lambda: HGRNAttention(activation="sigmoid"),
    "activated convolution": lambda: (
        setattr((layer := HGRNAttention(use_short_conv=True)).f_conv1d, "activation", "silu") or layer
    ),
    "no output projection": lambda: delattr(layer := HGRN2Attention(), "o_proj") or layer,
    "quantized": lambda: setattr(layer := GatedLinearAttention(), "q_proj", nn.Sequential(layer.q_proj)) or layer,
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_the_operation_lacks_are_refused_by_name(option, prose):
    layer = OPTIONS[option]()
    (refused,) = accelerate(layer).refused
    assert "forward" not in vars(layer)
    prose(refused.reason)


@pytest.mark.parametrize("version", ["0.5.1", "0.7.0"])
def test_other_releases_are_refused(version, fla, prose):
    fla.__version__ = version
    (refused,) = accelerate(GatedLinearAttention()).refused
    prose(refused.reason)


def test_hooks_on_inner_modules_run():
    layer, x, seen = GatedLinearAttention(), torch.randn(2, 5, 64), []
    report = accelerate(layer)
    layer.register_forward_hook(lambda *_: seen.append("layer"))
    layer(x)
    layer.gk_proj[1].register_forward_pre_hook(lambda *_: seen.append("gk_proj.1"))
    layer(x)
    assert seen == ["layer", "gk_proj.1", "layer"]
    assert report.fallbacks == {"gk_proj.1 has hooks": 1}


@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
def test_a_projection_that_is_given_a_bias_later_is_called(name):
    layer, x = GatedLinearAttention(), torch.randn(2, 5, 64)
    report = accelerate(layer)
    projection = layer.get_submodule(name)
    projection.bias = nn.Parameter(torch.randn(projection.out_features))
    found = layer(x)[0]
    assert report.fallbacks == {f"{name} has a bias now": 1}
    projection.bias = None
    assert (layer(x)[0] - found).norm() > 1e-2 * found.norm()
    assert report.fallbacks.total() == 1


def test_a_model_of_several_kinds_has_one_report(prose):
    layers = [nn.ModuleDict({"attn": GatedLinearAttention(), "mlp": GatedMLP()}) for _ in range(5)]
    report = accelerate(nn.Sequential(*layers, nn.ModuleDict({"attn": GatedLinearAttention(clamp_min=-1.0)})))
    assert [each.name for each in report.replaced][:2] == ["0.attn", "0.mlp"]
    prose(str(report))
