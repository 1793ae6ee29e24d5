"""Tests of what is asked of a variant once per study: twenty calls, odd views, gradients one by one, ``torch.compile``.

The variants are of ``toy_sum``, the operation of ``toy.py``: ``HONEST`` are names of correct ones, and
``rogues_calls.registered`` registers a wrong or unusual one for a test.

``toy_case`` returns a small case of ``toy_sum``. A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import time

import pytest
import torch

from onelaunch.workbench.verify import Judge
from onelaunch.workbench.verify.repeated import CALLS, calls_needed, examine_once
from tests.workbench import rogues_calls as rogues
from tests.workbench.toy import HONEST, toy_case, toy_sum

BOTH = ("forward", "forward_backward")


@pytest.fixture(scope="module")
def judge_once():
    return Judge()


@pytest.fixture
def examined(judge_once):
    def examine(run, *directions, **tags):
        with rogues.registered(run, **tags) as name:
            return examine_once(judge_once, toy_sum, toy_case(), variant=name, directions=directions or ("forward",))

    return examine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", HONEST)
def test_an_honest_variant_passes(variant, dtype):
    start = time.perf_counter()
    verdict = examine_once(Judge(), toy_sum, toy_case(dtype), variant=variant, directions=BOTH)
    assert verdict.ok, verdict.explain()
    assert verdict.notes == ()
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize(("rate", "least"), [(1 / 5, 98), (1 / 20, 60)])
def test_a_variant_with_a_race_is_found_with_the_stated_chance(rate, least, examined):
    """In 100 tries, a race that is wrong in one call of 5 is found at least 98 times, and one of 20 calls 60 times."""
    found = [examined(rogues.racy(rate, seed)) for seed in range(100)]
    assert sum(not verdict.ok for verdict in found) >= least
    assert any("In call" in verdict.explain() and f"of {CALLS} with equal inputs" in verdict.explain() for verdict in found)


def test_the_number_of_calls_that_a_rare_race_needs():
    assert calls_needed(1 / 5, 0.98) <= CALLS
    assert calls_needed(1 / 20, 0.60) <= CALLS
    assert calls_needed(1 / 100, 0.98) == 390  # the least n with 0.99**n <= 0.02


def test_a_variant_whose_bits_differ_is_judged_in_each_call(examined):
    verdict = examined(rogues.other_bits)
    assert verdict.ok, verdict.explain()
    assert any("other bits than the first; each of them passed" in note for note in verdict.notes)


def test_a_variant_that_returns_zeros_under_torch_compile(examined):
    torch.compiler.reset()
    assert examined(rogues.zeros_when_compiled).ok, "it does not say that it can be compiled"
    verdict = examined(rogues.zeros_when_compiled, *BOTH, compiles=True)
    assert not verdict.ok
    assert "Under torch.compile: y is off" in verdict.explain()


@pytest.mark.thorough
def test_an_honest_variant_passes_under_torch_compile(examined):
    torch.compiler.reset()
    verdict = examined(rogues.parallel.run, *BOTH, compiles=True)
    assert verdict.ok, verdict.explain()


def test_a_variant_that_cannot_be_traced_although_it_says_so(examined):
    def raises(call):
        if torch.compiler.is_compiling():
            raise RuntimeError("not while it is traced")
        return rogues.parallel(call)

    verdict = examined(raises, compiles=True)
    assert "Under torch.compile: it raised" in verdict.explain()


def test_a_variant_that_reads_expanded_inputs_as_if_they_were_contiguous(examined):
    verdict = examined(rogues.contiguous_only)
    assert "With expanded inputs: y is" in verdict.explain()
    assert "With inputs that are slices of larger tensors: y is" in verdict.explain()


def test_a_variant_that_refuses_views_passes_with_notes(examined):
    verdict = examined(rogues.refuses_views)
    assert verdict.ok
    assert any("refuses slices" in note for note in verdict.notes)
    assert any("refuses expanded tensors" in note for note in verdict.notes)


def test_a_variant_that_gives_a_gradient_only_if_all_inputs_want_one(examined):
    verdict = examined(rogues.only_if_all_are_wanted, "forward_backward")
    assert "With a gradient asked for weight alone: grad weight" in verdict.explain()


def test_a_variant_that_gives_gradients_only_if_they_come_in_through_all_results(examined):
    verdict = examined(rogues.only_if_all_come_in, "forward_backward")
    assert "With gradients that come in through y, then final_state: grad x" in verdict.explain()


def test_a_variant_that_returns_one_output_buffer_for_ever(examined):
    assert "y lies in memory that an earlier call returned" in examined(rogues.one_buffer()).explain()


def test_a_variant_that_changes_its_input_after_some_calls(examined):
    assert "It changed its input x" in examined(rogues.mutates_after(7)).explain()


def test_a_variant_that_leaves_a_global_switch_changed(examined):
    verdict = examined(rogues.leaves(lambda: torch.set_default_dtype(torch.float64)))
    assert "the default dtype" in verdict.explain()
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("variant", HONEST)
def test_an_honest_variant_passes_on_a_gpu(variant):
    case = toy_case("float16", B=4, T=512, V=64)
    verdict = examine_once(Judge(), toy_sum, case, variant=variant, device="cuda", directions=BOTH)
    assert verdict.ok, verdict.explain()
