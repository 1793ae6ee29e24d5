"""Tests of single calls that compile ahead of a study's measurements: which they are, what each does, and how it may fail.

``toy_sum`` is the operation of ``toy.py``; its variant ``raises`` always fails. ``SLOW_LIGHT`` are made-up peaks of a device.
``study`` and ``calls`` also serve ``test_ahead.py``, which tests the processes that make the calls.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace

import pytest
import torch

from onelaunch.device.architectures import ARCHITECTURES, Architecture, pretended
from onelaunch.operation import find_operation
from onelaunch.operation.examples import builds_for_case
from onelaunch.workbench.measure import compiling
from onelaunch.workbench.measure.compiling import Called, CompileCall, call_once, calls_to_compile, part_of_tuning
from onelaunch.workbench.study import Shape, Study
from onelaunch.workbench.study.plan import plan_study
from tests.workbench import toy
from tests.workbench.runs import SLOW_LIGHT

BOTH = ("forward", "forward_backward")


def study(operation: str = "toy_sum", **more):
    """Return a study at two shapes in both directions. Only ``output_chain`` is known to other processes."""
    sizes = {"toy_sum": {"B": 2, "T": 24, "V": 8}, "output_chain": {"B": 1, "T": 4, "H": 2, "V": 16, "D": 8}}[operation]
    facts = {
        "name": "toy-study",
        "question": "Is it compiled?",
        "operation": operation,
        "baseline": "eager" if operation == "toy_sum" else "unfused",
        "variants": ("eager", "parallel", "raises") if operation == "toy_sum" else ("unfused",),
        "shapes": tuple(Shape(name=name, dtype="float32", scale="small", sizes=sizes) for name in ("first", "second")),
        "directions": ("forward", "forward_backward"),
        "rounds": 3,
    }
    return Study(**(facts | more))


def calls(declared, processes=3):
    """Return the calls of a study that would be made ahead by so many processes."""
    long, others = calls_to_compile(declared, plan_study(declared, SLOW_LIGHT, "cpu", "small").cells, processes)
    return [*long, *others]


def test_every_runnable_call_is_compiled():
    made = calls(study())
    assert {(call.shape, call.direction) for call in made if call.variant == "eager"} == {
        (shape, direction) for shape in ("first", "second") for direction in ("forward", "forward_backward")
    }


def test_the_kernels_of_all_probes_are_compiled_before_the_first_is_judged(monkeypatch):
    pytest.importorskip("triton", reason="nothing is compiled without Triton")
    compiled = {}
    monkeypatch.setattr(compiling, "compile_builds", lambda builds, target, threads: compiled.setdefault(target.name, builds))
    scan = find_operation("gated_scan")
    gpu = torch.device(pretended("sm_90a"))
    count = compiling.compile_probes([(scan, "fused", BOTH), (scan, "eager", BOTH)], gpu)
    wanted = {
        build.key
        for probe in scan.listed_probes()
        if not probe.refused
        for build in builds_for_case(probe.case, "sm_90a", BOTH, ["fused"])
    }
    assert {build.key for build in compiled["sm_90a"]} == wanted
    assert count == len(wanted) > 10
    assert compiling.compile_probes([(scan, "fused", BOTH)], torch.device("cpu")) == 0
    assert list(compiled) == ["sm_90a"]


@pytest.mark.parametrize(("found", "compiled"), [("sm_80", ["sm_80"]), ("sm_87", [])])
def test_probes_are_compiled_for_the_architecture_of_a_real_gpu(found, compiled, monkeypatch):
    """A pretended device has its architecture in its index, a real one must be asked."""
    pytest.importorskip("triton", reason="nothing is compiled without Triton")
    asked = []
    here = ARCHITECTURES.get(found) or Architecture(found, "cuda", 87, 32, (), 0, 0)
    monkeypatch.setattr(compiling, "current_architecture", lambda *, by_triton: here)
    monkeypatch.setattr(compiling, "compile_builds", lambda builds, target, threads: asked.append(target.name))
    count = compiling.compile_probes([(find_operation("gated_scan"), "fused", ("forward",))], torch.device("cuda:0"))
    assert asked == compiled
    assert (count > 0) is bool(compiled)


def test_a_tuning_begins_with_its_first_part_before_all_other_calls(monkeypatch):
    """A variant with the capability ``tunes`` runs Triton's autotuner, whose configurations may be divided among processes."""
    parallel = find_operation("toy_sum").get("parallel")
    monkeypatch.setattr(parallel, "capabilities", replace(parallel.capabilities, tunes=True))
    made = calls(study(), 4)
    tuned = [CompileCall(shape, direction, "parallel", 0, 4) for direction in BOTH for shape in ("first", "second")]
    assert sorted(made[:4]) == sorted(tuned)
    assert {call.parts for call in made[4:]} == {1}  # one call makes all of it
    assert {call.variant for call in made[4:]} == {"eager", "raises"}
    assert calls(study(), 1)[0].variant == "eager"
    assert find_operation("gla").get("fla").capabilities.tunes
    assert find_operation("gla_layer").get("fla").capabilities.tunes


