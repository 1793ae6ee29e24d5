"""Tests of how results for expanded inputs are judged where they are zero but for roundings, because all channels are equal.

The operation is gla_layer. With all inputs expanded, the channels of its only head are equal, and the norm takes away what they
have in common. So decays change no result, and the gradients of their weight and bias are zero but for the norm's epsilon.
"""

from __future__ import annotations

import pytest
import torch

from onelaunch.operation import find_operation
from onelaunch.workbench.verify import Judge
from onelaunch.workbench.verify.repeated import examine_once

LAYER = find_operation("gla_layer")
STEPWISE = LAYER.get("stepwise").run


def is_expanded(tensor):
    return 0 in tensor.stride()


def in_another_order(call):
    """Sum the products of the projections from the last to the first, which is correct and rounds differently."""
    if not is_expanded(call.x):
        return STEPWISE(call)
    return STEPWISE(call._replace(x=call.x.flip(-1), in_proj_weight=call.in_proj_weight.flip(-1)))


def zeros_behind(call):
    """Read zeros behind the only row in memory of an expanded weight of the decays, which is wrong."""
    weight = call.gk_weight
    wrong = torch.cat([weight[:1], torch.zeros_like(weight[1:])])
    return STEPWISE(call._replace(gk_weight=wrong) if is_expanded(weight) else call)


def without_memory_for_equal_rows(call):
    if (call.x == call.x[:1]).all():
        raise torch.OutOfMemoryError("out of memory")
    return STEPWISE(call)


@pytest.fixture
def examined():
    """Examine a function as a variant of the layer, in float32 or another dtype."""

    def examine(run, dtype="float32", eps=1e-5):
        LAYER.variant("of_this_test")(run)
        try:
            case = LAYER.case(dtype, B=2, T=16, D=64, H=1, K=16, V=16, eps=eps)
            return examine_once(Judge(), LAYER, case, variant="of_this_test", directions=("forward_backward",), calls=2)
        finally:
            del LAYER.variants["of_this_test"]

    return examine


def test_gradients_that_are_exactly_zero_are_not_compared_with_their_own_roundings(examined):
    verdict = examined(in_another_order, eps=0.0)
    assert verdict.ok, verdict.explain()
    assert verdict.notes == ()


def test_a_correct_variant_passes_where_pytorch_has_too_little_memory(examined, monkeypatch):
    monkeypatch.setattr(LAYER.get("stepwise"), "run", without_memory_for_equal_rows)
    verdict = examined(in_another_order)
    assert verdict.ok, verdict.explain()
    assert any("since it failed: out of memory" in note for note in verdict.notes)


@pytest.mark.parametrize("enough_memory", [True, False])
def test_a_variant_that_reads_an_input_wrongly_is_found_where_no_result_tells(enough_memory, examined, monkeypatch):
    if not enough_memory:
        monkeypatch.setattr(LAYER.get("stepwise"), "run", without_memory_for_equal_rows)
    verdict = examined(zeros_behind, "bfloat16")
    assert "With gk_weight expanded: grad gk_weight is off by" in verdict.explain()
