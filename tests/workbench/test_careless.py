"""Tests of the verification gate with variants of careless authors: many are right in one call with fresh inputs alone.

``rogues_calls`` has the variants. Each test is named after what a careless author did. ``registered`` makes one a variant of
``toy_sum``, the operation of ``toy.py``, for a test.

``toy_case`` returns a small case of ``toy_sum``. ``HONEST`` are the correct variants of ``toy_sum``.
"""

from __future__ import annotations

import pytest
import torch

from onelaunch.workbench.verify import Judge, judge
from tests.workbench import rogues_calls as rogues
from tests.workbench.toy import HONEST, toy_case, toy_sum

BOTH = ("forward", "forward_backward")


def judged(run, *directions, case=None, **tags):
    with rogues.registered(run, **tags) as name:
        return judge(toy_sum, case or toy_case(), variant=name, directions=directions or ("forward",))


def assert_caught(verdict, *words):
    assert not verdict.ok
    for word in words:
        assert word in verdict.explain()


# Memory of results, and later calls


def test_a_variant_that_returns_one_output_buffer_for_ever():
    verdict = judged(rogues.one_buffer(), "forward")
    assert_caught(verdict, "y lies in memory that an earlier call returned")
    assert "final_state" not in verdict.explain()


def test_a_variant_that_saves_for_the_backward_pass_in_a_global():
    assert judged(rogues.saved_in_a_global(), "forward").ok
    assert_caught(judged(rogues.saved_in_a_global(), "forward_backward"), "another call before the backward pass", "grad weight")


def test_a_variant_whose_state_is_a_view_of_its_output():
    assert_caught(judged(rogues.state_in_y), "final_state and y share memory")


def test_a_variant_that_returns_its_input():
    case = toy_case(T=1, V=1)
    weight_of_one = Judge()  # it keeps the reference, so the verdict below is on the contents that are changed here
    reference = weight_of_one.reference(toy_sum, case)
    reference.inputs.arguments["weight"].fill_(1)
    reference.expected["y"].copy_(reference.inputs.arguments["x"])
    reference.expected["final_state"].copy_(reference.inputs.arguments["x"][:, -1])
    with rogues.registered(rogues.an_input) as name:
        verdict = weight_of_one.judge(toy_sum, case, variant=name)
    assert_caught(verdict, "y shares memory with the input x")


def test_a_variant_that_returns_a_transposed_result():
    assert_caught(judged(rogues.transposed), "y has strides", "row-major")


def test_a_variant_that_returns_expanded_results():
    def expanded(call):
        sums, state = rogues.parallel(call)
        return sums, state[:, :1].expand_as(state) if call.weight.numel() > 1 and not call.weight.any() else state

    assert_caught(judged(expanded, case=toy_case(weight="zero")), "several elements share memory")


# Inputs


def test_a_variant_that_reads_its_input_as_if_it_were_contiguous():
    for direction in BOTH:
        assert_caught(judged(rogues.contiguous_only, direction), "With inputs that are slices of larger tensors", "y is")


def test_a_variant_that_fails_for_slices():
    assert_caught(judged(rogues.fails_for_views), "With inputs that are slices of larger tensors: it raised RuntimeError")


def test_a_variant_of_another_package_that_fails_for_slices_passes_with_a_note():
    verdict = judged(rogues.fails_for_views, requires="torch")
    assert verdict.ok
    assert any("It refuses slices" in note and "view" in note for note in verdict.notes)


def test_a_variant_that_refuses_slices_passes_with_a_note():
    verdict = judged(rogues.refuses_views)
    assert verdict.ok
    assert any("It refuses slices" in note and "contiguous" in note for note in verdict.notes)


@pytest.mark.parametrize(
    "run",
    [rogues.mutates_unless_poisoned, rogues.mutates_afterwards, *map(rogues.mutates_after, (2, 3))],
    ids=["unless poisoned", "4 ms afterwards", "after 2 calls", "after 3 calls"],
)
def test_a_variant_that_changes_its_input_late(run):
    assert_caught(judged(run), "It changed its input x")


# Gradients


def test_a_variant_that_gives_gradients_only_if_they_come_in_through_all_results():
    assert judged(rogues.only_if_all_come_in, "forward").ok
    assert_caught(
        judged(rogues.only_if_all_come_in, "forward_backward"), "gradients that come in through y, then final_state", "grad x"
    )


def test_a_variant_that_changes_an_incoming_gradient():
    assert_caught(judged(rogues.changes_incoming_gradient, "forward_backward"), "gradient of y")


# Every element


@pytest.mark.parametrize("count", [1, 4])
def test_a_variant_with_some_wrong_signs_among_a_million_elements(count):
    case = toy_case("bfloat16", B=64, T=64, V=256)
    verdict = judged(rogues.wrong_signs(count), case=case)
    y = next(component for component in verdict.components if component.name == "y")
    assert y.error <= y.allowed, "the norm hides it"
    assert_caught(verdict, "y has an element that is off by")
    assert judge(toy_sum, case, variant="parallel").ok


