"""Tests that kernels are compiled ahead into the caches in which launches find them. No GPU is needed: only code is compiled.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import textwrap

import pytest
import torch

from onelaunch import cuda, folders
from onelaunch.device.architectures import find_architecture
from onelaunch.launch import ahead, build
from onelaunch.launch.build import CudaBuild, build_of
from onelaunch.operation import Example, find_operation
from onelaunch.operation.examples import builds_for_case, builds_of_examples, recorded_launches, variants_for

triton = pytest.importorskip("triton")

STEP = find_operation("gla").case("bfloat16", B=1, T=1, H=2, K=64, V=64)
"""Call whose kernel ``step`` of the variant ``stepwise`` compiles in a second."""


@pytest.fixture(autouse=True)
def empty_caches(tmp_path, monkeypatch):
    """Give every test empty cache folders. Processes that a test starts inherit them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv(folders.CACHE, str(tmp_path / "onelaunch"))
    cuda.compile_source.cache_clear()
    yield
    cuda.compile_source.cache_clear()


def step_builds():
    """Return the build of the step kernel, in a list."""
    return [each for each in builds_for_case(STEP, "sm_90a", ("forward",), ("stepwise",)) if each.name == "stepwise: step"]


def source(body="", entry="add"):
    """Return a kernel in CUDA C++."""
    return cuda.Source("add.cu", f'extern "C" __global__ void {entry}(float* x) {{ x[threadIdx.x] += 1.0f; {body} }}', entry)


def test_a_kernel_of_triton_is_compiled_once():
    (one,) = step_builds()
    first, second = (ahead.compile_into_cache(one, "sm_90a") for _ in range(2))
    assert (first.cached, first.problem) == (False, None)
    assert (second.cached, second.problem) == (True, None)


class Driver:
    """Driver of Triton for a machine without a GPU: it names a target and never launches."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        del device
        return 0


def test_a_launch_finds_the_kernel_that_was_compiled_ahead(monkeypatch):
    """The launch runs Triton's own code up to the compiled kernel; only the driver is replaced."""
    variant = find_operation("gla").get("stepwise")
    (one,) = step_builds()
    assert not ahead.compile_into_cache(one, "sm_90a").cached
    launches = recorded_launches(variant, Example(STEP), "sm_90a")
    (launch,) = [each for each in launches if each.kernel is one.kernel]
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    arguments = [build._stand_in(each) for each in launch.arguments]
    with ahead._cache_hits() as hits:
        launch.kernel.run(*arguments, grid=launch.grid, warmup=True, **launch.constants)
    assert hits == [True]
    with ahead._cache_hits() as hits:  # another specialization is not in the cache
        launch.kernel.run(*arguments, grid=launch.grid, warmup=True, **(launch.constants | {"num_warps": 8}))
    assert hits == [False]


def test_a_kernel_in_cuda_is_compiled_once_and_kept_in_our_folder(tmp_path):
    pytest.importorskip("cuda.bindings")
    one = CudaBuild("add", source(), threads=32)
    assert not ahead.compile_into_cache(one, "sm_90a").cached
    cuda.compile_source.cache_clear()
    assert ahead.compile_into_cache(one, "sm_90a").cached
    assert list((tmp_path / "onelaunch" / "cubins").glob("add-sm_90a-*.cubin"))


def test_a_kernel_that_does_not_compile_has_the_compilers_message():
    pytest.importorskip("cuda.bindings")
    done = ahead.compile_into_cache(CudaBuild("add", source("nonsense;"), threads=32), "sm_90a")
    assert not done.cached
    assert "nonsense" in done.problem


def test_cuda_for_an_amd_gpu_is_refused():
    done = ahead.compile_into_cache(CudaBuild("add", source(), threads=32), "gfx942")
    assert "cannot be compiled for gfx942" in done.problem


@pytest.mark.thorough
def test_several_processes_fill_the_same_caches():
    pytest.importorskip("cuda.bindings")
    (step,) = step_builds()
    add, broken = CudaBuild("add", source(), threads=32), CudaBuild("broken", source("nonsense;"), threads=32)
    reported = []
    done = ahead.compile_all([step, add, broken, step], "sm_90a", 2, lambda *progress: reported.append(progress[1:]))
    assert [each.build for each in done] == [step, add, broken]
    assert [each.cached for each in done] == [False] * 3
    assert [each.problem is None for each in done] == [True, True, False]
    assert reported == [(1, 3), (2, 3), (3, 3)]
    again = ahead.compile_all([step, add], "sm_90a", 1, lambda *progress: None)
    assert [each.cached for each in again] == [True, True]


def test_builds_of_a_case_are_those_that_a_call_launches():
    """The variants are those that ``auto`` may choose, or those that are named; a call at T=1 launches the step kernel."""
    query = find_operation("gla").query(STEP, "cuda:0")
    assert all(variant.capabilities.automatic for variant in variants_for(query))
    named = builds_for_case(STEP, "sm_90a", ("forward",), ("stepwise",))
    launched = recorded_launches(find_operation("gla").get("stepwise"), Example(STEP), "sm_90a")
    architecture = find_architecture("sm_90a")
    assert {each.key for each in named} == {build_of(each, architecture, "").key for each in launched}
    assert {each.key for each in named} < {each.key for each in builds_for_case(STEP, "sm_90a", ("forward", "forward_backward"))}


def test_builds_of_examples_leave_out_what_auto_never_chooses():
    gla = find_operation("gla")
    assert gla.get("pipelined").capabilities.by_name_only
    names = {each.name.partition(":")[0] for each in builds_of_examples(gla, "sm_90a")}
    assert "pipelined" not in names
    assert {each.name.partition(":")[0] for each in builds_of_examples(gla, "sm_90a", ("pipelined",))} == {"pipelined"}
    assert "hopper" in names


def test_a_packed_build_is_whole_again_in_another_process():
    (step,) = step_builds()
    packed, module, name = ahead._packed(step)
    assert packed.kernel is None
    assert (module, name) == ("onelaunch.ops.gla.kernels.step", "step_kernel")
    assert torch.bfloat16 not in packed.constants.values()
    done = ahead._compile_packed(packed, module, name, "sm_90a")
    assert done.problem is None
    assert textwrap.dedent(done.build.name) == step.name
