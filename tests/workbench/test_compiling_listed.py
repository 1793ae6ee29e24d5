"""Tests of compilation ahead of a study without calls at its cases: by the kernels that variants list, and at smaller cases.

``toy_sum`` is the operation of ``toy.py``. ``study``, ``calls`` and the fixture ``probed`` are those of ``test_compiling.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch.cuda.compiler import Source
from onelaunch.device.architectures import Architecture, pretended
from onelaunch.launch.build import CudaBuild
from onelaunch.operation import find_operation
from onelaunch.workbench.measure import compiling
from onelaunch.workbench.measure.compiling import CompileCall, ProbeCall, call_once
from tests.workbench.test_compiling import BOTH, calls, probed, study

__all__ = ["probed"]  # a fixture: probes of ``toy_sum``


def test_listed_kernels_are_compiled_without_a_call(probed, monkeypatch):
    """Neither the call that is measured nor one at a probe is made: it would take memory of the GPU, and its time."""
    compiled = []
    here = Architecture("sm_87", "cuda", 87, 32, (), 0, 0)
    monkeypatch.setattr(compiling, "current_architecture", lambda *, by_triton: here)
    monkeypatch.setattr(compiling, "compile_source", lambda source, architecture: compiled.append((source.name, architecture)))
    monkeypatch.setattr(compiling, "make_inputs", lambda *_: pytest.fail("inputs were made"))
    parallel = find_operation("toy_sum").get("parallel")

    def kernels(case, device):
        return [CudaBuild("a kernel", Source(f"{case.sizes['T']}.cu", "", "step"), 32) for _ in range(case.sizes["T"] > 1)]

    monkeypatch.setattr(parallel, "_kernels_of_case", kernels)
    assert call_once(study(), CompileCall("first", "forward_backward", "parallel"), "cpu") is None
    assert compiled == [("24.cu", "sm_87")]
    for probe in (0, 1):  # of one step, for which no kernel is listed, and of five
        assert call_once(study(), ProbeCall("first", "forward", "parallel", probe), "cpu") is None
    assert compiled[1:] == [("5.cu", "sm_87")]
    monkeypatch.setattr(parallel, "_supports", [lambda query: "cannot run"])
    assert call_once(study(), CompileCall("first", "forward", "parallel"), "cpu") is None
    assert len(compiled) == 2, "kernels of a call that the variant cannot run"


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
        assert call_once(study(), call, "cpu") is None
    assert made == 2 * [{"B": 1, "T": 24, "V": 8}]


def test_the_loops_of_a_study_are_made_for_a_smaller_case(monkeypatch):
    """A loop calls with other sizes than the call that is verified, such as a longer cache, which compile apart."""
    toy_sum, looped = find_operation("toy_sum"), []
    loops = {name: lambda variant, given, name=name: looped.append((name, given["x"].shape[0])) for name in ("running", "served")}
    monkeypatch.setattr(toy_sum, "loops", loops)
    declared = study(regimes=("cold", "running"))
    assert call_once(declared, CompileCall("first", "forward", "eager"), "cpu") is None
    assert not looped, "the variant names no smaller case, so that a loop might take long"
    monkeypatch.setattr(toy_sum.get("eager"), "_smaller", lambda case: replace(case, sizes={**case.sizes, "B": 1}, name=""))
    for direction in BOTH:
        assert call_once(declared, CompileCall("first", direction, "eager"), "cpu") is None
    assert looped == [("running", 1)]
