"""Tests of replayed calls on a GPU: streams, threads, CUDA graphs, freed memory, gradients and ``torch.compile``.

The first call with inputs of certain shapes, strides and dtypes runs as it is. The second is recorded: without gradients into a
:class:`Plan` of its allocations and launches, with gradients into a tape. From the third call on the record is replayed for the
new tensors, without the function's own Python code (``onelaunch/launch/planned.py``).
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from onelaunch.launch.plan import Device, Plan
from onelaunch.launch.planned import _ALL, forget_plans, refused_calls
from onelaunch.ops import gated_scan, gla, gla_layer, linear_rnn, rms_norm, swiglu

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def replays_on_gpus(monkeypatch):
    """Replay calls on a GPU whatever ``ONELAUNCH_REPLAY`` says, from no plans of earlier tests."""
    monkeypatch.setattr(Device, "types", ("cuda",))
    forget_plans()
    yield
    forget_plans()


def decays(*size):
    return -torch.rand(*size, device="cuda").to(torch.bfloat16)


def values(*size):
    return torch.randn(*size, device="cuda").to(torch.bfloat16)


def heads():
    return (*(values(2, 96, 4, 64) for _ in range(3)), decays(2, 96, 4, 64))


CALLS = {
    "gla": (gla, heads),
    "gla fused": (lambda *given: gla(*given, variant="fused"), heads),
    "gla stepwise": (lambda *given: gla(*given, variant="stepwise"), heads),
    "gla, columns of one matrix": (
        lambda packed, g: gla(*packed.view(2, 96, 3, 4, 64).unbind(2), g),
        lambda: (values(2, 96, 3 * 4 * 64), decays(2, 96, 4, 64)),
    ),
    "swiglu": (swiglu, lambda: (values(24, 128), values(256, 128), values(256, 128))),
    "swiglu fused": (
        lambda *given: swiglu(*given, variant="fused"),
        lambda: (values(24, 128), values(256, 128), values(256, 128)),
    ),
    "swiglu stacked": (swiglu, lambda: (values(2, 12, 128), values(512, 128))),
    "swiglu of one token": (swiglu, lambda: (values(1, 1, 2048), values(16_384, 2048))),
    "swiglu of 64 tokens": (swiglu, lambda: (values(1, 64, 2048), values(16_384, 2048))),
    "linear_rnn": (linear_rnn, lambda: (values(2, 96, 64), values(64, 64), decays(2, 96, 64), values(2, 96, 64))),
    "gated_scan": (gated_scan, lambda: (values(2, 96, 64), decays(2, 96, 64), values(2, 96, 64))),
    "rms_norm": (rms_norm, lambda: (values(2, 96, 64), values(64), values(2, 96, 64))),
}
"""Functions and makers of their arguments by name."""


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


def results(function, given):
    """Return the results that are tensors, computed without plans: nothing is replayed where launches are observed."""
    from onelaunch.launch.imitation import observe

    with observe(), torch.no_grad():
        return tensors(function(*given))


def tensors(found):
    return [each for each in (found if isinstance(found, tuple) else (found,)) if each is not None]


def planned():
    operations = (gla, swiglu, linear_rnn, gated_scan, rms_norm)
    return sum(type(each) is Plan for operation in operations for each in operation._function.plans())


def replayed(function, make):
    """Return the function after two calls without gradients, so that its next call is replayed."""
    with torch.no_grad():
        for _ in range(2):
            function(*make())
    return function


@torch.no_grad()
def test_replays_equal_the_calls_themselves(call):
    function, make = call
    replayed(function, make)
    assert planned() >= 1
    assert refused_calls() == {}
    for _ in range(3):
        given = make()
        for found, wanted in zip(tensors(function(*given)), results(function, given), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@torch.no_grad()
def test_a_replay_runs_on_the_current_stream(call):
    function, make = call
    replayed(function, make)
    given = make()
    expected = results(function, given)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        found = tensors(function(*given))
        done = torch.cuda.Event()
        done.record()
    assert not done.query()  # the replay waits for the sleeping stream
    side.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
def test_a_replay_is_captured_and_follows_its_inputs(call):
    function, make = call
    replayed(function, make)
    given = make()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tensors(function(*given))
    for _ in range(2):
        fresh = make()
        for old, new in zip(given, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        for one, other in zip(captured, results(function, fresh), strict=True):
            assert torch.equal(one, other)


def test_threads_replay_with_their_own_tensors(call):
    function, make = call
    replayed(function, make)
    wrong = []

    @torch.no_grad()
    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                given = make()
                for one, other in zip(tensors(function(*given)), results(function, given), strict=True):
                    if not torch.equal(one, other):
                        wrong.append(one)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.no_grad()
def test_a_replay_takes_new_memory_after_all_was_freed(call):
    function, make = call
    replayed(function, make)
    torch.cuda.empty_cache()
    padding = [torch.empty(1 << 22, device="cuda") for _ in range(3)]  # takes the addresses that the earlier calls had
    given = make()
    for one, other in zip(tensors(function(*given)), results(function, given), strict=True):
        assert torch.equal(one, other)
    del padding


@torch.no_grad()
def test_a_replay_keeps_no_memory(call):
    function, make = call
    replayed(function, make)
    given = make()
    function(*given)
    torch.cuda.synchronize()
    gc.collect()  # what earlier tests left would otherwise be freed in between
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        function(*given)
    assert torch.cuda.memory_allocated() == before


def layer():
    """Return x, in_proj_weight, gk_weight, gk_bias, norm_weight and w_out of a layer of four heads of 64 channels."""
    scaled = [0.1 * values(*size) for size in ((4 * 4 * 64 + 16, 128), (4 * 64, 16), (4 * 64,), (64,), (128, 4 * 64))]
    return (values(2, 96, 128), *scaled)


TRAINED = {**CALLS, "gla_layer": (lambda *given: gla_layer(*given, heads=4), layer)}


@pytest.mark.parametrize("name", ["gla", "gla fused", "swiglu", "linear_rnn", "gated_scan", "rms_norm", "gla_layer"])
def test_gradients_of_replays_equal_those_of_the_calls_themselves(name):
    function, make = TRAINED[name]
    steps = [[each.requires_grad_() for each in make()] for _ in range(5)]
    ups = [torch.randn_like(tensors(function(*given))[0]) for given in steps]
    wanted = []
    for given, up in zip(steps, ups, strict=True):
        forget_plans()  # so that both passes run as they are
        wanted.append(outputs_and_gradients(function, given, up))
    assert not plans_of_backward_passes()
    forget_plans()
    for at, (given, up) in enumerate(zip(steps, ups, strict=True)):
        assert bool(plans_of_backward_passes()) == (at >= 2), "recorded by the second call"
        for one, other in zip(outputs_and_gradients(function, given, up), wanted[at], strict=True):
            assert torch.equal(one, other)


def outputs_and_gradients(function, given, up):
    out, *_ = tensors(function(*given))
    return [out, *torch.autograd.grad(out, given, up)]


def plans_of_backward_passes():
    """Return the plans of the operators' functions for backward passes, whichever operations they belong to."""
    return [plan for each in _ALL if "backward" in each.__name__ for plan in each.plans()]