def test_a_share_of_tuning_tries_only_its_own_configurations():
    triton = pytest.importorskip("triton")
    from triton.runtime.autotuner import Autotuner

    configs = [triton.Config({}, num_warps=2**i) for i in range(5)]
    tuner = object.__new__(Autotuner)  # without a kernel: only the choice among configurations is tested
    tuner.configs, tuner.early_config_prune, tuner.perf_model = configs, None, None
    before, tried = Autotuner.run, []
    for part in range(3):
        with part_of_tuning(part, 3):
            tried += tuner.prune_configs({})
    assert sorted(config.num_warps for config in tried) == [1, 2, 4, 8, 16]
    with part_of_tuning(7, 9):  # there are five configurations, so the eighth of nine parts is empty
        assert tuner.prune_configs({}) == configs[:1], "at least one configuration must run"
        tuner.cache, tuner.arg_names = {"key": "from a part before"}, ()
        with pytest.raises(AttributeError):
            tuner.run()  # it has no kernel
        assert tuner.cache == {}
        tuner.cache["key"] = "of this part"
        with pytest.raises(AttributeError):
            tuner.run()
        assert tuner.cache, "the choice stays cached within this share of the tuning"
    assert tuner.prune_configs({}) == configs
    assert Autotuner.run is before


def test_a_share_of_tuning_compiles_its_configurations_and_times_none(monkeypatch):
    triton = pytest.importorskip("triton", reason="it compiles a part of what the autotuner of Triton tries")
    from triton.runtime.autotuner import Autotuner, OutOfResources

    ran = []

    class Kernel:
        """Stand-in for a Triton kernel that cannot be compiled with one warp, nor launched with 16."""

        def run(self, *args, grid, warmup, num_warps, **kwargs):
            if num_warps == 1:
                raise ValueError("cannot be compiled")
            ran.append((num_warps, "compiled" if warmup else "launched"))
            if num_warps == 16 and not warmup:
                raise OutOfResources(300_000, 230_000, "shared memory")
            return "a kernel"

    tuner = object.__new__(Autotuner)
    tuner.fn, tuner.cache, tuner.arg_names, tuner.keys, tuner.cache_results = Kernel(), {}, (), (), True
    tuner.configs, tuner.early_config_prune, tuner.perf_model = (
        [triton.Config({}, num_warps=n) for n in (1, 16, 2, 4)],
        None,
        None,
    )
    tuner.pre_hook = lambda *_, **__: None
    stored = {}

    def check_disk_cache(self, key, configs, bench):
        """Stand-in for the look-up on disk, by the number of configurations; it stores what ``bench`` finds, as Triton does."""
        if len(configs) in stored:
            self.cache[key] = stored[len(configs)]
            return True
        bench()
        stored[len(configs)] = self.cache[key]
        return False

    monkeypatch.setattr(Autotuner, "check_disk_cache", check_disk_cache)
    with part_of_tuning(0, 2) as counts:  # with one and with two warps
        assert tuner.run(grid=(1,), warmup=False) == "a kernel"
    assert counts == {4}
    assert ran == [(2, "compiled"), (2, "launched")]
    ran.clear()
    with part_of_tuning(1, 2):  # with 16 and with four
        assert tuner.run(grid=(1,), warmup=False) is None
    assert ran == [(16, "compiled"), (4, "compiled"), (16, "launched")]
    assert not stored, "a choice that no time has made"
    ran.clear()
    stored[4] = tuner.configs[3]  # an earlier run has tuned all four
    for part in range(2):
        with part_of_tuning(part, 2) as counts:
            tuner.run(grid=(1,), warmup=False)
        assert not counts, "nothing is left to other parts"
    assert ran == [(4, "launched")], "one process compiles the choice"


def test_a_share_without_a_valid_configuration_is_not_reported():
    """The call is part 1 of 2, and fails. The other part may hold configurations that can be launched."""
    assert call_once(study(), CompileCall("first", "forward", "raises", 1, 2), "cpu").problem is None


