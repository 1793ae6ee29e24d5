"""Tests of calls of MLPs that ``accelerate`` replaces: calls like the one before, and steps of decoding.

A replaced MLP compares a call with the latest one instead of asking everything anew. On a GPU it leaves calls of few rows to the
original forward. The tests run on a CPU, which counts as a GPU where they ask for the fixture ``capture``.
"""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from onelaunch import accelerate
from onelaunch.integrations import swiglu_mlps
from tests.integrations.standins import GatedMLP
from tests.integrations.test_mlps import mlp_of


class Capture:
    """Stand-in for the class that knows whether a CUDA graph is captured."""

    under_way = False

    @classmethod
    def is_capturing(cls):
        return cls.under_way


@pytest.fixture
def capture(monkeypatch):
    """Let a CPU count as a GPU, on which no CUDA graph is captured until ``under_way`` is set."""
    monkeypatch.setattr(swiglu_mlps, "GPUS", ("cpu",))
    monkeypatch.setattr(swiglu_mlps, "Device", Capture)
    monkeypatch.setattr(Capture, "under_way", False)
    return Capture


def test_steps_of_decoding_run_the_original_forward_unless_a_graph_is_captured(capture):
    mlp, model = mlp_of("llama"), mlp_of("llama")
    model.load_state_dict(mlp.state_dict())
    report = accelerate(mlp)
    few, more = torch.randn(1, 16, 32), torch.randn(1, 17, 32)
    with torch.no_grad():
        assert torch.equal(mlp(few), model(few))
        assert torch.equal(mlp(few[0, 0]), model(few[0, 0]))
        assert report.fallbacks == {swiglu_mlps.BOUND_BY_HOST: 2}
        torch.testing.assert_close(mlp(more), model(more))
        capture.under_way = True
        torch.testing.assert_close(mlp(few), model(few))
    capture.under_way = False
    torch.testing.assert_close(mlp(few), model(few))  # autograd records it, so that memory counts too
    assert report.fallbacks == {swiglu_mlps.BOUND_BY_HOST: 2}


def test_a_graph_holds_only_kernels_that_a_call_before_it_has_launched(capture, monkeypatch):
    """CUDA loads no kernel during a capture, so that the first launch of one would break it."""
    mlp, launched, seen = mlp_of("llama"), [], []
    report = accelerate(mlp)
    mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    swiglu = swiglu_mlps.swiglu
    monkeypatch.setattr(swiglu_mlps, "swiglu", lambda x, *weights: launched.append(x.shape[-2]) or swiglu(x, *weights))

    def captured(x, module=mlp):
        before = module.forward.__self__.fallbacks.total()
        capture.under_way = True
        module(x)
        capture.under_way = False
        return module.forward.__self__.fallbacks.total() == before

    with torch.no_grad():
        one, two = torch.randn(1, 1, 32), torch.randn(1, 2, 32)
        assert not captured(one)
        mlp(one)
        mlp(one)
        assert launched == [1]
        assert captured(one)
        assert not captured(two)
        handle = mlp.gate_proj.register_forward_hook(lambda *_: None)
        mlp(two)  # hooks would have to run, so that a captured call could not be ours either
        handle.remove()
        assert not captured(two)
        mlp(two)
        assert launched == [1, 2]
        assert captured(two)
        assert not captured(two, copy.deepcopy(mlp))  # maybe on its way to another process
    # Each call runs the hook once, also one that launches the kernels beside: two were captured as ours, and one was of the copy.
    assert len(seen) == report.fallbacks.total() + 2 + 1


