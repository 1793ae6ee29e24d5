"""Tests of what only the layers of HGRN and HGRN2 have, replaced by ``accelerate``: lower bounds, packed sequences and caches.

``tests/integrations/test_layers.py`` has the tests of all of fla's layers, and the stand-ins are of plain PyTorch.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from onelaunch import accelerate
from tests.integrations.standins import Cache, HGRN2Attention, HGRNAttention
from tests.integrations.test_layers import CLOSE, LAYERS, run
from tests.integrations.test_mlps import assert_same

pytestmark = pytest.mark.usefixtures("fla")
each_layer = pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("hgrn")])


def made(name):
    """Return a layer, an input, and a lower bound that takes gradients."""
    layer = LAYERS[name]()
    return layer, torch.randn(2, 8, 64), torch.rand(layer.f_proj.out_features).requires_grad_()


def run_bounded(layer, x, bound):
    """Return the output and the gradients as :func:`run` does, with that of the bound."""
    bound.grad = None
    o, gradients = run(layer, x, lower_bound=bound)
    return o, {**gradients, "bound": bound.grad}


@each_layer
def test_a_lower_bound_of_the_model(name):
    layer, x, bound = made(name)
    before = run_bounded(layer, x, bound)
    report = accelerate(layer)
    assert_same(run_bounded(layer, x, bound), before, 3e-5)
    assert not report.fallbacks
    report.undo()
    again = run_bounded(layer, x, bound)
    assert torch.equal(again[0], before[0])
    assert all(torch.equal(again[1][key], value) for key, value in before[1].items())
    accelerate(layer)
    layer.layer_idx = 0  # whose bound is 0
    torch.testing.assert_close(layer(x, lower_bound=bound)[0], type(layer).forward(layer, x)[0], **CLOSE)


@each_layer
def test_packed_sequences_equal_calls_of_the_original(name):
    layer, x, bound = made(name)
    lengths = (3, 0, 1, 4)
    parts = [layer(part[None], lower_bound=bound)[0][0] for part in x[0].split(lengths) if len(part)]
    report = accelerate(layer)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    o = layer(x[:1], lower_bound=bound, cu_seqlens=offsets)[0][0]
    torch.testing.assert_close(o, torch.cat(parts), **CLOSE)
    assert not report.fallbacks


@pytest.mark.parametrize("kind", [HGRNAttention, HGRN2Attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_either_forward_continues_from_the_state_of_the_other(kind, dtype):
    layer, x = kind(), torch.randn(2, 9, 64)
    bound = torch.rand(layer.f_proj.out_features)
    whole = layer(x, lower_bound=bound)[0]
    layer, x, bound = layer.to(dtype), x.to(dtype), bound.to(dtype)
    report = accelerate(layer)

    def original(*given, **named):
        return type(layer).forward(layer, *given, **named)

    for turns in ((original, layer), (layer, original)):
        cache = Cache()
        parts = [
            call(part, past_key_values=cache, use_cache=True, lower_bound=bound)[0]
            for call, part in zip((*turns, layer, layer), x.split([5, 2, 1, 1], 1), strict=True)
        ]
        difference = torch.cat(parts, 1).float() - whole
        assert difference.norm() < (1e-6 if dtype is torch.float32 else 3e-2) * whole.norm()
    assert not report.fallbacks


def test_what_the_forward_cannot_do_runs_the_original(prose):
    layer, x, bound = made("hgrn with convolutions")
    with torch.no_grad():
        before = layer(x, lower_bound=bound[:1])[0]
        report = accelerate(layer)
        assert torch.equal(layer(x, lower_bound=bound[:1])[0], before)
        layer(x, past_key_values=Cache(), use_cache=True)
    prose(str(report))
    assert report.fallbacks.total() == 2


@pytest.mark.parametrize("name", ["hgrn with convolutions", "hgrn2"])
def test_autocast_and_checkpointing(name):
    layer, x, bound = made(name)
    plain = run_bounded(layer, x, bound)
    accelerate(layer)
    for reentrant in (False, True):
        given = x.detach().requires_grad_()
        layer.zero_grad()
        bound.grad = None
        o = checkpoint(lambda y: layer(y, lower_bound=bound)[0], given, use_reentrant=reentrant)
        o.square().sum().backward()
        gradients = {"x": given.grad, **{key: each.grad for key, each in layer.named_parameters()}, "bound": bound.grad}
        assert_same((o.detach(), gradients), plain, 3e-5)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x, lower_bound=bound)[0]
    assert low.dtype is torch.bfloat16
    assert (low.float() - plain[0]).norm() < 2e-2 * plain[0].norm()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["hgrn with convolutions", "hgrn2"])
def test_a_whole_graph_is_compiled(name):
    layer, x, bound = made(name)
    before = run_bounded(layer, x, bound)
    report = accelerate(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, gradients = run_bounded(compiled, x, bound)
    assert_same((found, {key.removeprefix("_orig_mod."): each for key, each in gradients.items()}), before, 3e-5)
    assert not report.fallbacks
