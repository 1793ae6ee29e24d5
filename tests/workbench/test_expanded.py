"""Tests of how results for expanded inputs are judged where a sum of alike rows cancels, so that roundings are large against it.

The operation is swiglu, whose elements are all equal with expanded inputs: one product of a row and a weight decides all of them.
``Prepared`` gives it the arguments of a probe.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn.functional import silu

from onelaunch.operation import Probe, find_operation
from onelaunch.workbench.verify import Judge
from onelaunch.workbench.verify.bounds import norm_error
from onelaunch.workbench.verify.calls import Candidate, Inputs
from onelaunch.workbench.verify.probes import Prepared
from onelaunch.workbench.verify.repeated import examine_once
from onelaunch.workbench.verify.views import expanded, moved

SWIGLU = find_operation("swiglu")


def swiglu(x, w_gate, w_up):
    return (silu(x @ w_gate.mT) * (x @ w_up.mT),)


def in_another_order(call):
    """Sum the products from the last to the first if rows are expanded, which is correct and rounds differently."""
    given = (call.x, call.w_gate, call.w_up)
    return swiglu(*(each.flip(-1) for each in given) if any(0 in each.stride() for each in given) else given)


def one_element_late(call):
    """Begin an expanded row of ``x`` at its second element, which is wrong."""
    return swiglu(call.x.roll(-1, -1) if 0 in call.x.stride() else call.x, call.w_gate, call.w_up)


def zeros_behind(call):
    """Read zeros behind the only row in memory of an expanded ``x``, which is wrong."""
    x = call.x if 0 not in call.x.stride() else torch.cat([call.x[:1], torch.zeros_like(call.x[1:])])
    return swiglu(x, call.w_gate, call.w_up)


def in_fewer_bits_if_expanded(call):
    """Round expanded operands to about 16 bits, which is off by 1e-5 of each term and by more of a sum that cancels."""
    given = (call.x, call.w_gate, call.w_up)
    return swiglu(*(257 * each - 256 * each if 0 in each.stride() else each for each in given))


def in_a_few_bits_less_if_expanded(call):
    """Round expanded operands to about 18 bits, six bits less than float32 has."""
    given = (call.x, call.w_gate, call.w_up)
    return swiglu(*(65 * each - 64 * each if 0 in each.stride() else each for each in given))


def cancelling(arguments, to=1 / 300):
    """Reduce the products of the first row of ``x`` with the first row of each weight to a part of them."""
    x, weights = arguments["x"].clone(), torch.stack([arguments["w_gate"][0], arguments["w_up"][0]]).double()
    row = x[0].double()
    x[0] = row - (1 - to) * (torch.linalg.pinv(weights) @ (weights @ row))
    return arguments | {"x": x}


@pytest.fixture
def examined():
    """Examine a function as a variant of swiglu at a case, and return the verdict and the largest error of an expanded input.

    The error is in twice the tolerance that holds for rows that are independent.
    """

    def examine(run, dtype, *, to=1 / 300, **tags):
        case = SWIGLU.case(dtype, M=4, N=16, K=16)
        operation, judge = Prepared(SWIGLU, Probe(case, functools.partial(cancelling, to=to))), Judge()
        SWIGLU.variant("of_this_test", **tags)(run)
        try:
            verdict = examine_once(judge, operation, case, variant="of_this_test", directions=("forward_backward",))
            reference = judge.reference(operation, case, direction="forward_backward")
            candidate = Candidate.variant(operation, "of_this_test")
            views, copies = (candidate(each) for each in expanded(reference.inputs))
        finally:
            del SWIGLU.variants["of_this_test"]
        errors = {name: norm_error(views[name].double(), copies[name].double(), case.dtype) for name in views}
        return verdict, max(error / (2 * reference.allowed[name]) for name, error in errors.items())

    return examine


def test_a_correct_variant_whose_roundings_are_large_against_its_results_passes(examined):
    verdict, error = examined(in_another_order, "float32")
    assert error > 3, "the tolerance of independent rows nearly does, so that this tests nothing"
    assert verdict.ok, verdict.explain()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("run", [one_element_late, zeros_behind])
def test_a_wrong_variant_is_found_although_roundings_are_large(run, dtype, examined):
    verdict, error = examined(run, dtype)
    assert error > 10
    assert "With expanded inputs: h is off by" in verdict.explain()


def test_a_peer_may_round_as_many_times_more_where_rows_are_alike_as_elsewhere(examined):
    """Such a peer is less accurate than PyTorch at any contents. A wrong one is found with a tolerance of its own too."""
    peer = {"requires": "torch", "own_tolerance": 1e-2}
    verdict, error = examined(in_fewer_bits_if_expanded, "float32", **peer)
    assert verdict.own_tolerance == 1e-2, verdict.explain()
    assert error * 6e-7 > 2 * 1e-2, "the peer's own tolerance does, so that this tests nothing"
    for wrong in (one_element_late, zeros_behind):
        assert examined(wrong, "float32", **peer)[0].status == "incorrect"


def test_a_peer_may_round_more_than_is_left_of_a_result(examined):
    """PyTorch's own roundings are then so large a part of the result that nothing tells a less accurate peer from a wrong one."""
    run, peer = functools.partial(examined, in_a_few_bits_less_if_expanded, "float32", to=1e-6), {"requires": "torch"}
    verdict, error = run(own_tolerance=1e-4, **peer)
    assert verdict.own_tolerance == 1e-4, verdict.explain()
    assert error * 6e-7 > 0.45, "the largest error of a peer in other results does, so that this tests nothing"
    assert run()[0].status == run(own_tolerance=1e-6, **peer)[0].status == "incorrect"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moved_inputs_are_neighbours(dtype):
    finfo = torch.finfo(dtype)
    stay = torch.tensor([0.0, float("inf"), -float("inf"), finfo.max], dtype=dtype)
    drawn = torch.randn(1000, dtype=dtype)
    inputs = Inputs({"x": drawn, "stay": stay, "count": torch.arange(3), "scale": 2.0}, ("x",), {"y": drawn})
    once = moved(inputs, 1)
    integers = torch.int16 if dtype.itemsize == 2 else torch.int32
    for given in (once.arguments["x"].detach(), once.output_gradients["y"]):
        steps = given.view(integers) - drawn.view(integers)
        assert (steps.abs() == 1).all()
        assert 400 < (steps == 1).sum() < 600
    assert torch.equal(once.arguments["stay"][:3], stay[:3])
    assert once.arguments["stay"].isfinite()[3]
    assert torch.equal(once.arguments["count"], torch.arange(3))
    assert once.arguments["scale"] == 2.0
    assert once.arguments["x"].requires_grad
    assert torch.equal(moved(inputs, 1).arguments["x"], once.arguments["x"])
    assert not torch.equal(moved(inputs, 2).arguments["x"], once.arguments["x"])