@pytest.mark.parametrize(
    ("variant", "part_counts", "parts"),
    [("eager", (), 1), ("eager", (3, 2), 3), ("eager", (50,), 4), ("raises", (), 4), ("raises", (2,), 4)],
)
def test_a_tuning_falls_into_as_many_parts_as_its_largest_number_of_configurations(variant, part_counts, parts, monkeypatch):
    """A call that failed may have got no further than its part of the configurations, so all parts are compiled."""

    @contextlib.contextmanager
    def part_of_tuning(part, parts):
        yield set(part_counts)

    monkeypatch.setattr(compiling, "part_of_tuning", part_of_tuning)
    assert call_once(study(), CompileCall("first", "forward", variant, 0, 4), "cpu") == Called(parts=parts)


@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_a_call_is_made_as_it_is_measured(direction, monkeypatch):
    seen = []

    class Counted:
        """Stand-in for :class:`Candidate` that records its calls."""

        @staticmethod
        def variant(operation, name):
            return Counted()

        def forward(self, inputs):
            seen.append(("forward", bool(inputs.differentiable)))
            return {"y": inputs.arguments["x"] * 1.0}

        def backward(self, outputs, inputs):
            seen.append(("backward", sorted(inputs.output_gradients)))

    monkeypatch.setattr(compiling, "Candidate", Counted)
    assert call_once(study(), CompileCall("second", direction, "parallel"), "cpu") == Called()
    forward, both = [("forward", False)], [("forward", True), ("backward", ["y"])]
    assert seen == (both if direction == "forward_backward" else forward)


def test_an_exception_of_a_call_is_reported_and_not_raised():
    assert "raises" in toy.toy_sum.variants  # the import of toy registers it
    assert call_once(study(), CompileCall("first", "forward", "raises"), "cpu") == Called("RuntimeError: the kernel fell over")


@pytest.mark.parametrize("variant", ["eager", "raises"])
def test_a_call_leaves_no_tensors_behind(variant, monkeypatch):
    """This includes a call that failed, whose exception held tensors."""
    left = []

    def make_and_note(*arguments):
        inputs = make_inputs(*arguments)
        left.extend(weakref.ref(value) for value in inputs.arguments.values() if isinstance(value, torch.Tensor))
        return inputs

    make_inputs = compiling.make_inputs
    monkeypatch.setattr(compiling, "make_inputs", make_and_note)
    problem = call_once(study(), CompileCall("first", "forward_backward", variant), "cpu").problem
    assert bool(problem) == (variant == "raises")
    assert left
    assert all(reference() is None for reference in left)


@pytest.fixture
def gpu_3(monkeypatch):
    """Pretend that there is a GPU 3, and return a list of what happens: the calls, and when the GPU is the current one."""
    done = []

    @contextlib.contextmanager
    def current(device):
        done.append(f"{device} is current")
        yield
        done.append("no more")

    monkeypatch.setattr(compiling.hardware, "current", current)
    monkeypatch.setattr(compiling, "_make", lambda *_: done.append("made"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    return done


@pytest.mark.parametrize("fails", [False, True])
def test_a_gpu_is_current_during_each_call_and_gets_its_memory_back(fails, gpu_3, monkeypatch):
    def make(*_):
        gpu_3.append("made")
        if fails:
            raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(compiling, "_make", make)
    problem = call_once(study(), CompileCall("first", "forward", "eager"), "cuda:3").problem
    assert problem == ("OutOfMemoryError: no more" if fails else None)
    assert gpu_3 == ["cuda:3 is current", "made", "no more", "emptied"]


@pytest.mark.parametrize("call", [CompileCall("first", "forward", "eager"), CompileCall("first", "forward", "eager", 1, 2)])
def test_an_error_by_which_a_gpu_ends_is_reported_and_not_raised(call, gpu_3, monkeypatch):
    """After an illegal access every later call of CUDA fails in the process, also the one that frees memory."""

    def empty_cache():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    problem = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert call_once(study(), call, "cuda:3").problem == (problem if call.parts == 1 else None)
    assert "made" in gpu_3


@pytest.mark.parametrize("fails", ["before", "behind"])
def test_a_gpu_that_cannot_be_made_current_is_reported(fails, gpu_3, monkeypatch):
    """As in the next call of a process whose GPU has ended, or at the end of the call by which it ended."""

    @contextlib.contextmanager
    def current(_):
        if fails == "before":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        yield
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def make(*_):
        raise ValueError("what failed first")

    monkeypatch.setattr(compiling.hardware, "current", current)
    monkeypatch.setattr(compiling, "_make", make)
    problem = call_once(study(), CompileCall("first", "forward", "eager"), "cuda:3").problem
    first = "ValueError: what failed first"
    assert problem == (first if fails == "behind" else "RuntimeError: CUDA error: an illegal memory access was encountered")