def test_a_compiled_call_follows_replays(call):
    function, make = call
    replayed(function, make)
    given = make()
    with torch.no_grad():
        compiled = torch.compile(function, fullgraph=True)
        for one, other in zip(tensors(compiled(*given)), results(function, given), strict=True):
            torch.testing.assert_close(one, other)


on_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
"""Mark of tests in which the tensors of a call are on a GPU that is not current."""


@on_two_gpus
@pytest.mark.parametrize("name", [*TRAINED])
@torch.no_grad()
def test_calls_run_and_are_replayed_on_the_gpu_of_their_tensors(name):
    function, make = TRAINED[name]
    for at in range(5):
        with torch.cuda.device(1):
            given = make()
        found, wanted = tensors(function(*given)), results(function, given)  # neither recorded nor replayed: by launches alone
        assert torch.cuda.current_device() == 0
        assert all(each.device.index == 1 for each in (*found, *wanted))
        if at == 1:
            recorded = [plan for each in _ALL for plan in each.plans()]
            assert recorded
            assert all(plan.index == 1 for plan in recorded if type(plan) is Plan)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert refused_calls() == {}


@on_two_gpus
@pytest.mark.parametrize("name", ["gla", "swiglu", "linear_rnn", "gated_scan", "rms_norm", "gla_layer"])
def test_gradients_on_another_gpu_are_those_that_it_gives_as_the_current_one(name):
    """The same GPU computes both, so that they have the same bits, as the gradients of a replay and of the call itself have."""
    function, make = TRAINED[name]
    with torch.cuda.device(1):
        steps = [[each.requires_grad_() for each in make()] for _ in range(4)]
        ups = [torch.randn_like(tensors(function(*given))[0]) for given in steps]
        forget_plans()
        wanted = [outputs_and_gradients(function, given, up) for given, up in zip(steps, ups, strict=True)]
    forget_plans()
    for given, up, expected in zip(steps, ups, wanted, strict=True):
        for found, one in zip(outputs_and_gradients(function, given, up), expected, strict=True):
            assert found.device.index == 1
            assert torch.equal(found, one)
    assert torch.cuda.current_device() == 0
    assert refused_calls() == {}
