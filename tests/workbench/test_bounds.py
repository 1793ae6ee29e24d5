"""Tests of the bounds of single elements and parts along time, and of cases that trivial results pass.

``toy_sum`` is the operation of ``toy.py``, and ``toy_case`` returns a small case of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onelaunch.errors import ArgumentError
from onelaunch.operation import Operation, find_operation, operations
from onelaunch.workbench.result import Result
from onelaunch.workbench.verify import Judge
from onelaunch.workbench.verify.bounds import LARGEST, PART, bound_of
from onelaunch.workbench.verify.reference import compute_reference, pytorch_baseline
from onelaunch.workbench.verify.trivial import trivial_passes
from tests.workbench.toy import toy_case, toy_sum

COMMITTED = sorted((Path(__file__).parents[2] / "results").glob("*/*.json"))
CPU = torch.device("cpu")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_no_committed_verdict_changes(path):
    """A file holds the errors of PyTorch's form at the same case, so that its verdicts can be judged by the new bounds."""
    result = Result.load(path)
    baseline = pytorch_baseline(find_operation(result.study.operation))
    plain = {
        (cell.shape, cell.direction, component.name): component
        for cell in result.cells
        if cell.verdict is not None and not cell.control and baseline is not None and cell.variant == baseline.name
        for component in cell.verdict.components
    }
    for cell in result.cells:
        for component in cell.verdict.components if cell.verdict is not None and cell.verdict.ok and not cell.control else ():
            known = plain.get((cell.shape, cell.direction, component.name))
            if known is None:  # PyTorch's form did not run in this study, so that its file cannot tell
                continue
            assert component.max_error <= LARGEST * known.max_error, (cell.shape, cell.variant, component.name)
            for part, base in zip(component.error_by_position, known.error_by_position, strict=True):
                assert part <= PART * max(base, known.error), (cell.shape, cell.variant, component.name)


def test_committed_results_are_there():
    assert len(COMMITTED) >= 7


STATES = {"initial_state": True, "final_state": True, "log_decay_dtype": "float32"}
SMALL: dict[str, dict[str, Any]] = {
    "gla": {"B": 1, "T": 20, "H": 1, "K": 16, "V": 16, "value_gate": True, **STATES},
    "linear_rnn": {"B": 1, "T": 20, "D": 16, "V": 16, **STATES},
    "gla_layer": {"B": 1, "T": 20, "D": 32, "H": 1, "K": 16, "V": 16, "initial_state": True, "final_state": True},
}
"""A case with all float32 results of each operation that states errors."""


def references(name, dtype, direction="forward_backward", **options):
    """Return the reference of a small case of an operation, and the one without stated errors."""
    operation = find_operation(name)
    case = operation.case(dtype, **{**SMALL[name], **options})
    return [compute_reference(operation, case, CPU, 0, direction, None, stated) for stated in (None, {})]


def test_the_operations_that_state_errors_are_known():
    assert {operation.name for operation in operations() if operation.stated_errors} == SMALL.keys()


@pytest.mark.parametrize(("dtype", "number"), [("bfloat16", 3e-3), ("float16", 5e-4)])
@pytest.mark.parametrize("name", SMALL)
def test_a_float32_result_of_16_bit_inputs_may_have_the_stated_error_or_twice_that_of_pytorch(name, dtype, number):
    judged, strict = references(name, dtype)
    stated = find_operation(name).stated_errors
    assert stated.keys() <= judged.allowed.keys(), "a stated name must be that of a result"
    for result, allowed in judged.allowed.items():
        alone = strict.allowed[result]
        assert allowed == (max(number, alone) if result in stated else alone), result
        bound, usual = judged.bounds[result], strict.bounds[result]
        if result not in stated:
            assert bound == usual, result
            continue
        root = float(judged.expected[result].square().mean().sqrt())
        assert bound.largest == pytest.approx(max(usual.largest, LARGEST * number * root)), result
        assert bound.parts == tuple(max(part, PART * number) for part in usual.parts), result


def test_gla_in_16_bits_rests_on_the_stated_errors_and_in_float32_on_pytorch():
    judged, strict = references("gla", "bfloat16")
    assert judged.allowed["final_state"] == 3e-3 > 1000 * strict.allowed["final_state"]
    assert judged.allowed["o"] == strict.allowed["o"]
    for reference in references("gla", "float32"):
        assert reference.allowed["final_state"] < 1e-6
    judged, strict = references("gla", "bfloat16", log_decay_dtype=None)
    assert judged.allowed["grad g"] == strict.allowed["grad g"], "it has 16 bits here"