@pytest.mark.gpu
def test_a_captured_step_of_decoding_computes_what_an_eager_one_does():
    mlp = mlp_of("llama", hidden_size=256, intermediate_size=512).to("cuda", torch.bfloat16)
    report = accelerate(mlp)
    x = torch.randn(1, 1, 256, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        eager = mlp(x)
        with torch.cuda.graph(graph):
            captured = mlp(x)
    graph.replay()
    assert report.fallbacks == {swiglu_mlps.BOUND_BY_HOST: 1}
    torch.testing.assert_close(captured, eager, rtol=2e-2, atol=2e-2)  # h is rounded to bfloat16 at other places


def test_fla_runs_steps_of_decoding_by_the_new_forward(capture, fla):
    mlp = GatedMLP(32, intermediate_size=48)
    report = accelerate(mlp)
    with torch.no_grad():
        mlp(torch.randn(1, 1, 32))
    assert not report.fallbacks


@pytest.mark.parametrize("grad", [False, True])
def test_a_call_like_the_one_before_looks_at_everything_again(grad):
    """Facts of the latest call are compared with those of this one; each change below must be seen by the next call."""
    mlp, x = mlp_of("llama"), torch.randn(3, 32)
    report = accelerate(mlp)

    def changed(expected):
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                before = report.fallbacks.total()
                gate, up = (F.linear(x, each.weight) for each in (mlp.gate_proj, mlp.up_proj))
                torch.testing.assert_close(mlp(x), mlp.down_proj(F.silu(gate) * up))
        return report.fallbacks.total() - before == expected

    assert changed(0)
    with torch.no_grad():
        mlp.up_proj.weight.mul_(2)
    assert changed(0)
    mlp.up_proj.weight = nn.Parameter(torch.randn(48, 32))  # elsewhere in memory
    assert changed(0)
    mlp.gate_proj.weight.data = torch.randn(32, 48).T  # of the same shape, by columns
    assert changed(0)
    accelerate(mlp)
    assert changed(0)
    handle = mlp.act_fn.register_forward_hook(lambda *_: None)
    assert changed(1)
    handle.remove()
    assert changed(0)
    mlp.up_proj = nn.Linear(32, 48, bias=False)
    assert changed(1)


def test_a_call_under_autocast_is_none_like_it_without():
    mlp, x = mlp_of("llama").bfloat16(), torch.randn(3, 32)
    report = accelerate(mlp)
    with torch.autocast("cpu", torch.bfloat16):
        mlp(x)
        mlp(x)
    assert not report.fallbacks
    with pytest.raises(RuntimeError, match="dtype"):
        mlp(x)
    assert report.fallbacks == {"the input and the weights differ in dtype": 1}


def test_traced_calls_do_not_depend_on_where_the_weights_lie():
    """A traced call finds no memo of one before it: its graph would read one weight at an offset from the other."""
    mlp, x = mlp_of("llama"), torch.randn(3, 32)
    accelerate(mlp)
    with torch.no_grad():
        mlp(x)
        graph = make_fx(lambda given: mlp(mlp(given)))(x)
        wanted = mlp(mlp(x))
    assert not [each for each in graph.graph.nodes if each.target is torch.ops.aten.as_strided.default]
    torch.testing.assert_close(graph(x), wanted)


def test_the_memo_of_the_latest_call_keeps_no_tensor():
    mlp, x = mlp_of("llama"), torch.randn(3, 32)
    accelerate(mlp)
    mlp(x)
    mlp(x)
    held = [weakref.ref(each) for each in (x, mlp.gate_proj.weight, mlp.up_proj.weight)]
    del x
    for each in (mlp.gate_proj, mlp.up_proj):
        each.weight = nn.Parameter(torch.randn(48, 32))
    gc.collect()
    assert [each() for each in held] == [None] * 3


def test_flattened_weights_of_fsdp_do_not_prevent_the_replacement():
    """FSDP with ``use_orig_params`` shows parts of flattened weights between calls."""
    mlp, x = mlp_of("llama"), torch.randn(3, 32)
    before, whole = mlp(x), [each.data for each in mlp.parameters()]
    for each in mlp.parameters():
        each.data = each.data.flatten()[:7]
    report = accelerate(mlp)
    for each, data in zip(mlp.parameters(), whole, strict=True):
        each.data = data
    torch.testing.assert_close(mlp(x), before)
    assert not report.fallbacks


def test_threads_that_call_one_module_each_get_their_own_result():
    mlp, model = mlp_of("llama"), mlp_of("llama")
    model.load_state_dict(mlp.state_dict())
    accelerate(mlp)
    rows = [torch.randn(count, 32) for count in (1, 3, 5, 7)]
    with ThreadPoolExecutor(len(rows)) as pool:
        for found, x in zip(pool.map(lambda x: [mlp(x) for _ in range(50)], rows), rows, strict=True):
            for each in found:
                torch.testing.assert_close(each, model(x))


def test_other_parameters_for_one_call_are_those_that_it_computes_with():
    mlp, x = mlp_of("llama"), torch.randn(3, 32)
    accelerate(mlp)
    for kind in (lambda each: each, nn.Parameter):
        before = mlp(x)
        other = {name: kind(torch.randn_like(each)) for name, each in mlp.named_parameters()}
        gate, up, down = (other[f"{name}_proj.weight"] for name in ("gate", "up", "down"))
        found = torch.func.functional_call(mlp, other, (x,))
        torch.testing.assert_close(found, F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down))
        torch.testing.assert_close(mlp(x), before)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", ["parametrize", "weight_norm"])
def test_weights_that_become_functions_of_others_are_seen(kind):
    mlp, x = mlp_of("llama"), torch.randn(3, 32)
    report = accelerate(mlp)
    mlp(x)
    mlp(x)
    if kind == "parametrize":
        torch.nn.utils.parametrize.register_parametrization(mlp.up_proj, "weight", nn.Tanh())
    else:
        torch.nn.utils.weight_norm(mlp.up_proj)
        with torch.no_grad():
            mlp.up_proj.weight_g.mul_(2)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    torch.testing.assert_close(mlp(x), mlp.down_proj(F.silu(gate) * up))
    assert report.fallbacks.total() == 1
