"""Tests of compilation ahead of a study without calls at its cases: by the kernels that variants list, and at smaller cases.

``toy_sum`` is the operation of ``toy.py``. ``study`` and ``calls`` are those of ``test_compiling.py``, and the fixture ``probed``
is that of ``test_ahead.py``, whose ``at_probe`` returns the call that judges a variant on a probe.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch.cuda.compiler import Source
from onelaunch.device.architectures import Architecture, pretended
from onelaunch.launch.build import CudaBuild
from onelaunch.operation import find_operation, operations
from onelaunch.workbench import probing
from onelaunch.workbench.measure import ahead, compiling
from onelaunch.workbench.measure.ahead import Made
from onelaunch.workbench.measure.checks import check_once
from onelaunch.workbench.measure.compiling import Called, CompileCall, call_once, calls_to_compile
from onelaunch.workbench.options import WHOLE
from onelaunch.workbench.probing import calls_at_probes, to_probe
from onelaunch.workbench.result import ProbeReport
from tests.workbench.runs import quick, run, steps
from tests.workbench.test_ahead import GPU, at_probe, cells_of, probed
from tests.workbench.test_compiling import BOTH, calls, study

__all__ = [
    "probed",
    "quick",
]  # fixtures: probes of ``toy_sum``; an automatic one with an empty working directory and short samples


def test_listed_kernels_are_compiled_without_a_call(monkeypatch):
    """The call that is measured would take memory of the GPU."""
    compiled = []
    here = Architecture("sm_87", "cuda", 87, 32, (), 0, 0)
    monkeypatch.setattr(compiling, "current_architecture", lambda *, by_triton: here)
    monkeypatch.setattr(compiling, "compile_source", lambda source, architecture: compiled.append((source.name, architecture)))
    monkeypatch.setattr(compiling, "make_inputs", lambda *_: pytest.fail("inputs were made"))
    parallel = find_operation("toy_sum").get("parallel")

    def kernels(case, device):
        return [CudaBuild("a kernel", Source(f"{case.sizes['T']}.cu", "", "step"), 32) for _ in range(case.sizes["T"] > 1)]

    monkeypatch.setattr(parallel, "_kernels_of_case", kernels)
    assert call_once(study(), CompileCall("first", "forward_backward", "parallel"), "cpu") == Called()
    assert compiled == [("24.cu", "sm_87")]
    monkeypatch.setattr(parallel, "_supports", [lambda query: "cannot run"])
    assert call_once(study(), CompileCall("first", "forward", "parallel"), "cpu") == Called()
    assert len(compiled) == 1, "kernels of a call that the variant cannot run"


def test_a_variant_that_lists_its_kernels_is_judged_on_probes_by_other_processes(probed, monkeypatch):
    """Probes are small, so that the GPU has memory for the calls of all processes."""
    parallel, declared = find_operation("toy_sum").get("parallel"), study()
    monkeypatch.setattr(parallel, "_kernels_of_case", lambda case, device: [])
    asked = list(calls_at_probes(to_probe(declared, cells_of(declared), WHOLE), {}, GPU))
    assert [call.probe for call in asked if call.variant == "parallel"] == [0, 1, 2]
    assert check_once(declared, at_probe("parallel", 1, BOTH), "cpu") == ProbeReport(passed=2, directions=BOTH)


def test_variants_with_a_large_probe_are_judged_by_the_process_that_measures_alone(probed, monkeypatch):
    declared = study(directions=("forward",), variants=("eager",))
    toy_sum = find_operation("toy_sum")
    largest = max(toy_sum.cost(probe.case, None, "forward").bytes for probe in toy_sum.listed_probes() if not probe.refused)
    asked = to_probe(declared, cells_of(declared), WHOLE)
    for most, count in ((largest, 3), (largest - 1, 0)):
        monkeypatch.setattr(probing, "LARGEST_CHECKED", most)
        assert len(list(calls_at_probes(asked, {}, GPU))) == count


def test_an_operation_whose_cost_fails_at_its_probes_is_judged_by_the_process_that_measures_alone(probed, monkeypatch):
    def cost(*_):
        raise ValueError("no cost at such sizes")

    declared = study(directions=("forward",), variants=("eager",))
    asked = to_probe(declared, cells_of(declared), WHOLE)
    monkeypatch.setattr(find_operation("toy_sum"), "cost", cost)
    assert list(calls_at_probes(asked, {}, GPU)) == []


def test_calls_at_all_probes_are_small():
    """Every process that judges on probes has a call and its reference on the GPU. docs/workbench.md states the limit."""
    ours = [each for each in operations() if each.__module__.startswith("onelaunch.")]
    assert "decode_step" in [each.name for each in ours]
    for operation in ours:
        for probe in operation.listed_probes():
            for direction in BOTH:
                assert operation.cost(probe.case, None, direction).bytes <= 16 << 20, f"{operation.name} at {probe}"


def test_listed_kernels_of_probes_are_compiled_on_threads(monkeypatch):
    pytest.importorskip("triton", reason="nothing is compiled without Triton")
    asked = []
    scan = find_operation("gated_scan")
    listed = CudaBuild("a kernel", Source("scan.cu", "", "scan"), 32)
    monkeypatch.setattr(scan.get("fused"), "_kernels_of_case", lambda case, device: [listed])
    monkeypatch.setattr(compiling, "compile_builds", lambda builds, target, threads: asked.extend(builds))
    assert compiling.compile_probes([(scan, "fused", BOTH)], torch.device(pretended("sm_90a"))) == 1
    assert asked == [listed]


def test_a_smaller_case_is_called_once_for_all_that_it_stands_for(monkeypatch):
    eager, made = find_operation("toy_sum").get("eager"), []
    before = compiling.make_inputs

    def make_inputs(operation, case, *more):
        made.append(dict(case.sizes))
        return before(operation, case, *more)

    monkeypatch.setattr(eager, "_smaller", lambda case: replace(case, sizes={**case.sizes, "B": 1}, name=""))
    monkeypatch.setattr(compiling, "make_inputs", make_inputs)
    asked = [call for call in calls(study()) if call.variant == "eager"]
    assert asked == [CompileCall("first", direction, "eager") for direction in BOTH]
    assert len([call for call in calls(study()) if call.variant == "parallel"]) == 4
    for call in asked:
        assert call_once(study(), call, "cpu") == Called()
    assert made == 2 * [{"B": 1, "T": 24, "V": 8}]
    monkeypatch.setattr(eager, "_kernels_of_case", lambda case, device: [])
    assert len([call for call in calls(study()) if call.variant == "eager"]) == 4, "the kernels of each case are listed"


def test_a_smaller_case_of_an_earlier_group_is_not_called_again(monkeypatch):
    monkeypatch.setattr(ahead, "FIRST_CASES", 1)
    monkeypatch.setattr(ahead, "GROWTH", 1)
    eager, asked = find_operation("toy_sum").get("eager"), []
    monkeypatch.setattr(eager, "_smaller", lambda case: replace(case, sizes={**case.sizes, "B": 1}, name=""))

    def compiled(declared, calls, *_):
        asked.append(sorted((call.shape, call.direction, call.variant) for call in calls))
        return Made([], {})

    run(study(variants=("eager", "parallel")), processes=2, steps=steps(compile=compiled))
    first, *others = [
        [(shape, direction, variant) for variant in ("eager", "parallel")] for shape in ("first", "second") for direction in BOTH
    ]
    assert asked == [first, others[0], *(group[1:] for group in others[1:])]


def test_what_was_compiled_before_counts_only_where_the_variant_was_called(monkeypatch):
    declared = study(variants=("eager",), directions=("forward",))
    monkeypatch.setattr(find_operation("toy_sum").get("eager"), "_smaller", lambda case: replace(case, name=""))
    first, second = cells_of(declared)
    assert calls_to_compile(declared, [second], 2, [first]) == ([], [])
    for before in (replace(first, status="unsupported"), replace(first, control=True)):
        assert calls_to_compile(declared, [second], 2, [before]) == ([], [CompileCall("second", "forward", "eager")])


def test_the_loops_of_a_study_are_made_for_a_smaller_case(monkeypatch):
    """A loop calls with other sizes than the call that is verified, such as a longer cache, which compile apart."""
    toy_sum, looped = find_operation("toy_sum"), []
    loops = {name: lambda variant, given, name=name: looped.append((name, given["x"].shape[0])) for name in ("running", "served")}
    monkeypatch.setattr(toy_sum, "loops", loops)
    declared = study(regimes=("cold", "running"))
    assert call_once(declared, CompileCall("first", "forward", "eager"), "cpu") == Called()
    assert not looped, "the variant names no smaller case, so that a loop might take long"
    monkeypatch.setattr(toy_sum.get("eager"), "_smaller", lambda case: replace(case, sizes={**case.sizes, "B": 1}, name=""))
    for direction in BOTH:
        assert call_once(declared, CompileCall("first", direction, "eager"), "cpu") == Called()
    assert looped == [("running", 1)]
