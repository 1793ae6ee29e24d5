"""Tests of the bounds of single elements and parts along time, and of cases that trivial results pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onelaunch.operation import find_operation
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
    assert len(COMMITTED) == 7


def test_a_number_that_an_operation_states_replaces_a_smaller_error_of_pytorch():
    case = toy_case("float16", T=64)
    usual = compute_reference(toy_sum, case, CPU, 0, "forward", None)
    stated = compute_reference(toy_sum, case, CPU, 0, "forward", None, {"final_state": 1e-2, "y": 1e-9})
    assert stated.bounds["y"] == usual.bounds["y"], "it is smaller than the error of PyTorch"
    assert stated.bounds["final_state"].largest > 100 * usual.bounds["final_state"].largest
    assert stated.allowed == usual.allowed


def test_a_baseline_that_rounds_nothing_leaves_slack():
    exact = torch.randn(4, 16, 8, dtype=torch.float64).float().double()
    bound = bound_of("y", exact.float(), exact, 16)
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