def scaled_noise(expected, size):
    """Return float32 values that are off by a norm-wise error of a given size."""
    noise = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return (expected + noise * (size * expected.norm() / noise.norm())).float()


def test_a_result_within_the_stated_error_passes_and_one_beyond_it_fails():
    judged, _ = references("gla", "bfloat16", "forward")
    expected = judged.expected["final_state"]
    only = judged.only("final_state")
    assert only.compare({"final_state": scaled_noise(expected, 2.9e-3)})[1] == ()
    (problem,) = only.compare({"final_state": scaled_noise(expected, 3.1e-3)})[1]
    assert "final_state is off by" in problem
    assert "3.00e-03 is allowed" in problem
    wrong = expected.float()
    wrong[0, 0, 3, 3] += 9 * 3e-3 * float(expected.square().mean().sqrt())  # norm-wise 1.7e-3
    (problem,) = only.compare({"final_state": wrong})[1]
    assert "an element that is off by" in problem
    assert "the stated error 0.003 times the root mean square" in problem


def test_a_part_along_time_may_have_four_times_the_stated_error():
    judged, _ = references("gla", "bfloat16", T=160, K=32, decay="strong")
    expected, only = judged.expected["grad g"], judged.only("grad g")
    norms = [float(part.norm()) for part in expected.tensor_split(8, 1)]
    least = norms.index(min(norms))
    assert norms[least] < expected.norm() / 5, "so that an error of this part alone is small for the whole"
    for size, right in ((3.5, True), (4.5, False)):
        given = expected.clone()
        part = given.tensor_split(8, 1)[least]
        part.copy_(scaled_noise(part, size * 3e-3))
        problems = only.compare({"grad g": given.float()})[1]
        assert (problems == ()) is right, problems
        assert right or f"in part {least + 1} of 8 along time" in problems[0]
        assert right or "or, if larger, the stated error 0.003" in problems[0]


@pytest.mark.parametrize(
    "stated", [{"final_state": 1e-3}, {1: {}}, {"final_state": {torch.float32: 1e-3}}, {"y": {torch.float16: 0}}, "y"]
)
def test_stated_errors_must_be_numbers_by_name_and_dtype(stated):
    facts = {"dimensions": ("T",), "outputs": ("y",), "bind": lambda: None, "options": {}, "defaults": {}}
    with pytest.raises(ArgumentError, match="stated_errors of odd_operation is"):
        Operation(odd_operation, **facts, stated_errors=stated)


def odd_operation() -> None:
    """Stand for a public function."""


def test_a_baseline_that_rounds_nothing_leaves_slack():
    exact = torch.randn(4, 16, 8, dtype=torch.float64).float().double()
    bound = bound_of(exact.float(), exact, 16)
    assert 0 < bound.largest < 1e-4
    assert all(0 < part < 1e-5 for part in bound.parts)
    assert len(bound.parts) == 8


def test_an_element_that_is_not_finite_exceeds_every_bound():
    reference = Judge().reference(toy_sum, toy_case())
    wrong = reference.expected["y"].clone().float()
    wrong[0, 0, 0] = float("nan")
    (_, problems) = reference.compare({**reference.expected, "y": wrong})
    assert any("y is not finite everywhere" in problem for problem in problems)


@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_a_case_that_zeros_pass_tells_nothing(direction):
    told = trivial_passes(Judge().reference(toy_sum, toy_case(weight="zero"), direction=direction))
    assert "This case tells nothing about y: zeros and the correct values shifted by one step would pass." in told
    assert trivial_passes(Judge().reference(toy_sum, toy_case(), direction=direction)) == ()


def test_a_case_that_an_input_passes_tells_nothing():
    reference = Judge().reference(toy_sum, toy_case())
    reference.expected["y"].copy_(reference.inputs.arguments["x"])
    assert trivial_passes(reference) == ("This case tells nothing about y: the input x would pass.",)


def test_a_sequence_of_equal_steps_is_passed_by_shifted_values():
    reference = Judge().reference(toy_sum, toy_case())
    reference.expected["y"].copy_(reference.expected["y"][:, :1].expand_as(reference.expected["y"]).clone())
    assert any("y: the correct values shifted by one step" in said for said in trivial_passes(reference))
