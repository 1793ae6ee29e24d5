"""Tests of ``gla_layer`` on Hopper GPUs as one autograd function (variants "packed" and "packed_states").

They cover results, gradients, which kernels write into columns of one matrix, and memory use. "packed_states" saves the states
that enter chunks for the backward pass. :func:`by_parts` runs the same kernels as separate operations, and :func:`gradients_of`
takes the gradients of a loss that weighs every element differently.

``assert_near`` bounds the norm of each error, relative to that of the expected values.

``device`` is the first GPU, or the CPU. ``assert_ok`` requires a verdict of the gate to be right. ``differentiable`` returns the
arguments that take gradients. ``TENSORS`` names the tensor arguments in their order.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from onelaunch.operation import Case, find_operation
from onelaunch.ops import gla_layer
from onelaunch.ops.gla_layer import autograd
from onelaunch.ops.gla_layer.composition import segments_of
from onelaunch.workbench.verify import judge
from tests.ops.cases import GLA, assert_captured_step_follows_its_inputs, assert_near, assert_ok, differentiable
from tests.ops.gla_layer_cases import GLA_LAYER, TENSORS
from tests.ops.test_gla_hopper import HOPPER
from tests.ops.test_gla_layer_packed import by_parts, gradients_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

SIZES: dict[str, dict[str, Any]] = {
    "flas_heads": {"B": 2, "T": 256, "D": 256, "H": 4, "K": 64, "V": 128},
    "equal_heads": {"B": 2, "T": 320, "D": 256, "H": 4, "K": 128, "V": 128},
    "last_tiles_in_part": {"B": 3, "T": 200, "D": 256, "H": 4, "K": 128, "V": 128},
    "a_step": {"B": 3, "T": 1, "D": 128, "H": 2, "K": 64, "V": 64},
    "few_steps": {"B": 3, "T": 17, "D": 128, "H": 2, "K": 64, "V": 64},
    "long_in_parts": {"B": 1, "T": 4096, "D": 128, "H": 1, "K": 64, "V": 128},
    "large_heads": {"B": 1, "T": 130, "D": 256, "H": 2, "K": 256, "V": 256},
    "padded_heads": {"B": 2, "T": 200, "D": 256, "H": 3, "K": 80, "V": 96},
    "an_odd_rank": {"B": 2, "T": 192, "D": 256, "H": 2, "K": 64, "V": 192, "rank": 5},
}
each_size = pytest.mark.parametrize("name", SIZES)
each_variant = pytest.mark.parametrize("variant", ["packed", "packed_states"])

KERNELS = "wide_activated,hopper,norm_gate"
"""Variants of ``projections``, ``gla`` and ``output_chain`` whose kernels the function runs."""


def given_on(device: torch.device, *, grad: bool = True, seed: int = 0, **sizes: Any) -> dict[str, Any]:
    """Return random arguments in bfloat16, which take gradients unless ``grad`` is false."""
    reading = GLA_LAYER.make_inputs(GLA_LAYER.case("bfloat16", **sizes), device, seed)
    for name in reading.differentiable if grad else ():
        reading.arguments[name].requires_grad_()
    return reading.arguments


def by_kernels(given: dict[str, Any], *, keep_states: bool = False) -> torch.Tensor:
    """Compute the layer as one function, with the kernels in :data:`KERNELS` and no initial state, and return out alone."""
    tensors, numbers = [given[name] for name in TENSORS], [given[name] for name in ("heads", "normalizer", "eps")]
    want_final = given["output_final_state"]
    return autograd.forward(*tensors, None, *numbers, want_final, keep_states, KERNELS, grad=True)[0]


def assert_training_correct(case: Case, variant: str, device: torch.device) -> None:
    """Require a variant to pass the whole verification gate with gradients. These variants support no call without them."""
    assert_ok(judge(GLA_LAYER, case, variant=variant, device=device, directions=("forward_backward",)), GLA_LAYER, case, variant)


@each_variant
@each_size
def test_results_and_gradients_pass_the_gate(name, variant, device):
    assert_training_correct(GLA_LAYER.case("bfloat16", name=name, **SIZES[name]), variant, device)


def test_the_portable_recurrence_runs_what_hopper_kernels_refuse(device):
    assert_training_correct(GLA_LAYER.case("float16", **SIZES["last_tiles_in_part"]), "packed", device)


@each_variant
def test_the_hopper_kernels_take_and_return_states(variant, device):
    case = GLA_LAYER.case("bfloat16", **SIZES["last_tiles_in_part"], initial_state=True, final_state=True)
    assert_training_correct(case, variant, device)


@pytest.mark.parametrize("keep_states", [False, True])
@pytest.mark.parametrize("name", [name for name in SIZES if name != "an_odd_rank"])
def test_results_equal_those_by_parts_bitwise(name, keep_states, device):
    """Results that depend on the decays' gradient are compared with a tolerance.

    That gradient is rounded once here, after the slope of the gate, and by parts also before it. ``an_odd_rank`` is left out:
    rows of its packed product are padded to a multiple of 8 elements here alone, so that cuBLAS may sum in another order.
    """
    given = given_on(device, **SIZES[name])
    leaves = differentiable(given)
    expected = by_parts(given, ("wide_activated", "hopper", "norm_gate"))[0]
    found = by_kernels(given, keep_states=keep_states)
    ours, theirs = gradients_of((found,), leaves), gradients_of((expected,), leaves)
    # The last segment is the low-rank projection that log-decays are made from.
    rows = sum(segment.width for segment in segments_of(GLA_LAYER.bind(**given).sizes)[:-1])
    for each in (ours, theirs):
        each["rows of q, k, v and the gate"] = each["in_proj_weight"][:rows]
    if keep_states:  # the chunk state pass that also computes outputs has its own order of operations
        assert_near({"out": found, **ours}, {"out": expected, **theirs}, 1e-2)
        return
    assert torch.equal(found, expected)
    for same in ("norm_weight", "w_out", "rows of q, k, v and the gate"):
        assert torch.equal(ours[same], theirs[same]), same
    assert_near(ours, theirs, 5e-3)


@pytest.mark.parametrize("name", ["flas_heads", "equal_heads", "long_in_parts"])
def test_aliased_scratch_buffers_do_not_change_results(name, device, monkeypatch):
    """Compare states in the memory of dq and dk, and their gradients in a matrix that dg overwrites, with memory of their own."""
    from onelaunch.ops.gla import launch_hopper

    given = given_on(device, **SIZES[name])
    leaves, lent = differentiable(given), []
    lend = launch_hopper.aliased_state_buffers
    monkeypatch.setattr(launch_hopper, "aliased_state_buffers", lambda call, into: lent.append(lend(call, into)) or lent[-1])
    found = gradients_of((by_kernels(given),), leaves)
    lent = [buffers for buffers in lent if buffers is None or not buffers[0].is_meta]  # a first call records its launches on meta
    assert len(lent) == 1
    assert lent[0] is not None
    monkeypatch.setattr(launch_hopper, "aliased_state_buffers", lambda call, into: None)
    expected = gradients_of((by_kernels(given),), leaves)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("lengths", [None, (0, 50, 0, 0, 79, 1, 200, 0), (64, 128, 138)], ids=str)
@pytest.mark.parametrize("keys", [64, 80, 128])
def test_gradients_in_columns_of_a_matrix(keys, lengths, device):
    """Require gradients of ``gla`` written into columns of a matrix to have the bits of those in tensors of their own.

    Nothing is written beside them. Tiles are whole or partial, of packed sequences or not. The last argument, the normalizer of
    logsigmoid, makes the backward pass return the gradient of the logits in place of the log-decays' gradient.
    """
    from onelaunch.ops.gla import launch, launch_hopper

    values, heads = 128, 2
    case = GLA.case("bfloat16", B=1, T=330, H=heads, K=keys, V=values, lengths=lengths)
    given = GLA.make_inputs(case, device, 0).arguments
    scale = keys**-0.5
    call = launch.Attention.of(*(given[name] for name in "qkvg"), None, given.get("cu_seqlens"), scale)
    do = torch.randn_like(given["v"])
    expected = launch_hopper.backward(call, do)
    widths = (8, heads * keys, heads * keys, 16, heads * values, 24)
    matrix = torch.full((330, sum(widths)), 7.0, dtype=torch.bfloat16, device=device)
    gap, dq, dk, other, dv, rest = matrix.split_with_sizes(widths, 1)
    into = launch.Into(*(each.view(1, 330, heads, -1) for each in (dq, dk, dv)))
    normalizer = 16.0
    found = launch_hopper.backward(call, do, into, normalizer)
    for ours, theirs in zip(into, expected[:3], strict=True):
        assert torch.equal(ours, theirs)
    assert all(bool((each == 7).all()) for each in (gap, other, rest))
    slope = (-torch.expm1(normalizer * given["g"].double())) / normalizer
    assert_near({"dz": found.g.double()}, {"dz": expected.g.double() * slope}, 5e-3)


@each_variant
def test_a_captured_training_step_follows_its_inputs(variant, device):
    def made(*, seed: int, grad: bool) -> dict[str, Any]:
        return given_on(device, grad=grad, seed=seed, **SIZES["equal_heads"])

    assert_captured_step_follows_its_inputs(GLA_LAYER, variant, made, device)


def test_it_compiles_into_one_graph(device):
    torch.compiler.reset()
    given = given_on(device, **SIZES["last_tiles_in_part"])
    function = torch.compile(lambda **given: gla_layer(**given, variant="packed"), fullgraph=True)
    leaves = differentiable(given)
    found, expected = function(**given), gla_layer(**given, variant="packed")
    assert torch.equal(found[0], expected[0])
    assert_near(gradients_of(found, leaves), gradients_of(expected, leaves), 2e-3)


def peak_of(variant: str, given: dict[str, Any]) -> int:
    """Return the largest number of bytes that a training step allocates in addition to its inputs."""
    leaves = list(differentiable(given).values())
    seed = torch.ones_like(given["x"])
    for _ in range(2):  # the first step allocates workspaces
        gc.collect()  # garbage of earlier tests would be freed during the step and reduce the measured peak
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out, _ = gla_layer(**given, variant=variant)
        torch.autograd.grad(out, leaves, seed)
        del out  # else the second step would not allocate it in addition to what was there before
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return peak


@pytest.mark.parametrize(("keys", "saved"), [(128, 230), (64, -40)])
def test_memory_of_a_training_step(keys, saved, device):
    """``packed`` must save ``saved`` MB over separate calls. By arithmetic it saves 268 with 128 key channels, 68 with 64.

    With 64 key channels it was measured to take 35 more.
    """
    given = given_on(device, B=8, T=4096, D=2048, H=16, K=keys, V=128)
    assert find_operation("gla_layer").get("packed").why_not(GLA_LAYER.bind(**given).query()) is None
    assert peak_of("composed", given) - peak_of("packed", given) >= saved * 1e6