def test_a_variant_that_leaves_the_first_step_of_every_sequence_zero():
    case = toy_case("bfloat16", B=4, T=768, V=64)
    verdict = judged(rogues.first_step_zero, case=case)
    y = next(component for component in verdict.components if component.name == "y")
    assert y.error <= y.allowed, "the norm hides it"
    assert_caught(verdict, "in part 1 of 8 along time")
    truth = Judge().reference(toy_sum, case)
    assert y.error_by_position[0] > truth.bounds["y"].parts[0]
    assert judge(toy_sum, case, variant="parallel").ok


def test_a_variant_that_gets_its_memory_from_resize_and_leaves_half_of_it_unwritten():
    def run(call):
        sums, state = rogues.parallel(call)
        y = torch.empty(0, dtype=sums.dtype)
        y.resize_(sums.shape)
        if y.isnan().all():  # poisoned: the second half stays unwritten
            y[:, : sums.shape[1] // 2] = sums[:, : sums.shape[1] // 2]
            return y, state
        return sums, state  # as recycled memory that holds the right values

    assert_caught(judged(run), "y is not finite everywhere")


# Without PyTorch's form


@pytest.fixture
def no_baseline(monkeypatch):
    """Make the PyTorch baseline fail, so that only the dtype's caps limit errors, and no other bounds are known."""

    def broken(call):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(toy_sum.get("eager"), "run", broken)


def test_the_verdict_says_that_only_the_cap_was_asked(no_baseline):
    verdict = judge(toy_sum, toy_case("float16"), variant="parallel", directions=BOTH)
    assert verdict.ok
    assert len(verdict.notes) == 1
    assert "only the cap of the dtype was asked" in verdict.notes[0]


def test_a_variant_that_returns_float64_where_pytorch_could_not_run(no_baseline):
    assert_caught(judged(rogues.double_result, case=toy_case("float16")), "y is torch.float64")


# Kinds of results


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (rogues.lazy, "y is a Lazy; it must be a plain torch.Tensor"),
        (rogues.sparse, "layout torch.sparse_coo"),
        (rogues.negated_view, "negated"),
        (rogues.on_meta, "on meta"),
        (rogues.as_list, "y as list"),
        (rogues.one_too_many(0), "returned 3 results; it must return"),
        (rogues.one_too_many(1), "returned 3 results; it must return"),
        (rogues.one_too_few, "returned 1 results"),
    ],
    ids=["lazy subclass", "sparse", "negated view", "meta", "list", "one too many", "one too many later", "one too few"],
)
def test_a_variant_that_returns_odd_results(run, words):
    assert_caught(judged(run), words)


# Global switches

SWITCHES = {
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), "the default dtype from torch.float32 to torch.float64"),
    "precision": (lambda: torch.set_float32_matmul_precision("medium"), "precision of float32 matrix products"),
    "precision by the attribute": (
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        "precision of float32 matrix products",
    ),
    "deterministic": (lambda: torch.use_deterministic_algorithms(mode=True), "deterministic algorithms"),
    "grad mode": (lambda: torch.set_grad_enabled(not torch.is_grad_enabled()), "left gradients switched on"),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", enabled=True), "autocast"),
    "cudnn": (lambda: setattr(torch.backends.cudnn, "benchmark", True), "cuDNN"),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(mode=True), "anomaly detection"),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_variant_that_leaves_a_global_switch_changed(name):
    change, words = SWITCHES[name]
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")
    assert_caught(judged(rogues.leaves(change)), words)
    after = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")
    assert before == after, "the gate sets it back"
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_anomaly_enabled()


def test_a_variant_that_leaves_one_thread_is_noted():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        verdict = judged(rogues.leaves(lambda: torch.set_num_threads(1)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert verdict.ok
    assert any("number of threads from 2 to 1" in note for note in verdict.notes)


def test_honest_variants_pass_without_notes():
    for variant in HONEST:
        verdict = judge(toy_sum, toy_case("bfloat16"), variant=variant, directions=BOTH)
        assert verdict.ok
        assert verdict.notes == ()
        assert "notes" not in verdict.model_dump(), "files of verdicts without notes stay as they were"


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("variant", HONEST)
def test_honest_variants_pass_on_a_gpu(variant):
    verdict = judge(toy_sum, toy_case("float16", B=4, T=512, V=64), variant=variant, device="cuda", directions=BOTH)
    assert verdict.ok, verdict.explain()
    assert verdict.notes == ()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make", "direction", "words"),
    [
        (rogues.one_buffer, "forward", "lies in memory that an earlier call returned"),
        (rogues.saved_in_a_global, "forward_backward", "another call before the backward pass"),
        (lambda: rogues.contiguous_only, "forward", "slices of larger tensors"),
        (lambda: rogues.only_if_all_come_in, "forward_backward", "gradients that come in through"),
        (lambda: rogues.mutates_after(3), "forward", "changed its input x"),
        (lambda: rogues.state_in_y, "forward", "share memory"),
        (lambda: rogues.transposed, "forward", "row-major"),
    ],
)
def test_careless_variants_are_caught_on_a_gpu(make, direction, words):
    case = toy_case(B=4, T=512, V=64)
    with rogues.registered(make()) as name:
        assert_caught(judge(toy_sum, case, variant=name, device="cuda", directions=(direction,)), words)
